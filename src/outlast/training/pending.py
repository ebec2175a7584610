"""What ``session.save()`` returns: a save that was asked for, and how it ends."""

from __future__ import annotations

import threading
import time


class PendingSave:
    """A checkpoint that was asked for.

    Attributes:
        not_before: the first step boundary at which it can be taken.
    """

    def __init__(self, not_before: int) -> None:
        self.not_before = not_before
        self.error = ""
        self._step: int | None = None
        self._committed = False
        self._changed = threading.Condition()

    @property
    def step(self) -> int | None:
        """The step it is taken at, or None while the ranks have not agreed yet."""
        return self._step

    @property
    def committed(self) -> bool:
        """Whether it is complete and readable."""
        return self._committed

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is committed or has failed; whether it is committed.

        It is taken at a step boundary: waiting for it inside the step that asked would wait for
        ever, so after ``timeout_s`` this returns as things are.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while not self._committed and not self.error:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    break
                self._changed.wait(left)
            return self._committed

    def decide(self, step: int) -> None:
        """It is taken at ``step``."""
        with self._changed:
            if self._step is None:
                self._step = step

    def end(self, error: str) -> None:
        """It is committed (``error`` is "") or has failed."""
        with self._changed:
            self._committed = not error
            self.error = error
            self._changed.notify_all()


class Saves:
    """The saves that were asked for and have not ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: list[PendingSave] = []

    def add(self, not_before: int) -> PendingSave:
        """Keep track of a new one."""
        pending = PendingSave(not_before)
        with self._lock:
            self._open.append(pending)
        return pending

    def open(self) -> list[PendingSave]:
        """Those that have not ended."""
        with self._lock:
            return list(self._open)

    def decided(self, step: int) -> None:
        """All ranks act after ``step``: whoever asked for it or before is served."""
        for pending in self.open():
            if pending.not_before <= step:
                pending.decide(step)

    def written(self, step: int, error: str) -> None:
        """The save of ``step`` has ended."""
        with self._lock:
            ended = [p for p in self._open if p.not_before <= step]
            self._open = [p for p in self._open if p.not_before > step]
        for pending in ended:
            pending.decide(step)
            pending.end(error)
