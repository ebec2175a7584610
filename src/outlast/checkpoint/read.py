"""Reading many blocks at the speed of the disk: a few threads, verified memory, then a copy.

Each thread reads a block into memory of its own, hashes it there, and only then copies the parts
that are wanted to where they belong: no byte that was not verified reaches its destination. Four
threads with blocks of 16 MiB reach the limit of the disks we measured; a team of OpenMP threads
would make each copy wait for the slowest.

Nothing here knows of tensors or needs torch: a destination is an address.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from outlast.checkpoint.copies import Bounce, FileCopies, address_of, copy_bytes

NUM_THREADS: Final = 4


class Stage(Protocol):
    """Memory that is not the last destination: verified bytes are brought on from there."""

    def address(self) -> int:
        """Where the bytes go; the memory may be made at the first call."""

    def arrived(self, num_bytes: int) -> None:
        """So many more bytes are there."""


class Piece(NamedTuple):
    """Bytes ``start`` to ``end`` of a file, and where they go: an address, or else a stage."""

    start: int
    end: int
    address: int
    stage: Stage | None = None


class Job(NamedTuple):
    """One file to be read: its copies, the blocks, and what is wanted of them."""

    copies: FileCopies
    blocks: Sequence[int]
    pieces: Sequence[Piece]


def job_for(copies: FileCopies, pieces: Iterable[Piece], *, everything: bool) -> Job:
    """The blocks that ``pieces`` lie in; with ``everything`` the others too, to be verified."""
    wanted = sorted((piece for piece in pieces if piece.end > piece.start), key=lambda p: p.start)
    count = len(copies.entry.xxh3_128)
    if everything:
        return Job(copies, range(count), wanted)
    blocks: set[int] = set()
    size = copies.block_range(0)[1] or 1
    for piece in wanted:
        blocks.update(range(piece.start // size, (piece.end - 1) // size + 1))
    return Job(copies, sorted(blocks), wanted)


def read(jobs: Sequence[Job], progress: Callable[[int], None] | None = None) -> None:
    """Read, verify and deliver everything; ``progress`` is told the bytes of each block.

    Raises:
        CheckpointInvalid, OSError: of the first block that no place has; what was delivered until
            then was verified.
    """
    run = _Run(jobs, progress)
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


class _Run:
    """A queue of blocks that several threads work on."""

    def __init__(self, jobs: Sequence[Job], progress: Callable[[int], None] | None) -> None:
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

    def _tasks(self) -> Iterator[tuple[Job, int, list[Piece]]]:
        for job in self._jobs:
            ends = _running_ends(job.pieces)
            for index in job.blocks:
                start, end = job.copies.block_range(index)
                first = bisect.bisect_right(ends, start)
                last = bisect.bisect_left(job.pieces, end, lo=first, key=lambda p: p.start)
                wanted = [piece for piece in job.pieces[first:last] if piece.end > start]
                yield job, index, wanted

    def _next(self) -> tuple[Job, int, list[Piece]] | None:
        with self._lock:
            return None if self.error is not None else next(self._queue, None)

    def _done(self, job: Job, num_bytes: int) -> None:
        with self._lock:
            self._left[id(job)] -= 1
            is_last = not self._left[id(job)]
            if self._progress is not None:
                self._progress(num_bytes)
        if is_last:  # a checkpoint of a thousand ranks has more files than a process may open
            job.copies.close()


def _running_ends(pieces: Sequence[Piece]) -> list[int]:
    """For each piece the furthest end of those up to it: pieces may overlap, ends must not sink."""
    ends, furthest = [], 0
    for piece in pieces:
        furthest = max(furthest, piece.end)
        ends.append(furthest)
    return ends


def _deliver(data: memoryview, start: int, pieces: Sequence[Piece]) -> None:
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


def by_file(pieces: Iterable[tuple[str, Piece]]) -> Mapping[str, list[Piece]]:
    """File → its pieces."""
    found: dict[str, list[Piece]] = {}
    for file, piece in pieces:
        found.setdefault(file, []).append(piece)
    return found
