"""What is exported: names, bounds, text that Prometheus reads."""

import json
import random
import re

import pytest
import yaml
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from unit_prices import priced

from outlast.health.exporter import CadenceSetting
from outlast.ledger.events import EVENT_NAMES, Event, encode
from outlast.ledger.file import FILE_NAME
from outlast.metrics.alerts import RULES, rule_file
from outlast.metrics.dashboard import dashboard
from outlast.metrics.exposition import Exposition
from outlast.metrics.folded import MOST_TIERS, JobFold
from outlast.metrics.table import MOST_NODES, PHASES, ROWS, TABLE, series_of
from outlast.prices import NO_PRICES
from outlast.report.facts import facts


class Story:
    """A ledger that is written event by event."""

    def __init__(self):
        self.t = 1000.0
        self.events = []

    def __call__(self, name, rank=0, attempt=1, node="m0", after=1.0, **fields):
        self.t += after
        head = {"t": self.t, "mono": self.t, "job": "j", "attempt": attempt, "node": node}
        self.events.append(Event(**head, rank=rank, event=name, fields=fields))


def whole_story():
    """One of everything that is counted."""
    story = Story()
    story("job_started", rank=None)
    story("attempt_formed", rank=None, world_size=2, nodes=2)
    story("cadence", interval_s=30.0, tier=None, every=None)
    story("resumed", step=0)
    story("step", step=10, seconds=1.0, stalled_s=0.25, until=40)
    story("snapshot", step=10, blocked_s=0.02, bytes=100)
    timings = {"copy_s": 0.1, "hash_s": 0.2, "write_s": 0.3, "sync_s": 0.1, "commit_s": 0.05}
    story("commit", step=10, durable_s=0.6, bytes=100, tier="local", kind="full", timings=timings)
    story("tier_copied", step=10, seconds=5.0, bytes=100, tier="shared")
    story("step", step=20, seconds=1.0, stalled_s=0.0, until=40)
    story("worker_lost", rank=1, node="m1", step=20, beat_t=story.t)
    story("restart", rank=None, kind="killed", restarts=1)
    story("restart", rank=None, node="m1", kind="peer", restarts=1)  # the same, by another agent
    story("attempt_formed", rank=None, attempt=2, world_size=2, nodes=2)
    story("resumed", attempt=2, step=10)
    story("step", attempt=2, step=15, seconds=1.0, stalled_s=0.0, until=40)
    story("step", attempt=2, step=25, seconds=1.0, stalled_s=0.0, until=40)
    story("hang", rank=None, attempt=2, nodes=["m1"], silent_s=4.0, step=25)
    story("restart", rank=None, attempt=2, kind="nobody knows this kind", restarts=2)
    story("straggler", attempt=2, node="m1", ranks=[1], factor=2.5, since_step=16, step=25)
    story("notice", rank=None, attempt=2, deadline_t=story.t + 100.0)
    story("storage_error", attempt=2, operation="save")
    story("save_skipped", attempt=2, step=30)
    story("anomaly", attempt=2, kind="nan", action="report")
    story("rollback", attempt=2, step=10)
    story("watch_gap", rank=None, attempt=2, what="keeper", seconds=1.0)
    story("watch_gap", attempt=2, what="ledger", seconds=1.0, lost=3)
    story("not_told", rank=None, attempt=2, addresses=1, of=1, why="HTTP 500", since_t=story.t)
    story("not_told", rank=None, attempt=2, over=True)
    story("left_out", rank=None, attempt=2, node="m9", until_t=story.t + 500)
    return story


def folded(story, now=None, cadence=None):
    fold = JobFold(cadence or CadenceSetting(tiers={"local": 1, "shared": 4}))
    now = story.t + 60 if now is None else now
    fold.take(story.events, now)
    return fold.tally(now)


def written(story, directory):
    (directory / FILE_NAME).write_bytes(b"".join(map(encode, story.events)))
    exposition = Exposition("j", directory, "m0", CadenceSetting(tiers={"local": 1, "shared": 4}))
    while exposition.look():
        pass
    return exposition


def test_each_event_has_its_number():
    story = whole_story()
    values = folded(story).values
    expected = {
        "outlast_attempt": {(): 2},
        "outlast_world_size": {(): 2},
        "outlast_steps_done": {(): 25},
        "outlast_progress_ratio": {(): 25 / 40},
        "outlast_steps_replayed": {(): 10},
        "outlast_commits": {("local",): 1, ("shared",): 1},
        "outlast_committed_bytes": {("local",): 100, ("shared",): 100},
        "outlast_commit_step": {("local",): 10, ("shared",): 10},
        "outlast_commit_interval_seconds": {("local",): 30.0, ("shared",): 120.0},
        "outlast_rank_slowdown_ratio": {("m1", "1"): 2.5},
        "outlast_saves_skipped": {(): 1},
        "outlast_rollbacks": {(): 1},
        "outlast_machines_left_out": {(): 1},
    }
    for name, wanted in expected.items():
        assert values[name] == pytest.approx(wanted), name
    assert sum(values["outlast_restarts"].values()) == 2
    assert values["outlast_restarts"][("killed",)] == 1
    assert values["outlast_ledger_lost_events"][()] == 3
    assert values["outlast_restarts"][("other",)] == 1
    assert values["outlast_failures"][("m1", "worker_lost")] == 1
    assert values["outlast_failures"][("m1", "hang")] == 1
    assert values["outlast_failures"][("m0", "hang")] == 0  # there before it rises
    assert values["outlast_timeouts"][("keeper",)] == 1
    assert values["outlast_timeouts"][("hang",)] == 1
    assert values["outlast_stall_seconds"][("checkpoint",)] == pytest.approx(0.25)
    assert values["outlast_stall_seconds"][("hang",)] == pytest.approx(4.0)
    assert values["outlast_storage_errors"][("save",)] == 1
    assert values["outlast_anomalies"][("nan",)] == 1
    assert values["outlast_incidents"][("worker lost",)] == 1
    assert values["outlast_lost_steps"][("worker lost",)] == 10
    assert values["outlast_notice_left_seconds"][("m0",)] < 100
    assert values["outlast_messages_not_told"][()] == 1


def test_money_is_the_reports_and_is_there_only_with_a_price():
    story, names = whole_story(), ("spent", "useful", "lost", "saved")
    now = story.t + 60

    def said(prices, now=now):
        fold = JobFold(CadenceSetting(), prices)
        fold.take(story.events, now)
        values = fold.tally(now).values
        return [values.get(f"outlast_{name}_money", {}).get(()) for name in names]

    spent, useful, lost, saved = said(priced("36", "100"))
    paid = facts(story.events, now=now, prices=priced("36", "100")).money
    assert [spent, useful, lost, saved] == pytest.approx(
        [paid.cost, paid.useful, paid.lost, paid.saved]
    )
    assert spent == pytest.approx(useful + lost)
    assert spent > lost > 0
    assert said(priced("36")) == [spent, useful, lost, None]
    assert said(NO_PRICES) == [None] * 4
    # Hours later nobody knows what the machines do: as in the report, nothing more is counted.
    silent = facts(story.events, now=now + 9e6, prices=priced("36")).money
    assert said(priced("36"), now + 9e6)[0] == pytest.approx(silent.cost)
    assert silent.cost < spent


def test_ages_go_on_while_nothing_is_written():
    story = whole_story()
    committed_t = next(one.t for one in story.events if one.event == "commit")
    for later_s in (10.0, 1000.0):
        values = folded(story, now=story.t + later_s).values
        age_s = story.t + later_s - committed_t
        assert values["outlast_commit_age_seconds"][("local",)] == pytest.approx(age_s)


@pytest.mark.parametrize(
    ("cadence", "seconds"),
    [
        (CadenceSetting(seconds=60.0, tiers={"local": 1}), 60.0),
        (CadenceSetting(seconds=60.0, tiers={"local": 5}), 300.0),
        (CadenceSetting(steps=100, tiers={"local": 1}), 100 * 0.2),  # where steps are slow
    ],
)
def test_the_interval_is_the_one_that_is_meant(cadence, seconds):
    found = folded(whole_story(), cadence=cadence).values["outlast_commit_interval_seconds"]
    assert found[("local",)] == pytest.approx(seconds, rel=0.05)


def test_it_is_text_that_both_formats_accept(tmp_path):
    exposition = written(whole_story(), tmp_path)
    text, kind = exposition.text("application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    families = {one.name: one for one in text_string_to_metric_families(text.decode())}
    assert set(families) <= set(ROWS)
    for family in families.values():
        row = ROWS[family.name]
        assert family.type == row.form
        for sample in family.samples:
            assert sample.labels["job_id"] == "j"
            assert set(sample.labels) - {"le", "quantile", "job_id"} == set(row.labels)
    assert exposition.text("")[1].startswith("text/plain; version=0.0.4")


def test_garbage_in_a_ledger_changes_no_bound(tmp_path):
    """Fields of any kind, thousands of machines and tiers: no traceback, and series have an end."""
    rng, story = random.Random(7), Story()
    junk = [None, True, -1, 10**30, float("nan"), "x", [], {}, ["a"], {"a": 1}, "checkpoint"]
    names = ("step", "tier", "kind", "operation", "what", "nodes", "seconds", "bytes", "ranks")
    names += ("deadline_t", "timings", "world_size", "until_t", "interval_s", "durable_s")
    for number in range(5000):
        fields = {name: rng.choice(junk) for name in names if rng.random() < 0.7}
        if rng.random() < 0.5:
            fields["tier"] = f"tier-{number}"
        name = rng.choice(sorted(EVENT_NAMES))
        rank = rng.choice([0, 1, None])
        story(name, rank, rng.randrange(3), node=f"m{number}", after=0.1, **fields)
    text = written(story, tmp_path).text()[0].decode()
    series = [line for line in text.splitlines() if line and line[0] != "#"]
    seen = {label: set(re.findall(rf'{label}="([^"]*)"', text)) for label in ("tier", "node")}
    assert "other" in seen["tier"]
    assert len(seen["tier"]) <= MOST_TIERS + 1
    assert len(seen["node"]) <= MOST_NODES + 1
    assert len(series) < 3 * MOST_NODES + 40 * MOST_TIERS * len(PHASES) + 1000
    assert not [line for line in series if line.lower().endswith(" nan")]


def test_the_ledger_is_read_once(tmp_path):
    story = whole_story()
    exposition = written(story, tmp_path)
    assert exposition.is_complete
    before = exposition.text()[0]
    (tmp_path / FILE_NAME).rename(tmp_path / "gone")
    assert not exposition.look()
    assert b'outlast_ledger_readable{job_id="j",node="m0"}' in before


def test_names_end_with_their_unit_and_labels_are_few():
    for row in TABLE:
        assert row.name.startswith("outlast_")
        assert row.what.endswith(".")
        assert len(row.labels) <= 3
        assert not {"step", "path", "error"} & set(row.labels)
        assert not row.name.endswith(("_total", "_ms", "_minutes", "_percent"))
        assert bool(row.buckets) == (row.form == "histogram")


EXPORTED = {series for row in TABLE for series in series_of(row)}


def asked_for(expression):
    """The metrics of an expression of PromQL."""
    words = "".join(c if c.isalnum() or c == "_" else " " for c in expression).split()
    return {word for word in words if word.startswith("outlast_")}


def test_the_dashboard_asks_for_what_is_exported():
    panels = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]
    asked = set()
    for panel in panels:
        assert panel["description"]
        for target in panel["targets"]:
            found = asked_for(target["expr"])
            assert found, panel["title"]
            assert found <= EXPORTED, panel["title"]
            asked |= found
    of_rows = {row.name for row in TABLE if asked & set(series_of(row))}
    # Of each metric there is a panel, but for one that says how the exporter itself fares.
    assert set(ROWS) - of_rows <= {"outlast_ledger_events", "outlast_commit_step"}
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(ids) == len(set(ids))
    json.dumps(dashboard())


def test_panels_do_not_overlap():
    taken = set()
    for panel in dashboard()["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_the_rules_ask_for_what_is_exported():
    rules = yaml.safe_load(rule_file())["groups"][0]["rules"]
    assert [one["alert"] for one in rules] == [one.name for one in RULES]
    for rule in rules:
        assert asked_for(rule["expr"])
        assert asked_for(rule["expr"]) <= EXPORTED
        assert rule["annotations"]["next"]
