"""Start the server from the agent, and follow workers that are its children and not ours.

How a worker has ended is the server's to say. Where it says nothing though the kernel does (it is
stopped, or an import holds it), the agent reads it where the kernel keeps it for the parent; a
server that owes its word when the next workers are to be forked is replaced.

What can go wrong: a code of 0 that is read so may be one that we are not allowed to see. It is not
believed, and the server that does not say it is given up after a while.

``begin`` starts a server before the agent itself has imported torch: both import at once.

The messages of both ends are here: framed, some with descriptors. MessagePack and not JSON:
arguments and environment are bytes in no particular encoding. Each end is used by one thread.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from outlast import ipc
from outlast.health.processes import end_group
from outlast.ipc import readable
from outlast.launch.first_look import threads_to_set


class ForkedWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that is to be forked.

    Attributes:
        arguments: of ``outlast.launch.worker``: [-m] SCRIPT [ARGUMENT…].
        command: the command line that a cold worker would have.
        environ: its complete environment.
        redirected: which of 1 and 2 go to a descriptor that comes along, in this order.
    """

    arguments: list[bytes]
    command: list[bytes]
    environ: dict[bytes, bytes]
    redirected: list[int]


class Start(ipc.Message):
    """To the server: fork these, with the descriptors of all of them in order."""

    workers: list[ForkedWorker]


class Script(ipc.Message):
    """To the server: import ahead what this script will import, as far as that is safe."""

    arguments: list[bytes]


class Reaped(ipc.Message):
    """To the server: the agent knows how these ended; their ids may be given out again."""

    pids: list[int]


class ServerReady(ipc.Message, tag="Ready"):
    """To the agent: everything is imported."""


class Started(ipc.Message):
    """To the agent: the workers' process ids, in the order they were asked for."""

    pids: list[int]


class ForkRefused(ipc.Message, tag="Refused"):
    """To the agent: a fork would not be a fresh start; ``reason`` completes "because"."""

    reason: str


class Exited(ipc.Message):
    """To the agent: a worker has ended, with a code as subprocess has it (negative: a signal)."""

    pid: int
    code: int


Message = Start | Script | Reaped | ServerReady | Started | ForkRefused | Exited


class Wire(ipc.FrameSocket):
    """One end of the connection between an agent and its warm server."""

    codec = ipc.Codec(Message, msgspec.msgpack)
    max_bytes = 1 << 28


READY_TIMEOUT_S: Final = 120.0  # on a machine where importing torch takes longer, so it does cold
START_TIMEOUT_S: Final = 60.0  # one of the script's imports may be in its way
END_TIMEOUT_S: Final = 5.0
SOON_S: Final = 0.01
LOOK_S: Final = 0.2  # between two looks whether it is still to be waited for
OWED_S: Final = 1.0  # for its word on workers that have ended, before others are forked
SILENT_S: Final = 30.0  # the same where nothing else says how a worker has ended
_HELD: Final = frozenset(
    (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
)


class ServerLost(Exception):
    """The server has died, or does not answer; its workers are gone, or go with it."""


class NotWaitedFor(Exception):
    """The wait for a warm server was ended: whoever waited is to leave."""


class StartRefused(Exception):
    """The server must not be forked from; the text completes "because"."""


class WarmServer:
    """A running warm server, as the agent sees it.

    To be made in the agent's main thread, which outlives it: the kernel ends it with that thread.

    Attributes:
        environ: what it was started with.
        pid: its process id.
        is_lost: whether it has died.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = dict(environ)
        self.is_lost = False
        self._is_ready = False
        self._answer: Started | ForkRefused | None = None
        self._workers: dict[int, WarmProcess] = {}
        self._started: list[WarmProcess] = []
        self._owed: set[int] = set()  # workers that have ended, as we know without its word
        ours, theirs = socket.socketpair()
        with theirs, _held_back() as held:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-u", "-m", "outlast.launch.warm"),
                    *(str(theirs.fileno()), str(os.getpid())),
                    *(str(int(number)) for number in held),
                ],
                env=self.environ,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a Ctrl-C is the agent's to hear
            )
        self._wire = Wire(ours)
        self.pid = self._process.pid

    def wait_until_ready(self, leaves: Callable[[], bool] = lambda: False) -> None:
        """Wait for its imports.

        Args:
            leaves: whether that is not to be waited for any more.

        Raises:
            ServerLost: it has died, or takes too long.
            NotWaitedFor: what ``leaves`` said.
        """
        self._wait(lambda: self._is_ready, READY_TIMEOUT_S, leaves)

    def preload(self, arguments: Sequence[str]) -> None:
        """Have it import what the script will import, in its time."""
        self._send(Script(arguments=[os.fsencode(one) for one in arguments]))

    def start(self, workers: list[ForkedWorker], fds: list[int]) -> list[WarmProcess]:
        """Fork workers.

        Raises:
            ServerLost: it has died, or does not answer; or it has yet to say how others ended.
            StartRefused: a fork would not be a fresh start.
        """
        self._wait(lambda: not self._owed, OWED_S)
        self._answer = None
        self._send(Start(workers=workers), fds)
        self._wait(lambda: self._answer is not None, START_TIMEOUT_S)
        answer = self._answer
        if isinstance(answer, ForkRefused):
            raise StartRefused(answer.reason)
        return list(self._started)

    def hear(self, timeout_s: float = 0.0) -> None:
        """Take in what it has said, waiting so long for the first word."""
        while not self.is_lost:
            try:
                found = self._wire.receive(timeout_s)
            except TimeoutError:
                return
            except ValueError:
                found = None
            if found is None:
                self._lose()
                return
            self._heard(found.message)
            timeout_s = 0.0

    @property
    def fileno(self) -> int:
        """Readable when it has something to say, or has died."""
        return self._wire.sock.fileno()

    def owes(self, pid: int) -> None:
        """A worker has ended, and it has not said so."""
        self._owed.add(pid)

    def give_up(self) -> None:
        """It does not answer: end it, and with it whatever worker is left."""
        self._lose()

    def close(self) -> None:
        """End it, and with it whatever worker is left."""
        self._process.kill()
        self._lose()

    def _heard(self, message: Message) -> None:
        if isinstance(message, ServerReady):
            self._is_ready = True
        elif isinstance(message, Started):
            # At once: the next message may be that one of them has ended.
            self._started = [WarmProcess(pid, self) for pid in message.pids]
            self._workers |= {process.pid: process for process in self._started}
            self._answer = message
        elif isinstance(message, ForkRefused):
            self._answer = message
        elif isinstance(message, Exited):
            process = self._workers.pop(message.pid, None)
            self._owed.discard(message.pid)
            if process is not None:
                if process.returncode is None:
                    process.ended(message.code)
                with contextlib.suppress(OSError):
                    self._wire.send(Reaped(pids=[message.pid]))

    def _wait(
        self,
        condition: Callable[[], bool],
        timeout_s: float,
        leaves: Callable[[], bool] = lambda: False,
    ) -> None:
        until_s = time.monotonic() + timeout_s
        while not condition():
            if leaves():
                raise NotWaitedFor
            left_s = until_s - time.monotonic()
            if left_s > 0:
                self.hear(min(left_s, LOOK_S))
            else:
                self._lose()
            if self.is_lost:
                raise ServerLost(f"their server {self._last_word(left_s)}")

    def _send(self, message: Message, fds: Sequence[int] = ()) -> None:
        if not self.is_lost:
            try:
                self._wire.send(message, fds=fds)
            except OSError:
                self._lose()
        if self.is_lost:
            raise ServerLost(f"their server {self._last_word(1.0)}")

    def _last_word(self, left_s: float) -> str:
        if left_s <= 0:
            return "does not answer"
        code = self._process.returncode
        if code is not None and code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def _lose(self) -> None:
        if self.is_lost:
            return
        self.is_lost = True
        self._wire.close()
        self._wire.drop_descriptors()
        # Its end of the socket is closed before it is dead; its own reason comes first.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=0.2)
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=END_TIMEOUT_S)
        for process in self._workers.values():
            process.orphaned()
        self._workers = {}


@contextlib.contextmanager
def _held_back() -> Iterator[list[signal.Signals]]:
    """A process that is started in this block is born with these signals blocked.

    Schedulers signal every process of a job, and the server must outlive its workers' drain. Its
    workers get the signals back, and with them what has come since they were forked.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)
    try:
        yield sorted(_HELD - before)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class WarmProcess:
    """A worker; what torch's agent and ours use of :class:`subprocess.Popen`.

    Attributes:
        pid: its process id, not given out again before ``returncode`` is known here.
        returncode: its exit code (negative: the signal), or None.
    """

    def __init__(self, pid: int, server: WarmServer) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server
        self._pidfd = os.pidfd_open(pid)  # it is at most a zombie: the server waits for our word
        self._is_orphan = False
        self._since_s: float | None = None  # when it was first seen to have ended

    def poll(self) -> int | None:
        """The exit code, or None."""
        if self.returncode is None:
            self._server.hear()
        if self.returncode is None and readable([self._pidfd], 0.0):
            self._server.hear(SOON_S)  # it is about to tell
            if self.returncode is None:
                self._find_out()
        return self.returncode

    def _find_out(self) -> None:
        """It has ended, and the server does not say how."""
        if self._is_orphan:
            self.ended(-signal.SIGKILL)  # which the kernel sends when the server has died
        elif code := code_of(self.pid):
            self._server.owes(self.pid)
            self.ended(code)
        else:
            self._since_s = self._since_s or time.monotonic()
            if time.monotonic() - self._since_s > SILENT_S:
                self._server.give_up()

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, waited for.

        Raises:
            subprocess.TimeoutExpired: it did not end in time.
        """
        until_s = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            left_s = None if until_s is None else until_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                raise subprocess.TimeoutExpired("outlast.launch.worker", timeout or 0.0)
            readable(
                [self._pidfd] if self._is_orphan else [self._pidfd, self._server.fileno], left_s
            )
        return code

    def send_signal(self, number: int) -> None:
        """Signal it, if it has not ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def ended(self, code: int) -> None:
        """The server's word; one that failed takes its process group with it."""
        self.returncode = code
        if code and not self._is_orphan:  # it is not reaped yet: the group's number is its own
            end_group(self.pid)
        os.close(self._pidfd)

    def orphaned(self) -> None:
        """The server has died, and takes this process with it."""
        self._is_orphan = True


def code_of(pid: int) -> int | None:
    """How a process has ended that nobody has waited for yet, as subprocess says it, if known.

    0 may also be what the kernel says to those who must not know (proc_pid_stat(5), field 52).
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return os.waitstatus_to_exitcode(int(fields[49])) if fields[0] == b"Z" else None
    except (OSError, ValueError, IndexError):
        return None


def begin(num_workers: str) -> WarmServer | None:
    """A server that has begun to import, or None where it would not be used.

    Args:
        num_workers: the value of --nproc-per-node.
    """
    if not is_possible() or "PYTHON_EXEC" in os.environ:
        return None
    return WarmServer(os.environ | threads_to_set(os.environ, num_workers))


def is_possible() -> bool:
    """Whether this system has what it takes."""
    return sys.platform == "linux" and hasattr(os, "pidfd_open")
