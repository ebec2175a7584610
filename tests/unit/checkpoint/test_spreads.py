"""Spreads: every element is somebody's, replicas hold the same, and boxes are found."""

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from outlast.checkpoint.spreads import (
    WHOLE,
    Spread,
    holders,
    pieces_at,
    pieces_of,
    replicas,
    spread_over,
)
from thorough import examples


@st.composite
def spreads(draw, num_dims):
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    placements = tuple(
        draw(
            st.tuples(st.integers(0, num_dims - 1), st.sampled_from([1, 1, 2, 3]))
            | st.just((WHOLE, 1))
        )
        for _ in sizes
    )
    first = draw(st.integers(0, 3))
    ranks = list(range(first, first + math.prod(sizes)))
    if draw(st.booleans()):
        ranks = draw(st.permutations(ranks))
    return spread_over(ranks, sizes, placements)


@st.composite
def cases(draw):
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    return shape, draw(spreads(len(shape)))


def ranks_of(spread):
    return [spread.rank_at(place) for place in itertools.product(*map(range, spread.sizes))]


def elements(box):
    return set(itertools.product(*(range(o, o + e) for o, e in zip(*box, strict=True))))


@examples(300)
@given(cases())
def test_every_element_is_held_by_one_group_of_replicas(case):
    shape, spread = case
    assert not spread.problem()
    seen = {}
    for rank in ranks_of(spread):
        place = spread.coordinate(rank)
        assert spread.rank_at(place) == rank
        group = tuple(replicas(spread, place))
        assert rank in group
        assert pieces_at(shape, spread, place) == pieces_of(shape, spread, group[0])
        for box in pieces_at(shape, spread, place):
            assert math.prod(box[1]) or not math.prod(shape)
            for element in elements(box):
                assert seen.setdefault(element, group) == group
    assert len(seen) == math.prod(shape)
    assert spread.coordinate(max(ranks_of(spread)) + 1) is None


@examples(300)
@given(cases(), st.data())
def test_those_who_hold_a_part_of_a_box_are_found(case, data):
    shape, spread = case
    low = tuple(data.draw(st.integers(0, max(0, size - 1))) for size in shape)
    box = (low, tuple(data.draw(st.integers(0, s - o)) for s, o in zip(shape, low, strict=True)))
    wanted = elements(box)
    expected = {
        rank
        for rank in ranks_of(spread)
        if any(wanted & elements(piece) for piece in pieces_of(shape, spread, rank))
    }
    found = holders(shape, spread, box)
    if wanted:
        assert {rank for group in found for rank in group} == expected
        assert all(len({str(pieces_of(shape, spread, r)) for r in group}) == 1 for group in found)


def test_a_regular_grid_takes_few_words_whatever_its_size():
    whole = spread_over(range(65536), (256, 256), ((WHOLE, 1), (0, 1)))
    assert (whole.first, whole.strides, whole.ranks) == (0, (256, 1), ())
    column = spread_over(range(3, 4096, 8), (512,), ((0, 1),))
    assert (column.first, column.strides) == (3, (8,))
    turned = spread_over([0, 2, 4, 1, 3, 5], (2, 3), ((0, 1), (1, 1)))
    assert (turned.strides, turned.ranks) == ((1, 2), ())
    assert turned.coordinate(3) == (1, 1)
    assert spread_over([0, 5, 3], (3,), ((0, 1),)).ranks == (0, 5, 3)


def test_ranks_outside_a_grid_hold_nothing():
    spread = spread_over([2, 4], (2,), ((0, 1),))
    assert [pieces_of((4,), spread, rank) for rank in range(6)] == [
        [],
        [],
        [((0,), (2,))],
        [],
        [((2,), (2,))],
        [],
    ]
    assert Spread((2,), ((0, 1),), 0, (0,)).problem()
