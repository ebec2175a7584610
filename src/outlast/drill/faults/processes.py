"""Processes are killed or stopped: a worker, an agent, a keeper, a machine, the one that leads.

SIGKILL is what the OOM killer, a scheduler and an operator send; SIGSTOP is what a debugger, a
suspended VM and a cgroup freezer look like from outside. Neither can be caught.

Guarantees: what is stopped goes on when it is healed, unless it has died meanwhile; a process id
that the kernel has given to another process in between is never signalled (its start is compared).
Of the machines, the one that leads is that of rank 0: its agent is the coordinator, and holds the
store through which the attempt's workers meet.
"""

from __future__ import annotations

import contextlib
import enum
import os
import signal
from collections.abc import Iterable
from typing import Final

from outlast.drill.faults.fault import (
    FOR_GOOD,
    KILLED,
    MayLose,
    Missed,
    Plain,
    Promise,
    Struck,
    count_of,
    machine,
    no_machine,
    seconds_of,
    struck,
    worker,
)
from outlast.drill.network import started
from outlast.drill.target import Target


class Victim(enum.Enum):
    """Which process, or processes; the value is part of a fault's name."""

    WORKER = "worker"
    WORKERS = "workers"
    AGENT = "agent"
    KEEPER = "keeper"
    MACHINE = "machine"
    LEADER = "leader"


WORDS = {
    Victim.WORKER: "a worker",
    Victim.WORKERS: "all workers at once",
    Victim.AGENT: "an agent (outlast run itself)",
    Victim.KEEPER: "a keeper, with the snapshots that it holds",
    Victim.MACHINE: "all processes of a machine",
    Victim.LEADER: "all processes of the machine that leads: rank 0's, with the attempt's store",
}
NOTICED_BY = {
    Victim.WORKER: "worker_lost",
    Victim.WORKERS: "worker_lost",
    Victim.KEEPER: "watch_gap",
    Victim.AGENT: "job_started",
    Victim.MACHINE: "job_started",
    Victim.LEADER: "job_started",
}
BACK_S: Final = 2.0  # what a scheduler with a spare takes, at its best
KILLED_PROMISES = {
    Victim.WORKER: Promise(loses=MayLose.SNAPSHOT),
    Victim.WORKERS: Promise(loses=MayLose.SNAPSHOT),
    Victim.KEEPER: Promise(restarts=0, note="no step waits for it"),
    Victim.AGENT: Promise(loses=MayLose.SNAPSHOT, exit_codes=KILLED),
    # A machine that dies takes its memory with it; its peers' replicas may do better than that.
    Victim.MACHINE: Promise(loses=MayLose.COMMIT, exit_codes=KILLED),
    Victim.LEADER: Promise(loses=MayLose.COMMIT, exit_codes=KILLED),
}


class _OfProcesses(Plain):
    """A fault of one victim.

    Args:
        victim: which.
        number: a worker's rank, else a machine's number; of the leader neither.
    """

    def __init__(self, victim: Victim, number: int = 0) -> None:
        self.victim = victim
        self.number = count_of("rank" if victim is Victim.WORKER else "machine", number)

    def why_not(self, target: Target) -> str:
        """A machine must be one of the job's."""
        if self.victim in (Victim.AGENT, Victim.KEEPER, Victim.MACHINE):
            return no_machine(target, self.number)
        return ""

    def _chosen(self, target: Target) -> tuple[str, list[int]]:
        """The victim in words, and its processes.

        Raises:
            Missed: there is none of them now.
        """
        if self.victim is Victim.WORKER:
            return f"rank {self.number}", [worker(target, self.number)]
        if self.victim is Victim.WORKERS:
            pids = list(target.workers().values())
            return _some(f"all {len(pids)} workers", pids)
        if self.victim is Victim.LEADER:
            worker(target, 0)  # while an attempt forms, nobody leads
            leader = target.machine_of(0)
            return _some(f"machine {leader.name}, which leads", leader.processes())
        place = machine(target, self.number)
        if self.victim is Victim.MACHINE:
            return _some(f"machine {place.name}", place.processes())
        pid = place.agent if self.victim is Victim.AGENT else place.keeper
        words = f"the {self.victim.value} of machine {place.name}"
        return _some(words, [] if pid is None else [pid])


class Kill(_OfProcesses):
    """SIGKILL.

    Args:
        victim: which.
        number: a worker's rank, else a machine's number.
        back_s: so long an agent, or a machine, is away. (A job that needs all of its machines says
            that one was lost when it is back: nothing is gained by waiting for its word.)
    """

    def __init__(self, victim: Victim, number: int = 0, back_s: float = BACK_S) -> None:
        super().__init__(victim, number)
        self.name = f"kill-{victim.value}"
        self.what = f"SIGKILL for {WORDS[victim]}"
        self.promise = KILLED_PROMISES[victim]
        if self.promise.is_started_again:
            self.lasts_s = seconds_of("back_s", back_s)

    def inject(self, target: Target) -> Struck:
        """Send it; of a machine, until nothing of it is left."""
        words, pids = self._chosen(target)
        done = struck(target, f"SIGKILL of {words} in step {{step}}", self._noticed_by(target))
        if self.victim is Victim.MACHINE:
            machine(target, self.number).kill()
        elif self.victim is Victim.LEADER:
            target.machine_of(0).kill()
        else:
            signal_all(pids, signal.SIGKILL)
        return done

    def heal(self, target: Target) -> None:
        """Start a machine, or an agent, again, as a scheduler does."""
        if self.promise.is_started_again:
            start_again(target)

    def _noticed_by(self, target: Target) -> str:
        lost = self.victim in (Victim.AGENT, Victim.MACHINE, Victim.LEADER)
        return "node_lost" if lost and len(target.machines) > 1 else NOTICED_BY[self.victim]


class Stop(_OfProcesses):
    """SIGSTOP, and SIGCONT after a while.

    Args:
        victim: which.
        number: a worker's rank, else a machine's number.
        for_s: how long it stands still; ``FOR_GOOD`` until the job has acted.
    """

    def __init__(self, victim: Victim, number: int = 0, for_s: float = FOR_GOOD) -> None:
        super().__init__(victim, number)
        self.name = f"stop-{victim.value}"
        self.what = f"SIGSTOP for {WORDS[victim]}; it goes on later"
        self.lasts_s = seconds_of("for_s", for_s, for_good=True)
        self._stopped: list[tuple[int, str]] = []
        hangs = victim in (Victim.WORKER, Victim.WORKERS)
        moves = victim in (Victim.MACHINE, Victim.LEADER)
        # One that goes on soon enough has cost nothing: the hang need not be named then.
        self.promise = Promise(
            loses=MayLose.SNAPSHOT if hangs else MayLose.COMMIT if moves else MayLose.NOTHING,
            restarts=1 if hangs or moves else 0,
            must_notice=hangs and for_s == FOR_GOOD,
        )

    def inject(self, target: Target) -> Struck:
        """Send SIGSTOP."""
        words, pids = self._chosen(target)
        event = "hang" if self.promise.must_notice else ""
        self._stopped += [(pid, started(pid)) for pid in pids]
        done = struck(target, f"SIGSTOP of {words} in step {{step}}", event)
        signal_all(pids, signal.SIGSTOP)
        return done

    def heal(self, target: Target) -> None:
        """Send SIGCONT to those that are still there."""
        stopped, self._stopped = self._stopped, []
        signal_all([pid for pid, start in stopped if start == started(pid) != ""], signal.SIGCONT)


def start_again(target: Target) -> None:
    """Start each machine without an agent, as a scheduler does, unless the job is over."""
    if target.is_over():
        return
    for place in target.machines:
        if place.agent is None:
            place.start()


def signal_all(pids: Iterable[int], number: int) -> None:
    """Send a signal to each process that is still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _some(words: str, pids: Iterable[int]) -> tuple[str, list[int]]:
    found = list(pids)
    if not found:
        raise Missed(f"{words}: no such process now")
    return words, found
