"""What only one rank knows, in memory that outlives it: its random numbers, its place in the data.

Of rank 0 that is also the buffers that DDP sends to all others before a forward pass.

Survivors of a loss have the weights, and can send them to the worker that takes the lost one's
place; but what the lost one would have drawn next nobody else knows. So each worker that recovers
in its process puts that into a file of the agent's private directory on a memory file system,
through a mapping, like its beat: no system call on the step's path.

Kept are the newest two moments that can be gone on from (the ends of steps, whichever these are),
and of the step in progress what will be its end if nothing is drawn any more: ranks may be a moment
apart, and a worker may die after its part of a step was used by the others. And all that twice:
what an attempt has gone on from stays until the attempt after it has begun, as one that is lost
while all go into an attempt may have written nothing there yet.

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
SLOT_BYTES: Final = 128 << 10  # of each slot, as long as that is enough
SLOT_BYTES_MAX: Final = 64 << 20
_NUM_SLOTS: Final = 4  # of each of two attempts
_NUM_ALL: Final = 2 * _NUM_SLOTS
_HEAD: Final = struct.Struct("<qqqqBB16sqQ")
# What is known of a worker, in one byte; and whether the optimizer was about to begin.
_FINAL, _SEASONED, _IN_BACKWARD, _LATE, _AT_OPTIMIZER = 1, 2, 4, 8, 16
_HABITS: Final = _SEASONED | _IN_BACKWARD | _LATE
_entrusted: list[RankState] = []  # of other ranks, which have handed it over


class RankState(msgspec.Struct, frozen=True, kw_only=True):
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
        self._path: Path | None = None
        directory = os.environ.get(VARIABLE)
        if directory:
            path = self._path = own_path(Path(directory), int(os.environ.get("LOCAL_RANK", "0")))
            known = _habits(path)
            self._first_slot = _NUM_SLOTS * _other_half(path, timeline, basis)
            try:
                self._memory = _mapped(path, SLOT_BYTES)
                self._forget_undone(path, timeline, basis)
            except OSError as error:  # what is lost then is resumed from a checkpoint
                logger.warning("a worker's own state is not kept in memory: %s", error)
        self._pending: tuple[int, bool, bytes] | None = None  # step, late in it, blob
        self._newest: int | None = None  # completed, of those that are kept
        self._turn = 0  # the slot that it has
        self._is_seasoned = bool(known & _SEASONED)
        self._draws_in_backward = bool(known & _IN_BACKWARD)
        self._draws_late = bool(known & _LATE)

    def _forget_undone(self, path: Path, timeline: int, basis: tuple[int, int] | None) -> None:
        """What was written of steps that are to be made again is not what they will be.

        The attempt's record of samples is another one, for a start.
        """
        memory = self._memory
        if memory is None or basis is None:
            return
        for record, _, slot in _records(path):
            if record.timeline == timeline and record.step > basis[0]:
                start = slot * (len(memory) // _NUM_ALL)
                memory[start : start + _HEAD.size] = bytes(_HEAD.size)

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
        """``step`` is completed, and can be gone on from."""
        before, self._pending = self._pending, None
        if before is not None and before[0] == step:
            self._is_seasoned = True
            self._draws_late = self._draws_late or before[2] != blob
        if step != self._newest:  # the one before it may be many steps away
            self._newest, self._turn = step, 1 - self._turn
        self._write(self._turn, step, blob, rest, certain=True, stage=2)

    def _write(
        self, slot: int, step: int, blob: bytes, rest: bytes, *, certain: bool, stage: int
    ) -> None:
        memory = self._memory
        if memory is None:
            return
        needed = _HEAD.size + len(blob)
        if needed > len(memory) // _NUM_ALL and needed <= SLOT_BYTES_MAX:
            memory = self._grown(memory, needed)
        size = len(memory) // _NUM_ALL
        start = (self._first_slot + slot) * size
        if needed > size:  # of more than random numbers, a position and some buffers
            memory[start : start + _HEAD.size] = bytes(_HEAD.size)
            return
        kind = _FINAL * (stage == 2) + _AT_OPTIMIZER * (stage == 1)
        kind += _SEASONED * self._is_seasoned
        kind += _IN_BACKWARD * self._draws_in_backward + _LATE * self._draws_late
        fields = (*self._whose, step, kind, certain, rest, len(blob))
        memory[start + _HEAD.size : start + _HEAD.size + len(blob)] = blob
        _HEAD.pack_into(memory, start, *fields, _sum(fields, blob))

    def _grown(self, memory: mmap.mmap, needed: int) -> mmap.mmap:
        """The same with larger slots, in one act; this is rare: the first one tells the size."""
        before = len(memory) // _NUM_ALL
        size = before << (-(-needed // before) - 1).bit_length()
        assert self._path is not None  # noqa: S101 - there is memory
        path = self._path.with_suffix(".new")
        try:
            path.unlink(missing_ok=True)
            larger = _mapped(path, size)
            for slot in range(_NUM_ALL):
                start = slot * before
                larger[slot * size : slot * size + before] = memory[start : start + before]
            path.replace(self._path)
        except OSError as error:  # as where it is too large
            logger.warning("a worker's own state is not kept in memory: %s", error)
            return memory
        memory.close()
        self._memory = larger
        return larger

    def close(self) -> None:
        """Let go of the memory; what is in it stays."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None


def _mapped(path: Path, slot_bytes: int) -> mmap.mmap:
    """Of a file that is there as large as it is, else with slots of that size."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(fd).st_size or slot_bytes * _NUM_ALL
        os.ftruncate(fd, size)
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)


def own_path(directory: Path, local_rank: int) -> Path:
    """The file of one worker."""
    return directory / f"own-{local_rank}"


def read_own() -> list[RankState]:
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


def entrust(records: Iterable[RankState]) -> None:
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


def _records(path: Path) -> list[tuple[RankState, int, int]]:
    """What can be believed in a file: the record, its kind, and the number of its slot."""
    found: list[tuple[RankState, int, int]] = []
    try:
        raw = path.read_bytes()
    except OSError:
        return found
    slot_bytes = len(raw) // _NUM_ALL
    for number in range(_NUM_ALL if slot_bytes > _HEAD.size else 0):
        start = number * slot_bytes
        *fields, size, checksum = _HEAD.unpack_from(raw, start)
        body = start + _HEAD.size
        blob = raw[body : body + max(size, 0)]
        if len(blob) != size or not size or checksum != _sum((*fields, size), blob):
            continue
        timeline, rank, world_size, step, kind, certain, rest = fields
        record = RankState(
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
        found.append((record, kind, number))
    return found


def _sum(fields: tuple[Any, ...], blob: bytes) -> int:
    return xxhash.xxh3_64_intdigest(_HEAD.pack(*fields, 0) + blob)
