"""Shared memory for snapshots, and how much memory this machine can still give.

An arena is an anonymous file: it lives as long as a process holds its descriptor. Pages are touched
once, in the background, and reused ever after: copying into fresh memory is four to eight times
slower. Huge pages are asked for; whether the kernel gives them to shared memory is its setting.

What can be had is the machine's free memory, or less where a control group limits this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

HUGE_BYTES: Final = 2 << 20
_MADV_DONTNEED: Final = 4
_MADV_POPULATE_WRITE: Final = 23
_POPULATE_BYTES: Final = 64 << 20
_libc = ctypes.CDLL(None, use_errno=True)
CGROUPS: Final = Path("/sys/fs/cgroup")
_UNLIMITED: Final = 1 << 62
# Version 2 and version 1 of control groups: files with the limit, the use, and what of it is cache.
_V2: Final = ("memory.max", "memory.current", "inactive_file ")
_V1: Final = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file ")


class Arena:
    """A piece of shared memory, mapped into this process.

    Args:
        fd: its descriptor, from then on the arena's to close.
        num_bytes: its size.
    """

    def __init__(self, fd: int, num_bytes: int) -> None:
        self.fd = fd
        self.num_bytes = num_bytes
        self._map = mmap.mmap(fd, num_bytes)
        with contextlib.suppress(OSError, AttributeError):  # a kernel without them
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    @classmethod
    def make(cls, num_bytes: int) -> Arena:
        """New memory, not touched yet.

        Raises:
            OSError: there is none to be had.
        """
        rounded = max(-(-num_bytes // HUGE_BYTES) * HUGE_BYTES, HUGE_BYTES)
        fd = os.memfd_create("outlast-arena", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, rounded)
            return cls(fd, rounded)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def of(cls, fd: int) -> Arena:
        """Memory that another process has made, to be handed on."""
        return cls(fd, os.fstat(fd).st_size)

    @classmethod
    def seen(cls, fd: int) -> Arena:
        """Memory that another process has made, only to be looked at: it goes with the object."""
        arena = cls.of(fd)
        arena.close()
        return arena

    def touch(self) -> None:
        """Have the kernel give all pages now; content stays. Takes a while: call it in a thread."""
        self._advise(_MADV_POPULATE_WRITE)

    def look_away(self) -> None:
        """Take the pages out of this process; the memory has them still.

        To unmap two gigabytes takes a tenth of a second, which is Python's unless it is done so.
        """
        self._advise(_MADV_DONTNEED)

    def _advise(self, advice: int) -> None:
        for start in range(0, self.num_bytes, _POPULATE_BYTES):
            size = min(_POPULATE_BYTES, self.num_bytes - start)
            address = ctypes.c_void_p(self.address + start)
            if _libc.madvise(address, ctypes.c_size_t(size), advice):
                return  # an older kernel, or no memory: pages come when they are written

    def touch_in_background(self) -> None:
        """``touch`` in a thread of its own."""
        threading.Thread(target=self.touch, name="outlast-touch", daemon=True).start()

    def close(self) -> None:
        """Let go of the memory; what still looks at it keeps it mapped."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)


def available_bytes(of: Path = Path("/proc/self/cgroup"), root: Path = CGROUPS) -> int:
    """Memory that can be had without swapping: the machine's, or less where a limit is set.

    Args:
        of: the list of the control groups that this process is in.
        root: where control groups are mounted.
    """
    import psutil  # which costs 20 ms, and a training process has no use for it

    return int(min(psutil.virtual_memory().available, *limits(of, root), _UNLIMITED))


def limits(of: Path, root: Path) -> list[int]:
    """What is left below the limit of each control group above this process."""
    return [left for names, group, top in _groups(of, root) for left in _left(names, group, top)]


def _groups(of: Path, root: Path) -> Iterator[tuple[tuple[str, str, str], Path, Path]]:
    """The names of its files, the group, and the topmost one, for each version."""
    try:
        lines = of.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield _V2, root / path.lstrip("/"), root
        elif "memory" in controllers.split(","):
            yield _V1, root / "memory" / path.lstrip("/"), root / "memory"


def _left(names: tuple[str, str, str], group: Path, top: Path) -> Iterator[int]:
    limit_name, used_name, cache = names
    for directory in (group, *group.parents):
        limit, used = _number(directory / limit_name), _number(directory / used_name)
        if limit is not None and used is not None:
            yield max(limit - used + _reclaimable(directory, cache), 0)
        if directory == top:
            return


def _reclaimable(directory: Path, cache: str) -> int:
    """Page cache that the kernel drops before it refuses memory."""
    try:
        lines = (directory / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(cache))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max" is no number: no limit
        return None
