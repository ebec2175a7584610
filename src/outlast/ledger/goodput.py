"""Where each worker-second of a job went, as a pure fold over its ledger.

The time from the first event to the last (or to ``now``) is one line. It is cut at the events
that say what the workers were doing, and every piece is given wholly to parts, never twice; so
the parts add up to the whole for any list of events: torn, duplicated, out of order, with clocks
that step back. Events are taken in the order of their wall-clock times; one event counts once.
Training is synchronous, so rank 0's samples speak for all workers of its attempt: a second of
the line is ``world_size`` worker-seconds. Until an attempt has formed, the size of the one before
it counts (before the very first attempt: its own).

==========  ===================================================================================
part        what is counted
==========  ===================================================================================
productive  steps that the job had never completed before, from sample to sample of rank 0
replayed    steps done again: not above the highest step completed before (the mark). A piece
            that crosses the mark is split in proportion to its steps. After a rollback, too:
            what it undid was productive when it was done
stalled     blocked by checkpoints: a sample's ``stalled_s``; in a drain, everything from the
            sample of the agreed step (without one: from the agreement) until it is drained; where
            a session left without an agreed step, nothing
detecting   from the last step boundary a lost worker passed (``beat_t``; without it: from the
            last sample) until the loss was noticed. An upper bound: the lost part of the
            interrupted step is in it. What other workers lose afterwards in the same attempt
            changes nothing
restarting  from the noticed loss, or from a later start of the job, until rank 0 has resumed
waiting     for machines: from drained (or exit code 75) to the next start; and from the last
            sample to the next start where a machine vanished without a word
other       start-up of the very first attempt; from the last sample to the end of the job, and
            on to the next start of a job that was not drained; and what is not known yet: from
            the last sample to ``now`` while an attempt runs
==========  ===================================================================================

After ``job_finished`` nothing is counted unless the job is started again.

What can go wrong: clocks of several machines that differ move seconds between parts (never out of
the sum); a machine whose clock has never been set makes the line absurdly long.

Rejected: trusting each sample's ``seconds`` (lost lines would leave holes).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Final, Literal, get_args

import msgspec

from outlast.errors import Exit
from outlast.ledger.events import Event

Part = Literal["productive", "replayed", "stalled", "detecting", "restarting", "waiting", "other"]
PARTS: Final[tuple[Part, ...]] = get_args(Part)

# Beyond these a number in a ledger is garbage: no clock shows it, no machine counts it, and sums
# of it would no longer be exact.
_LARGEST_T: Final = 1e12
_LARGEST_COUNT: Final = 2**53


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a job, split into the seven parts that the module's docstring defines.

    Attributes:
        productive, replayed, stalled, detecting, restarting, waiting, other: worker-seconds of
            each part.
        total: worker-seconds in all; what the seven add up to.
        wall_s: wall-clock seconds from the first event to the last, or to ``now``.
        steps_done: the highest step that was completed.
        steps_replayed: steps that were done again.
        attempts: attempts that formed.
        commits: checkpoints that were committed.
    """

    productive: float = 0.0
    replayed: float = 0.0
    stalled: float = 0.0
    detecting: float = 0.0
    restarting: float = 0.0
    waiting: float = 0.0
    other: float = 0.0
    total: float = 0.0
    wall_s: float = 0.0
    steps_done: int = 0
    steps_replayed: int = 0
    attempts: int = 0
    commits: int = 0

    def parts(self) -> dict[Part, float]:
        """Part → worker-seconds, always all seven, in the order of ``PARTS``."""
        return {part: getattr(self, part) for part in PARTS}

    @property
    def fraction_productive(self) -> float:
        """The productive part of the whole, 0 to 1; 0 when no time has passed."""
        return self.productive / self.total if self.total else 0.0


def goodput(
    events: Iterable[Event],
    now: float | None = None,
    *,
    count: Literal["workers", "machines"] = "workers",
) -> Goodput:
    """Split the time of a job into its seven parts.

    Args:
        events: the ledger, in any order.
        now: wall-clock time up to which a job that has not finished is counted.
        count: what a second is multiplied by: the attempt's workers, or (for money) its machines.
    """
    ordered = in_order(events)
    if not ordered:
        return Goodput()
    widths = (_width(event, count) for event in ordered if event.event == "attempt_formed")
    line = _OpenTimeline(ordered[0].t, next((width for width in widths if width), 1), count)
    for event in ordered:
        line.see(event)
    # What comes after the end is no time of the job: a repair months later, a worker's late word.
    end_t = line.at_t if line.finished else ordered[-1].t
    if now is not None and not line.finished:
        end_t = max(end_t, now)
    return line.close(end_t)


def in_order(events: Iterable[Event]) -> list[Event]:
    """The events by time, each once; events at the same time in one fixed order.

    What has no usable time is left out.
    """
    usable = [e for e in events if abs(e.t) <= _LARGEST_T and abs(e.mono) <= _LARGEST_T]
    usable.sort(key=lambda event: event.t)
    ordered: list[Event] = []
    for _, group in itertools.groupby(usable, key=lambda event: event.t):
        ties = list(group)
        if len(ties) > 1:
            # Several lines within one tick: nothing may depend on which of them comes first.
            once = {(event.mono, repr(event)): event for event in ties}
            ties = [once[key] for key in sorted(once)]
        ordered += ties
    return ordered


def number(event: Event, name: str) -> float | None:
    """The finite number in a field, or None for everything else."""
    value = event.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= _LARGEST_T else None


def whole(event: Event, name: str = "step") -> int | None:
    """The whole number from 0 in a field, or None for everything else."""
    value = event.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value < _LARGEST_COUNT else None


def _width(event: Event, count: str) -> int | None:
    nodes = event.get("nodes")
    if count == "machines" and isinstance(nodes, list):  # named rather than counted
        return len(nodes) or None
    return whole(event, "nodes" if count == "machines" else "world_size") or None


class _OpenTimeline:
    """The time line while it is being cut.

    ``at_t`` is where the last piece ended. While ``training``, the piece that is open is given
    away by the event that ends it; otherwise time goes to ``part``.
    """

    def __init__(self, start_t: float, width: int, count: str) -> None:
        self.start_t = self.at_t = start_t
        self.width = width
        self.count = count
        self.seconds: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
        self.total = 0.0
        self.part: Part = "other"
        self.training = False
        self.attempt = 0  # the attempt that runs or ran last since the job was started
        self.over = False  # that attempt has ended: what it still writes is late
        self.stopped = False  # drained or finished
        self.finished = False
        self.joined_t = -math.inf  # when a machine came, the first since the last piece
        self.agreed: tuple[float, int] | None = None  # when the drain was agreed, its step
        self.step = 0  # newest step of this attempt
        self.mark = 0  # highest step ever completed
        self.steps_replayed = 0
        self.attempts = 0
        self.commits: set[tuple[int, int | None]] = set()

    def see(self, event: Event) -> None:
        """Take the next event; an unknown one is only time that passes."""
        if event.event == "commit":
            self.commits.add((event.attempt, whole(event)))
        act = _ACTS.get(event.event)
        if act is not None:
            act(self, event)

    def close(self, end_t: float) -> Goodput:
        """Give away what is left, up to ``end_t``."""
        self._pass(end_t, "stalled" if self._draining else "other")
        return Goodput(
            **self.seconds,
            total=self.total,
            wall_s=self.at_t - self.start_t,
            steps_done=self.mark,
            steps_replayed=self.steps_replayed,
            attempts=self.attempts,
            commits=len(self.commits),
        )

    def _give(self, until_t: float, part: Part) -> None:
        """The piece up to ``until_t`` wholly to ``part``; a time that has passed is no piece."""
        worker_seconds = max(0.0, until_t - self.at_t) * self.width
        self.seconds[part] += worker_seconds
        self.total += worker_seconds
        self.at_t = max(self.at_t, until_t)

    def _pass(self, until_t: float, if_training: Part) -> None:
        self._give(until_t, if_training if self.training else self.part)

    def _train(self, until_t: float, step: int, stalled_s: float = 0.0) -> None:
        """The piece up to ``until_t``, in which training went from ``self.step`` to ``step``."""
        steps = step - self.step
        if steps > 0:
            again = min(max(self.mark - self.step, 0), steps)
            share_again = again / steps
            self.steps_replayed += again
        else:  # no step was completed, or training was rolled back within the attempt
            share_again = float(steps < 0 or self.step < self.mark)
        seconds = max(0.0, until_t - self.at_t)
        stalled_s = min(max(0.0, stalled_s), seconds)
        trained_s = seconds - stalled_s
        self._give(self.at_t + stalled_s, "stalled")
        self._give(self.at_t + trained_s * share_again, "replayed")
        self._give(until_t, "productive" if share_again < 1 else "replayed")
        self._reach(step)

    def _reach(self, step: int | None) -> None:
        if step is not None:
            self.step = step
            self.mark = max(self.mark, step)

    def _lives(self, event: Event) -> bool:
        """Whether the event's attempt is the one that runs; a newer one takes over here."""
        if event.attempt < self.attempt or (event.attempt == self.attempt and self.over):
            self.mark = max(self.mark, whole(event) or 0)
            return False
        if event.attempt > self.attempt:
            self._take_over(event)
        return True

    def _take_over(self, event: Event) -> None:
        # An attempt that is still training here was lost, but the line that said so was not
        # written. The very first attempt's start-up stays what it is.
        if self.training and self.at_t < self.joined_t:  # there was nobody who trained meanwhile
            self._give(self.joined_t, "waiting")
        self._pass(event.t, "restarting")
        if self.training or self.stopped:
            self.part = "restarting"
        self.training = self.over = self.stopped = self.finished = False
        self.attempt = event.attempt
        self.attempts += 1
        self.agreed = None

    @property
    def _draining(self) -> bool:
        return self.agreed is not None and self.step >= self.agreed[1]

    def _job_started(self, event: Event) -> None:
        if self.attempt == 0 and not self.stopped:
            return  # the first start, or another machine's word of the same start
        if event.get("joins") and not self.stopped:
            # A machine comes to those that train, or after all were lost: the next attempt tells.
            self.joined_t = event.t if self.joined_t <= self.at_t else self.joined_t
            return
        # Where nobody said that the job stops, its machine vanished; it was waited for.
        self._give(event.t, self.part if self.stopped else "waiting")
        self.part = "restarting" if self.attempts else "other"
        self.training = self.over = self.stopped = self.finished = False
        self.attempt = 0

    def _attempt_formed(self, event: Event) -> None:
        if event.attempt > self.attempt:
            self._take_over(event)
            self.width = _width(event, self.count) or self.width

    def _resumed(self, event: Event) -> None:
        if event.rank == 0 and self._lives(event) and not self.training:
            self._pass(event.t, "restarting")
            self.training = True
            step = whole(event)
            self._reach(self.mark if step is None else step)

    def _sampled(self, event: Event) -> None:
        step = whole(event)
        if event.rank != 0 or step is None or not self._lives(event):
            return
        if self.training and not self._draining:
            self._train(event.t, step, number(event, "stalled_s") or 0.0)
            return
        self._pass(event.t, "stalled")
        self.training = True
        self._reach(step)

    def _lost(self, event: Event) -> None:
        # By the time of a restart its number may be the next attempt's, which has not formed.
        if event.event == "restart" and not (self.training and event.attempt == self.attempt):
            return
        if not self._lives(event):
            return
        step, beat_t = whole(event), number(event, "beat_t")
        if self.training and not self._draining and beat_t is not None:
            # The lost worker may have been a step behind rank 0's sample.
            self._train(min(beat_t, event.t), max(step or 0, self.step))
        self._pass(event.t, "stalled" if self._draining else "detecting")
        self._reach(step)
        self.training, self.over, self.part = False, True, "restarting"

    def _rolled_back(self, event: Event) -> None:
        if not self._lives(event):
            return
        if self.training:  # also what is undone was trained: doing it again is what is replayed
            self._train(event.t, max(whole(event, "seen") or 0, self.step))
        self._pass(event.t, "stalled" if self._draining else "detecting")
        self.training, self.over, self.part = False, True, "restarting"

    def _drain_agreed(self, event: Event) -> None:
        if self.agreed is None and self.training and event.attempt == self.attempt:
            step = whole(event)
            self.agreed = (event.t, self.step if step is None else step)

    def _drained(self, event: Event) -> None:
        if event.attempt < self.attempt:
            return
        step = whole(event)
        if self.training and self.agreed is None:
            # It left from where it was (an evaluation, a step without end): no save was waited for.
            self._train(event.t, max(step or 0, self.step))
        elif self.training and self.agreed and not self._draining:
            self._train(self.agreed[0], max(step or 0, self.step))
        self._pass(event.t, "stalled")
        self._reach(step)
        self.training, self.over, self.stopped, self.part = False, True, True, "waiting"

    def _job_finished(self, event: Event) -> None:
        drained = event.get("exit_code") == Exit.DRAINED
        self._pass(event.t, "stalled" if drained or self._draining else "other")
        self.part = "waiting" if drained else "other"
        self.training = False
        self.over = self.stopped = self.finished = True


_ACTS: Final[dict[str, Callable[[_OpenTimeline, Event], None]]] = {
    "job_started": _OpenTimeline._job_started,
    "attempt_formed": _OpenTimeline._attempt_formed,
    "resumed": _OpenTimeline._resumed,
    "step": _OpenTimeline._sampled,
    "worker_lost": _OpenTimeline._lost,
    "node_lost": _OpenTimeline._lost,
    "hang": _OpenTimeline._lost,
    "restart": _OpenTimeline._lost,
    "rollback": _OpenTimeline._rolled_back,
    "drain_agreed": _OpenTimeline._drain_agreed,
    "drained": _OpenTimeline._drained,
    "job_finished": _OpenTimeline._job_finished,
}
