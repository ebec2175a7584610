"""A sealed connection over TCP, for threads that block.

Guarantees: one thread may send while another receives; every wait ends, by what comes, by ``close``
from any thread, or by a time-out. A machine that is gone is found by the kernel: with ``silence_s``
a connection whose other kernel has not acknowledged for so long is ended, which has nothing to do
with how busy the processes on either side are. (That needs something on its way: whoever wants to
know soon sends something often. Without it keepalive finds a dead machine after ``silence_s``
rounded up to whole seconds, and three more.)

A message may carry bulk bytes, which are neither copied nor held: ``send(payload, bulk)``; on the
other side ``receive()``, then ``receive_into(view)`` of ``bulk_bytes``, or ``discard()``.

Rejected: heartbeats of our own as the only sign of life (a loaded host starves the thread that
answers, never the kernel's).
"""

from __future__ import annotations

import contextlib
import logging
import math
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

from outlast.errors import CutShort, SealError
from outlast.peer.key import Tls, refusal
from outlast.peer.seal import (
    HEAD_BYTES,
    MAX_PAYLOAD_BYTES,
    TAG_BYTES,
    Buffer,
    Handshake,
    Sealer,
    Unsealer,
)

log = logging.getLogger(__name__)

STALL_S: Final = 60.0  # a message that has begun and does not go on for so long never will
PIECE_BYTES: Final = 1 << 20
_PROBES: Final = 3


def listen(host: str, port: int = 0) -> socket.socket:
    """A listening socket at ``host``, which names one address of this machine.

    Raises:
        OSError: the address cannot be listened on.
    """
    family, kind, protocol, _, address = _resolve(host, port)
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except BaseException:
        listener.close()
        raise
    return listener


def connect(
    address: tuple[str, int],
    key: bytes,
    purpose: str,
    timeout_s: float,
    *,
    silence_s: float | None = None,
    tls: Tls | None = None,
    max_payload_bytes: int = MAX_PAYLOAD_BYTES,
) -> Channel:
    """A channel to ``address``, proven on both sides within ``timeout_s``.

    Args:
        address: host and port.
        key: the job's.
        purpose: what the channel is for; both sides must say the same.
        timeout_s: for everything until both sides have proven the key, in seconds.
        silence_s: see the module; None leaves it to the kernel's own patience.
        tls: wrap the connection.
        max_payload_bytes: the largest message, both ways; the same on both sides.

    Raises:
        SealError: the other side is not one of this job's for this purpose; it is logged.
        OSError: it cannot be reached, or not in time (TimeoutError).
    """
    until_s = time.monotonic() + timeout_s
    family, kind, protocol, _, resolved = _resolve(*address)
    sock = socket.socket(family, kind, protocol)
    try:
        sock.settimeout(timeout_s)
        sock.connect(resolved)
    except BaseException:
        sock.close()
        raise
    terms = _Terms(silence_s, tls, max_payload_bytes)
    return _opened(sock, Handshake(key, purpose, connects=True), until_s, terms)


def accept(
    sock: socket.socket,
    key: bytes,
    purpose: str,
    timeout_s: float,
    *,
    silence_s: float | None = None,
    tls: Tls | None = None,
    max_payload_bytes: int = MAX_PAYLOAD_BYTES,
) -> Channel:
    """A channel on ``sock``, which a listener's ``accept`` returned; see :func:`connect`.

    The socket is owned from here on: it is closed when this raises. A stranger may hold this up for
    ``timeout_s``: do it in a thread of its own, of which there is a bounded number.
    """
    until_s = time.monotonic() + timeout_s
    terms = _Terms(silence_s, tls, max_payload_bytes)
    return _opened(sock, Handshake(key, purpose, connects=False), until_s, terms)


def _resolve(host: str, port: int) -> tuple[Any, Any, int, str, Any]:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]


class _Terms(NamedTuple):
    silence_s: float | None
    tls: Tls | None
    max_payload_bytes: int


def _opened(sock: socket.socket, handshake: Handshake, until_s: float, terms: _Terms) -> Channel:
    peer = "an unknown address"
    try:
        peer = _in_words(sock.getpeername())
        set_options(sock, terms.silence_s)
        if terms.tls is not None:
            sock = _wrapped(sock, terms.tls, handshake, until_s)
        stream = _SocketStream(sock)
        with stream.until(until_s):
            _shake_hands(stream, handshake)
    except SealError as error:
        sock.close()
        raise _refused(peer, error) from None
    except BaseException:
        sock.close()
        raise
    return Channel(stream, peer, *handshake.ends(terms.max_payload_bytes))


def _wrapped(sock: socket.socket, tls: Tls, handshake: Handshake, until_s: float) -> socket.socket:
    context = tls.client() if handshake.connects else tls.server()
    sock.settimeout(max(until_s - time.monotonic(), 0.001))
    try:
        wrapped = context.wrap_socket(sock, server_side=not handshake.connects)
    except ssl.SSLError as error:
        raise refusal(error) from None
    handshake.below = tls.below(wrapped.getpeercert(True), connects=handshake.connects)
    return wrapped


def _shake_hands(stream: _SocketStream, handshake: Handshake) -> None:
    is_told = handshake.connects
    if handshake.connects:
        stream.write(handshake.hello)
    while not handshake.is_proven:
        scrap = bytearray(handshake.wanted_bytes)
        num_bytes = stream.read_some(memoryview(scrap))
        if not num_bytes:
            raise handshake.cut()
        handshake.feed(memoryview(scrap)[:num_bytes])
        if handshake.is_met and not is_told:
            stream.write(handshake.hello + handshake.proof())
            is_told = True
    if handshake.connects:
        stream.write(handshake.proof())


def set_options(sock: socket.socket, silence_s: float | None) -> None:
    """No waiting for more to send, and what finds a machine that is gone.

    Args:
        sock: a TCP socket.
        silence_s: end the connection when nothing was acknowledged for so long, in seconds.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if silence_s is not None:
        idle_s = max(math.ceil(silence_s), 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, math.ceil(silence_s * 1000))


class Channel:
    """A proven connection; made by :func:`connect` and :func:`accept`.

    Attributes:
        peer: the other side's address, in words.
        bulk_bytes: how much bulk the message that was received last has, still to be taken.
    """

    def __init__(
        self, stream: _SocketStream, peer: str, sealer: Sealer, unsealer: Unsealer
    ) -> None:
        self.peer = peer
        self.bulk_bytes = 0
        self._stream = stream
        self._sealer = sealer
        self._unsealer = unsealer
        self._sending = threading.Lock()
        self._receiving = threading.Lock()

    def fileno(self) -> int:
        """For polling; readable does not mean that a whole message is there. -1 once closed."""
        return self._stream.sock.fileno()

    def send(
        self,
        payload: Buffer,
        bulk: Iterable[Buffer] = (),
        *,
        pace: Callable[[int], None] | None = None,
    ) -> None:
        """Send one message, whole, before any other thread's.

        Args:
            payload: up to the agreed size.
            bulk: buffers that follow it, of any size.
            pace: called with a number of bytes before so many of the bulk are sent.

        Raises:
            OSError: the connection is gone, or nothing went out for ``STALL_S``.
        """
        views = [memoryview(part).cast("B") for part in bulk]
        num_bytes = sum(len(view) for view in views)
        with self._sending, self._stream.in_use(), self._closing_on_failure():
            head = self._sealer.seal(payload, bulk_bytes=num_bytes)
            self._stream.write(b"".join(head))
            if num_bytes:
                seal = self._sealer.bulk()
                for view in views:
                    for start in range(0, len(view), PIECE_BYTES):
                        piece = view[start : start + PIECE_BYTES]
                        if pace is not None:
                            pace(len(piece))
                        seal.update(piece)
                        self._stream.write(piece)
                self._stream.write(seal.tag())

    def receive(self, timeout_s: float | None = None) -> bytes | None:
        """The next message's payload; None when the other side has closed the connection.

        Bulk of the message before must have been taken.

        Raises:
            TimeoutError: nothing came for ``timeout_s``; the channel is as good as before.
            SealError: something came that is not the next message; CutShort if half of one.
            OSError: the connection is gone.
        """
        if self.bulk_bytes:
            raise ValueError("take the bulk of the last message first")
        with self._receiving, self._stream.in_use():
            raw = memoryview(bytearray(HEAD_BYTES))
            count = self._begin(raw, timeout_s)
            if not count:
                return None
            with self._closing_on_failure():
                self._fill(raw[count:])
                head = self._unsealer.head(raw)
                payload = b""
                if head.payload_bytes:
                    sealed = memoryview(self._read(head.payload_bytes + TAG_BYTES))
                    payload = bytes(sealed[: head.payload_bytes])
                    self._unsealer.body(payload, sealed[head.payload_bytes :])
                self.bulk_bytes = head.bulk_bytes
                return payload

    def receive_into(self, view: memoryview, *, pace: Callable[[int], None] | None = None) -> None:
        """Take the last message's bulk, into exactly as large a ``view``.

        What is in ``view`` counts only when this has returned: it is checked as a whole.

        Args:
            view: where to.
            pace: called with a number of bytes before so many are taken.

        Raises:
            SealError: it was altered, or ended early.
            OSError: the connection is gone.
        """
        view = view.cast("B")
        if len(view) != self.bulk_bytes:
            raise ValueError(f"{self.bulk_bytes} bytes come, and there is room for {len(view)}")
        self._take_bulk(lambda done: view[done : done + PIECE_BYTES], pace)

    def discard(self) -> None:
        """Take the last message's bulk and forget it."""
        scrap, total = memoryview(bytearray(min(PIECE_BYTES, self.bulk_bytes))), self.bulk_bytes
        self._take_bulk(lambda done: scrap[: total - done])

    def close(self) -> None:
        """End the connection; a thread that waits on it comes back. Safe to call again."""
        self._stream.close()

    def _take_bulk(
        self, room: Callable[[int], memoryview], pace: Callable[[int], None] | None = None
    ) -> None:
        with self._receiving, self._stream.in_use(), self._closing_on_failure():
            total = self.bulk_bytes
            if not total:
                return
            seal, done = self._unsealer.bulk(), 0
            while done < total:
                piece = room(done)
                if pace is not None:
                    pace(len(piece))
                self._fill(piece)
                seal.update(piece)
                done += len(piece)
            seal.check(self._read(TAG_BYTES))
            self.bulk_bytes = 0

    def _begin(self, view: memoryview, timeout_s: float | None) -> int:
        """The first bytes of a message, for which nobody is in a hurry; 0 at the end."""
        try:
            return self._stream.read_some(view, timeout_s)
        except TimeoutError:
            raise TimeoutError(f"{self.peer} sent nothing for {timeout_s:g} s") from None
        except BaseException:
            self.close()
            raise

    def _read(self, num_bytes: int) -> bytearray:
        data = bytearray(num_bytes)
        self._fill(memoryview(data))
        return data

    def _fill(self, view: memoryview) -> None:
        while view:
            count = self._stream.read_some(view)
            if not count:
                raise CutShort(f"the connection to {self.peer} ended inside a message")
            view = view[count:]

    @contextlib.contextmanager
    def _closing_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.close()
            if isinstance(error, SealError) and not isinstance(error, CutShort):
                raise _refused(self.peer, error) from None
            raise


def _refused(peer: str, error: SealError) -> SealError:
    """The error with the address in it; said once, here."""
    log.warning("refused %s: %s", peer, error.reason)
    told = type(error)(f"{peer} is refused: {error.reason}")
    told.reason = error.reason
    return told


class _SocketStream:
    """A socket, plain or wrapped, on which one thread reads while another writes.

    Nothing blocks inside a call, so that OpenSSL's state, which two threads must not touch at once,
    is locked only for moments.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._touching: contextlib.AbstractContextManager[Any] = (
            threading.Lock() if isinstance(sock, ssl.SSLSocket) else contextlib.nullcontext()
        )
        self._until_s: float | None = None
        self._counting = threading.Lock()
        self._num_users = 0
        self._is_over = False

    @contextlib.contextmanager
    def until(self, until_s: float) -> Iterator[None]:
        """Every wait inside ends at ``until_s`` on the monotonic clock."""
        self._until_s = until_s
        try:
            yield
        finally:
            self._until_s = None

    def read_some(self, view: memoryview, limit_s: float | None = STALL_S) -> int:
        """Some bytes into ``view``: how many; 0 at the end of the stream."""
        return int(self._do(lambda: self.sock.recv_into(view), select.POLLIN, limit_s))

    def write(self, data: Buffer) -> None:
        """All of ``data``."""
        view = memoryview(data)
        while view:
            view = view[self._do(lambda: self.sock.send(view), select.POLLOUT, STALL_S) :]  # noqa: B023

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """The descriptor stays this socket's inside; whoever leaves last closes what is over.

        A number closed under a thread's hands may be another connection's when it writes.
        """
        with self._counting:
            if self._is_over:
                raise ConnectionAbortedError("the channel is closed")
            self._num_users += 1
        try:
            yield
        finally:
            with self._counting:
                self._num_users -= 1
                self._close_if_unused()

    def close(self) -> None:
        """Nothing comes or goes any more; whoever waits comes back."""
        with self._counting:
            if not self._is_over:
                self._is_over = True
                with contextlib.suppress(OSError):
                    # Past the wrapper: an SSLSocket's own takes its state from under the others.
                    socket.socket.shutdown(self.sock, socket.SHUT_RDWR)
            self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._is_over and not self._num_users:
            self.sock.close()

    def _do(self, act: Callable[[], int], event: int, limit_s: float | None) -> int:
        if self._until_s is not None:
            limit_s = max(self._until_s - time.monotonic(), 0.0)
        while True:
            try:
                with self._touching:
                    return act()
            except ssl.SSLWantReadError:
                needed = select.POLLIN
            except ssl.SSLWantWriteError:
                needed = select.POLLOUT
            except ssl.SSLError as error:  # includes an end without a farewell
                raise ConnectionResetError(error.errno, f"TLS ended: {error.reason}") from None
            except BlockingIOError:
                needed = event
            if not self._poll(needed, limit_s):
                raise TimeoutError("the other side neither sent nor took anything in time")

    def _poll(self, event: int, timeout_s: float | None) -> bool:
        poll = select.poll()
        poll.register(self.sock, event)
        return bool(poll.poll(None if timeout_s is None else math.ceil(timeout_s * 1000)))


def _in_words(address: Any) -> str:
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
