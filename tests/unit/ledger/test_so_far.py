"""What is folded bit by bit is what the whole fold says."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.ledger.events import EVENT_NAMES, Event
from outlast.ledger.goodput import goodput
from outlast.ledger.incidents import incidents
from outlast.ledger.so_far import SETTLES_S, SoFar


def event(t, name, attempt=1, rank=0, **fields):
    head = {"t": t, "mono": t, "job": "j", "attempt": attempt, "node": "a"}
    return Event(**head, rank=rank, event=name, fields=fields)


FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "step": st.integers(0, 60),
        "stalled_s": st.floats(0, 1),
        "beat_t": st.floats(0, 60),
        "exit_code": st.sampled_from([0, 1, 75]),
        "world_size": st.integers(0, 4),
        "committed": st.booleans(),
    },
)
NAMED = st.builds(
    event,
    st.floats(0, 60, allow_nan=False).map(lambda t: round(t, 3)),
    st.sampled_from(sorted(EVENT_NAMES)),
    st.integers(0, 4),
    st.sampled_from([None, 0, 0, 1]),
)
EVENTS = st.lists(
    st.tuples(NAMED, FIELDS).map(
        lambda pair: Event(
            t=pair[0].t,
            mono=pair[0].mono,
            job="j",
            attempt=pair[0].attempt,
            node="a",
            rank=pair[0].rank,
            event=pair[0].event,
            fields=pair[1],
        )
    ),
    max_size=40,
)


def cut(events, sizes):
    """The events in pieces, as a reader meets them."""
    rest = list(events)
    for size in sizes:
        yield rest[:size]
        rest = rest[size:]
    yield rest


@settings(max_examples=200, deadline=None)
@given(EVENTS, st.lists(st.integers(0, 10), max_size=8), st.randoms(use_true_random=False))
def test_it_is_the_whole_fold(events, sizes, random):
    # Each may be as late as a reader waits for.
    late = sorted(events, key=lambda one: one.t + random.uniform(0, SETTLES_S * 0.99))
    so_far, settled = SoFar(), []
    for piece in cut(late, sizes):
        settled += so_far.take(piece)
        split = so_far.goodput(100.0)
        assert sum(split.parts().values()) == pytest.approx(split.total, abs=1e-6)
    assert so_far.goodput(100.0) == goodput(events, 100.0)
    assert so_far.goodput() == goodput(events)
    settled += so_far.take([], now=1e6)
    assert len(settled) == len(set(map(repr, settled)))
    told = so_far.over()
    assert told == [one for one in incidents(events) if one.closed]


def test_an_event_is_settled_once_and_in_order():
    so_far = SoFar()
    first = so_far.take([event(2.0, "attempt_formed", world_size=2), event(3.0, "step", step=2)])
    assert first == []  # an older one may still come
    second = so_far.take([event(2.9, "step", step=1)], now=6.0)
    assert [one.get("step") for one in second] == [None, 1, 2]
    assert so_far.take([], now=100.0) == []


@pytest.fixture(name="so_far")
def _so_far():
    """A worker was lost, and its successor has made no new step yet."""
    so_far = SoFar()
    so_far.take(
        [
            event(0.0, "attempt_formed", world_size=1),
            event(1.0, "resumed", step=0),
            event(2.0, "step", step=5),
            event(3.0, "worker_lost", step=6, beat_t=2.9),
            event(4.0, "attempt_formed", 2, world_size=1),
            event(5.0, "resumed", 2, step=3),
        ],
        now=50.0,
    )
    return so_far


def test_incidents_are_told_once(so_far):
    assert so_far.over() == []
    assert so_far.is_in_incident
    so_far.take([event(6.0, "step", 2, step=4)], now=51.0)
    assert [one.kind for one in so_far.over()] == ["worker lost"]
    assert so_far.over() == []
    assert not so_far.is_in_incident


def test_the_newest_incidents_and_what_each_has_cost(so_far):
    (still,) = so_far.incidents()
    assert not still.closed
    assert still.cost_s(2.0, 12.9) == pytest.approx(10.0 + 3 * 2.0)
    assert still.cost_s(None) is None  # nobody says until when
    so_far.take([event(6.0, "step", 2, step=4), event(9.0, "worker_lost", 2, step=4)], now=90.0)
    assert so_far.num_incidents == 2
    assert [one.closed for one in so_far.incidents()] == [True, False]
    assert [one.began_t for one in so_far.incidents(1)] == [9.0]
    assert so_far.incidents()[0].cost_s(None) == pytest.approx(3.1)
