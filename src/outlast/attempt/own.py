"""What only one rank knows, in memory that outlives it: its random numbers, its place in the data.

Survivors of a loss have the weights, and can send them to the worker that takes the lost one's
place; but what the lost one would have drawn next nobody else knows. So each worker that recovers
in its process puts that into a file of the agent's private directory on a memory file system,
through a mapping, like its beat: no system call on the step's path.

Kept are the newest two steps that were completed, and of the step in progress what will be its end
if nothing is drawn any more: ranks may be a step apart, and a worker may die after its part of a
step was used by the others. And all that twice: what an attempt has gone on from stays until the
attempt after it has begun, as one that is lost while all go into an attempt may have written
nothing there yet.

What can go wrong: the process is killed in the middle of a write. A record is believed only with
its checksum; without it the job resumes from a checkpoint.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import msgspec
import xxhash

from outlast.attempt.beat import VARIABLE

logger = logging.getLogger(__name__)

EMPTY_VARIABLE: Final = "OUTLAST_EMPTY_PLACES"  # local ranks that have no worker in the attempt
SLOT_BYTES: Final = 128 << 10
_NUM_SLOTS: Final = 4  # of each of two attempts
_HEAD: Final = struct.Struct("<qqqqBB16sqQ")
# What is known of a worker, in one byte; and whether the optimizer was about to begin.
_FINAL, _SEASONED, _IN_BACKWARD, _LATE, _AT_OPTIMIZER = 1, 2, 4, 8, 16
_HABITS: Final = _SEASONED | _IN_BACKWARD | _LATE
_entrusted: list[Record] = []  # of other ranks, which have handed it over


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's own state.

    Attributes:
        timeline: number of the attempt in which this line of steps began.
        rank, world_size: whose it is.
        step: the completed step that it belongs to.
        is_final: whether that step was completed here; otherwise it was in progress.
        is_certain: whether it may be believed: for a step in progress, whether this worker has
            never drawn anything so late in a step. Whether others have, see ``stage``.
        stage: where in the step it was written (0: as the backward pass began, 1: as the optimizer
            was about to; 2: at its end).
        draws: from which stage on the workers at this place were seen not to draw any more.
        rest: digest of everything else but what the optimizers change; b"" where it is not known.
        blob: the state.
    """

    timeline: int
    rank: int
    world_size: int
    step: int
    is_final: bool
    is_certain: bool
    stage: int
    draws: int
    rest: bytes
    blob: bytes


class Own:
    """A worker's side.

    Args:
        timeline: number of the attempt in which this line of steps began.
        rank, world_size: this worker's.
        basis: step and number of workers that the attempt has gone on from, if from survivors.
    """

    def __init__(
        self, timeline: int, rank: int, world_size: int, basis: tuple[int, int] | None = None
    ) -> None:
        self._whose = timeline, rank, world_size
        known_of = None if basis is None else (timeline, *basis)
        _entrusted[:] = [
            one for one in _entrusted if (one.timeline, one.step, one.world_size) == known_of
        ]
        self._first_slot = known = 0
        self._memory: mmap.mmap | None = None
        directory = os.environ.get(VARIABLE)
        if directory:
            path = own_path(Path(directory), int(os.environ.get("LOCAL_RANK", "0")))
            known = _habits(path)
            self._first_slot = _NUM_SLOTS * _other_half(path, timeline, basis)
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                try:
                    os.ftruncate(fd, SLOT_BYTES * _NUM_SLOTS * 2)
                    self._memory = mmap.mmap(fd, SLOT_BYTES * _NUM_SLOTS * 2)
                finally:
                    os.close(fd)
            except OSError as error:  # what is lost then is resumed from a checkpoint
                logger.warning("a worker's own state is not kept in memory: %s", error)
        self._pending: tuple[int, bool, bytes] | None = None  # step, late in it, blob
        self._is_seasoned = bool(known & _SEASONED)
        self._draws_in_backward = bool(known & _IN_BACKWARD)
        self._draws_late = bool(known & _LATE)

    def pending(self, step: int, blob: bytes, *, late: bool) -> None:
        """``step`` is in progress, and if nothing more is drawn this is its end.

        Args:
            step: the one that will be completed.
            blob: the state.
            late: the optimizer is about to change the weights; otherwise the backward pass begins.
        """
        before = self._pending
        if before is not None and late and before[:2] == (step, False) and before[2] != blob:
            self._draws_in_backward = True
        self._pending = step, late, blob
        draws = self._draws_late or (self._draws_in_backward and not late)
        certain = self._is_seasoned and not draws
        self._write(2 + step % 2, step, blob, b"", certain=certain, stage=int(late))

    def is_told(self, step: int) -> bool:
        """Whether ``pending`` was told of this step, and such words have proved to be true."""
        is_it = self._pending is not None and self._pending[0] == step
        return is_it and self._is_seasoned and not (self._draws_in_backward or self._draws_late)

    def final(self, step: int, blob: bytes, rest: bytes) -> None:
        """``step`` is completed."""
        before, self._pending = self._pending, None
        if before is not None and before[0] == step:
            self._is_seasoned = True
            self._draws_late = self._draws_late or before[2] != blob
        self._write(step % 2, step, blob, rest, certain=True, stage=2)

    def _write(
        self, slot: int, step: int, blob: bytes, rest: bytes, *, certain: bool, stage: int
    ) -> None:
        memory = self._memory
        if memory is None:
            return
        start = (self._first_slot + slot) * SLOT_BYTES
        if _HEAD.size + len(blob) > SLOT_BYTES:  # of more than random numbers and a position
            memory[start : start + _HEAD.size] = bytes(_HEAD.size)
            return
        kind = _FINAL * (stage == 2) + _AT_OPTIMIZER * (stage == 1)
        kind += _SEASONED * self._is_seasoned
        kind += _IN_BACKWARD * self._draws_in_backward + _LATE * self._draws_late
        fields = (*self._whose, step, kind, certain, rest, len(blob))
        memory[start + _HEAD.size : start + _HEAD.size + len(blob)] = blob
        _HEAD.pack_into(memory, start, *fields, _sum(fields, blob))

    def close(self) -> None:
        """Let go of the memory; what is in it stays."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None


def own_path(directory: Path, local_rank: int) -> Path:
    """The file of one worker."""
    return directory / f"own-{local_rank}"


def read_own() -> list[Record]:
    """What the worker that had this one's place left behind, or this one itself.

    Where places of this machine are empty, one worker also tells of those. What others have handed
    over is among it.
    """
    directory = os.environ.get(VARIABLE)
    if not directory:
        return list(_entrusted)
    empty = os.environ.get(EMPTY_VARIABLE, "").split()
    places = (os.environ.get("LOCAL_RANK", "0"), *empty)
    paths = [own_path(Path(directory), int(place)) for place in places]
    return [*_entrusted, *(record for path in paths for record, _, _ in _records(path))]


def entrust(records: Iterable[Record]) -> None:
    """Keep what other ranks have handed over, for as long as an attempt may go on from it."""
    _entrusted[:] = records


def _habits(path: Path) -> int:
    """When in a step the workers at this place were seen to draw: the script is still the same."""
    known = 0
    for _, kind, _ in _records(path):
        known |= kind & _HABITS
    return known


def _other_half(path: Path, timeline: int, basis: tuple[int, int] | None) -> int:
    """0 or 1: the half in which nothing lies that the attempt has gone on from."""
    for record, _, slot in _records(path):
        if record.timeline == timeline and (record.step, record.world_size) == basis:
            return 1 - slot // _NUM_SLOTS
    return 0


def _records(path: Path) -> list[tuple[Record, int, int]]:
    """What can be believed in a file: the record, its kind, and the number of its slot."""
    found: list[tuple[Record, int, int]] = []
    try:
        raw = path.read_bytes()
    except OSError:
        return found
    for start in range(0, len(raw) - _HEAD.size, SLOT_BYTES):
        *fields, size, checksum = _HEAD.unpack_from(raw, start)
        body = start + _HEAD.size
        blob = raw[body : body + max(size, 0)]
        if len(blob) != size or not size or checksum != _sum((*fields, size), blob):
            continue
        timeline, rank, world_size, step, kind, certain, rest = fields
        record = Record(
            timeline=timeline,
            rank=rank,
            world_size=world_size,
            step=step,
            is_final=bool(kind & _FINAL),
            is_certain=bool(certain),
            stage=2 if kind & _FINAL else int(bool(kind & _AT_OPTIMIZER)),
            draws=2 if kind & _LATE else int(bool(kind & _IN_BACKWARD)),
            rest=rest if kind & _FINAL else b"",
            blob=blob,
        )
        found.append((record, kind, start // SLOT_BYTES))
    return found


def _sum(fields: tuple[Any, ...], blob: bytes) -> int:
    return xxhash.xxh3_64_intdigest(_HEAD.pack(*fields, 0) + blob)
