"""What an agent and a worker that recovers in its process say to each other.

A socket in a directory that the agent's user alone can enter, of the kind that keeps messages
apart (SOCK_SEQPACKET): a message comes whole or not at all. The agent knows who is at the other end
from the kernel (SO_PEERCRED), and not from what is said.

=============  ================  ===============================================================
who says it    message           meaning
=============  ================  ===============================================================
agent          ``AttemptEnded``  the attempt is over: break what is pending, end the step
worker         ``Unwound``       its step has ended; what is left is to take things down. Where
                                 nobody has told it so: all have agreed on it, or it stands by
worker         ``Prepared``      it could begin the next attempt now
worker         ``Stays``         it cannot: what happened to it is its own
agent          ``NextAttempt``   the next attempt, as this worker is to see it
=============  ================  ===============================================================
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from pathlib import Path
from typing import Final

import msgspec

LINE_VARIABLE: Final = "OUTLAST_LINE"  # path of the socket, set by our agent
# Set where a worker is started while the others train: it goes through its script's beginning, and
# has no rank before it is told of an attempt.
STANDBY_VARIABLE: Final = "OUTLAST_STANDBY"
LEAVES: Final = "its machine leaves"  # why one stays that is on its way out
MAX_BYTES: Final = 1 << 17
_CREDENTIALS: Final = struct.Struct("3i")


class _LineMessage(msgspec.Struct, kw_only=True, tag=True):
    """What all messages have in common: the class's name says what they are."""


class AttemptEnded(_LineMessage, tag="Over"):
    """The attempt is over."""


class Unwound(_LineMessage):
    """The worker's step has ended."""


class Prepared(_LineMessage):
    """The worker could begin.

    Attributes:
        step: that it holds the state of, or None.
        any_size: whether it is the same run with any other number of workers.
    """

    step: int | None = None
    any_size: bool = False


class Stays(_LineMessage):
    """The worker cannot begin again; ``reason`` completes "because"."""

    reason: str


class NextAttempt(_LineMessage, tag="Go"):
    """The next attempt.

    Attributes:
        environ: the variables that differ between workers and attempts; others of that kind are to
            be removed.
        stdout, stderr: files that its output goes to, or "" for where it goes now.
    """

    environ: dict[str, str]
    stdout: str = ""
    stderr: str = ""


Message = AttemptEnded | Unwound | Prepared | Stays | NextAttempt
_decoder = msgspec.msgpack.Decoder(Message)


class AgentLine:
    """One end."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    @property
    def peer_pid(self) -> int:
        """Process id of the other end, as the kernel knows it."""
        size = _CREDENTIALS.size
        raw = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        return int(_CREDENTIALS.unpack(raw)[0])

    def send(self, message: Message) -> bool:
        """Say it; whether the other end is there, and could hear all of it."""
        data = msgspec.msgpack.encode(message)
        if len(data) > MAX_BYTES:
            return False
        try:
            self.sock.send(data, socket.MSG_NOSIGNAL)
        except OSError:
            return False
        return True

    def receive(self) -> Message | None:
        """The next message, waited for; None once the other end is gone.

        Raises:
            BlockingIOError: there is none, and this end does not wait.
        """
        try:
            data = self.sock.recv(MAX_BYTES)
            return _decoder.decode(data) if data else None
        except BlockingIOError:
            raise
        except (OSError, msgspec.MsgspecError):
            return None

    def close(self) -> None:
        """Let go."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits in it
        self.sock.close()


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
