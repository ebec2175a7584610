"""``JOB/rollbacks``: room on disk for rollbacks that a full disk keeps out of the ledger.

An attempt that does not know of a rollback goes on from behind the sign. So room for some is made
when a job starts that may roll back, and written over in place when it is needed: blocks that are
there already take no more of a disk, nor of a quota. The lines are the ledger's own; whoever reads
the past reads them too, and the next attempt writes them into the ledger once that can be.

What can go wrong: a file system that never writes in place (btrfs, ZFS) may have no room all the
same; one that is read-only, or fails, takes nothing. Then the rollback is not known, and that is
said.

Rejected: a file for it in each tier (a tier that cannot be reached when the job starts would be
believed to have none); room in the ledger itself (other events would use it up).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from outlast.ledger.events import Event, decode

FILE_NAME: Final = "rollbacks"
ROOM_BYTES: Final = 64 << 10  # for ten and more; each has up to 200 values of its window
_BLANK: Final = b"\n"


def make_room(directory: Path, *, forget: bool = False) -> None:
    """Have the file there, in full size.

    Args:
        directory: the job's.
        forget: whether all that is in it is in the ledger.

    Raises:
        OSError: the disk does not take it.
    """
    fd = os.open(directory / FILE_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        size = 0 if forget else os.fstat(fd).st_size
        if size < ROOM_BYTES:
            _write(fd, _BLANK * (ROOM_BYTES - size), size)
    finally:
        os.close(fd)


def keep(directory: Path, line: bytes) -> bool:
    """Write a line of the ledger there; whether it is on disk."""
    try:
        fd = os.open(directory / FILE_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError:
        return False
    try:
        before = os.pread(fd, os.fstat(fd).st_size, 0).rstrip(_BLANK)
        if line.rstrip(_BLANK) not in before.split(_BLANK):
            _write(fd, line, len(before) + len(_BLANK) if before else 0)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def kept(directory: Path) -> list[Event]:
    """What was kept there, oldest first; what cannot be read is left out."""
    try:
        lines = (directory / FILE_NAME).read_bytes().split(_BLANK)
    except OSError:
        return []
    events = (decode(line) for line in lines if line)
    return [event for event in events if event is not None]


def _write(fd: int, data: bytes, at: int) -> None:
    while data:
        written = os.pwrite(fd, data, at)
        data, at = data[written:], at + written
    os.fsync(fd)
