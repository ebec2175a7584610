"""All ranks leave an attempt together: who goes on, who leaves, and what nobody may take along."""

import functools

import pytest
from unit_fakes import on_ranks

from outlast.inprocess import handover
from outlast.inprocess.handover import PartingWord, leavers_of

WORLD = 5


def word(rank):
    return PartingWord(timeline=3, step=7, rest=b"r" * 16, own=b"own %d" % rank)


def meet(asks, words=word, planned=None):
    """What each rank is told, where these were the asks for a drain."""
    planned = [] if planned is None else planned

    def act(link):
        agreed = handover.meet(link, words(link.rank), lambda: asks, planned.append)
        if agreed.drains or link.rank in agreed.leavers:
            handover.see_off(link, agreed, 0.0 if agreed.drains else 20.0)
            return agreed, None
        return agreed, handover.take(link, agreed)

    found = on_ranks(WORLD, act)
    assert not [one for one in found if isinstance(one, BaseException)], found
    assert len({repr(agreed) for agreed, _ in found}) == 1  # all act alike
    return found


@pytest.mark.parametrize("leavers", [(), (1,), (0,), (0, 1), (3, 4), (0, 1, 2, 4)], ids=str)
def test_what_each_rank_knows_alone_is_known_to_others_that_stay(leavers):
    found = meet([{"leaves": [rank], "left_s": 9.0} for rank in leavers])
    stay = [rank for rank in range(WORLD) if rank not in leavers]
    holders = {rank: set() for rank in range(WORLD)}
    for rank, (agreed, taken) in enumerate(found):
        assert agreed.leavers == list(leavers)
        for one in taken or ():
            assert (one.timeline, one.step, one.world_size) == (3, 7, WORLD)
            assert (one.rest, one.blob, one.stage) == (b"r" * 16, b"own %d" % one.rank, 2)
            assert one.is_final
            assert one.is_certain
            holders[one.rank].add(rank)
    for rank, by in holders.items():
        assert by <= set(stay) - {rank}
        least = 2 if rank in leavers else 1  # who stays has its own besides
        assert len(by) >= min(least, len(set(stay) - {rank})), (rank, by)


@pytest.mark.parametrize(
    "asks",
    [
        [{"left_s": 9.0}],
        [{"leaves": [1], "left_s": 9.0}, {"left_s": 5.0}],
        [{"leaves": [0, 1, 2], "left_s": 9.0}, {"leaves": [3, 4], "left_s": 5.0}],
    ],
    ids=["one for all", "one besides", "all of them"],
)
def test_where_nobody_would_be_left_all_save(asks):
    planned = []
    for agreed, taken in meet(asks, planned=planned):
        assert (agreed.drains, agreed.leavers, agreed.why_not) == (True, [], "")
        assert taken is None
    (info,) = planned
    assert info["left_s"] == min(one["left_s"] for one in asks)


def test_where_one_cannot_go_on_all_save_and_say_why():
    def words(rank):
        return PartingWord(why_not="it cannot") if rank == 3 else word(rank)

    for agreed, taken in meet([{"leaves": [1], "left_s": None}], words):
        assert (agreed.drains, agreed.why_not) == (True, "it cannot")
        assert taken is None


def test_one_that_leaves_goes_though_the_others_are_late():
    def act(link):
        agreed = handover.meet(link, word(link.rank), lambda: [{"leaves": [0]}], lambda _: None)
        handover.see_off(link, agreed, 0.01)
        return agreed.leavers

    assert on_ranks(2, act) == [[0], [0]]


def test_who_leaves():
    of = functools.partial(leavers_of, world_size=4)
    assert of([]) == []
    assert of([{"leaves": [3]}, {"leaves": [1]}]) == [1, 3]
    assert of([{"leaves": [3]}, {"reason": "a signal"}]) == []
    assert of([{"leaves": [0, 1, 2, 3]}]) == []
