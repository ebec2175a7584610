"""By how much copies slow steps down, from ledgers that are told."""

import pytest

from outlast.ledger.events import Event
from outlast.ledger.measured import Interference


def told(name, t, **fields):
    return Event(t=t, mono=t, job="j", attempt=1, node="n", rank=0, event=name, fields=fields)


def story(slower, *, copies=3, tier="cloud"):
    """Samples of 10 steps; each 20 of them 8 are made during a copy of ``slower`` steps."""
    found, t, step = Interference(), 1e6, 0
    for _ in range(copies):
        for number in range(20):
            seconds = 2.0 * (1 + slower) if number >= 12 else 2.0
            t, step = t + seconds, step + 10
            found.take(told("step", t, step=step, seconds=seconds, stalled_s=0.0))
        found.take(told("tier_copied", t, tier=tier, seconds=8 * 2.0 * (1 + slower), step=step))
    return found


@pytest.mark.parametrize("slower", [0.0, 0.05, 0.5])
def test_the_share_is_found(slower):
    assert story(slower).slowed("cloud") == pytest.approx(slower, abs=1e-9)


def test_few_samples_say_nothing_and_nothing_is_faster_than_usual():
    assert Interference().slowed("cloud") is None
    assert story(0.2).slowed("another") is None
    assert story(-0.2).slowed("cloud") == 0.0
    assert story(7.0).slowed("cloud") == 1.0


def test_what_a_save_or_a_stall_held_up_is_not_the_copies():
    found = story(0.1)
    t = 2e6
    for number in range(40):
        t += 9.0
        stalled_s = 7.0 if number % 2 else 0.0
        if not stalled_s:
            found.take(told("commit", t, durable_s=8.5, step=number))
        found.take(told("step", t, step=10000 + 10 * number, seconds=9.0, stalled_s=stalled_s))
    assert found.slowed("cloud") == pytest.approx(0.1)


def test_events_that_say_nothing_are_passed_over():
    found = Interference()
    found.take(told("tier_copied", 1.0, tier="cloud", seconds="x"))
    found.take(told("commit", 1.0))
    found.take(told("step", 1.0, step=None))
    assert found.slowed("cloud") is None
