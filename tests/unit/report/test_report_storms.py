"""What a storm of failures has cost, in a report."""

import json
import random

import pytest

from outlast.ledger.events import Event
from outlast.report.facts import facts, to_json
from outlast.report.forecast import _calm_s
from outlast.report.text import storm_lines

STEP_S = 0.1
SAVE_S = 0.05
BACK_S = 0.5


def story(losses_s, *, every_s, until_s, chosen_s=None):
    """A job of tenths of seconds that saves each ``every_s`` and fails at these moments."""
    t, begin, attempt, events = 1e6, 1e6, 0, []

    def tell(name, rank=0, **fields):
        events.append(
            Event(
                t=t, mono=t, job="j", attempt=attempt, node="n", rank=rank, event=name,
                fields=fields,
            )
        )  # fmt: skip

    tell("job_started", rank=None)
    attempt = 1
    tell("attempt_formed", rank=None, world_size=1, nodes=1)
    tell("resumed", step=0)
    if chosen_s:
        tell("cadence", interval_s=chosen_s, tier=None, reason="the first checkpoint was measured")
    step = saved = 0
    lost, since_s = list(losses_s), t
    while t < begin + until_s:
        if lost and t + STEP_S >= begin + lost[0]:
            t = max(begin + lost.pop(0), t)
            tell("worker_lost", exit_code=-9, step=step, beat_t=t)
            t, attempt, step = t + BACK_S, attempt + 1, saved
            tell("attempt_formed", rank=None, world_size=1, nodes=1)
            tell("resumed", step=saved)
            since_s = t
            continue
        step, t, stalled = step + 1, t + STEP_S, 0.0
        if t - since_s >= every_s:
            t, saved, stalled, since_s = t + SAVE_S, step, SAVE_S, t + SAVE_S
            tell("snapshot", step=step, blocked_s=SAVE_S, kind="full")
            tell("commit", step=step, durable_s=0.1, tier="local", kind="full")
        if stalled or step % 10 == 0 or step == saved + 1:
            tell("step", step=step, seconds=STEP_S + stalled, stalled_s=stalled)
    tell("job_finished", rank=None, exit_code=0)
    return events


def stormy(every_s=30.0, **more):
    """An hour, and a storm in its middle: ten failures, 8 s apart in the mean."""
    chance, losses_s = random.Random(4), [1800.0]
    while len(losses_s) < 10:
        losses_s.append(losses_s[-1] + 1.0 + chance.expovariate(1 / 7.0))
    return story(losses_s, every_s=every_s, until_s=3600.0, **more)


def test_a_storm_is_found_with_what_it_cost_and_would_have_cost():
    events = stormy(chosen_s=28.0)
    (storm,) = facts(events).storms
    assert storm.num_failures == 10
    assert storm.begin_t == pytest.approx(1e6 + 1800.0, abs=1.0)
    assert 40 < storm.end_t - storm.begin_t < 140
    # Nothing was saved between them: all of the storm was done again and again.
    assert storm.all_lost_s > 0.6 * (storm.end_t - storm.begin_t)
    assert storm.lost_s["restarting"] == pytest.approx(10 * BACK_S, abs=2.0)
    assert storm.lost_s["replayed"] > 0.6 * storm.all_lost_s
    assert storm.calm.interval_s == 28.0
    assert storm.best.interval_s < 4.0
    assert storm.best.lost_s < 0.4 * storm.calm.lost_s
    assert storm.best.lost_s < storm.auto.lost_s < storm.calm.lost_s


def test_one_that_saved_often_lost_less():
    (seldom,), (often,) = facts(stormy()).storms, facts(stormy(every_s=1.0)).storms
    assert often.all_lost_s < 0.5 * seldom.all_lost_s
    assert often.calm.lost_s < seldom.calm.lost_s  # its own mean interval, where none was chosen


def test_it_is_in_words_and_in_numbers():
    events = stormy(chosen_s=28.0)
    first, parts, words = [line.plain for line in storm_lines(facts(events).storms[0])]
    assert "10 failures in 1 min" in first
    assert "replayed" in parts
    assert "with a checkpoint each 28.0 s as in calm" in words
    assert words.endswith("with auto")
    (numbers,) = json.loads(json.dumps(to_json(events)["storms"]))
    assert numbers["num_failures"] == 10
    assert numbers["all_lost_s"] == pytest.approx(sum(numbers["lost_s"].values()))


def test_failures_hours_apart_are_no_storm():
    job = facts(story([900.0, 2400.0], every_s=30.0, until_s=3600.0))
    assert len(job.incidents) == 2
    assert job.storms == []
    assert to_json([])["storms"] == []


def test_calm_is_what_the_storm_took_the_place_of():
    def told(t, interval_s, before_s, *, burst):
        event = {"interval_s": interval_s, "before_s": before_s, "burst": burst}
        return Event(
            t=t, mono=t, job="j", attempt=1, node="a", rank=0, event="cadence", fields=event
        )

    early, first, next_one = told(1, 30.0, 0.0, burst=False), told(6, 0.2, 19.0, burst=True), 7
    later = told(next_one, 0.1, 0.2, burst=True)
    assert _calm_s([early, first, later], 5.0) == 30.0
    assert _calm_s([first, later], 5.0) == 19.0
    assert _calm_s([told(1, 0.0, 0.0, burst=False)], 5.0) is None
