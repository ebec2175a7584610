"""One dashboard for Grafana, made of the table: what ``outlast metrics --dashboard`` prints.

It is of Grafana's classic kind (schema 36), which every version since 8 imports. Guarantees: each
query is of a metric in the table, whose sentence is the panel's description; the unit of an axis is
the one that the metric's name ends with. Variables: the data source and the job.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from outlast.metrics.table import ROWS

WIDTH: Final = 24
HEIGHT: Final = 8
SCHEMA: Final = 36


class Drawn(NamedTuple):
    """One panel: its title, the metric whose sentence explains it, queries with their legends."""

    title: str
    metric: str
    queries: tuple[tuple[str, str], ...]
    form: str = "timeseries"
    width: int = 8
    stacked: bool = False


def _job(name: str, *labels: str, how: str = "max") -> str:
    by = ", ".join(labels)
    return f'{how} by ({by}) ({name}{{job_id="$job_id"}})'


def _rate(name: str, *labels: str) -> str:
    return f'max by ({", ".join(labels)}) (rate({name}{{job_id="$job_id"}}[$__rate_interval]))'


def _rise(name: str, *labels: str) -> str:
    return f'max by ({", ".join(labels)}) (increase({name}{{job_id="$job_id"}}[$__range]))'


def _percentile(name: str, share: float, *labels: str, more: str = "") -> str:
    chosen = f'{name}_bucket{{job_id="$job_id"{more}}}'
    by = ", ".join(("le", *labels))
    return f"histogram_quantile({share}, max by ({by}) (increase({chosen}[$__range])))"


def _shown(name: str, legend: str, *labels: str) -> tuple[tuple[str, str], ...]:
    return ((_job(name, *labels), legend),)


SECTIONS: Final[tuple[tuple[str, tuple[Drawn, ...]], ...]] = (
    (
        "Is it running, and how far is it",
        (
            Drawn("Running", "outlast_job_running", _shown("outlast_job_running", ""), "stat", 4),
            Drawn("Steps", "outlast_steps_done", _shown("outlast_steps_done", ""), "stat", 4),
            Drawn(
                "Of all steps",
                "outlast_progress_ratio",
                _shown("outlast_progress_ratio", ""),
                "stat",
                4,
            ),
            Drawn(
                "Attempt and workers",
                "outlast_attempt",
                (
                    (_job("outlast_attempt"), "attempt"),
                    (_job("outlast_world_size"), "workers"),
                ),
                "stat",
                4,
            ),
            Drawn(
                "Goodput", "outlast_goodput_ratio", _shown("outlast_goodput_ratio", ""), "stat", 4
            ),
            Drawn(
                "Since the newest step",
                "outlast_progress_age_seconds",
                ((_job("outlast_progress_age_seconds", how="min"), ""),),
                "stat",
                4,
            ),
            Drawn(
                "Where the time went",
                "outlast_goodput_seconds",
                _shown("outlast_goodput_seconds", "{{part}}", "part"),
                width=12,
                stacked=True,
            ),
            Drawn(
                "Time until machines go",
                "outlast_notice_left_seconds",
                ((_job("outlast_notice_left_seconds", "node", how="min"), "{{node}}"),),
                width=6,
            ),
            Drawn(
                "Incident open, machines left out",
                "outlast_incident_open",
                (
                    (_job("outlast_incident_open"), "incident"),
                    (_job("outlast_machines_left_out"), "left out"),
                ),
                width=6,
            ),
        ),
    ),
    (
        "Checkpoints",
        (
            Drawn(
                "Age of the newest commit, and the interval",
                "outlast_commit_age_seconds",
                (
                    (_job("outlast_commit_age_seconds", "tier", how="min"), "{{tier}}"),
                    (_job("outlast_commit_interval_seconds", "tier"), "{{tier}}, meant"),
                ),
            ),
            Drawn(
                "A save until it is committed",
                "outlast_checkpoint_write_seconds",
                tuple(
                    (
                        _percentile(
                            "outlast_checkpoint_write_seconds",
                            share,
                            "tier",
                            more=', phase="total"',
                        ),
                        f"{{{{tier}}}} p{share * 100:.0f}",
                    )
                    for share in (0.5, 0.99)
                ),
            ),
            Drawn(
                "Its phases, median",
                "outlast_checkpoint_write_seconds",
                (
                    (
                        _percentile("outlast_checkpoint_write_seconds", 0.5, "tier", "phase"),
                        "{{tier}} {{phase}}",
                    ),
                ),
            ),
            Drawn(
                "The loop waits for a snapshot, p99",
                "outlast_snapshot_blocked_seconds",
                ((_percentile("outlast_snapshot_blocked_seconds", 0.99), ""),),
                width=8,
            ),
            Drawn(
                "Bytes of a checkpoint",
                "outlast_checkpoint_bytes",
                _shown("outlast_checkpoint_bytes", "{{tier}}", "tier"),
                width=8,
            ),
            Drawn(
                "Commits",
                "outlast_commits",
                ((_rise("outlast_commits_total", "tier"), "{{tier}}"),),
                "bargauge",
                4,
            ),
            Drawn(
                "Bytes a second, committed",
                "outlast_committed_bytes",
                ((_rate("outlast_committed_bytes_total", "tier"), "{{tier}}"),),
                width=8,
            ),
            Drawn(
                "Saves that were skipped, storage that failed",
                "outlast_saves_skipped",
                (
                    (_rise("outlast_saves_skipped_total"), "skipped"),
                    (_rise("outlast_storage_errors_total", "operation"), "{{operation}}"),
                ),
                "bargauge",
                6,
            ),
        ),
    ),
    (
        "Steps",
        (
            Drawn(
                "Seconds of a step",
                "outlast_step_seconds",
                (
                    (
                        _job("outlast_step_seconds", "rank", "quantile"),
                        "rank {{rank}} p{{quantile}}",
                    ),
                ),
            ),
            Drawn(
                "p99 less the median",
                "outlast_step_gap_seconds",
                _shown("outlast_step_gap_seconds", "rank {{rank}}", "rank"),
            ),
            Drawn(
                "What steps are spent on",
                "outlast_step_part_seconds",
                (
                    (
                        _rate("outlast_step_part_seconds_total", "rank", "part"),
                        "rank {{rank}} {{part}}",
                    ),
                ),
            ),
            Drawn(
                "Heartbeat",
                "outlast_heartbeat_age_seconds",
                _shown("outlast_heartbeat_age_seconds", "{{node}} rank {{rank}}", "node", "rank"),
            ),
            Drawn(
                "Slow ranks",
                "outlast_rank_slowdown_ratio",
                _shown("outlast_rank_slowdown_ratio", "{{node}} rank {{rank}}", "node", "rank"),
            ),
            Drawn(
                "Standing still, by cause",
                "outlast_stall_seconds",
                ((_rate("outlast_stall_seconds_total", "cause"), "{{cause}}"),),
            ),
        ),
    ),
    (
        "What went wrong, and what it cost",
        (
            Drawn(
                "Restarts by kind of failure",
                "outlast_restarts",
                ((f"{_rise('outlast_restarts_total', 'reason')} > 0", "{{reason}}"),),
                "bargauge",
            ),
            Drawn(
                "Failures by machine",
                "outlast_failures",
                ((f"{_rise('outlast_failures_total', 'node', 'kind')} > 0", "{{node}} {{kind}}"),),
                "bargauge",
            ),
            Drawn(
                "Time-outs",
                "outlast_timeouts",
                ((f"{_rise('outlast_timeouts_total', 'what')} > 0", "{{what}}"),),
                "bargauge",
            ),
            Drawn(
                "Time lost, by incident",
                "outlast_lost_seconds",
                ((f"{_rise('outlast_lost_seconds_total', 'reason')} > 0", "{{reason}}"),),
                "bargauge",
            ),
            Drawn(
                "Steps lost, and done again",
                "outlast_lost_steps",
                (
                    (f"{_rise('outlast_lost_steps_total', 'reason')} > 0", "{{reason}}"),
                    (_rise("outlast_steps_replayed_total"), "replayed"),
                ),
                "bargauge",
            ),
            Drawn(
                "Coming back, p90",
                "outlast_recovery_seconds",
                ((_percentile("outlast_recovery_seconds", 0.9, "reason"), "{{reason}}"),),
            ),
            Drawn(
                "Losses that went wrong",
                "outlast_anomalies",
                (
                    (f"{_rise('outlast_anomalies_total', 'kind')} > 0", "{{kind}}"),
                    (_rise("outlast_rollbacks_total"), "rolled back"),
                ),
                "bargauge",
            ),
            Drawn(
                "Incidents",
                "outlast_incidents",
                ((f"{_rise('outlast_incidents_total', 'reason')} > 0", "{{reason}}"),),
                "bargauge",
            ),
            Drawn(
                "The ledger, as each machine reads it",
                "outlast_ledger_age_seconds",
                (
                    (_job("outlast_ledger_age_seconds", "node"), "{{node}}"),
                    (f"{_job('outlast_ledger_readable', 'node')} == 0", "{{node}} unreadable"),
                    (_rise("outlast_ledger_lost_events_total"), "events that are missing"),
                ),
            ),
            Drawn(
                "Money, in the currency of the prices that are set",
                "outlast_spent_money",
                tuple(
                    (_job(f"outlast_{what}_money"), what)
                    for what in ("spent", "useful", "lost", "saved")
                ),
                width=12,
            ),
            Drawn(
                "Messages that could not be sent",
                "outlast_messages_not_told",
                ((_rise("outlast_messages_not_told_total"), ""),),
                "stat",
                12,
            ),
        ),
    ),
)


def as_json() -> str:
    """The dashboard as Grafana imports it."""
    return json.dumps(dashboard(), indent=1) + "\n"


def dashboard() -> dict[str, Any]:
    """The dashboard."""
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "title": "Outlast",
        "uid": "outlast-job",
        "schemaVersion": SCHEMA,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "tags": ["outlast"],
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "label": "Prometheus",
                    "type": "datasource",
                    "query": "prometheus",
                },
                {
                    "name": "job_id",
                    "label": "Job",
                    "type": "query",
                    "datasource": source,
                    "query": "label_values(outlast_job_running, job_id)",
                    "refresh": 2,
                    "sort": 1,
                },
            ]
        },
        "panels": list(_panels(source)),
    }


def _panels(source: dict[str, str]) -> Iterator[dict[str, Any]]:
    number, y = 0, 0
    for title, drawn in SECTIONS:
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": title,
            "collapsed": False,
            "panels": [],
            "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1},
        }
        x, y = 0, y + 1
        height = 0
        for one in drawn:
            if x + one.width > WIDTH:
                x, y = 0, y + height
            number += 1
            height = HEIGHT // 2 if one.form == "stat" else HEIGHT
            at = {"x": x, "y": y, "w": one.width, "h": height}
            yield _panel(one, number, at, source)
            x += one.width
        y += height


def _panel(one: Drawn, number: int, at: dict[str, int], source: dict[str, str]) -> dict[str, Any]:
    custom: dict[str, Any] = {"fillOpacity": 10, "showPoints": "never"}
    if one.stacked:
        custom |= {"stacking": {"mode": "normal", "group": "A"}, "fillOpacity": 60}
    defaults: dict[str, Any] = {"unit": _unit(one.metric)}
    if one.form == "timeseries":
        defaults["custom"] = custom
    return {
        "id": number,
        "type": one.form,
        "title": one.title,
        "description": ROWS[one.metric].what,
        "datasource": source,
        "gridPos": at,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + position),
                "datasource": source,
                "expr": query,
                "legendFormat": legend,
                "instant": one.form == "bargauge",
            }
            for position, (query, legend) in enumerate(one.queries)
        ],
    }


def _unit(metric: str) -> str:
    """Grafana's word for the unit that a name ends with."""
    words = {"seconds": "s", "bytes": "bytes", "ratio": "percentunit"}
    if metric == "outlast_rank_slowdown_ratio":
        return "none"
    return words.get(metric.rpartition("_")[2], "none")
