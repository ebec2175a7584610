"""A worker's newest step in memory that the agent can read, also after the worker is dead.

Sixteen bytes in a file of the attempt's private directory on a memory file system: completed steps
and the wall-clock time of the last boundary. Written through a mapping: no system call on the
step's path.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path
from typing import Final, NamedTuple

VARIABLE: Final = "OUTLAST_BEATS"  # directory, set by our agent
_FORMAT: Final = struct.Struct("<qd")


class BeatSeen(NamedTuple):
    """What a worker last said: completed steps, wall-clock seconds since the epoch."""

    step: int
    t: float


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
