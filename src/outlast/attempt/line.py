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

import os
import socket
from pathlib import Path
from typing import Final

import msgspec

from outlast import ipc

LINE_VARIABLE: Final = "OUTLAST_LINE"  # path of the socket, set by our agent
# Set where a worker is started while the others train: it goes through its script's beginning, and
# has no rank before it is told of an attempt.
STANDBY_VARIABLE: Final = "OUTLAST_STANDBY"
LEAVES: Final = "its machine leaves"  # why one stays that is on its way out
MAX_BYTES: Final = 1 << 17


class AttemptEnded(ipc.Message, tag="Over"):
    """The attempt is over."""


class Unwound(ipc.Message):
    """The worker's step has ended."""


class Prepared(ipc.Message):
    """The worker could begin.

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


class AgentLine(ipc.PacketSocket):
    """One end."""

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
