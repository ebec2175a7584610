"""Messages and file descriptors through sockets of this machine.

A conversation is a union of :class:`Message` classes and a :class:`Codec` that makes bytes of them.
Between machines :mod:`outlast.peer` carries these bytes. On one, two kinds of sockets do:

``FrameSocket``   a stream: messages of up to a gigabyte, with bulk bytes and file descriptors
``PacketSocket``  SOCK_SEQPACKET: small messages; each comes whole or not at all

Guarantees: what arrives becomes one of the union's classes or an error, and nothing is read beyond
a bound. An end that is closed is reported, whether it was closed between two messages or in one. A
send to an end that does not read fails: at once on a socket of packets that does not wait, after
``SEND_TIMEOUT_S`` on a stream. Descriptors that are received are closed on exec.
What can go wrong: a send on a stream fails in the middle of a frame. Nothing after it would be
understood: the caller closes the socket.
"""

from __future__ import annotations

import array
import contextlib
import errno
import logging
import os
import select
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any, ClassVar, Final, NamedTuple

import msgspec

logger = logging.getLogger(__name__)

MAX_FDS_AT_ONCE: Final = 250  # the kernel takes 253 with one message
MAX_FDS: Final = 4096  # of one frame: two for each of more workers than a machine has
MAX_UNPACKED_BYTES: Final = 1 << 26
SEND_TIMEOUT_S: Final = 20  # of a stream
SEND_BUFFER_BYTES: Final = 4 << 20  # of a stream
_FDS: Final = array.array("i")
_ROOM: Final = socket.CMSG_SPACE(MAX_FDS_AT_ONCE * _FDS.itemsize)
_READ_BYTES: Final = 1 << 18
_CREDENTIALS: Final = struct.Struct("3i")
_HEAD: Final = struct.Struct("<II")  # bytes of the message, number of descriptors
_HEAD_WITH_BULK: Final = struct.Struct("<III")  # bytes of the bulk between the two


class Message(msgspec.Struct, kw_only=True, tag=True):
    """The base of all messages: the class's name, or another tag, says which one it is."""


class Codec:
    """The messages of one conversation, as bytes.

    Args:
        messages: the union of their classes.
        form: ``msgspec.json``, or ``msgspec.msgpack`` where strings are bytes in no encoding.
        pack_over: encodings of more bytes than this are compressed; None for none.
        mark: the first bytes of what is compressed; no plain encoding begins with them.
    """

    def __init__(
        self,
        messages: object,
        form: ModuleType = msgspec.json,
        *,
        pack_over: int | None = None,
        mark: bytes = b"",
    ) -> None:
        self._encode = form.encode
        self._decode = form.Decoder(messages).decode
        self._pack_over = pack_over
        self._mark = mark
        self._packed = (mark or b"\x78")[:1]  # zlib's own first byte

    def encode(self, message: Any) -> bytes:
        """The bytes of a message."""
        data: bytes = self._encode(message)
        if self._pack_over is None or len(data) <= self._pack_over:
            return data
        return self._mark + zlib.compress(data, 1)

    def decode(self, data: bytes | bytearray | memoryview) -> Any:
        """The message in ``data``.

        Raises:
            ValueError: it is none.
        """
        try:
            if self._pack_over is not None and data[:1] == self._packed:
                data = _unpacked(data[len(self._mark) :])
            return self._decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, zlib.error) as error:
            raise ValueError(str(error)) from None


def _unpacked(data: bytes | bytearray | memoryview) -> bytes:
    unpacker = zlib.decompressobj()
    unpacked = unpacker.decompress(data, MAX_UNPACKED_BYTES)
    if not unpacker.eof:
        raise ValueError(f"a message that is cut short, or larger than {MAX_UNPACKED_BYTES} bytes")
    return unpacked


def readable(fds: Iterable[int], timeout_s: float | None) -> set[int]:
    """Which of these descriptors can be read from, or have ended; waits until one can.

    poll and not select: an agent may have more than a thousand of them. And not a selector: the
    warm server's would be inherited by each worker.
    """
    waiting = select.poll()
    for fd in fds:
        waiting.register(fd, select.POLLIN)
    return {fd for fd, _ in waiting.poll(None if timeout_s is None else timeout_s * 1000)}


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """Process id and user id of the other end, as the kernel knows them."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


class _Socket:
    """One end of a connection.

    Args:
        sock: connected; it waits, where nothing else is said.
    """

    codec: ClassVar[Codec]

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def close(self) -> None:
        """Let go; a thread that waits in ``receive`` is woken."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


class PacketSocket(_Socket):
    """One end of a connection that keeps messages apart; a subclass says which ones.

    ``waits``: whether ``send`` waits for room. A message of more than ``max_bytes`` is not sent.
    """

    max_bytes: ClassVar[int]
    waits: ClassVar[bool] = True

    def send(self, message: Any) -> bool:
        """Send a message; whether the other end is there, and has room for all of it."""
        data = self.codec.encode(message)
        flags = socket.MSG_NOSIGNAL | (0 if self.waits else socket.MSG_DONTWAIT)
        try:
            if len(data) > self.max_bytes:
                raise OSError(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE))
            self.sock.send(data, flags)
        except OSError as error:
            if error.errno in (errno.EMSGSIZE, errno.EAGAIN):
                name, size = message.__struct_config__.tag, len(data)
                logger.warning("%s of %d bytes was lost: %s", name, size, error.strerror)
            return False
        return True

    def receive(self) -> Any:
        """The next message, waited for; None once the other end is gone or not understood.

        Raises:
            BlockingIOError: there is none, and this end does not wait.
        """
        try:
            data = self.sock.recv(self.max_bytes)
            return self.codec.decode(data) if data else None
        except BlockingIOError:
            raise
        except (OSError, ValueError):
            return None


class ReceivedFrame(NamedTuple):
    """A message with its bulk bytes and its descriptors, which are the receiver's to close."""

    message: Any
    bulk: bytes
    fds: list[int]


class FrameSocket(_Socket):
    """One end of a stream of frames; a subclass says which ones.

    Several threads may send, one receives. A frame is a head of eight bytes (bytes of the message,
    number of descriptors) and the message. With ``has_bulk`` the head is twelve bytes long and also
    has the number of bytes that follow the message: those that an encoding would only blow up. A
    frame of more than ``max_bytes`` is refused.
    """

    max_bytes: ClassVar[int]
    has_bulk: ClassVar[bool] = False

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        # Nobody waits for an end that does not read, least of all a training loop.
        limit = struct.pack("ll", SEND_TIMEOUT_S, 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self._sending = threading.Lock()
        self._fds: list[int] = []
        self._buffer = bytearray()

    def send(self, message: Any, bulk: bytes = b"", fds: Sequence[int] = ()) -> None:
        """Send one frame; ``fds`` stay the caller's.

        Raises:
            OSError: the other end is gone, or does not read.
        """
        data = self.codec.encode(message)
        if self.has_bulk:
            head = _HEAD_WITH_BULK.pack(len(data), len(bulk), len(fds))
        else:
            head = _HEAD.pack(len(data), len(fds))
        with self._sending:
            _send(self.sock, head + data, fds)
            if bulk:
                self.sock.sendall(bulk)

    def receive(self, timeout_s: float | None = None) -> ReceivedFrame | None:
        """The next frame, waited for; None when the other end is gone.

        Raises:
            TimeoutError: none came in time.
            ValueError: what came is not a message.
        """
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while (found := self._next()) is None:
            if until_s is not None:
                left_s = max(until_s - time.monotonic(), 0.0)
                if not readable([self.sock.fileno()], left_s):
                    raise TimeoutError
            try:
                data, fds = _receive(self.sock)
            except OSError:
                return None
            self._fds += fds
            if not data:
                return None
            self._buffer += data
        return found

    def drop_descriptors(self) -> None:
        """Close what came with no message; for the thread that receives, at its end."""
        fds, self._fds = self._fds, []
        for fd in fds:
            os.close(fd)

    def _next(self) -> ReceivedFrame | None:
        """The frame that the buffer begins with, once it is whole."""
        head = _HEAD_WITH_BULK if self.has_bulk else _HEAD
        if len(self._buffer) < head.size:
            return None
        length, *more, num_fds = head.unpack_from(self._buffer)
        size = length + sum(more)
        if size > self.max_bytes:
            raise ValueError(f"a message of {size} bytes")
        if num_fds > MAX_FDS:
            raise ValueError(f"a message with {num_fds} descriptors")
        middle, end = head.size + length, head.size + size
        if len(self._buffer) < end:
            return None
        with memoryview(self._buffer) as view:
            data, bulk = bytes(view[head.size : middle]), bytes(view[middle:end])
        del self._buffer[:end]
        # Descriptors come no later than their frame's last byte, but perhaps with an earlier one.
        if len(self._fds) < num_fds:
            raise ValueError("a message without its descriptors")
        message = self.codec.decode(data)
        fds, self._fds = self._fds[:num_fds], self._fds[num_fds:]
        return ReceivedFrame(message, bulk, fds)


def _send(sock: socket.socket, data: bytes, fds: Sequence[int]) -> None:
    """Send all of ``data``; descriptors go with its first bytes, at least one for each batch."""
    for start in range(0, len(fds), MAX_FDS_AT_ONCE):
        some = array.array("i", fds[start : start + MAX_FDS_AT_ONCE])
        is_last = start + MAX_FDS_AT_ONCE >= len(fds)
        part = data if is_last else data[:1]
        data = data[sock.sendmsg([part], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, some)]) :]
    sock.sendall(data)


def _receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    """Some bytes, b"" at the end, and the descriptors that came with them.

    Raises:
        OSError: the other end is gone, or this process may not have so many open.
    """
    data, extras, flags, _ = sock.recvmsg(_READ_BYTES, _ROOM, socket.MSG_CMSG_CLOEXEC)
    fds = _FDS[:]
    for level, kind, rights in extras:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(rights[: len(rights) - len(rights) % fds.itemsize])
    if flags & socket.MSG_CTRUNC:
        for fd in fds:
            os.close(fd)
        raise OSError(errno.EMFILE, "not all descriptors that were sent could be taken")
    return data, fds.tolist()
