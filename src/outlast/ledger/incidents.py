"""What went wrong, what it cost and when the job was back, as a pure fold over its ledger.

An incident lasts from the first sign of trouble to the first new step. Whatever else goes wrong
in between belongs to it: several workers lost in one attempt, a notice and the loss it announced,
an attempt that fails before its first step. A notice after whose deadline training went on is
closed as well: nothing came of it.

What the ledger does not say is None; an attempt that ends without a word is an incident too.

``lived`` says how often a job failed while it ran, and how long it was down each time: for plans
and reports. Guarantees: a failure is what the job's own cadence takes for one
(:class:`.past.Failures`): a drain is none, whatever announced it; several losses before the job was
back are one; a notice after which the machine went before all was saved is one. The time in which
nobody had started the job is nobody's: it is neither running nor coming back.

Slow ranks get a sentence for each finding. What waiting for them has cost is an estimate: the
seconds of each step that the others wait, as judged when the rank was named, times the steps from
when it began until it was over, or the newest step of the attempt. These seconds are part of what
goodput calls productive; they are shown beside it and never subtracted. Where two ranks are slow at
once, the steps wait for the slower one alone: at each step the greater loss counts.
"""

from __future__ import annotations

import collections
import itertools
import math
import re
import signal
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import msgspec

from outlast import units
from outlast.errors import Exit
from outlast.ledger.events import Event, back, left, raised, wrong
from outlast.ledger.goodput import in_order, number, whole
from outlast.ledger.past import Failures
from outlast.policy.failures import title_of
from outlast.policy.hazard import Posterior

_LAPSES_AFTER_S: Final = 60.0  # a machine may outlive its deadline by a little
_UNDATED_DEADLINE_S: Final = 600.0
_KINDS: Final = {"worker_lost": "worker lost", "node_lost": "machine lost", "hang": "hang"}
_LONGEST_ERROR: Final = 120
_BROKEN_CONNECTION: Final = re.compile(r"gloo|nccl|connection|broken pipe|SIGABRT", re.IGNORECASE)


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """One incident.

    Attributes:
        kind: the first sign: "worker lost", "machine lost", "hang", "anomaly", "preemption notice",
            "drain", "restart" or "ended without a word".
        attempt: the attempt it began in.
        began_t: when the lost worker passed its last step boundary, or when the notice came.
        detected_t: when it was noticed.
        what: one plain sentence, without its full stop.
        ranks: the workers that were lost, in ascending order.
        nodes: the machines that they were lost on, or that were lost, by name.
        from_step: the last completed step before it, if known.
        standing_step: the newest commit when a drain ended without one (0: there was none).
        resumed_step: the step that training resumed from, if it has.
        resumed_t: when training resumed, if it has.
        back_t: when the first step behind the resume was sampled.
        back_step: that step: up to there the steps that were lost are done again.
        away_s: of the time until then, that in which nobody had started the job.
        closed: whether it is over.
    """

    kind: str
    attempt: int
    began_t: float
    detected_t: float
    what: str
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    from_step: int | None = None
    standing_step: int | None = None
    resumed_step: int | None = None
    resumed_t: float | None = None
    back_t: float | None = None
    back_step: int | None = None
    away_s: float = 0.0
    closed: bool = False

    @property
    def lost_steps(self) -> int | None:
        """Completed steps that have, or had, to be done again, if known."""
        stands = self.standing_step if self.resumed_step is None else self.resumed_step
        if self.from_step is None or stands is None:
            return None
        return max(0, self.from_step - stands)

    def return_words(self) -> str:
        """How the job came back, in words; "" where it has not, or did not have to."""
        if self.back_t is None:
            return ""
        words = f"back after {units.seconds(max(self.back_t - self.began_t, 0.0))}"
        if self.resumed_step is not None:
            words += f": resumed from step {self.resumed_step}"
        if self.lost_steps:
            words += f", {units.count(self.lost_steps, 'step')} done again"
        return words

    def cost(self, step_s: float | None, now: float | None = None) -> IncidentCost | None:
        """What it has cost each worker, in parts that follow each other.

        Args:
            step_s: that a step takes; None where it is not known: then no step is counted.
            now: wall-clock time up to which one is counted that is not over.

        Returns:
            None where nothing had to come back: it is over without a new step behind it.
        """
        until_t = now if self.back_t is None and not self.closed else self.back_t
        if until_t is None:
            return None
        until_t = max(until_t, self.began_t)
        found_t = min(max(self.detected_t, self.began_t), until_t)
        away_s = min(self.away_s, until_t - found_t)
        # The sample that ends it may be many steps behind the resume: these are not counted twice.
        made = 0 if self.back_step is None else self.back_step - (self.resumed_step or 0)
        left = max((self.lost_steps or 0) - max(made, 0), 0)
        return IncidentCost(
            detecting_s=found_t - self.began_t,
            away_s=away_s,
            returning_s=until_t - found_t - away_s,
            again_s=left * (step_s or 0.0),
        )

    def cost_s(self, step_s: float | None, now: float | None = None) -> float | None:
        """The sum of :meth:`cost`, which has the arguments."""
        found = self.cost(step_s, now)
        return None if found is None else found.total_s


class IncidentCost(NamedTuple):
    """Seconds of each worker that an incident has cost.

    Attributes:
        detecting_s: until it was noticed.
        away_s: nobody had started the job; no machines were held for it.
        returning_s: from its notice to the first sample behind the resume, without ``away_s``.
        again_s: the steps that were lost and were not yet done again then, at the time of a step.
    """

    detecting_s: float
    away_s: float
    returning_s: float
    again_s: float

    @property
    def total_s(self) -> float:
        """All of them."""
        return math.fsum(self)

    @property
    def held_s(self) -> float:
        """Those for which machines are paid."""
        return self.total_s - self.away_s


def incidents(events: Iterable[Event]) -> list[Incident]:
    """The incidents of a job, in the order they began to be noticed.

    Args:
        events: the ledger, in any order.
    """
    watch = IncidentTracker()
    for event in in_order(events):
        watch.see(event)
    return [incident.told() for incident in watch.incidents]


class _LostWorker(msgspec.Struct, frozen=True):
    """Who was lost (``who``, where it has no rank), and how, in the singular and the plural."""

    attempt: int
    rank: int | None
    who: str
    how: tuple[str, str]


class _Open(msgspec.Struct):
    """An incident while its events come in."""

    kind: str
    attempt: int
    began_t: float
    detected_t: float
    last_attempt: int  # the newest attempt that it has undone
    from_step: int | None = None
    notice: Event | None = None
    losses: list[_LostWorker] = []
    machines: set[str] = set()
    stop: str = ""
    judged: str = ""
    standing_step: int | None = None
    resumed_step: int | None = None
    resumed_t: float | None = None
    back_t: float | None = None
    back_step: int | None = None
    away_s: float = 0.0
    closed: bool = False

    def reach(self, event: Event) -> None:
        if event.attempt == self.attempt and (step := whole(event)) is not None:
            self.from_step = max(step, self.from_step or 0)

    def told(self) -> Incident:
        return Incident(
            what="; ".join(_clauses(self)),
            ranks=tuple(sorted({loss.rank for loss in self.losses if loss.rank is not None})),
            nodes=tuple(sorted(self.machines)),
            **{name: getattr(self, name) for name in _TOLD_AS_IS},
        )


_TOLD_AS_IS: Final = set(Incident.__struct_fields__) & set(_Open.__struct_fields__)


class IncidentTracker:
    """Opens, fills and closes incidents, at most one at a time."""

    def __init__(self) -> None:
        self.incidents: list[_Open] = []
        self.open: _Open | None = None
        self.heard: Event | None = None  # a notice that came while another incident was open
        self.attempt = 0
        self.running = False  # the attempt has formed and its end has not been seen
        self.moves = False  # into the next attempt, with nobody lost
        self.step: int | None = None  # newest step of the attempt
        self.committed = 0  # newest step that can be resumed from
        self.since_t = -math.inf  # when the attempt was first heard of
        self.last_t = 0.0  # time of the event before
        self.stopped_t: float | None = None  # since when nobody has started the job

    def see(self, event: Event) -> None:
        """Take the next one."""
        if event.event in _ACTS:
            _ACTS[event.event](self, event)
        self.last_t = event.t

    def _begin(self, kind: str, began_t: float, detected_t: float) -> _Open:
        self.open = _Open(
            kind, self.attempt, began_t, detected_t, self.attempt, from_step=self.step
        )
        self.incidents.append(self.open)
        return self.open

    def _close(self, back_t: float | None = None, back_step: int | None = None) -> None:
        if self.open is not None:
            self.open.back_t, self.open.back_step = back_t, back_step
            self.open.closed = True
        self.open = None
        notice, self.heard = self.heard, None
        if notice is not None:
            self._notice(notice)

    def _trouble(self, event: Event, kind: str, began_t: float) -> _Open:
        """The incident that ``event`` belongs to."""
        self._follow(event)
        opened, step = self.open, whole(event)
        if opened is not None and event.attempt > opened.last_attempt:
            resumed_step, opened.last_attempt = opened.resumed_step, event.attempt
            if step is not None and resumed_step is not None and step > resumed_step:
                self._close(began_t, step)  # there were new steps, between two samples
            else:
                opened.resumed_step = opened.resumed_t = None
        opened = self.open or self._begin(kind, began_t, event.t)
        opened.notice = opened.notice or self.heard
        self.heard = None
        opened.reach(event)
        return opened

    def _follow(self, event: Event) -> None:
        """Notice a newer attempt; one that was running till now has ended without a word."""
        if event.attempt > self.attempt:
            self._started(event)
            if self.running:
                self._vanished(event)
            self.attempt, self.running, self.step = event.attempt, True, None
            self.since_t = event.t

    def _started(self, event: Event) -> None:
        if self.open is not None and self.stopped_t is not None:
            self.open.away_s += max(event.t - max(self.stopped_t, self.open.began_t), 0.0)
        self.stopped_t = None

    def _vanished(self, event: Event) -> None:
        opened = self.open or self._begin("ended without a word", self.last_t, event.t)
        opened.last_attempt = self.attempt
        opened.resumed_step = opened.resumed_t = None
        opened.stop = f"attempt {self.attempt} ended without a word{_after(self.step)}"

    def _job_started(self, event: Event) -> None:
        if event.get("joins") and self.running:
            return  # one machine more; had all others vanished, the next attempt would tell
        self._started(event)
        if self.running:
            self._vanished(event)
        if self.open is not None:
            self.open.last_attempt = 0
        self.attempt, self.running, self.heard, self.step = 0, False, None, None

    def _resumed(self, event: Event) -> None:
        if event.rank != 0 or event.attempt < self.attempt:
            return
        self._follow(event)
        self.step = whole(event)
        moves, self.moves = self.moves, False
        if self.open is not None and event.attempt > self.open.last_attempt and not moves:
            self.open.resumed_step, self.open.resumed_t = self.step, event.t

    def _sampled(self, event: Event) -> None:
        step = whole(event)
        if event.rank != 0 or step is None or event.attempt < self.attempt:
            return
        self._follow(event)
        self.step = max(step, self.step or 0)
        opened = self.open
        if opened is None:
            return
        if event.attempt > opened.last_attempt:
            if step > (opened.resumed_step or 0):
                self._close(event.t, step)
            return
        opened.reach(event)
        if not opened.stop and not opened.losses and _lapsed(opened.notice, event.t):
            opened.stop = "nothing came of it"
            self._close()

    def _lost(self, event: Event) -> None:
        if event.attempt < self.attempt:
            return
        beat_t = number(event, "beat_t")
        self._follow(event)
        began_t = event.t if beat_t is None else max(self.since_t, min(beat_t, event.t))
        opened = self._trouble(event, _KINDS[event.event], began_t)
        opened.losses.append(_loss(event))
        named = event.get("nodes")
        own = [event.get("node") or event.node]
        opened.machines.update(map(str, named if isinstance(named, list) and named else own))
        self.running = False

    def _survived(self, event: Event) -> None:
        if event.get("moves") and event.attempt >= self.attempt:
            self._follow(event)
            self.running, self.moves = False, True

    def _restart(self, event: Event) -> None:
        kind = event.get("kind")
        told = f"judged: {title_of(kind)}; {event.get('action')}" if kind else ""
        if self.running and event.attempt == self.attempt:
            opened = self._trouble(event, "restart", event.t)
            opened.stop = f"restarted: {event.get('reason') or 'for an unknown reason'}"
            self.running = False
        if self.open is not None and told:
            self.open.judged = told

    def _anomaly(self, event: Event) -> None:
        if event.attempt < self.attempt:
            return
        if event.get("action") != "report":
            self._trouble(event, "anomaly", event.t).stop = wrong(event)
        elif self.open is None:  # training goes on: nothing is waited for
            self._trouble(event, "anomaly", event.t).stop = f"{wrong(event)}; reported only"
            self._close(back_t=event.t)

    def _rollback(self, event: Event) -> None:
        if event.attempt < self.attempt:
            return
        opened = self._trouble(event, "anomaly", event.t)
        opened.stop = "; ".join(filter(None, (opened.stop, back(event))))
        opened.from_step = max(whole(event, "seen") or 0, opened.from_step or 0)
        self.running = False

    def _notice(self, event: Event) -> None:
        if event.get("early"):  # a recommendation: what follows from it has events of its own
            return
        opened = self.open
        if opened is not None and opened.kind == "drain" and opened.attempt == event.attempt:
            # What it is drained for, told by a machine whose clock is late.
            opened.kind, opened.notice = "preemption notice", opened.notice or event
            return
        if opened is not None:
            self.heard = event
            return
        self._begin("preemption notice", event.t, event.t).notice = event

    def _drain_agreed(self, event: Event) -> None:
        if event.attempt >= self.attempt:
            opened = self._trouble(event, "drain", event.t)
            opened.stop = left(event) or f"all ranks agreed to stop{_after(whole(event))}"

    def _drained(self, event: Event) -> None:
        if event.attempt < self.attempt:
            return
        opened = self._trouble(event, "drain", event.t)
        uncommitted = " without a commit" if event.get("committed") is False else ""
        opened.stop = f"all ranks stopped{_after(whole(event))}{uncommitted}"
        if uncommitted:
            opened.standing_step = self.committed
        self.running = False
        self.stopped_t = event.t if self.stopped_t is None else self.stopped_t

    def _commit(self, event: Event) -> None:
        if event.get("kind", "full") != "full":  # weights alone are not resumed from
            return
        step = whole(event) or 0
        self.committed = max(self.committed, step)
        if event.attempt == self.attempt and self.running:  # steps are sampled once a second
            self.step = max(step, self.step or 0)
        if self.open is not None and self.open.standing_step is not None:
            self.open.standing_step = self.committed  # what was on its way has arrived

    def _job_finished(self, event: Event) -> None:
        self.running, self.heard = False, None
        self.stopped_t = event.t
        if event.get("exit_code") == Exit.FINISHED:
            self._close()


_ACTS: Final[dict[str, Callable[[IncidentTracker, Event], None]]] = {
    "job_started": IncidentTracker._job_started,
    "attempt_formed": IncidentTracker._follow,
    "resumed": IncidentTracker._resumed,
    "step": IncidentTracker._sampled,
    "survived": IncidentTracker._survived,
    "worker_lost": IncidentTracker._lost,
    "node_lost": IncidentTracker._lost,
    "hang": IncidentTracker._lost,
    "restart": IncidentTracker._restart,
    "anomaly": IncidentTracker._anomaly,
    "rollback": IncidentTracker._rollback,
    "notice": IncidentTracker._notice,
    "drain_agreed": IncidentTracker._drain_agreed,
    "drained": IncidentTracker._drained,
    "commit": IncidentTracker._commit,
    "job_finished": IncidentTracker._job_finished,
}


def _lapsed(notice: Event | None, t: float) -> bool:
    deadline_t = None if notice is None else number(notice, "deadline_t")
    if notice is not None and deadline_t is None:
        deadline_t = notice.t + _UNDATED_DEADLINE_S
    return deadline_t is not None and t > deadline_t + _LAPSES_AFTER_S


def _after(step: int | None) -> str:
    if step is None:
        return ""
    return f" after step {step}" if step else " before the first step"


def _notice_words(notice: Event) -> str:
    source = notice.get("source") or "the platform"
    words = f"{'a signal' if source == 'signal' else source} says {notice.get('action') or 'stop'}"
    deadline_t = number(notice, "deadline_t")
    return words if deadline_t is None else f"{words} in {max(0.0, deadline_t - notice.t):.0f} s"


def _loss(event: Event) -> _LostWorker:
    if event.event == "node_lost":  # read from disk, the field has taken the head's place
        return _LostWorker(event.attempt, None, f"machine {event.get('node') or event.node}", _LOST)
    if event.event != "hang":
        return _LostWorker(event.attempt, event.rank, "a worker", _cause(event))
    place = f", in {event.get('place')}" if event.get("place") else ""
    nobody = event.get("ranks") == [] and not event.get("nodes")
    who = "every worker" if nobody else "a worker"
    return _LostWorker(event.attempt, event.rank, who, (f"made no more progress{place}",) * 2)


_LOST: Final = ("was lost", "were lost")


def _cause(event: Event) -> tuple[str, str]:
    exit_code, error = event.get("exit_code"), event.get("error")
    by = event.get("signal") or (-exit_code if isinstance(exit_code, int) and exit_code < 0 else 0)
    if isinstance(by, int) and by:
        by = signal.Signals(by).name if by in signal.valid_signals() else f"signal {by}"
    if by:
        return (f"was killed by {by}", f"were killed by {by}")
    if isinstance(error, str) and error.strip():
        return (f"failed ({raised(error)[:_LONGEST_ERROR].strip()})",) * 2
    if isinstance(exit_code, int):
        return (f"left with exit code {exit_code}",) * 2
    return _LOST


def _aftermath(loss: _LostWorker) -> tuple[int, int]:
    """Orders causes before consequences: agents tell survivors' broken connections first."""
    if "SIGTERM" in loss.how[0]:  # how agents stop survivors
        return loss.attempt, 2
    return loss.attempt, int(_BROKEN_CONNECTION.search(loss.how[0]) is not None)


def _clauses(incident: _Open) -> list[str]:
    clauses = [] if incident.notice is None else [_notice_words(incident.notice)]
    alike: dict[tuple[int, bool, tuple[str, str]], list[_LostWorker]] = {}
    for loss in sorted(incident.losses, key=_aftermath):
        alike.setdefault((loss.attempt, loss.rank is None, loss.how), []).append(loss)
    told: int | None = None  # the attempt that the sentence speaks of
    for (attempt, _, how), losses in alike.items():
        words = f"{_subject(losses)} {how[len(losses) > 1]}"
        if told is None:
            words += _after(incident.from_step)
        elif attempt == told:
            words = f"then {words}"
        else:
            words = f"attempt {attempt} failed before its first step: {words}"
        told = attempt
        clauses.append(words)
    return clauses + [words for words in (incident.stop, incident.judged) if words]


def _subject(losses: list[_LostWorker]) -> str:
    ranks = sorted({loss.rank for loss in losses if loss.rank is not None})
    names = [str(rank) for rank in ranks] or sorted({loss.who for loss in losses})
    listed = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    return f"rank{'s' * (len(ranks) > 1)} {listed}" if ranks else listed


_JUST_S = 1.0  # between what is told of a loss and the sample before it


class Lived(msgspec.Struct, frozen=True, kw_only=True):
    """A job's life: how long it ran, how often it failed, how long it was down.

    Attributes:
        ran_s: seconds in which it trained.
        num_failures: that ended some of it.
        known: what its cadence makes of that: what is long ago counts for less.
        failures: the incidents that they are told as.
        stops: (from, to) of each time in which nobody had started it.
    """

    ran_s: float
    num_failures: int
    known: Posterior
    failures: list[Incident]
    stops: list[tuple[float, float]]

    def away_s(self, begin_t: float, end_t: float) -> float:
        """Seconds between these in which nobody had started it."""
        return sum(max(min(end_t, to) - max(begin_t, since), 0.0) for since, to in self.stops)

    def downs_s(self) -> list[float]:
        """Of each failure: from its detection to the first new step, if the job is back."""
        return [
            one.back_t - one.detected_t - self.away_s(one.detected_t, one.back_t)
            for one in self.failures
            if one.back_t is not None
        ]

    def detections_s(self) -> list[float]:
        """Of each failure: until it was noticed."""
        return [
            one.detected_t - one.began_t - self.away_s(one.began_t, one.detected_t)
            for one in self.failures
        ]


_HEARD: Final = frozenset(
    {"resumed", "worker_lost", "node_lost", "hang", "drained", "job_finished"}
    | {"attempt_formed", "job_started"}
)


def lived(ordered: Sequence[Event], incidents: Iterable[Incident]) -> Lived:
    """A job's life, from its events in order and the incidents in them."""
    seen, stops, stopped_t = Failures(), [], None
    sampled_t: float | None = None
    for event in ordered:
        if event.get("joins"):  # another machine of the same attempt
            continue
        if event.event == "step" and seen.since_t and seen.scope is None:
            # Of samples in a row the last one says how long it ran.
            sampled_t = event.t
            continue
        if sampled_t is not None and event.event in _HEARD:
            seen.see("step", sampled_t)
            sampled_t = None
        seen.see(event.event, event.t)
        if event.event in ("drained", "job_finished") and stopped_t is None:
            stopped_t = event.t
        elif event.event in ("job_started", "attempt_formed") and stopped_t is not None:
            stops.append((stopped_t, event.t))
            stopped_t = None
    if sampled_t is not None:
        seen.see("step", sampled_t)
    failures = [
        one
        for one in incidents
        if any(
            one.began_t - _JUST_S <= t and (one.back_t is None or t <= one.back_t)
            for t in seen.moments
        )
    ]
    return Lived(
        ran_s=seen.ran_s,
        num_failures=len(seen.moments),
        known=seen.known,
        failures=failures,
        stops=stops,
    )


class Slow(msgspec.Struct, frozen=True, kw_only=True):
    """A slow rank, from its first slow step to its last.

    Attributes:
        attempt, node, ranks: who; the ranks of one machine that were found together.
        cause: "compute", "loader" or "burst".
        factor: how many times as long as the others' its work took.
        since_step, until_step: the first and the newest step it is known to have been slow in.
        from_t, until_t: when these were, on the wall clock: between two samples, in proportion.
        lost_s: seconds that each worker has waited for it, estimated.
        over: whether it has recovered.
        action: what was done.
    """

    attempt: int
    node: str
    ranks: tuple[int, ...]
    cause: str
    factor: float
    since_step: int
    until_step: int
    from_t: float
    until_t: float
    lost_s: float
    over: bool
    action: str


class SlowFold:
    """The slow ranks of a job: take events in the order of their times, ask at any time."""

    def __init__(self) -> None:
        self._found: list[Slow] = []
        self._rates: list[float] = []
        self._newest: dict[int, tuple[int, float]] = {}  # attempt → step and when
        self._samples: collections.deque[tuple[int, float]]
        self._samples = collections.deque(maxlen=_SAMPLES_KEPT)

    def take(self, event: Event) -> None:
        """Take the next one."""
        if event.event not in ("step", "straggler") or (step := whole(event)) is None:
            return
        if step >= self._newest.get(event.attempt, (0, 0.0))[0]:
            self._newest[event.attempt] = step, event.t
        if event.event == "straggler":
            self._judged(event, step)
            return
        if self._samples and step < self._samples[-1][0]:
            self._samples.clear()  # another attempt
        self._samples.append((step, event.t))

    def told(self) -> list[Slow]:
        """In the order in which they were found."""
        pairs = zip(self._found, self._rates, strict=True)
        return [_counted(one, rate, self._newest) for one, rate in pairs]

    def _judged(self, event: Event, step: int) -> None:
        ranks = _ranks(event)
        until_t = _passed_t(self._samples, step, event.t)
        if event.get("over") and event.get("cause") != "burst":
            for place, one in enumerate(self._found):
                if one.attempt == event.attempt and not one.over and set(ranks) & set(one.ranks):
                    self._found[place] = msgspec.structs.replace(
                        one, over=True, until_step=step, until_t=max(until_t, one.from_t)
                    )
            return
        since = min(step, whole(event, "since_step") or step)
        self._rates.append(max(number(event, "lost_s") or 0.0, 0.0))
        from_t = _passed_t(self._samples, since, event.t)
        self._found.append(
            Slow(
                attempt=event.attempt,
                node=str(event.get("node") or event.node),
                ranks=ranks,
                cause=str(event.get("cause") or "compute"),
                factor=number(event, "factor") or 1.0,
                since_step=since,
                until_step=step,
                from_t=from_t,
                until_t=max(until_t, from_t),
                lost_s=0.0,
                over=bool(event.get("over")),
                action=str(event.get("action") or "report"),
            )
        )


def slow_ranks(events: Iterable[Event]) -> list[Slow]:
    """The slow ranks of a job, in the order in which they were found."""
    fold = SlowFold()
    for event in in_order(events):
        fold.take(event)
    return fold.told()


_SAMPLES_KEPT: Final = 200  # a finding is of steps that are not long ago


def _passed_t(samples: Sequence[tuple[int, float]], step: int, t: float) -> float:
    """When a step was passed, as the newest samples before ``t`` tell; ``t`` where they do not."""
    later = t
    for before, sampled_t in reversed(samples):
        if before == step:
            return sampled_t
        if before < step:
            after = next((one for one in samples if one[0] > step), None)
            if after is None:
                return later
            share = (step - before) / (after[0] - before)
            return sampled_t + share * (after[1] - sampled_t)
        later = sampled_t
    return later


def lost_to_waiting_s(found: Iterable[Slow]) -> float:
    """Seconds of each worker that slow ranks have cost: of those at the same time, the worst."""
    edges: set[tuple[int, int]] = set()
    spans = []
    for one in found:
        steps = one.until_step - one.since_step + 1
        spans.append((one.attempt, one.since_step, one.until_step + 1, one.lost_s / steps))
        edges |= {(one.attempt, one.since_step), (one.attempt, one.until_step + 1)}
    total, ordered = 0.0, sorted(edges)
    for (attempt, first), (other, last) in itertools.pairwise(ordered):
        if attempt == other:
            rates = [r for a, since, until, r in spans if a == attempt and since <= first < until]
            total += max(rates, default=0.0) * (last - first)
    return total


def sentence(event: Event) -> str:
    """What a person should read of a finding."""
    ranks = _ranks(event) or (-1,)
    node = event.get("node") or event.node
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    who = f"{who} on {node}"
    one, since = len(ranks) == 1, event.get("since_step")
    if event.get("over") and event.get("cause") != "burst":
        be = "is" if one else "are"
        return f"{who} {be} as quick as the others again, at step {event.get('step')}"
    own, others = number(event, "own_s") or 0.0, number(event, "others_s") or 0.0
    factor = number(event, "factor") or 1.0
    if event.get("of") == "loader":
        how = f"{'waits' if one else 'wait'} longer for data than the others"
    else:
        how = f"{'computes' if one else 'compute'} {factor:.3g} times as long as the others"
    figures = f"({_time(own)} against {_time(others)})"
    if event.get("cause") == "burst":
        return f"{who} {how} {figures} for some steps from step {since} on; it was a burst"
    where = ", in steps with saves" if event.get("saving") else ""
    lost = _time(number(event, "lost_s") or 0.0)
    return (
        f"{who} {how} {figures} since step {since}{where}; "
        f"of each step {lost} are lost waiting for {'it' if one else 'them'}"
    )


def _ranks(event: Event) -> tuple[int, ...]:
    listed = event.get("ranks")
    ranks = listed if isinstance(listed, list | tuple) else [event.rank]
    return tuple(sorted(rank for rank in ranks if isinstance(rank, int)))


def _counted(one: Slow, rate: float, newest: dict[int, tuple[int, float]]) -> Slow:
    until, until_t = one.until_step, one.until_t
    step, t = newest.get(one.attempt, (0, 0.0))
    if not one.over and step >= until:
        until, until_t = step, max(t, until_t)
    steps = until - one.since_step + 1
    return msgspec.structs.replace(one, until_step=until, until_t=until_t, lost_s=rate * steps)


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
