"""An attempt's end, for a worker that goes on in its process: said by the agent, waited for here.

``AgentLine`` is a socket in a directory that the agent's user alone can enter, of the kind that
keeps messages apart (SOCK_SEQPACKET): a message comes whole or not at all. The agent knows the
process at the other end from the kernel (SO_PEERCRED), and not from what is said.

=============  ================  ===============================================================
from           message           meaning
=============  ================  ===============================================================
agent          ``AttemptEnded``  the attempt is over: break what is pending, end the step
worker         ``Unwound``       its step has ended; what is left is to take things down. Where
                                 nobody has told it so: all have agreed on it, or it stands by
worker         ``Prepared``      it could begin the next attempt now
worker         ``Stays``         it cannot: what happened to it is its own
agent          ``NextAttempt``   the next attempt, as this worker is to see it
=============  ================  ===============================================================

``AttemptState`` says whether the running attempt is over; such a worker has one (``over``) for its
whole life. A thread that listens to the agent makes it happen; what could wait for another rank is
then let go, and the training thread unwinds by :class:`AttemptOver` where it looks, or by what its
collective raises.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from outlast import ipc
from outlast.errors import NotInProcess
from outlast.policy.failures import reads_as_echo

logger = logging.getLogger(__name__)

LINE_VARIABLE: Final = "OUTLAST_LINE"  # path of the socket, set by our agent
# Set where a worker is started while the others train: it goes through its script's beginning, and
# has no rank before it is told of an attempt.
STANDBY_VARIABLE: Final = "OUTLAST_STANDBY"
LEAVES: Final = "its machine leaves"  # why one stays that is on its way out
MAX_BYTES: Final = 1 << 17


class AttemptEnded(ipc.Message, tag="Over"):
    """From the agent: the attempt is over."""


class Unwound(ipc.Message):
    """From the worker: its step has ended."""


class Prepared(ipc.Message):
    """From the worker: it could begin the next attempt.

    Attributes:
        step: that it holds the state of, or None.
        any_size: whether it is the same run with any other number of workers.
    """

    step: int | None = None
    any_size: bool = False


class Stays(ipc.Message):
    """The worker cannot begin again; ``reason`` completes "because"."""

    reason: str


class NextAttempt(ipc.Message, tag="Go"):
    """From the agent: the next attempt, as this worker is to see it.

    Attributes:
        environ: the variables that differ between workers and attempts; others of that kind are to
            be removed.
        stdout, stderr: files that its output goes to, or "" for where it goes now.
    """

    environ: dict[str, str]
    stdout: str = ""
    stderr: str = ""


Message = AttemptEnded | Unwound | Prepared | Stays | NextAttempt


class AgentLine(ipc.PacketSocket):
    """One end of the socket between an agent and a worker that may live on."""

    codec = ipc.Codec(Message, msgspec.msgpack)
    max_bytes = MAX_BYTES


def listen(path: Path, backlog: int) -> socket.socket:
    """The agent's socket; accepting from it never waits."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen(backlog)
    listener.setblocking(False)
    return listener


def dial() -> AgentLine | None:
    """This worker's line to its agent; None where the agent does not want one."""
    path = os.environ.get(LINE_VARIABLE)
    if not path:
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.connect(path)
    except OSError:
        sock.close()
        return None
    return AgentLine(sock)


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
        is_apart: whether the body that runs is none that the others run too.
    """

    def __init__(self) -> None:
        self.is_held = self.is_void = self.is_apart = False
        self._happened = threading.Event()
        self._lock = threading.Lock()
        self._watchers: list[Callable[[], None]] = []

    @property
    def is_over(self) -> bool:
        """Whether the agent has said so."""
        return self._happened.is_set()

    @property
    def sends_nothing(self) -> bool:
        """Whether nobody is there for what the step in progress would send."""
        return self.is_apart or (self.is_held and self.is_over)

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
        is_void = isinstance(error, ConnectionError) if self.is_apart else self.explains(error)
        self.is_void = self.is_void or is_void
        return is_void

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
