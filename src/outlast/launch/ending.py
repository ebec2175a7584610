"""The end of an attempt on this machine: nothing of it lives when the next one begins.

Workers are killed with their process groups, and what they have started elsewhere is looked for
(:mod:`outlast.health.processes`). Before this machine says that it is ready it is looked for again.

A process that the kernel holds (a driver that does not come back, a file system that is away, a
tracer) cannot be killed, and may hold its GPU's memory as long. It is waited for, and that is said;
after ``OUT_S`` the machine asks to be left out, so that a spare takes its place. A notice and the
job's end elsewhere end the wait at once. Where there is no other machine the job is given up after
``ALONE_S``: a machine like that has to be restarted, and no attempt on it would do that.

Waiting for a worker to end: the agent knows of it within a millisecond, and never polls.

torch's agent sleeps between two looks at its workers; a death is noticed half that time late. Here
it sleeps on what the kernel says of each process (a pidfd), for at most as long. Where there are no
pidfds it just sleeps.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final

from outlast.errors import Exit
from outlast.health.processes import Marks, end_group, end_leftovers, in_words
from outlast.ipc import readable
from outlast.launch.machines import Machines
from outlast.launch.membership import JobOver
from outlast.ledger.file import Ledger
from outlast.ledger.narrator import say


class ProcessWait:
    """Sleeps until a process ends.

    Args:
        interval_s: the longest sleep.
        news: a descriptor that is readable when there is something else to look at, or None; who
            looks at it makes it unreadable.
    """

    def __init__(self, interval_s: float, news: int | None = None) -> None:
        self._interval_s = interval_s
        self._news = () if news is None else (news,)
        self._fds: dict[int, int] = {}  # pid → pidfd

    def wait(self, processes: Iterable[Any], lines: Iterable[int] = ()) -> None:
        """Sleep until one of these ends that still run (as far as ``returncode`` knows).

        Args:
            processes: them.
            lines: descriptors that are read once they can be: that ends the sleep too.
        """
        running = {one.pid for one in processes if one.returncode is None}
        for pid in self._fds.keys() - running:
            os.close(self._fds.pop(pid))
        try:
            for pid in running - self._fds.keys():
                self._fds[pid] = os.pidfd_open(pid)
        except (OSError, AttributeError):
            time.sleep(self._interval_s)
            return
        readable([*self._fds.values(), *self._news, *lines], self._interval_s)

    def close(self) -> None:
        """Give back what it holds."""
        while self._fds:
            os.close(self._fds.popitem()[1])


ENDED_S: Final = 5.0  # for all that was killed: memory is given back meanwhile
OUT_S: Final = 15.0
ALONE_S: Final = 300.0
SAY_S: Final = 30.0
LOOK_S: Final = 0.2


class WorkerShutdown:
    """The ends of one machine's attempts.

    Args:
        marks: of its workers.
        machines: the others.
        ledger: the job's.
        must_leave: whether this machine has had notice.
        exclude_for_s: how long this machine is left out where it cannot end its workers.
    """

    def __init__(
        self,
        marks: Marks,
        machines: Machines,
        ledger: Ledger,
        must_leave: Callable[[], bool],
        exclude_for_s: float,
    ) -> None:
        self._marks = marks
        self._machines = machines
        self._ledger = ledger
        self._must_leave = must_leave
        self._exclude_for_s = exclude_for_s
        self._held: dict[int, Any] = {}  # process id → worker that was killed and has not ended
        self._killed_s = 0.0

    def end(self, handlers: Mapping[int, Any]) -> list[int]:
        """End the workers that run, each with its process group.

        Args:
            handlers: local rank → torch's handler.

        Returns:
            Local ranks of workers that were killed and have not ended in time.
        """
        running = {rank: one.proc for rank, one in handlers.items() if one.proc.poll() is None}
        for process in running.values():
            end_group(process.pid)
        if running:
            self._killed_s = time.monotonic()
        until_s = self._killed_s + ENDED_S
        for process in running.values():
            with contextlib.suppress(Exception):
                process.wait(timeout=max(until_s - time.monotonic(), 0.01))
        held = [rank for rank, process in running.items() if process.poll() is None]
        self._held |= {running[rank].pid: running[rank] for rank in held}
        return held

    def wait(self, kept: Collection[int]) -> None:
        """End what is left of earlier attempts here, and wait until it has gone.

        Args:
            kept: process ids of workers that go on; what these have started is theirs.

        Raises:
            JobOver: this machine is to go, or cannot go on.
        """
        if not self._held:  # what is found now is killed now
            self._killed_s = time.monotonic()
        if left := self._look(max(self._left_s(ENDED_S), LOOK_S), kept):
            self._wait_for_held(left, kept)
        self._marks.forget(kept)

    def _wait_for_held(self, left: list[int], kept: Collection[int]) -> None:
        words = ", ".join(in_words(pid) for pid in left)
        self._note(words, over=False)
        say_s, is_asked = time.monotonic() + SAY_S, False
        while left:
            if self._must_leave():
                raise JobOver(
                    Exit.DRAINED,
                    f"this machine leaves, and process {words} could not be ended; start me again",
                )
            if self._machines.ends_now is not None:
                return  # the rendezvous says so
            if not is_asked and not self._left_s(OUT_S):
                is_asked = True
                reason = f"it cannot end process {words}, which was killed"
                self._machines.exclude(reason, for_s=self._exclude_for_s)
            if not self._machines.are_many and not self._left_s(ALONE_S):
                raise JobOver(
                    Exit.GAVE_UP,
                    f"process {words} was killed {ALONE_S:.0f} s ago and has not ended: restart "
                    "this machine, and run the same command again",
                )
            if time.monotonic() > say_s:
                say_s += SAY_S
                say(f"process {words} has not ended yet: the next attempt waits for it")
            time.sleep(LOOK_S)
            left = self._look(0.0, kept)
        self._note(words, over=True)

    def _look(self, limit_s: float, kept: Collection[int]) -> list[int]:
        """Process ids of what still lives of earlier attempts; it has been killed by now."""
        marks = self._marks
        sessions = set(marks.workers).difference(kept)
        left = end_leftovers(marks.stem, limit_s=limit_s, spared=marks.of(kept), sessions=sessions)
        self._held = {pid: one for pid, one in self._held.items() if one.poll() is None}
        return sorted({*left, *self._held})

    def _left_s(self, after_s: float) -> float:
        return max(self._killed_s + after_s - time.monotonic(), 0.0)

    def _note(self, words: str, *, over: bool) -> None:
        seconds = time.monotonic() - self._killed_s
        self._ledger.append("held", what=words, seconds=round(seconds, 3), over=over)
