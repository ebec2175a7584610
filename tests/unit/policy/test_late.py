"""Who is late, what is shared out anew, and for how long anybody waits."""

import itertools
import random

import hypothesis.strategies as st
import pytest
from hypothesis import given

from outlast.policy.late import (
    LEAST,
    PROBE_EVERY,
    PROBE_STEPS,
    WARM_UP,
    LateJudge,
    balanced,
    longest,
)

costs_st = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=6)


class Fleet:
    """Workers with a cost of a shard each, and judges that all hear the same."""

    def __init__(self, costs, counts, answer="move", factor=1.5):
        self.costs, self.counts, self.answer = list(costs), list(counts), answer
        self.judges = [LateJudge(counts, answer=answer, factor=factor) for _ in costs]
        self.rng = random.Random(1)
        self.steps = 0

    def step(self, noise=0.0):
        """One step; the change that all decide behind it, for the next one."""
        made, seconds = [], []
        self.steps += 1
        for rank, (usual, count) in enumerate(zip(self.costs, self.counts, strict=True)):
            cost = usual * (1 + noise * self.rng.random())
            limit_s = self.judges[rank].limit_s(rank) if self.answer == "drop" else None
            num = count
            if limit_s is not None:
                num = max((one for one in range(1, count + 1) if one * cost <= limit_s), default=1)
            made.append(num)
            seconds.append(num * cost)
        for judge in self.judges:
            judge.see(seconds, made)
        self.made, self.longest_s = made, max(seconds)
        if self.answer == "drop":
            return None
        changes = [judge.change() for judge in self.judges]
        assert all(change == changes[0] for change in changes)
        if changes[0] is not None:
            self.counts = list(changes[0].counts)
        return changes[0]

    def until_change(self, most=400, **options):
        for _ in range(most):
            change = self.step(**options)
            if change is not None:
                return change
        raise AssertionError("nothing has changed")


@given(st.integers(1, 24), costs_st)
def test_shares_are_the_best_there_are(num_shards, costs):
    counts = balanced(num_shards, costs)
    assert sum(counts) == num_shards
    # No other counts are shorter: whoever ends last could give its last shard to nobody.
    end = longest(counts, costs)
    assert all((count + 1) * cost >= end for count, cost in zip(counts, costs, strict=True))
    if num_shards <= 8 and len(costs) <= 3:
        every = itertools.product(range(num_shards + 1), repeat=len(costs))
        best = min(longest(one, costs) for one in every if sum(one) == num_shards)
        assert end == pytest.approx(best)


def test_a_late_workers_shards_go_to_the_others_and_come_back():
    fleet = Fleet([1, 3, 1, 1], [2, 2, 2, 2])
    change = fleet.until_change()
    assert (change.late, change.factors, change.back) == ((1,), (3.0,), ())
    assert change.counts == (3, 1, 2, 2)
    assert fleet.steps == WARM_UP + LEAST
    fleet.step()
    assert fleet.longest_s == 3.0  # 6 without
    for _ in range(200):
        assert fleet.step(noise=0.2) is None  # and stays so
    fleet.costs[1] = 1
    change = fleet.until_change()
    assert (change.late, change.back, change.counts) == ((), (1,), (2, 2, 2, 2))
    fleet.costs[1] = 3  # once more
    assert fleet.until_change().late == (1,)


def test_two_workers_are_enough_and_the_quick_one_is_not_late():
    change = Fleet([1, 2.5], [4, 4]).until_change()
    assert (change.late, change.counts) == ((1,), (6, 2))


def test_several_may_be_late_by_different_factors():
    fleet = Fleet([1, 3, 1, 6, 1, 1], [4] * 6)
    change = fleet.until_change()
    assert change.late == (1, 3)
    assert longest(change.counts, fleet.costs) == 6.0


def test_noise_and_one_long_pause_move_nothing():
    fleet = Fleet([1, 1, 1.1, 1], [2, 2, 2, 2])
    for number in range(300):
        fleet.costs[1] = 50 if number % 40 == 20 else 1
        assert fleet.step(noise=0.3) is None


def test_what_gains_nothing_is_left_as_it_is():
    fleet = Fleet([1, 1.6, 1, 1], [1, 1, 1, 1])  # somebody would have two, and end later
    assert all(fleet.step() is None for _ in range(50))


def test_who_has_no_shard_left_is_asked_now_and_then():
    fleet = Fleet([1, 20, 1], [4, 4, 4])
    assert fleet.until_change().counts == (6, 0, 6)
    began = fleet.steps
    probe = fleet.until_change()
    assert (probe.probes, probe.counts) == ((1,), (5, 1, 6))
    assert fleet.steps - began == PROBE_EVERY
    after = fleet.until_change()
    assert (after.counts, after.probes, after.late) == ((6, 0, 6), (), (1,))
    assert fleet.steps - began == PROBE_EVERY + PROBE_STEPS
    began = fleet.steps
    fleet.costs[1] = 1
    assert fleet.until_change().probes == (1,)
    assert fleet.steps - began == 2 * PROBE_EVERY
    back = fleet.until_change()
    assert (back.counts, back.back, back.late) == ((4, 4, 4), (1,), ())


def test_who_needs_a_shard_keeps_one():
    assert balanced(12, [1, 20, 1], least=1) == (6, 1, 5)
    assert balanced(2, [1, 1, 9], least=1) == (1, 1, 0)
    fleet = Fleet([1, 20, 1], [4, 4, 4])
    for judge in fleet.judges:
        judge.least = 1
    assert fleet.until_change().counts == (6, 1, 5)


def test_times_of_shares_that_are_not_in_force_count_for_nothing():
    judge = LateJudge((2, 2), answer="move", factor=1.5)
    for _ in range(WARM_UP + 20):
        judge.see([2.0, 40.0], [3, 1])
        assert judge.change() is None


def test_shares_that_were_left_from_before_go_back_where_nobody_is_late():
    judge = LateJudge((4, 4), answer="move", factor=1.5, counts=(7, 1))
    for _ in range(WARM_UP + LEAST - 1):
        judge.see([7.0, 1.0], [7, 1])
        assert judge.change() is None
    judge.see([7.0, 1.0], [7, 1])
    assert judge.change().counts == (4, 4)


def test_more_workers_than_shards_and_times_that_are_none():
    judge = LateJudge((0, 1, 0, 1), answer="move", factor=1.5)
    for _ in range(20):
        judge.see([0.0, 1.0, 0.0, float("nan")], [0, 1, 0, 1])
        assert judge.change() is None


def test_nobody_waits_longer_than_the_limit_and_each_late_worker_is_cut_short():
    fleet = Fleet([1, 1, 1, 1], [4, 4, 4, 4], answer="drop")
    for _ in range(WARM_UP + LEAST):
        assert fleet.judges[0].limit_s(0) is None
        fleet.step()
    assert fleet.judges[0].limit_s(0) == pytest.approx(6.0)
    for late in (1, 3, 0, 1):  # one after the other, and one that was late before
        fleet.costs = [3 if rank == late else 1 for rank in range(4)]
        for _ in range(20):
            fleet.step()
            assert fleet.made == [2 if rank == late else 4 for rank in range(4)]
            assert fleet.longest_s == 6.0
    fleet.costs = [1, 9, 9, 1]
    fleet.step()
    assert fleet.made == [4, 1, 1, 4]  # the first one always
    for _ in range(20):
        fleet.step()
    assert fleet.made == [4, 1, 1, 4]


def test_a_job_that_is_slower_as_a_whole_has_another_limit_soon():
    fleet = Fleet([1, 1, 1], [4, 4, 4], answer="drop")
    for _ in range(20):
        fleet.step()
    fleet.costs = [4, 4, 4]
    for _ in range(LEAST):
        fleet.step()
    fleet.step()
    assert fleet.made == [4, 4, 4]
