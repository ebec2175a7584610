"""The ranks agree on who writes what: in the background, once a round, without a deadline."""

import threading

import pytest
from unit_checkpoints import shares_of
from unit_fakes import Hub, on_ranks

from outlast.attempt.link import LocalLink
from outlast.checkpoint.plan import SHARE_MIN_BYTES, HeldPiece, PieceLocation
from outlast.training import sharing
from outlast.training.sharing import Sharing


def structure(*names):
    size = SHARE_MIN_BYTES
    return [
        (HeldPiece(name, "F32", (size,), (0,), (size,)), PieceLocation(0, ())) for name in names
    ]


def pieces(held):
    return [piece for piece, _ in held]


def test_one_rank_agrees_with_itself_at_once():
    settled = []
    one = Sharing(LocalLink(), lambda: settled.append(True))
    held = structure("a", "b")
    assert not one.has_begun
    one.offer(held, ())
    assert one.has_begun
    assert one.is_settled
    assert settled == [True]
    assert one.of(held, 0.0) == shares_of([pieces(held)], ())[0]
    assert one.of(structure("a"), 0.0) is None
    assert one.of(structure("a", "b"), 0.0) is not None, "an equal structure is the same"
    with_its_own = structure("a", "b", "outlast.gradients.a")
    assert one.of(with_its_own, 0.0) is not None, "what is each rank's own comes and goes"


@pytest.mark.parametrize("world_size", [2, 3])
def test_each_rank_hears_its_own_share(world_size):
    held = structure(*"abcdefg")
    more = [*held, *structure("last")]

    def act(link):
        mine = more if link.rank == world_size - 1 else held
        one = Sharing(link, lambda: None)
        one.offer(mine, {"c"})
        return one.of(mine, 10.0)

    structures = [pieces(held)] * (world_size - 1) + [pieces(more)]
    assert on_ranks(world_size, act) == shares_of(structures, {"c"})


def test_a_new_round_replaces_the_one_before_also_when_that_has_not_ended():
    hub = Hub(2)
    settled = threading.Semaphore(0)
    ranks = [Sharing(hub.link(rank), settled.release) for rank in range(2)]
    old, new = structure("a", "b"), structure("a", "b", "c")
    ranks[0].offer(old, ())  # the other rank never offers this one alone
    ranks[0].offer(new, ())
    assert not ranks[0].is_settled
    ranks[1].offer(old, ())
    ranks[1].offer(new, ())
    expected = shares_of([pieces(new)] * 2, ())
    assert [one.of(new, 10.0) for one in ranks] == expected
    assert [one.of(old, 0.0) for one in ranks] == [None, None]


def test_structures_that_many_ranks_have_are_published_once_each():
    """And not at all where every rank has the same."""
    for stages, expected in ((1, 0), (2, 2)):
        hub = Hub(4)

        def act(link, stages=stages):
            held = structure("a", *"bc"[: link.rank % stages])
            one = Sharing(link, lambda: None)
            one.offer(held, ())
            return one.of(held, 10.0)

        on_ranks(4, act, hub=hub)
        published = [key for key in hub.published if key.startswith("structure/")]
        assert len(published) == expected


def test_a_rank_that_is_late_is_waited_for(monkeypatch):
    """It may be compiling for longer than any deadline: no saves until then, but then."""
    monkeypatch.setattr(sharing, "_SLICE_S", 0.01)
    hub = Hub(2)
    held = structure("a", "b")
    ranks = [Sharing(hub.link(rank), lambda: None) for rank in range(2)]
    fetched = threading.Semaphore(0)
    fetch = ranks[0]._link.fetch

    def counted(key, timeout_s):
        fetched.release()
        return fetch(key, timeout_s)

    ranks[0]._link.fetch = counted
    ranks[0].offer(held, ())
    for _ in range(5):
        assert fetched.acquire(timeout=10)
    assert ranks[0].of(held, 0.0) is None
    ranks[1].offer(held, ())
    assert [one.of(held, 10.0) for one in ranks] == shares_of([pieces(held)] * 2, ())


def test_a_link_that_is_gone_ends_the_round_without_a_word_to_training():
    hub = Hub(2)
    one = Sharing(hub.link(0), lambda: None)
    gone = threading.Event()

    def fetch(key, timeout_s):
        gone.set()
        raise ConnectionError("the store is gone")

    one._link.fetch = fetch
    one.offer(structure("a"), ())
    assert gone.wait(10)
    assert one.of(structure("a"), 0.05) is None
