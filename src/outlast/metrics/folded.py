"""The job's metrics, from its ledger: each event is read and folded once.

``Tally`` holds numbers by metric and labels; ``JobFold`` fills one from events. Guarantees: a field
that is missing, or no number, changes nothing; labels outside of their list become ``other``; what
an answer costs does not grow with the ledger, but for the goodput's copy of its commits.

Counters start at 0 for every value of a label with a fixed list, and for each machine from when it
is first heard of.

An exporter that is started again reads the ledger from its beginning, and comes to the same
numbers: counters do not fall, and nothing has to be kept.

What can go wrong: events settle after ``so_far.SETTLES_S`` (several machines write them), and so do
the counters.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

import msgspec

from outlast.health.exporter import CadenceSetting
from outlast.ledger.events import Event
from outlast.ledger.goodput import Split, number, whole
from outlast.ledger.incidents import Incident
from outlast.ledger.measured import Measured
from outlast.ledger.so_far import SoFar
from outlast.metrics.table import (
    ANOMALIES,
    INCIDENTS,
    MOST_NODES,
    OPERATIONS,
    PHASES,
    RESTARTS,
    ROWS,
    TABLE,
    MetricRow,
    bounded,
)
from outlast.prices import NO_PRICES, Prices
from outlast.report.findings import SILENT_S
from outlast.report.money import Money, money

Labels = tuple[str, ...]
MOST_TIERS: Final = 20
NOTICE_KEPT_S: Final = 600.0  # after its deadline, while nothing else is heard of the machine
_TIMINGS: Final = {f"{phase}_s": phase for phase in PHASES}


class Buckets(msgspec.Struct):
    """A histogram of one set of labels: how many in each bucket, and their sum."""

    counts: list[int]
    sum: float = 0.0

    def observe(self, value: float, bounds: tuple[float, ...]) -> None:
        """Count one more."""
        self.counts[bisect.bisect_left(bounds, value)] += 1
        self.sum += value

    def cumulative(self, bounds: tuple[float, ...]) -> list[tuple[str, float]]:
        """(upper bound, how many at most that), the last one ``+Inf``."""
        names = [*(str(bound) for bound in bounds), "+Inf"]
        return list(zip(names, map(float, itertools.accumulate(self.counts)), strict=True))


class Tally:
    """Values by metric and labels.

    Attributes:
        values: name → labels (in the table's order) → value, of gauges and counters.
        histograms: the same of histograms.
    """

    def __init__(self) -> None:
        self.values: dict[str, dict[Labels, float]] = {}
        self.histograms: dict[str, dict[Labels, Buckets]] = {}
        for row in TABLE:
            if row.form == "counter" and set(row.labels) == set(row.values) and not row.is_local:
                for labels in itertools.product(*(row.values[label] for label in row.labels)):
                    self.add(row.name, 0.0, *labels)

    def add(self, name: str, value: float, *labels: str) -> None:
        """A counter goes up."""
        found = self.values.setdefault(name, {})
        found[labels] = found.get(labels, 0.0) + max(value, 0.0)

    def put(self, name: str, value: float, *labels: str) -> None:
        """A gauge stands here."""
        self.values.setdefault(name, {})[labels] = value

    def observe(self, name: str, value: float | None, *labels: str) -> None:
        """A histogram has one more; None is none."""
        if value is None or value < 0:
            return
        bounds = ROWS[name].buckets
        found = self.histograms.setdefault(name, {})
        found.setdefault(labels, Buckets([0] * (len(bounds) + 1))).observe(value, bounds)

    def rows(self) -> Iterator[tuple[MetricRow, dict[Labels, float], dict[Labels, Buckets]]]:
        """Each metric that has something to say."""
        for row in TABLE:
            values, counted = self.values.get(row.name, {}), self.histograms.get(row.name, {})
            if values or counted:
                yield row, values, counted


class JobFold:
    """What the ledger says so far.

    Args:
        cadence: how often the settings ask for a checkpoint.
        prices: of machines; without any there is no money.

    Attributes:
        so_far: goodput and incidents.
        measured: what saves and steps have taken.
        left_out: machine that is left out → until when.
    """

    def __init__(self, cadence: CadenceSetting, prices: Prices = NO_PRICES) -> None:
        self._cadence, self._prices = cadence, prices
        self.so_far = SoFar()
        self.measured = Measured()
        self._tally = Tally()
        self._nodes: set[str] = set()
        self._commits: dict[str, float] = {}  # tier → when the newest was committed
        self._tiers: set[str] = set()
        self._interval_s: float | None = None  # the job's own choice
        self._every: dict[str, int] = {}  # tier → the job's own choice
        self._slow: dict[Labels, float] = {}
        self._notices: dict[str, float] = {}
        self.left_out: dict[str, float] = {}
        self._restarted_in: int | None = None  # the attempt of the newest restart
        self._progress_t: float | None = None
        self._steps_done = 0
        self._is_running = False

    def take(self, events: Iterable[Event], now: float) -> list[Event]:
        """Take what was read of the ledger, up to wall-clock time ``now``.

        Returns:
            The events that are settled by it, as :meth:`SoFar.take` does.
        """
        settled = self.so_far.take(events, now)
        self._fold(settled)
        return settled

    def tally(self, now: float) -> Tally:
        """All metrics of the job at wall-clock time ``now``; valid until the next ``take``."""
        tally, steady, newest_t = self._tally, self.so_far.steady(now), self.so_far.newest_t
        # As in the report: of a job that has fallen silent nobody knows what it does.
        is_silent = newest_t is not None and steady - newest_t > SILENT_S
        split, now = self.so_far.split(None if is_silent else now), steady
        for part, seconds in split.workers.parts().items():
            tally.put("outlast_goodput_seconds", seconds, part)
        tally.put("outlast_goodput_ratio", split.workers.fraction_productive)
        tally.put("outlast_steps_done", split.workers.steps_done)
        tally.values["outlast_steps_replayed"] = {(): float(split.workers.steps_replayed)}
        self._pay(split)
        tally.put("outlast_job_running", float(self._is_running))
        tally.put("outlast_incident_open", float(self.so_far.is_in_incident))
        if self._progress_t is not None:
            tally.put("outlast_progress_age_seconds", max(now - self._progress_t, 0.0))
        for tier, t in self._commits.items():
            tally.put("outlast_commit_age_seconds", max(now - t, 0.0), tier)
            interval_s = self._interval_of(tier)
            if interval_s is not None:
                tally.put("outlast_commit_interval_seconds", interval_s, tier)
        tally.values["outlast_rank_slowdown_ratio"] = dict(self._slow)
        tally.values["outlast_notice_left_seconds"] = {
            (node,): t - now for node, t in self._notices.items() if now - t < NOTICE_KEPT_S
        }
        left_out = sum(until_t > now for until_t in self.left_out.values())
        tally.put("outlast_machines_left_out", left_out)
        return tally

    def _pay(self, split: Split) -> None:
        paid = money(split, self.measured.kinds, self._prices) or Money()
        for name, amount in (
            ("outlast_spent_money", paid.cost),
            ("outlast_useful_money", paid.useful),
            ("outlast_lost_money", paid.lost),
            ("outlast_saved_money", paid.saved),
        ):
            if amount is not None:
                self._tally.put(name, amount)

    def _fold(self, events: Iterable[Event]) -> None:
        for event in events:
            self.measured.take(event)
            if event.node not in self._nodes:
                self._hear_of(event.node)
            act = _ACTS.get(event.event)
            if act is not None:
                act(self, event)
        if over := self.so_far.over():
            again_s = self.so_far.split().workers.again_s
            for incident in over:
                self._over(incident, again_s)

    def _hear_of(self, node: str) -> None:
        if len(self._nodes) < MOST_NODES:
            self._nodes.add(node)
            for kind in ROWS["outlast_failures"].values["kind"]:
                self._tally.add("outlast_failures", 0.0, node, kind)

    def _node(self, name: object) -> str:
        if isinstance(name, str) and name not in self._nodes:
            self._hear_of(name)
        return bounded(name, self._nodes)

    def _tier(self, event: Event) -> str:
        name = event.get("tier")
        if isinstance(name, str) and name and len(self._tiers) < MOST_TIERS:
            self._tiers.add(name)
        return bounded(name, self._tiers)

    def _interval_of(self, tier: str) -> float | None:
        """Seconds between two checkpoints of the tier as they are meant, if that is known."""
        base_s = self._interval_s if self._cadence.seconds is None else self._cadence.seconds
        if self._cadence.steps is not None:
            step = self.measured.step
            base_s = None if step is None else self._cadence.steps * step.slow_s
        every = self._cadence.tiers.get(tier, 1)
        every = self._every.get(tier, 1) if every is None else every
        return None if base_s is None else base_s * every

    # --- events ---------------------------------------------------------------------------------

    def _started(self, event: Event) -> None:
        self._is_running = True

    def _formed(self, event: Event) -> None:
        self._is_running = True
        self._slow.clear()
        self._tally.put("outlast_attempt", event.attempt)
        self._tally.put("outlast_world_size", whole(event, "world_size") or 0)

    def _ended(self, event: Event) -> None:
        self._is_running = False
        self._slow.clear()

    def _sampled(self, event: Event) -> None:
        step = whole(event)
        if event.rank != 0 or step is None:
            return
        if step > self._steps_done:
            self._steps_done, self._progress_t = step, event.t
        until = whole(event, "until")
        if until:
            self._tally.put("outlast_progress_ratio", min(step / until, 1.0))
        stalled_s = number(event, "stalled_s") or 0.0
        self._tally.add("outlast_stall_seconds", stalled_s, "checkpoint")

    def _snapshot(self, event: Event) -> None:
        if event.rank == 0:
            self._tally.observe("outlast_snapshot_blocked_seconds", number(event, "blocked_s"))

    def _commit(self, event: Event) -> None:
        tier = self._tier(event)
        timings = event.get("timings")
        for name, seconds in timings.items() if isinstance(timings, dict) else ():
            if name in _TIMINGS and isinstance(seconds, int | float):
                phase = _TIMINGS[name]
                self._tally.observe("outlast_checkpoint_write_seconds", seconds, tier, phase)
        self._arrived(event, tier, number(event, "durable_s"))

    def _copied(self, event: Event) -> None:
        self._arrived(event, self._tier(event), number(event, "seconds"))

    def _arrived(self, event: Event, tier: str, seconds: float | None) -> None:
        self._tally.observe("outlast_checkpoint_write_seconds", seconds, tier, "total")
        num_bytes = number(event, "bytes") or 0.0
        self._tally.add("outlast_commits", 1, tier)
        self._tally.add("outlast_committed_bytes", num_bytes, tier)
        if event.get("kind", "full") != "full":  # weights alone are not resumed from
            return
        self._tally.put("outlast_checkpoint_bytes", num_bytes, tier)
        self._tally.put("outlast_commit_step", whole(event) or 0, tier)
        self._commits[tier] = max(event.t, self._commits.get(tier, event.t))

    def _cadenced(self, event: Event) -> None:
        tier, every = event.get("tier"), whole(event, "every")
        if isinstance(tier, str) and tier:
            if every:
                self._every[self._tier(event)] = every
        else:
            self._interval_s = number(event, "interval_s") or self._interval_s

    def _skipped(self, event: Event) -> None:
        self._tally.add("outlast_saves_skipped", 1)

    def _failed_storage(self, event: Event) -> None:
        operation = bounded(event.get("operation"), OPERATIONS)
        self._tally.add("outlast_storage_errors", 1, operation)

    def _lost(self, event: Event) -> None:
        nodes: list[object] = [event.node]
        if event.event == "node_lost":
            self._tally.add("outlast_timeouts", 1, "silent_machine")
        elif event.event == "hang":
            named = event.get("nodes")
            nodes = list(named) if isinstance(named, list) and named else nodes
            self._tally.add("outlast_timeouts", 1, "hang")
            self._tally.add("outlast_stall_seconds", number(event, "silent_s") or 0.0, "hang")
        for node in nodes:
            self._tally.add("outlast_failures", 1, self._node(node), event.event)

    def _restarted(self, event: Event) -> None:
        if event.attempt != self._restarted_in:  # each machine writes one down
            self._restarted_in = event.attempt
            self._tally.add("outlast_restarts", 1, bounded(event.get("kind"), RESTARTS))

    def _gap(self, event: Event) -> None:
        what = event.get("what")
        if what in ("watcher", "keeper"):
            self._tally.add("outlast_timeouts", 1, str(what))
        elif what == "ledger":
            self._tally.add("outlast_ledger_lost_events", number(event, "lost") or 0.0)

    def _held(self, event: Event) -> None:
        if not event.get("over"):
            self._tally.add("outlast_timeouts", 1, "process_held")

    def _anomaly(self, event: Event) -> None:
        self._tally.add("outlast_anomalies", 1, bounded(event.get("kind"), ANOMALIES))

    def _rollback(self, event: Event) -> None:
        self._tally.add("outlast_rollbacks", 1)

    def _straggled(self, event: Event) -> None:
        ranks, factor = event.get("ranks"), number(event, "factor")
        node = self._node(event.node)
        listed = ranks if isinstance(ranks, list) else [event.rank]
        since, step = whole(event, "since_step"), whole(event)
        if event.get("over") and since is not None and step is not None and step >= since:
            lost_s = (number(event, "lost_s") or 0.0) * (step - since + 1)
            self._tally.add("outlast_stall_seconds", lost_s, "slow_rank")
        for rank in listed:
            if isinstance(rank, int) and event.get("over"):
                self._slow.pop((node, str(rank)), None)
            elif isinstance(rank, int) and factor is not None:
                self._slow[node, str(rank)] = factor

    def _noticed(self, event: Event) -> None:
        deadline_t = number(event, "deadline_t")
        if deadline_t is not None and not event.get("early"):
            self._notices[self._node(event.node)] = deadline_t

    def _untold(self, event: Event) -> None:
        if not event.get("over"):
            self._tally.add("outlast_messages_not_told", 1)

    def _left(self, event: Event) -> None:
        if len(self.left_out) < MOST_NODES:
            self.left_out[event.node] = number(event, "until_t") or event.t

    def _let_in(self, event: Event) -> None:
        self.left_out.pop(event.node, None)

    def _over(self, incident: Incident, again_s: float | None) -> None:
        reason = bounded(incident.kind, INCIDENTS)
        lost_steps = incident.lost_steps or 0
        self._tally.add("outlast_incidents", 1, reason)
        self._tally.add("outlast_lost_steps", lost_steps, reason)
        if incident.back_t is None:
            return
        seconds = max(incident.back_t - incident.began_t, 0.0)
        self._tally.observe("outlast_recovery_seconds", seconds, reason)
        cost_s = incident.cost_s(again_s)
        self._tally.add("outlast_lost_seconds", cost_s or 0.0, reason)


_ACTS: Final[Mapping[str, Callable[[JobFold, Event], None]]] = {
    "job_started": JobFold._started,
    "attempt_formed": JobFold._formed,
    "job_finished": JobFold._ended,
    "drained": JobFold._ended,
    "step": JobFold._sampled,
    "snapshot": JobFold._snapshot,
    "commit": JobFold._commit,
    "tier_copied": JobFold._copied,
    "cadence": JobFold._cadenced,
    "save_skipped": JobFold._skipped,
    "storage_error": JobFold._failed_storage,
    "worker_lost": JobFold._lost,
    "node_lost": JobFold._lost,
    "hang": JobFold._lost,
    "restart": JobFold._restarted,
    "watch_gap": JobFold._gap,
    "held": JobFold._held,
    "anomaly": JobFold._anomaly,
    "rollback": JobFold._rollback,
    "straggler": JobFold._straggled,
    "notice": JobFold._noticed,
    "left_out": JobFold._left,
    "let_in": JobFold._let_in,
    "not_told": JobFold._untold,
}
