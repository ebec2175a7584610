"""For any events whatever: the parts add up, incidents hold together, and order does not matter."""

import math

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from outlast.ledger.events import EVENT_NAMES, Event
from outlast.ledger.goodput import PARTS, goodput, in_order, split, splits_at
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
                "data_s": GARBAGE | st.floats(0, 10),
                "script_s": GARBAGE | st.floats(0, 10),
                "catch_up_s": GARBAGE | st.floats(0, 10),
                "building_s": GARBAGE | st.floats(0, 10),
                "copying_s": GARBAGE | st.floats(0, 10),
                "age_s": GARBAGE | st.floats(0, 5000),
                "hosts": GARBAGE | st.just({"a": 1, "b": 1}),
                "joins": st.booleans(),
            },
        ),
    ),
    max_size=25,
)


_SPENT = ("stalled_s", "script_s", "data_s", "catch_up_s")
# Mostly less than a piece, so that something is left of it for the steps.
SECONDS = st.sampled_from([0.0, 0.0, 0.125, 0.25]) | st.floats(0, 3)


@st.composite
def lives(draw):
    """A job as it may live: what happens comes in an order that makes sense, until it is cut."""
    t, attempt, step, told = 0.0, 0, 0, []

    def tell(event, rank=None, of=None, **fields):
        nonlocal t
        t += draw(st.sampled_from([0.0, 0.25, 1.0, 2.5]))
        own = attempt if of is None else of
        told.append(
            Event(
                t=t, mono=t, job="j", attempt=own, node="a", rank=rank, event=event, fields=fields
            )
        )

    tell("job_started", age_s=draw(SECONDS))
    for _ in range(draw(st.integers(1, 4))):
        attempt += 1
        hosts = draw(st.sampled_from([{"a": 1}, {"a": 2, "b": 1}, {"a": 1, "b": 1, "c": 2}]))
        tell("attempt_formed", world_size=sum(hosts.values()), nodes=len(hosts), hosts=hosts)
        if draw(st.booleans()):
            step = draw(st.integers(0, step))
            tell("resumed", 0, step=step, building_s=draw(SECONDS))
            for _ in range(draw(st.integers(0, 3))):
                step += draw(st.integers(1, 10))
                spent = {name: draw(SECONDS) for name in _SPENT}
                tell("step", 0, step=step, **spent)
        how = draw(st.sampled_from(["lost", "drained", "ended", "vanished"]))
        if how == "lost":
            tell("worker_lost", 1, step=step, beat_t=t + draw(SECONDS) - 1)
            if draw(st.booleans()):  # late
                tell("step", 0, step=step + 1)
            continue
        if how == "vanished":
            tell("job_started", age_s=draw(SECONDS))
            continue
        if how == "drained":
            tell("drain_agreed", 0, step=step)
            tell("drained", step=step, committed=True)
        else:
            tell("session_ended", 0, step=step, stalled_s=draw(SECONDS))
        tell("job_finished", exit_code=75 if how == "drained" else 0, copying_s=draw(SECONDS))
        tell("job_started", of=attempt, age_s=draw(SECONDS))
    return told[: draw(st.integers(0, len(told)))]


JOBS = st.one_of(EVENTS, lives())


@given(JOBS, st.none() | st.floats(0, 100), st.sampled_from(["workers", "machines"]))
def test_the_parts_add_up_for_any_events(events, now, count):
    split = goodput(events, now, count=count)
    parts = split.parts().values()
    assert all(0 <= part < math.inf for part in parts)
    assert math.isclose(sum(parts), split.total, rel_tol=1e-9, abs_tol=1e-6)
    usable = in_order(events)
    if usable and not any(event.event == "job_finished" for event in usable):
        span_s = max(usable[-1].t, now or usable[-1].t) - usable[0].t
        age_s = usable[0].get("age_s") if usable[0].event == "job_started" else 0.0
        age_s = age_s if type(age_s) in (int, float) and 0 <= age_s <= 3600 else 0.0
        assert math.isclose(split.wall_s, span_s + age_s, rel_tol=1e-9, abs_tol=1e-6)
    if not any(event.event == "attempt_formed" for event in events):
        assert math.isclose(split.total, split.wall_s, rel_tol=1e-9, abs_tol=1e-6)
    assert split.steps_replayed >= 0


SIZES = ("world_size", "nodes", "hosts")


@given(JOBS, st.none() | st.floats(0, 100))
def test_a_worker_alone_has_the_seconds_of_the_clock_and_no_more(events, now):
    """The total is a sum of parts: only a clock shows that a second was given twice, or never."""
    alone = [
        msgspec.structs.replace(e, fields={k: v for k, v in e.fields.items() if k not in SIZES})
        for e in events
    ]
    found = goodput(alone, now)
    assert math.isclose(found.total, found.wall_s, rel_tol=1e-9, abs_tol=1e-6)


def added_up(each):
    return {part: math.fsum(parts[part] for parts in each.values()) for part in PARTS}


def like(found, expected, rel_tol=1e-9, abs_tol=1e-3):
    return all(
        math.isclose(found[part], expected[part], rel_tol=rel_tol, abs_tol=abs_tol)
        for part in PARTS
    )


@given(JOBS, st.none() | st.floats(0, 100))
def test_attempts_and_machines_add_up_to_the_job_for_any_events(events, now):
    found = split(events, now)
    assert found.workers == goodput(events, now)
    for each in (found.by_attempt, found.by_machine):
        assert all(value >= 0 for parts in each.values() for value in parts.values())
        assert like(added_up(each), found.workers.parts())


# In a job's life clocks show times of one decade, and step by hours at most.
JOB_TIMES = st.one_of(st.floats(0, 50), st.integers(0, 20).map(float), st.floats(-5000, 5000))


@given(JOBS, st.just(0.0) | JOB_TIMES, st.integers(0, 25))
def test_a_prefix_never_contradicts_the_whole(events, step_t, cut):
    # A clock that steps: what comes after is earlier, or much later.
    moved = [
        msgspec.structs.replace(e, t=e.t + step_t * (at >= cut)) for at, e in enumerate(events)
    ]
    ordered = in_order(moved)
    whole = goodput(ordered)
    for end in range(len(ordered)):
        part = goodput(ordered[:end])
        assert part.attempts <= whole.attempts
        assert part.steps_done <= whole.steps_done
        assert part.steps_replayed <= whole.steps_replayed
        assert 0 <= part.undecided <= part.total * (1 + 1e-9) + 1e-6
        for name, seconds in part.parts().items():
            # A clock a thousand years off costs digits of the other times.
            slack = 1e-6 + 1e-9 * whole.total
            assert seconds - part.undecided <= getattr(whole, name) + slack, (name, end)


@given(JOBS, st.lists(st.floats(-10, 60), max_size=4))
def test_splits_as_of_moments_are_those_of_what_came_before_them(events, moments):
    ordered = in_order(events)
    first_size = [e for e in ordered if e.event == "attempt_formed"][:1]
    *found, last = splits_at(ordered, moments)
    assert last == split(ordered)
    for moment_t, one in zip(sorted(moments), found, strict=True):
        before = [event for event in ordered if event.t <= moment_t]
        if first_size and first_size[0] not in before:
            continue  # what came before does not know how large the first attempt would be
        if before:
            assert one == split(before, moment_t)


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
