"""EC2's metadata service (IMDSv2) on 127.0.0.1, with notices on demand and faults.

For the demo and for tests, over real HTTP: what is tried against it is the code that will talk to
EC2. Its answers are those that the EC2 user guide documents ("Use IMDSv2", "Spot Instance
interruption notices")::

    with AwsMetadataServer() as server:
        server.inject(AnswerFault(drip_s=0.1), times=1, method="GET")
        server.preempt(in_s=120.0)

``MetadataServer`` is what all such servers share, also those of other clouds in the tests: threads,
faults, a record of the requests. Guarantees: a server listens on the loopback only and asks no name
service; leaving the context cuts short what is slow and joins every thread. A platform's own server
says in ``_correct`` what is answered when nothing is spoiled.
"""

from __future__ import annotations

import base64
import contextlib
import http
import json
import math
import re
import secrets
import socketserver
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from typing import Any, Final, NamedTuple, Self
from urllib.parse import parse_qs

KIND_PATH: Final = "/latest/meta-data/instance-type"
TOKEN_PATH: Final = "/latest/api/token"  # noqa: S105
_MAX_BODY_BYTES: Final = 65_536


class IncomingRequest(NamedTuple):
    """One request as it came in."""

    method: str
    path: str
    query: dict[str, list[str]]
    headers: Message
    body: bytes


class LoggedRequest(NamedTuple):
    """One request that was received, and the status it was answered with (0: none)."""

    method: str
    path: str
    status: int


class MetadataAnswer(NamedTuple):
    """An answer before it is written."""

    status: int
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class AnswerFault:
    """How an answer is spoiled. What is set combines; with nothing set, it is correct.

    Attributes:
        status: answered in place of the right status, with an empty body unless ``body`` is set.
        body: answered in place of the right body; status 200 unless ``status`` is set.
        headers: added where status or body is set, such as a redirect's ``Location``.
        padding_bytes: spaces that follow the body.
        raw: sent in place of any HTTP; ``b""`` closes the connection at once.
        delay_s: how long it takes to begin.
        drip_s: pause before each byte that follows the first ``drip_after_bytes``.
    """

    status: int = 0
    body: bytes | None = None
    headers: tuple[tuple[str, str], ...] = ()
    padding_bytes: int = 0
    raw: bytes | None = None
    delay_s: float = 0.0
    drip_s: float = 0.0
    drip_after_bytes: int = 0

    @property
    def replaces(self) -> bool:
        """Whether the right answer does not matter."""
        return bool(self.status) or self.body is not None or self.raw is not None

    def spoil(self, answer: MetadataAnswer) -> MetadataAnswer:
        """What is answered instead of ``answer``; its status is 0 where it is not HTTP."""
        if self.raw is not None:
            return MetadataAnswer(0, self.raw)
        if self.status or self.body is not None:
            return MetadataAnswer(self.status or 200, self.body or b"", self.headers)
        return answer

    def write(self, raw: bytes, file: BufferedIOBase, closing: threading.Event) -> None:
        """Write ``raw``, the spoiled answer, at this fault's pace; ``closing`` cuts it short."""
        closing.wait(self.delay_s)
        num_at_once = self.drip_after_bytes if self.drip_s else len(raw)
        file.write(raw[:num_at_once])
        for place in range(num_at_once, len(raw)):
            if closing.wait(self.drip_s):
                return
            file.write(raw[place : place + 1])
        file.write(b" " * self.padding_bytes)


class MetadataServer:
    """A service, running in a thread from ``start`` (or entering the context) to ``stop``.

    Args:
        clock: seconds since the epoch, for the expiry of tokens and the time of notices.
        port: where to listen; 0 for any that is free.

    Attributes:
        kind: of the machine, where its services say it; "" for none.
        url: its address, known before it has begun to answer.
        port: where it listens.
    """

    software = "metadata"

    def __init__(self, clock: Callable[[], float] = time.time, port: int = 0) -> None:
        self.kind = ""
        self._clock = clock
        self._changed = threading.Condition()  # held for every look at what is announced
        self._requests: deque[LoggedRequest] = deque(maxlen=100_000)
        self._fault, self._fault_method, self._fault_path = AnswerFault(), "", ""
        self._fault_times = math.inf
        self._http = _MetadataHttpServer(self, port)
        self._thread = threading.Thread(
            target=self._http.serve_forever, args=(0.05,), name="outlast-metadata", daemon=True
        )
        self.port = int(self._http.server_address[1])
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def stop(self) -> None:
        """Stop answering, cut faults and hanging questions short, and join all threads."""
        self._http.closing.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread.is_alive():
            self._http.shutdown()
            self._thread.join()
        self._http.server_close()

    @property
    def closing(self) -> bool:
        """Whether the server is being stopped: nothing may wait any longer."""
        return self._http.closing.is_set()

    @property
    def requests(self) -> list[LoggedRequest]:
        """What was received so far, in the order it was answered."""
        with self._changed:
            return list(self._requests)

    def inject(
        self, fault: AnswerFault, *, times: float = math.inf, method: str = "", path: str = ""
    ) -> None:
        """Spoil the next ``times`` answers of ``method`` or ``path``; ``AnswerFault()`` heals."""
        with self._changed:
            self._fault, self._fault_times = fault, times
            self._fault_method, self._fault_path = method, path

    def answer(self, asked: IncomingRequest) -> tuple[MetadataAnswer, AnswerFault]:
        """Decide and log the answer to one request, and the fault that it meets."""
        with self._changed:
            fault = self._met(asked)
            # What is answered anyway is not waited for, where the right answer would hang.
            answer = fault.spoil(MetadataAnswer(200) if fault.replaces else self._correct(asked))
            self._requests.append(LoggedRequest(asked.method, asked.path, answer.status))
        return answer, fault

    def _met(self, asked: IncomingRequest) -> AnswerFault:
        wanted = (self._fault_method or asked.method, self._fault_path or asked.path)
        if self._fault_times <= 0 or wanted != (asked.method, asked.path):
            return AnswerFault()
        self._fault_times -= 1
        return self._fault

    def _correct(self, asked: IncomingRequest) -> MetadataAnswer:
        """The answer when nothing is spoiled; called with ``_changed`` held."""
        raise NotImplementedError


class Tokens:
    """Session tokens, as EC2 and Alibaba give them out; ``header`` names their lifetime."""

    def __init__(self, header: str, clock: Callable[[], float]) -> None:
        self._header = header
        self._clock = clock
        self._expiries: dict[str, float] = {}  # token → when it expires

    def answer(self, asked: IncomingRequest) -> MetadataAnswer:
        """The answer to a request for a token."""
        if asked.method != "PUT":
            return MetadataAnswer(405, b"", (("Allow", "PUT"),))
        if "X-Forwarded-For" in asked.headers:
            return MetadataAnswer(
                403
            )  # a proxy stands in between: the caller may not be this machine
        ttl = asked.headers.get(self._header, "")
        if not re.fullmatch("[0-9]{1,5}", ttl) or not 1 <= int(ttl) <= 21_600:
            return MetadataAnswer(400)
        now = self._clock()
        self._expiries = {old: t for old, t in self._expiries.items() if t > now}
        token = base64.b64encode(secrets.token_bytes(40)).decode()
        self._expiries[token] = now + int(ttl)
        return MetadataAnswer(200, token.encode(), ((self._header, ttl),))

    def valid(self, token: str) -> bool:
        """Whether ``token`` was given out and is still good."""
        return self._clock() < self._expiries.get(token, -math.inf)

    def expire(self) -> None:
        """Make every token that was given out invalid."""
        self._expiries.clear()


def stamp(t: float) -> str:
    """``t`` as EC2 and Alibaba write it, such as 2017-09-18T08:22:00Z."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(t))


class _MetadataHttpServer(ThreadingHTTPServer):
    daemon_threads = False  # so that server_close joins them
    request_queue_size = 64

    def __init__(self, owner: MetadataServer, port: int) -> None:
        self.owner = owner
        self.closing = threading.Event()
        super().__init__(("127.0.0.1", port), _Handler)

    def server_bind(self) -> None:
        # HTTPServer's own would ask the name service who 127.0.0.1 is.
        socketserver.TCPServer.server_bind(self)


class _Handler(BaseHTTPRequestHandler):
    server: _MetadataHttpServer
    timeout = 2.0  # for a client that connects and says nothing, or does not read
    disable_nagle_algorithm = True

    def handle(self) -> None:
        with contextlib.suppress(OSError):  # the client had waited long enough, and left
            super().handle()

    def _respond(self) -> None:
        path, _, query = self.path.partition("?")
        length = self.headers.get("Content-Length", "0")
        size = int(length) if re.fullmatch("[0-9]{1,6}", length) else 0
        body = self.rfile.read(min(size, _MAX_BODY_BYTES))
        owner = self.server.owner
        answer, fault = owner.answer(
            IncomingRequest(self.command, path, parse_qs(query), self.headers, body)
        )
        raw = _rendered(answer, fault.padding_bytes, owner.software)
        fault.write(raw, self.wfile, self.server.closing)

    do_GET = do_PUT = do_POST = do_DELETE = _respond  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Nothing: ``requests`` is the record."""


def _rendered(answer: MetadataAnswer, padding_bytes: int, software: str) -> bytes:
    if not answer.status:
        return answer.body
    head = (
        f"HTTP/1.1 {answer.status} {http.HTTPStatus(answer.status).phrase}\r\n"
        f"Server: {software}\r\nConnection: close\r\n"
        f"Content-Length: {len(answer.body) + padding_bytes}\r\n"
    )
    head += "".join(f"{name}: {value}\r\n" for name, value in answer.headers)
    return f"{head}\r\n".encode("latin-1") + answer.body


ACTION_PATH: Final = "/latest/meta-data/spot/instance-action"
TIME_PATH: Final = "/latest/meta-data/spot/termination-time"
LIFECYCLE_PATH: Final = "/latest/meta-data/autoscaling/target-lifecycle-state"
REBALANCE_PATH: Final = "/latest/meta-data/events/recommendations/rebalance"


class AwsMetadataServer(MetadataServer):
    """EC2's service; see :class:`MetadataServer`."""

    software = "EC2ws"

    def __init__(self, clock: Callable[[], float] = time.time, port: int = 0) -> None:
        super().__init__(clock, port)
        self._tokens = Tokens("X-aws-ec2-metadata-token-ttl-seconds", clock)
        self._documents: dict[str, bytes] = {}  # path → what it holds now

    def preempt(self, in_s: float = 120.0, action: str = "terminate") -> float:
        """Announce that this machine will go ``in_s`` from now; returns when, since the epoch."""
        deadline_t = float(int(self._clock() + in_s))
        with self._changed:
            said = {"action": action, "time": stamp(deadline_t)}
            self._documents[ACTION_PATH] = json.dumps(said).encode()
            if action == "terminate":
                self._documents[TIME_PATH] = stamp(deadline_t).encode()
        return deadline_t

    def withdraw(self) -> None:
        """Take the announcement back: 404 again."""
        with self._changed:
            self._documents.pop(ACTION_PATH, None)
            self._documents.pop(TIME_PATH, None)

    def only_termination_time(self, value: str) -> None:
        """Say the older form of the notice alone, or what stands there when there is none."""
        with self._changed:
            self._documents.pop(ACTION_PATH, None)
            self._documents[TIME_PATH] = value.encode()

    def set_target_state(self, state: str) -> None:
        """Say what state the machine's Auto Scaling group wants it in, such as "InService"."""
        with self._changed:
            self._documents[LIFECYCLE_PATH] = state.encode()

    def recommend_rebalance(self) -> None:
        """Recommend, from now on, to move work to another machine."""
        with self._changed:
            said = {"noticeTime": stamp(self._clock())}
            self._documents[REBALANCE_PATH] = json.dumps(said).encode()

    def expire_tokens(self) -> None:
        """Make every token that was given out invalid."""
        with self._changed:
            self._tokens.expire()

    def _correct(self, asked: IncomingRequest) -> MetadataAnswer:
        if asked.path == TOKEN_PATH:
            return self._tokens.answer(asked)
        if asked.method != "GET":
            return MetadataAnswer(405, b"", (("Allow", "GET"),))
        if not self._tokens.valid(asked.headers.get("X-aws-ec2-metadata-token", "")):
            return MetadataAnswer(401)
        if asked.path == KIND_PATH and self.kind:
            return MetadataAnswer(200, self.kind.encode())
        document = self._documents.get(asked.path)
        return MetadataAnswer(404) if document is None else MetadataAnswer(200, document)
