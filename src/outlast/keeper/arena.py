"""Shared memory for snapshots: anonymous files that live as long as somebody holds them.

Pages are touched once, in the background, and reused ever after: copying into fresh memory is four
to eight times slower. Huge pages are asked for; whether the kernel gives them to shared memory is
its setting, which is not ours to change.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import threading
from typing import Final

logger = logging.getLogger(__name__)

HUGE_BYTES: Final = 2 << 20
_MADV_DONTNEED: Final = 4
_MADV_POPULATE_WRITE: Final = 23
_POPULATE_BYTES: Final = 64 << 20
_libc = ctypes.CDLL(None, use_errno=True)


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
