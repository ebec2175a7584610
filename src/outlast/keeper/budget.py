"""How much memory this machine, or the container that this process is in, can still give."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil

CGROUPS: Final = Path("/sys/fs/cgroup")
_UNLIMITED: Final = 1 << 62
# Version 2 and version 1 of control groups: files with the limit, the use, and what of it is cache.
_V2: Final = ("memory.max", "memory.current", "inactive_file ")
_V1: Final = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file ")


def available_bytes(of: Path = Path("/proc/self/cgroup"), root: Path = CGROUPS) -> int:
    """Memory that can be had without swapping: the machine's, or less where a limit is set.

    Args:
        of: the list of the control groups that this process is in.
        root: where control groups are mounted.
    """
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
