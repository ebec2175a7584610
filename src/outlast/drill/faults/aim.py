"""When and where a fault strikes: ``at(step=40).on(rank=1).kill()``.

>>> from outlast.drill import at, during
>>> at(step=40).on(rank=1).kill().describe()
'kill-worker of rank 1, in the middle of step 41'
>>> during("save").on(machine=0).kill().describe()
'kill-machine of machine 0, while a checkpoint is being written'
>>> at(step=100, fraction=0).notice(lead_s=120).describe()
'notice of machine 0, right after step 100'

What comes of it is a planned fault. ``prepare`` it ahead of the job's start; then, with the job
running, ``strike`` waits for its moment and strikes, and ``finish`` heals it when its time is over:

    planned = at(step=40).on(rank=1).stop(for_s=3)
    planned.prepare(target)
    ...
    struck = planned.strike(target)
    planned.finish(target)

Guarantees: a plan names all there is to it, so the same plan strikes the same place again; a moment
that was missed (a worker was just being started anew, a checkpoint was committed in that very
moment) is waited for anew, and one that the job has passed strikes at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Literal, NamedTuple, Self

from outlast.checkpoint.catalog import find_saves
from outlast.drill.faults import ordered, storage
from outlast.drill.faults.cables import BadCable
from outlast.drill.faults.damage import TENSORS, FileDamage, Harm
from outlast.drill.faults.fault import (
    FOR_GOOD,
    Fault,
    Missed,
    Struck,
    count_of,
    seconds_of,
    share_of,
)
from outlast.drill.faults.processes import Kill, Stop, Victim
from outlast.drill.faults.storage import FullStorage, ReadOnlyStorage, first_place
from outlast.drill.faults.tidings import AwsNotice, ClockJump, SigtermNotice
from outlast.drill.target import Target
from outlast.storage import Directory

POLL_S: Final = 0.002
HEAL_POLL_S: Final = 0.02


class When(NamedTuple):
    """A moment.

    Attributes:
        step: after this one was completed by some rank.
        fraction: and then so much of a step's length later, from 0 to 1.
        seconds: and then so many seconds later.
        in_save: and then while a checkpoint is being written: it has files and no manifest.
    """

    step: int = 0
    fraction: float = 0.5
    seconds: float = 0.0
    in_save: bool = False

    def __str__(self) -> str:
        """It in words."""
        if self.in_save:
            return "while a checkpoint is being written" + (
                f", after step {self.step}" if self.step else ""
            )
        if self.seconds:
            after = f"step {self.step}" if self.step else "its first step"
            return f"{self.seconds:g} s after {after}"
        if not self.fraction:
            return f"right after step {self.step}"
        return f"in the middle of step {self.step + 1}"

    def wait(self, target: Target) -> bool:
        """Wait for it; False if the job is over first."""
        first = max(self.step, 1 if self.seconds else 0)
        if not _until(lambda: target.completed() >= first, target):
            return False
        if self.seconds:
            return _later(self.seconds, target)
        if self.in_save:
            return self._wait_for_save(target)
        return _later(self.fraction * target.step_s(), target)

    def _wait_for_save(self, target: Target) -> bool:
        place = first_place(target)
        found = Directory(place)

        def unfinished() -> set[str]:
            return {str(save) for save in find_saves(found).unfinished} if place.is_dir() else set()

        old = unfinished()
        return _until(lambda: bool(unfinished() - old), target)


def at(*, step: int = 0, fraction: float = 0.5, seconds: float = 0.0) -> Aim:
    """Aim at a moment.

    Args:
        step: that some rank has completed it, counted from 1; 0 for the start.
        fraction: how far into the next step, from 0 to 1.
        seconds: in place of that, so many seconds later.

    Raises:
        ValueError: there is no such moment.
    """
    when = When(
        count_of("step", step), share_of("fraction", fraction), seconds_of("seconds", seconds)
    )
    return Aim(when)


def during(what: Literal["save"], *, after: int = 0) -> Aim:
    """Aim at something that the job does: "save", the writing of a checkpoint.

    Args:
        what: "save".
        after: the first one that begins after this step.

    Raises:
        ValueError: it is something else, or there is no such step.
    """
    if what != "save":
        raise ValueError(f"{what!r} is no moment; there is: save")
    return Aim(When(count_of("step", after), in_save=True))


class PlannedFault:
    """A fault, and when it is to strike.

    Attributes:
        when: its moment.
        fault: what it does.
        place: where, in words.
    """

    def __init__(self, when: When, fault: Fault, place: str = "") -> None:
        self.when, self.fault, self.place = when, fault, place

    def describe(self) -> str:
        """All of it in words."""
        return f"{self.fault.name}{self.place and f' of {self.place}'}, {self.when}"

    def prepare(self, target: Target) -> None:
        """See that what it needs is there, ahead of the job's start."""
        self.fault.prepare(target)

    def strike(self, target: Target) -> Struck | None:
        """Wait for the moment, and strike; None if the job was over first."""
        while self.when.wait(target):
            try:
                return self.fault.inject(target)
            except Missed:
                time.sleep(POLL_S)
        return None

    def finish(self, target: Target, is_noticed: Callable[[], bool] = lambda: False) -> None:
        """Wait until its time is over, the job has noticed, or the job is over; and heal it.

        Args:
            target: the job.
            is_noticed: whether what strikes for good has been answered, and can be healed.
        """
        end = time.monotonic() + self.fault.lasts_s
        while time.monotonic() < end and not is_noticed() and not target.is_over():
            time.sleep(HEAL_POLL_S)
        self.fault.heal(target)


class Aim:
    """A moment and a place; each of its verbs plans a fault there.

    Args:
        when: the moment.
        rank: of the worker that is meant.
        machine: number of the machine that is meant.
    """

    def __init__(self, when: When, rank: int | None = None, machine: int | None = None) -> None:
        self._when, self._rank, self._machine = when, rank, machine

    def on(self, *, rank: int | None = None, machine: int | None = None) -> Self:
        """At this place: a worker by its rank, or a machine by its number, from 0.

        Raises:
            ValueError: both or neither are given, or a negative number.
        """
        if (rank is None) == (machine is None):
            raise ValueError("give a rank or a machine, and not both")
        if rank is not None:
            return type(self)(self._when, rank=count_of("rank", rank))
        return type(self)(self._when, machine=count_of("machine", machine or 0))

    # --- processes ---------------------------------------------------------------------------

    def kill(self, victim: str = "") -> PlannedFault:
        """SIGKILL: of the worker, or the machine, that it is aimed at.

        Args:
            victim: another one there: "workers", "agent", "keeper", "leader" (the machine that
                leads, wherever it is).
        """
        chosen = self._victim(victim)
        return self._of(Kill(chosen, self._number(chosen)), chosen)

    def stop(self, victim: str = "", for_s: float = FOR_GOOD) -> PlannedFault:
        """SIGSTOP, and SIGCONT after ``for_s`` seconds; see :meth:`kill`."""
        chosen = self._victim(victim)
        return self._of(Stop(chosen, self._number(chosen), for_s), chosen)

    def limit_memory(self) -> PlannedFault:
        """The worker runs out of memory: MemoryError."""
        return self._ranked(ordered.memory_limit(self._worker()))

    def oom_kill(self) -> PlannedFault:
        """The kernel's OOM killer ends the worker."""
        return self._ranked(ordered.OomKill(self._worker()))

    # --- inside a worker ---------------------------------------------------------------------

    def nan(self) -> PlannedFault:
        """A NaN in the worker's batch."""
        return self._ranked(ordered.NanInBatch(self._worker()))

    def hold_gil(self, seconds: float) -> PlannedFault:
        """The interpreter's lock is held."""
        return self._ranked(ordered.hold_gil(self._worker(), seconds))

    def skip_collective(self) -> PlannedFault:
        """The worker leaves out a collective."""
        return self._ranked(ordered.skip_collective(self._worker()))

    def slow(self, seconds: float, for_s: float = FOR_GOOD) -> PlannedFault:
        """Each of the worker's steps takes longer."""
        return self._ranked(ordered.slow_rank(self._worker(), seconds, for_s))

    # --- storage -----------------------------------------------------------------------------

    def slow_storage(self, seconds: float = 0.05, for_s: float = 10.0) -> PlannedFault:
        """Each writing call of the keepers takes longer."""
        return self._of_the_job(storage.slow_storage(seconds, for_s))

    def break_storage(self, for_s: float = 5.0) -> PlannedFault:
        """What keepers write fails with EIO."""
        return self._of_the_job(storage.broken_storage(for_s))

    def fill_storage(self, for_s: float = 5.0) -> PlannedFault:
        """The job's file system is full."""
        return self._of_the_job(FullStorage(for_s))

    def read_only_storage(self, for_s: float = 5.0) -> PlannedFault:
        """The directory of checkpoints is read-only."""
        return self._of_the_job(ReadOnlyStorage(for_s))

    def flip_bit(self, files: str = TENSORS, place: float = 0.5, age: int = 0) -> PlannedFault:
        """A bit of a checkpoint is flipped, and the job has to read it."""
        return self._of_the_job(FileDamage(Harm.FLIP, files, place, age=age))

    def truncate(self, files: str = TENSORS, place: float = 0.5, age: int = 0) -> PlannedFault:
        """A file of a checkpoint is cut off, and the job has to read it."""
        return self._of_the_job(FileDamage(Harm.TRUNCATE, files, place, age=age))

    def delete(self, files: str = TENSORS, place: float = 0.5, age: int = 0) -> PlannedFault:
        """A file of a checkpoint is deleted, and the job has to do without."""
        return self._of_the_job(FileDamage(Harm.DELETE, files, place, age=age))

    # --- machines ----------------------------------------------------------------------------

    def cable(self, name: str, value: float = 0.0, for_s: float = 5.0) -> PlannedFault:
        """Something is wrong with the machine's network, such as "cut-network"."""
        return self._placed(BadCable(name, self._of_machine(), value, for_s))

    def notice(self, lead_s: float = 120.0) -> PlannedFault:
        """EC2 says that the machine will go."""
        return self._placed(AwsNotice(self._of_machine(), lead_s))

    def sigterm(self, lead_s: float = 30.0) -> PlannedFault:
        """A scheduler says so."""
        return self._placed(SigtermNotice(self._of_machine(), lead_s))

    def jump_clock(self, by_s: float, for_s: float = FOR_GOOD) -> PlannedFault:
        """The wall clock jumps: of the machine that it is aimed at, else of all."""
        self._of_machine()
        place = "all machines" if self._machine is None else f"machine {self._machine}"
        return PlannedFault(self._when, ClockJump(by_s, self._machine, for_s), place)

    def _worker(self) -> int:
        if self._machine is not None:
            raise ValueError("this happens to a worker: aim at a rank")
        return self._rank or 0

    def _of_machine(self) -> int:
        if self._rank is not None:
            raise ValueError("this happens to a machine: aim at one, .on(machine=0)")
        return self._machine or 0

    def _of_the_job(self, fault: Fault) -> PlannedFault:
        if self._rank is not None or self._machine is not None:
            raise ValueError(f"{fault.name} happens to the whole job: leave .on(…) out")
        return PlannedFault(self._when, fault)

    def _victim(self, name: str) -> Victim:
        if not name:
            return Victim.WORKER if self._machine is None else Victim.MACHINE
        try:
            return Victim(name)
        except ValueError:
            there = ", ".join(victim.value for victim in Victim)
            raise ValueError(f"{name!r} cannot be killed; there are: {there}") from None

    def _number(self, victim: Victim) -> int:
        if victim in (Victim.WORKERS, Victim.LEADER):
            return 0
        return self._worker() if victim is Victim.WORKER else self._of_machine()

    def _of(self, fault: Fault, victim: Victim) -> PlannedFault:
        if victim in (Victim.WORKERS, Victim.LEADER):
            return self._of_the_job(fault)
        return self._ranked(fault) if victim is Victim.WORKER else self._placed(fault)

    def _ranked(self, fault: Fault) -> PlannedFault:
        return PlannedFault(self._when, fault, f"rank {self._rank or 0}")

    def _placed(self, fault: Fault) -> PlannedFault:
        return PlannedFault(self._when, fault, f"machine {self._machine or 0}")


def _until(is_so: Callable[[], bool], target: Target) -> bool:
    while not is_so():
        if target.is_over():
            return False
        time.sleep(POLL_S)
    return True


def _later(seconds: float, target: Target) -> bool:
    end = time.monotonic() + seconds
    return _until(lambda: time.monotonic() >= end, target)
