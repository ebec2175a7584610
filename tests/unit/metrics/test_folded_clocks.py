"""Ages that metrics tell are those that went by, also where a clock was set meanwhile."""

import pytest

from outlast.health.exporter import CadenceSetting
from outlast.ledger.events import Event
from outlast.metrics.folded import JobFold


def event(t, mono, name, **fields):
    head = {"job": "j", "attempt": 1, "node": "a", "rank": 0}
    return Event(t=t, mono=mono, **head, event=name, fields=fields)


@pytest.mark.parametrize("set_by_s", [0.0, 3600.0, -3600.0])
def test_the_age_of_a_commit_where_the_clock_was_set(set_by_s):
    fold = JobFold(CadenceSetting())
    events = [
        event(100.0, 100.0, "attempt_formed", world_size=1),
        event(101.0, 101.0, "commit", step=1, tier="local", durable_s=0.1, bytes=8),
        event(102.0 + set_by_s, 102.0, "step", step=2, seconds=1.0),
    ]
    now = 111.0 + set_by_s  # nine seconds later, by the clock as it is now
    fold.take(events, now)
    ages = fold.tally(now).values
    assert ages["outlast_commit_age_seconds"] == {("local",): 10.0}
    assert ages["outlast_progress_age_seconds"] == {(): 9.0}
