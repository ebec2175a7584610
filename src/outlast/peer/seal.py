"""Handshake and sealed frames, as bytes in and bytes out: no sockets, no clocks.

Each side sends a hello (magic, version, role, purpose, 32-byte nonce) in the clear. From the job's
key, the purpose and both nonces come two keys, one for each direction, so that nothing recorded in
another connection, or sent by this side, fits here. What lies below it (both sides' certificates
under TLS) goes into these keys too: two connections that somebody has joined in the middle have two
different pairs. A frame is::

    head   4 bytes payload length, 8 bytes bulk length, and their seal
    body   the payload and its seal       (left out when the payload is empty)
    bulk   the bulk bytes and their seal  (left out when there are none)

A seal is an HMAC-SHA256 over the kind of part, the frame's number in its direction, and the part.
Lengths are believed only once their seal is checked, so a changed one costs nothing. The first
frame of each side is empty: it proves the key, before anything of the other side's choosing is held
(a hello has a bounded size, a proof a fixed one).

Everything that is wrong is a :class:`~outlast.errors.SealError`; both ends are of no use after it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from collections.abc import Callable
from typing import Final, NamedTuple

from outlast.errors import CutShort, SealError

Buffer = bytes | bytearray | memoryview

MAGIC: Final = b"OLPR"
VERSION: Final = 2  # 1 did not look at what lies below it
NONCE_BYTES: Final = 32
TAG_BYTES: Final = 32
MAX_PURPOSE_BYTES: Final = 64
MAX_PAYLOAD_BYTES: Final = 1 << 20
NEARBY_FRAMES: Final = 64  # how far a wrong seal is compared with other numbers, to name the wrong

_HELLO: Final = struct.Struct("!4sBcB")
_LENGTHS: Final = struct.Struct("!IQ")
_PART: Final = struct.Struct("!cQ")
HEAD_BYTES: Final = _LENGTHS.size + TAG_BYTES
HELLO_BYTES_MAX: Final = _HELLO.size + MAX_PURPOSE_BYTES + NONCE_BYTES
_HEAD, _BODY, _BULK = b"h", b"p", b"b"
_CONNECTS, _ACCEPTS = b"c", b"a"


class Handshake:
    """One side's start of a connection.

    Send ``hello``; give what comes to ``feed`` until ``is_met``; then send ``proof()``, and go on
    until ``is_proven``. The accepting side waits for the hello and sends its own with the proof.

    Args:
        key: the job's.
        purpose: what the connection is for, ASCII; both sides must say the same.
        connects: whether this side is the one that connected.
        nonce: 32 random bytes; given in tests only.
    """

    def __init__(
        self, key: bytes, purpose: str, *, connects: bool, nonce: bytes | None = None
    ) -> None:
        name = purpose.encode("ascii")
        if not 0 < len(name) <= MAX_PURPOSE_BYTES:
            raise ValueError(f"{purpose!r} is no purpose: 1 to {MAX_PURPOSE_BYTES} characters")
        self._key = key
        self._purpose = name
        self.connects = connects
        self._nonce = os.urandom(NONCE_BYTES) if nonce is None else nonce
        self.below = b""  # what both sides see of what lies below it; set before the other's hello
        self._came = bytearray()
        self._keys: tuple[bytes, bytes] | None = None  # to send with, to check with
        self.is_proven = False
        role = _CONNECTS if connects else _ACCEPTS
        self.hello = _HELLO.pack(MAGIC, VERSION, role, len(name)) + name + self._nonce

    @property
    def is_met(self) -> bool:
        """Whether the other side's hello has come."""
        return self._keys is not None

    @property
    def wanted_bytes(self) -> int:
        """How many bytes must still come at least; 0 once all is proven.

        Reading no more than that leaves what follows the handshake unread.
        """
        if self.is_proven:
            return 0
        return self._next_bytes() - len(self._came)

    def proof(self) -> bytes:
        """The frame that proves this side's key; it may be sent once the other side is met."""
        return b"".join(Sealer(self._pair()[0], first=0).seal())

    def feed(self, data: Buffer) -> bytes:
        """Take bytes from the other side; returns those that come after the handshake."""
        view = memoryview(data)
        while view and not self.is_proven:
            some = view[: self.wanted_bytes]
            self._came += some
            view = view[len(some) :]
            if not self.is_met and len(self._came) == _HELLO.size:
                self._check_start()
            elif not self.wanted_bytes:
                (self._check_proof if self.is_met else self._check_hello)()
                self._came.clear()
        return bytes(view)

    def ends(self, max_payload_bytes: int = MAX_PAYLOAD_BYTES) -> tuple[Sealer, Unsealer]:
        """What seals and unseals all that follows."""
        if not self.is_proven:
            raise ValueError("the other side has not proven the key yet")
        to_send, to_check = self._pair()
        return (
            Sealer(to_send, first=1, max_payload_bytes=max_payload_bytes),
            Unsealer(to_check, first=1, max_payload_bytes=max_payload_bytes),
        )

    def cut(self) -> SealError:
        """What it means that the stream ends now."""
        if not self.is_met:
            return CutShort("it left before it said what it is")
        return SealError("it left without proving the job's key; it may have another")

    def _pair(self) -> tuple[bytes, bytes]:
        """The keys to send and to check with."""
        if self._keys is None:
            raise ValueError("the other side's hello has not come yet")
        return self._keys

    def _next_bytes(self) -> int:
        """How long what comes next is, as far as that is known."""
        if self.is_met:
            return HEAD_BYTES
        if len(self._came) < _HELLO.size:
            return _HELLO.size
        return _HELLO.size + self._came[_HELLO.size - 1] + NONCE_BYTES

    def _check_start(self) -> None:
        magic, version, role, num_bytes = _HELLO.unpack(self._came)
        if magic != MAGIC:
            raise SealError("it does not speak this protocol: it is no part of a job")
        if version != VERSION:
            raise SealError(
                f"it speaks version {version} of the protocol and this is version {VERSION}; "
                "install one version of outlast on all machines"
            )
        if role != (_ACCEPTS if self.connects else _CONNECTS):
            raise SealError("it answers in the wrong role: it sends back what it was sent")
        if not 0 < num_bytes <= MAX_PURPOSE_BYTES:
            raise SealError("its hello names no purpose")

    def _check_hello(self) -> None:
        purpose = bytes(self._came[_HELLO.size : -NONCE_BYTES])
        theirs = bytes(self._came[-NONCE_BYTES:])
        if purpose != self._purpose:
            raise SealError(f"it came for {ascii(purpose)[1:]} and this is for {self._purpose!r}")
        nonces = self._nonce + theirs if self.connects else theirs + self._nonce
        context = _HELLO.pack(MAGIC, VERSION, b" ", len(purpose)) + purpose + nonces + self.below
        to_acceptor = hmac.digest(self._key, b">" + context, "sha256")
        to_connector = hmac.digest(self._key, b"<" + context, "sha256")
        both = (to_acceptor, to_connector)
        self._keys = both if self.connects else both[::-1]

    def _check_proof(self) -> None:
        lengths, tag = self._came[: _LENGTHS.size], self._came[_LENGTHS.size :]
        expected = _tag(self._pair()[1], _HEAD, 0, lengths)
        if not hmac.compare_digest(expected, tag):
            raise SealError("it does not hold this job's key, or somebody is between the two")
        if _LENGTHS.unpack(lengths) != (0, 0):
            raise SealError("its proof carries a message")
        self.is_proven = True


class Sealer:
    """Frames of one direction, in order.

    Args:
        key: of this direction.
        first: number of the first frame.
        max_payload_bytes: what the other side takes.
    """

    def __init__(
        self, key: bytes, *, first: int, max_payload_bytes: int = MAX_PAYLOAD_BYTES
    ) -> None:
        self._key = key
        self._next = first
        self._max = max_payload_bytes

    def seal(self, *parts: Buffer, bulk_bytes: int = 0) -> list[Buffer]:
        """A frame whose payload is ``parts``, one behind the other, as buffers to be sent in order.

        When ``bulk_bytes`` are announced, :meth:`bulk` must seal so many right after.
        """
        num_bytes = sum(memoryview(part).nbytes for part in parts)
        if num_bytes > self._max:
            raise ValueError(f"a message of {num_bytes} bytes; at most {self._max} are taken")
        number, self._next = self._next, self._next + 1
        lengths = _LENGTHS.pack(num_bytes, bulk_bytes)
        buffers: list[Buffer] = [lengths + _tag(self._key, _HEAD, number, lengths)]
        if num_bytes:
            buffers += [*parts, _tag(self._key, _BODY, number, *parts)]
        return buffers

    def bulk(self) -> Bulk:
        """What seals the bulk of the frame that was sealed last."""
        return Bulk(self._key, self._next - 1)


class Head(NamedTuple):
    """What a frame announces, in bytes."""

    payload_bytes: int
    bulk_bytes: int


class Unsealer:
    """The other side's frames, in order; refuses everything that is not the next one, untouched.

    Either everything goes through :meth:`feed`, or the caller reads part by part: ``HEAD_BYTES``
    for :meth:`head`, then (unless it is empty) the payload and ``TAG_BYTES`` for :meth:`body`, then
    (unless there are none) the bulk bytes and ``TAG_BYTES`` for :meth:`bulk`.
    """

    def __init__(
        self, key: bytes, *, first: int, max_payload_bytes: int = MAX_PAYLOAD_BYTES
    ) -> None:
        self._key = key
        self._number = first - 1  # of the frame that is being read
        self._max = max_payload_bytes
        self._came = bytearray()
        self._head: Head | None = None  # of the frame whose body is awaited

    def feed(self, data: Buffer) -> list[bytes]:
        """Take bytes as they come; the payloads that are complete now. Bulk is refused."""
        self._came += data
        payloads = []
        while (payload := self._take()) is not None:
            payloads.append(payload)
        return payloads

    def finish(self) -> None:
        """The stream has ended: CutShort if that is inside a frame."""
        if self._came or self._head is not None:
            raise CutShort("the stream ended inside a message")

    def head(self, raw: Buffer) -> Head:
        """Check the start of the next frame."""
        view = memoryview(raw)
        lengths = view[: _LENGTHS.size]
        self._number += 1
        self._check(_HEAD, lengths, view[_LENGTHS.size :])
        head = Head(*_LENGTHS.unpack(lengths))
        if head.payload_bytes > self._max:
            raise SealError(
                f"a message of {head.payload_bytes} bytes, where {self._max} are the most"
            )
        return head

    def body(self, payload: Buffer, tag: Buffer) -> None:
        """Check a payload; only then may it be looked at."""
        self._check(_BODY, payload, tag)

    def bulk(self) -> Bulk:
        """What checks the bulk of this frame, as it comes."""
        return Bulk(self._key, self._number)

    def _take(self) -> bytes | None:
        if self._head is None:
            if len(self._came) < HEAD_BYTES:
                return None
            head = self.head(bytes(self._came[:HEAD_BYTES]))
            if head.bulk_bytes:
                raise SealError(f"{head.bulk_bytes} bytes of bulk, where none is taken")
            del self._came[:HEAD_BYTES]
            if not head.payload_bytes:
                return b""
            self._head = head
        num_bytes = self._head.payload_bytes
        if len(self._came) < num_bytes + TAG_BYTES:
            return None
        payload = bytes(self._came[:num_bytes])
        self.body(payload, bytes(self._came[num_bytes : num_bytes + TAG_BYTES]))
        del self._came[: num_bytes + TAG_BYTES]
        self._head = None
        return payload

    def _check(self, kind: bytes, part: Buffer, tag: Buffer) -> None:
        if hmac.compare_digest(_tag(self._key, kind, self._number, part), bytes(tag)):
            return
        for distance in range(1, NEARBY_FRAMES + 1):
            for number in (self._number - distance, self._number + distance):
                if number < 0:
                    continue
                if hmac.compare_digest(_tag(self._key, kind, number, part), bytes(tag)):
                    raise SealError(
                        "a message was sent a second time (replayed)"
                        if number < self._number
                        else "a message came out of order, or those before it were taken out"
                    )
            if memoryview(part).nbytes > HEAD_BYTES:
                break  # a head tells the order; more would be work for whoever sends nonsense
        raise SealError("a message was altered on its way, or another one was put in its place")


class Bulk:
    """The seal over a frame's bulk, which may come in pieces of any size; the GIL is released."""

    def __init__(self, key: bytes, number: int) -> None:
        self._mac = hmac.new(key, _PART.pack(_BULK, number), hashlib.sha256)
        self.update: Callable[[Buffer], None] = self._mac.update

    def tag(self) -> bytes:
        """The seal over all that was given to ``update``."""
        return self._mac.digest()

    def check(self, tag: Buffer) -> None:
        """Compare with the seal that came behind the bulk: before that, none of it counts."""
        if not hmac.compare_digest(self.tag(), bytes(tag)):
            raise SealError("bulk data were altered on their way")


def _tag(key: bytes, kind: bytes, number: int, *parts: Buffer) -> bytes:
    prefix = _PART.pack(kind, number)
    if len(parts) == 1 and memoryview(parts[0]).nbytes < 4096:
        return hmac.digest(key, prefix + bytes(parts[0]), "sha256")
    mac = hmac.new(key, prefix, hashlib.sha256)
    for part in parts:
        mac.update(part)
    return mac.digest()
