"""What ``session.save()`` returns: a save that was asked for, and how it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from outlast.errors import ConfigError


class PendingSave:
    """A checkpoint that was asked for.

    Attributes:
        not_before: the first step boundary at which it can be taken.
    """

    def __init__(self, not_before: int, may_wait: Callable[[int], bool] = lambda _: True) -> None:
        self.not_before = not_before
        self._may_wait = may_wait
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

        A save that comes while another is in flight is put off to a later boundary. Asked by the
        loop before that boundary, the answer is False at once: waiting would be for itself.

        Raises:
            ConfigError: the same without a time-out.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while not self._committed and not self.error:
                # The ranks may still agree on a later step than the one that was asked for.
                if not self._may_wait(self.not_before if self._step is None else self._step):
                    if timeout_s is not None:
                        break  # it was put off to a later boundary: ask again after that
                    raise ConfigError(
                        "wait() is called before the step boundary at which the save is taken, and "
                        "would wait for ever; call it in a later step, or leave it to the "
                        "session's end"
                    )
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
                self._changed.notify_all()

    def end(self, error: str, step: int) -> None:
        """It is committed (``error`` is "") or has failed, with the snapshot of ``step``."""
        with self._changed:
            self._step = step  # a later one than was decided, if the first was void
            self._committed = not error
            self.error = error
            self._changed.notify_all()


class Saves:
    """The saves that were asked for and have not ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: list[PendingSave] = []

    def add(self, not_before: int, may_wait: Callable[[int], bool] = lambda _: True) -> PendingSave:
        """Keep track of a new one; ``may_wait`` says whether the caller may wait for a step."""
        pending = PendingSave(not_before, may_wait)
        with self._lock:
            self._open.append(pending)
        return pending

    def open(self) -> list[PendingSave]:
        """Those that have not ended."""
        with self._lock:
            return list(self._open)

    def give_up(self, step: int) -> None:
        """The attempt is over, after ``step``: none of them is to be waited for."""
        for pending in self.open():
            pending.end("the attempt is over", step)

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
            pending.end(error, step)
