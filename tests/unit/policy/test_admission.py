"""How many snapshots fit: numbers in, a decision in words out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.policy.retention import GIB, RESERVE_BYTES, RESERVE_SHARE, admit


@pytest.mark.parametrize(
    ("snapshot", "wanted", "available", "buffers"),
    [
        (10 * GIB, None, 16 * GIB, 1),
        (10 * GIB, 1, 16 * GIB, 1),
        (10 * GIB, 2, 32 * GIB, 2),
        (10 * GIB, 2, 20 * GIB, 1),  # two would leave nothing to train with
        (10 * GIB, 2, 10 * GIB, 0),
        (10 * GIB, None, 10 * GIB, 0),
        (10 * GIB, 0, 64 * GIB, 0),  # asked for
        (10 * GIB, 3, 32 * GIB, 3),
        (0, 2, 0, 2),  # nothing to hold
        (GIB, 1, 0, 0),
        (GIB, 1, -5, 0),
        (100 * GIB, 8, 420 * GIB, 3),
    ],
)
def test_as_many_as_fit(snapshot, wanted, available, buffers):
    decision = admit(snapshot, wanted=wanted, available_bytes=available)
    assert decision.buffers == buffers
    asked = 1 if wanted is None else wanted
    assert bool(decision.words) == (buffers < asked)


@pytest.mark.parametrize(
    ("wanted", "available", "buffers"),
    [(None, 40, 2), (None, 39, 1), (None, 4, 0), (1, 100, 1), (3, 40, 3), (0, 100, 0)],
)
def test_what_is_only_useful_takes_half_of_what_is_free_at_most(wanted, available, buffers):
    decision = admit(10 * GIB, wanted=wanted, useful=2, available_bytes=available * GIB)
    assert decision.buffers == buffers
    assert not decision.words or not buffers, "nobody has asked for two"


def test_fewer_buffers_are_said_with_both_numbers():
    words = admit(10 * GIB, wanted=2, available_bytes=20 * GIB).words
    assert words == (
        "a snapshot takes 10.00 GiB of this machine's memory and 20.00 GiB are free: "
        "1 buffer in place of 2"
    )


def test_no_buffer_is_said_with_what_it_costs_and_what_to_do():
    words = admit(10 * GIB, wanted=None, available_bytes=4 * GIB).words
    assert "10.00 GiB" in words
    assert "4.00 GiB" in words
    assert "training waits for each" in words
    assert "free memory, or save less often" in words


sizes = st.integers(min_value=0, max_value=1 << 42)


@given(snapshot=sizes, wanted=st.none() | st.integers(0, 8), available=sizes)
def test_what_is_admitted_leaves_the_reserve(snapshot, wanted, available):
    decision = admit(snapshot, wanted=wanted, available_bytes=available)
    assert 0 <= decision.buffers <= (1 if wanted is None else wanted)
    if snapshot and decision.buffers:
        left = available - decision.buffers * snapshot
        assert left >= RESERVE_BYTES
        assert left >= int(available * RESERVE_SHARE)


@given(snapshot=sizes, wanted=st.integers(0, 8), available=sizes, more=sizes)
def test_more_memory_never_admits_less(snapshot, wanted, available, more):
    less = admit(snapshot, wanted=wanted, available_bytes=available)
    assert admit(snapshot, wanted=wanted, available_bytes=available + more).buffers >= less.buffers
