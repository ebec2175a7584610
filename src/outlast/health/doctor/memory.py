"""What of this machine's memory can be had, and whether shared memory of a size is given at all.

Nothing is filled: a file in memory takes pages when it is written. What is seen this way is a limit
on sizes (RLIMIT_FSIZE, RLIMIT_AS), which would otherwise be met at the first snapshot.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
from typing import Final

import psutil

from outlast.keeper.memory import available_bytes
from outlast.policy.fitness import MemoryFacts

SHM: Final = "/dev/shm"  # noqa: S108 - looked at, not written


def look(wanted_bytes: int) -> MemoryFacts:
    """What can be had.

    Args:
        wanted_bytes: the size of one snapshot, 0 where that is not known.
    """
    facts = MemoryFacts(
        available_bytes=available_bytes(), total_bytes=int(psutil.virtual_memory().total)
    )
    with contextlib.suppress(OSError):
        found = os.statvfs(SHM)
        facts.shm_bytes = found.f_bavail * found.f_frsize
    facts.refused = _refused(wanted_bytes) if wanted_bytes else ""
    return facts


def open_files() -> tuple[int, int]:
    """How many files may be open: now, and at most."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 1 << 20
    return (most if soft < 0 else soft), (most if hard < 0 else hard)


def _refused(num_bytes: int) -> str:
    fd = os.memfd_create("outlast-doctor", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, num_bytes)
        mmap.mmap(fd, num_bytes, prot=mmap.PROT_READ).close()
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
    finally:
        os.close(fd)
    return ""
