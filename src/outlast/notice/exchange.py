"""One HTTP request to a metadata service, over in a bounded time whatever the other side does.

Guarantees: the whole request, from connecting to the last byte of the answer, ends by one deadline
(a socket's timeout alone starts anew with each byte, so a server that drips could hold us for
ever); no more than a given number of bytes is kept; proxies are not used, whatever the environment
says (a proxy would answer for *its* machine); redirects are not followed; every failure is an
OSError that quotes nothing of the answer, which may be a secret.

What can go wrong: a *name* in the address is looked up by the system, in the system's own time.
Metadata services are reached by number.

Rejected: urllib (takes proxies from the environment, follows redirects), a thread that is given up
when it takes too long (threads pile up behind a dead service).
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer


class Answer(NamedTuple):
    """What the service answered; the names of the headers are in lower case."""

    status: int
    body: bytes
    headers: Mapping[str, str] = MappingProxyType({})


class Request(Protocol):
    """The shape of :func:`request`, for fakes."""

    def __call__(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str],
        timeout_s: float,
        max_body_bytes: int,
        body: bytes = b"",
    ) -> Answer:
        """Send one request."""


def request(
    method: str,
    url: str,
    *,
    headers: Mapping[str, str],
    timeout_s: float,
    max_body_bytes: int,
    body: bytes = b"",
) -> Answer:
    """Send one request on a fresh connection and read the whole answer.

    Args:
        method: such as ``"GET"``.
        url: an ``http://`` address with its query, checked by the caller.
        headers: sent as they are.
        timeout_s: limit on the whole exchange.
        max_body_bytes: the largest body that is believed.
        body: what is sent; nothing when empty.

    Raises:
        OSError: no connection, no whole answer in time (TimeoutError), an answer that is not HTTP
            or has too large a body.
    """
    deadline = time.monotonic() + timeout_s
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or 80
    connection = http.client.HTTPConnection(host, port)
    try:
        with contextlib.closing(connection):
            connection.sock = _connect(host, port, deadline)
            target = f"{parts.path}?{parts.query}" if parts.query else parts.path
            sent = {**headers, "Connection": "close"}
            connection.request(method, target, body or None, headers=sent)
            response = connection.getresponse()
            answered = response.read(max_body_bytes + 1)
    except TimeoutError:
        raise TimeoutError(f"no whole answer within {timeout_s:g} s") from None
    except http.client.HTTPException as error:
        # Among them RemoteDisconnected, which is an OSError too. The text may quote the answer.
        raise ConnectionError(f"the answer is not HTTP ({type(error).__name__})") from None
    if len(answered) > max_body_bytes:
        raise ConnectionError(f"the answer is larger than {max_body_bytes} bytes")
    if response.length:  # http.client says so only of a read without a limit
        raise ConnectionError(f"the answer was cut short: {response.length} bytes are missing")
    told = {name.lower(): value for name, value in response.getheaders()}
    return Answer(response.status, answered, told)


class _BoundedSocket(socket.socket):
    """A socket whose waits all end by one deadline, however few bytes each of them brings."""

    deadline: float  # on the monotonic clock

    def connect(self, address: Any) -> None:
        self._limit()
        super().connect(address)

    def sendall(self, data: ReadableBuffer, flags: int = 0) -> None:
        self._limit()
        super().sendall(data, flags)

    def recv_into(self, buffer: WriteableBuffer, nbytes: int = 0, flags: int = 0) -> int:
        self._limit()
        return super().recv_into(buffer, nbytes, flags)

    def _limit(self) -> None:
        left_s = self.deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self.settimeout(left_s)


def _connect(host: str, port: int, deadline: float) -> _BoundedSocket:
    problem = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM
    ):
        sock = _BoundedSocket(family, kind, protocol)
        sock.deadline = deadline
        try:
            sock.connect(address)
        except OSError as error:
            sock.close()
            problem = error
        else:
            return sock
    raise problem
