"""What a run consumed and computed: one line for each step that a rank completed.

Lines are appended as steps complete, so a step that is done again after a resume has two lines.
They must say the same; the comparison looks at every line, not only at the last.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import msgspec


class TracedStep(msgspec.Struct, frozen=True, kw_only=True):
    """One completed step of one rank.

    Attributes:
        step: completed steps, this one included.
        loss: the loss's bits, as a hexadecimal float.
        ids: the samples that this rank consumed.
        t: wall-clock time, in seconds since the epoch.
    """

    step: int
    loss: str
    ids: list[int]
    t: float


class Final(msgspec.Struct, frozen=True, kw_only=True):
    """SHA-256 of all weights and optimizer state."""

    sha256: str


class Recorder:
    """A rank's side: writes ``rank-N.jsonl`` into ``directory``."""

    def __init__(self, directory: Path, rank: int, pid: int) -> None:
        self._directory = directory
        self._rank = rank
        # Line-buffered: a line is out as soon as its step is done.
        self._file = (directory / f"rank-{rank}.jsonl").open("a", buffering=1)
        self._file.write(json.dumps({"pid": pid}) + "\n")

    def step(self, step: TracedStep) -> None:
        """Note a completed step."""
        self._file.write(msgspec.json.encode(step).decode() + "\n")

    def final(self, final: Final) -> None:
        """Note the end."""
        path = self._directory / f"final-{self._rank}.json"
        path.write_bytes(msgspec.json.encode(final))


class Trace(NamedTuple):
    """One rank's record so far."""

    pid: int
    steps: list[TracedStep]
    num_bytes: int


def read_trace(directory: Path, rank: int, since: Trace | None = None) -> Trace:
    """Read what is new; a line that is still being written is left for the next time."""
    pid, steps, offset = since or Trace(0, [], 0)
    try:
        with (directory / f"rank-{rank}.jsonl").open("rb") as file:
            file.seek(offset)
            data = file.read()
    except FileNotFoundError:
        return Trace(pid, steps, offset)
    whole = data[: data.rfind(b"\n") + 1]
    for line in whole.splitlines():
        raw: dict[str, Any] = msgspec.json.decode(line)
        if "pid" in raw:
            pid = raw["pid"]
        else:
            steps.append(msgspec.convert(raw, TracedStep))
    return Trace(pid, steps, offset + len(whole))


def read_final(directory: Path, rank: int) -> Final | None:
    """How the rank ended, or None if it has not."""
    try:
        return msgspec.json.decode((directory / f"final-{rank}.json").read_bytes(), type=Final)
    except FileNotFoundError:
        return None


def by_step(trace: Trace) -> dict[int, list[TracedStep]]:
    """Step → every line about it."""
    steps: dict[int, list[TracedStep]] = defaultdict(list)
    for step in trace.steps:
        steps[step.step].append(step)
    return steps
