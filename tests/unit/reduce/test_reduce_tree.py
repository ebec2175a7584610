"""One tree over the shards, whoever computes which part of it."""

import itertools
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.data.order import held
from outlast.reduce.exchange import Fold, ReductionPlan, cover, cut, folds

SHARDS = range(1, 17)


def reference(first, stop, num_shards):
    """The brackets of the tree, as nested pairs."""
    if stop - first == 1:
        return first
    left, right = cut((first, stop), num_shards)
    return reference(*left, num_shards), reference(*right, num_shards)


def pairs():
    """A fold that writes its brackets down instead of adding."""

    def add(left, right):
        left[:] = [(left[0], right[0])]

    return Fold(add)


def bracketed(leaves, merges):
    fold = pairs()
    for leaf, count in zip(leaves, merges, strict=True):
        fold.push([leaf], count)
    return fold.pop()[0]


def sums(shares, num_shards):
    """What workers with these shares come to together, in brackets."""
    nodes = [node for share in shares for node in cover(share, num_shards)]
    totals = []
    for first, stop in nodes:
        leaves = [(shard, shard + 1) for shard in range(first, stop)]
        totals.append(bracketed(range(first, stop), folds(leaves, (first, stop), num_shards)))
    return bracketed(totals, folds(nodes, (0, num_shards), num_shards))


@pytest.mark.parametrize("num_shards", SHARDS)
def test_all_ways_to_share_them_come_to_the_same_brackets(num_shards):
    expected = reference(0, num_shards, num_shards)
    for count in range(num_shards):
        # All at 12 and below; above, those with few cuts and a sample of the others.
        ways = itertools.combinations(range(1, num_shards), count)
        for ends in itertools.islice(ways, 400):
            edges = [0, *ends, num_shards]
            shares = [range(*edge) for edge in itertools.pairwise(edges)]
            assert sums(shares, num_shards) == expected, shares


@given(st.integers(1, 200), st.lists(st.integers(0, 200), max_size=12))
def test_any_shares_of_many_shards(num_shards, ends):
    edges = [0, *sorted(min(end, num_shards) for end in ends), num_shards]  # empty ones too
    shares = [range(*edge) for edge in itertools.pairwise(edges)]
    assert sums(shares, num_shards) == reference(0, num_shards, num_shards)


@given(st.integers(1, 300), st.integers(1, 40))
def test_shares_follow_each_other_and_differ_by_one_at_most(num_shards, world_size):
    shares = [held(num_shards, rank, world_size) for rank in range(world_size)]
    assert [shard for share in shares for shard in share] == list(range(num_shards))
    lengths = [len(share) for share in shares]
    assert max(lengths) - min(lengths) <= 1
    assert max(lengths) == -(-num_shards // world_size)


def test_uneven_shares_by_hand():
    assert [list(held(8, rank, 3)) for rank in range(3)] == [[0, 1], [2, 3, 4], [5, 6, 7]]
    assert [len(held(3, rank, 4)) for rank in range(4)] == [0, 1, 1, 1]


def test_the_nodes_of_uneven_workers_by_hand():
    plan = ReductionPlan(8, 1, 3)
    assert plan.nodes == [[(0, 2)], [(2, 4), (4, 5)], [(5, 6), (6, 8)]]
    assert plan.mine == [(2, 4), (4, 5)]
    assert [(turn.merges, turn.node) for turn in plan.turns] == [(0, None), (1, 0), (0, 1)]
    assert plan.upper == [0, 1, 0, 1, 2]


@given(st.integers(1, 64), st.integers(0, 4))
def test_the_volume_is_that_of_a_ring_for_any_workers_times_a_power_of_two(world_size, power):
    plan = ReductionPlan(world_size * 2**power, 0, world_size)
    assert {len(nodes) for nodes in plan.nodes} == {1}
    assert plan.sent(0) == 2 * Fraction(world_size - 1, world_size)


@pytest.mark.parametrize(
    ("num_shards", "world_size", "nodes"),
    [(8, 3, [1, 2, 2]), (12, 2, [2, 2]), (12, 4, [2, 2, 2, 2]), (4, 3, [1, 1, 1])],
)
def test_the_volume_elsewhere_by_hand(num_shards, world_size, nodes):
    plan = ReductionPlan(num_shards, 0, world_size)
    assert [len(found) for found in plan.nodes] == nodes
    assert plan.sent(0) == (nodes[0] + 1) * Fraction(world_size - 1, world_size)


@given(st.integers(1, 64), st.integers(1, 64), st.data())
def test_few_sums_are_held_at_a_time(num_shards, world_size, data):
    plan = ReductionPlan(num_shards, data.draw(st.integers(0, world_size - 1)), world_size)
    held_now = most = 0
    for turn in plan.turns:
        held_now += 1
        most = max(most, held_now)
        held_now -= turn.merges + (turn.node is not None)
        assert held_now >= 0
    assert held_now == 0
    assert most <= len(plan.held).bit_length() + 1


def test_nodes_are_cut_by_the_largest_factor_first():
    assert cut((0, 12), 12) == ((0, 8), (8, 12))
    assert cut((0, 8), 12) == ((0, 4), (4, 8))
    assert cut((4, 8), 12) == ((4, 6), (6, 8))
    assert cut((0, 8), 8) == ((0, 4), (4, 8))
    assert cut((0, 9), 9) == ((0, 6), (6, 9))
    assert cut((6, 9), 9) == ((6, 8), (8, 9))
