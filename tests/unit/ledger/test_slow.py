"""Slow ranks as the ledger tells them: sentences, and what they have cost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.ledger.events import Event
from outlast.ledger.incidents import lost_to_waiting_s, slow_ranks
from outlast.ledger.narrator import sentence


def straggler(t=1.0, attempt=1, **fields):
    given = {
        "node": "b",
        "ranks": [3],
        "cause": "compute",
        "of": "compute",
        "factor": 1.5,
        "since_step": 410,
        "step": 430,
        "own_s": 0.031,
        "others_s": 0.020,
        "lost_s": 0.011,
        "saving": False,
        "over": False,
        "action": "report",
    }
    return Event(
        t=t,
        mono=t,
        job="j",
        attempt=attempt,
        node="a",
        rank=3,
        event="straggler",
        fields={**given, **fields},
    )


def sampled(t, step, attempt=1):
    fields = {"step": step, "seconds": 1.0}
    return Event(
        t=t, mono=t, job="j", attempt=attempt, node="a", rank=0, event="step", fields=fields
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {},
            (
                "rank 3 on b computes 1.5 times as long as the others (31 ms against 20 ms) "
                "since step 410; of each step 11 ms are lost waiting for it"
            ),
        ),
        (
            {"ranks": [9, 8], "saving": True, "lost_s": 1.2},
            (
                "ranks 8, 9 on b compute 1.5 times as long as the others (31 ms against 20 ms) "
                "since step 410, in steps with saves; of each step 1.2 s are lost waiting for them"
            ),
        ),
        (
            {"cause": "loader", "of": "loader"},
            (
                "rank 3 on b waits longer for data than the others (31 ms against 20 ms) "
                "since step 410; of each step 11 ms are lost waiting for it"
            ),
        ),
        (
            {"cause": "burst", "over": True},
            (
                "rank 3 on b computes 1.5 times as long as the others (31 ms against 20 ms) "
                "for some steps from step 410 on; it was a burst"
            ),
        ),
        ({"over": True}, "rank 3 on b is as quick as the others again, at step 430"),
    ],
    ids=["compute", "several", "loader", "burst", "over"],
)
def test_sentences(fields, words):
    assert sentence(straggler(**fields)) == words


def test_what_it_cost_goes_on_until_it_is_over():
    begun = [sampled(0.5, 400), straggler(1.0)]
    (one,) = slow_ranks(begun)
    assert (one.until_step, one.lost_s) == (430, pytest.approx(21 * 0.011))
    (one,) = slow_ranks([*begun, sampled(2.0, 509)])
    assert one.lost_s == pytest.approx(100 * 0.011)
    over = straggler(3.0, step=459, over=True)
    (one,) = slow_ranks([*begun, sampled(2.0, 509), over])
    assert (one.over, one.lost_s) == (True, pytest.approx(50 * 0.011))
    assert (one.node, one.ranks, one.factor) == ("b", (3,), 1.5)


def test_when_it_was_slow_is_read_from_the_samples_around_it():
    events = [sampled(100.0, 400), sampled(110.0, 420), straggler(111.0)]  # since step 410
    (one,) = slow_ranks(events)
    assert (one.from_t, one.until_t) == (105.0, 111.0)
    (one,) = slow_ranks([*events, sampled(140.0, 480)])
    assert (one.from_t, one.until_t) == (105.0, 140.0)
    over = [sampled(140.0, 480), straggler(150.0, step=460, over=True), sampled(160.0, 500)]
    (one,) = slow_ranks([*events, *over])
    assert (one.from_t, one.until_t) == (105.0, 130.0)


def test_another_attempt_ends_it():
    found = slow_ranks([straggler(1.0), sampled(2.0, 439), sampled(3.0, 900, attempt=2)])
    assert found[0].lost_s == pytest.approx(30 * 0.011)


def test_steps_with_two_slow_ranks_wait_for_the_slower_one():
    both = slow_ranks(
        [
            straggler(1.0, ranks=[1], since_step=1, step=100, lost_s=0.01),
            straggler(2.0, ranks=[2], since_step=51, step=150, lost_s=0.03, over=False),
            straggler(3.0, ranks=[1], step=100, over=True),
        ]
    )
    assert lost_to_waiting_s(both) == pytest.approx(50 * 0.01 + 100 * 0.03)
    assert lost_to_waiting_s([]) == 0.0


_junk = st.one_of(st.none(), st.integers(-5, 500), st.floats(), st.text(max_size=3))


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["ranks", "since_step", "step", "lost_s", "over", "cause", "node"]),
            st.one_of(_junk, st.lists(_junk, max_size=3)),
        ),
        max_size=6,
    )
)
def test_no_ledger_breaks_it(lines):
    events = [straggler(float(t), **fields) for t, fields in enumerate(lines)]
    found = slow_ranks(events)
    assert lost_to_waiting_s(found) >= 0
    for event in events:
        sentence(event)
