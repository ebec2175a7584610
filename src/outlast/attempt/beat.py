"""What a worker last did, and what it alone knew, in memory that can be read after its death.

Files for each worker in the attempt's private directory on a memory file system, written through a
mapping: no system call on the step's path.

**Beat**, for the agent and the watcher. Its parts, each written in one piece by one thread:

==========  ===========================================================================
part        what it says
==========  ===========================================================================
beat        completed steps, and the wall-clock time of the last boundary
phase       what the training thread is doing, and since when
updates     optimizer updates in this process: the sign of life of a script without steps
began       the first step and the first update that were said in this attempt
pulse       the last time that any Python ran, and how many collectives were begun and ended
kind        a number for the kind of work: only workers of one kind can be compared
timings     a ring: of each step its seconds, and what they were spent on
==========  ===========================================================================

Times are monotonic seconds, which all processes of a machine share, but for the beat's, which goes
into the ledger. What can go wrong: a reader meets a write in progress. Parts of sixteen bytes are
copied in one go; a timing is believed only if its step stands at both of its ends.

**Own**, for the worker that takes a lost one's place: random numbers and the place in the data (of
rank 0 also the buffers that DDP sends to all others before a forward pass). Survivors of a loss
have the weights and can send them; but what the lost worker would have drawn next nobody else
knows. Kept are the newest two moments that can be gone on from (the ends of steps, whichever these
are), and of the step in progress what will be its end if nothing is drawn any more: ranks may be a
moment apart, and a worker may die after its part of a step was used by the others. And all that
twice: what an attempt has gone on from stays until the attempt after it has begun, as one that is
lost while all go into an attempt may have written nothing there yet. Each record says of which
attempt it is (``Descent``): those of another one are of the same step, and may be dealt out
otherwise. What can go wrong: the process is killed in the middle of a write. A record is believed
only with its checksum; without it the job resumes from a checkpoint.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import logging
import mmap
import os
import shutil
import struct
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import xxhash

logger = logging.getLogger(__name__)

BEATS_VARIABLE: Final = "OUTLAST_BEATS"  # directory, set by our agent
NUM_TIMINGS: Final = 256  # a power of two is not needed; 30 steps of 20 ms pass in 0.6 s
UNDER_WAY_S: Final = 1e-6
BEATS_PREFIX: Final = "outlast-beats-"
_LOCK: Final = "lock"
_BEAT: Final = struct.Struct("<qd")
_PHASE: Final = struct.Struct("<qd")
_UPDATES: Final = struct.Struct("<qd")
_PULSE: Final = struct.Struct("<dqqq")
_TIMING: Final = struct.Struct("<qdfffffxxxxq")
_PHASE_AT: Final = 16
_UPDATES_AT: Final = 32
_PULSE_AT: Final = 48
_BEGAN: Final = struct.Struct("<q")  # one more than the number; 0: none yet
_BEGAN_STEP_AT: Final = 80
_BEGAN_UPDATES_AT: Final = 88
_KIND: Final = struct.Struct("<q")
_KIND_AT: Final = 120
_TIMINGS_AT: Final = 128
_BYTES: Final = _TIMINGS_AT + NUM_TIMINGS * _TIMING.size


class Phase(enum.IntEnum):
    """What a training thread is doing."""

    STARTING = 0  # until the first step of the attempt begins
    LOADING = 1  # it waits for the next batch
    STEPPING = 2  # in the loop's body
    REDUCING = 3  # its own part of the gradients is there, and it waits for the others
    UPDATING = 4  # the optimizer changes the weights
    SAVING = 5  # at a boundary, for a snapshot or for what the ranks agree on
    EVALUATING = 6  # in the loop's body, with the model in evaluation mode
    OUTSIDE = 7  # before, between and after loops
    ENDED = 8


class BeatSeen(NamedTuple):
    """What a worker last said: completed steps, wall-clock seconds since the epoch."""

    step: int
    t: float


class PhaseSeen(NamedTuple):
    """What a worker is doing, since which monotonic second."""

    phase: Phase
    since_s: float


class UpdatesSeen(NamedTuple):
    """Optimizer updates of a process, and the monotonic second of the last one."""

    updates: int
    last_s: float


class PulseSeen(NamedTuple):
    """What a thread beside the training says.

    Attributes:
        last_s: monotonic second at which Python last ran something else than the training.
        begun, ended: collectives; -1: not known.
        is_evaluating: whether the session's model is in evaluation mode.
    """

    last_s: float
    begun: int
    ended: int
    is_evaluating: bool = False


class Timing(NamedTuple):
    """One step's seconds, and what they were spent on.

    Attributes:
        step: completed steps at its end.
        end_s: monotonic second of its end.
        whole_s: from one boundary to the next.
        compute_s: of this worker's own work.
        wait_s: in which it waited for other ranks.
        data_s: in which it waited for its batch.
        stall_s: that checkpoints took; never 0 (``UNDER_WAY_S`` at least) where one was under way.
    """

    step: int
    end_s: float
    whole_s: float
    compute_s: float
    wait_s: float
    data_s: float
    stall_s: float


def beats_root() -> Path:
    """Where agents' directories are."""
    memory = Path("/dev/shm")  # noqa: S108 - private directories are made in it
    return memory if memory.is_dir() else Path(tempfile.gettempdir())


class BeatsDirectory:
    """The agent's side: a private directory in memory, gone with the agent.

    An agent that is killed cannot clean up; the next one on the machine does, and knows by a lock
    which directories have no owner any more.
    """

    def __init__(self) -> None:
        root = beats_root()
        _reclaim(root)
        self.path = Path(tempfile.mkdtemp(prefix=BEATS_PREFIX, dir=root))
        # Under its name only once it is held: else another agent that starts now takes it for one
        # whose owner has died, and removes the directory.
        begun = self.path / f"{_LOCK}-begun"
        self._lock = os.open(begun, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        begun.rename(self.path / _LOCK)

    def clear(self) -> None:
        """Forget the workers of an attempt that is over, and what others have left of them."""
        # Not stacks-*: workers that stay have them open, and they are emptied at each use.
        for name in ("beat-*", "evidence-*", "recorder-*"):
            for stale in self.path.glob(name):
                stale.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _reclaim(root: Path) -> None:
    for lock in root.glob(f"{BEATS_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError):  # another user's, or gone in this moment
            fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held by a living owner: an error
                shutil.rmtree(lock.parent)
            finally:
                os.close(fd)


class Beat:
    """A worker's side; does nothing where no agent asked for it.

    A process may have several, which write to the same memory: each part has one writer.
    """

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._has_begun: set[int] = set()
        directory = os.environ.get(BEATS_VARIABLE)
        if directory:
            path = beat_path(Path(directory), int(os.environ.get("LOCAL_RANK", "0")))
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                try:
                    os.ftruncate(fd, _BYTES)
                    self._memory = mmap.mmap(fd, _BYTES)
                finally:
                    os.close(fd)
            except OSError:
                self._memory = None  # watching that fails never stops training

    def close(self) -> None:
        """Let go of the memory; what is in it stays."""
        self._memory = None

    @property
    def is_heard(self) -> bool:
        """Whether there is an agent that asked for it."""
        return self._memory is not None

    def beat(self, step: int) -> None:
        """Say that ``step`` steps are complete."""
        if self._memory is not None:
            _BEAT.pack_into(self._memory, 0, step, time.time())
            self._begin(_BEGAN_STEP_AT, step)

    def phase(self, phase: int, now_s: float | None = None) -> None:
        """Say what the training thread does from now on: a ``Phase``, or its number."""
        if self._memory is not None:
            since_s = time.monotonic() if now_s is None else now_s
            _PHASE.pack_into(self._memory, _PHASE_AT, phase, since_s)

    def updates(self, number: int) -> None:
        """Say that an optimizer has updated the weights so many times in this process."""
        if self._memory is not None:
            _UPDATES.pack_into(self._memory, _UPDATES_AT, number, time.monotonic())
            self._begin(_BEGAN_UPDATES_AT, number)

    def _begin(self, at: int, number: int) -> None:
        """Where an attempt began: a reader that looks ten times a second has not seen it."""
        if at not in self._has_begun and self._memory is not None:
            self._has_begun.add(at)
            if not _BEGAN.unpack_from(self._memory, at)[0]:
                _BEGAN.pack_into(self._memory, at, number + 1)

    def pulse(self, begun: int = -1, ended: int = -1, *, is_evaluating: bool = False) -> None:
        """Say that Python runs; how many collectives were begun and ended, where that is known."""
        if self._memory is not None:
            said = time.monotonic(), begun, ended, is_evaluating
            _PULSE.pack_into(self._memory, _PULSE_AT, *said)

    def kind(self, number: int) -> None:
        """Say what kind of work this worker does: the same number, the same work."""
        if self._memory is not None:
            _KIND.pack_into(self._memory, _KIND_AT, number)

    def timing(self, step: int, *seconds: float) -> None:
        """Say what a step's time was spent on: the fields of ``Timing``, which costs to make."""
        if self._memory is not None:
            at = _TIMINGS_AT + step % NUM_TIMINGS * _TIMING.size
            _TIMING.pack_into(self._memory, at, step, *seconds, step)


def beat_path(directory: Path, local_rank: int) -> Path:
    """The file of one worker."""
    return directory / f"beat-{local_rank}"


class BeatReader:
    """What one worker has said; opened once for an attempt, read as often as wanted.

    Args:
        directory: the agent's.
        local_rank: the worker's.

    Raises:
        OSError: the worker has said nothing yet.
    """

    def __init__(self, directory: Path, local_rank: int) -> None:
        fd = os.open(beat_path(directory, local_rank), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if os.fstat(fd).st_size != _BYTES:
                raise FileNotFoundError(f"the beat of local rank {local_rank} is not there yet")
            self._memory = mmap.mmap(fd, _BYTES, prot=mmap.PROT_READ)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Let go of the memory."""
        self._memory.close()

    @property
    def beat(self) -> BeatSeen | None:
        """Completed steps; None before the first beat."""
        seen = BeatSeen(*_BEAT.unpack_from(self._memory, 0))
        return seen if seen.t else None

    @property
    def phase(self) -> PhaseSeen | None:
        """What it is doing; None where it has not said so."""
        number, since_s = _PHASE.unpack_from(self._memory, _PHASE_AT)
        try:
            return PhaseSeen(Phase(number), since_s) if since_s else None
        except ValueError:  # the memory is the worker's to write
            return None

    @property
    def updates(self) -> UpdatesSeen | None:
        """Optimizer updates; None before the first."""
        seen = UpdatesSeen(*_UPDATES.unpack_from(self._memory, _UPDATES_AT))
        return seen if seen.last_s else None

    @property
    def began_step(self) -> int | None:
        """The first step that it said in this attempt; None before."""
        return self._began(_BEGAN_STEP_AT)

    @property
    def began_updates(self) -> int | None:
        """The first number of updates that it said in this attempt; None before."""
        return self._began(_BEGAN_UPDATES_AT)

    def _began(self, at: int) -> int | None:
        number = int(_BEGAN.unpack_from(self._memory, at)[0])
        return number - 1 if number else None

    @property
    def pulse(self) -> PulseSeen | None:
        """The last pulse; None before the first."""
        last_s, begun, ended, is_evaluating = _PULSE.unpack_from(self._memory, _PULSE_AT)
        return PulseSeen(last_s, begun, ended, bool(is_evaluating)) if last_s else None

    @property
    def kind(self) -> int:
        """The number of its kind of work; 0 where it has said none."""
        return int(_KIND.unpack_from(self._memory, _KIND_AT)[0])

    def timings(self, after_step: int) -> list[Timing]:
        """Steps after ``after_step`` that are still there, in order."""
        return sorted(
            Timing(*fields[:-1])
            for fields in _TIMING.iter_unpack(self._memory[_TIMINGS_AT:_BYTES])
            if fields[0] == fields[-1] and fields[0] > after_step and fields[1]
        )


def most_updates(directory: Path, local_ranks: Iterable[int]) -> int:
    """Optimizer updates of the worker that has made most; 0 where none has told any."""
    most = 0
    for local_rank in local_ranks:
        with (
            contextlib.suppress(OSError, ValueError),
            contextlib.closing(BeatReader(directory, local_rank)) as heard,
        ):
            most = max(most, heard.updates.updates if heard.updates else 0)
    return most


def read_beat(directory: Path, local_rank: int) -> BeatSeen | None:
    """What the worker last said of its steps, or None when it never did."""
    try:
        heard = BeatReader(directory, local_rank)
    except (OSError, ValueError):
        return None
    try:
        return heard.beat
    finally:
        heard.close()


EMPTY_VARIABLE: Final = "OUTLAST_EMPTY_PLACES"  # local ranks that have no worker in the attempt
SLOT_BYTES: Final = 128 << 10  # of each slot, as long as that is enough
SLOT_BYTES_MAX: Final = 64 << 20
_NUM_SLOTS: Final = 4  # of each of two attempts
_NUM_ALL: Final = 2 * _NUM_SLOTS
_HEAD: Final = struct.Struct("<qqqqqBB16sqQ")
# What is known of a worker, in one byte; and whether the optimizer was about to begin.
_FINAL, _SEASONED, _IN_BACKWARD, _LATE, _AT_OPTIMIZER = 1, 2, 4, 8, 16
_HABITS: Final = _SEASONED | _IN_BACKWARD | _LATE
_entrusted: list[RankState] = []  # of other ranks, which have handed it over


class Basis(NamedTuple):
    """What an attempt has gone on from: own states of which attempt, step and number of workers."""

    attempt: int
    step: int
    world_size: int


class Descent(NamedTuple):
    """Where the own states of an attempt come from.

    Another number of workers shares out anew what all have counted. So own states of one step go
    together only if they are of one attempt: of two of them, some samples may be in none, or twice.

    Attributes:
        timeline: number of the attempt in which this line of steps began.
        attempt: number of this one.
        world_size: its number of workers.
        basis: what it has gone on from, if from survivors.
    """

    timeline: int
    attempt: int
    world_size: int
    basis: Basis | None = None

    def attempt_of(self, step: int) -> int:
        """The attempt that a worker's own state of ``step`` is of.

        As many workers as before begin with what those had: either's will do.
        """
        basis = self.basis
        if basis is not None and (basis.step, basis.world_size) == (step, self.world_size):
            return basis.attempt
        return self.attempt


class RankState(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's own state.

    Attributes:
        timeline: number of the attempt in which this line of steps began.
        attempt: see ``Descent.attempt_of``.
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
    attempt: int
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
        descent: of the attempt.
        rank: this worker's.
    """

    def __init__(self, descent: Descent, rank: int) -> None:
        self._descent, self._rank = descent, rank
        _entrusted[:] = [one for one in _entrusted if _is_of(one, descent)]
        self._first_slot = known = 0
        self._memory: mmap.mmap | None = None
        self._path: Path | None = None
        directory = os.environ.get(BEATS_VARIABLE)
        if directory:
            path = self._path = own_path(Path(directory), int(os.environ.get("LOCAL_RANK", "0")))
            known = _habits(path)
            self._first_slot = _NUM_SLOTS * _other_half(path, descent)
            try:
                self._memory = _mapped(path, SLOT_BYTES)
                self._forget_undone(path)
            except OSError as error:  # what is lost then is resumed from a checkpoint
                logger.warning("a worker's own state is not kept in memory: %s", error)
        self._pending: tuple[int, bool, bytes] | None = None  # step, late in it, blob
        self._newest: int | None = None  # completed, of those that are kept
        self._turn = 0  # the slot that it has
        self._is_seasoned = bool(known & _SEASONED)
        self._draws_in_backward = bool(known & _IN_BACKWARD)
        self._draws_late = bool(known & _LATE)

    def _forget_undone(self, path: Path) -> None:
        """What was written of steps that are to be made again is not what they will be.

        The attempt's record of samples is another one, for a start.
        """
        memory, (timeline, _, _, basis) = self._memory, self._descent
        if memory is None or basis is None:
            return
        for record, _, slot in _records(path):
            if record.timeline == timeline and record.step > basis.step:
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
        timeline, _, world_size, _ = self._descent
        whose = timeline, self._descent.attempt_of(step), self._rank, world_size
        fields = (*whose, step, kind, certain, rest, len(blob))
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
    directory = os.environ.get(BEATS_VARIABLE)
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


def _is_of(record: RankState, descent: Descent) -> bool:
    """Whether it is of what the attempt has gone on from."""
    found = Basis(record.attempt, record.step, record.world_size)
    return (record.timeline, found) == (descent.timeline, descent.basis)


def _other_half(path: Path, descent: Descent) -> int:
    """0 or 1: the half in which nothing lies that the attempt has gone on from."""
    for record, _, slot in _records(path):
        if _is_of(record, descent):
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
        timeline, attempt, rank, world_size, step, kind, certain, rest = fields
        record = RankState(
            timeline=timeline,
            attempt=attempt,
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
