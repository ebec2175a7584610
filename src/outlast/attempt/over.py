"""Whether the running attempt is over: the agent's word, for whoever waits inside of the worker.

A worker that recovers in its process has one of these for its whole life. A thread that listens to
the agent makes it happen; whatever could wait for another rank is then let go, and the training
thread unwinds by :class:`AttemptOver` where it looks, or by what its collective raises.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Final

from outlast.errors import NotInProcess
from outlast.policy.failures import reads_as_echo

logger = logging.getLogger(__name__)

ECHO_S: Final = 20.0  # longer than an agent gives its workers to unwind and take down
OWN_S: Final = 0.5
_WAITED: Final = "_outlast_has_waited"


class AttemptOver(BaseException):
    """Unwinds the training thread to where the next attempt begins.

    Not an Exception: a loop that catches those, to skip a bad batch, must not go on in an attempt
    that is over. Nobody but the session ever sees it.
    """


class AttemptState:
    """The state of this worker's attempt.

    Attributes:
        is_held: whether the training thread is in a loop that goes on in the next attempt.
        is_void: whether what this process has computed in the step in progress is of nothing: a
            sum in it had no end.
    """

    def __init__(self) -> None:
        self.is_held = self.is_void = False
        self._happened = threading.Event()
        self._lock = threading.Lock()
        self._watchers: list[Callable[[], None]] = []

    @property
    def is_over(self) -> bool:
        """Whether the agent has said so."""
        return self._happened.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the agent's word; whether it has come."""
        return self._happened.wait(timeout_s)

    def explains(self, error: BaseException) -> bool:
        """Whether ``error`` is the attempt's end: the agent says so, or does so soon.

        What looks like another rank's end is given the time that it takes until a machine that is
        silent is taken for lost; anything else only what two processes may differ by.
        """
        if not self.is_held or not isinstance(error, Exception | AttemptOver):
            return False
        if isinstance(error, NotInProcess):
            return False
        if not self.is_over and not getattr(error, _WAITED, False):
            self.wait(ECHO_S if _is_echo(error) else OWN_S)
            with contextlib.suppress(AttributeError):  # it takes no notes: it is waited for again
                setattr(error, _WAITED, True)
        return self.is_over

    def voids(self, error: BaseException) -> bool:
        """Whether ``error`` is the attempt's end; then the step in progress is void."""
        if not self.explains(error):
            return False
        self.is_void = True
        return True

    def happen(self) -> None:
        """The attempt is over; whoever watches is told, in this thread."""
        with self._lock:
            self._happened.set()
            watchers = list(self._watchers)
        for tell in watchers:
            try:
                tell()
            except Exception as error:  # noqa: BLE001 - the others are still to be told
                logger.warning("at the attempt's end: %s: %s", type(error).__name__, error)

    def begin_again(self) -> None:
        """Another attempt begins."""
        with self._lock:
            self._happened.clear()
            self.is_void = False

    def watch(self, tell: Callable[[], None]) -> None:
        """From now on ``tell`` is called once the attempt is over, in another thread."""
        with self._lock:
            self._watchers.append(tell)
            is_late = self.is_over
        if is_late:
            tell()

    def unwatch(self, tell: Callable[[], None]) -> None:
        """No more."""
        with self._lock:
            self._watchers = [one for one in self._watchers if one != tell]

    def raise_if_over(self) -> None:
        """To be called by the training thread, where its state is that of a step's end.

        Raises:
            AttemptOver: the attempt is over.
        """
        if self.is_held and self.is_over:
            raise AttemptOver


def _is_echo(error: BaseException) -> bool:
    """Whether an exception, or one that it came of, is what a peer's end looks like."""
    return any(
        isinstance(one, ConnectionError)
        or type(one).__name__.startswith("Dist")  # torch's: DistBackendError, DistNetworkError, …
        or reads_as_echo(str(one))
        for one in _chain(error)
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or one.__context__


over = AttemptState()  # of this process
