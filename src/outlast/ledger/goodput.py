"""Where each worker-second of a job went, as a pure fold over its ledger.

The time from the start of the job's first process to the last event (or to ``now``) is one line. It
is cut at the events that say what the workers were doing, and every piece is given wholly to parts,
never twice; so the parts add up to the whole for any list of events: torn, duplicated, out of
order, with clocks that step back. Events are taken in the order of their wall-clock times; one
event counts once. Training is synchronous, so rank 0 speaks for all workers of its attempt: a
second of the line is ``world_size`` worker-seconds. Until an attempt has formed, the size of the
one before it counts (before the very first attempt: its own).

==========  ===================================================================================
part        what is counted
==========  ===================================================================================
productive  steps that the job had never completed before, from sample to sample of rank 0,
            without what the next three parts have of it
replayed    steps done again: not above the highest step completed before (the mark). A piece
            that crosses the mark is split in proportion to its steps. After a rollback, too:
            what it undid was productive when it was done
data        steps that waited for their batch: a sample's ``data_s``, for new steps
stalled     blocked by checkpoints: a sample's ``stalled_s``, the wait for the commit of the end,
            and the copies to slower tiers behind it; in a drain, everything from the sample of
            the agreed step (without one: from the agreement) until the job's process has ended
            (where it does not say so: until it is drained); where a session left without an
            agreed step, nothing
script      the script's own code outside of its loops' steps: a sample's ``script_s`` (between
            the session's beginning and a loop, between loops), and from the end of the session
            until the workers are gone. All of an attempt that ends well without a session
starting    of the first attempt: launcher, interpreter, imports; from the start of the process
            until the script makes its first model (where that is not seen: opens its session)
building    from there until rank 0 has the state that the job begins with: model, data, optimizer
detecting   from the last step boundary a lost worker passed (``beat_t``; without it: from the
            last sample) until the loss was noticed. An upper bound: the lost part of the
            interrupted step is in it. What other workers lose afterwards in the same attempt
            changes nothing
restarting  from the noticed loss, or from a later start of the job, until rank 0 has resumed and
            the loop's data is where it was: a sample's ``catch_up_s``
waiting     for machines: from drained (or exit code 75) to the next start; and from the last
            sample to the next start where a machine vanished without a word
paused      from an end of another kind to the next start: nobody wanted the job to run
other       what is not known: from the last sample to ``now`` while an attempt runs; what an
            attempt did that was lost before any session of the job had begun; and in ledgers of
            versions that did not write it down, from the last sample to the end
==========  ===================================================================================

``PARTS`` is the one list of them: whoever shows or exports parts goes by it, so that nothing else
changes when one is added. After ``job_finished`` nothing is counted unless the job is started
again. ``undecided`` is the open piece at the end, which events to come may still give to another
part; all that was given before it stays as it is, whatever comes.

Time between two attempts belongs to the older one. A machine has the seconds of its workers.

What can go wrong: clocks of several machines that differ move seconds between parts (never out of
the sum); a machine whose clock has never been set makes the line absurdly long.

Rejected: trusting each sample's ``seconds`` (lost lines would leave holes).
"""

from __future__ import annotations

import bisect
import copy
import itertools
import math
import operator
from collections.abc import Callable, Iterable
from typing import Final, Literal, NamedTuple, get_args

import msgspec

from outlast.errors import Exit
from outlast.ledger.events import Event

Part = Literal[
    "productive",
    "replayed",
    "data",
    "stalled",
    "script",
    "starting",
    "building",
    "detecting",
    "restarting",
    "waiting",
    "paused",
    "other",
]
PARTS: Final[tuple[Part, ...]] = get_args(Part)
USEFUL: Final[tuple[Part, ...]] = ("productive", "data", "script")
# Nobody pays for machines in these.
NOT_HELD: Final[tuple[Part, ...]] = ("waiting", "paused")

# Beyond these a number in a ledger is garbage: no clock shows it, no machine counts it, and sums
# of it would no longer be exact.
_LARGEST_T: Final = 1e12
_LARGEST_COUNT: Final = 2**53
_LARGEST_AGE_S: Final = 3600.0  # of a process that starts a job: it may wait for its machines


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a job, split into the parts that the module's docstring defines.

    Attributes:
        productive, replayed, data, stalled, script, starting, building, detecting, restarting,
            waiting, paused, other: worker-seconds of each part.
        total: worker-seconds in all; what the parts add up to.
        undecided: worker-seconds at the end that events to come may give to another part.
        wall_s: wall-clock seconds from the start to the last event, or to ``now``.
        steps_done: the highest step that was completed.
        steps_replayed: steps that were done again.
        attempts: attempts that formed.
        commits: checkpoints that were committed.
    """

    productive: float = 0.0
    replayed: float = 0.0
    data: float = 0.0
    stalled: float = 0.0
    script: float = 0.0
    starting: float = 0.0
    building: float = 0.0
    detecting: float = 0.0
    restarting: float = 0.0
    waiting: float = 0.0
    paused: float = 0.0
    other: float = 0.0
    total: float = 0.0
    undecided: float = 0.0
    wall_s: float = 0.0
    steps_done: int = 0
    steps_replayed: int = 0
    attempts: int = 0
    commits: int = 0

    def parts(self) -> dict[Part, float]:
        """Part → worker-seconds, always all of them, in the order of ``PARTS``."""
        return {part: getattr(self, part) for part in PARTS}

    @property
    def held(self) -> float:
        """Without what nobody pays for: the time in which there were machines."""
        return max(self.total - math.fsum(getattr(self, part) for part in NOT_HELD), 0.0)

    @property
    def lost(self) -> float:
        """Of ``held``, what went neither into new steps and their data nor into the script."""
        return max(self.held - math.fsum(getattr(self, part) for part in USEFUL), 0.0)

    @property
    def fraction_productive(self) -> float:
        """The productive part of the whole, 0 to 1; 0 when no time has passed."""
        return self.productive / self.total if self.total else 0.0

    def of_the_job(self, worker_s: float) -> float:
        """Worker-seconds as seconds of the job: over the workers that it had in the mean."""
        return worker_s / self.total * self.wall_s if self.total else 0.0

    @property
    def again_s(self) -> float | None:
        """What a step took that was made again, in the mean; before there are any, a new one."""
        if self.steps_replayed and self.replayed:
            return self.of_the_job(self.replayed) / self.steps_replayed
        return self.of_the_job(self.productive) / self.steps_done if self.steps_done else None


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """A job's time, from each side.

    Attributes:
        workers: in worker-seconds.
        machines: in machine-seconds, for money.
        by_attempt: attempt → its parts in worker-seconds; they add up to ``workers``.
        by_machine: name → its parts in worker-seconds; "" has what no machine is known for. They
            add up to ``workers``.
        machines_by_name: the same in machine-seconds; they add up to ``machines``.
    """

    workers: Goodput = Goodput()
    machines: Goodput = Goodput()
    by_attempt: dict[int, dict[Part, float]] = {}
    by_machine: dict[str, dict[Part, float]] = {}
    machines_by_name: dict[str, dict[Part, float]] = {}


def goodput(
    events: Iterable[Event],
    now: float | None = None,
    *,
    count: Literal["workers", "machines"] = "workers",
) -> Goodput:
    """Split the time of a job into its parts.

    Args:
        events: the ledger, in any order.
        now: wall-clock time up to which a job that has not finished is counted.
        count: what a second is multiplied by: the attempt's workers, or (for money) its machines.
    """
    found = split(events, now)
    return found.workers if count == "workers" else found.machines


def split(events: Iterable[Event], now: float | None = None) -> Split:
    """Split the time of a job into its parts, from all sides at once.

    Args:
        events: the ledger, in any order.
        now: as of :func:`goodput`.
    """
    return splits_at(events, [], now)[-1]


def splits_at(
    events: Iterable[Event], moments_t: Iterable[float], now: float | None = None
) -> list[Split]:
    """The splits as of each of these moments, in their order, and last that of everything.

    Args:
        events: the ledger, in any order.
        moments_t: wall-clock times; what comes after one is not looked at.
        now: as of :func:`goodput`.
    """
    ordered = in_order(events)
    moments = sorted(moments_t)
    line, found, begin = timeline_of(ordered), [], 0
    for moment_t in moments:
        end = bisect.bisect_right(ordered, moment_t, key=_time_of)
        cut(line, ordered[begin:end])
        # Another line is closed there: this one goes on.
        found.append(_closed(line.copied(), ordered[:1] if end else [], moment_t))
        begin = end
    cut(line, ordered[begin:] if begin else ordered)
    last_t = ordered[-1].t if ordered else 0.0
    return [*found, _closed(line, ordered, last_t if now is None else max(last_t, now))]


def timeline_of(ordered: list[Event]) -> OpenTimeline:
    """The line that these events begin; none of them has cut it yet."""
    formed = [event for event in ordered if event.event == "attempt_formed"]
    start_t = ordered[0].t - _age_s(ordered[0]) if ordered else 0.0
    return OpenTimeline(start_t, _first_size(formed))


def cut(line: OpenTimeline, ordered: list[Event]) -> None:
    """Let further events cut a line."""
    acts, commits = _ACTS, line.commits
    for event in ordered:
        act = acts.get(event.event)
        if act is not None:
            act(line, event)
        elif event.event == "commit":
            step = whole(event)
            commits.add((event.attempt, step))
            if step is not None and event.get("kind", "full") == "full":
                line.committed = max(step, line.committed)


def _closed(line: OpenTimeline, ordered: list[Event], end_t: float) -> Split:
    if not ordered:
        return Split()
    # What comes after the end is no time of the job: a repair months later, a worker's late word.
    return line.close(line.at_t if line.finished else end_t)


class _Size(NamedTuple):
    """Of an attempt; ``hosts`` has the workers of each machine that is known by name."""

    workers: int
    machines: int
    hosts: tuple[tuple[str, int], ...] = ()


def _first_size(formed: list[Event]) -> _Size:
    """Each number from the first attempt that has it."""
    return _Size(
        next((size for event in formed if (size := whole(event, "world_size"))), 1),
        next((size for event in formed if (size := _machines(event))), 1),
        _hosts(formed[0]) if formed else (),
    )


def _size(event: Event, before: _Size) -> _Size:
    return _Size(
        whole(event, "world_size") or before.workers,
        _machines(event) or before.machines,
        _hosts(event),
    )


def _machines(event: Event) -> int | None:
    nodes = event.get("nodes")
    if isinstance(nodes, list):  # named rather than counted
        return len(nodes) or None
    return whole(event, "nodes") or None


def _hosts(event: Event) -> tuple[tuple[str, int], ...]:
    hosts, workers = event.get("hosts"), whole(event, "world_size") or 0
    if isinstance(hosts, dict):
        known = [(str(name), num) for name, num in hosts.items() if type(num) is int and num > 0]
        return tuple(known) if sum(num for _, num in known) == workers else ()
    return ((event.node, workers),) if workers and _machines(event) == 1 else ()


def _age_s(event: Event) -> float:
    """How long the process of ``job_started`` ran before it could say so."""
    age_s = number(event, "age_s") if event.event == "job_started" else None
    return age_s if age_s is not None and 0 <= age_s <= _LARGEST_AGE_S else 0.0


class OrderedEvents(list[Event]):
    """Events as :func:`in_order` gives them; to order them again costs nothing."""


def in_order(events: Iterable[Event]) -> OrderedEvents:
    """The events by time, each once; events at the same time in one fixed order.

    What has no usable time is left out.
    """
    if isinstance(events, OrderedEvents):
        return events
    usable = [e for e in events if abs(e.t) <= _LARGEST_T and abs(e.mono) <= _LARGEST_T]
    usable.sort(key=_time_of)
    times = [event.t for event in usable]
    if not any(map(operator.eq, times, itertools.islice(times, 1, None))):
        return OrderedEvents(usable)
    ordered = OrderedEvents()
    for _, group in itertools.groupby(usable, key=_time_of):
        ties = list(group)
        if len(ties) > 1:
            # Several lines within one tick: nothing may depend on which of them comes first.
            once = {(event.mono, repr(event)): event for event in ties}
            ties = [once[key] for key in sorted(once)]
        ordered += ties
    return ordered


_time_of: Final = operator.attrgetter("t")


def number(event: Event, name: str) -> float | None:
    """The finite number in a field, or None for everything else."""
    value = event.fields.get(name)
    if type(value) is not float and (isinstance(value, bool) or not isinstance(value, int | float)):
        return None
    return float(value) if -_LARGEST_T <= value <= _LARGEST_T else None


def whole(event: Event, name: str = "step") -> int | None:
    """The whole number from 0 in a field, or None for everything else."""
    value = event.fields.get(name)
    if type(value) is not int:  # nor a bool
        return None
    return value if 0 <= value < _LARGEST_COUNT else None


class OpenTimeline:
    """The time line while it is being cut.

    ``at_t`` is where the last piece ended. While ``training``, the piece that is open is given
    away by the event that ends it; otherwise time goes to ``part``.
    """

    def __init__(self, start_t: float, size: _Size) -> None:
        self.start_t = self.at_t = start_t
        self.size = size
        # Which attempt, of which size → seconds of the line.
        self.seconds: dict[tuple[int, _Size], dict[Part, float]] = {}
        self.own = self._of(0)
        self.part: Part = "starting"
        self.training = False
        self.attempt = 0  # the attempt that runs or ran last since the job was started
        self.over = False  # that attempt has ended: what it still writes is late
        self.stopped = False  # drained or finished
        self.finished = False
        self.formed_t = math.inf  # of the attempt that runs
        self.has_spoken = False  # any session of the job
        self.joined_t = -math.inf  # when a machine came, the first since the last piece
        self.agreed: tuple[float, int] | None = None  # when the drain was agreed, its step
        self.step = 0  # newest step of this attempt
        self.mark = 0  # highest step ever completed
        self.committed = (
            0  # highest of a commit: behind the sample before it, until an attempt ends
        )
        self.steps_replayed = 0
        self.attempts = 0
        self.commits: set[tuple[int, int | None]] = set()

    def copied(self) -> OpenTimeline:
        """One that may be closed while this one goes on."""
        other = copy.copy(self)
        other.seconds = {key: dict(own) for key, own in self.seconds.items()}
        other.own = next(other.seconds[key] for key, own in self.seconds.items() if own is self.own)
        return other

    def close(self, end_t: float) -> Split:
        """Give away what is left, up to ``end_t``."""
        undecided_s = max(end_t - self.at_t, 0.0)
        if self.training:
            self._give(end_t, "stalled" if self._draining else "other")
        else:
            self._unspoken(end_t, "other")
        by_attempt: dict[int, dict[Part, float]] = {}
        by_machine: dict[str, dict[Part, float]] = {}
        by_name: dict[str, dict[Part, float]] = {}
        for (attempt, size), seconds in self.seconds.items():
            if not any(seconds.values()):
                continue
            _add(by_attempt.setdefault(attempt, {}), seconds, size.workers)
            hosts = size.hosts or (("", size.workers),)
            for host, workers in hosts:
                _add(by_machine.setdefault(host, {}), seconds, workers)
                # One each, but where several agents on one machine count as machines.
                _add(by_name.setdefault(host, {}), seconds, size.machines / len(hosts))
        return Split(
            workers=self._goodput([size.workers for _, size in self.seconds], undecided_s),
            machines=self._goodput([size.machines for _, size in self.seconds], undecided_s),
            by_attempt=dict(sorted(by_attempt.items())),
            by_machine=dict(sorted(by_machine.items())),
            machines_by_name=dict(sorted(by_name.items())),
        )

    def _goodput(self, widths: list[int], undecided_s: float) -> Goodput:
        kept = list(zip(widths, self.seconds.values(), strict=True))
        parts = {part: math.fsum(width * own[part] for width, own in kept) for part in PARTS}
        width = next(width for width, own in kept if own is self.own)
        return Goodput(
            **parts,
            total=math.fsum(parts.values()),
            undecided=undecided_s * width,
            wall_s=self.at_t - self.start_t,
            steps_done=self.mark,
            steps_replayed=self.steps_replayed,
            attempts=self.attempts,
            commits=len(self.commits),
        )

    def _of(self, attempt: int) -> dict[Part, float]:
        return self.seconds.setdefault((attempt, self.size), dict.fromkeys(PARTS, 0.0))

    def _give(self, until_t: float, part: Part) -> None:
        """The piece up to ``until_t`` wholly to ``part``; a time that has passed is no piece."""
        if until_t > self.at_t:
            self.own[part] += until_t - self.at_t
            self.at_t = until_t

    def _pass(self, until_t: float, if_training: Part) -> None:
        self._give(until_t, if_training if self.training else self.part)

    def _unspoken(self, until_t: float, part: Part) -> None:
        """What no session speaks of: the attempt's own time, once it has formed, is ``part``'s."""
        if self.part in ("starting", "restarting") and not (self.has_spoken or self.over):
            self._give(min(self.formed_t, until_t), self.part)
            self._give(until_t, part)
        else:
            self._give(until_t, self.part)

    def _train(
        self,
        until_t: float,
        step: int,
        stalled_s: float = 0.0,
        script_s: float = 0.0,
        data_s: float = 0.0,
    ) -> None:
        """The piece up to ``until_t``, in which training went from ``self.step`` to ``step``."""
        steps = step - self.step
        if steps > 0:
            again = min(max(self.mark - self.step, 0), steps)
            share_again = again / steps
            self.steps_replayed += again
        else:  # no step was completed, or training was rolled back within the attempt
            share_again = float(steps < 0 or self.step < self.mark)
        whole_s = until_t - self.at_t
        if whole_s > 0:
            self._cut(whole_s, share_again, stalled_s, script_s, data_s)
            self.at_t = until_t
        self._reach(step)

    def _cut(
        self,
        left_s: float,
        share_again: float,
        stalled_s: float,
        script_s: float,
        data_s: float,
    ) -> None:
        """Give a piece of training away, to each part at most what is left of it."""
        own = self.own
        spent: tuple[tuple[Part, float], ...] = (("stalled", stalled_s), ("script", script_s))
        for part, seconds in spent:
            if seconds > 0:
                given_s = seconds if seconds < left_s else left_s
                own[part] += given_s
                left_s -= given_s
        again_s = left_s * share_again
        if share_again:
            own["replayed"] += again_s
        if share_again < 1:  # waits of replayed steps are theirs
            left_s -= again_s
            waited_s = min(max(data_s, 0.0) * (1 - share_again), left_s)
            own["data"] += waited_s
            own["productive"] += left_s - waited_s

    def _first(self, part: Part, seconds: float, until_t: float) -> None:
        """So much of the piece up to ``until_t``, at most all of it."""
        if seconds > 0:
            self._give(min(self.at_t + seconds, until_t), part)

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
        if self.training or self.attempts or self.part != "starting":
            self._pass(event.t, "restarting")
        # Else it is the start-up of the first one, which is cut when it is over.
        if self.training or self.stopped or self.part == "script":
            self.part = "restarting"
        self.training = self.over = self.stopped = self.finished = False
        self.mark = max(self.mark, self.committed)  # what was committed had been completed
        self.attempt = event.attempt
        self.attempts += 1
        self.formed_t = event.t
        self.agreed = None
        self.own = self._of(event.attempt)

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
        self._give(event.t - _age_s(event), self.part if self.stopped else "waiting")
        self.part = "restarting" if self.attempts else "starting"
        self._give(event.t, self.part)
        self.training = self.over = self.stopped = self.finished = False
        self.formed_t = math.inf
        self.attempt = 0

    def _attempt_formed(self, event: Event) -> None:
        if event.attempt > self.attempt:
            self._take_over(event)
            self.size = _size(event, self.size)
            self.own = self._of(event.attempt)

    def _resumed(self, event: Event) -> None:
        if event.rank == 0 and self._lives(event) and not self.training:
            self._begin(event)
            step = whole(event)
            self._reach(self.mark if step is None else step)

    def _begin(self, event: Event) -> None:
        """Rank 0 has the state to go on from."""
        if self.part == "starting":
            self._give(event.t - max(number(event, "building_s") or 0.0, 0.0), "starting")
            self._give(event.t, "building")
        else:
            self._give(event.t, self.part)
        self.training = self.has_spoken = True

    def _sampled(self, event: Event) -> None:
        step = whole(event)
        if event.rank != 0 or step is None or not self._lives(event):
            return
        if self.training and not self._draining:
            self._first("restarting", number(event, "catch_up_s") or 0.0, event.t)
            self._train(
                event.t,
                step,
                number(event, "stalled_s") or 0.0,
                number(event, "script_s") or 0.0,
                number(event, "data_s") or 0.0,
            )
            return
        if self.training:
            self._give(event.t, "stalled")
        else:  # the line that said so is lost
            self._begin(event)
        self._reach(step)

    def _session_ended(self, event: Event) -> None:
        if event.rank == 0 and self.training and self._lives(event) and self.training:
            stalled_s = event.t - self.at_t if self._draining else number(event, "stalled_s") or 0.0
            self._first("stalled", stalled_s, event.t)
            self._give(event.t, "script")
            self._reach(whole(event))
            self.training, self.part = False, "script"

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
        if self.training:
            self._give(event.t, "stalled" if self._draining else "detecting")
        else:
            self._unspoken(event.t, "other")
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
        copying_s = number(event, "copying_s")
        until_t = event.t - max(copying_s or 0.0, 0.0)
        if drained and self.stopped and copying_s is not None and not self.finished:
            until_t = self.at_t  # it was there until its copies were
        if self.training:
            self._give(until_t, "stalled" if drained or self._draining else "other")
        elif event.get("exit_code") == Exit.FINISHED:
            self._unspoken(until_t, "script")
        else:
            self._unspoken(until_t, "other")
        self._give(event.t, self.part if self.finished else "stalled")
        self.part = "waiting" if drained else "paused"
        self.training = False
        self.over = self.stopped = self.finished = True


def _add(into: dict[Part, float], seconds: dict[Part, float], width: float) -> None:
    for part in PARTS:
        into[part] = into.get(part, 0.0) + width * seconds[part]


_ACTS: Final[dict[str, Callable[[OpenTimeline, Event], None]]] = {
    "job_started": OpenTimeline._job_started,
    "attempt_formed": OpenTimeline._attempt_formed,
    "resumed": OpenTimeline._resumed,
    "step": OpenTimeline._sampled,
    "session_ended": OpenTimeline._session_ended,
    "worker_lost": OpenTimeline._lost,
    "node_lost": OpenTimeline._lost,
    "hang": OpenTimeline._lost,
    "restart": OpenTimeline._lost,
    "rollback": OpenTimeline._rolled_back,
    "drain_agreed": OpenTimeline._drain_agreed,
    "drained": OpenTimeline._drained,
    "job_finished": OpenTimeline._job_finished,
}
