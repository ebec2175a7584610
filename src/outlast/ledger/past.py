"""Tell an attempt what it must know of those before it, without reading the whole ledger.

The agent keeps count and hands it to its workers, with the place up to which it has read: a restart
after months reads what the last attempt has written, not the months.

How often the job failed is a fold over the same lines: it runs from ``resumed`` to the first loss,
to a drain or to its end, or, where a machine vanished without a word, to its last sample.

A rollback that the ledger's disk did not take is read from where it was kept (``JOB/rollbacks``),
before the ledger: it counts for whatever comes after it, wherever its own line will stand.

What can go wrong: a ledger that was replaced by a shorter one is read anew.

``Glance`` is a look at the past that nobody waits for long. An agent reads what the ledger has got
since the last attempt before each restart. On a file system that hangs, a read does not come back:
the agent would hear no notice and keep no deadline. Here a thread reads; who asks waits for a
second, then goes on with what the last look has found.

Guarantees: what is shown is one state of the ledger, never half a look; at most one thread.
What can go wrong: a look that came late is shown by the next one.
Rejected: a thread for each look (as many as there are restarts, all of them stuck).
"""

from __future__ import annotations

import collections
import contextlib
import os
import re
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from outlast.errors import StorageError
from outlast.ledger.events import Event, decode
from outlast.ledger.file import FILE_NAME, kept
from outlast.policy.attribution import ESTIMATE_S, Sighting, Tolls
from outlast.policy.attribution import REMEMBERED as REMEMBERED_SIGHTINGS
from outlast.policy.cadence import AUTO_MEMORY_H, COSTS_KEPT, cost_of
from outlast.policy.hazard import Hazard, Posterior, of_a_new_job
from outlast.policy.rollbacks import CARRIED_MAX, WATCHED, Batches, Rollback, is_undone
from outlast.policy.tier_cadence import Beyond, Scope

VARIABLE: Final = "OUTLAST_PAST"  # set by our agent for its workers
CHUNK_BYTES: Final = 4 << 20
_FULL: Final = "full"
# A line's head as it is written: what most lines are needed for is seen without decoding them.
_HEAD: Final = re.compile(
    rb'\{"t":(?P<t>[^,{]+),"mono":[^,{]+,"job":"[^"\\]*","attempt":(?P<attempt>\d+),'
    rb'"node":"(?P<node>(?:[^"\\]|\\.)*)","rank":[^,{]+,"event":"(?P<event>\w+)"'
)
_ENTIRE: Final = frozenset(
    {
        *(b"commit", b"healthy", b"rollback", b"left_out", b"let_in", b"restart", b"job_started"),
        *(b"resumed", b"job_finished", b"cadence"),
    }
)
_BEGINNINGS: Final = ("job_started", "attempt_formed", "resumed")
_SNAPSHOT: Final = b"snapshot"
_FORMED: Final = b"attempt_formed"
_COST: Final = re.compile(rb'"cost_s":([0-9.e+-]+)')
_BLOCKED: Final = re.compile(rb'"blocked_s":([0-9.e+-]+)')
_FAILURES_MAX: Final = 100  # of a machine
REMEMBERED: Final = 64  # of the newest commits, and of those that were seen to be healthy


class _PastState(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What was found so far; see :class:`Past`."""

    offset: int
    attempt: int = 0
    promised: int = 0
    promised_by: tuple[int, str] = (0, "")
    commits: list[int] = []
    healthy: list[int] = []
    rollbacks: list[Rollback] = []
    reserved: list[Rollback] = []
    windows: dict[str, list[float]] = {}
    num_failures: float = 0.0
    ran_h: float = 0.0
    since_t: float = 0.0
    hazard: Hazard = msgspec.field(default_factory=of_a_new_job)
    costs_s: list[float] = []
    took_s: float = 0.0
    storms: bool = False
    tier_intervals_s: dict[str, float] = {}
    beyond: Beyond = Beyond()
    scope: Scope | None = None
    gone: list[str] = []
    finished_t: float = 0.0
    idle: int = 0


_LATEST_T: Final = 1e12  # no clock shows it: such a time is garbage
_MOMENTS_KEPT: Final = 10_000
_FROM: Final = "from "
_LOSSES: Final = ("worker_lost", "node_lost", "hang")
_ENDS: Final = ("drained", "job_finished", "attempt_formed")


class Failures:
    """How often the job failed while it ran; forgotten with the time, as its cadence does.

    Attributes:
        known: what that says of its rate, bursts counted in.
        since_t: time up to which running was counted; 0 while it does not run.
        beyond: the failures that took machines.
        scope: what the newest one took, while the job is down; None otherwise.
        gone: machines that are known to have gone with it, as many as its scope depends on.
        ran_s: seconds of running that this object has seen.
        moments: when the newest failures were, of those that it has seen.
    """

    def __init__(
        self,
        known: Posterior | None = None,
        since_t: float = 0.0,
        *,
        hazard: Hazard | None = None,
        beyond: Beyond | None = None,
        scope: Scope | None = None,
        gone: Iterable[str] = (),
    ) -> None:
        self.known, self.since_t = known or Posterior(), since_t
        self._hazard, self._quiet_h = hazard or of_a_new_job(), 0.0
        self.beyond, self.scope, self.gone = beyond or Beyond(), scope, list(gone)
        self.ran_s = 0.0
        self.moments: collections.deque[float] = collections.deque(maxlen=_MOMENTS_KEPT)

    @property
    def hazard(self) -> Hazard:
        """How often it fails just now, as its cadence sees it."""
        return self._hazard.after(self._quiet_h)

    def see(self, event: str, t: float, node: str = "", source: str = "") -> None:
        """The next line of the ledger.

        Args:
            event: its name.
            t: its time.
            node: its machine, or the one that was lost.
            source: of ``resumed``: the places that were read.
        """
        if not 0 < t < _LATEST_T:
            return
        if event == "resumed" and self.scope is not None and source.startswith(_FROM):
            # "from local and shared, 1 file repaired from shared"
            places = source.removeprefix(_FROM).partition(", ")[0].split(" and ")
            self.beyond = self.beyond.back_from(places)
        if event in ("resumed", "step"):
            self._ran(t)
            self.since_t, self.scope, self.gone = t, None, []
        elif event in _LOSSES and (self.since_t or self.scope is not None):
            self._lost(t, node if event == "node_lost" else "")
        elif not self.since_t:
            return
        elif event in _ENDS:
            self._ran(t)
            self.since_t = 0.0
        elif event == "job_started":  # the one before ended without a word
            self._ran(self.since_t, Scope.ALL)
            self.since_t = 0.0

    def _lost(self, t: float, machine: str) -> None:
        """A loss; one that follows another before the job is back belongs to it."""
        # No more of them than matter: workers are told of them in their environment.
        if machine and machine not in self.gone and len(self.gone) < Scope.ALL:
            self.gone.append(machine)
        scope = Scope(min(len(self.gone), Scope.ALL))
        if self.scope is None:
            self._ran(t, scope)
            self.since_t = 0.0
        elif scope > self.scope:
            self.beyond = self.beyond.worse(self.scope, scope)
        self.scope = scope

    def _ran(self, t: float, scope: Scope | None = None) -> None:
        hours = max(t - self.since_t, 0.0) / 3600 if self.since_t else 0.0
        self.ran_s += hours * 3600
        if scope is not None:
            self.moments.append(t)
        self.known = self.known.after(hours, int(scope is not None), AUTO_MEMORY_H)
        self._quiet_h += hours  # most lines tell of no failure
        if scope is not None:
            self._hazard, self._quiet_h = self._hazard.after(self._quiet_h, failed=True), 0.0
        self.beyond = self.beyond.after(hours, scope)


class Past:
    """What an attempt must know of those before it: a fold over a job's events.

    Args:
        directory: the job's.
        word: another Past's, of the same ledger; what is none is ignored.

    Attributes:
        attempt: the largest number of an attempt; 0 for none.
        promised: the newest step that was committed and can be resumed from; 0 for none.
        promised_save: the name of its newest save; "" where the ledger does not say.
        failures: how often it failed.
        commits: the newest such steps, those that a rollback has undone left out.
        healthy: those of them, and of the ones before, that were seen to be healthy.
        rollbacks: oldest first.
        windows: good values up to the newest healthy step, or to the newest rollback's.
        left_out: machines that were left out, and the newest word on each; known only to a Past
            that has read the whole ledger.
        own_failures: machine → when its newest failures of its own were, and their kinds; the same.
        sightings: the newest failures that were somebody's own, and where they were; the same.
        went_out: machines without which the others went on, at some time; the same.
        tolls: what its failures have cost; the same.
    """

    def __init__(self, directory: Path, word: str = "") -> None:
        self._path = directory / FILE_NAME
        self._kept: list[Event] = []
        self._forget()
        with contextlib.suppress(msgspec.MsgspecError):
            self._known = known = msgspec.json.decode(word, type=_PastState)
            seen = Posterior(num_seen=known.num_failures, seen_h=known.ran_h)
            self.failures = Failures(
                seen,
                known.since_t,
                hazard=known.hazard,
                beyond=known.beyond,
                scope=known.scope,
                gone=known.gone,
            )

    def _forget(self) -> None:
        """Begin anew, with what was kept beside the ledger: it counts for whatever comes."""
        self._known = _PastState(offset=0)
        self.failures = Failures()
        self.left_out: dict[str, Event] = {}
        self.own_failures: dict[str, list[tuple[float, str]]] = {}
        self.sightings: list[Sighting] = []
        self.went_out: set[str] = set()
        self.tolls = Tolls()
        for event in self._kept:
            self._known.attempt = max(self._known.attempt, event.attempt)
            self._roll_back(event)
        self._known.reserved = list(self._known.rollbacks)

    @property
    def attempt(self) -> int:
        """The largest number of an attempt."""
        return self._known.attempt

    @property
    def promised(self) -> int:
        """The newest step that was committed and stands."""
        return self._known.promised

    @property
    def promised_save(self) -> str:
        """The name of the newest save of that step, if it is known."""
        return self._known.promised_by[1]

    @property
    def commits(self) -> list[int]:
        """The newest steps that were committed and stand."""
        return list(self._known.commits)

    @property
    def healthy(self) -> list[int]:
        """The newest steps that were seen to be healthy and stand."""
        return list(self._known.healthy)

    @property
    def rollbacks(self) -> list[Rollback]:
        """All rollbacks, oldest first."""
        return list(self._known.rollbacks)

    @property
    def unwritten(self) -> list[Event]:
        """Rollbacks that the ledger does not have: they are kept beside it."""
        return [event for event in self._kept if rollback_of(event) in self._known.reserved]

    @property
    def finished_t(self) -> float:
        """When the job finished, if it has done nothing since; 0 if it has not."""
        return self._known.finished_t

    @property
    def idle(self) -> int:
        """Drains in a row, up to the newest end of the job, between which nothing was committed."""
        return self._known.idle

    @property
    def costs_s(self) -> list[float]:
        """What each of the newest checkpoints has cost training, oldest first."""
        return list(self._known.costs_s)

    @property
    def storms(self) -> bool:
        """Whether the cadence has said last that failures come in a burst."""
        return self._known.storms

    @property
    def tier_intervals_s(self) -> dict[str, float]:
        """Of each tier whose interval was chosen, the newest."""
        return dict(self._known.tier_intervals_s)

    @property
    def windows(self) -> dict[str, list[float]]:
        """Good values of what is watched, oldest first."""
        return dict(self._known.windows)

    @property
    def word(self) -> str:
        """What was found so far, for another process."""
        known, seen = self._known, self.failures.known
        known.num_failures, known.ran_h = seen.num_seen, seen.seen_h
        known.since_t, known.beyond = self.failures.since_t, self.failures.beyond
        known.hazard = self.failures.hazard
        known.scope, known.gone = self.failures.scope, self.failures.gone
        return msgspec.json.encode(known).decode()

    def look(self) -> Past:
        """Read what is new, as far as its lines are whole; returns this one.

        Raises:
            StorageError: the ledger cannot be read; one that is not there yet has no events.
        """
        self._kept = [one for one in kept(self._path.parent) if rollback_of(one) is not None]
        if any(rollback_of(event) not in self._known.rollbacks for event in self._kept):
            self._forget()
        try:
            with self._path.open("rb") as file:
                self._read(file)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise StorageError(
                f"the ledger in {self._path.parent} cannot be read: {error.strerror or error}"
            ) from None
        return self

    def _read(self, file: BinaryIO) -> None:
        if file.seek(0, os.SEEK_END) < self._known.offset:
            self._forget()
        file.seek(self._known.offset)
        rest = b""
        while chunk := file.read(CHUNK_BYTES):
            whole, newline, rest = (rest + chunk).rpartition(b"\n")
            self._known.offset += len(whole) + len(newline)
            for line in whole.split(b"\n"):
                self._take(line)

    def _take(self, line: bytes) -> None:
        known = self._known
        head = _HEAD.match(line)
        if head is not None and head["event"] not in _ENTIRE:
            known.attempt = max(known.attempt, int(head["attempt"]))
            self.failures.see(
                head["event"].decode(), _time(head["t"]), head["node"].decode(errors="replace")
            )
            if head["event"] == _SNAPSHOT:
                self._cost(line, head.end())
            elif head["event"] == _FORMED:
                self.tolls.see("attempt_formed", _time(head["t"]))
            return
        event = decode(line)
        if event is not None:
            known.attempt = max(known.attempt, event.attempt)
            if event.event == "job_finished":
                self._ended(event)
            self._checkpoint(event)
            self._machine(event)
            if not event.get("joins"):  # another machine of the same attempt
                lost = event.get("node")
                source = str(event.get("source") or "")
                self.failures.see(event.event, event.t, str(lost or event.node), source)

    def _cost(self, line: bytes, start: int) -> None:
        """What a snapshot has cost; where it does not say, what it blocked and what saves took."""
        known = self._known
        if cost := _COST.search(line, start):
            cost_s = _time(cost[1])
        elif blocked := _BLOCKED.search(line, start):
            cost_s = cost_of(_time(blocked[1]), known.took_s)
        else:
            return
        known.costs_s = [*known.costs_s[1 - COSTS_KEPT :], cost_s]

    def _machine(self, event: Event) -> None:
        host = str(event.get("node") or event.node)  # read from disk, the field is the head's
        is_failure = event.event == "restart" and event.get("kind") is not None
        if (is_failure or event.event in _BEGINNINGS) and not event.get("joins"):
            step = event.get("step")
            self.tolls.see(event.event, event.t, step if isinstance(step, int) else None)
        if event.event == "let_in":
            self.left_out.pop(host, None)
            self.own_failures.pop(host, None)  # mended, says its owner
            self.sightings = [one for one in self.sightings if host not in one.hosts]
        elif event.event == "left_out":
            self.left_out[host] = event
            if event.get("goes") is True:
                self.went_out.add(host)
        elif event.event == "restart":
            if event.get("own") is True:
                known = self.own_failures.setdefault(host, [])
                known.append((event.t, str(event.get("kind"))))
                del known[:-_FAILURES_MAX]
            if event.get("cause"):
                self.sightings = [*self.sightings[1 - REMEMBERED_SIGHTINGS :], _sighting(event)]

    def _ended(self, event: Event) -> None:
        idle = event.get("idle")
        self._known.idle = idle if isinstance(idle, int) else 0
        if event.get("exit_code") == 0:  # what came again did nothing
            self._known.finished_t = self._known.finished_t or event.t

    def _checkpoint(self, event: Event) -> None:
        known = self._known
        if event.event in ("commit", "rollback"):
            known.finished_t = 0.0
            took_s = event.get("durable_s")
            known.took_s = float(took_s) if isinstance(took_s, int | float) else known.took_s
        elif event.event == "cadence":
            tier, interval_s = event.get("tier"), event.get("interval_s")
            if not tier:
                known.storms = event.get("burst") is True
            elif isinstance(interval_s, int | float):
                known.tier_intervals_s = {**known.tier_intervals_s, str(tier): float(interval_s)}
        step = event.get("step")
        if isinstance(step, bool) or not isinstance(step, int):
            return
        if event.event == "rollback":
            self._roll_back(event)
        elif not is_undone(known.rollbacks, event.attempt, step):
            if event.event == "commit" and event.get("kind", _FULL) == _FULL:
                by = event.attempt, str(event.get("save") or "")
                # Of two saves of a step an older attempt's counts less, though it may end later.
                if step > known.promised or (step == known.promised and by >= known.promised_by):
                    known.promised, known.promised_by = step, by
                known.commits = _with(known.commits, step)
            elif event.event == "healthy":
                known.healthy = _with(known.healthy, step)
                known.windows = _windows_of(event) or known.windows

    def _roll_back(self, event: Event) -> None:
        """What was committed behind it counts no more, and neither what is committed late."""
        rollback = rollback_of(event)
        if rollback is None:
            return
        known = self._known
        if rollback in known.rollbacks:  # it was kept, and has been counted all along
            known.reserved = [one for one in known.reserved if one != rollback]
            return
        known.rollbacks = sorted([*known.rollbacks, rollback], key=lambda one: one.attempt)
        known.commits = [step for step in known.commits if step <= rollback.step]
        known.healthy = [step for step in known.healthy if step <= rollback.step]
        if known.promised > rollback.step:
            known.promised, known.promised_by = rollback.step, (0, "")
        known.windows = _windows_of(event) or known.windows


def rollback_of(event: Event) -> Rollback | None:
    """What an event of that name says, if it can be understood."""
    try:
        return Rollback(
            attempt=event.attempt,
            step=msgspec.convert(event.get("step"), int),
            first=msgspec.convert(event.get("first"), int),
            batches=msgspec.convert(event.get("batches"), Batches | None),
        )
    except msgspec.ValidationError:
        return None


def _sighting(event: Event) -> Sighting:
    hosts, step = event.get("hosts"), event.get("step")
    return Sighting(
        attempt=event.attempt,
        hosts=tuple(map(str, hosts)) if isinstance(hosts, list) and hosts else (event.node,),
        kind=str(event.get("kind")),
        cause=str(event.get("cause")),
        step=step if isinstance(step, int) else None,
        t=event.t,
    )


def _windows_of(event: Event) -> dict[str, list[float]]:
    try:
        found = msgspec.convert(event.get("windows", {}), dict[str, list[float]])
    except msgspec.ValidationError:
        return {}
    return {what: values[-CARRIED_MAX:] for what, values in found.items() if what in WATCHED}


def _with(steps: list[int], step: int) -> list[int]:
    return sorted({*steps, step})[-REMEMBERED:]


def _time(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


WAIT_S: Final = 1.0


class GlanceResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a look has found; the fields are those of :class:`Past`, and of its ``tolls``."""

    attempt: int = 0
    word: str = ""
    rollbacks: tuple[Rollback, ...] = ()
    own_failures: dict[str, list[tuple[float, str]]] = {}
    sightings: tuple[Sighting, ...] = ()
    left_out: dict[str, tuple[float, float]] = {}  # until when, for how many seconds
    went_out: frozenset[str] = frozenset()
    cost_s: float = ESTIMATE_S
    pause_s: float = 0.0
    since_t: float = 0.0


class Glance:
    """One agent's look at the past, which nobody waits long for.

    Args:
        past: belongs to this from now on: a thread may be reading it at any time.
    """

    def __init__(self, past: Past) -> None:
        self._past = past
        self._thread: threading.Thread | None = None
        self._error: StorageError | None = None
        self._seen = _seen(past)

    def look(self) -> GlanceResult:
        """What is known now, and what is new where that can be read in time.

        Raises:
            StorageError: the ledger cannot be read.
        """
        if self._thread is None or not self._thread.is_alive():
            self._error = None
            self._thread = threading.Thread(target=self._look, name="outlast-glance", daemon=True)
            self._thread.start()
        self._thread.join(WAIT_S)
        if self._error is not None:
            raise self._error
        return self._seen

    @property
    def seen(self) -> GlanceResult:
        """What the last look has found."""
        return self._seen

    def _look(self) -> None:
        try:
            self._past.look()
        except StorageError as error:
            self._error = error
        else:
            self._seen = _seen(self._past)


def _seen(past: Past) -> GlanceResult:
    return GlanceResult(
        attempt=past.attempt,
        word=past.word,
        rollbacks=tuple(past.rollbacks),
        own_failures={host: list(known) for host, known in past.own_failures.items()},
        sightings=tuple(past.sightings),
        left_out={host: _term(event) for host, event in past.left_out.items()},
        went_out=frozenset(past.went_out),
        cost_s=past.tolls.cost_s,
        pause_s=past.tolls.pause_s,
        since_t=past.tolls.since_t,
    )


def _term(event: Event) -> tuple[float, float]:
    until_t, for_s = event.get("until_t"), event.get("for_s")
    known = isinstance(until_t, int | float) and isinstance(for_s, int | float)
    return (float(until_t), float(for_s)) if known else (event.t, 0.0)
