"""However a script leaves its session, the end is saved; and goes on as if it had not been left."""

import contextlib
import itertools
import os
import signal
import sys
import time

import pytest
import torch
from floor import SCRIPTS, Job, alone, until
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import outlast
from thorough import examples

SAMPLES, BATCH, STEPS = 36, 4, 20


class Rows(torch.utils.data.Dataset):
    def __init__(self):
        self._rows = torch.arange(SAMPLES * 4, dtype=torch.float32).view(SAMPLES, 4).sin()

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return self._rows[index]


def loader_of(kind):
    if kind == "outlast":
        return outlast.data.Loader(Rows(), global_batch=BATCH, seed=3)
    if kind == "stock":
        return DataLoader(Rows(), batch_size=BATCH, shuffle=True)
    return list(Rows()._rows.split(BATCH))


class Training:
    """A script: two models, an optimizer of each, which steps after every so many batches."""

    def __init__(self, cadences, clears, kind):
        torch.manual_seed(0)
        self.cadences, self.clears = cadences, clears
        self.models = [
            torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Dropout(0.2), torch.nn.Linear(3, 1))
            for _ in cadences
        ]
        self.optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in self.models]
        self.loader = loader_of(kind)

    @property
    def named(self):
        models = {f"model{n}": model for n, model in enumerate(self.models)}
        return models | {f"optimizer{n}": one for n, one in enumerate(self.optimizers)}

    def step(self, number, batch):
        for model, one, cadence in zip(self.models, self.optimizers, self.cadences, strict=True):
            if self.clears != "after" and number % cadence == 0:
                one.zero_grad(set_to_none=self.clears == "before")
            (model(batch).square().mean() / cadence).backward()
            if (number + 1) % cadence == 0:
                one.step()
                if self.clears == "after":
                    one.zero_grad()

    @property
    def state(self):
        states = [one.state_dict()["state"] for one in self.optimizers]
        moments = [value for one in states for slot in one.values() for value in slot.values()]
        parameters = [p.detach() for model in self.models for p in model.parameters()]
        return [*parameters, *moments, torch.get_rng_state()]


class Left(Exception):
    """As good as a kill: nothing is saved."""


def undisturbed(*how):
    """The same without a session: what torch alone does."""
    training = Training(*how)
    if how[-1] == "outlast":
        batches = iter(training.loader)
    else:
        batches = itertools.chain.from_iterable(training.loader for _ in range(STEPS))
    for number, batch in zip(range(STEPS), batches, strict=False):
        training.step(number, batch)
    return training.state


def attempt(job, how, every, at, way):
    training = Training(*how)
    with outlast.session(dir=job, every=every, **training.named) as session:
        held = loop = session.steps(training.loader, until=STEPS)
        if way != "held":
            held = None
        for batch in loop:
            if session.step == at - 1 and way == "top":
                break
            training.step(session.step, batch)
            if session.step + 1 == at:
                if way in ("break", "held"):
                    break
                if way == "return":
                    return training
                if way == "exit":
                    sys.exit(3)
                if way == "raise":
                    raise Left
        del held
    return training


@st.composite
def scripts(draw):
    cadences = draw(st.lists(st.integers(1, 5), min_size=1, max_size=2))
    clears = draw(st.sampled_from(["after", "before", "in place"]))
    kind = draw(st.sampled_from(["outlast", "stock", "list"]))
    ways = st.sampled_from(["break", "held", "return", "exit", "raise", "top"])
    ends = draw(st.lists(st.tuples(st.integers(1, STEPS - 1), ways), min_size=1, max_size=2))
    return (cadences, clears, kind), draw(st.sampled_from(["1 h", "2 steps", "7 steps"])), ends


@given(script=scripts())
@examples(60)
def test_a_run_that_was_left_in_any_way_ends_as_one_that_was_not(tmp_path_factory, script):
    how, every, ends = script
    job = tmp_path_factory.mktemp("left") / "job"
    with pytest.MonkeyPatch.context() as patch:
        alone(patch)
        for at, way in sorted(ends):
            before = Job(job).newest()
            with contextlib.suppress(Left, SystemExit):
                attempt(job, how, every, at, way)
            if way != "raise" and at > before:
                assert Job(job).newest() == (at - 1 if way == "top" else at)
        ended = attempt(job, how, every, STEPS + 9, "break")
    assert Job(job).newest() == STEPS
    for one, other in zip(ended.state, undisturbed(*how), strict=True):
        assert torch.equal(one, other)


def test_what_is_written_past_the_counters_after_the_last_save_is_saved(job, monkeypatch):
    """Whatever has saved the last step, and in whatever way it is changed then."""
    for number, (every, change) in enumerate(itertools.product(("1 h", "4 steps"), CHANGES)):
        model = torch.nn.BatchNorm1d(4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        directory, objects = job / str(number), {"model": model, "optimizer": optimizer}
        with outlast.session(dir=directory, every=every, **objects) as session:
            for _ in session.steps(range(9), until=4):
                pass
            pending = session.save()
            while every == "4 steps" and session._on.engine.committed_step != 4:
                time.sleep(0.01)
            change(model, optimizer)
        assert pending.committed
        expected = [value.clone() for value in model.state_dict().values()]
        model, optimizer = torch.nn.BatchNorm1d(4), torch.optim.SGD(model.parameters(), lr=0.3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        with outlast.session(dir=directory, model=model, optimizer=optimizer) as session:
            assert session.step == 4
        restored = list(model.state_dict().values())
        assert all(map(torch.equal, restored, expected)), (every, change)
        assert optimizer.param_groups[0]["lr"] == (0.01 if change is another_rate else 0.1)


def in_the_middle(model, _):
    model.weight.data[1:3] = 7.0


def by_numpy(model, _):
    model.weight.detach().numpy()[2] = 7.0


def statistics(model, _):
    model(torch.randn(8, 4))


def another_rate(_, optimizer):
    optimizer.param_groups[0]["lr"] = 0.01


CHANGES = [in_the_middle, by_numpy, statistics, another_rate]


def test_nothing_is_written_where_nothing_has_changed(job):
    model = torch.nn.Linear(4, 4)
    for _ in range(2):  # the second one only looks
        with outlast.session(dir=job, every="4 steps", model=model) as session:
            for _ in session.steps(range(9), until=4):
                pass
            while session._on.engine.committed_step != 4:
                time.sleep(0.01)
            model(torch.ones(2, 4))
    assert [event["step"] for event in Job(job).events("commit")] == [4]


def test_a_generator_that_is_left_by_whoever_asks_it(job):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def losses():
        with outlast.session(dir=job, every="1 h", model=model, optimizer=optimizer) as session:
            for row in session.steps(torch.ones(9, 1, 2)):
                loss = model(row).square().sum()
                loss.backward()
                optimizer.step()
                yield loss.item()

    asked = losses()
    for _ in range(3):
        next(asked)
    asked.close()
    assert Job(job).newest() == 3


def test_a_save_that_was_asked_for_and_never_reached_has_ended(job):
    with outlast.session(dir=job, every="1 h", model=torch.nn.Linear(2, 1)) as session:
        for _ in session.steps(range(9)):
            pending = session.save()
            break
    assert not pending.wait()
    assert "over" in pending.error


LEAVES = SCRIPTS / "leaves.py"


def said(process, word):
    (line,) = [line for line in process.out.splitlines() if line.startswith(word)]
    return line.split(maxsplit=1)[1]


def ranks(floor, job, way, code=0):
    started = floor.ranks(2, LEAVES, way, env=Job(job, 2).env)
    for one in started:
        assert one.wait() == code, one.text
    return started


def test_ranks_that_leave_in_the_midst_of_their_gradients_go_on_with_them(floor, tmp_path):
    ranks(floor, tmp_path / "job", "alike")
    assert Job(tmp_path / "job").newest() == 6
    ended = ranks(floor, tmp_path / "job", "end")
    assert "resumed from step 6" in ended[0].err
    calm = ranks(floor, tmp_path / "calm", "end")
    assert [said(one, "ended") for one in ended] == [said(one, "ended") for one in calm]


def test_ranks_that_end_at_different_steps_are_told(floor, tmp_path):
    started = ranks(floor, tmp_path / "job", "apart", code=2)
    (line,) = started[0].err.splitlines()[-1:]
    assert "left their loops at different steps (rank 0 at 12, rank 1 at 4)" in line
    assert "Have all ranks decide alike" in line


def test_nobody_waits_at_the_end_for_a_rank_that_failed(floor, tmp_path):
    first, second = floor.ranks(2, LEAVES, "gone", env=Job(tmp_path / "job", 2).env)
    assert second.wait() == 1
    assert first.wait() == 77
    assert "rank 1 was ended by ValueError" in first.err.splitlines()[-1]


def test_interrupted_all_ranks_stop_at_one_step_and_have_it(floor, tmp_path):
    job = Job(tmp_path / "job", 2)
    started = floor.ranks(2, LEAVES, "waits", env=job.env)
    until(lambda: all("begun" in one.out for one in started), "both", running=started[0])
    time.sleep(0.5)
    os.kill(int(said(started[1], "begun")), signal.SIGINT)
    codes = [one.wait() for one in started]
    assert 0 not in codes, started[0].text
    assert f"stopped after step {job.newest()}, which is committed" in started[0].err
    assert "Traceback" not in started[0].err + started[1].err
    assert job.newest() > 0


def test_a_second_interrupt_leaves_a_step_that_does_not_end(floor, tmp_path):
    job = Job(tmp_path / "job")
    (one,) = floor.ranks(1, LEAVES, "hangs", env=job.env)
    until(lambda: "begun" in one.out, "it", running=one)
    time.sleep(0.5)
    one.signal(signal.SIGINT)
    until(lambda: "again to stop at once" in one.err, "the first", running=one)
    one.signal(signal.SIGINT)
    assert one.wait() != 0
    assert job.newest() == 0
