"""Find what a save consists of, and read it: each block from the first place where it is right.

A save has one manifest, the same everywhere. It names files and tensors itself (a job of one rank,
formats 1 and 2), or it names parts, which say it rank by rank. ``Inventory`` looks both up; the
chunks that a region needs are looked for in parts by ``chunks``. ``FileCopies`` is one file in all
the places that hold it; ``read`` reads many blocks at the speed of the disk.

Guarantees: a part is believed only after it was compared with the manifest, and checked. A block is
handed on only after its hash was compared. Each thread reads a block into memory of its own, hashes
it there, and only then copies the wanted parts to where they belong, so no unverified byte reaches
its destination.
What can go wrong: no place has a right copy of a block (CheckpointInvalid with every place's
reason); one of them could not be read at all (OSError: it may have it after all).
Memory: ``_CACHED_PARTS`` parts, whatever the number of ranks, and a block for each thread.

Four threads with blocks of 16 MiB reach the limit of the disks we measured; a team of OpenMP
threads would make each copy wait for the slowest.

Nothing here knows what is in a tensor or needs torch (a destination is an address): the keeper and
the command line do without it.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import ctypes
import errno
import itertools
import mmap
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

import xxhash

from outlast.checkpoint.catalog import newest
from outlast.checkpoint.chunks import TensorInfo, find_chunks
from outlast.checkpoint.manifest import (
    BLOCK_BYTES,
    MANIFEST,
    PART_NAME,
    FileEntry,
    LaterFormat,
    Manifest,
    Place,
    RankPart,
    SaveName,
    TensorEntry,
    as_places,
    decode,
    decode_part,
    num_bytes,
    part_file,
    rank_of,
    rank_of_own,
    save_of,
    without_owner,
)
from outlast.checkpoint.spreads import Box
from outlast.errors import CheckpointInvalid
from outlast.storage import CopiesReader, Reader, Storage
from outlast.storage.directory import address_of

# --- what a save consists of ----------------------------------------------------------------------

MISSING: Final = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
_CACHED_PARTS: Final = 64

ReadFile = Callable[[str, FileEntry], bytes]
"""Reads one whole file, compared with its entry; raises CheckpointInvalid or OSError."""


class FoundManifest(NamedTuple):
    """A place's manifest of a save: its bytes, and what they say or why they say nothing."""

    data: bytes = b""
    manifest: Manifest | None = None
    problem: str = ""
    is_there: bool = True
    is_later: bool = False
    error: OSError | None = None


def look(place: Place, save: SaveName) -> FoundManifest:
    """The manifest of a save in one place; raises nothing."""
    try:
        data = place.storage.read(f"{save}/{MANIFEST}")
    except MISSING:
        return FoundManifest(problem=f"{MANIFEST} is missing", is_there=False)
    except OSError as error:
        return FoundManifest(problem=f"{MANIFEST}: {in_words(error)}", error=error)
    try:
        return FoundManifest(data, decode(data, save))
    except CheckpointInvalid as error:
        is_later = isinstance(error, LaterFormat)
        return FoundManifest(data, problem=error.reason, is_later=is_later)


def read_manifest(where: Storage | Sequence[Place], which: int | SaveName) -> Manifest:
    """The manifest of a save, or of the newest save of a step that has one that verifies.

    It is taken from the first place where it verifies.

    Raises:
        CheckpointInvalid: there is none, or none that verifies.
        OSError: a place failed in another way than by a missing file.
    """
    places = as_places(where)
    return newest(places, which, lambda save: find_manifest(places, save)[0])


def find_manifest(
    places: Sequence[Place], save: SaveName
) -> tuple[Manifest, dict[str, FoundManifest]]:
    """The manifest of a save, from the first place where it verifies.

    Returns:
        The manifest; and place → what was found there, of those that were looked at. The last one
        of them is the one that has the manifest.

    Raises:
        CheckpointInvalid, OSError: see ``read_manifest``.
    """
    found: dict[str, FoundManifest] = {}
    for place in places:
        one = found[place.name] = look(place, save)
        if one.manifest is not None:
            return one.manifest, found
    raise _none_valid(found, save.step)


def _none_valid(found: Mapping[str, FoundManifest], step: int) -> Exception:
    """What to raise when no place has a manifest that verifies."""
    several = len(found) > 1
    reason = "; ".join(
        f"{name}: {one.problem}" if several else one.problem for name, one in found.items()
    )
    failure = next((one.error for one in found.values() if one.error), None)
    if failure is None:
        return CheckpointInvalid(step, reason)
    return OSError(failure.errno or errno.EIO, reason) if several else failure


def is_torn(found: FoundManifest) -> bool:
    """Whether there is a manifest that was readable once."""
    return found.is_there and not found.is_later and found.error is None and found.manifest is None


class Inventory:
    """One checkpoint's files and tensors. May be used by one thread at a time.

    Args:
        manifest: the checkpoint's.
        read_file: reads a part.

    Attributes:
        num_parts_read: how many parts were read so far.
    """

    def __init__(self, manifest: Manifest, read_file: ReadFile) -> None:
        self.manifest = manifest
        self.num_parts_read = 0
        self._read_file = read_file
        self._parts: collections.OrderedDict[int, RankPart] = collections.OrderedDict()

    # --- files --------------------------------------------------------------------------------

    def part(self, rank: int) -> RankPart:
        """The part of ``rank``, of a manifest that names parts.

        Raises:
            CheckpointInvalid, OSError: it is right in no place.
        """
        part = self._parts.get(rank)
        if part is None:
            manifest, name = self.manifest, part_file(rank)
            data = self._read_file(name, manifest.parts[rank].file)
            part = decode_part(data, manifest.step, rank, manifest.world_size)
            self.num_parts_read += 1
            self._parts[rank] = part
            while len(self._parts) > _CACHED_PARTS:
                self._parts.popitem(last=False)
        self._parts.move_to_end(rank)
        return part

    def files(self, rank: int) -> dict[str, FileEntry]:
        """The files of ``rank``, its part among them.

        Raises:
            CheckpointInvalid, OSError: its part is right in no place.
        """
        manifest = self.manifest
        if manifest.parts:
            return {part_file(rank): manifest.parts[rank].file, **self.part(rank).files}
        return {name: entry for name, entry in manifest.files.items() if rank_of(name) == rank}

    def file(self, name: str) -> FileEntry:
        """Size and hashes of one file.

        Raises:
            CheckpointInvalid, OSError: there is none of that name, or its rank's part cannot be
                read.
        """
        manifest, rank = self.manifest, rank_of(name)
        if not manifest.parts:
            entry = manifest.files.get(name)
        elif rank is None or not 0 <= rank < manifest.world_size:
            entry = None
        elif PART_NAME.match(name):
            entry = manifest.parts[rank].file
        else:
            entry = self.part(rank).files.get(name)
        if entry is None:
            raise CheckpointInvalid(manifest.step, f"{MANIFEST} does not name {name}")
        return entry

    def walk(self) -> Iterator[tuple[str, FileEntry]]:
        """Every file, each rank's part before the others of that rank.

        The files of a rank whose part is right in no place are left out; the part is not.
        """
        if not self.manifest.parts:
            yield from sorted(self.manifest.files.items())
            return
        for rank, one in enumerate(self.manifest.parts):
            yield part_file(rank), one.file
            with contextlib.suppress(CheckpointInvalid, OSError):
                yield from sorted(self.part(rank).files.items())

    @property
    def num_bytes(self) -> int:
        """Size of all files together, without the manifest."""
        return num_bytes(self.manifest)

    # --- tensors ------------------------------------------------------------------------------

    def tensor(self, name: str, rank: int) -> TensorInfo:
        """What the tensor ``name`` is; ``rank`` is one that may know.

        Raises:
            KeyError: there is none.
            CheckpointInvalid, OSError: a part that is needed is right in no place.
        """
        if not self.manifest.parts:
            entry = self.manifest.tensors[name]
            return TensorInfo(entry.dtype, entry.shape)
        for one in self._likely(name, rank):
            held = self.part(one).contents.tensors.get(name)
            if held is not None:
                return TensorInfo(held.dtype, held.shape)
        raise KeyError(name)

    def tensors(self) -> dict[str, TensorInfo]:
        """The tensors that one rank of each structure knows; of ranks' own ones only theirs.

        Raises:
            CheckpointInvalid, OSError: a part that is needed is right in no place.
        """
        if not self.manifest.parts:
            entries = self.manifest.tensors
            return {name: TensorInfo(entry.dtype, entry.shape) for name, entry in entries.items()}
        return {
            name: TensorInfo(held.dtype, held.shape)
            for rank in self.firsts()
            for name, held in self.part(rank).contents.tensors.items()
        }

    def firsts(self) -> list[int]:
        """The first rank of each structure: together they know every tensor that is spread."""
        if not self.manifest.parts:
            return list(range(self.manifest.world_size))
        first: dict[int, int] = {}
        for rank, part in enumerate(self.manifest.parts):
            first.setdefault(part.structure, rank)
        return list(first.values())

    def ranks_with(self, name: str) -> Iterator[int]:
        """All ranks, those first that are likely to hold a tensor ``name``.

        A name that ends in a dot stands for all that begin with it.
        """

        def is_meant(tensor: str) -> bool:
            return tensor == name or (name.endswith(".") and tensor.startswith(name))

        likely: list[int] = []
        if self.manifest.parts:
            likely += [
                rank
                for rank in self.firsts()
                if any(map(is_meant, map(without_owner, self.part(rank).contents.tensors)))
            ]
        for tensor, entry in self.manifest.tensors.items():
            if is_meant(tensor):
                ranks = (rank_of(chunk.file) for chunk in entry.chunks)
                likely += sorted({rank for rank in ranks if rank is not None})
        every = range(self.manifest.world_size)
        yield from (rank for rank in dict.fromkeys([*likely, *every]) if rank in every)

    def locate(self, wanted: Mapping[str, Sequence[Box]], rank: int) -> dict[str, TensorEntry]:
        """Find the chunks that make up regions of tensors.

        Args:
            wanted: name → boxes in the whole tensor.
            rank: one that may know them.

        Returns:
            For each name dtype, shape and, of its chunks, those that share something with a box.

        Raises:
            CheckpointInvalid: the chunks do not cover a box, or do so twice; or a part that is
                needed is right in no place.
            OSError: a part could not be read.
        """
        if not self.manifest.parts:
            return {name: self._inline(name) for name in wanted}
        return find_chunks(self, wanted, rank)

    def _inline(self, name: str) -> TensorEntry:
        entry = self.manifest.tensors.get(name)
        if entry is None:
            raise CheckpointInvalid(
                self.manifest.step, f"{MANIFEST} does not name the tensor {name}"
            )
        return entry

    def _likely(self, name: str, rank: int) -> Iterator[int]:
        """All ranks, those first whose parts may know ``name``."""
        owner = rank_of_own(name)
        first = [owner] if owner is not None else []
        every = range(self.manifest.world_size)
        for one in dict.fromkeys([*first, rank, *self.firsts(), *every]):
            if one < self.manifest.world_size:
                yield one


def inventory_of(manifest: Manifest, places: Sequence[Place]) -> Inventory:
    """What a save consists of, as any of the places where it lies says."""

    def read(name: str, entry: FileEntry) -> bytes:
        copies = FileCopies(places, f"{manifest.save}/{name}", entry)
        try:
            return copies.whole()
        finally:
            copies.close()

    return Inventory(manifest, read)


# --- one file in all its places -------------------------------------------------------------------

PAGE: Final = 4096
_HUGE_PAGE: Final = 2 << 20


class Bounce:
    """Memory for one block of a file: aligned as direct reads want it, in huge pages if it can be.

    Reading into pages of 4 KiB is half as fast, and memory that was used before is not faulted in
    anew: one of these serves many blocks.
    """

    def __init__(self, entry: FileEntry) -> None:
        wanted = -(-max(min(entry.size, BLOCK_BYTES), 1) // PAGE) * PAGE
        spare = _HUGE_PAGE if wanted >= _HUGE_PAGE else 0
        memory = mmap.mmap(-1, wanted + spare, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if spare:
            with contextlib.suppress(OSError):  # without huge pages it is only slower
                memory.madvise(mmap.MADV_HUGEPAGE)
        start = -address_of(memoryview(memory)) % (spare or 1)
        self.view = memoryview(memory)[start : start + wanted]


def copy_bytes(target: int, source: int, num_bytes: int) -> None:
    """Copy between addresses; other threads run meanwhile."""
    ctypes.memmove(target, source, num_bytes)


class FileCopies:
    """A file that may lie in several places; may be used by several threads at once.

    Args:
        places: where it may lie, the one to be read first first.
        path: its name there, with the save's directory.
        entry: size and hashes, from the manifest.

    Attributes:
        problems: place → the first thing that was found wrong with it there.
        used: name of a place → number of blocks taken from it.
        missing: places that do not have the file.
    """

    def __init__(self, places: Sequence[Place], path: str, entry: FileEntry) -> None:
        self.path = path
        self.entry = entry
        self.problems: dict[str, str] = {}
        self.used: collections.Counter[str] = collections.Counter()
        self.missing: set[str] = set()
        self._places = tuple(places)
        self._short = path.rpartition("/")[2]
        self._readers: dict[str, Reader] = {}
        self._lock = threading.Lock()

    def block_range(self, index: int) -> tuple[int, int]:
        """First byte of a block, and the byte after its last."""
        start = index * BLOCK_BYTES
        return start, min(start + BLOCK_BYTES, self.entry.size)

    def block(self, index: int, buffer: memoryview) -> memoryview:
        """The verified bytes of a block: a part of ``buffer``, or a place's own memory.

        Args:
            index: which block.
            buffer: at least as long as the block, rounded up to pages.

        Raises:
            CheckpointInvalid: no place has it; gives every place's reason.
            OSError: no place that can be read has it.
        """
        problems: list[str] = []
        failure: OSError | None = None
        for place in self._places:
            try:
                data, problem = self._from(place, index, buffer)
            except MISSING:
                problem = f"{self._short} is missing"
                self.missing.add(place.name)
            except OSError as error:
                problem, failure = f"{self._short}: {in_words(error)}", failure or error
            if not problem:
                with self._lock:
                    self.used[place.name] += 1
                return data
            with self._lock:
                self.problems.setdefault(place.name, problem)
            problems.append(f"{place.name}: {problem}" if len(self._places) > 1 else problem)
        reason = "; ".join(problems)
        if failure is None:
            raise CheckpointInvalid(save_of(self.path).step, reason)
        if len(self._places) == 1:
            raise failure
        raise OSError(failure.errno or errno.EIO, reason)

    def whole(self) -> bytes:
        """All of a small file, verified.

        Raises:
            CheckpointInvalid, OSError: see ``block``.
        """
        buffer, raw = Bounce(self.entry).view, bytearray()
        for index in range(len(self.entry.xxh3_128)):
            raw += self.block(index, buffer)
        return bytes(raw)

    def close(self) -> None:
        """Let go of the file everywhere; it is opened anew if it is read again."""
        with self._lock:
            readers, self._readers = self._readers, {}
        for reader in readers.values():
            reader.close()

    def _from(self, place: Place, index: int, buffer: memoryview) -> tuple[memoryview, str]:
        start, end = self.block_range(index)
        data = self._seen(place)
        if data is not None:
            size, data = len(data), data[start:end]
        else:
            reader = self._reader(place)
            size = reader.size
        if size != self.entry.size:
            return buffer, f"{self._short} has {size} bytes and should have {self.entry.size}"
        if data is not None:
            return data, self._problem(data, len(data), index)
        whole_pages = -(-(end - start) // PAGE) * PAGE  # so that its end is read directly too
        pages, data = buffer[:whole_pages], buffer[: end - start]
        problem = self._problem(data, reader.read_into(pages, start), index)
        for number in itertools.count(1):
            if not problem or not isinstance(reader, CopiesReader):
                break
            try:
                count = reader.read_copy(number, pages, start)
            except MISSING:
                break  # all copies were asked for
            problem = self._problem(data, count, index)
        return data, problem

    def _problem(self, data: memoryview, count: int, index: int) -> str:
        """What is wrong with a block of which so many bytes were read; "" for nothing."""
        if count < len(data):
            return f"{self._short} ended while it was read"
        if xxhash.xxh3_128_hexdigest(data) != self.entry.xxh3_128[index]:
            blocks = len(self.entry.xxh3_128)
            return f"{self._short} does not match its checksum (block {index} of {blocks})"
        return ""

    def _seen(self, place: Place) -> memoryview | None:
        """The file as it lies in this machine's memory, if that is where the place is."""
        view = getattr(place.storage, "view", None)
        found: memoryview | None = view(self.path) if callable(view) else None
        return found

    def _reader(self, place: Place) -> Reader:
        with self._lock:
            reader = self._readers.get(place.name)
            if reader is None:
                reader = self._readers[place.name] = place.storage.open(self.path)
            return reader


def in_words(error: OSError) -> str:
    """An error of the system as a person wants it."""
    name = errno.errorcode.get(error.errno or 0, type(error).__name__)
    return f"{name}: {error.strerror or error}"


# --- reading many blocks at once ------------------------------------------------------------------

NUM_THREADS: Final = 4


class Stage(Protocol):
    """Memory that is not the last destination: verified bytes are brought on from there."""

    def address(self) -> int:
        """Where the bytes go; the memory may be made at the first call."""

    def arrived(self, num_bytes: int) -> None:
        """So many more bytes are there."""


class ReadRange(NamedTuple):
    """Bytes ``start`` to ``end`` of a file, and where they go: an address, or else a stage."""

    start: int
    end: int
    address: int
    stage: Stage | None = None


class ReadJob(NamedTuple):
    """One file to be read: its copies, the blocks, and what is wanted of them."""

    copies: FileCopies
    blocks: Sequence[int]
    pieces: Sequence[ReadRange]


def job_for(copies: FileCopies, pieces: Iterable[ReadRange], *, everything: bool) -> ReadJob:
    """The blocks that ``pieces`` lie in; with ``everything`` the others too, to be verified."""
    wanted = sorted((piece for piece in pieces if piece.end > piece.start), key=lambda p: p.start)
    count = len(copies.entry.xxh3_128)
    if everything:
        return ReadJob(copies, range(count), wanted)
    blocks: set[int] = set()
    size = copies.block_range(0)[1] or 1
    for piece in wanted:
        blocks.update(range(piece.start // size, (piece.end - 1) // size + 1))
    return ReadJob(copies, sorted(blocks), wanted)


def read(jobs: Sequence[ReadJob], progress: Callable[[int], None] | None = None) -> None:
    """Read, verify and deliver everything; ``progress`` is told the bytes of each block.

    Raises:
        CheckpointInvalid, OSError: of the first block that no place has; what was delivered until
            then was verified.
    """
    run = _ReadRun(jobs, progress)
    num_threads = min(NUM_THREADS, run.num_blocks)
    if num_threads < 2:
        run.work()
    else:
        threads = [
            threading.Thread(target=run.work, name=f"outlast-read-{number}", daemon=True)
            for number in range(num_threads)
        ]
        started = []
        try:
            for thread in threads:
                thread.start()
                started.append(thread)
            for thread in threads:
                thread.join()
        finally:  # interrupted, too: nobody may write to memory that is given back meanwhile
            run.stop()
            for thread in started:
                thread.join()
    run.close()
    if run.error is not None:
        raise run.error


class _ReadRun:
    """A queue of blocks that several threads work on."""

    def __init__(self, jobs: Sequence[ReadJob], progress: Callable[[int], None] | None) -> None:
        self.num_blocks = sum(len(job.blocks) for job in jobs)
        self.error: BaseException | None = None
        self._jobs = jobs
        self._progress = progress
        self._left = {id(job): len(job.blocks) for job in jobs}
        self._queue = self._tasks()
        self._lock = threading.Lock()

    def work(self) -> None:
        """What each thread does; an error is kept for the owner, and ends all threads."""
        bounce: Bounce | None = None
        try:
            while (task := self._next()) is not None:
                job, index, wanted = task
                start, end = job.copies.block_range(index)
                if bounce is None or len(bounce.view) < end - start:
                    bounce = Bounce(job.copies.entry)
                data = job.copies.block(index, bounce.view)
                _deliver(data, start, wanted)
                self._done(job, end - start)
        except BaseException as error:  # noqa: BLE001 - the owner raises it
            with self._lock:
                self.error = self.error or error

    def stop(self) -> None:
        """No further block is begun."""
        with self._lock:
            self._queue = iter(())

    def close(self) -> None:
        """Let go of all files."""
        for job in self._jobs:
            job.copies.close()

    def _tasks(self) -> Iterator[tuple[ReadJob, int, list[ReadRange]]]:
        for job in self._jobs:
            ends = _running_ends(job.pieces)
            for index in job.blocks:
                start, end = job.copies.block_range(index)
                first = bisect.bisect_right(ends, start)
                last = bisect.bisect_left(job.pieces, end, lo=first, key=lambda p: p.start)
                wanted = [piece for piece in job.pieces[first:last] if piece.end > start]
                yield job, index, wanted

    def _next(self) -> tuple[ReadJob, int, list[ReadRange]] | None:
        with self._lock:
            return None if self.error is not None else next(self._queue, None)

    def _done(self, job: ReadJob, num_bytes: int) -> None:
        with self._lock:
            self._left[id(job)] -= 1
            is_last = not self._left[id(job)]
            if self._progress is not None:
                self._progress(num_bytes)
        if is_last:  # a checkpoint of a thousand ranks has more files than a process may open
            job.copies.close()


def _running_ends(pieces: Sequence[ReadRange]) -> list[int]:
    """For each piece the furthest end of those up to it: pieces may overlap, ends must not sink."""
    ends, furthest = [], 0
    for piece in pieces:
        furthest = max(furthest, piece.end)
        ends.append(furthest)
    return ends


def _deliver(data: memoryview, start: int, pieces: Sequence[ReadRange]) -> None:
    """Copy what is wanted of the verified bytes from ``start`` on."""
    if not pieces:
        return
    source, end = address_of(data), start + len(data)
    for piece in pieces:
        low, high = max(piece.start, start), min(piece.end, end)
        target = piece.address if piece.stage is None else piece.stage.address()
        copy_bytes(target + low - piece.start, source + low - start, high - low)
        if piece.stage is not None:
            piece.stage.arrived(high - low)


def by_file(pieces: Iterable[tuple[str, ReadRange]]) -> Mapping[str, list[ReadRange]]:
    """Sort pieces by the file that they are in."""
    found: dict[str, list[ReadRange]] = {}
    for file, piece in pieces:
        found.setdefault(file, []).append(piece)
    return found
