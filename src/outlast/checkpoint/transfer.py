"""Read, copy and mend a save's files: each block from the first place where it is right.

``FileCopies`` is one file in all the places that hold it; ``read`` reads many blocks at the speed
of the disk; ``copy_file`` copies a file to another place; ``mend_file`` and ``mend_copy`` mend
one place from the others.

Guarantees: a block is handed on only after its hash was compared with the manifest's. Each thread
reads a block into memory of its own, hashes it there, and only then copies the wanted parts to
where they belong, so no unverified byte reaches its destination. A file appears in its new place
only in full; in a place that is mended, the manifest comes last.
What can go wrong: no place has a right copy of a block (CheckpointInvalid with every place's
reason); one of them could not be read at all (OSError: it may have it after all), or cannot be
written.

Four threads with blocks of 16 MiB reach the limit of the disks we measured; a team of OpenMP
threads would make each copy wait for the slowest.

A save has one manifest, the same everywhere. Before format 3 a place could hold another save of the
same step under the same name: nothing of it is mended from here. A place without a manifest has a
copy in the making, or on its way out.

Nothing here knows of tensors or needs torch (a destination is an address): the keeper and the
command line do without it.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import ctypes
import errno
import mmap
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

import xxhash

from outlast.checkpoint.catalog import newest
from outlast.checkpoint.inventory import Inventory
from outlast.checkpoint.manifest import (
    BLOCK_BYTES,
    MANIFEST,
    FileEntry,
    LaterFormat,
    Manifest,
    Place,
    SaveName,
    as_places,
    decode,
    save_of,
    sign,
)
from outlast.errors import CheckpointInvalid
from outlast.storage import Reader, Storage
from outlast.storage.directory import address_of

# --- one file in all its places -------------------------------------------------------------------

PAGE: Final = 4096
_HUGE_PAGE: Final = 2 << 20
MISSING: Final = (FileNotFoundError, IsADirectoryError, NotADirectoryError)


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
        if data is None:
            whole_pages = -(-(end - start) // PAGE) * PAGE  # so that its end is read directly too
            if reader.read_into(buffer[:whole_pages], start) < end - start:
                return buffer, f"{self._short} ended while it was read"
            data = buffer[: end - start]
        if xxhash.xxh3_128_hexdigest(data) != self.entry.xxh3_128[index]:
            blocks = len(self.entry.xxh3_128)
            return buffer, f"{self._short} does not match its checksum (block {index} of {blocks})"
        return data, ""

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


# --- copying and mending --------------------------------------------------------------------------

Progress = Callable[[int, int], None]


class Repaired(NamedTuple):
    """A file that is whole again: its name, the place's name, and where its bytes came from."""

    file: str
    place: str
    source: str


class NotMended(NamedTuple):
    """A file that stays damaged: right in no place (CheckpointInvalid), or not written."""

    file: str
    error: CheckpointInvalid | OSError


class FoundManifest(NamedTuple):
    """A place's manifest of a save: its bytes, and what they say or why they say nothing."""

    data: bytes = b""
    manifest: Manifest | None = None
    problem: str = ""
    is_there: bool = True
    is_later: bool = False
    error: OSError | None = None


def copy_file(
    source: Storage,
    target: Storage,
    name: str,
    entry: FileEntry,
    progress: Progress | None = None,
) -> None:
    """Copy one file, block by block, each verified; ``progress`` is told (bytes done, in all).

    Args:
        source: where it lies.
        target: where it shall lie; nothing appears there if anything goes wrong.
        name: its name in both, with the save's directory.
        entry: its size and hashes, from the manifest.
        progress: told after each block; what it raises ends the copy.

    Raises:
        CheckpointInvalid: the source's copy is missing, truncated or altered.
        OSError: as either storage gave it.
    """
    copies = FileCopies([Place(source.describe(), source)], name, entry)
    try:
        _write(copies, target, progress)
    finally:
        copies.close()


def mend_file(
    places: Sequence[Place],
    bad: Place,
    path: str,
    entry: FileEntry,
    progress: Progress | None = None,
) -> str:
    """Write ``path`` anew in the place ``bad``, of blocks that are right in any place.

    Returns:
        The name of the place that most of them came from.

    Raises:
        CheckpointInvalid, OSError: a block is right nowhere, or ``bad`` cannot be written.
    """
    others = [place for place in places if place.name != bad.name]
    copies = FileCopies([*others, bad], path, entry)
    try:
        _write(copies, bad.storage, progress)
    finally:
        copies.close()
    return copies.used.most_common(1)[0][0] if copies.used else bad.name


def inventory_of(manifest: Manifest, places: Sequence[Place]) -> Inventory:
    """What a save consists of, as any of the places where it lies says."""

    def read(name: str, entry: FileEntry) -> bytes:
        copies = FileCopies(places, f"{manifest.save}/{name}", entry)
        try:
            return copies.whole()
        finally:
            copies.close()

    return Inventory(manifest, read)


def _write(copies: FileCopies, target: Storage, progress: Progress | None) -> None:
    size = copies.entry.size
    buffer = Bounce(copies.entry).view
    blob = target.create(copies.path, size)
    try:
        for index in range(len(copies.entry.xxh3_128)):
            start, end = copies.block_range(index)
            blob.write_at(copies.block(index, buffer), start)
            if progress is not None:
                progress(end, size)
        blob.finish()
    except BaseException:
        blob.abandon()
        raise


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


def mend_manifest(place: Place, manifest: Manifest, data: bytes) -> None:
    """Put another place's manifest where it is missing or does not verify; its files come first."""
    if manifest.save.nonce:
        sign(place.storage, manifest.save, manifest.job)
    place.storage.put(f"{manifest.save}/{MANIFEST}", data)


def mend_copy(
    here: Place,
    places: Sequence[Place],
    manifest: Manifest,
    source: Place | None,
    progress: Callable[[int], None],
) -> Iterator[Repaired | NotMended]:
    """Verify and mend every file of one place's copy of a save; the manifest comes last.

    Args:
        here: the place of the copy.
        places: all places that have a copy, in order of speed.
        manifest: what the copy should consist of.
        source: the place that ``manifest`` was read from; None if it is the copy's own. A copy
            whose own manifest is of a later format is left alone.
        progress: told the bytes of each file.

    Yields:
        Each file that was damaged: mended, or not mended.
    """
    whole = True
    if source is not None:
        own = look(here, manifest.save)
        if own.is_later:  # a newer version of Outlast knows what it is
            yield NotMended(MANIFEST, LaterFormat(manifest.step, own.problem))
            return
    # A part comes before the files that it names, and is mended by then.
    for name, entry in inventory_of(manifest, [here, *places]).walk():
        path = f"{manifest.save}/{name}"
        try:
            if find_problem(here, path, entry):
                yield Repaired(name, here.name, mend_file(places, here, path, entry))
        except (CheckpointInvalid, OSError) as error:
            whole = False
            yield NotMended(name, error)
        progress(entry.size)
    if whole and source is not None:
        try:
            data = source.storage.read(f"{manifest.save}/{MANIFEST}")
            # It was right a moment ago.
            mend_manifest(here, decode(data, manifest.save), data)
            yield Repaired(MANIFEST, here.name, source.name)
        except (CheckpointInvalid, OSError) as error:
            yield NotMended(MANIFEST, error)


def is_torn(found: FoundManifest) -> bool:
    """Whether there is a manifest that was readable once."""
    return found.is_there and not found.is_later and found.error is None and found.manifest is None


def find_problem(place: Place, path: str, entry: FileEntry) -> str:
    """What is wrong with a file in one place, in words; "" if every block is right."""
    copies = FileCopies([place], path, entry)
    buffer = Bounce(entry).view
    try:
        for index in range(len(entry.xxh3_128)):
            copies.block(index, buffer)
        if not entry.size and place.storage.size(path):
            return f"{path.rpartition('/')[2]} should be empty"
    except CheckpointInvalid as error:
        return error.reason
    except OSError as error:
        return in_words(error)
    finally:
        copies.close()
    return ""
