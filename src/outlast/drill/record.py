"""What a worker consumed and computed, step by step: ``inside`` writes it, the drill reads it.

Each process writes a file of its own, ``rank-RANK.attempt-ATTEMPT.PID.jsonl``: who it is, and a
line for each step that it completed, written as soon as the step is. A step that is made again, in
another process or in the same one, has another line; they must say the same.

Everything is a digest (xxh3, 64 bits, in hexadecimal) of bytes, so that files stay small and two
runs are compared without either's tensors. A rank of a divided state (FSDP2, tensor parallel)
records its own share.

Guarantees: a line that a killed process left half written is not read, and neither is what stands
behind it.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from outlast.drill.target import RECORDS

COMPILED: Final = "torch.compile"  # noted as a call


class WorkerBegun(msgspec.Struct, frozen=True, kw_only=True, tag="begun"):
    """The first line: who writes.

    Attributes:
        pid: process id.
        rank: in its first attempt.
        world_size: of that attempt.
        attempt: its number, from 1; of all restarts of all starts.
        machine: hostname.
        t: wall-clock time in seconds.
        versions: of what computes ("torch", "python").
    """

    pid: int
    rank: int
    world_size: int
    attempt: int
    machine: str
    t: float
    versions: dict[str, str]


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """One completed step of one rank.

    Attributes:
        step: its number, from 1, over the whole job where a session counts; else the number of
            times that optimizers have stepped in this process.
        t: wall-clock time in seconds.
        losses: of each backward pass since the step before: the value's bits as a hexadecimal
            float, or a digest where it isn't one number.
        inputs: digest of what each outermost training module was called with, in order.
        state: name → digest, of each tensor and each other value of what is trained, behind it.
        unnamed: name → digest, of what is at work and a session was not given; without a session
            all of that is in ``state``.
        random: name → digest, of each of the process' random-number generators, behind it.
        random_before: the same ahead of it: with its batch at hand, and nothing computed yet.
        rates: learning rates of the groups of each optimizer that stepped, in order, ahead of that.
        rank: in the attempt in which it was made.
        world_size: of that attempt.
    """

    step: int
    t: float
    losses: list[str]
    inputs: list[str]
    state: dict[str, str]
    random: dict[str, str]
    rates: list[float]
    rank: int
    world_size: int
    unnamed: dict[str, str] = {}
    random_before: dict[str, str] = {}


class WorkerEnded(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """The last line: the script came to its end by itself.

    Attributes:
        t: wall-clock time in seconds.
    """

    t: float


class StateFound(msgspec.Struct, frozen=True, kw_only=True, tag="found"):
    """What a process found ahead of its first step: made by the script, or gone on from.

    Attributes:
        step: completed steps, as the session has it; 0 where there is none.
        is_counted: whether a session counts the steps of this process; then lines of steps ahead
            of this one are of what came before it, and are not read.
        state: as of :class:`StepRecord`, without what an optimizer makes in its first step.
        unnamed: as of :class:`StepRecord`.
        random: as of :class:`StepRecord`, with the first step's batch at hand.
    """

    step: int
    is_counted: bool
    state: dict[str, str]
    random: dict[str, str]
    unnamed: dict[str, str] = {}


class LoopBegun(msgspec.Struct, frozen=True, kw_only=True, tag="loop"):
    """A loop over the session's steps has ended, and another one has its first batch.

    Attributes:
        step: completed steps.
        changed: name → digest, of what is not as that step left it: what a loader counts of its
            epochs, a schedule that goes on between them. A checkpoint of a loop's end may have it.
    """

    step: int
    changed: dict[str, str]


class NotedCall(msgspec.Struct, frozen=True, kw_only=True, tag="call"):
    """The script did something that need not be the same in each run; once for each line of it.

    Attributes:
        what: a function, a generator, a kernel.
        where: the script's line, as "train.py:12"; "" where it has none.
    """

    what: str
    where: str


class ReachSeen(msgspec.Struct, frozen=True, kw_only=True, tag="reach"):
    """What the script's own names reached at a moment.

    Attributes:
        step: completed steps; the next one has its batch.
        values: path → digest.
        owners: path → (path, class) of the object around it that gives its state itself.
        librarys: path → class, of attributes of what a library's class has made.
    """

    step: int
    values: dict[str, str]
    owners: dict[str, list[str]]
    librarys: dict[str, str] = {}


class NotedOperations(msgspec.Struct, frozen=True, kw_only=True, tag="operations"):
    """The operations of one step, in order.

    Attributes:
        step: its number.
        operations: name, digest of what it was given, digest of what it made, the script's line.
    """

    step: int
    operations: list[tuple[str, str, str, str]]


class NoticeDue(msgspec.Struct, frozen=True, kw_only=True, tag="due"):
    """The step is complete behind which the job is to be given notice.

    Attributes:
        step: completed steps.
    """

    step: int


class WorkerHeld(msgspec.Struct, frozen=True, kw_only=True, tag="held"):
    """The process has made all the steps that are wanted of it, and waits to be ended.

    Attributes:
        step: completed steps.
    """

    step: int


class RecorderTrouble(msgspec.Struct, frozen=True, kw_only=True, tag="trouble"):
    """Something could not be recorded; told once. Training went on.

    Attributes:
        t: wall-clock time in seconds.
        what: the error, in its own words.
    """

    t: float
    what: str


Line = (
    WorkerBegun
    | StateFound
    | StepRecord
    | WorkerEnded
    | LoopBegun
    | NotedCall
    | ReachSeen
    | NotedOperations
    | NoticeDue
    | WorkerHeld
    | RecorderTrouble
)
_decoder = msgspec.json.Decoder(Line)


@dataclasses.dataclass
class WorkerRecord:
    """One process' record so far; it grows as the file does."""

    begun: WorkerBegun
    found: StateFound | None = None
    steps: list[StepRecord] = dataclasses.field(default_factory=list)
    ended: WorkerEnded | None = None
    trouble: str = ""
    calls: list[NotedCall] = dataclasses.field(default_factory=list)
    reached: list[ReachSeen] = dataclasses.field(default_factory=list)
    operations: list[NotedOperations] = dataclasses.field(default_factory=list)
    is_due: bool = False
    is_held: bool = False
    loops: dict[int, LoopBegun] = dataclasses.field(default_factory=dict)  # by completed steps

    def take(self, line: Line) -> None:
        """Add what a line says."""
        match line:
            case StepRecord():
                self.steps.append(line)
            case StateFound():
                if line.is_counted:
                    self.steps.clear()
                self.found = line
            case LoopBegun():
                self.loops[line.step] = line
            case NotedCall():
                self.calls.append(line)
            case ReachSeen():
                self.reached.append(line)
            case NotedOperations():
                self.operations.append(line)
            case WorkerEnded():
                self.ended = line
            case RecorderTrouble():
                self.trouble = line.what
            case NoticeDue():
                self.is_due = True
            case WorkerHeld():
                self.is_held = True


class WorkerRecords:
    """Everything that the workers of a run have recorded, read as it grows; from any thread.

    Args:
        run: the run's directory.
    """

    def __init__(self, run: Path) -> None:
        self._directory = run / RECORDS
        self._files: dict[str, _RecordFile] = {}
        self._lock = threading.Lock()

    def look(self) -> list[WorkerRecord]:
        """Each process' record, in the order in which they began."""
        with self._lock:
            for path in self._directory.glob("rank-*.jsonl"):
                self._files.setdefault(path.name, _RecordFile(path)).look()
            found = [file.record for file in self._files.values() if file.record is not None]
        return sorted(found, key=lambda one: one.begun.t)


class _RecordFile:
    """One process' file, as far as it was read."""

    def __init__(self, path: Path) -> None:
        self.record: WorkerRecord | None = None
        self._path, self._offset = path, 0

    def look(self) -> None:
        """Read what is new."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            self._take(_decoder.decode(line))

    def _take(self, line: Line) -> None:
        if isinstance(line, WorkerBegun):
            self.record = WorkerRecord(begun=line)
        elif self.record is not None:
            self.record.take(line)


def completed(records: Iterable[WorkerRecord]) -> int:
    """The newest step that some rank has completed; 0 for none."""
    return max((one.steps[-1].step for one in records if one.steps), default=0)
