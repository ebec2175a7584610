"""An S3 server of our own (moto, in a process), and a proxy that does what networks do.

The server keeps objects as the real one does, conditional puts and multipart uploads included; its
own tests are moto's affair. The proxy stands between it and us and injects faults, each a small
object that says which requests it meets, and how often.
"""

from __future__ import annotations

import contextlib
import http.client
import http.server
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import dataclass, field

LIMIT_S = 60.0
_SERVE = """
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(*server.get_host_and_port(), flush=True)
import sys
sys.stdin.read()  # until whoever started us closes it, or dies
"""


class BucketServer:
    """moto in a process of its own, which ends with ours."""

    def __init__(self):
        environ = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environ,
        )
        for line in self._process.stdout:
            if line.startswith("127.0.0.1 "):
                self.address = (line.split()[0], int(line.split()[1]))
                break
        else:
            raise AssertionError(f"moto ended with {self._process.wait(LIMIT_S)}")
        self.url = "http://{}:{}".format(*self.address)

    @property
    def cpu_s(self):
        """Processor time that the server has used."""
        import psutil

        times = psutil.Process(self._process.pid).cpu_times()
        return times.user + times.system

    def make_bucket(self, name):
        self.ask("PUT", f"/{name}")

    def ask(self, method, path):
        """A request that nobody signs and no proxy sees."""
        request = urllib.request.Request(self.url + path, method=method)
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            return answer.read().decode()

    def uploads(self, bucket):
        """Keys of the multipart uploads that were neither completed nor aborted."""
        return re.findall(r"<Key>([^<]*)</Key>", self.ask("GET", f"/{bucket}?uploads"))

    def close(self):
        self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(LIMIT_S)
        self._process.stdout.close()


@dataclass
class Fault:
    """What befalls requests whose ``METHOD path`` is found by ``where``; ``times`` times.

    Attributes:
        where: a regular expression.
        times: how many requests it meets; the rest go through.
        skip: how many requests it lets through before.
        name: in ``Proxy.seen``.
    """

    where: str = ""
    times: int = 10**9
    skip: int = 0
    name: str = field(default="", init=False)

    def meets(self, line):
        if not re.search(self.where, line) or self.times <= 0:
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        self.times -= 1
        return True

    def befall(self, exchange):
        raise NotImplementedError


@dataclass
class Answer(Fault):
    """The server answers this instead."""

    status: int = 503
    code: str = "SlowDown"

    def befall(self, exchange):
        exchange.read_body()
        body = f"<Error><Code>{self.code}</Code><Message>no</Message></Error>".encode()
        exchange.answer(self.status, {"Content-Type": "application/xml"}, body)


@dataclass
class CutRequest(Fault):
    """The connection is reset after so many bytes of the request's body."""

    after: int = 0

    def befall(self, exchange):
        exchange.rfile.read(min(self.after, exchange.length))
        exchange.reset()


@dataclass
class CutAnswer(Fault):
    """The connection is reset after so many bytes of the answer's body."""

    after: int = 0

    def befall(self, exchange):
        status, headers, body = exchange.forward()
        exchange.answer(status, headers, body, only=self.after)
        exchange.reset()


@dataclass
class LoseAnswer(Fault):
    """The server does what it was asked, and nobody hears of it."""

    def befall(self, exchange):
        exchange.forward()
        exchange.reset()


@dataclass
class DoneAnd500(Fault):
    """The server does what it was asked, and a machine before it answers 500."""

    def befall(self, exchange):
        exchange.forward()
        exchange.answer(500, {}, b"")


@dataclass
class Delay(Fault):
    """The answer takes this long."""

    delay_s: float = 0.0

    def befall(self, exchange):
        time.sleep(self.delay_s)
        exchange.answer(*exchange.forward())


@dataclass
class Silence(Fault):
    """The connection is taken, and nothing comes for as long as the proxy stands."""

    def befall(self, exchange):
        exchange.proxy.closing.wait(LIMIT_S)
        exchange.reset()


class Proxy:
    """Between us and the server; ``faults`` are tried in order, ``seen`` says what happened."""

    def __init__(self, upstream):
        self.upstream = upstream
        self.faults = []
        self.seen = []  # ("PUT /bucket/key", name of the fault or "", monotonic time)
        self.closing = threading.Event()
        self._lock = threading.Lock()
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Exchange)
        self._server.daemon_threads = True
        self._server.proxy = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def fault_for(self, line):
        with self._lock:
            fault = next((fault for fault in self.faults if fault.meets(line)), None)
            self.seen.append((line, type(fault).__name__ if fault else "", time.monotonic()))
            return fault

    def lines(self, name=None):
        """What was asked; with ``name``, only what met that fault ("" for none)."""
        return [line for line, fault, _ in self.seen if name is None or fault == name]

    def close(self):
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(LIMIT_S)


class _Exchange(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = LIMIT_S

    def _serve(self):
        self.proxy = self.server.proxy
        self.length = int(self.headers.get("Content-Length") or 0)
        fault = self.proxy.fault_for(f"{self.command} {self.path}")
        if fault is not None:
            fault.befall(self)
        else:
            self.answer(*self.forward())

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve  # noqa: N815

    def read_body(self):
        body = self.rfile.read(self.length)
        if len(body) < self.length:  # the server would wait for the rest
            raise ConnectionResetError("they went away in the middle of a request")
        return body

    def forward(self):
        connection = http.client.HTTPConnection(*self.proxy.upstream, timeout=LIMIT_S)
        with contextlib.closing(connection):  # a server that is slow, or gone, leaves no socket
            return self._forward(connection)

    def _forward(self, connection):
        connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() != "connection":
                connection.putheader(name, value)
        connection.endheaders(self.read_body())
        with connection.getresponse() as answer:
            headers = {
                name: value
                for name, value in answer.getheaders()
                if name.lower() not in {"connection", "transfer-encoding", "date", "server"}
            }
            return answer.status, headers, answer.read()

    def answer(self, status, headers, body, only=None):
        self.send_response(status)
        lengths = [value for name, value in headers.items() if name.lower() == "content-length"]
        headers = {n: v for n, v in headers.items() if n.lower() != "content-length"}
        length = lengths[0] if lengths and self.command == "HEAD" else len(body)
        for name, value in {**headers, "Content-Length": str(length)}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body if only is None else body[:only])
        self.wfile.flush()

    def reset(self):
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        # rfile and wfile hold the socket too; a reset is sent when the last of them is closed.
        self.close_connection = True
        self.wfile.close()
        self.rfile.close()
        self.connection.close()

    def finish(self):
        with contextlib.suppress(OSError, ValueError):
            super().finish()

    def handle_one_request(self):
        try:
            super().handle_one_request()
        except (OSError, ValueError):  # they went away, or we reset them
            self.close_connection = True

    def log_message(self, *_):
        pass
