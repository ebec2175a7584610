"""For any events whatever: the parts add up, incidents hold together, and order does not matter."""

import math

from hypothesis import given
from hypothesis import strategies as st

from outlast.ledger.events import EVENT_NAMES, Event
from outlast.ledger.goodput import goodput, in_order
from outlast.ledger.incidents import incidents

GARBAGE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 300),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.just(10**400),
    st.lists(st.integers(), max_size=2),
)
TIMES = st.one_of(st.floats(0, 50), st.integers(0, 20).map(float), st.floats())
EVENTS = st.lists(
    st.builds(
        Event,
        t=TIMES,
        mono=st.one_of(st.floats(), st.floats(0, 50)),
        job=st.just("j"),
        attempt=st.integers(-1, 4),
        node=st.sampled_from(["a", "b"]),
        rank=st.sampled_from([None, 0, 0, 0, 1]),
        event=st.one_of(st.sampled_from(sorted(EVENT_NAMES)), st.text(max_size=3)),
        fields=st.fixed_dictionaries(
            {},
            optional={
                "step": GARBAGE | st.integers(0, 100),
                "stalled_s": GARBAGE | st.floats(0, 10),
                "beat_t": GARBAGE | TIMES,
                "world_size": GARBAGE | st.integers(1, 8),
                "nodes": GARBAGE,
                "exit_code": GARBAGE | st.sampled_from([0, 75, 76]),
            },
        ),
    ),
    max_size=25,
)


@given(EVENTS, st.none() | st.floats(0, 100), st.sampled_from(["workers", "machines"]))
def test_the_parts_add_up_for_any_events(events, now, count):
    split = goodput(events, now, count=count)
    parts = split.parts().values()
    assert all(0 <= part < math.inf for part in parts)
    assert math.isclose(sum(parts), split.total, rel_tol=1e-9, abs_tol=1e-6)
    usable = in_order(events)
    if usable and not any(event.event == "job_finished" for event in usable):
        span_s = max(usable[-1].t, now or usable[-1].t) - usable[0].t
        assert math.isclose(split.wall_s, span_s, rel_tol=1e-9, abs_tol=1e-6)
    if not any(event.event == "attempt_formed" for event in events):
        assert math.isclose(split.total, split.wall_s, rel_tol=1e-9, abs_tol=1e-6)
    assert split.steps_replayed >= 0


@given(EVENTS, st.randoms(use_true_random=False))
def test_any_order_of_the_same_events_gives_the_same_split(events, rng):
    shuffled = [*events, *events[:3]]
    rng.shuffle(shuffled)
    assert goodput(shuffled) == goodput(events)


@given(EVENTS, st.randoms(use_true_random=False))
def test_incidents_hold_together_for_any_events(events, rng):
    found = incidents(events)
    for incident in found:
        assert incident.what
        assert incident.began_t <= incident.detected_t
        assert incident.back_t is None or incident.closed
        assert incident.lost_steps is None or incident.lost_steps >= 0
    assert all(incident.closed for incident in found[:-1])
    shuffled = [*events, *events[:3]]
    rng.shuffle(shuffled)
    assert incidents(shuffled) == found
