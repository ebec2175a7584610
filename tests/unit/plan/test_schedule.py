"""How often to save where: against all schedules in turn, SCR's best ones, and drawn failures."""

import itertools
import math
import random
import re
import statistics
from pathlib import Path

import pytest

from outlast.plan import schedule
from outlast.plan.interval import Costs, exact_best_h, exact_wall
from outlast.plan.levels import Levels
from outlast.plan.tiers import TierCosts, intervals_h
from outlast.simulate.traces import read_scr

VECTORS = Path("shared/traces/scr/regressionFiles")
HOUR_S = 3600.0


def tiers_of(*each):
    """(what a save blocks, failures per second, restore), all in seconds."""
    return [
        TierCosts(checkpoint_h=c / HOUR_S, failures_per_h=rate * HOUR_S, restore_h=r / HOUR_S)
        for c, rate, r in each
    ]


def scr(overhead=1.0, times=1.0):
    """SCR's made-up machine; reading back takes as long as saving."""
    costs, per_s = (9.0, 50.0, 438.0 * overhead), (7.78e-6, 5.19e-7, 3.0e-8)
    return tiers_of(*((c, times * rate, c) for c, rate in zip(costs, per_s, strict=True)))


def test_one_place_is_the_exact_model():
    (tier,) = tiers_of((180.0, 1e-4, 240.0))
    found = schedule.best([tier])
    costs = Costs(checkpoint_h=tier.checkpoint_h, restore_h=tier.restore_h)
    assert found.every == (1,)
    assert found.interval_h == pytest.approx(exact_best_h(costs, tier.failures_per_h), rel=1e-4)
    assert found.wall_per_useful == pytest.approx(
        exact_wall(costs, tier.failures_per_h, found.interval_h), rel=1e-9
    )


def test_the_schedule_of_scrs_machine():
    found = schedule.best(scr())
    assert (found.counts, found.every) == ((7, 12), (1, 8, 104))
    assert found.interval_h * HOUR_S == pytest.approx(1524.9, abs=0.5)
    assert 1 / found.wall_per_useful == pytest.approx(0.976769, abs=1e-6)
    alone = schedule.nearest(scr())
    assert alone.counts == (8, 11)
    assert alone.wall_per_useful > found.wall_per_useful


@pytest.mark.parametrize("seed", range(6))
def test_against_all_counts_in_turn(seed):
    drawn = random.Random(seed)
    cost_s, per_s, each = 1.0, 10 ** drawn.uniform(-5.5, -3.5), []
    for _ in range(2 + seed % 2):
        each.append((cost_s, per_s, cost_s * drawn.uniform(0, 3)))
        cost_s *= 10 ** drawn.uniform(-0.2, 1.2)
        per_s *= 10 ** drawn.uniform(-1.5, 0.2)
    tiers = tiers_of(*each)
    found = schedule.best(tiers)
    most = (41, 41) if len(tiers) == 2 else (9, 26)
    around = itertools.product(*(range(count) for count in most[: len(tiers) - 1]))
    walls = [
        schedule.of_counts(tiers, counts, found.interval_h).wall_per_useful for counts in around
    ]
    assert found.wall_per_useful <= min(walls) * (1 + 1e-5)


@pytest.mark.skipif(not VECTORS.is_dir(), reason="the vectors of SCR are not here")
def test_no_schedule_of_scrs_regression_is_better():
    compared = 0
    for path in sorted(VECTORS.glob("maxes.L3.*.data")):
        found = re.search(r"o([\d.]+)\.f([\d.]+)\.data", path.name)
        assert found
        most = max(row["Max Efficency"] for row in read_scr(path))
        ours = 1 / schedule.best(scr(float(found[1]), float(found[2]))).wall_per_useful
        assert ours >= most - 1e-7
        compared += 1
    assert compared == 9


def test_a_place_that_is_dearer_and_no_safer_is_left_out():
    found = schedule.best(tiers_of((9.0, 1e-5, 9.0), (8.0, 1e-6, 9.0)))
    assert found.every == (None, 1)


def test_without_failures_nothing_is_saved_and_nothing_lost():
    assert schedule.best(tiers_of((9.0, 0.0, 9.0), (50.0, 0.0, 50.0))) == schedule.Schedule(
        interval_h=math.inf, counts=(0,), wall_per_useful=1.0
    )
    assert Levels([9.0, 50.0], [0.0, 0.0], [4]).efficiency(math.inf) == 1.0
    saving = Levels([9.0, 50.0], [0.0, 0.0], [4]).efficiency(1000.0)
    assert saving == pytest.approx(5000 / (5000 + 4 * 9 + 50), rel=1e-12)
    rare = schedule.best(tiers_of((9.0, 1e-5, 9.0), (50.0, 0.0, 50.0), (400.0, 1e-8, 400.0)))
    assert rare.every[1] is None


def test_nobody_gets_on_where_failures_never_leave_time():
    found = schedule.best(tiers_of((9.0, 8.0, 9.0), (80.0, 1e-6, 50.0)))
    assert found.wall_per_useful == math.inf


def test_fewer_failures_are_never_worse():
    walls = [schedule.best(scr(times=times)).wall_per_useful for times in (0.5, 1, 2, 10, 50)]
    assert walls == sorted(walls)


def test_whole_numbers_from_the_slowest_place_on():
    tiers = tiers_of((1.0, 1e-4, 0.0), (30.0, 1e-5, 0.0))
    fast_h, slow_h = intervals_h(tiers)
    found = schedule.nearest(tiers)
    assert found.every == (1, round(slow_h / fast_h))
    assert found.interval_h * found.every[1] == pytest.approx(slow_h)


def level_of(save, counts):
    """Where the save of this number goes; level 1 is index 0."""
    each = list(itertools.accumulate((c + 1 for c in counts), lambda a, b: a * b, initial=1))
    return max(k for k, nth in enumerate(each) if save % nth == 0)


def drawn_wall_s(cost_s, per_s, counts, restore_s, interval_s, chance):
    """Wall seconds from one checkpoint of the last level to the next, failure by failure."""
    rate, top, wall_s, done = sum(per_s), len(cost_s) - 1, 0.0, 0
    held = [0] * len(cost_s)  # the newest save that each level or one above it has
    while done < math.prod(c + 1 for c in counts):
        level = level_of(done + 1, counts)
        left_s, strikes_s = interval_s + cost_s[level], chance.expovariate(rate)
        wall_s += min(left_s, strikes_s)
        if strikes_s >= left_s:
            done += 1
            held = [done if k <= level else kept for k, kept in enumerate(held)]
            continue
        (needed,) = chance.choices(range(top + 1), per_s)
        while True:
            source = max(k for k in range(needed, top + 1) if held[k] == held[needed])
            strikes_s = chance.expovariate(rate)
            wall_s += min(restore_s[source], strikes_s)
            if strikes_s >= restore_s[source]:
                break
            (hit,) = chance.choices(range(top + 1), per_s)
            needed = source if hit < source else min(max(hit, source + 1), top)
        done = held[source]
        held = [min(kept, done) for kept in held]
    return wall_s


@pytest.mark.parametrize("counts", [(3, 2), (2, 0), (0, 4)], ids=str)
def test_the_markov_model_against_failures_that_are_drawn(counts):
    # Reading back takes longer or shorter than saving, and half of what is begun fails.
    job = ((10.0, 40.0, 200.0), (6e-4, 2e-4, 4e-5), counts, (25.0, 20.0, 500.0))
    chance, interval_s = random.Random(9), 500.0
    walls_s = [drawn_wall_s(*job, interval_s, chance) for _ in range(1500)]
    mean_s, spread_s = statistics.fmean(walls_s), statistics.stdev(walls_s) / len(walls_s) ** 0.5
    saves = math.prod(c + 1 for c in counts)
    wall_s = saves * interval_s / Levels(*job).efficiency(interval_s)
    assert abs(wall_s - mean_s) < 3 * spread_s < 0.08 * wall_s


def test_where_nothing_gets_on_few_schedules_are_looked_at(monkeypatch):
    asked, of_levels = [], Levels.efficiency
    monkeypatch.setattr(
        Levels, "efficiency", lambda self, at_s: asked.append(at_s) or of_levels(self, at_s)
    )
    hopeless = tiers_of(*((10.0**k, 10.0 ** (3 - k), 1e9) for k in range(5)))
    assert schedule.best(hopeless).wall_per_useful == math.inf
    assert len(asked) < 1500
    asked.clear()
    schedule.best(scr(50, 50))
    assert len(asked) < 400
