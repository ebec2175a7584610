"""Find the keeper, start it, and hold its memory through its death.

The process that starts a keeper (the agent, or a session that has none) stays connected and is sent
every piece of its memory as a descriptor. When the keeper dies it is started again with them, and
finds its committed snapshots. When the holder dies the keeper goes on, finishes what is in flight,
and leaves some seconds later unless a new attempt has come. At the end of a job people are told
which slower tiers it waits for.

The keeper's socket lies in a directory that only its user can enter. A file system that several
machines see is no place for a socket, and its path may be too long for one; so the socket lies in
the user's runtime directory, under a name made from the job's and from the version of what is said
over it. A process of another version finds no keeper there, and starts its own. Which of the two
may commit is settled by the claims of their attempts.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import select
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from outlast.config import Settings
from outlast.errors import ConfigError, OutlastError, StorageError, remedy
from outlast.ipc import peer_credentials
from outlast.keeper import wire
from outlast.keeper.wire import CopyProgress
from outlast.peer import Tls, listen

RUNTIME_VARIABLE: Final = "OUTLAST_RUNTIME_DIR"
BACKLOG: Final = 256
LONGEST: Final = 100  # bytes of a socket's address; the kernel takes 107
LOG_KEPT_S: Final = 7 * 24 * 3600.0
_NAME: Final = re.compile(r"^[0-9a-f]{20}(?:-([0-9a-f]{8}))?\.(sock|lock|log)\Z")
LINGER_S = 20.0


def socket_path(job: str, directory: Path) -> Path:
    """The socket of the keeper for ``job``, whose files lie in ``directory``."""
    whole = os.fsencode(f"{job}\0{directory.resolve()}")
    digest = hashlib.sha256(whole).hexdigest()[:20]
    return runtime_directory() / f"{digest}-{wire.version()}.sock"


def is_foreign(path: Path) -> bool:
    """Whether the keeper of this socket is of another version, by the socket's name."""
    name = _NAME.match(path.name)  # one that somebody has chosen says nothing
    return name is not None and name[1] != wire.version()


def runtime_directory() -> Path:
    """A directory that belongs to this user alone; made if it is not there.

    Raises:
        ConfigError: there is something else under its name.
        StorageError: it cannot be made.
    """
    given = os.environ.get(RUNTIME_VARIABLE)
    base = os.environ.get("XDG_RUNTIME_DIR")
    if given:
        path = Path(given)
    elif base and Path(base).is_dir():
        path = Path(base) / "outlast"
    else:
        path = Path(tempfile.gettempdir()) / f"outlast-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, parents=bool(given), exist_ok=True)
        found = path.lstat()
    except FileExistsError:
        raise ConfigError(f"{path} is in the way of a directory; {_remove_or_set()}") from None
    except OSError as error:
        raise StorageError(
            f"{path}, the directory of the keeper's socket, cannot be made: {error.strerror}; "
            f"mend that, or set {RUNTIME_VARIABLE} to a directory that can be written"
        ) from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"{path} must be a directory of yours that nobody else can enter (mode 700); "
            f"{_remove_or_set()}"
        )
    return path


def _remove_or_set() -> str:
    return f"remove it, or set {RUNTIME_VARIABLE} to another"


def is_ours(sock: socket.socket) -> bool:
    """Whether the process at the other end belongs to this user."""
    return peer_credentials(sock)[1] == os.getuid()


class KeeperListener:
    """The socket at ``path``, which only this user can open.

    Args:
        path: where; what lies there is replaced.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.unlink(missing_ok=True)
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            with _address(path) as address:
                self._server.bind(address)
        finally:
            os.umask(before)
        self._found = path.lstat()
        self._server.listen(BACKLOG)

    def settimeout(self, seconds: float) -> None:
        """How long ``accept`` waits."""
        self._server.settimeout(seconds)

    def accept(self) -> socket.socket:
        """The next connection.

        Raises:
            TimeoutError: none came in time.
        """
        sock, _ = self._server.accept()
        sock.setblocking(True)
        return sock

    def close(self) -> bool:
        """Listen no longer and take everything away; False if somebody is just connecting.

        Whoever looks for a keeper holds the lock while it does: it finds this one, or none.
        """
        with only_one(self._path, wait=False) as alone:
            if not alone or select.select([self._server], [], [], 0)[0]:
                return False
            with contextlib.suppress(OSError):
                if os.path.samestat(self._path.lstat(), self._found):  # or it is a successor's
                    remove(self._path)
        self._server.close()
        return True


def connect(path: Path) -> socket.socket:
    """A connection to the keeper at ``path``.

    Raises:
        OSError: nobody listens there, or somebody else does.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _address(path) as address:
            sock.connect(address)
        if not is_ours(sock):
            raise PermissionError(f"{path} is another user's")
    except OSError:
        sock.close()
        raise
    return sock


@contextlib.contextmanager
def only_one(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold the lock beside the socket at ``path``; without ``wait`` say whether that is possible.

    One at a time looks for the keeper and starts it, or takes away what it left.
    """
    name = path.with_suffix(".lock")
    while True:
        with name.open("ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            # A keeper that leaves takes the file with it: what was waited for may be gone.
            try:
                is_it = os.path.samestat(os.fstat(lock.fileno()), name.stat())
            except FileNotFoundError:
                is_it = False
            if is_it:
                yield True
                return


def remove(path: Path) -> None:
    """Take away a socket and what lies beside it; a log that says something stays for a while."""
    path.unlink(missing_ok=True)
    log = path.with_suffix(".log")
    with contextlib.suppress(OSError):
        found = log.stat()
        if not found.st_size or time.time() - found.st_mtime > LOG_KEPT_S:
            log.unlink()
    path.with_suffix(".lock").unlink(missing_ok=True)


def sweep(ours: Path) -> None:
    """Take away what keepers that were killed have left in the directory of our socket."""
    names = {path.stem for path in ours.parent.glob("*") if _NAME.match(path.name)}
    for name in sorted(names - {ours.stem}):
        path = ours.with_name(f"{name}.sock")
        with contextlib.suppress(OSError), only_one(path, wait=False) as alone:
            if alone and not _answers(path):
                remove(path)


def _answers(path: Path) -> bool:
    try:
        connect(path).close()
    except (ConnectionRefusedError, FileNotFoundError):
        return False
    except OSError:
        return True
    return True


@contextlib.contextmanager
def _address(path: Path) -> Iterator[str]:
    """``path`` in so few characters that a socket can have it as its address."""
    if len(os.fsencode(path)) <= LONGEST:
        yield str(path)
        return
    fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)


class TierSetup(msgspec.Struct, frozen=True, kw_only=True):
    """A durable tier: where it is, and how many checkpoints it keeps."""

    name: str
    url: str
    keep: int


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a keeper needs to know.

    Attributes:
        job: the job's id.
        directory: the job's directory, where the ledger is.
        socket: where it listens.
        tiers: durable ones, the fastest first.
        linger_s: how long it stays when a worker has died and nobody else is connected.
        replicas: how many other machines keep this one's newest snapshot; None: see the policy.
        rate_bytes: how fast it is sent to them at most, per second; None: after the cores.
        claims: where attempts are claimed, a directory or URL; "" where nobody claims them.
        each_step: training waits for the copies of each step: they are sent before all else.
        inherited: arena → descriptor of memory that a predecessor left; 0 is its books.
    """

    job: str
    directory: str
    socket: str
    tiers: tuple[TierSetup, ...]
    linger_s: float = LINGER_S
    replicas: int | None = None
    rate_bytes: float | None = None
    claims: str = ""
    each_step: bool = False
    inherited: dict[int, int] = {}


def encode_setup(setup: Setup) -> bytes:
    """What ``decode_setup`` reads; a path may be in any encoding, which msgspec would refuse."""
    return json.dumps(msgspec.to_builtins(setup, str_keys=True)).encode()


def decode_setup(data: bytes) -> Setup:
    """The setup in ``data``."""
    return msgspec.convert(json.loads(data), Setup, str_keys=True)


def setup_of(settings: Settings, job: str, of: str = "", claims: str = "") -> Setup:
    """The keeper of a job with these settings.

    Args:
        settings: the job's.
        job: its id.
        of: what tells apart keepers of one job on one machine: each agent has its own.
        claims: where attempts are claimed; "" where nobody claims them.

    Raises:
        ConfigError: there is no place for its socket.
    """
    tiers = tuple(
        TierSetup(name=tier.name, url=tier.url, keep=tier.keep)
        for tier in settings.tiers
        if tier.kind != "memory"
    )
    return Setup(
        job=job,
        directory=str(settings.dir),
        socket=str(socket_path(job + of, Path(settings.dir))),
        tiers=tiers,
        replicas=settings.peer_replicas,
        claims=claims,
        rate_bytes=settings.peer_rate_bytes,
        each_step=settings.checkpoint_each_step,
    )


logger = logging.getLogger(__name__)

WAIT_FIRST_S: Final = 2.0
WAIT_EVERY_S: Final = 5.0
SOCKET_VARIABLE: Final = "OUTLAST_KEEPER"  # the keeper's socket, set by our agent
START_TIMEOUT_S: Final = 30.0
PAUSE_S: Final = 0.05  # before another try; twofold each time, where keepers do not live
PAUSE_MAX_S: Final = 30.0
LIVED_S: Final = 2.0  # after which a death says nothing about the next keeper
HURRY_S: Final = 0.2  # between two questions whether there is less time than was thought
LEAVING_S: Final = 5.0  # that a keeper may take beyond its time
_LOOK_S: Final = 0.01
_left: Final[list[subprocess.Popen[bytes]]] = []  # keepers on their own, to be reaped


class TierWaits:
    """Says what the end of a job waits for: slower tiers that do not have everything yet.

    Args:
        say: tells people.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._told_s = 0.0
        self._first: tuple[float, int] | None = None  # when, and how many bytes were done

    def tell(self, progress: CopyProgress) -> None:
        """Say it after two seconds, and then every five, with the time that is left."""
        now = time.monotonic()
        if not progress.words:
            return
        self._first = self._first or (now, progress.done_bytes)
        if now - self._first[0] < WAIT_FIRST_S or now - self._told_s < WAIT_EVERY_S:
            return
        self._told_s = now
        done = progress.done_bytes - self._first[1]
        left = progress.total_bytes - progress.done_bytes
        rate = done / max(now - self._first[0], 0.001)
        time_left = f", {in_short(left / rate)} left" if done > 0 else ""
        self._say(
            f"bringing the newest checkpoint to {progress.words}: "
            f"{progress.done_bytes / 1e9:.2f} of {progress.total_bytes / 1e9:.2f} GB{time_left}"
        )


def in_short(seconds: float) -> str:
    """Seconds as a person says them."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


@atexit.register
def _disown() -> None:
    for process in _left:  # it ends after us, which is no mistake
        process.returncode = process.poll() or 0


class _Died(Exception):
    """A keeper has died, or did not move, before it answered: the next one may live."""


class Supervisor:
    """Keeps a keeper alive and holds its memory.

    A keeper may die at any moment, in its start-up too: another one is started, however often, and
    whoever waits for it trains meanwhile. Only what no other keeper would find better, as a
    directory that cannot be used, is an error.

    Args:
        setup: the keeper's.
        on_progress: told what is still being copied while ``close`` waits.
        on_gap: told, once there is a keeper again, why there was none and for how many seconds.
    """

    def __init__(
        self,
        setup: Setup,
        on_progress: Callable[[wire.CopyProgress], None] = lambda _: None,
        on_gap: Callable[[str, float], None] = lambda *_: None,
    ) -> None:
        self._on_gap = on_gap
        self._setup = setup
        self._on_progress = on_progress
        self._held: dict[int, int] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._wire: wire.KeeperSocket | None = None
        self._bye: wire.Goodbye | None = None  # said once the job is over
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._born_s, self._pause_s = 0.0, 0.0  # of the newest keeper; before the next try
        self._listener: socket.socket | None = None  # ours, so that a successor has the same port
        self._serve: tuple[wire.Serve, bytes] | None = None
        self._members: wire.Members | None = None
        self._told = threading.Condition(self._lock)
        self._told_attempt = -1

    def start(self) -> None:
        """See that there is a keeper; one that dies as it starts is tried again in the background.

        Raises:
            StorageError: it cannot be started; says why.
        """
        _left[:] = [process for process in _left if process.poll() is None]
        died = ""
        try:
            self._connect()
        except _Died as error:
            died = str(error)
        self._thread = threading.Thread(
            target=self._run, args=(died,), name="outlast-keeper", daemon=True
        )
        self._thread.start()

    def serve(self, host: str, key: bytes, *, node: str, tls: Tls | None = None) -> tuple[str, int]:
        """Let other machines' keepers talk to this one, whichever process it is.

        Args:
            host: an address of this machine that the others can reach.
            key: the job's.
            node: this machine's name among the members.
            tls: files for TLS, or None.

        Returns:
            Host and port, the same for as long as this supervisor lives.

        Raises:
            StorageError: the address cannot be listened on.
        """
        files = None if tls is None else tls.files
        try:
            listener = listen(host)
        except OSError as error:
            with self._lock:
                self._serve = (wire.Serve(node=node, tls=files), key)  # saves need the key as well
                self._say_peers()
            raise StorageError(
                f"the keeper cannot listen on {host} for other machines: {error.strerror}; give an "
                "address of this machine with --local-addr"
            ) from None
        with self._lock:
            before, self._listener = self._listener, listener
            self._serve = (wire.Serve(node=node, tls=files), key)
            self._say_peers()
        if before is not None:
            before.close()
        return host, int(listener.getsockname()[1])

    def tell_members(
        self,
        attempt: int,
        members: Sequence[wire.PeerMachine],
        timeout_s: float = 5.0,
        *,
        term: str = "",
        lost: Sequence[wire.Lost] = (),
    ) -> bool:
        """Tell the keeper of an attempt that this machine takes part in.

        Called before workers are started, so that they find the others' memory.

        Args:
            attempt: its number.
            members: its machines, once ``serve`` was called; none before.
            timeout_s: how long to wait for the keeper's word.
            term: who has formed it: what the claim of its number must say for a commit.
            lost: machines of the attempt before it that are given up for lost.

        Returns:
            Whether the keeper has heard it within ``timeout_s``; one that has died and is started
            again is told then.

        Raises:
            ValueError: ``serve`` was not called, or this machine is not among the members.
        """
        serving = {self._serve[0].node} if self._serve and self._listener else set()
        if serving - {one.node for one in members} or (members and not serving):
            raise ValueError("this machine is not among the members, or does not serve them")
        with self._told:
            self._members = wire.Members(
                attempt=attempt, term=term, members=tuple(members), lost=tuple(lost)
            )
            if not self._send_quietly(self._members) and not self._is_alive():
                return False
            return self._told.wait_for(lambda: self._told_attempt == attempt, timeout_s)

    @property
    def pid(self) -> int | None:
        """The keeper's process, if this supervisor has started it."""
        return self._process.pid if self._process else None

    def close(
        self, deadline_s: float | None = None, hurry: Callable[[], float | None] = lambda: None
    ) -> bool:
        """The job is over: let the keeper finish its copies, and leave.

        Args:
            deadline_s: seconds that it may take; None for as long as it takes.
            hurry: asked now and then, in the second case: seconds that are left, or None.

        Returns:
            Whether everything was done that was due, in time. A keeper that dies now is not started
            again.
        """
        with self._lock:
            self._closing.set()
        self._say_bye(deadline_s)
        gone = True
        if self._thread is not None:
            while deadline_s is None and self._thread.is_alive():
                self._thread.join(HURRY_S)
                if (deadline_s := hurry()) is not None:
                    self._say_bye(deadline_s)
            self._thread.join(None if deadline_s is None else deadline_s + LEAVING_S)
            gone = not self._thread.is_alive()
        self._hang_up()
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=LEAVING_S)
            gone = gone and self._process.returncode == 0
        self._drop()
        return gone

    def _say_bye(self, deadline_s: float | None) -> None:
        with self._lock:
            self._bye = wire.Goodbye(over=True, deadline_s=deadline_s)
            if self._wire is not None:
                with contextlib.suppress(OSError):
                    self._wire.send(self._bye)

    def leave(self) -> None:
        """Leave without a word: the keeper stays a while, with its memory, for the next one."""
        self._closing.set()
        self._hang_up()
        if self._process is not None:
            _left.append(self._process)
        self._drop()

    def _hang_up(self) -> None:
        with self._lock:
            if self._wire is not None:
                self._wire.close()
        if self._thread is not None:
            self._thread.join(LEAVING_S)

    def _drop(self) -> None:
        for fd in self._held.values():
            os.close(fd)
        self._held = {}
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _connect(self) -> None:
        path = Path(self._setup.socket)
        try:
            with only_one(path):
                try:
                    sock = connect(path)
                except OSError:
                    sock = self._spawn(path)
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(
                f"the keeper cannot be started: {path.parent}: {error.strerror or error}; "
                f"{remedy(error)}, or set {RUNTIME_VARIABLE} to another directory"
            ) from None
        with self._lock:
            self._wire = wire.KeeperSocket(sock)
            with contextlib.suppress(OSError):  # it is gone again: the thread that reads sees it
                self._wire.send(wire.Hello(job=self._setup.job))
                self._say_peers()
                if self._bye is not None:
                    self._wire.send(self._bye)
            if self._closing.is_set() and self._bye is None:
                self._wire.close()  # we have left meanwhile

    def _is_alive(self) -> bool:
        """Whether this supervisor still sees to it that there is a keeper."""
        return self._thread is not None and self._thread.is_alive()

    def _say_peers(self) -> None:
        """With the lock held: what a keeper must know of other machines."""
        if self._serve is not None:
            message, key = self._serve
            fds = () if self._listener is None else (self._listener.fileno(),)
            if not self._send_quietly(message, key, fds):
                return
        if self._members is not None:
            self._send_quietly(self._members)

    def _send_quietly(
        self, message: wire.Message, blob: bytes = b"", fds: tuple[int, ...] = ()
    ) -> bool:
        """Whether it was sent; if not, a keeper that is started again is told."""
        try:
            if self._wire is None:
                return False
            self._wire.send(message, blob, fds)
        except OSError:
            return False
        return True

    def _spawn(self, path: Path) -> socket.socket:
        setup = msgspec.structs.replace(self._setup, inherited=dict(self._held))
        log = path.with_suffix(".log")
        with log.open("ab") as errors:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "outlast.keeper"],
                stdin=subprocess.PIPE,
                stdout=errors,
                stderr=errors,
                pass_fds=list(self._held.values()),
                start_new_session=True,  # a Ctrl-C is for the training
                cwd="/",
            )
        assert process.stdin is not None  # noqa: S101 - a pipe was asked for
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(encode_setup(setup))
        self._process = process
        until_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < until_s:
            with contextlib.suppress(OSError):
                return connect(path)
            if (code := process.poll()) is not None and code < 0:
                raise _Died(_in_words(code))
            if code is not None:
                raise StorageError(f"the keeper did not start: {_last_line(log)}")
            time.sleep(_LOOK_S)
        process.kill()  # it must not come to life beside its successor
        raise _Died(f"it did not answer within {START_TIMEOUT_S:.0f} s; see {log}")

    def _run(self, died: str) -> None:
        """See to it that there is a keeper; ``died``: how the first one has, where it has."""
        self._born_s = time.monotonic()
        self._pause_s = PAUSE_S if died else 0.0
        while True:
            if not died:
                self._listen()
            if self._closing.is_set():
                return
            gone_s, reason = time.monotonic(), died or "it has closed its connection"
            if self._process is not None and not died:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    reason = _in_words(self._process.wait(timeout=1))
            died = ""
            if not self._start_again(reason):
                return
            self._on_gap(reason, time.monotonic() - gone_s)

    def _start_again(self, reason: str) -> bool:
        """Whether there is a keeper again; what does not work is tried again after a while."""
        if time.monotonic() - self._born_s > LIVED_S:
            self._pause_s = 0.0
        while True:
            if self._closing.wait(self._pause_s):
                return False
            self._pause_s = min(max(self._pause_s * 2, PAUSE_S), PAUSE_MAX_S)
            logger.warning("the keeper is gone (%s); starting it again", reason)
            try:
                self._connect()
            except (OutlastError, _Died) as error:
                reason = str(error)
            else:
                self._born_s = time.monotonic()
                return True

    def _listen(self) -> None:
        """Hold what the keeper hands over, until it is gone."""
        ours = self._wire
        assert ours is not None  # noqa: S101 - connected before
        try:
            while (frame := ours.receive()) is not None:
                self._heard(*frame)
        except ValueError as error:
            logger.warning("the keeper said what is not understood: %s", error)
        ours.close()
        ours.drop_descriptors()

    def _heard(self, message: wire.Message, _: bytes, fds: list[int]) -> None:
        if isinstance(message, wire.Hold) and fds:
            old = self._held.pop(message.arena, None)
            self._held[message.arena] = fds.pop()
            if old is not None:
                os.close(old)
        elif isinstance(message, wire.Drop) and message.arena in self._held:
            os.close(self._held.pop(message.arena))
        elif isinstance(message, wire.CopyProgress):
            self._on_progress(message)
        elif isinstance(message, wire.MembersKnown):
            with self._told:
                self._told_attempt = message.attempt
                self._told.notify_all()
        for fd in fds:
            os.close(fd)


def _in_words(code: int) -> str:
    return f"it {'was ended by signal' if code < 0 else 'left with exit code'} {abs(code)}"


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return lines[-1] if lines else "it said nothing"
