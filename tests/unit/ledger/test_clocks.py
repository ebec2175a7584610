"""Clock steps are taken out of a ledger, and nothing else is changed."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from outlast.ledger import clocks
from outlast.ledger.clocks import STEP_S, SteadyClocks
from outlast.ledger.events import Event


def steady(events):
    return clocks.steady(events)[0]


def line(mono, ahead_s, name="step", node="a", **fields):
    t = 1000.0 + mono + ahead_s
    head = {"job": "j", "attempt": 1, "node": node, "rank": 0, "event": name}
    return Event(t=t, mono=mono, **head, fields=fields)


def times(events):
    return [round(event.t - 1000.0, 6) for event in steady(events)]


def test_a_step_forth_and_back():
    events = [line(1, 0), line(2, 5000), line(3, 5000), line(4, 0), line(5, -300), line(6, 0)]
    assert times(events) == [1, 2, 3, 4, 5, 6]


def test_a_clock_that_stays_set_is_read_as_before():
    taken = SteadyClocks()
    events = [taken.take(line(n, 0 if n < 3 else 7200)) for n in range(6)]
    assert [event.t - 1000.0 for event in events] == list(range(6))
    assert taken.shift_s == -7200


def test_other_times_in_the_line_go_along():
    (_, lost) = steady([line(1, 0), line(9, 60, "worker_lost", beat_t=1068.0, step=4, lost_s=60)])
    assert lost.fields == {"beat_t": 1008.0, "step": 4, "lost_s": 60}


def test_a_slewed_clock_is_left_alone():
    events = [line(n, 0.1 * n) for n in range(100)]
    assert steady(events) == events


def test_machines_are_apart():
    events = [line(1, 0), line(1, -400, node="b"), line(2, 0), line(2, -400, node="b")]
    assert steady(events) == events


def test_a_reboot_is_no_step():
    start = {"name": "job_started"}
    by_id = [line(50, 0, **start, boot="x"), line(90, 300, **start, boot="y"), line(91, 300)]
    assert steady(by_id) == by_id
    same = [line(50, 0, **start, boot="x"), line(90, 300, **start, boot="x"), line(91, 300)]
    assert times(same) == [50, 90, 91]
    again = [line(5000, 0), line(20, 9000), line(21, 9000)]  # written without a word of its start
    assert steady(again) == again


def test_processes_whose_clocks_differ():
    """One process sees the clock that was set, another one does not (a drill's jump)."""
    events = [line(n, 3000 * (n % 2)) for n in range(8)]
    assert times(events) == list(range(8))


@given(
    st.lists(
        st.tuples(st.floats(0.01, 100), st.sampled_from([0.0, -4000.0, 90.0, STEP_S / 2])),
        max_size=40,
    )
)
def test_intervals_are_those_of_the_monotonic_clock(drawn):
    mono, events = 0.0, []
    for gap, ahead in drawn:
        mono += gap
        events.append(line(mono, ahead))
    found = steady(events)
    assert len(found) == len(events)
    for before, after in itertools.pairwise(found):
        slack = 2 * STEP_S + 1e-6
        assert abs((after.t - before.t) - (after.mono - before.mono)) <= slack
