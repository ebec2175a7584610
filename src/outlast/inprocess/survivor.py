"""This worker, where others are lost and it goes on: its line to the agent.

The agent says on a line of its own that the attempt is over. A thread here then breaks what the
training thread waits for; the step in progress comes to the end of its loop's body and changes
nothing (:mod:`outlast.inprocess.interrupted`); at the boundary the session lets go of what belonged
to the attempt, and waits here for its place in the next one.

Guarantees: an exception is the attempt's end only if the agent says so, soon; any other one goes on
as ever. Who cannot go on says so at once, with the reason, and nobody waits for it.

What can go wrong: a training thread that neither waits for others nor ends its step: the agent has
a limit for it, ends the process, and starts another one.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from typing import Final

import torch.distributed as dist

from outlast.attempt import trackers
from outlast.attempt.groups import groups
from outlast.attempt.over import (
    LEAVES,
    STANDBY_VARIABLE,
    AgentLine,
    AttemptEnded,
    NextAttempt,
    Prepared,
    Stays,
    Unwound,
    dial,
    over,
)
from outlast.checkpoint import devices
from outlast.errors import NotInProcess
from outlast.health import pulse

AGAIN_S: Final = 0.25  # until the store's connections, and what was opened since, are broken too
JOIN_S: Final = 5.0
ELSEWHERE: Final = "it is not in a loop over session.steps()"
ALONE: Final = (
    "connection closed: this process was started to join others, and its script's beginning does "
    "not lead to them"
)
GONE: Final = "connection closed: the agent has gone"


class Survivor:
    """A worker's part in it, while its session is open.

    Args:
        line: to the agent.
        why_not: why it cannot go on, whatever comes; "" if it can.

    Attributes:
        joins: whether others were in the attempt before.
        where: in which case no step is lost, if not in every one.
    """

    def __init__(self, line: AgentLine, why_not: str, *, joins: bool = False) -> None:
        self.why_not = why_not
        self.joins, self.where = joins, ""
        self._line = line
        self._lock = threading.Lock()
        self._has_answered = threading.Event()
        self._next: queue.SimpleQueue[NextAttempt | None] = queue.SimpleQueue()
        self._given: set[str] = set()  # variables
        self._thread = devices.Thread(target=self._listen, name="outlast-line", daemon=True)
        self._thread.start()

    @property
    def words(self) -> str:
        """What a lost worker costs here, for a person."""
        if self.why_not:
            return f"a lost worker: all start again, from a checkpoint: {self.why_not}"
        return (
            f"a lost worker: the others go on in their processes, and no step is lost{self.where} ✔"
        )

    # --- the training thread --------------------------------------------------------------------

    def hold(self) -> None:
        """A loop begins that can go on in the next attempt."""
        over.is_held = not self.why_not

    def release(self) -> None:
        """It has ended; who is asked from here on stays behind."""
        with self._lock:
            was_held, over.is_held = over.is_held, False
            if was_held and over.is_over:
                self._answer(Stays(reason=self.why_not or ELSEWHERE))

    def cannot(self, reason: str) -> None:
        """From here on this worker cannot go on; ``hold`` says so once it is asked."""
        self.why_not = self.why_not or reason

    def leave(self) -> None:
        """This worker is on its way out of the job, whatever comes of the attempt."""
        with self._lock:
            self.why_not, over.is_held = LEAVES, False
            if over.is_over:
                self._answer(Stays(reason=LEAVES))

    def go_on(self, step: int | None, *, any_size: bool) -> None:
        """The attempt is over, and all that belonged to it was let go but its process groups.

        Returns once this process has its place in the next one, and its groups there.

        Args:
            step: that this worker has the state of, or None.
            any_size: whether it is the same run with any other number of workers.

        Raises:
            NotInProcess: this process cannot go on.
            OSError, RuntimeError: the groups could not be made.
        """
        self._answer(Unwound())
        try:
            with pulse.held_back():
                groups.let_go()
        except Exception as error:  # whatever torch makes of groups that are broken
            self._line.send(Stays(reason=f"its process groups do not go: {error}"))
            raise NotInProcess(f"connection closed, and process groups stay: {error}") from error
        self._line.send(Prepared(step=step, any_size=any_size))
        go = self._next.get()
        if go is None:
            raise NotInProcess(GONE)  # it ends this process
        _redirect(go)
        for name in {*self._given, STANDBY_VARIABLE} - set(go.environ):
            os.environ.pop(name, None)
        self._given = set(go.environ)
        os.environ.update(go.environ)
        trackers.forget_rank()
        trackers.export_here()
        groups.join()

    def join(self, *, stands_by: bool) -> None:
        """Come into an attempt of others; into the next one, where that one is over meanwhile.

        From here on this process is held, as it would be in a loop.

        Args:
            stands_by: it was started for none; otherwise for the one that its environment says.

        Raises:
            NotInProcess: there is none for this process.
            OSError, RuntimeError: the groups could not be made.
        """
        self.hold()
        while True:
            try:
                if stands_by:
                    self.go_on(None, any_size=True)
                else:
                    groups.let_go()
                    groups.join()
            except Exception as error:
                if not over.explains(error):
                    raise
                stands_by = True
            else:
                return

    def close(self) -> None:
        """The session is over."""
        self.release()
        groups.hold()
        self._line.close()
        self._thread.join(JOIN_S)

    # --- the thread that listens ----------------------------------------------------------------

    def _listen(self) -> None:
        while (message := self._line.receive()) is not None:
            if isinstance(message, AttemptEnded):
                self._over()
            elif isinstance(message, NextAttempt):
                # Here, in the order of the messages: this attempt's end may be the next one.
                self._has_answered.clear()
                over.begin_again()
                self._next.put(message)
        self._next.put(None)

    def _over(self) -> None:
        with self._lock:
            over.happen()
            if not over.is_held:
                self._answer(Stays(reason=self.why_not or ELSEWHERE))
        devices.enter()
        groups.break_all(again=False)
        while not self._has_answered.wait(AGAIN_S):
            groups.break_all(again=True)

    def _answer(self, message: Unwound | Stays) -> None:
        if not self._has_answered.is_set():
            self._has_answered.set()
            self._line.send(message)


def open_survivor() -> Survivor | None:
    """This worker's, where its agent wants it to live through losses; None elsewhere.

    What was a rehearsal so far is real from here on.

    Raises:
        OSError, RuntimeError: the groups could not be made.
    """
    is_grouped = dist.is_available() and dist.is_initialized()
    found = None
    if is_grouped and dist.get_world_size() > 1 and is_main_thread():
        line = dial()
        if line is not None:
            found = Survivor(line, groups.why_not(), joins=groups.is_rehearsal)
    stands_by = bool(os.environ.get(STANDBY_VARIABLE))
    if groups.is_rehearsal or stands_by:
        if found is None:
            raise NotInProcess(ALONE)
        found.join(stands_by=stands_by)
    return found


def is_main_thread() -> bool:
    """Whether this is the thread that scripts run in."""
    return threading.current_thread() is threading.main_thread()


def _redirect(go: NextAttempt) -> None:
    for path, number, stream in ((go.stdout, 1, sys.stdout), (go.stderr, 2, sys.stderr)):
        if path:
            if stream is not None:
                stream.flush()
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            os.dup2(fd, number)
            os.close(fd)
