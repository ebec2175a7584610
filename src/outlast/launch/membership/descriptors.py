"""Descriptors: who coordinates holds one for each machine, and its stores some for each worker.

Most systems begin with a limit of 1024 that any process may raise, to half a million as a rule. It
is raised as far as the job may need it and no further: workers inherit it, and what uses select()
cannot have a descriptor above 1024.
"""

from __future__ import annotations

import contextlib
import resource
from typing import Final

SPARE: Final = 512  # for all else that an agent opens
OF_MACHINE: Final = 2  # its connection, and one for its agent at the store
OF_WORKER: Final = 2  # at the store


def wanted_for(machines: int, workers: int) -> int:
    """How many a coordinator of so many machines may have open, with so many workers on each."""
    return machines * (OF_MACHINE + OF_WORKER * workers) + SPARE


def make_room(wanted: int | None = None) -> bool:
    """Raise this process's limit to what is wanted, None: as far as it goes; whether that was more.

    It is never lowered.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return False
    most = hard if hard != resource.RLIM_INFINITY else 1 << 20
    limit = most if wanted is None else min(wanted, most)
    if limit <= soft:
        return False
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        return True
    return False


def lack(machines: int, workers: int) -> str:
    """What is wrong with this process's limit for such a job, in words; "" for nothing.

    The limit is raised first.
    """
    wanted = wanted_for(machines, workers)
    make_room(wanted)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return ""
    return (
        f"one that coordinates {machines} machines opens up to {wanted:,} files, and here {soft:,} "
        "are allowed: raise it (ulimit -Hn), or more machines than fit will wait"
    )
