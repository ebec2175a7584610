"""Ask for notices in a loop, in a bounded time, without raising; pass each one on once.

``NoticeSource`` is one source of notices, ``WatchThread`` asks it, ``request`` and ``run`` are one
HTTP request and one command, ``MetadataWatcher`` and ``SessionToken`` are what the clouds' metadata
services share.

Guarantees:

- Whatever goes wrong in a poll is counted, kept in words, and is not a notice. People are warned
  once: a service that is away for an hour must not fill the log.
- The same notice (event, action, deadline, early or not) is passed on once, however often it is
  said. Nothing that the source or the receiver raises ends the watching. Polls start ``interval_s``
  apart, after errors too (no back-off: a notice is 120 s long and comes when services are busiest).
- A whole request, from connecting to the last byte of the answer, ends by one deadline. (A socket's
  timeout starts anew with each byte, so a server that drips could hold us for ever.) A bounded
  number of bytes is kept. Proxies are not used, whatever the environment says: a proxy would answer
  for *its* machine. Redirects are not followed. Each failure is an OSError that quotes nothing of
  the answer, which may be a secret; a token is in no log and no error.
- A command runs without a shell and with nothing on its standard input. When it has ended, or its
  time is over, its whole process group is killed.
- A metadata service's address is checked once, where it comes in. A time that cannot be meant is
  not believed.

What can go wrong: a poll that is under way when ``stop`` is called is not cut short; its thread is
a daemon, and what it hears then is not passed on. A source that says of itself that it ``hangs``
(its questions are answered when there is something to say) is not waited for. A *name* in an
address is looked up by the system, in the system's own time; metadata services are reached by
number. In a container behind a bridge EC2's and Alibaba's hop limit of 1 swallows the token's
answer, so every poll times out (Alibaba's only where tokens are required); ``last_error`` says so.
Raise the hop limit to 2.

Rejected: http.client (its parser of mail headers costs more processor time than all the rest, in a
thread beside training); one connection for many questions (a service may close it between two of
them, and the time for asking again is gone); urllib (takes proxies from the environment, follows
redirects); a thread that is given up when it takes too long (threads pile up behind a dead
service).
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import select
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from datetime import UTC, datetime
from types import MappingProxyType
from typing import (
    IO,
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Final,
    NamedTuple,
    Protocol,
    TypeVar,
    cast,
)
from urllib.parse import urlsplit

import msgspec

from outlast.config import parse_address
from outlast.errors import ConfigError
from outlast.notice import Notice, Watcher

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

logger = logging.getLogger(__name__)

_REMEMBERED: Final = 100  # a platform gives a machine one or two


class NotUnderstoodError(Exception):
    """The source answered, but not with what it documents."""


class NoticeSource:
    """One source of notices; a platform's own says in ``_ask`` how it is asked.

    Args:
        place: where it is, in words that begin each of its errors.
        clock: seconds since the epoch.

    Attributes:
        name: what people call it, such as "aws".
        polls: how often it was asked.
        errors: how many of these polls got no answer that could be understood.
        last_error: the last of them in words, or "".
    """

    name = ""

    def __init__(self, place: str, clock: Callable[[], float] = time.time) -> None:
        self.place = place
        self.polls = 0
        self.errors = 0
        self.last_error = ""
        self._warned = False
        self._clock = clock
        self._heard: dict[object, Notice] = {}  # what was said → the notice it was

    def poll(self) -> Notice | None:
        """Ask once; never raises, see :class:`outlast.notice.Watcher`."""
        self.polls += 1
        try:
            return self._ask()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is not a notice
            self._count(error)
            return None

    def _ask(self) -> Notice | None:
        """Ask once; whatever is raised counts as an error."""
        raise NotImplementedError

    def _once(
        self,
        said: Hashable,
        *,
        action: str,
        deadline_t: float | None,
        detail: str,
        early: bool = False,
        event: str = "",
        heard_t: float | None = None,
    ) -> Notice:
        """The notice for what was ``said``.

        Said again, it is the notice that was heard first: when it was heard, and a deadline that
        was reckoned from then, must not move.
        """
        if said not in self._heard:
            if len(self._heard) >= _REMEMBERED:
                self._heard.clear()
            self._heard[said] = Notice(
                source=self.name,
                action=action,
                deadline_t=deadline_t,
                heard_t=self._clock() if heard_t is None else heard_t,
                detail=detail,
                early=early,
                event=event,
            )
        return self._heard[said]

    def _count(self, error: Exception, *, quiet: bool = False) -> None:
        self.errors += 1
        self.last_error = f"{self.place}: {error or type(error).__name__}"
        level = logging.DEBUG if quiet or self._warned else logging.WARNING
        self._warned = self._warned or not quiet
        logger.log(level, "no notice can be heard, asking again: %s", self.last_error)


def iso_utc(t: float) -> str:
    """``t`` for people, such as 2017-09-18T08:22:00+00:00."""
    return datetime.fromtimestamp(int(t), UTC).isoformat()


_JOIN_S: Final = 1.5


class WatchThread:
    """Polls ``watcher`` in a thread of its own.

    Args:
        watcher: whom to ask.
        on_notice: called in that thread, once for each distinct notice.
        interval_s: seconds from the start of one poll to the start of the next.
    """

    def __init__(
        self, watcher: Watcher, on_notice: Callable[[Notice], None], interval_s: float = 1.0
    ) -> None:
        self._watcher = watcher
        self._on_notice = on_notice
        self._interval_s = interval_s
        self._passed_on: deque[tuple[str, str, float | None, bool]] = deque(maxlen=_REMEMBERED)
        self._raised = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"outlast-notice-{watcher.name}", daemon=True
        )

    def start(self) -> None:
        """Start polling, with a first poll at once."""
        self._thread.start()

    def stop(self) -> None:
        """Stop polling; returns when the thread has ended, or after 1.5 s if a poll is slower.

        The thread of a watcher that hangs is not waited for.

        It may be called from ``on_notice``, more than once, and before ``start``.
        """
        self._stopping.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(0.0 if getattr(self._watcher, "hangs", False) else _JOIN_S)

    def check(self) -> None:
        """Poll once and pass on what is new; what the thread does each time."""
        try:
            notice = self._watcher.poll()
        except Exception:
            if not self._raised:
                logger.exception("the %s watcher raised: a bug; polling on", self._watcher.name)
            self._raised = True
            return
        if notice is None or self._stopping.is_set():
            return
        key = notice.event, notice.action, notice.deadline_t, notice.early
        if key in self._passed_on:
            return
        self._passed_on.append(key)
        try:
            self._on_notice(notice)
        except Exception:
            logger.exception("a notice was heard, its receiver failed: %s", notice.detail)

    def _run(self) -> None:
        due = time.monotonic()
        while not self._stopping.is_set():
            self.check()
            # A poll that took longer than the interval is not made up for.
            due = max(due + self._interval_s, time.monotonic())
            self._stopping.wait(due - time.monotonic())


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


LONGEST_TIMEOUT_S: Final = 2.0
# Word of another year comes from an emulator's zero time or a broken service, not from a cloud.
PLAUSIBLE_S: Final = 86_400.0
_TOKEN_TTL_S: Final = 21_600
_TOKEN_RENEWED_AFTER_S: Final = _TOKEN_TTL_S - 600
# What goes back to the service in a header: nothing that could break out of it.
_TOKEN: Final = re.compile(rb"[A-Za-z0-9+/=_-]{8,1024}")
# A name, or a path that ends with it, as Google's.
_KIND: Final = re.compile(r"(?:[A-Za-z0-9-]+/){0,8}[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_DOCUMENT = TypeVar("_DOCUMENT")

Moment = Annotated[datetime, msgspec.Meta(tz=True)]


class MetadataWatcher(NoticeSource):
    """Asks a metadata service over HTTP.

    Args:
        base_url: the service's address, ``http://HOST[:PORT]``.
        timeout_s: limit on each whole request, at most 2 s.
        clock: seconds since the epoch.
        max_body_bytes: the largest answer that is believed.
        send: sends one request; replaced in tests.

    Attributes:
        kind_path: where the service says what kind of machine this is.

    Raises:
        ConfigError: an address or a timeout that cannot be used.
    """

    kind_path: ClassVar[str] = ""

    def __init__(
        self,
        base_url: str,
        timeout_s: float = 1.0,
        clock: Callable[[], float] = time.time,
        max_body_bytes: int = 16_384,
        send: RequestFunction = request,
    ) -> None:
        if not 0 < timeout_s <= LONGEST_TIMEOUT_S:
            raise ConfigError(f"a timeout of {timeout_s:g} s cannot be used; write up to 2 s")
        self.base_url = parse_address(base_url)
        super().__init__(self.base_url, clock)
        self._timeout_s = timeout_s
        self._max_body_bytes = max_body_bytes
        self._send = send

    def answers(self) -> bool:
        """Whether it is this platform that answers there; if not, ``last_error`` says why."""
        try:
            self._greet()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is not an answer
            self._count(error, quiet=True)  # whoever asks says what they make of it
            return False
        return True

    def machine_kind(self) -> str:
        """What kind of machine this is, as its platform calls it; "" where it does not say.

        It takes as long as a few requests may, and never raises.
        """
        if not self.kind_path:
            return ""
        try:
            text = said(self._about(self.kind_path))
            if text and not _KIND.fullmatch(text):
                raise NotUnderstoodError("asked what kind of machine this is, it said no name")
            return text.rpartition("/")[2]
        except Exception as error:  # noqa: BLE001 - whatever it is, it is not an answer
            self._count(error, quiet=True)
            return ""

    def _about(self, path: str) -> HttpResponse:
        """Ask what the service says of the machine."""
        return self._request("GET", path, {})

    def _greet(self) -> None:
        """Ask what only this platform answers, in at most two requests, or raise."""
        raise NotImplementedError

    def _request(
        self,
        method: str,
        target: str,
        headers: dict[str, str],
        *,
        timeout_s: float | None = None,
        body: bytes = b"",
    ) -> HttpResponse:
        return self._send(
            method,
            self.base_url + target,
            headers=headers,
            timeout_s=self._timeout_s if timeout_s is None else timeout_s,
            max_body_bytes=self._max_body_bytes,
            **({"body": body} if body else {}),
        )

    def _plausible(self, t: float, *, past_s: float = PLAUSIBLE_S) -> float:
        """``t``, if it can be meant: at most a day ahead and ``past_s`` ago."""
        if not -past_s <= t - self._clock() <= PLAUSIBLE_S:
            when = time.strftime("%Y-%m-%d", time.gmtime(max(t, -6e10)))
            raise NotUnderstoodError(f"its notice is for {when}, not for today")
        return t


class TokenHeaders(NamedTuple):
    """What a platform calls the headers of its session tokens."""

    ttl: str
    token: str


class SessionToken:
    """A token that the service gives for a while and wants to see in each question.

    Args:
        ask: sends a request: method, path, headers.
        path: where tokens are given.
        headers: the platform's names.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        ask: Callable[[str, str, dict[str, str]], HttpResponse],
        path: str,
        headers: TokenHeaders,
        clock: Callable[[], float],
    ) -> None:
        self._ask = ask
        self._path = path
        self._headers = headers
        self._clock = clock
        self._token = ""
        self._given_t = 0.0

    def header(self) -> dict[str, str]:
        """What goes with a question; asks for a token where there is none, or an old one."""
        age_s = self._clock() - self._given_t
        # An age below 0 means that the clock was set back: how old the token is, is not known.
        if not self._token or not 0 <= age_s < _TOKEN_RENEWED_AFTER_S:
            self.renew()
        return {self._headers.token: self._token}

    def forget(self) -> None:
        """Ask for another one next time."""
        self._token = ""

    def renew(self) -> None:
        """Ask for another one now.

        Raises:
            TokenRefusedError: the service answered, and gave none.
            NotUnderstoodError: what it gave is no token.
        """
        asked_t = self._clock()
        answer = self._ask("PUT", self._path, {self._headers.ttl: str(_TOKEN_TTL_S)})
        if answer.status != 200:
            raise TokenRefusedError(answer.status)
        if not _TOKEN.fullmatch(answer.body):
            raise NotUnderstoodError("asked for a token, it answered something else")
        self._token = answer.body.decode("ascii")
        self._given_t = asked_t


class TokenRefusedError(NotUnderstoodError):
    """The service gave no token; ``status`` is what it answered."""

    def __init__(self, status: int) -> None:
        super().__init__(f"asked for a token, it answered status {status}")
        self.status = status


class TokenWatcher(MetadataWatcher):
    """One whose service gives session tokens, at the path where EC2's does.

    Attributes:
        address: of the service, where no other is given.
        token_headers: what it calls its tokens' headers.
    """

    address: ClassVar[str]
    token_headers: ClassVar[TokenHeaders]

    def __init__(
        self,
        base_url: str | None = None,
        timeout_s: float = 1.0,
        clock: Callable[[], float] = time.time,
        max_body_bytes: int = 16_384,
        send: RequestFunction = request,
    ) -> None:
        super().__init__(
            self.address if base_url is None else base_url, timeout_s, clock, max_body_bytes, send
        )
        self._token = SessionToken(self._request, "/latest/api/token", self.token_headers, clock)

    def loses_tokens(self) -> bool:
        """Whether the service answers here, and only the answers that hold a token do not come.

        EC2 and Alibaba send these with a hop limit of 1 unless told otherwise, so that they do not
        come as far as a container behind a bridge; other answers do. At most three requests.
        """
        try:
            self._token.renew()
        except TimeoutError:
            with contextlib.suppress(OSError):
                self._request("GET", "/latest/meta-data/", {})
                return True
        except Exception:  # noqa: BLE001 - it answers, or nobody does
            return False
        return False


def said(answer: HttpResponse) -> str:
    """What is in a plain answer; "" for nothing, also where 404 says so.

    Raises:
        NotUnderstoodError: another status.
    """
    if answer.status not in (200, 404):
        raise NotUnderstoodError(f"asked for a notice, it answered status {answer.status}")
    return answer.body.decode("ascii", "replace").strip() if answer.status == 200 else ""


def understood(answer: HttpResponse, kind: type[_DOCUMENT]) -> _DOCUMENT:
    """The JSON document in an answer.

    Raises:
        NotUnderstoodError: another status than 200, or not such a document.
    """
    if answer.status != 200:
        raise NotUnderstoodError(f"asked for a notice, it answered status {answer.status}")
    try:
        return msgspec.json.decode(answer.body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise NotUnderstoodError(f"its notice cannot be read: {error}") from None
