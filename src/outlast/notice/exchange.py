"""Ask once, in a bounded time: an HTTP request to a metadata service, or a command.

Guarantees: whatever the other side does, the whole request, from connecting to the last byte of the
answer, ends by one deadline (a socket's timeout alone starts anew with each byte, so a server that
drips could hold us for ever); no more than a given number of bytes is kept; proxies are not used,
whatever the environment says (a proxy would answer for *its* machine); redirects are not followed;
every failure is an OSError that quotes nothing of the answer, which may be a secret.

What can go wrong: a *name* in the address is looked up by the system, in the system's own time.
Metadata services are reached by number.

Rejected: http.client (its parser of mail headers costs more processor time than all the rest, and
that in a thread beside training); one connection for many questions (a service may close it between
two of them, and the time for asking again is gone); urllib (takes proxies from the environment,
follows redirects); a thread that is given up when it takes too long (threads pile up behind a dead
service).

A command: no shell; nothing on its standard input; at most ``max_bytes`` of its output are kept;
when it has ended, or its time is over, its whole process group is killed, so that nothing of it
stays.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple, Protocol, cast
from urllib.parse import urlsplit


class CommandResult(NamedTuple):
    """How a command ended; a negative code is the signal that ended it."""

    code: int
    output: bytes


def run(
    command: Sequence[str],
    *,
    limit_s: float,
    max_bytes: int = 16_384,
    environ: Mapping[str, str] | None = None,
) -> CommandResult:
    """Run ``command`` to its end.

    Args:
        command: the program and its arguments.
        limit_s: after this long it is killed.
        max_bytes: how much of its standard output is kept; the rest is read and dropped.
        environ: its environment; ours by default.

    Raises:
        OSError: it cannot be started.
        TimeoutError: it was still running after ``limit_s``.
    """
    until = time.monotonic() + limit_s
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=None if environ is None else dict(environ),
    ) as process:
        try:
            pipe = cast(IO[bytes], process.stdout).fileno()
            output = _output(process.pid, pipe, until, max_bytes)
        finally:
            # Not reaped yet, so the number is still its own and not another process's.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        return CommandResult(process.wait(), output)


def _output(pid: int, pipe: int, until: float, max_bytes: int) -> bytes:
    """What it writes until it ends; a child that it left behind may hold the pipe open."""
    os.set_blocking(pipe, False)
    kept = bytearray()
    end = os.pidfd_open(pid)
    try:
        waiting = select.poll()
        waiting.register(end, select.POLLIN)
        waiting.register(pipe, select.POLLIN)
        ended = False
        while not ended:
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            ready = dict(waiting.poll(left_s * 1000))
            ended = end in ready
            if pipe in ready and not _read(pipe, kept, max_bytes):
                waiting.unregister(pipe)
        _read(pipe, kept, max_bytes)
    finally:
        os.close(end)
    return bytes(kept)


def _read(pipe: int, kept: bytearray, max_bytes: int) -> bool:
    """Take what is there, one buffer full at most; False at its end."""
    try:
        part = os.read(pipe, 65_536)
    except BlockingIOError:
        return True
    kept += part[: max_bytes - len(kept)]
    return bool(part)


if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_PART_BYTES: Final = 16_384
_HEAD_BYTES: Final = 65_536
_LINE_BYTES: Final = 1024
_HEAD_END: Final = re.compile(rb"\r?\n\r?\n")
_STATUS: Final = re.compile(r"HTTP/1\.[01] +([1-5][0-9]{2})(?: |\r|\Z)")
_LENGTH: Final = re.compile(r"[0-9]{1,18}")
_CHUNK: Final = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;|\r|\Z)")


class HttpResponse(NamedTuple):
    """What the service answered; the names of the headers are in lower case."""

    status: int
    body: bytes
    headers: Mapping[str, str] = MappingProxyType({})


class RequestFunction(Protocol):
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
    ) -> HttpResponse:
        """Send one request."""


def request(
    method: str,
    url: str,
    *,
    headers: Mapping[str, str],
    timeout_s: float,
    max_body_bytes: int,
    body: bytes = b"",
) -> HttpResponse:
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
    target = f"{parts.path}?{parts.query}" if parts.query else parts.path
    given = {"Host": parts.netloc, "Accept-Encoding": "identity", "Connection": "close", **headers}
    if body:
        given["Content-Length"] = str(len(body))
    lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    sent = f"{method} {target} HTTP/1.1\r\n{lines}\r\n".encode("ascii") + body
    try:
        with contextlib.closing(_connect(host, port, deadline)) as sock:
            sock.sendall(sent)
            return _ResponseReader(sock, max_body_bytes).answer()
    except TimeoutError:
        raise TimeoutError(f"no whole answer within {timeout_s:g} s") from None


class _ResponseReader:
    """Reads one answer; it quotes nothing of it."""

    def __init__(self, sock: _BoundedSocket, max_body_bytes: int) -> None:
        self._sock = sock
        self._limit = max_body_bytes
        self._held = b""

    def answer(self) -> HttpResponse:
        status, told = self._head()
        while 100 <= status < 200:  # "go on": the answer follows
            status, told = self._head()
        if status in (204, 304):
            return HttpResponse(status, b"", told)
        if told.get("transfer-encoding", "").lower() == "chunked":
            return HttpResponse(status, self._chunks(), told)
        length = told.get("content-length")
        if length is None:
            return HttpResponse(status, self._rest(), told)
        if not _LENGTH.fullmatch(length):
            raise ConnectionError("the answer is not HTTP (its length is no number)")
        return HttpResponse(status, self._exactly(int(length)), told)

    def _head(self) -> tuple[int, dict[str, str]]:
        while (end := _HEAD_END.search(self._held)) is None:
            if len(self._held) > _HEAD_BYTES:
                raise ConnectionError(f"the answer is not HTTP (no head in {_HEAD_BYTES} bytes)")
            if not self._more():
                what = "it is cut short" if self._held else "nothing came"
                raise ConnectionError(f"the answer is not HTTP ({what})")
        head, self._held = self._held[: end.start()], self._held[end.end() :]
        first, *lines = head.decode("latin-1").split("\n")
        status = _STATUS.match(first)
        if status is None:
            raise ConnectionError("the answer is not HTTP (its first line)")
        pairs = (line.partition(":") for line in lines)
        return int(status[1]), {name.strip().lower(): value.strip() for name, _, value in pairs}

    def _exactly(self, length: int) -> bytes:
        if length > self._limit:
            raise ConnectionError(f"the answer is larger than {self._limit} bytes")
        while len(self._held) < length:
            if not self._more():
                missing = length - len(self._held)
                raise ConnectionError(f"the answer was cut short: {missing} bytes are missing")
        found, self._held = self._held[:length], self._held[length:]
        return found

    def _rest(self) -> bytes:
        while self._more():
            if len(self._held) > self._limit:
                break
        if len(self._held) > self._limit:
            raise ConnectionError(f"the answer is larger than {self._limit} bytes")
        return self._held

    def _chunks(self) -> bytes:
        found = b""
        while True:
            while (end := self._held.find(b"\n")) < 0:
                if len(self._held) > _LINE_BYTES or not self._more():
                    raise ConnectionError("the answer was cut short: a chunk is missing")
            line, self._held = self._held[:end], self._held[end + 1 :]
            size = _CHUNK.match(line)
            if size is None:
                raise ConnectionError("the answer is not HTTP (the size of a chunk)")
            length = int(size[1], 16)
            if len(found) + length > self._limit:
                raise ConnectionError(f"the answer is larger than {self._limit} bytes")
            if not length:
                return found  # what may follow, trailers, tells nothing
            found += self._exactly(length)
            if self._exactly(2) != b"\r\n":
                raise ConnectionError("the answer is not HTTP (the end of a chunk)")

    def _more(self) -> bool:
        part = self._sock.receive()
        self._held += part
        return bool(part)


class _BoundedSocket(socket.socket):
    """A socket whose waits all end by one deadline, however few bytes each of them brings."""

    deadline: float  # on the monotonic clock

    def connect(self, address: Any) -> None:
        self._limit()
        super().connect(address)

    def sendall(self, data: ReadableBuffer, flags: int = 0) -> None:
        self._limit()
        super().sendall(data, flags)

    def receive(self) -> bytes:
        self._limit()
        return super().recv(_PART_BYTES)

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
