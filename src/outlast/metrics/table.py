"""The table of metrics: what each is called, what it says, and which labels it has.

Guarantees: nothing is exported that is not in this table, and its reference page is made of it.
Names begin with ``outlast_`` and end with their unit. Labels are bounded: no step is one, no path,
no text of an error. Every sample has ``job_id``, so that two jobs can share a text file's
directory.

=========  ========================================================================================
label      its values
=========  ========================================================================================
job_id     the job's
node       machines of the job, ``MOST_NODES`` at most; further ones are ``other``
rank       workers of this machine
tier       names of the job's tiers
part       ``PARTS`` of goodput; of a step: compute, wait, data, checkpoint
others     a fixed list each, given with the metric; whatever is not in it is ``other``
=========  ========================================================================================

A metric of the job is exported by each of its machines, from the same ledger: take ``max by
(job_id)``, or any one machine, and never the sum. What a machine alone says has ``node`` and
``rank``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, Literal, get_args

import msgspec

from outlast.ledger.goodput import PARTS
from outlast.policy.failures import Kind

MOST_NODES: Final = 1000
OTHER: Final = "other"
JOB_ID: Final = "job_id"
Form = Literal["gauge", "counter", "histogram", "summary"]

PHASES: Final = ("total", "copy", "hash", "write", "sync", "commit")
STEP_PARTS: Final = ("compute", "wait", "data", "checkpoint")
QUANTILES: Final = (0.5, 0.9, 0.99)
FAILURES: Final = ("worker_lost", "node_lost", "hang")
TIMEOUTS: Final = ("hang", "silent_machine", "watcher", "keeper", "process_held")
STALLS: Final = ("checkpoint", "hang", "slow_rank")
ANOMALIES: Final = ("nan", "infinity", "spike", OTHER)
INCIDENTS: Final = (
    "worker lost",
    "machine lost",
    "hang",
    "anomaly",
    "preemption notice",
    "drain",
    "restart",
    "ended without a word",
    OTHER,
)
RESTARTS: Final = (*(kind.value for kind in Kind), OTHER)
OPERATIONS: Final = ("save", "claim", "copy", "prune", "wait", OTHER)

WRITE_BUCKETS_S: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
RECOVERY_BUCKETS_S: Final = (1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 7200.0)


class MetricRow(msgspec.Struct, frozen=True, kw_only=True):
    """One metric.

    Attributes:
        name: as it is exported, without what a type adds (``_total``, ``_bucket``).
        form: its type.
        what: its meaning, in one sentence.
        labels: besides ``job_id``.
        values: label → its fixed values, where it has such; a counter has all of them from the
            start, at 0: Prometheus does not see a counter that begins at 1 rise.
        buckets: upper bounds, of a histogram.
        is_local: whether it is this machine's alone.
    """

    name: str
    form: Form
    what: str
    labels: tuple[str, ...] = ()
    values: Mapping[str, tuple[str, ...]] = {}
    buckets: tuple[float, ...] = ()
    is_local: bool = False

    @property
    def exported(self) -> str:
        """The name by which a query asks for its values."""
        return f"{self.name}_total" if self.form == "counter" else self.name


def _gauge(name: str, what: str, /, *labels: str, **more: tuple[str, ...]) -> MetricRow:
    return MetricRow(name=name, form="gauge", what=what, labels=(*labels, *more), values=more)


def _counter(name: str, what: str, /, *labels: str, **more: tuple[str, ...]) -> MetricRow:
    return MetricRow(name=name, form="counter", what=what, labels=(*labels, *more), values=more)


def _local(form: Form, name: str, what: str, *labels: str) -> MetricRow:
    return MetricRow(name=name, form=form, what=what, labels=("node", *labels), is_local=True)


TABLE: Final[tuple[MetricRow, ...]] = (
    # --- the job --------------------------------------------------------------------------------
    _gauge("outlast_job_running", "1 while the job runs, 0 once it has ended or drained."),
    _gauge("outlast_attempt", "Number of the newest attempt, from 1."),
    _gauge("outlast_world_size", "Workers of the newest attempt."),
    _gauge("outlast_steps_done", "The highest step that was completed."),
    _counter("outlast_steps_replayed", "Steps that were done again."),
    _gauge(
        "outlast_progress_ratio",
        "Steps done of those that the loop is to do, 0 to 1, where it was told how many (until=).",
    ),
    _gauge(
        "outlast_progress_age_seconds",
        "Seconds since the newest sample in which the job had completed a step for the first time.",
    ),
    _gauge(
        "outlast_goodput_seconds",
        "Worker-seconds of the job by what they went into; the parts add up to the whole. A gauge: "
        "seconds that are not explained yet move to their part when they are.",
        part=PARTS,
    ),
    _gauge("outlast_goodput_ratio", "The productive part of the whole, 0 to 1."),
    # --- checkpoints ----------------------------------------------------------------------------
    MetricRow(
        name="outlast_checkpoint_write_seconds",
        form="histogram",
        what="Seconds of a save by tier and phase: total is until it is committed there; copy is "
        "out of training, the others are the slowest rank's work of all threads.",
        labels=("tier", "phase"),
        values={"phase": PHASES},
        buckets=WRITE_BUCKETS_S,
    ),
    MetricRow(
        name="outlast_snapshot_blocked_seconds",
        form="histogram",
        what="Seconds that the training loop waited for one snapshot.",
        buckets=(0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
    ),
    _gauge("outlast_commit_age_seconds", "Seconds since the newest commit in this tier.", "tier"),
    _gauge(
        "outlast_commit_interval_seconds",
        "Seconds between two checkpoints in this tier, as they are meant: checkpoint.every, or the "
        "job's own choice.",
        "tier",
    ),
    _gauge("outlast_commit_step", "Step of the newest commit in this tier.", "tier"),
    _counter("outlast_commits", "Checkpoints that were committed in this tier.", "tier"),
    _counter("outlast_committed_bytes", "Bytes of the checkpoints committed there.", "tier"),
    _gauge("outlast_checkpoint_bytes", "Bytes of the newest checkpoint in this tier.", "tier"),
    _counter("outlast_saves_skipped", "Saves that were due and were not taken or did not arrive."),
    _counter("outlast_storage_errors", "Operations on storage that failed.", operation=OPERATIONS),
    # --- what it cost ---------------------------------------------------------------------------
    _counter(
        "outlast_stall_seconds",
        "Seconds that all workers stood still for: checkpoint is the loop's wait for saves, hang "
        "the silence before a hang was named, slow_rank the steps' wait for it as it was judged.",
        cause=STALLS,
    ),
    _counter(
        "outlast_lost_steps",
        "Completed steps that incidents took back, by the incident's kind.",
        reason=INCIDENTS,
    ),
    _counter(
        "outlast_lost_seconds",
        "Seconds that incidents cost: from the first sign to the first new step, and to do the "
        "lost steps again.",
        reason=INCIDENTS,
    ),
    _gauge(
        "outlast_spent_money",
        "What the machines have cost so far, in the currency of the prices (price.currency). Only "
        "where a price is set; machines whose kind has none are left out.",
    ),
    _gauge("outlast_useful_money", "Of what was spent: new steps, their data, the script's own."),
    _gauge("outlast_lost_money", "Of what was spent: the rest. Useful and lost make up the whole."),
    _gauge(
        "outlast_saved_money",
        "By how much the same job on demand, without interruptions, would have cost more. Below 0 "
        "where interruptions cost more than spot has spared. Only where both prices are set.",
    ),
    # --- what went wrong ------------------------------------------------------------------------
    _gauge("outlast_incident_open", "1 from the first sign of trouble to the first new step."),
    _counter("outlast_incidents", "Incidents that are over, by kind.", reason=INCIDENTS),
    MetricRow(
        name="outlast_recovery_seconds",
        form="histogram",
        what="Seconds of an incident, from its first sign to the first new step.",
        labels=("reason",),
        values={"reason": INCIDENTS},
        buckets=RECOVERY_BUCKETS_S,
    ),
    _counter(
        "outlast_restarts", "Restarts by the kind of failure (docs/failures.md).", reason=RESTARTS
    ),
    _counter(
        "outlast_failures",
        "Workers and machines lost, and hangs, by machine.",
        "node",
        kind=FAILURES,
    ),
    _counter(
        "outlast_timeouts",
        "Waits that came to their limit: workers without progress, machines without a word, "
        "watchers and keepers that were replaced, killed processes that did not end.",
        what=TIMEOUTS,
    ),
    _counter("outlast_anomalies", "Losses that went wrong.", kind=ANOMALIES),
    _counter("outlast_rollbacks", "Times that training went back to before an anomaly."),
    _gauge(
        "outlast_rank_slowdown_ratio",
        "By how much a slow rank is slower than the others, while it is.",
        "node",
        "rank",
    ),
    _gauge(
        "outlast_notice_left_seconds",
        "Seconds until a machine goes, as its platform said; negative once it is overdue.",
        "node",
    ),
    _counter(
        "outlast_ledger_lost_events",
        "Events that are missing in the ledger, because it could not be written.",
    ),
    _gauge("outlast_machines_left_out", "Machines that the job leaves out just now."),
    _counter(
        "outlast_messages_not_told",
        "Messages to people that were given up, as not every address has taken them.",
    ),
    # --- this machine ---------------------------------------------------------------------------
    _local(
        "gauge",
        "outlast_heartbeat_age_seconds",
        "Seconds since this worker last completed a step or updated its weights; before the first "
        "time, since the attempt began.",
        "rank",
    ),
    _local(
        "summary",
        "outlast_step_seconds",
        "Seconds of a step of this worker: quantiles of the newest 1024. Without outlast run, of "
        "the ledger's samples, each a mean over a second or more.",
        "rank",
    ),
    _local(
        "gauge",
        "outlast_step_gap_seconds",
        "The 99th percentile of its steps less the median.",
        "rank",
    ),
    _local(
        "counter",
        "outlast_step_part_seconds",
        "Seconds of its steps by what they went into: compute, wait (for other workers), data, "
        "checkpoint. Since the exporter began.",
        "rank",
        "part",
    ),
    _local(
        "gauge",
        "outlast_ledger_age_seconds",
        "Seconds since the newest line that this machine could read of the ledger.",
    ),
    _local("gauge", "outlast_ledger_readable", "1 while this machine can read the ledger."),
    _local("counter", "outlast_ledger_events", "Lines of the ledger that were read."),
)

ROWS: Final[Mapping[str, MetricRow]] = {row.name: row for row in TABLE}


def bounded(value: object, allowed: Iterable[str]) -> str:
    """The label's value, or ``other`` for what is not among those allowed."""
    return value if isinstance(value, str) and value in set(allowed) else OTHER


def series_of(row: MetricRow) -> tuple[str, ...]:
    """Names of the series that a metric has in Prometheus."""
    if row.form == "histogram":
        return tuple(f"{row.name}{end}" for end in ("_bucket", "_sum", "_count"))
    if row.form == "summary":
        return (row.name, f"{row.name}_sum", f"{row.name}_count")
    return (row.exported,)


FORMS: Final[tuple[str, ...]] = get_args(Form)
