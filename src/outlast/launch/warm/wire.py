"""What the agent and the server say to each other: framed messages, some with descriptors.

MessagePack and not JSON: arguments and environment are bytes in no particular encoding. Each end
is used by one thread.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from outlast.keeper import descriptors

_HEAD: Final = struct.Struct("<II")
MAX_FRAME: Final = 1 << 28
MAX_FDS: Final = 4096  # two for each of more workers than a machine has
SEND_TIMEOUT_S: Final = 20


class _WarmMessage(msgspec.Struct, kw_only=True, tag=True):
    """What all messages have in common: the class's name says what they are."""


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


class Start(_WarmMessage):
    """To the server: fork these, with the descriptors of all of them in order."""

    workers: list[ForkedWorker]


class Script(_WarmMessage):
    """To the server: import ahead what this script will import, as far as that is safe."""

    arguments: list[bytes]


class Reaped(_WarmMessage):
    """To the server: the agent knows how these ended; their ids may be given out again."""

    pids: list[int]


class ServerReady(_WarmMessage, tag="Ready"):
    """To the agent: everything is imported."""


class Started(_WarmMessage):
    """To the agent: the workers' process ids, in the order they were asked for."""

    pids: list[int]


class ForkRefused(_WarmMessage, tag="Refused"):
    """To the agent: a fork would not be a fresh start; ``reason`` completes "because"."""

    reason: str


class Exited(_WarmMessage):
    """To the agent: a worker has ended, with a code as subprocess has it (negative: a signal)."""

    pid: int
    code: int


class Preloaded(_WarmMessage):
    """To the agent: which of the script's imports are done, and why others are not."""

    modules: list[str]
    declined: dict[str, str]


Message = Start | Script | Reaped | ServerReady | Started | ForkRefused | Exited | Preloaded
_decoder = msgspec.msgpack.Decoder(Message)


def readable(fds: Iterable[int], timeout_s: float | None) -> set[int]:
    """Which of these descriptors can be read from, or have ended; waits until one can.

    poll and not select: an agent may have more than a thousand of them. And not a selector: the
    server's would be inherited by each worker.
    """
    waiting = select.poll()
    for fd in fds:
        waiting.register(fd, select.POLLIN)
    return {fd for fd, _ in waiting.poll(None if timeout_s is None else timeout_s * 1000)}


class Wire:
    """One end of the connection."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._fds: list[int] = []
        self._buffer = bytearray()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_TIMEOUT_S, 0))

    def send(self, message: Any, fds: list[int] | None = None) -> None:
        """Send one message.

        Raises:
            OSError: the other end is gone, or does not read.
        """
        body = msgspec.msgpack.encode(message)
        descriptors.send(self.sock, _HEAD.pack(len(body), len(fds or ())) + body, fds or ())

    def receive(self, timeout_s: float | None) -> tuple[Any, list[int]] | None:
        """The next message and its descriptors; None when none came in time.

        Raises:
            EOFError: the other end is gone.
            ValueError: what came is not a message.
        """
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while (found := self._next()) is None:
            left_s = None if until_s is None else max(until_s - time.monotonic(), 0.0)
            if not readable([self.sock.fileno()], left_s):
                return None
            self._read()
        return found

    def _next(self) -> tuple[Any, list[int]] | None:
        if len(self._buffer) < _HEAD.size:
            return None
        length, num_fds = _HEAD.unpack_from(self._buffer)
        if length > MAX_FRAME or num_fds > MAX_FDS:
            raise ValueError(f"a message of {length} bytes with {num_fds} descriptors")
        end = _HEAD.size + length
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_HEAD.size : end])
        del self._buffer[:end]
        fds, self._fds = self._fds[:num_fds], self._fds[num_fds:]
        try:
            return _decoder.decode(body), fds
        except msgspec.MsgspecError as error:
            raise ValueError(str(error)) from None

    def _read(self) -> None:
        try:
            data, fds = descriptors.receive(self.sock)
        except OSError as error:
            raise EOFError(str(error)) from None
        self._fds += fds
        if not data:
            raise EOFError
        self._buffer += data

    def close(self) -> None:
        """Let go."""
        for fd in self._fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        self._fds = []
        self.sock.close()
