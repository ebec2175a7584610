"""Keeping each step: what is waited for, what is said of it and by whom, what it has cost."""

from types import SimpleNamespace

import pytest

from outlast import config
from outlast.errors import ConfigError, StorageError
from outlast.training import each_step
from outlast.training.each_step import FIRST_STEPS, EachStep, usable
from outlast.training.sharing import StepKept


class Made:
    """What an attempt's keeping of steps stands on, as told by the test."""

    def __init__(self, monkeypatch, rank=0, world=2, local_rank=0, local=1, **settings):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        self.said, self.events, self.taken, self.waited, self.counted = [], [], [], [], []
        self.ends = []  # of the next ones
        self.limits, self.size = [], 1_000_000
        monkeypatch.setattr(each_step, "say", self.said.append)
        chosen = config.load({"checkpoint.each_step": True, **settings}, environ={})
        books = SimpleNamespace(
            link=SimpleNamespace(rank=rank, world_size=world),
            samples=SimpleNamespace(stalled=lambda _: None),
            ledger=SimpleNamespace(append=lambda name, **fields: self.events.append(name)),
        )
        engine = SimpleNamespace(
            line=SimpleNamespace(wait_for_keeper=lambda _: True),
            count_from=self.counted.append,
            before_optimizer=lambda: None,
            wait_until_kept=self._wait,
            memory_bytes=7_000_000,
        )
        saving = SimpleNamespace(keep=self._keep)
        self.of = EachStep(chosen, books, SimpleNamespace(engine=engine), saving)
        self.of.begin(0, others_live=False)

    def _keep(self, step, timeout_s):
        self.taken.append(step)
        return self.size

    def _wait(self, timeout_s, *, copied):
        self.waited.append(copied)
        self.limits.append(timeout_s)
        end = self.ends.pop(0) if self.ends else StepKept()
        if isinstance(end, Exception):
            raise end
        return end


def test_each_new_step_is_kept_once_and_numbered_by_its_step(monkeypatch):
    made = Made(monkeypatch)
    for step in (0, 1, 1, 2):
        made.of.keep(step)
    assert made.taken == [1, 2]
    assert made.counted == [1, 2, 2, 3]
    assert made.waited == [True, True]
    assert not made.said


@pytest.mark.parametrize(("others_live", "expected"), [(False, [5, 6]), (True, [6])])
def test_what_an_attempt_begins_with_is_kept_where_all_have_read_it(
    monkeypatch, others_live, expected
):
    """Of those who live on some may be in the midst of the next step, and keep nothing."""
    made = Made(monkeypatch)
    made.of.begin(5, others_live=others_live)
    for step in (5, 6):
        made.of.keep(step)
    assert made.taken == expected


def test_a_void_one_is_taken_again_by_all_and_not_for_ever(monkeypatch):
    made = Made(monkeypatch)
    made.ends = [StepKept("differs", void=True)] * 2
    made.of.keep(1)
    assert made.taken == [1, 1, 1]
    assert not made.said
    made.ends = [StepKept("differs", void=True)] * 99
    made.of.keep(2)
    assert made.taken.count(2) == each_step.MAX_TRIES
    assert "step 2 is not kept: differs" in made.said[0]


@pytest.mark.parametrize(
    ("rank", "local_rank", "local", "is_own", "speaks"),
    [
        (0, 0, 2, False, True),
        (1, 1, 2, False, False),
        (2, 0, 2, False, False),
        (2, 0, 2, True, True),
        (3, 1, 2, True, False),
    ],
)
def test_what_all_hear_rank_0_says_and_what_is_a_machine_s_own_that_machine(
    monkeypatch, rank, local_rank, local, is_own, speaks
):
    made = Made(monkeypatch, rank, 4, local_rank, local)
    made.ends = [StepKept("late", is_own=is_own), StepKept("late", is_own=is_own)]
    for step in (1, 2, 3):
        made.of.keep(step)
    assert made.events == ["not_kept", "not_kept"] * speaks
    assert len(made.said) == 2 * speaks, "the first of several, and that they are kept again"
    if speaks:
        assert "step 1 is not kept: late; training goes on" in made.said[0]
        assert made.said[1] == "step 3 is kept: each step is again (none was since 1)"
    assert made.waited == [True] * 3, "each is waited for anew"


def test_a_state_that_cannot_be_saved_is_said_and_training_goes_on(monkeypatch):
    made = Made(monkeypatch)

    def keep(step, timeout_s):
        raise StorageError("no memory was free for it")

    made.of._saving.keep = keep
    made.of.keep(1)
    assert "step 1 is not kept: no memory was free for it" in made.said[0]


def test_what_the_attempt_s_end_broke_is_its_end(monkeypatch):
    made = Made(monkeypatch)

    class Over(Exception):
        pass

    def keep(step, timeout_s):
        monkeypatch.setattr(each_step.over, "raise_if_over", end)
        raise ConnectionResetError("the keeper is gone")

    def end():
        raise Over

    made.of._saving.keep = keep
    with pytest.raises(Over):
        made.of.keep(1)
    assert not made.said
    assert not made.events


def test_also_the_first_step_has_the_time_of_its_size_and_each_try_its_own(monkeypatch):
    made = Made(monkeypatch)
    made.size = int(1000 * each_step.SLOW_BYTES)
    made.ends = [StepKept("differs", void=True)]
    made.of.keep(1)
    assert len(made.limits) == 2
    assert min(made.limits) > 900


@pytest.mark.parametrize(
    ("settings", "world", "copied", "where"),
    [
        ({}, 2, True, "here and on 1 more"),
        ({"peer.replicas": 0}, 2, False, "here alone"),
        ({}, 1, False, "here alone"),
    ],
)
def test_the_cost_is_said_once_it_is_known(monkeypatch, settings, world, copied, where):
    made = Made(monkeypatch, world=world, **settings)
    for step in range(1, 2 * FIRST_STEPS + 3):
        made.of.keep(step)
    assert set(made.waited) == {copied}
    assert made.events == ["each_step", "each_step"]
    (said,) = made.said
    assert said.startswith(f"each step is kept, {where}: 1.0 MB a step and machine, up to 7 MB of")


def test_without_the_setting_nothing_is_kept(monkeypatch):
    made = Made(monkeypatch, **{"checkpoint.each_step": False})
    made.of.keep(1)
    assert not made.taken


def test_without_outlast_run_it_is_refused_in_one_line(monkeypatch):
    settings = config.load({"checkpoint.each_step": True}, environ={})
    monkeypatch.delenv("OUTLAST_STORE", raising=False)
    with pytest.raises(ConfigError) as refused:
        usable(settings)
    assert str(refused.value) == (
        "checkpoint.each_step needs outlast run: its keeper holds what is kept and outlives the "
        "workers; start with it, or take the setting away"
    )
    monkeypatch.setenv("OUTLAST_STORE", "h:1")
    assert usable(settings) is settings
