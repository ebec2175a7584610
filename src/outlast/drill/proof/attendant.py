"""Does in a worker what the conditions of its start ask for at a step.

Behind the step at which a job is to be given notice it says so in its record, for whoever runs it,
and from there on its steps are slow: a signal takes longer to be heard than some steps take. Behind
the last step that is wanted nothing goes on: whoever runs the job ends it there.

Guarantees: where nothing is asked for, nothing is done.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from outlast.drill.digests import digest_of, unseen
from outlast.drill.proof import reach
from outlast.drill.proof.conditions import CARRIED, Conditions
from outlast.drill.proof.kernels import Operations
from outlast.drill.proof.still import DrawnLines
from outlast.drill.record import Line, NotedOperations, NoticeDue, ReachSeen, WorkerHeld

SLOW_S: Final = 0.25  # of a step, twice as long each time
SLOWEST_S: Final = 5.0
HELD_S: Final = 600.0


class Attendant:
    """Of one process.

    Args:
        run: the run's directory.
        conditions: of this start.
        write: writes a line of the record.
        tell: notes a call of the script's.
    """

    def __init__(
        self,
        run: Path,
        conditions: Conditions,
        write: Callable[[Line], None],
        tell: Callable[[str, str], None],
    ) -> None:
        self._run = run
        self._asked = conditions
        self._write = write
        self._has_asked = self._has_carried = False
        self._slow_s = SLOW_S
        self._operations: Operations | None = None
        self._noted: list[tuple[str, str, str, str]] = []
        self._draws = DrawnLines(tell) if conditions.find_draws else None
        if self._draws is not None:
            self._draws.open()

    def ahead(
        self, step: int, rank: int, known: Callable[[], Mapping[int, Any]], *, is_counted: bool
    ) -> None:
        """So many steps are complete, and the next one has its batch.

        Args:
            step: completed steps.
            rank: of this process, in its attempt.
            known: gives id → object, of what is recorded as state.
            is_counted: whether a session counts the steps.
        """
        asked = self._asked
        self.arrives(rank, known)
        if step in asked.look_at:
            with unseen():
                seen = list(reach.values(known()))
                owners = {one.path: [one.owner, one.kind] for one in seen if one.owner}
                librarys = {one.path: one.of for one in seen if one.of}
                found = {one.path: digest_of(one.value) for one in seen}
            self._write(ReachSeen(step=step, values=found, owners=owners, librarys=librarys))
        if asked.notice_after and step >= asked.notice_after:
            self._leave(step, is_counted=is_counted)
        if asked.hold_after and step >= asked.hold_after:
            self._hold(step)
        if asked.kernels_at and step + 1 == asked.kernels_at:
            self._operations = Operations(lambda *told: self._noted.append(told))
            self._operations.__enter__()

    def arrives(self, rank: int, known: Callable[[], Mapping[int, Any]]) -> None:
        """The process comes to its first step; in a session, ahead of that step's batch."""
        if self._asked.carry and not self._has_carried:
            self._has_carried = True
            with unseen():
                reach.put(known(), self._run / f"{rank}.{CARRIED}", self._asked.carry)

    def behind(self, step: int, rank: int, known: Callable[[], Mapping[int, Any]]) -> None:
        """So many steps are complete."""
        if step == self._asked.keep_at:
            with unseen():
                reach.keep(known(), self._run / f"{rank}.{CARRIED}")
        if self._operations is not None:
            self._operations.__exit__(None, None, None)
            self._operations = None
            self._write(NotedOperations(step=step, operations=self._noted))
        if self._draws is not None and step >= 2:
            self._draws.close()

    def _leave(self, step: int, *, is_counted: bool) -> None:
        if not self._has_asked:
            self._has_asked = True
            self._write(NoticeDue(step=step))
            if not is_counted and not callable(signal.getsignal(signal.SIGTERM)):
                self._hold(step)  # nobody would tell a script that does not listen
        time.sleep(self._slow_s)
        self._slow_s = min(2 * self._slow_s, SLOWEST_S)

    def _hold(self, step: int) -> None:
        self._write(WorkerHeld(step=step))
        time.sleep(HELD_S)
