"""All faults have names, promises and reasons; a seed draws the same ones again."""

import random
from types import SimpleNamespace

import pytest

from outlast.drill.faults.catalogue import FAULTS, Bounds, draw, planned
from outlast.drill.faults.fault import FOR_GOOD, MayLose, Promise, Struck
from outlast.drill.faults.storage import FullStorage

BOUNDS = Bounds(num_ranks=4, num_machines=3, first_step=10, last_step=90)


def target(machines=3, *, cables=False):
    """A job of which only what ``why_not`` looks at is there."""
    cable = object() if cables else None
    return SimpleNamespace(
        machines=[SimpleNamespace(number=n, name=f"m{n}", cable=cable) for n in range(machines)],
        tiers={},
    )


def words(plans):
    return [(plan.describe(), vars(plan.fault).get("value"), plan.fault.lasts_s) for plan in plans]


def test_the_list():
    assert len(FAULTS) >= 30
    for name, entry in FAULTS.items():
        assert entry.name == name
        assert entry.what[0] != " "
        assert not entry.what.endswith(".")
        assert str(entry.promise)
        assert planned(name, 0, 0, BOUNDS).fault.name == name


def test_a_fault_that_is_drawn_is_within_the_bounds():
    for name in FAULTS:
        for number in range(50):
            plan = planned(name, 7, number, BOUNDS)
            assert 10 <= plan.when.step <= 90
            assert 0 <= plan.when.fraction <= 1
            assert plan.fault.lasts_s > 0
            numbered = getattr(plan.fault, "number", 0)
            assert getattr(plan.fault, "rank", 0) in range(4)
            assert numbered is None or numbered in range(4)


def test_the_same_seed_draws_the_same_and_another_one_others():
    names = [name for name in FAULTS if "storage" not in name and "network" not in name]
    once, again = (words(draw(5, 40, BOUNDS, target(), names)) for _ in range(2))
    assert once == again
    assert words(draw(6, 40, BOUNDS, target(), names)) != once
    assert words(draw(5, 10, BOUNDS, target(), names)) == once[:10]


def test_what_one_draws_changes_nothing_for_the_next(monkeypatch):
    alone = planned("kill-worker", 3, 1, BOUNDS).describe()
    planned("notice", 3, 0, BOUNDS)
    random.seed(1)
    assert planned("kill-worker", 3, 1, BOUNDS).describe() == alone


def test_what_cannot_be_done_is_not_drawn():
    names = ["cut-network", "kill-worker"]  # without cables the first one cannot be
    assert {plan.fault.name for plan in draw(1, 20, BOUNDS, target(1), names)} == {"kill-worker"}
    with pytest.raises(ValueError, match="none of these faults"):
        draw(1, 1, BOUNDS, target(1), ["cut-network"])


def test_machines_that_are_not_there_are_said():
    for name in ("kill-machine", "kill-agent", "kill-keeper", "notice", "sigterm", "cut-network"):
        fault = planned(name, 0, 0, Bounds(2, 1, 1, 1)).fault
        fault.number = 4
        assert fault.why_not(target(1)) == (
            "the job has one machine, and this is for number 4, counted from 0: give it more"
        )


def test_promises_in_words():
    assert str(Promise()) == "loses no step; ends as if nothing had been"
    drained = Promise(exit_codes=(75,), loses=MayLose.COMMIT)
    assert drained.is_started_again
    assert str(drained).startswith("loses the steps since the newest checkpoint at most; goes on")
    refused = Promise(exit_codes=(78,), refuses=True)
    assert not refused.is_started_again
    assert str(refused) == "refuses to go on, with exit code 78"
    assert "need not end with equal bits" in str(planned("nan", 0, 0, BOUNDS).fault.promise)


def test_what_heals_by_itself_has_a_length():
    assert planned("kill-worker", 0, 0, BOUNDS).fault.lasts_s == FOR_GOOD
    assert planned("kill-agent", 0, 0, BOUNDS).fault.lasts_s < FOR_GOOD
    assert Struck(what="w", t=1.0, last_step=2, event="").event == ""


def test_a_full_storage_that_was_never_mounted_is_left_alone(tmp_path):
    fault = FullStorage()
    for _ in range(2):
        fault.heal(SimpleNamespace(directory=tmp_path))
        fault.release(SimpleNamespace(directory=tmp_path))
    assert tmp_path.is_dir()
