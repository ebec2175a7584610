"""What versions of before have written, without today's fields and events, says what it can."""

import json

import msgspec
import pytest
from unit_prices import priced

from outlast.health.exporter import CadenceSetting
from outlast.ledger.goodput import in_order, split
from outlast.ledger.incidents import incidents
from outlast.ledger.so_far import SoFar
from outlast.metrics.folded import JobFold
from outlast.report.facts import facts, to_json
from outlast.report.page import page
from report_story import START_T, story

FIRST = {
    "job_started": {"command"},
    "attempt_formed": {"world_size", "nodes"},
    "resumed": {"step", "source"},
    "step": {"step", "seconds", "stalled_s", "scalars"},
    "snapshot": {"step", "blocked_s", "bytes", "reason"},
    "commit": {"step", "durable_s", "bytes", "files", "tier"},
    "tier_copied": {"step", "tier", "seconds", "bytes"},
    "notice": {"source", "action", "deadline_t", "detail"},
    "drain_agreed": {"step"},
    "drained": {"step", "committed"},
    "worker_lost": {"pid", "exit_code", "signal", "step", "beat_t", "error"},
    "hang": {"rank", "ranks", "step", "beat_t"},
    "restart": {"reason", "restarts"},
    "job_finished": {"exit_code", "reason"},
}
CLOSE = {"abs": 1e-6}
WORKERS, MACHINES = 32, 4
AGE_S, AGE_AGAIN_S = 9.0, 8.0  # how long launchers had run before they said so: not known before


def before():
    """The story as the first version would have written it."""
    return [
        msgspec.structs.replace(
            event,
            fields={
                name: event.fields[name] for name in FIRST[event.event] if name in event.fields
            },
        )
        for event in story()
        if event.event in FIRST
    ]


def test_its_time_adds_up_and_goes_where_it_went():
    old, new = split(before()).workers, split(story()).workers
    assert sum(old.parts().values()) == pytest.approx(old.total, **CLOSE)
    assert old.total == pytest.approx(new.total - WORKERS * AGE_S, **CLOSE)
    for part in ("replayed", "stalled", "detecting"):
        assert getattr(old, part) == pytest.approx(getattr(new, part), rel=0.02), part
    moved_s = WORKERS * AGE_AGAIN_S
    assert old.restarting == pytest.approx(new.restarting - moved_s, **CLOSE)
    assert old.waiting == pytest.approx(new.waiting + moved_s, **CLOSE)
    assert old.productive == pytest.approx(new.productive + new.data, rel=1e-4)
    assert (old.data, old.script, old.building) == (0, 0, 0)
    assert old.starting == pytest.approx(new.starting + new.building - WORKERS * AGE_S, **CLOSE)
    assert old.other == pytest.approx(new.script + WORKERS * 3.0, **CLOSE)  # behind the last sample
    assert (old.steps_done, old.attempts, old.commits) == (10_500, 4, new.commits)


def test_whose_time_it_was_is_known_by_attempt_and_of_no_machine():
    found = split(before())
    assert list(found.by_attempt) == list(split(story()).by_attempt)
    assert list(found.by_machine) == [""]
    assert sum(found.by_machine[""].values()) == pytest.approx(found.workers.total, **CLOSE)


def test_its_incidents_are_the_same():
    def seen(events):
        return [(one.kind, one.began_t, one.lost_steps, one.back_t) for one in incidents(events)]

    assert [one[0] for one in seen(before())] == ["worker lost", "hang", "preemption notice"]
    assert seen(before()) == seen(story())


def test_it_folds_bit_by_bit_as_in_one():
    events = in_order(before())
    so_far, fold = SoFar(), JobFold(CadenceSetting())
    for at in range(0, len(events), 50):
        so_far.take(events[at : at + 50])
        fold.take(events[at : at + 50], events[min(at + 49, len(events) - 1)].t)
    assert so_far.goodput().parts() == pytest.approx(split(events).workers.parts())
    fold.take([], START_T + 10**6)
    values = fold.tally(START_T + 10**6).values
    assert values["outlast_steps_done"] == {(): 10_500}
    assert values["outlast_incidents"]["preemption notice",] == 1
    assert values["outlast_job_running"] == {(): 0}


def test_it_is_reported():
    html = page(before(), prices=priced(2.0))
    assert "<h3>Ranks" not in html  # nobody had written them down
    assert "finished" in html
    data = json.loads(json.dumps(to_json(before(), prices=priced(2.0))))
    assert data["ranks"] == []
    assert data["by_tier"]["local"]["num"] > 30
    assert data["by_tier"]["local"]["blocked_s"] > 0  # by the steps that came there
    held_s = facts(story()).machines.held - MACHINES * (AGE_S + AGE_AGAIN_S)
    assert facts(before()).machines.held == pytest.approx(held_s, **CLOSE)
