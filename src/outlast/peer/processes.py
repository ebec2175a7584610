"""Which process a word on shared storage means, and whether it still runs: where this kernel knows.

The word names the kernel's boot, the namespace that the number counts in, the number, and when the
process began: a number that was given to another process since is not taken for it. A process on
another machine, or in another container, is not known here.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE: Final = Path("/proc/self/ns/pid")
_ENDED: Final = ("Z", "X", "x")  # states of one that nobody has heard of yet


def this_process() -> str:
    """The word for this process; "" where the kernel does not say."""
    try:
        return f"{_here()}/{os.getpid()}/{_began(os.getpid())}"
    except (OSError, ValueError, IndexError):
        return ""


def is_alive(word: str) -> bool | None:
    """Whether the process that ``word`` means runs, be it stopped; None where nobody here knows."""
    here, _, rest = word.rpartition("/")[0].rpartition("/")
    try:
        if not word or here != _here():
            return None
        pid = int(rest)
    except (OSError, ValueError):
        return None
    try:
        return _began(pid) == word.rpartition("/")[2]
    except (OSError, ValueError, IndexError):
        return False


def pid_of(word: str) -> int:
    """The number in ``word``; 0 for none."""
    number = word.rpartition("/")[0].rpartition("/")[2]
    return int(number) if number.isdecimal() else 0


def _here() -> str:
    return f"{_BOOT.read_text().strip()}/{_NAMESPACE.stat().st_ino}"


def _began(pid: int) -> str:
    """When a process began, in the kernel's ticks; "" for one that has ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return "" if fields[0] in _ENDED else fields[19]
