"""Several levels: the Markov model and the additive one against SCR's own regression vectors."""

import re
from pathlib import Path

import pytest

from outlast.plan.interval import Costs, exact_wall
from outlast.plan.levels import Levels
from outlast.plan.tiers import TierCosts, wall_per_useful
from outlast.simulate.traces import read_scr

VECTORS = Path("shared/traces/scr/regressionFiles")
COSTS_S = (9.0, 50.0, 438.0)
PER_S = (7.78e-6, 5.19e-7, 3.0e-8)
HOUR_S = 3600.0


def of(overhead, times, counts):
    """SCR's made-up machine: the last level's cost, and all rates, times a factor."""
    cost_s = (*COSTS_S[:2], overhead * COSTS_S[2])
    return Levels(cost_s, [times * rate for rate in PER_S], counts)


def test_with_one_level_it_is_the_exact_model():
    # But that a failure while reading back needs no new detection here, and none there.
    levels = Levels([300.0], [1e-4], [])
    costs = Costs(checkpoint_h=300 / HOUR_S, restore_h=300 / HOUR_S)
    for interval_s in (500.0, 2500.0, 20_000.0):
        exact = exact_wall(costs, 1e-4 * HOUR_S, interval_s / HOUR_S)
        assert levels.efficiency(interval_s) == pytest.approx(1 / exact, rel=1e-9)


def test_levels_that_never_fail_cost_only_their_saves():
    levels = Levels([9.0, 50.0], [1e-12, 1e-12], [4])
    # Four of five checkpoints are of level 1.
    assert levels.efficiency(1000.0) == pytest.approx(5000 / (5000 + 4 * 9 + 50), rel=1e-6)


def test_what_no_float_can_hold_is_no_progress():
    assert Levels([9.0], [1.0], []).efficiency(5000.0) == 0.0
    assert of(50, 50, (1000, 1000)).efficiency(40_000.0) < 1e-6
    assert of(1, 1, (0, 0)).efficiency(0.0) == 0.0


def test_a_vector_of_scr_without_the_folder():
    # The published first row: 0.913657 at 10,000 s with level 3 alone; 0.961311 at 2,500 s.
    for counts, best_s, most in (((0, 0), 10_000.0, 0.913657083774), ((0, 200), 2500.0, 0.9613106)):
        shares = {at: of(1, 1, counts).efficiency(at) for at in range(500, 40_001, 500)}
        assert max(shares, key=shares.__getitem__) == best_s
        assert shares[best_s] == pytest.approx(most, abs=1e-7)


def vectors():
    for path in sorted(VECTORS.glob("maxes.L3.*.data")):
        found = re.search(r"o([\d.]+)\.f([\d.]+)\.data", path.name)
        assert found
        for row in read_scr(path):
            yield float(found[1]), float(found[2]), row


@pytest.mark.skipif(not VECTORS.is_dir(), reason="the vectors of SCR are not here")
def test_every_vector_of_scr_within_a_millionth():
    compared = 0
    for overhead, times, row in vectors():
        counts = (int(row["L1"]), int(row["L2"]))
        best_s, most = row["Max Time"], row["Max Efficency"]
        if best_s:
            efficiency = of(overhead, times, counts).efficiency(best_s)
            # Below 1e-6 SCR's own program calls some probabilities nothing.
            assert efficiency == pytest.approx(most, abs=1e-9 if most > 1e-6 else 2e-5)
            compared += 1
    assert compared == 205


@pytest.mark.skipif(not VECTORS.is_dir(), reason="the vectors of SCR are not here")
def test_the_additive_model_within_three_thousandths_where_little_is_lost():
    worst, compared = 0.0, 0
    for overhead, times, row in vectors():
        if row["Max Efficency"] > 0.86 and overhead <= 2:
            worst = max(worst, abs(additive(overhead, times, row) - row["Max Efficency"]))
            compared += 1
    assert compared == 35
    assert worst < 0.003


def additive(overhead, times, row):
    cost_s = (*COSTS_S[:2], overhead * COSTS_S[2])
    counts = (int(row["L1"]), int(row["L2"]))
    interval_s = [row["Max Time"]]
    interval_s += [interval_s[0] * (counts[0] + 1)]
    interval_s += [interval_s[1] * (counts[1] + 1)]
    tiers, intervals_h, per_s = [], [], 0.0
    for level in range(3):
        per_s += times * PER_S[level]  # what a level that is not there would have survived
        if level < 2 and not counts[level]:
            continue
        own = 1 - interval_s[level] / interval_s[level + 1] if level < 2 else 1.0
        tiers.append(
            TierCosts(
                checkpoint_h=own * cost_s[level] / HOUR_S,  # others are of a higher level
                failures_per_h=per_s * HOUR_S,
                restore_h=cost_s[level] / HOUR_S,
            )
        )
        intervals_h.append(interval_s[level] / HOUR_S)
        per_s = 0.0
    return 1 / wall_per_useful(tiers, intervals_h)
