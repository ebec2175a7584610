"""What a fault is: a name, what it promises, and five acts on a job under test.

A fault is made for one strike at one place, and knows nothing of moments: those are ``aim``'s. Its
life, all of it called by one thread:

    why_not   whether it can be here; asked first, and nothing is changed by it
    prepare   ahead of the job's first start, where it needs that: an environment, a file system
    inject    now, with the job running
    heal      undone, as far as it can be; as often as one likes, also where it never struck
    release   what ``prepare`` made is taken away, once the job is over and was looked at

Guarantees: a fault touches the processes, the files and the cables of the job that it is handed,
and nothing else on the machine. Whatever it has changed outside of the job (a mount, a tracer, a
control group, a firewall) is gone after ``heal`` and ``release``.
"""

from __future__ import annotations

import enum
import math
import numbers
import signal
import time
from typing import Final, Protocol

import msgspec

from outlast.drill.target import JobMachine, Target

FOR_GOOD: Final = float("inf")
_STARTED: Final = "job_started"  # what an agent that was killed writes once it is there again
_FORMED: Final = "attempt_formed"
KILLED: Final = (-signal.SIGKILL, 128 + signal.SIGKILL)  # exit codes of an agent that was killed


class Missed(Exception):
    """The moment was no good: no such worker now, no checkpoint yet. Try again a little later."""


class MayLose(enum.Enum):
    """Which steps may have to be made again, at most, after a fault; each loses more.

    The values are words that end the sentence "it may lose …".
    """

    NOTHING = "no step"
    STEP = "the step that it was in"
    SNAPSHOT = "the steps since the newest snapshot"
    COMMIT = "the steps since the newest checkpoint"
    OLDER = "the steps since the newest checkpoint that is whole"


class Promise(msgspec.Struct, frozen=True, kw_only=True):
    """What a job with a session must show after a fault.

    Attributes:
        loses: steps that are made again, at most.
        exit_codes: with which the start of ``outlast run`` that was hit may end: 0 where it goes on
            to the job's end, 75 where it has drained, -9 where it was killed.
        refuses: the next start must not go on: it leaves with one of ``exit_codes``.
        restarts: attempts, at most, that the fault may cost.
        exact: data, losses and final state are those of the undisturbed run, bit for bit (with as
            many workers as that had).
        must_notice: the ledger must have the event that :class:`Struck` names.
        note: what else is to be known, a clause.
    """

    loses: MayLose = MayLose.NOTHING
    exit_codes: tuple[int, ...] = (0,)
    refuses: bool = False
    restarts: int = 1
    exact: bool = True
    must_notice: bool = True
    note: str = ""

    @property
    def is_started_again(self) -> bool:
        """Whether somebody (a scheduler; the drill) has to start the job's command again."""
        return not self.refuses and 0 not in self.exit_codes

    def __str__(self) -> str:
        """The promise in one clause."""
        if self.refuses:
            codes = " or ".join(map(str, self.exit_codes))
            return f"refuses to go on, with exit code {codes}"
        parts = [f"loses {self.loses.value} at most" if self.loses.value != "no step" else ""]
        parts[0] = parts[0] or "loses no step"
        if self.is_started_again:
            parts.append("goes on when it is started again")
        parts.append(
            "ends as if nothing had been" if self.exact else "need not end with equal bits"
        )
        return "; ".join([*parts, *([self.note] if self.note else [])])


class Struck(msgspec.Struct, kw_only=True):
    """What a fault did.

    Attributes:
        what: in words.
        t: wall-clock time of the strike.
        last_step: the last step that was complete then.
        event: the ledger's event by which the job shows that it noticed; "" where there is none,
            or this job has no way to notice. It must be there if the promise says so
            (``must_notice``).
    """

    what: str
    t: float
    last_step: int
    event: str


class Fault(Protocol):
    """Something that is done to a job once.

    Attributes:
        name: as on the command line, such as "kill-worker".
        what: one sentence for a list.
        promise: what the job must show afterwards.
        lasts_s: after so many seconds it is to be healed; ``FOR_GOOD`` where healing does nothing
            or waits for the job to have noticed.
        until_noticed: it is healed earlier once the job has noticed.
    """

    @property
    def name(self) -> str: ...  # noqa: D102 - above
    @property
    def what(self) -> str: ...  # noqa: D102
    @property
    def promise(self) -> Promise: ...  # noqa: D102
    @property
    def lasts_s(self) -> float: ...  # noqa: D102
    @property
    def until_noticed(self) -> bool: ...  # noqa: D102

    def why_not(self, target: Target) -> str:
        """Why it cannot be done here, and what a person can do about that; "" if it can."""

    def prepare(self, target: Target) -> None:
        """What has to be there before the job starts."""

    def inject(self, target: Target) -> Struck:
        """Do it now.

        Raises:
            Missed: it cannot be done at this moment, and nothing was.
        """

    def heal(self, target: Target) -> None:
        """Undo it, as far as that can be."""

    def release(self, target: Target) -> None:
        """Take away what ``prepare`` made; the job is over."""


class Plain:
    """A fault with nothing to prepare or to undo; the others say what they do beyond that."""

    name: str = ""
    what: str = ""
    promise: Promise = Promise()
    lasts_s: float = FOR_GOOD

    @property
    def until_noticed(self) -> bool:
        """What strikes for good waits for the job; what lasts a while lasts that long."""
        return self.lasts_s == FOR_GOOD

    def why_not(self, target: Target) -> str:
        """Nothing is in the way."""
        return ""

    def prepare(self, target: Target) -> None:
        """Nothing is needed."""

    def heal(self, target: Target) -> None:
        """Nothing can be undone, or nothing has to be."""

    def release(self, target: Target) -> None:
        """Nothing was made."""


def struck(target: Target, what: str, event: str = "") -> Struck:
    """What was done just now; {step} in ``what`` stands for the step that is being made."""
    last = target.completed()
    return Struck(what=what.format(step=last + 1), t=time.time(), last_step=last, event=event)


def is_answered(target: Target, promise: Promise, done: Struck) -> bool:
    """Whether the job has acted on what strikes for good, so that it can be healed.

    It has named it in its ledger, or begun another attempt: whoever has the state of a damaged
    checkpoint in memory never reads the file. What nobody can name is answered where an agent is
    down, and at once if none is to be started again.
    """
    if done.event in ("", _STARTED):
        is_down = any(place.agent is None for place in target.machines)
        return is_down or not promise.is_started_again
    answers = (done.event, _FORMED)
    return any(e.event in answers and e.t >= done.t for e in target.events())


def machine(target: Target, number: int) -> JobMachine:
    """The machine of that number.

    Raises:
        ValueError: there is none.
    """
    if not 0 <= number < len(target.machines):
        raise ValueError(no_machine(target, number))
    return target.machines[number]


def no_machine(target: Target, number: int) -> str:
    """Why ``number`` is no machine of the job, and what to do; "" if it is one."""
    count = len(target.machines)
    if 0 <= number < count:
        return ""
    there = "one machine" if count == 1 else f"{count} machines"
    return f"the job has {there}, and this is for number {number}, counted from 0: give it more"


def worker(target: Target, rank: int) -> int:
    """The process id of a rank's worker.

    Raises:
        Missed: it has none now.
    """
    pid = target.workers().get(rank)
    if pid is None:
        raise Missed(f"rank {rank} has no worker now")
    return pid


# --- what a fault is given ------------------------------------------------------------------------


def seconds_of(what: str, value: float, *, above: bool = False, for_good: bool = False) -> float:
    """A time that a fault was given, checked.

    Args:
        what: the argument's name.
        value: its value.
        above: whether 0 is no time for it.
        for_good: whether it may last until the job has acted.

    Raises:
        ValueError: it is no such time.
    """
    may_be = for_good and value == FOR_GOOD
    is_time = _is_number(value) and (math.isfinite(value) or may_be)
    if is_time and (value > 0 if above else value >= 0):
        return float(value)
    least = "more than 0" if above else "0 or more"
    good = ", or FOR_GOOD" if for_good else ""
    raise ValueError(f"{what}={value!r} is no time: give seconds, {least}{good}")


def count_of(what: str, value: int) -> int:
    """A number from 0 that a fault was given (of a rank, a machine, a step), checked.

    Raises:
        ValueError: it is none.
    """
    if _is_number(value) and isinstance(value, numbers.Integral) and value >= 0:
        return int(value)
    raise ValueError(f"{what}={value!r} is no number: {what}s are counted from 0")


def share_of(what: str, value: float) -> float:
    """A fraction that a fault was given, checked.

    Raises:
        ValueError: it is none.
    """
    return within(what, value, 0, 1, "as a fraction")


def within(what: str, value: float, least: float, most: float, unit: str) -> float:
    """A value between two others that a fault was given, checked.

    Raises:
        ValueError: it is not between them.
    """
    if _is_number(value) and least <= value <= most:
        return float(value)
    raise ValueError(f"{what}={value!r}: give {least:g} to {most:g}, {unit}")


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
