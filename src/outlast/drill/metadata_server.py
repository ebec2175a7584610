"""EC2's metadata service (IMDSv2) on 127.0.0.1, with notices on demand and faults.

For the demo and for tests, over real HTTP: what is tried against it is the code that will talk
to EC2. Guarantees: it listens on the loopback only and asks no name service; its answers are those
that the EC2 user guide documents ("Use IMDSv2", "Spot Instance interruption notices"); leaving the
context joins every thread::

    with AwsMetadataServer() as server:
        server.inject(Fault(drip_s=0.1), times=1, method="GET")
        server.preempt(in_s=120.0)
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

TOKEN_PATH: Final = "/latest/api/token"  # noqa: S105
ACTION_PATH: Final = "/latest/meta-data/spot/instance-action"
REBALANCE_PATH: Final = "/latest/meta-data/events/recommendations/rebalance"
_TTL_HEADER: Final = "X-aws-ec2-metadata-token-ttl-seconds"


class Request(NamedTuple):
    """One request that was received, and the status it was answered with (0: none)."""

    method: str
    path: str
    status: int


class Answer(NamedTuple):
    """An answer before it is written."""

    status: int
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Fault:
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

    def spoil(self, answer: Answer) -> Answer:
        """What is answered instead of ``answer``; its status is 0 where it is not HTTP."""
        if self.raw is not None:
            return Answer(0, self.raw)
        if self.status or self.body is not None:
            return Answer(self.status or 200, self.body or b"", self.headers)
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


class AwsMetadataServer:
    """The service, running in a thread from ``start`` (or entering the context) to ``stop``.

    Args:
        clock: seconds since the epoch, for the expiry of tokens and the time of notices.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._tokens: dict[str, float] = {}  # token → when it expires
        self._documents: dict[str, dict[str, str]] = {}  # path → what it holds now
        self._requests: deque[Request] = deque(maxlen=100_000)
        self._fault, self._fault_method, self._fault_times = Fault(), "", math.inf
        self._http = _Server(self)
        self._thread = threading.Thread(
            target=self._http.serve_forever, args=(0.05,), name="outlast-metadata", daemon=True
        )
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Begin to answer; ``url`` is known before."""
        self._thread.start()

    def stop(self) -> None:
        """Stop answering, cut faults short, and join all threads."""
        self._http.closing.set()
        if self._thread.is_alive():
            self._http.shutdown()
            self._thread.join()
        self._http.server_close()

    @property
    def requests(self) -> list[Request]:
        """What was received so far, in the order it was answered."""
        with self._lock:
            return list(self._requests)

    def preempt(self, in_s: float = 120.0, action: str = "terminate") -> float:
        """Announce that this machine will go ``in_s`` from now; returns when, since the epoch."""
        deadline_t = float(int(self._clock() + in_s))
        self._documents[ACTION_PATH] = {"action": action, "time": _stamp(deadline_t)}
        return deadline_t

    def withdraw(self) -> None:
        """Take the announcement back: 404 again."""
        self._documents.pop(ACTION_PATH, None)

    def recommend_rebalance(self) -> None:
        """Recommend, from now on, to move work to another machine."""
        self._documents[REBALANCE_PATH] = {"noticeTime": _stamp(self._clock())}

    def expire_tokens(self) -> None:
        """Make every token that was given out invalid."""
        with self._lock:
            self._tokens.clear()

    def inject(self, fault: Fault, *, times: float = math.inf, method: str = "") -> None:
        """Spoil the next ``times`` answers, of one ``method`` if given; ``Fault()`` heals."""
        with self._lock:
            self._fault, self._fault_times, self._fault_method = fault, times, method

    def answer(self, method: str, path: str, headers: Message) -> tuple[Answer, Fault]:
        """Decide and log the answer to one request, and the fault that it meets."""
        with self._lock:
            fault = Fault()
            if self._fault_times > 0 and self._fault_method in ("", method):
                fault, self._fault_times = self._fault, self._fault_times - 1
            answer = fault.spoil(self._correct(method, path, headers))
            self._requests.append(Request(method, path, answer.status))
        return answer, fault

    def _correct(self, method: str, path: str, headers: Message) -> Answer:
        allowed = "PUT" if path == TOKEN_PATH else "GET"
        if method != allowed:
            return Answer(405, b"", (("Allow", allowed),))
        if path == TOKEN_PATH:
            return self._token(headers)
        expiry_t = self._tokens.get(headers.get("X-aws-ec2-metadata-token", ""))
        if expiry_t is None or self._clock() >= expiry_t:
            return Answer(401)
        document = self._documents.get(path)
        return Answer(404) if document is None else Answer(200, json.dumps(document).encode())

    def _token(self, headers: Message) -> Answer:
        if "X-Forwarded-For" in headers:
            return Answer(403)  # a proxy stands in between: the caller may not be this machine
        ttl = headers.get(_TTL_HEADER, "")
        if not re.fullmatch("[0-9]{1,5}", ttl) or not 1 <= int(ttl) <= 21_600:
            return Answer(400)
        now = self._clock()
        self._tokens = {old: t for old, t in self._tokens.items() if t > now}
        token = base64.b64encode(secrets.token_bytes(40)).decode()
        self._tokens[token] = now + int(ttl)
        return Answer(200, token.encode(), ((_TTL_HEADER, ttl),))


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # so that server_close joins them
    request_queue_size = 64

    def __init__(self, owner: AwsMetadataServer) -> None:
        self.owner = owner
        self.closing = threading.Event()
        super().__init__(("127.0.0.1", 0), _Handler)

    def server_bind(self) -> None:
        # HTTPServer's own would ask the name service who 127.0.0.1 is.
        socketserver.TCPServer.server_bind(self)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 2.0  # for a client that connects and says nothing, or does not read
    disable_nagle_algorithm = True

    def handle(self) -> None:
        with contextlib.suppress(OSError):  # the client had waited long enough, and left
            super().handle()

    def _respond(self) -> None:
        path = self.path.partition("?")[0]
        answer, fault = self.server.owner.answer(self.command, path, self.headers)
        raw = _rendered(answer, fault.padding_bytes)
        fault.write(raw, self.wfile, self.server.closing)

    do_GET = do_PUT = do_POST = do_DELETE = _respond  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Nothing: ``requests`` is the record."""


def _rendered(answer: Answer, padding_bytes: int) -> bytes:
    if not answer.status:
        return answer.body
    head = (
        f"HTTP/1.1 {answer.status} {http.HTTPStatus(answer.status).phrase}\r\n"
        "Server: EC2ws\r\nConnection: close\r\n"
        f"Content-Length: {len(answer.body) + padding_bytes}\r\n"
    )
    head += "".join(f"{name}: {value}\r\n" for name, value in answer.headers)
    return f"{head}\r\n".encode("latin-1") + answer.body


def _stamp(t: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(t))
