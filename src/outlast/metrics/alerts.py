"""Alerts for Prometheus: the rule file that ``outlast metrics --rules`` prints.

Guarantees: each rule asks for metrics of the table alone, and says what to do next. A job that has
ended or drained rouses nobody, but for a machine that has vanished: its port answers no more, which
is Prometheus' own ``up``.

Every machine exports the job's metrics, so rules take the ``max`` over machines and never a sum.

What can go wrong: ``increase()`` sees no rise of a counter between two scrapes of which the first
is missing. So counters with fixed labels are there from the start, at 0.
"""

from __future__ import annotations

from typing import Final

import msgspec


class AlertRule(msgspec.Struct, frozen=True, kw_only=True):
    """One alert.

    Attributes:
        name: in Prometheus.
        expr: PromQL.
        lasts: how long it must hold before it fires.
        severity: "page" for a person now, "ticket" for one tomorrow.
        summary: one line, with Prometheus' templates.
        next_step: what to do.
    """

    name: str
    expr: str
    lasts: str
    severity: str
    summary: str
    next_step: str


RUNNING: Final = "max by (job_id) (outlast_job_running) == 1"


def _while_running(expr: str) -> str:
    return f"({expr}) and on (job_id) ({RUNNING})"


def _mean(metric: str, over: str, by: str, labels: str = "", ago: str = "") -> str:
    end = f"[{over}]{f' offset {ago}' if ago else ''}"
    total = f"max by (job_id, {by}) (increase({metric}_sum{labels}{end}))"
    count = f"max by (job_id, {by}) (increase({metric}_count{labels}{end}))"
    return f"({total} / ({count} > 0))"


WRITE: Final = "outlast_checkpoint_write_seconds"
TOTAL: Final = '{phase="total"}'
RECOVERY: Final = "outlast_recovery_seconds"
RULES: Final[tuple[AlertRule, ...]] = (
    AlertRule(
        name="OutlastCommitOld",
        expr=_while_running(
            "min by (job_id, tier) (outlast_commit_age_seconds) > "
            "2 * max by (job_id, tier) (outlast_commit_interval_seconds)"
        ),
        lasts="1m",
        severity="page",
        summary="{{ $labels.tier }} has had no commit for {{ $value | humanizeDuration }}, more "
        "than twice the interval",
        next_step="outlast report JOB; outlast checkpoints list JOB: is the tier full, or slow?",
    ),
    AlertRule(
        name="OutlastWriteSlower",
        expr=f"{_mean(WRITE, '30m', 'tier', TOTAL)} > "
        f"2 * {_mean(WRITE, '6h', 'tier', TOTAL, '30m')}",
        lasts="10m",
        severity="ticket",
        summary="saves to {{ $labels.tier }} take {{ $value | humanizeDuration }}, twice as long "
        "as in the six hours before",
        next_step="look at the phases of outlast_checkpoint_write_seconds: sync is the disk",
    ),
    AlertRule(
        name="OutlastRecoverySlower",
        expr=f"{_mean(RECOVERY, '6h', 'reason')} > 2 * {_mean(RECOVERY, '3d', 'reason', '', '6h')}",
        lasts="1m",
        severity="ticket",
        summary="coming back from {{ $labels.reason }} takes {{ $value | humanizeDuration }}, "
        "twice as long as in the three days before",
        next_step="outlast report JOB: which part grew, detecting or restarting?",
    ),
    AlertRule(
        name="OutlastStepsUneven",
        expr='max by (job_id, node, rank) (outlast_step_seconds{quantile="0.99"}) > '
        '2 * max by (job_id, node, rank) (outlast_step_seconds{quantile="0.5"})',
        lasts="10m",
        severity="ticket",
        summary="one step in a hundred of rank {{ $labels.rank }} takes "
        "{{ $value | humanizeDuration }}, more than twice the median",
        next_step="outlast_step_part_seconds_total says: data, checkpoint, or other workers?",
    ),
    AlertRule(
        name="OutlastRestartStorm",
        expr="sum by (job_id) "
        "(max by (job_id, reason) (increase(outlast_restarts_total[30m]))) >= 3",
        lasts="0m",
        severity="page",
        summary="{{ $value | humanize }} restarts within half an hour",
        next_step="outlast report JOB: is it one machine, one kind of failure, or the script?",
    ),
    AlertRule(
        name="OutlastMachineFailsAgain",
        expr="sum by (job_id, node) (max by (job_id, node, kind) "
        "(increase(outlast_failures_total[6h]))) >= 2",
        lasts="0m",
        severity="page",
        summary="{{ $labels.node }} has failed {{ $value | humanize }} times in six hours",
        next_step="outlast doctor there; a sick machine is left out with restart.failures",
    ),
    AlertRule(
        name="OutlastNoHeartbeat",
        expr=_while_running("max by (job_id, node, rank) (outlast_heartbeat_age_seconds) > 300"),
        lasts="1m",
        severity="page",
        summary="rank {{ $labels.rank }} on {{ $labels.node }} has done nothing for "
        "{{ $value | humanizeDuration }}",
        next_step="outlast report JOB shows a hang with its stacks; before the first step it loads",
    ),
    AlertRule(
        name="OutlastNoProgress",
        expr=_while_running("min by (job_id) (outlast_progress_age_seconds) > 900"),
        lasts="5m",
        severity="page",
        summary="no new step for {{ $value | humanizeDuration }}",
        next_step="outlast report JOB: does it restart again and again, or wait for machines?",
    ),
    AlertRule(
        name="OutlastMachineGoes",
        expr="min by (job_id, node) (outlast_notice_left_seconds) > 0",
        lasts="0m",
        severity="ticket",
        summary="{{ $labels.node }} goes in {{ $value | humanizeDuration }}",
        next_step="nothing: the job drains; see docs/notices.md",
    ),
    AlertRule(
        name="OutlastMessagesFail",
        expr="max by (job_id) (increase(outlast_messages_not_told_total[1h])) > 0",
        lasts="0m",
        severity="ticket",
        summary="{{ $value | humanize }} messages about the job could not be sent within an hour",
        next_step="outlast tell --test: is an address wrong, or its server away?",
    ),
)


def rule_file() -> str:
    """The rules as Prometheus reads them, YAML."""
    lines = [
        "# Alerts for jobs under Outlast, made by: outlast metrics --rules",
        "# In prometheus.yml:  rule_files: [outlast.rules.yml]",
        "groups:",
        "  - name: outlast",
        "    rules:",
    ]
    for rule in RULES:
        lines += [
            f"      - alert: {rule.name}",
            f"        expr: {_quoted(rule.expr)}",
            f"        for: {rule.lasts}",
            f"        labels: {{severity: {rule.severity}}}",
            "        annotations:",
            f"          summary: {_quoted(rule.summary)}",
            f"          next: {_quoted(rule.next_step)}",
        ]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """A scalar of YAML in single quotes, in which nothing but the quote has a meaning."""
    doubled = text.replace("'", "''")
    return f"'{doubled}'"
