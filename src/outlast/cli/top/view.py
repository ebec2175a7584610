"""What a live view says of a job: followed from its ledger, with what its workers say now.

``Following`` reads the ledger bit by bit and gives a ``View`` for any moment. Guarantees: nothing
of the job is written or locked, so it may be another user's. Each event is folded once; what a view
costs does not grow with the ledger. Any ledger gives a view: empty, torn, of an older version.

Three sources, each for what it alone knows:

- the ledger: everything but the next two; it is two seconds behind (:mod:`outlast.ledger.so_far`);
- the workers' memory on this machine, for the same user alone: steps between events, what each rank
  is doing, what its steps are spent on;
- the claims of attempts: whether anybody runs the job at all (``Onlooker``). A job of which the
  ledger says "running" and that nobody runs is dead: its state is ``gone``. Where nobody here can
  tell, and the ledger has been silent for ``SILENT_S``, it is ``silent``.

Time left is a range. The first figure is the remaining steps at the newest samples' median: what
comes if nothing goes wrong. The second is the larger of two: the same at their ninth decile; and
the first one times what the job has needed so far for each second of new steps, with all its
incidents, saves and waits, without its start-up and pauses.
"""

from __future__ import annotations

import collections
import math
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from outlast.attempt.beat import Phase
from outlast.config import Settings
from outlast.health.exporter import cadence_of
from outlast.health.watched import Begin, Watched, find_words
from outlast.ledger.events import Event
from outlast.ledger.file import FILE_NAME, Follower
from outlast.ledger.goodput import Part, Split, whole
from outlast.ledger.incidents import Incident, SlowFold
from outlast.ledger.job import Job
from outlast.ledger.measured import SampledSteps
from outlast.metrics.folded import JobFold, Tally
from outlast.peer.claims import Onlooker
from outlast.report.facts import GOING_ON, Facts, State, StateFold, Untold, untold_after
from outlast.report.findings import SlowRank, slow_list
from outlast.report.money import Money, money
from outlast.report.series import RankSample, rank_samples
from outlast.report.text import slow_line
from outlast.storage import Directory

CHUNK_BYTES: Final = 1 << 20
SILENT_S: Final = 60.0
LATE: Final = 2.0  # times its interval, as the alert OutlastCommitOld has it
TOLD: Final = 50  # incidents
NEWEST: Final = 50  # samples, and steps of a rank
HANGS: Final = 100  # whose stacks are remembered
SLOW_TOLD: Final = 50  # times that ranks were slow
LOOK_S: Final = 1.0  # between two looks at the claims
SLOW: Final = 0.9
Standing = Literal["gone", "silent"]
_STARTING: Final[tuple[Part, ...]] = ("starting", "building", "paused")


class TierView(msgspec.Struct, frozen=True, kw_only=True):
    """The newest checkpoint of one tier.

    Attributes:
        name: the tier's.
        step: of the newest checkpoint that can be resumed from there.
        age_s: since it was committed.
        interval_s: between two checkpoints as they are meant, or null where that is not known.
        is_late: whether it is older than twice the interval.
        took_s: until such a checkpoint is there, when it goes slowly; null where it is not known.
        bytes: of it.
    """

    name: str
    step: int
    age_s: float
    interval_s: float | None
    is_late: bool
    took_s: float | None
    bytes: int


class RankView(msgspec.Struct, frozen=True, kw_only=True):
    """One worker: of this machine as its memory says, else as the ledger's newest line of it does.

    Attributes:
        rank: its number.
        node: its machine.
        step: steps that it has completed, or null.
        doing: what its training thread does, in a word; "" where it does not say.
        doing_s: for how long.
        step_s: median of its newest steps, from boundary to boundary; null where it is not
            measured.
        own_s, wait_s, data_s: medians of its own work, of waiting for other ranks and for batches.
        slow_factor: times a usual step, where the ledger has found it slow, or null.
        age_s: since its machine has written these figures; null where they are of now.
    """

    rank: int
    node: str
    step: int | None = None
    doing: str = ""
    doing_s: float | None = None
    step_s: float | None = None
    own_s: float | None = None
    wait_s: float | None = None
    data_s: float | None = None
    slow_factor: float | None = None
    age_s: float | None = None


class SlowView(msgspec.Struct, frozen=True, kw_only=True):
    """A rank while it was slow.

    Attributes:
        rank: as ``outlast report`` has it.
        cost: of the time that the others have waited; null without a price.
        what: both in words.
    """

    rank: SlowRank
    cost: float | None
    what: str


class MachineView(msgspec.Struct, frozen=True, kw_only=True):
    """One machine.

    Attributes:
        name: its own.
        workers: of the newest attempt; 0 for one that has no part in it.
        failures: kind of event → how often there.
        slow_ranks: those that the ledger calls slow now.
        notice_left_s: seconds until the platform takes it back (negative: since), or null.
        is_left_out: whether it is left out now.
    """

    name: str
    workers: int = 0
    failures: dict[str, int] = {}
    slow_ranks: list[int] = []
    notice_left_s: float | None = None
    is_left_out: bool = False


class IncidentView(msgspec.Struct, frozen=True, kw_only=True):
    """One incident.

    Attributes:
        number: its place among the job's, from 1; silences, which the report has, do not count.
        began_t: in seconds since the epoch.
        kind: as the report has it.
        what: in words.
        is_open: whether it goes on.
        cost_s: seconds that each worker has lost by it so far, steps that are done again included;
            null where it cost none.
        lost_steps: steps that are done again, or null.
        evidence: where the stacks of a hang are; else "": the ledger has all there is.
    """

    number: int
    began_t: float
    kind: str
    what: str
    is_open: bool
    cost_s: float | None
    lost_steps: int | None
    evidence: str = ""


class View(msgspec.Struct, frozen=True, kw_only=True):
    """A job at one moment: what ``outlast top --json`` prints.

    Attributes:
        job: its id.
        directory: where it is.
        t: the moment, in seconds since the epoch.
        state: "not started", "running", "gone" (nobody runs it, and it has not said that it ends),
            "silent" (it may be gone: nobody here can tell), "finished", "drained", "gave up",
            "storage unusable", "refuses to resume" or "failed".
        reason: why it ended, in words, or "".
        exit_code: that it ended with, or null.
        last_event_t: time of the ledger's newest event, or null.
        last_event_age_s: since then.
        wall_s: since the job began; of one that is gone or silent, until its newest event.
        command: it was started by, last; "" where the ledger does not say.
        attempt, num_attempts: the newest one's number, and how many have formed.
        world_size, num_machines: of the newest attempt.
        step: completed steps now, or null.
        until_step: at which the loop ends, or null.
        num_steps_done: the highest step that was ever completed.
        num_steps_replayed: steps that were done again.
        step_s: median of the newest samples, or null.
        left_low_s, left_high_s: seconds until the loop ends, or null (see the module).
        fraction_productive: of all worker time.
        workers_s: part → worker-seconds.
        saved_step: the newest step that can be resumed from, or null.
        tiers: the newest checkpoint of each.
        ranks: those that the ledger calls slow first, then the one with the most work of its own:
            workers of this machine as they are now, others as their machine said it last.
        slow_ranks: the newest that the watch has named, oldest first; those that have recovered
            included.
        machines: the worst first.
        price_per_machine_hour, priced_as: as of ``outlast report``.
        currency: of all amounts; "" where nobody has named it.
        cost, cost_lost: so far; null without a price.
        num_incidents: how many there were.
        incidents: the newest ones, newest first.
        untold: messages to people that could not be sent, as of ``outlast report``, or null.
        note: what a person should know besides, or "".
    """

    job: str
    directory: str
    t: float
    state: State | Standing
    reason: str
    exit_code: int | None
    last_event_t: float | None
    last_event_age_s: float | None
    wall_s: float
    command: str
    attempt: int
    num_attempts: int
    world_size: int
    num_machines: int
    step: int | None
    until_step: int | None
    num_steps_done: int
    num_steps_replayed: int
    step_s: float | None
    left_low_s: float | None
    left_high_s: float | None
    fraction_productive: float
    workers_s: dict[str, float]
    saved_step: int | None
    tiers: list[TierView]
    ranks: list[RankView]
    slow_ranks: list[SlowView]
    machines: list[MachineView]
    price_per_machine_hour: float | None
    priced_as: str
    currency: str
    cost: float | None
    cost_lost: float | None
    num_incidents: int
    incidents: list[IncidentView]
    untold: Untold | None
    note: str

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come until somebody does something; a drain is not the end."""
        return self.state not in (*GOING_ON, "drained", "not started")


class _LedgerSeen:
    """What the view needs of the ledger and no other fold has."""

    def __init__(self) -> None:
        self.state = StateFold()
        self.start: Event | None = None
        self.formed: Event | None = None
        self.step: int | None = None
        self.until: int | None = None
        self.paces: collections.deque[float] = collections.deque(maxlen=NEWEST)
        self.stacks: collections.deque[tuple[float, str]] = collections.deque(maxlen=HANGS)
        self.rank_steps: dict[int, tuple[float, str, RankSample]] = {}  # when, and which machine
        self.slow = SlowFold()
        self.untold: Untold | None = None
        self.storage_error = ""  # since the last commit
        self._sampled = SampledSteps()

    def take(self, event: Event) -> None:
        self.state.take(event)
        self.slow.take(event)
        if event.event == "job_started" and not event.get("joins"):
            self.start = event
        elif event.event == "attempt_formed":
            if self.formed is None or event.attempt > self.formed.attempt:
                self.formed = event
                self.rank_steps.clear()
        elif event.event == "rank_steps":
            if self.formed is not None and event.attempt == self.formed.attempt:
                at = event.t, event.node
                self.rank_steps |= {one.rank: (*at, one) for one in rank_samples(event)}
        elif event.event in ("step", "resumed") and event.rank == 0:
            step = whole(event)
            self.step = self.step if step is None else step
            self.until = whole(event, "until") or self.until
            if (found := self._sampled.take(event)) is not None and found[0] >= 0:
                self.paces.append(found[0])
        else:
            self._trouble(event)

    def _trouble(self, event: Event) -> None:
        if event.event == "hang" and isinstance(event.get("stacks"), str):
            self.stacks.append((event.t, event["stacks"]))
        elif event.event == "storage_error":
            self.storage_error = f"{event.get('operation')}: {event.get('error')}"
        elif event.event == "commit":
            self.storage_error = ""
        elif event.event == "not_told":
            self.untold = untold_after(self.untold, event)

    @property
    def is_gathering(self) -> bool:
        """Whether the job was started, and no attempt has formed since."""
        start, formed = self.start, self.formed
        return start is not None and (formed is None or start.t > formed.t)

    @property
    def hosts(self) -> dict[str, int]:
        """Machine → workers of the newest attempt, as far as it says so."""
        if self.formed is None:
            return {}
        hosts, size = self.formed.get("hosts"), whole(self.formed, "world_size") or 0
        if not isinstance(hosts, dict):
            return {self.formed.node: size} if self.num_machines == 1 else {}
        return {str(name): num for name, num in hosts.items() if isinstance(num, int)}

    @property
    def num_machines(self) -> int:
        nodes = None if self.formed is None else self.formed.get("nodes")
        if isinstance(nodes, list):
            return len(nodes)
        return nodes if isinstance(nodes, int) else 0


class Following:
    """Follows one job.

    Args:
        directory: the job's.
        job: who it is.
        settings: the prices and the cadence to go by.
    """

    def __init__(self, directory: Path, job: Job, settings: Settings) -> None:
        self._directory, self._job, self._settings = directory, job, settings
        self._follower = Follower(directory, most_bytes=CHUNK_BYTES)
        self._fold = JobFold(cadence_of(settings))
        self._ledger = _LedgerSeen()
        self._workers = _Workers(job.id)
        self._onlooker = Onlooker(Directory(directory))
        self._lives: bool | None = None
        self._asked_s = -math.inf
        self._unreadable = ""

    def look(self) -> bool:
        """Read a piece of what is new; whether there may be more."""
        try:
            events = self._follower.poll()
        except OSError as error:
            events, self._unreadable = [], f"the ledger cannot be read: {error.strerror or error}"
        else:
            self._unreadable = ""
        for event in self._fold.take(events, time.time()):
            self._ledger.take(event)
        return bool(events)

    def settle(self) -> None:
        """Take what was read last as settled, for a view that is not followed by another."""
        for event in self._fold.take([], math.inf):
            self._ledger.take(event)

    @property
    def progress(self) -> float:
        """Share of the ledger that was read."""
        try:
            size = (self._directory / FILE_NAME).stat().st_size
        except OSError:
            return 1.0
        return min(self._follower.offset / size, 1.0) if size else 1.0

    def view(self, now: float) -> View:
        """The job at wall-clock time ``now``."""
        so_far, seen = self._fold.so_far, self._ledger
        tally = self._fold.tally(now)
        steady = so_far.steady(now)
        state = self._standing(steady)
        # What nobody ran, or nobody knows of, is no time of the job.
        split = so_far.split(None if state in ("gone", "silent") else now)
        attempt = 0 if seen.formed is None else seen.formed.attempt
        is_running, may_run = state == "running", state in GOING_ON
        ranks = self._workers.look(attempt, now) if is_running else []
        steps = [one.step for one in ranks if one.step is not None]
        step = max(min(steps), seen.step or 0) if steps else seen.step
        first = max(so_far.num_incidents - TOLD, 0) + 1
        told = so_far.incidents(first - 1)
        pace_s = statistics.median(seen.paces) if seen.paces else None
        left = self._left(step, split) if is_running else (None, None)
        newest_t = so_far.newest_t
        until_t = steady if is_running else newest_t if state in ("gone", "silent") else None
        job = self._facts(split, told, until_t)
        paid = job.money or Money()
        slow = {
            (node, int(rank)): factor
            for (node, rank), factor in tally.values["outlast_rank_slowdown_ratio"].items()
            if may_run
        }
        return View(
            job=self._job.id,
            directory=str(self._directory),
            t=now,
            state=state,
            reason=job.reason,
            exit_code=job.exit_code,
            last_event_t=newest_t,
            last_event_age_s=None if newest_t is None else max(steady - newest_t, 0.0),
            wall_s=split.workers.wall_s,
            command="" if seen.start is None else str(seen.start.get("command") or ""),
            attempt=attempt,
            num_attempts=split.workers.attempts,
            world_size=0 if seen.formed is None else whole(seen.formed, "world_size") or 0,
            num_machines=seen.num_machines,
            step=step,
            until_step=seen.until,
            num_steps_done=split.workers.steps_done,
            num_steps_replayed=split.workers.steps_replayed,
            step_s=pace_s,
            left_low_s=left[0],
            left_high_s=left[1],
            fraction_productive=split.workers.fraction_productive,
            workers_s={str(part): value for part, value in split.workers.parts().items()},
            saved_step=max(self._fold.measured.newest.values(), default=None),
            tiers=self._tiers(tally, is_running=may_run),
            ranks=_ranked(ranks, seen.rank_steps.values() if may_run else (), slow, steady),
            slow_ranks=[
                SlowView(rank=one, cost=job.cost_of(one.lost_s), what=slow_line(one, job).plain)
                for one in job.slow_ranks[-SLOW_TOLD:]
            ],
            machines=_machines(
                seen.hosts,
                tally,
                slow,
                {node for node, until_t in self._fold.left_out.items() if until_t > steady},
            ),
            price_per_machine_hour=paid.price,
            priced_as=paid.priced_as,
            currency=paid.currency,
            cost=paid.cost,
            cost_lost=paid.lost,
            num_incidents=so_far.num_incidents,
            incidents=[
                self._incident(first + i, one, job) for i, one in reversed(list(enumerate(told)))
            ],
            untold=seen.untold,
            note=self._unreadable
            or (f"storage failed, {seen.storage_error}" if seen.storage_error else ""),
        )

    def _facts(self, split: Split, told: list[Incident], until_t: float | None) -> Facts:
        """As the report has them, for what it makes of them.

        Of slow ranks those that the watch has named: the others are found by the whole ledger.
        """
        end = self._ledger.state.end
        done = split.workers
        held_s = done.held / done.total * done.wall_s if done.total else 0.0
        slow, waited_s = slow_list(self._ledger.slow.told(), [], held_s)
        exit_code = None if end is None else end.get("exit_code")
        return Facts(
            job=self._job.id,
            state=self._ledger.state.state,
            exit_code=exit_code if isinstance(exit_code, int) else None,
            reason="" if end is None else str(end.get("reason") or ""),
            workers=split.workers,
            machines=split.machines,
            incidents=told,
            slow_ranks=slow,
            waited_s=waited_s,
            committed_step=None,
            last_event_t=self._fold.so_far.newest_t,
            until_t=until_t,
            kinds=self._fold.measured.kinds,
            money=money(split, self._fold.measured.kinds, self._settings.prices),
        )

    def _standing(self, steady: float) -> State | Standing:
        """What the ledger says, and whether anybody still runs what it calls running."""
        told, newest_t = self._ledger.state.state, self._fold.so_far.newest_t
        if told == "not started" and newest_t is not None:
            told = "running"  # it has begun to say something
        if told != "running":
            return told
        if time.monotonic() - self._asked_s >= LOOK_S:
            self._asked_s = time.monotonic()
            try:
                self._lives = self._onlooker.lives()
            except OSError:
                self._lives = None
        if self._lives:
            return "running"
        is_silent = newest_t is None or steady - newest_t > SILENT_S
        if self._lives is None:
            return "silent" if is_silent else "running"
        # Machines that gather have said that they start, and have claimed nothing yet.
        return "running" if self._ledger.is_gathering and not is_silent else "gone"

    def _left(self, step: int | None, split: Split) -> tuple[float | None, float | None]:
        """Seconds until the loop ends, at best and at worst as far as is known."""
        seen, spent = self._ledger, split.workers
        if step is None or not seen.until or not seen.paces:
            return None, None
        remaining = max(seen.until - step, 0)
        paces = sorted(seen.paces)
        low_s = remaining * statistics.median(paces)
        slow_s = remaining * paces[min(int(SLOW * len(paces)), len(paces) - 1)]
        parts = spent.parts()
        new_s = parts["productive"] + parts["data"]
        all_s = spent.total - spent.undecided - math.fsum(parts[one] for one in _STARTING)
        return low_s, max(slow_s, low_s * all_s / new_s if new_s > 0 else 0.0)

    def _tiers(self, tally: Tally, *, is_running: bool) -> list[TierView]:
        ages = tally.values.get("outlast_commit_age_seconds", {})
        intervals = tally.values.get("outlast_commit_interval_seconds", {})
        found = []
        for labels, age_s in ages.items():
            name, interval_s = labels[0], intervals.get(labels)
            took = self._fold.measured.save(name)
            found.append(
                TierView(
                    name=name,
                    step=int(tally.values["outlast_commit_step"].get(labels, 0)),
                    age_s=age_s,
                    interval_s=interval_s,
                    is_late=is_running and interval_s is not None and age_s > LATE * interval_s,
                    took_s=None if took is None else took.slow_s,
                    bytes=int(tally.values["outlast_checkpoint_bytes"].get(labels, 0)),
                )
            )
        return found

    def _incident(self, number: int, one: Incident, job: Facts) -> IncidentView:
        end_t = math.inf if one.back_t is None else one.back_t
        places = [place for t, place in self._ledger.stacks if one.began_t <= t <= end_t]
        cost = job.cost_of_incident(one)
        return IncidentView(
            number=number,
            began_t=one.began_t,
            kind=one.kind,
            what=one.what,
            is_open=not one.closed,
            cost_s=None if cost is None else cost.total_s,
            lost_steps=one.lost_steps,
            evidence=str(self._directory / places[-1]) if places and places[-1] else "",
        )


class _Workers:
    """This machine's workers, by their memory."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._watched: dict[str, Watched] = {}

    def look(self, attempt: int, now: float) -> list[RankView]:
        """Those of this attempt, or a newer one; none where it is not ours to read."""
        begun = {one.beats: one for one in find_words(self._job) if one.attempt >= attempt}
        for place in [one for one, of in self._watched.items() if begun.get(one) != of.begin]:
            self._watched.pop(place).close()
        found = []
        for place, begin in begun.items():
            watched = self._watched.setdefault(place, Watched(begin))
            watched.look()
            found += [_rank(watched, begin, worker.rank, now) for worker in begin.workers]
        return found


_DOING: Final = {
    Phase.STARTING: "starting",
    Phase.LOADING: "waits for data",
    Phase.STEPPING: "in a step",
    Phase.REDUCING: "waits for others",
    Phase.UPDATING: "in a step",
    Phase.SAVING: "saving",
    Phase.EVALUATING: "evaluates",
    Phase.OUTSIDE: "outside its loop",
    Phase.ENDED: "has ended",
}


def _rank(watched: Watched, begin: Begin, rank: int, now: float) -> RankView:
    heard = watched.heard.get(rank)
    if heard is None:
        return RankView(rank=rank, node=begin.node, doing="starting")
    beat, phase = heard.beat, heard.phase
    timings = heard.timings(-1)[-NEWEST:]
    medians = [
        statistics.median(getattr(one, name) for one in timings) if timings else None
        for name in ("whole_s", "compute_s", "wait_s", "data_s")
    ]
    step_s, own_s, wait_s, data_s = medians
    return RankView(
        rank=rank,
        node=begin.node,
        step=None if beat is None else beat.step,
        doing="" if phase is None else _DOING[phase.phase],
        doing_s=None if phase is None else max(time.monotonic() - phase.since_s, 0.0),
        step_s=step_s,
        own_s=own_s,
        wait_s=wait_s,
        data_s=data_s,
    )


def _ranked(
    ranks: Iterable[RankView],
    told: Iterable[tuple[float, str, RankSample]],
    slow: dict[tuple[str, int], float],
    steady: float,
) -> list[RankView]:
    """The slowest first, by the ledger's word and then by their own work."""
    known = {
        one.rank: RankView(
            rank=one.rank,
            node=node,
            step_s=one.step_s,
            own_s=one.own_s,
            wait_s=one.wait_s,
            data_s=one.data_s,
            age_s=max(steady - t, 0.0),
        )
        for t, node, one in told
    }
    known |= {one.rank: one for one in ranks}
    for (node, rank), factor in slow.items():
        one = known.get(rank, RankView(rank=rank, node=node))
        known[rank] = msgspec.structs.replace(one, slow_factor=factor)
    return sorted(
        known.values(), key=lambda one: (-(one.slow_factor or 0), -(one.own_s or 0), one.rank)
    )


def _machines(
    hosts: dict[str, int], tally: Tally, slow: dict[tuple[str, int], float], out: set[str]
) -> list[MachineView]:
    failures: dict[str, dict[str, int]] = {}
    for (node, kind), count in tally.values.get("outlast_failures", {}).items():
        if count:
            failures.setdefault(node, {})[kind] = int(count)
    notices = {
        node: left_s for (node,), left_s in tally.values["outlast_notice_left_seconds"].items()
    }
    names = dict.fromkeys([*hosts, *failures, *notices, *(node for node, _ in slow), *out])
    found = [
        MachineView(
            name=name,
            workers=hosts.get(name, 0),
            failures=failures.get(name, {}),
            slow_ranks=sorted(rank for node, rank in slow if node == name),
            notice_left_s=notices.get(name),
            is_left_out=name in out,
        )
        for name in names
    ]
    return sorted(
        found,
        key=lambda one: (
            -(one.notice_left_s is not None),
            -sum(one.failures.values()),
            -len(one.slow_ranks),
            one.name,
        ),
    )


def to_json(view: View) -> dict[str, Any]:
    """What ``outlast top --json`` prints."""
    data: dict[str, Any] = msgspec.to_builtins(view)
    return data | {"is_over": view.is_over}
