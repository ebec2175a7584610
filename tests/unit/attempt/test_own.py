"""What only one rank knows, where its death does not take it."""

import pytest

from outlast.attempt import beat as module
from outlast.attempt.beat import (
    BEATS_VARIABLE,
    SLOT_BYTES,
    Basis,
    Descent,
    Own,
    RankState,
    entrust,
    own_path,
    read_own,
)


@pytest.fixture(name="place")
def _place(tmp_path, monkeypatch):
    monkeypatch.setenv(BEATS_VARIABLE, str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", "3")
    return own_path(tmp_path, 3)


def mirror(timeline, rank, world_size, *basis, attempt=None):
    """Of an attempt, that of ``timeline``'s beginning if no other is said; ``basis`` is of it."""
    found = Basis(*basis) if basis else None
    return Own(Descent(timeline, attempt or timeline, world_size, found), rank)


def step(own, number, *, backward=b"x", optimizer=b"x", end=b"x"):
    """A step of a worker, and what it would have drawn from at each place."""
    own.pending(number, b"%d" % number + backward, late=False)
    own.pending(number, b"%d" % number + optimizer, late=True)
    own.final(number, b"%d" % number + end, b"r" * 16)


def certain():
    return {(one.step, one.is_final): one.blob for one in read_own() if one.is_certain}


def test_the_newest_two_steps_are_kept(place):
    own = mirror(5, 1, 4)
    for number in (1, 2, 3):
        own.final(number, b"blob %d" % number, b"r" * 16)
    found = sorted(read_own(), key=lambda one: one.step)
    assert [(one.step, one.blob, one.rest) for one in found] == [
        (2, b"blob 2", b"r" * 16),
        (3, b"blob 3", b"r" * 16),
    ]
    assert {(one.timeline, one.rank, one.world_size) for one in found} == {(5, 1, 4)}


@pytest.mark.parametrize("apart", [1, 2, 4])
def test_the_newest_two_moments_are_kept_however_many_steps_apart(place, apart):
    """As with gradients that are accumulated over so many."""
    own = mirror(5, 1, 4)
    for number in range(1, 4 * apart + 1):
        own.pending(number, b"%d" % number, late=False)
        if number % apart == 0:
            own.final(number, b"blob %d" % number, b"r" * 16)
    found = [(one.step, one.blob) for one in read_own() if one.is_final]
    assert sorted(found) == [(n * apart, b"blob %d" % (n * apart)) for n in (3, 4)]
    own.final(4 * apart, b"again", b"r" * 16)
    found = [(one.step, one.blob) for one in read_own() if one.is_final]
    assert sorted(found) == [(3 * apart, b"blob %d" % (3 * apart)), (4 * apart, b"again")]


def test_nothing_is_there_before_anything_was_written(place):
    assert read_own() == []
    mirror(1, 0, 1)
    assert read_own() == []


def test_a_step_in_progress_is_believed_once_one_was_seen_to_its_end(place):
    own = mirror(1, 0, 2)
    own.pending(1, b"1x", late=True)
    assert certain() == {}
    own.final(1, b"1x", b"")
    own.pending(2, b"2x", late=False)
    assert certain()[2, False] == b"2x"


def test_a_worker_that_draws_after_the_optimizer_is_never_believed_before(place):
    own = mirror(1, 0, 2)
    step(own, 1, end=b"other")
    own.pending(2, b"2x", late=True)
    assert (2, False) not in certain()


def test_one_that_draws_in_the_backward_pass_is_believed_at_the_optimizer(place):
    own = mirror(1, 0, 2)
    step(own, 1, backward=b"other")
    own.pending(2, b"2x", late=False)
    assert (2, False) not in certain()
    own.pending(2, b"2y", late=True)
    assert certain()[2, False] == b"2y"


def test_several_backward_passes_in_a_step_are_no_late_draws(place):
    own = mirror(1, 0, 2)
    own.pending(1, b"first", late=False)
    step(own, 1)
    own.pending(2, b"2x", late=False)
    assert certain()[2, False] == b"2x"


def test_the_next_worker_at_this_place_knows_what_the_script_does(place):
    step(mirror(1, 0, 2), 1)
    own = mirror(1, 0, 2)
    own.pending(2, b"2x", late=False)
    assert certain()[2, False] == b"2x"


def test_a_torn_record_is_none(place):
    own = mirror(1, 0, 2)
    own.final(1, b"one", b"")
    own.final(2, b"two", b"")
    raw = bytearray(place.read_bytes())
    raw[SLOT_BYTES + 75] ^= 1  # of step 1
    place.write_bytes(raw)
    assert [one.step for one in read_own()] == [2]


def test_the_room_follows_the_size(place):
    """What is there already stays, of the attempt before too."""
    own = mirror(1, 0, 2)
    own.final(1, b"of before", b"")
    own.close()
    own = mirror(1, 0, 3, 1, 1, 2, attempt=2)
    own.final(2, b"two", b"")
    large = bytes(range(256)) * (SLOT_BYTES // 100)
    own.pending(3, large, late=False)
    own.final(3, large, b"")
    own.close()
    kept = {(2, True): b"two", (3, True): large, (3, False): large}
    found = {(one.step, one.is_final): one.blob for one in read_own()}
    assert found == {**kept, (1, True): b"of before"}
    own = mirror(1, 0, 3, 2, 3, 3, attempt=3)
    own.final(4, b"four", b"")
    found = {(one.step, one.is_final): one.blob for one in read_own()}
    assert found == {**kept, (4, True): b"four"}
    assert sorted(one.name for one in place.parent.iterdir()) == [place.name]


def test_what_is_too_large_is_not_kept_and_hides_what_was_there(place, monkeypatch):
    monkeypatch.setattr(module, "SLOT_BYTES_MAX", SLOT_BYTES)
    own = mirror(1, 0, 2)
    own.final(1, b"one", b"")
    own.final(1, b"x" * SLOT_BYTES, b"")
    assert read_own() == []


def test_without_an_agent_nothing_happens(monkeypatch):
    monkeypatch.delenv(BEATS_VARIABLE, raising=False)
    own = mirror(1, 0, 1)
    own.final(1, b"one", b"")
    own.close()
    assert read_own() == []


@pytest.mark.parametrize(
    ("drawn", "draws"), [({}, 0), ({"backward": b"y"}, 1), ({"end": b"y"}, 2)], ids=str
)
def test_it_is_said_where_in_a_step_a_record_is_from_and_where_was_drawn(place, drawn, draws):
    own = mirror(1, 0, 2)
    step(own, 1, **drawn)
    own.pending(2, b"2x", late=False)
    assert {(one.step, one.stage) for one in read_own()} == {(1, 1), (1, 2), (2, 0)}
    assert max(one.draws for one in read_own()) == draws
    own.pending(2, b"2y", late=True)
    assert {one.stage for one in read_own() if one.step == 2} == {1}


def test_what_is_to_be_made_again_is_forgotten(place):
    """Else who dies in it once more would be taken for who had died in it before."""
    before = mirror(1, 0, 2)
    for number in (4, 5):
        step(before, number)
    before.pending(6, b"6 of before", late=True)
    before.close()
    mirror(1, 0, 2, 1, 4, 2, attempt=2).close()
    assert {one.step for one in read_own()} == {4}
    mirror(2, 0, 2, 2, 3, 2, attempt=3).close()
    assert {one.step for one in read_own()} == {4}, "it is another line of steps"


def test_what_an_attempt_has_gone_on_from_stays(place):
    four = mirror(1, 2, 4)
    four.final(7, b"of four", b"r")
    four.close()
    three = mirror(1, 1, 3, 1, 7, 4, attempt=2)
    three.final(7, b"of three", b"r")
    three.final(8, b"of three", b"r")
    three.close()
    found = {(one.world_size, one.step): one.blob for one in read_own()}
    assert found == {(4, 7): b"of four", (3, 7): b"of three", (3, 8): b"of three"}
    again = mirror(1, 2, 4, 2, 8, 3, attempt=3)
    again.final(8, b"of four again", b"r")
    again.close()
    found = {(one.world_size, one.step): one.blob for one in read_own()}
    assert found[3, 8] == b"of three"
    assert found[4, 8] == b"of four again"


def test_of_which_attempt_an_own_state_is():
    """As many workers as before begin with what those had, and others share it out anew."""
    basis = Basis(attempt=4, step=7, world_size=3)
    assert Descent(2, 5, 3, basis).attempt_of(7) == 4
    assert Descent(2, 5, 3, basis).attempt_of(8) == 5
    assert Descent(2, 5, 4, basis).attempt_of(7) == 5
    assert Descent(5, 5, 4).attempt_of(7) == 5


def test_each_record_says_of_which_attempt_it_is(place):
    own = mirror(1, 0, 2, 1, 4, 2, attempt=2)
    own.final(4, b"of before", b"")
    step(own, 5)
    own.pending(6, b"in progress", late=True)
    found = {(one.step, one.is_final): one.attempt for one in read_own()}
    assert found == {(4, True): 1, (5, True): 2, (5, False): 2, (6, False): 2}


def test_what_others_have_handed_over_is_told_as_long_as_it_may_be_gone_on_from(place):
    def of(rank, step=7, world_size=3):
        known = {"timeline": 5, "attempt": 5, "rank": rank, "step": step, "world_size": world_size}
        return RankState(
            **known, is_final=True, is_certain=True, stage=2, draws=0, rest=b"", blob=b"b"
        )

    entrust([of(1), of(2)])
    assert [one.rank for one in read_own()] == [1, 2]
    mirror(5, 0, 2, 5, 7, 3, attempt=6)  # the attempt that has gone on from it
    assert [one.rank for one in read_own()] == [1, 2]
    mirror(5, 0, 2, 6, 9, 2, attempt=7)  # and the one after it
    assert read_own() == []
    entrust([of(1)])
    mirror(8, 0, 2)  # from a checkpoint
    assert read_own() == []
