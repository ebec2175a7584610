"""Where the keeper's socket lies, and what a keeper is told when it starts.

The socket lies in a directory that only its user can enter. A file system that several machines see
is no place for a socket, and its path may be too long for one; so it lies in the user's runtime
directory, under a name made from the job's and from the version of what is said over it. A process
of another version finds no keeper there, and starts its own. Which of the two may commit is settled
by the claims of their attempts.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import select
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from outlast.config import Settings
from outlast.errors import ConfigError, StorageError
from outlast.ipc import peer_credentials
from outlast.keeper import wire

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
    )
