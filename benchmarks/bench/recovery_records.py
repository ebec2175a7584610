"""What the training scripts of a recovery measurement write, and what can be read out of it.

Each rank appends a line for each step that it has completed, with the time of its end. *Back* is
the end of the first step that a new formation has completed on all of its ranks: one with a process
that was not there before, or of another size. The step that was under way when the fault struck,
which some ranks may complete a moment later, is not one of those.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Line:
    """A completed step.

    Attributes:
        t: when, by the wall clock.
        step: its number.
        world: workers that took part.
        rank: of the one who writes.
        pid: its process.
        node: its machine's hostname.
    """

    t: float
    step: int
    world: int
    rank: int
    pid: int
    node: str


@dataclass(frozen=True)
class Back:
    """The first step of a new formation.

    Attributes:
        t: when the last of its ranks had completed it.
        after_s: since the fault.
        pause_s: since the last step of the old formation.
    """

    t: float
    after_s: float
    pause_s: float


class Records:
    """The lines of one job, read as they grow."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.lines: list[Line] = []
        self._read: dict[Path, int] = {}

    def look(self) -> list[Line]:
        """All lines so far, in order of time."""
        for path in sorted(self.directory.glob("steps-*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            self.lines += [_line(line) for line in whole.splitlines()]
        self.lines.sort(key=lambda line: line.t)
        return self.lines

    def newest(self, rank: int) -> Line:
        """The last line of a rank."""
        return next(line for line in reversed(self.lines) if line.rank == rank)

    def steps_of_all(self, world: int, since_t: float) -> int:
        """Steps that a formation of ``world`` workers has completed since then, on all of them."""
        counts: dict[int, int] = {}
        for line in self.look():
            if line.t > since_t and line.world == world:
                counts[line.rank] = counts.get(line.rank, 0) + 1
        return min(counts.values()) if len(counts) == world else 0

    def back(self, since_t: float, world: int, nodes: Collection[str] | None = None) -> Back | None:
        """The first step of a new formation of ``world`` workers; None if there is none yet.

        Args:
            since_t: when the fault struck.
            world: the size that is waited for.
            nodes: the machines that are meant; all if None.
        """
        lines = [line for line in self.look() if nodes is None or line.node in nodes]
        newest = {line.rank: line for line in lines if line.t <= since_t}
        old = {(line.pid, line.world) for line in newest.values()}
        later = [line for line in lines if line.t > since_t and line.world == world]
        fresh = [line for line in later if (line.pid, line.world) not in old]
        if not fresh:
            return None
        ends: dict[int, float] = {}
        for line in later:
            if line.t >= fresh[0].t:
                ends.setdefault(line.rank, line.t)
        if len(ends) < world:
            return None
        t = max(ends.values())
        last = max((line.t for line in lines if _is_old(line, old, fresh[0].t)), default=since_t)
        return Back(t=t, after_s=t - since_t, pause_s=t - last)


def _is_old(line: Line, old: Collection[tuple[int, int]], before_t: float) -> bool:
    return line.t < before_t and (line.pid, line.world) in old


def _line(data: bytes) -> Line:
    found = json.loads(data)
    return Line(**{name: found[name] for name in Line.__dataclass_fields__})


def summary(values: Sequence[float | None], limit_s: float) -> tuple[list[float], str]:
    """Those that came back, and in words how many did not."""
    good = [value for value in values if value is not None]
    missing = len(values) - len(good)
    words = f"{missing} of {len(values)} not within {limit_s:.0f} s" if missing else ""
    return good, words
