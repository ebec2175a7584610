"""The runtime's ``auto`` in storms of failures, on one clock, against fixed intervals."""

import random

import pytest

from outlast.planner.job import JobRun, JobSetup, Level, MachineLoss
from outlast.policy.cadence import Auto, EverySeconds
from thorough import ALL

HOUR_S = 3600.0
FIXED_S = (0.3, 0.6, 1.2, 2.5, 5.0, 15.0, 60.0, 240.0, 1000.0)
SAVES_MAX = 12_000  # of a run: more would be dear to count, and far from the best


def poisson(chance, mean_s, begin_s, end_s):
    at_s = begin_s + chance.expovariate(1 / mean_s)
    while at_s < end_s:
        yield at_s
        at_s += chance.expovariate(1 / mean_s)


def storm(every_s):
    """Nothing but a storm, for ten minutes."""
    return list(poisson(random.Random(1), every_s, 0.0, 600.0)), 600.0


def weather():
    """Two days: a failure in 20 h, and a storm of seven minutes every 12."""
    chance, end_s = random.Random(2), 48 * HOUR_S
    found = list(poisson(chance, 20 * HOUR_S, 0.0, end_s))
    for begin_s in poisson(chance, 12 * HOUR_S, 0.0, end_s):
        found += poisson(chance, 8.0, begin_s, begin_s + 420.0)
    return sorted(found), end_s


def even():
    """A failure in five hours, for days; each has thousands of saves where one costs little."""
    end_s = (336 if ALL else 72) * HOUR_S
    return list(poisson(random.Random(3), 5 * HOUR_S, 0.0, end_s)), end_s


def useful(case, cadence, cost_s, restore_s):
    moments_s, horizon_s = case
    setup = JobSetup(levels=(Level(cost_s=cost_s, restore_s=restore_s),), horizon_s=horizon_s)
    losses = [MachineLoss(at_s=at_s, machines=(), how="reset", back_s=0.0) for at_s in moments_s]
    outcome = JobRun(setup, cadence, losses, random.Random(0)).run()
    print(f"{type(cadence).__name__}: {outcome.useful_s / outcome.wall_s:.4f}", outcome.parts)
    return outcome.useful_s / outcome.wall_s


@pytest.mark.parametrize(
    ("case", "cost_s", "restore_s", "least", "beside_best"),
    [
        (storm(8.0), 0.01, 0.3, 0.80, 0.90),
        (storm(8.0), 0.5, 0.5, 0.45, 0.75),
        (storm(2.0), 0.01, 0.3, 0.60, 0.85),
        (weather(), 0.01, 0.3, 0.997, 0.999),
        (weather(), 0.5, 0.5, 0.990, 1.0),
        (even(), 0.01, 0.3, 0.998, 0.998),
        (even(), 0.5, 0.5, 0.990, 0.998),
    ],
)
def test_auto_gets_on_in_a_storm_and_loses_nothing_in_calm(
    case, cost_s, restore_s, least, beside_best
):
    every_s = [one for one in FIXED_S if case[1] / one < SAVES_MAX]
    fixed = max(useful(case, EverySeconds(one, 0.0), cost_s, restore_s) for one in every_s)
    auto = useful(case, Auto(0.0), cost_s, restore_s)
    assert auto > least
    assert auto > beside_best * fixed  # which nobody knows beforehand
