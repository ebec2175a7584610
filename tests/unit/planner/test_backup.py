"""Workers that nobody waits for, and redundancy in the data: the formulas."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.planner.backup import (
    Redundancy,
    backup_step_s,
    best_backups,
    best_redundancy,
    harmonic,
)
from outlast.policy.interval import Costs
from thorough import examples

COSTS = Costs(checkpoint_h=1 / 60, restore_h=1.0)


@pytest.mark.parametrize(("needed", "backups"), [(1, 0), (8, 0), (7, 1), (96, 4)])
def test_a_step_is_the_mean_of_the_nth_worker(needed, backups):
    chance = np.random.default_rng(1)
    times = 2.0 + chance.exponential(0.5, (40_000, needed + backups))
    nth = np.sort(times, axis=1)[:, needed - 1]
    expected = backup_step_s(needed, backups, common_s=2.0, tail_s=0.5)
    assert nth.mean() == pytest.approx(expected, abs=5 * nth.std() / 200)


def test_96_and_4_are_the_best_of_100():
    # As Chen et al. found; with a tail of 4.8 to 6.2 % of what all take alike.
    assert [best_backups(100, common_s=1.0, tail_s=tail) for tail in (0.05, 0.055, 0.06)] == [4] * 3
    assert (
        best_backups(100, common_s=1.0, tail_s=0.04)
        < 4
        < best_backups(100, common_s=1.0, tail_s=0.07)
    )
    assert best_backups(100, common_s=1.0, tail_s=0.0) == 0


@examples(50)
@given(needed=st.integers(1, 200), backups=st.integers(0, 50), tail=st.floats(0, 5))
def test_another_backup_never_slows_a_step(needed, backups, tail):
    one, more = (
        backup_step_s(needed, count, common_s=1.0, tail_s=tail) for count in (backups, backups + 1)
    )
    assert 1.0 <= more <= one + 1e-12
    assert harmonic(needed) >= 1


def test_losses_that_are_masked_are_those_of_a_draw():
    groups, copies, chance = 200, 4, np.random.default_rng(2)
    held = (np.arange(groups)[:, None] + np.array([0, 1, 3, 7])) % groups  # no two share two
    counts = []
    for _ in range(400):
        order = chance.permutation(groups)
        gone_at = np.empty(groups, dtype=int)
        gone_at[order] = np.arange(groups)
        lost_at = np.zeros(groups, dtype=int)
        np.maximum.at(lost_at, held.ravel(), np.repeat(gone_at, copies))
        counts.append(lost_at.min())
    assert Redundancy(groups=groups, copies=copies).masked == pytest.approx(
        np.mean(counts), rel=0.05
    )


@examples(50)
@given(groups=st.integers(4, 500), copies=st.integers(2, 30))
def test_stacking_costs_at_most_replication(groups, copies):
    copies = min(copies, groups)
    stacked = Redundancy(groups=groups, copies=copies)
    assert 1 <= stacked.work <= copies
    assert Redundancy(groups=groups, copies=copies, is_stacked=False).work == copies


def test_the_best_is_no_worse_than_its_neighbours():
    best = best_redundancy(600, COSTS, 5 / 60, is_stacked=True)
    times = [
        Redundancy(groups=600, copies=best.copies + step).time_ratio(COSTS, 5 / 60)
        for step in (-1, 0, 1)
    ]
    assert min(times) == times[1]
