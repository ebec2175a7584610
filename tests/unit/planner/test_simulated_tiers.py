"""Tiers that decide for themselves, in the simulator: against each N that could have been set."""

import random

import pytest

from outlast.planner.job import JobRun, JobSetup, Level, MachineLoss
from outlast.policy import retention
from outlast.policy.cadence import Auto
from thorough import ALL

MACHINES = 16
DAYS_S = 4 * 86_400.0
SEEDS = 3 if ALL else 2


def losses(seed, one_per_h, all_per_h):
    """Single machines, and now and then all of them; another is there at once."""
    chance, found = random.Random(seed), []
    for per_h, takes_all in ((one_per_h, False), (all_per_h, True)):
        at_s = chance.expovariate(per_h / 3600)
        while at_s < DAYS_S:
            gone = range(MACHINES) if takes_all else [chance.randrange(MACHINES)]
            found.append(MachineLoss(at_s, tuple(gone), "reset", 0.0))
            at_s += chance.expovariate(per_h / 3600)
    return sorted(found, key=lambda loss: loss.at_s)


def useful(every, *, mode, cost_s, one_per_h=1 / 3, all_per_h=1 / 30):
    memory = Level(name="memory", cost_s=1.0, restore_s=10.0, survives="holders", keep=2)
    far = Level(name="far", cost_s=cost_s, lag_s=60.0, restore_s=120.0, every=every)
    setup = JobSetup(
        machines=MACHINES, levels=(memory, far), mode=mode, horizon_s=DAYS_S, detect_s=30.0
    )
    shares = []
    for seed in range(SEEDS):
        chance = random.Random(seed)
        run = JobRun(setup, Auto(0.0), losses(seed, one_per_h, all_per_h), chance)
        outcome = run.run()
        shares.append(outcome.useful_s / outcome.wall_s)
    return sum(shares) / len(shares)


@pytest.mark.parametrize("cost_s", [5.0, 60.0])
def test_it_is_about_as_good_as_the_best_that_could_have_been_set(cost_s):
    auto = useful(None, mode="peer", cost_s=cost_s)
    each, *fixed = [useful(every, mode="peer", cost_s=cost_s) for every in (1, 4, 8, 16, 32)]
    assert auto > each + (0.005 if cost_s < 10 else 0.03)
    assert auto > 0.985 * max(fixed)


def test_a_belief_that_does_not_hold_is_given_up(monkeypatch):
    """What holders keep is lost each time: after some losses the far tier takes more."""
    monkeypatch.setattr(
        retention, "holders", lambda machines, count: {one.node: () for one in machines}
    )
    auto = useful(None, mode="rigid", cost_s=30.0)
    each, seldom = (useful(every, mode="rigid", cost_s=30.0) for every in (1, 32))
    assert auto > 0.95 * each
    assert auto > seldom
