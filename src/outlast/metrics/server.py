"""The port: HTTP for one scraper, which stands whatever else comes to it.

One thread, no connection of which is waited for. Guarantees: at most ``MOST`` connections are held,
each for ``LIMIT_S`` at most and with ``REQUEST_BYTES`` of request; when all are taken, the one that
has been silent for longest goes, so that a crowd that says nothing keeps no scraper out. A request
that is not HTTP is answered with 400 and closed. Each connection has one request.

What can go wrong: a crowd that asks as quickly as it is answered gets the same text again and
again, and a core's share of the lowest priority.

On a loopback address a request that names another host is refused: a web page that is open in a
browser here could have its own name resolved to this address, and would read what the job says. On
any other address the owner has opened the port to a network, and its names are not known here.

Rejected: ``http.server`` with threads (a thread for each of a thousand, and no limit of the time
that a request may take to arrive); TLS and passwords (Prometheus' own way is a proxy; the port is
bound to loopback unless the owner says otherwise).
"""

from __future__ import annotations

import contextlib
import ipaddress
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

MOST: Final = 64
LIMIT_S: Final = 10.0
REQUEST_BYTES: Final = 16 << 10
ACCEPT_MOST: Final = 32  # of those that wait, in one turn
_END: Final = b"\r\n\r\n"
_METHODS: Final = (b"GET", b"HEAD")


class Answer(NamedTuple):
    """What is sent back: status line, content type, body."""

    status: str
    kind: str
    body: bytes


class MetricsRequest(NamedTuple):
    """A request that was understood: its path without the query, what it accepts, whom it names."""

    path: str
    accept: str
    hosts: tuple[str, ...] = ()


Page = Callable[[MetricsRequest], Answer]


def plain(status: str, words: str) -> Answer:
    """An answer of one line."""
    return Answer(status, "text/plain; charset=utf-8", words.encode() + b"\n")


class _Caller:
    """One connection: what has come of its request, what is left of its answer."""

    def __init__(self, sock: socket.socket, now_s: float) -> None:
        self.sock = sock
        self.began_s = self.heard_s = now_s
        self.request = b""
        self.left = b""

    @property
    def is_answering(self) -> bool:
        return bool(self.left)


class MetricsServer:
    """Answers on a socket that listens already.

    Args:
        listener: bound and listening; closed with the server.
        pages: path → what answers it. A further page is one more entry.
    """

    def __init__(self, listener: socket.socket, pages: Mapping[str, Page]) -> None:
        self._listener = listener
        self._pages = pages
        self._is_private = _is_loopback(listener.getsockname()[0])
        self._selector = selectors.DefaultSelector()
        self._open: dict[int, _Caller] = {}
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def turn(self, wait_s: float) -> None:
        """Do what is there to be done, and wait for it for at most so long."""
        for key, _ in self._selector.select(wait_s):
            if key.fileobj is self._listener:
                self._accept()
            elif (found := self._open.get(key.fd)) is not None:
                self._go_on(found)
        late_s = time.monotonic() - LIMIT_S
        for found in [one for one in self._open.values() if one.began_s < late_s]:
            self._close(found)

    def close(self) -> None:
        """Close all connections and the port."""
        for found in list(self._open.values()):
            self._close(found)
        self._selector.close()
        self._listener.close()

    def _accept(self) -> None:
        for _ in range(ACCEPT_MOST):
            try:
                sock, _ = self._listener.accept()
            except OSError:  # nobody waits any more, or has gone meanwhile
                return
            if len(self._open) >= MOST:
                quiet = min(self._open.values(), key=lambda one: (one.is_answering, one.heard_s))
                self._close(quiet)
            sock.setblocking(False)
            found = self._open[sock.fileno()] = _Caller(sock, time.monotonic())
            self._selector.register(sock, selectors.EVENT_READ)
            self._go_on(found)  # most have sent their request by now

    def _go_on(self, found: _Caller) -> None:
        try:
            if found.left:
                self._send(found)
            else:
                self._read(found)
        except BlockingIOError:
            return
        except OSError:
            self._close(found)

    def _read(self, found: _Caller) -> None:
        data = found.sock.recv(REQUEST_BYTES)
        if not data:
            self._close(found)
            return
        found.heard_s = time.monotonic()
        found.request += data
        if _END in found.request or _is_bad(found.request):
            found.left = self._answer(found.request)
            self._selector.modify(found.sock, selectors.EVENT_WRITE)
            self._send(found)

    def _send(self, found: _Caller) -> None:
        found.left = found.left[found.sock.send(found.left) :]
        if not found.left:
            with contextlib.suppress(OSError):
                found.sock.shutdown(socket.SHUT_WR)
            self._close(found)

    def _close(self, found: _Caller) -> None:
        if self._open.get(found.sock.fileno()) is found:
            del self._open[found.sock.fileno()]
            self._selector.unregister(found.sock)
        found.sock.close()

    def _answer(self, request: bytes) -> bytes:
        method, asked = _understand(request)
        if asked is None:
            answer = plain("400 Bad Request", "this is not a request for /metrics")
        elif self._is_private and not all(map(_is_loopback, asked.hosts)):
            words = "this port is for this machine alone: ask for localhost or 127.0.0.1"
            answer = plain("421 Misdirected Request", words)
        elif (page := self._pages.get(asked.path)) is None:
            answer = plain("404 Not Found", f"there are: {', '.join(sorted(self._pages))}")
        else:
            try:
                answer = page(asked)
            except Exception as error:  # noqa: BLE001 - the port stays open for the next one
                answer = plain("500 Internal Server Error", f"{type(error).__name__}: {error}")
        head = (
            f"HTTP/1.1 {answer.status}\r\nContent-Type: {answer.kind}\r\n"
            f"Content-Length: {len(answer.body)}\r\nCache-Control: no-store\r\n"
            "X-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + (b"" if method == b"HEAD" else answer.body)


def _is_bad(request: bytes) -> bool:
    """Whether what has come so far can be no request."""
    if len(request) >= REQUEST_BYTES:
        return True
    return not any(one.startswith(request[:4]) or request.startswith(one) for one in _METHODS)


def _is_loopback(host: str) -> bool:
    """Whether a host, with or without a port, is this machine as no name server can redirect it."""
    name = host.strip().lower()
    if name.startswith("["):
        name = name[1:].partition("]")[0]
    elif name.count(":") == 1:
        name = name.partition(":")[0]
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name.removesuffix(".") == "localhost"


def _understand(request: bytes) -> tuple[bytes, MetricsRequest | None]:
    lines = request.partition(_END)[0].split(b"\r\n")
    words = lines[0].split(b" ")
    if _is_bad(request) or len(words) != 3 or not words[2].startswith(b"HTTP/1."):
        return b"", None
    accept, hosts = "", []
    for line in lines[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"accept":
            accept = value.strip().decode("latin-1")
        elif name.strip().lower() == b"host":
            hosts.append(value.strip().decode("latin-1"))
    path = words[1].partition(b"?")[0].decode("latin-1")
    return words[0], MetricsRequest(path, accept, tuple(hosts))
