"""Starts the process that shows metrics (``outlast.metrics``), and ends it with the job.

Whoever stands first on a machine has one: the agent, or under plain torchrun or python the
machine's first worker. It is started only where ``metrics.port`` or ``metrics.textfile`` is set, or
people are to be told (``tell.urls``). Their addresses are secrets: they pass in the environment,
never in the command line, which everybody on the machine can read.

A thread of its own binds the port, starts the process and says what the process says. Guarantees:
nothing here raises into the job or is waited for by it, but for ``LEAVE_S`` at its end, and
``TELL_S`` more where people are told. A port that is taken is one line, and training goes on; so is
a process that does not stay alive. One that dies is started again: it reads the ledger anew and has
the numbers that it had.

The port is bound here and handed on, so that "taken" is known at once and never twice. Under
torchrun a new attempt is a new worker with a new process: for as long as the one before it may
still hold the port (it ends within half a second), the port is tried again.

Rejected: the name of a free port in a file, where the one that was asked for is taken (the
scraper's own settings would not know it).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib.util
import ipaddress
import os
import socket
import subprocess
import sys
import threading
import time
from typing import Final

import msgspec

from outlast.config import DRILL_VARIABLE, Addresses, Settings, all_addresses, variable_name
from outlast.errors import ConfigError
from outlast.health.watched import Begin
from outlast.ledger.narrator import say
from outlast.prices import NO_PRICES, Prices

BIND_S: Final = 3.0  # for an exporter of the attempt before to let go of the port
BACKLOG: Final = 128
LEAVE_S: Final = 1.0
PAUSE_S: Final = 0.5  # before it is started again, doubled each time that it dies young
PAUSE_MAX_S: Final = 60.0
YOUNG_S: Final = 60.0
YOUNG_MAX: Final = 5  # in a row that die young
TELL_S: Final = 10.0  # at the end, for the last message
TELL_VARIABLE: Final = variable_name("tell.urls")
NO_APPRISE: Final = "messages need apprise, which is not here: pip install apprise"
_LINE_BYTES: Final = 4096


class CadenceSetting(msgspec.Struct, frozen=True, kw_only=True):
    """How often the settings ask for a checkpoint.

    Attributes:
        steps, seconds: ``checkpoint.every``; both None for "auto".
        tiers: tier → it takes every Nth; None where the job chooses.
    """

    steps: int | None = None
    seconds: float | None = None
    tiers: dict[str, int | None] = {}


class TellSetup(msgspec.Struct, frozen=True, kw_only=True):
    """How people are told; where to is a secret, and stands in ``TELL_VARIABLE``.

    Attributes:
        least: the least severity.
        group_s: what happens within it is one message.
        per_hour: messages, at most.
        is_agent: whether the job cannot go on once the process that started it is dead.
    """

    least: str
    group_s: float
    per_hour: int
    is_agent: bool


class ExporterSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What the exporter's process is told at its start.

    Attributes:
        job: the job's id.
        directory: the job's.
        node: this machine's name.
        parent: the process that started it, and with which it ends.
        cadence: how often the settings ask for a checkpoint.
        listener: descriptor of the socket that listens; -1 for none.
        textfile: path of the text file; "" for none.
        prices: of machines.
        tell: how people are told of incidents; None where nobody is.
    """

    job: str
    directory: str
    node: str
    parent: int
    cadence: CadenceSetting
    listener: int = -1
    textfile: str = ""
    prices: Prices = NO_PRICES
    tell: TellSetup | None = None


def cadence_of(settings: Settings) -> CadenceSetting:
    """How often these settings ask for a checkpoint."""
    every = settings.checkpoint_every
    tiers = {tier.name: tier.every for tier in settings.tiers}
    return CadenceSetting(steps=every.steps, seconds=every.seconds, tiers=tiers)


class Exporter:
    """This machine's exporter, as whoever started it deals with it.

    Args:
        settings: the job's; where they ask for no metrics, nothing happens here.
        job: the job's id.
        is_agent: whether the job cannot go on without this process.

    Attributes:
        pid: the exporter's process id, or None while there is none.
    """

    def __init__(self, settings: Settings, job: str, *, is_agent: bool = False) -> None:
        self._is_agent = is_agent
        self._addresses = Addresses()
        self.pid: int | None = None
        self._has_port = True
        self._settings = settings
        self._job = job
        self._lock = threading.Lock()
        self._begin: Begin | None = None
        self._input = -1  # of the process
        self._closing = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Have it started, if it was asked for; returns at once."""
        settings = self._settings
        self._addresses = _to_tell(settings)
        is_wanted = settings.metrics_port or settings.metrics_textfile is not None
        if is_wanted or self._addresses.urls:
            self._thread = threading.Thread(target=self._run, name="outlast-exporter", daemon=True)
            self._thread.start()

    def begin(self, begin: Begin) -> None:
        """Workers have started; never waits."""
        with self._lock:
            self._begin = begin
            self._tell()

    def close(self) -> None:
        """End it; one that does not go, as a stopped one cannot, is killed."""
        self._closing.set()
        for end in (subprocess.Popen.terminate, subprocess.Popen.kill):
            with self._lock:
                if self._process is not None:
                    with contextlib.suppress(OSError):
                        end(self._process)
            if self._thread is not None:
                telling_s = TELL_S if self._addresses.urls else 0.0
                self._thread.join(LEAVE_S + telling_s * (end is subprocess.Popen.terminate))

    def _tell(self) -> None:
        if self._begin is not None and self._input >= 0:
            with contextlib.suppress(OSError):  # it has gone, or does not read: it is only shown
                os.write(self._input, msgspec.json.encode(self._begin) + b"\n")

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        pause_s, young = PAUSE_S, 0
        while not self._closing.is_set():
            begun_s = time.monotonic()
            try:
                listener = self._listen()
            except OSError as error:
                if not self._closing.is_set():
                    say(f"{self._cannot(error)}; training goes on without metrics")
                if not self._addresses.urls or self._closing.is_set():
                    return
                listener, self._has_port = None, False  # people are told all the same
            try:
                last = self._one_life(listener)
            except OSError as error:
                say(f"the metrics' process cannot be started: {error.strerror or error}")
                return
            if self._closing.is_set():
                return
            is_young = time.monotonic() - begun_s < YOUNG_S
            young = young + 1 if is_young else 0
            pause_s = min(pause_s * 2, PAUSE_MAX_S) if is_young else PAUSE_S
            if young >= YOUNG_MAX:
                say(
                    f"the metrics' process does not stay alive here, and is not started again{last}"
                )
                return
            self._closing.wait(pause_s)

    def _cannot(self, error: OSError) -> str:
        port, bind = self._settings.metrics_port, self._settings.metrics_bind
        if error.errno == errno.EADDRINUSE:
            return (
                f"metrics.port {port} on {bind} is taken by another process: set another port, or "
                "OUTLAST_METRICS_PORT for this job alone"
            )
        return f"metrics cannot be shown on {bind} port {port}: {error.strerror or error}"

    def _listen(self) -> socket.socket | None:
        """The port, bound; None where none was asked for.

        Raises:
            OSError: it is taken, or cannot be bound.
        """
        port, bind = self._settings.metrics_port, self._settings.metrics_bind
        if not port or not self._has_port:
            return None
        until_s = time.monotonic() + BIND_S
        family = socket.AF_INET6 if ipaddress.ip_address(bind).version == 6 else socket.AF_INET
        while True:
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind((bind, port))
                sock.listen(BACKLOG)
            except OSError as error:
                sock.close()
                if error.errno != errno.EADDRINUSE or time.monotonic() > until_s:
                    raise
                if self._closing.wait(0.1):
                    raise
            else:
                return sock

    def _one_life(self, listener: socket.socket | None) -> str:
        """One process from its start to its end; what it said last, to go on from a sentence."""
        setup = ExporterSetup(
            job=self._job,
            directory=str(self._settings.dir),
            node=socket.gethostname(),
            parent=os.getpid(),
            cadence=cadence_of(self._settings),
            listener=-1 if listener is None else listener.fileno(),
            textfile=str(self._settings.metrics_textfile or ""),
            prices=self._settings.prices,
            tell=self._tell_setup(),
        )
        with contextlib.ExitStack() as opened:
            handed = []
            if listener is not None:
                opened.enter_context(listener)
                handed.append(listener.fileno())
            process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "outlast.metrics"),
                    msgspec.json.encode(setup).decode(),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=handed,
                start_new_session=True,  # a Ctrl-C is for the training
                cwd="/",
                env=_plain_environment() | {TELL_VARIABLE: " ".join(self._addresses.urls)},
            )
            opened.close()  # what this process forks must not keep the port
            return self._hear_out(process)

    def _tell_setup(self) -> TellSetup | None:
        settings = self._settings
        if not self._addresses.urls:
            return None
        return TellSetup(
            least=settings.tell_least,
            group_s=settings.tell_group_s,
            per_hour=settings.tell_per_hour,
            is_agent=self._is_agent,
        )

    def _hear_out(self, process: subprocess.Popen[bytes]) -> str:
        assert process.stdin is not None  # noqa: S101 - both are pipes
        assert process.stdout is not None  # noqa: S101
        fd = process.stdin.fileno()
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_NONBLOCK)
        with self._lock:
            self._process, self._input = process, fd
            self._tell()
            if self._closing.is_set():  # since the port was bound
                process.terminate()
        self.pid = process.pid
        last = ""
        try:
            for line in iter(lambda: process.stdout.readline(_LINE_BYTES), b""):  # type: ignore[union-attr]
                last = line.decode(errors="replace").strip()
                # A traceback's lines are for the last word alone.
                if last.startswith(("metrics.", "tell.")):
                    say(last)
        finally:
            self.pid = None
            with self._lock:
                self._process, self._input = None, -1
            _end(process)
        return f": {last}" if last else ""


def _to_tell(settings: Settings) -> Addresses:
    """The addresses that people are told at; none, and a line, where they cannot be used."""
    if DRILL_VARIABLE in os.environ:  # what is broken on purpose wakes nobody
        return Addresses()
    try:
        found = all_addresses(settings)
    except ConfigError as error:
        say(f"{error}; training goes on, and nobody is told")
        return Addresses()
    if found.urls and not has_apprise():
        say(f"tell.urls: {NO_APPRISE}; training goes on, and nobody is told")
        return Addresses()
    return found


def has_apprise() -> bool:
    """Whether the library that sends messages is here; it is not imported."""
    return importlib.util.find_spec("apprise") is not None


def _end(process: subprocess.Popen[bytes]) -> None:
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    try:
        process.wait(LEAVE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LEAVE_S)


def _plain_environment() -> dict[str, str]:
    """Without what Prometheus' client library would take for its own mode of several processes."""
    left_out = {"PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"}
    return {name: value for name, value in os.environ.items() if name not in left_out}
