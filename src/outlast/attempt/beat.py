"""A worker's newest step in memory that the agent can read, also after the worker is dead.

Sixteen bytes in a file of the attempt's private directory on a memory file system: completed steps
and the wall-clock time of the last boundary. Written through a mapping: no system call on the
step's path.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import shutil
import struct
import tempfile
import time
from pathlib import Path
from typing import Final, NamedTuple

VARIABLE: Final = "OUTLAST_BEATS"  # directory, set by our agent
_PREFIX: Final = "outlast-beats-"
_LOCK: Final = "lock"
_FORMAT: Final = struct.Struct("<qd")


class BeatSeen(NamedTuple):
    """What a worker last said: completed steps, wall-clock seconds since the epoch."""

    step: int
    t: float


class BeatsDirectory:
    """The agent's side: a private directory in memory, gone with the agent.

    An agent that is killed cannot clean up; the next one on the machine does, and knows by a lock
    which directories have no owner any more.
    """

    def __init__(self) -> None:
        memory = Path("/dev/shm")  # noqa: S108 - a private directory is made in it
        root = memory if memory.is_dir() else Path(tempfile.gettempdir())
        _reclaim(root)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
        self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def clear(self) -> None:
        """Forget the workers of an attempt that is over."""
        for stale in self.path.glob("beat-*"):
            stale.unlink()

    def close(self) -> None:
        """Remove it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _reclaim(root: Path) -> None:
    for lock in root.glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError):  # another user's, or gone in this moment
            fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held by a living owner: an error
                shutil.rmtree(lock.parent)
            finally:
                os.close(fd)


class Beat:
    """A worker's side; does nothing where no agent asked for it."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        directory = os.environ.get(VARIABLE)
        if directory:
            path = beat_path(Path(directory), int(os.environ.get("LOCAL_RANK", "0")))
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                os.ftruncate(fd, _FORMAT.size)
                self._memory = mmap.mmap(fd, _FORMAT.size)
                os.close(fd)
            except OSError:
                self._memory = None  # watching that fails never stops training

    def beat(self, step: int) -> None:
        """Say that ``step`` steps are complete."""
        if self._memory is not None:
            _FORMAT.pack_into(self._memory, 0, step, time.time())


def beat_path(directory: Path, local_rank: int) -> Path:
    """The file of one worker."""
    return directory / f"beat-{local_rank}"


def read_beat(directory: Path, local_rank: int) -> BeatSeen | None:
    """What the worker last said, or None when it never did."""
    try:
        data = beat_path(directory, local_rank).read_bytes()
        return BeatSeen(*_FORMAT.unpack(data))
    except (OSError, struct.error):
        return None
