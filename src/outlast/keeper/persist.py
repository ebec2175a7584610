"""Blocks of a shard file: hashed, and written, as soon as they are full.

A few threads take blocks of all files in flight from one queue, in the order in which they became
full. A file is finished (fsync, rename, fsync of the directory) by the thread that writes its last
block. Where blocks cannot be written in any order (an object store), one thread at a time writes
those that are next.

Rejected: hashing in a pass of its own (a second reading of memory); a thread per file (as many
queues at the disk as ranks).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Final

import xxhash

from outlast.checkpoint.manifest import BLOCK_BYTES, FileEntry
from outlast.keeper.memory import Arena
from outlast.storage import Blob, Storage

logger = logging.getLogger(__name__)

NUM_WRITERS: Final = 2


class Pool:
    """Threads that do what they are given, in order of arrival.

    Args:
        num_threads: how many.
    """

    def __init__(self, num_threads: int = NUM_WRITERS) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"outlast-write-{index}", daemon=True)
            for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, act: Callable[[], None]) -> None:
        """Have ``act`` done."""
        self._queue.put(act)

    def stop(self) -> None:
        """Let the threads end when everything before is done."""
        for _ in self._threads:
            self._queue.put(None)

    def _run(self) -> None:
        while (act := self._queue.get()) is not None:
            try:
                act()
            except Exception:
                logger.exception("something was not done")


class ShardFile:
    """One shard file on its way from an arena to a storage, or only to its hashes.

    Args:
        arena: holds the file, or with ``ring_bytes`` the blocks that are under way.
        size: of the file in bytes.
        storage: where it goes, or None: it stays in memory.
        name: its name there.
        pool: does the work.
        on_done: told the hashes or the error, once, in a thread of the pool.
        on_block: told of each block whose place is free again: it was written, or never will be.
        ring_bytes: size of the ring, a multiple of a block, or 0.
        before: done once before the file is made; may raise.
    """

    def __init__(
        self,
        arena: Arena,
        size: int,
        storage: Storage | None,
        name: str,
        *,
        pool: Pool,
        on_done: Callable[[FileEntry | Exception], None],
        on_block: Callable[[int], None],
        ring_bytes: int = 0,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        self.num_blocks = -(-size // BLOCK_BYTES)
        self.timings = {"hash_s": 0.0, "write_s": 0.0, "sync_s": 0.0}
        self._arena = arena
        self._size = size
        self._storage = storage
        self._name = name
        self._pool = pool
        self._on_done = on_done
        self._on_block = on_block
        self._ring_bytes = ring_bytes
        self._before = before
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._blob: Blob | None = None
        self._digests: list[str] = [""] * self.num_blocks
        self._left = self.num_blocks
        self._waiting: set[int] = set()
        self._next = 0
        self._in_order = False  # a thread is writing those that follow each other
        self._error: Exception | None = None
        self._abandoned = False
        self._busy = 0
        self._over = False

    @property
    def num_left(self) -> int:
        """Blocks that are not done."""
        return self._left

    def ready(self, block: int) -> None:
        """A block is full."""
        self._pool.put(lambda: self._write(block))

    def abandon(self) -> None:
        """Nobody wants the file any more: blocks that are not full will never be. Never waits."""
        self._fail(OSError("the snapshot was given up"))
        with self._lock:
            self._abandoned = True
        self._pool.put(self._finish_if_over)

    def _write(self, block: int) -> None:
        with self._lock:
            if self._over or self._abandoned:
                return
            self._busy += 1
        try:
            self._write_busy(block)
        finally:
            with self._lock:
                self._busy -= 1
            self._finish_if_over()

    def _write_busy(self, block: int) -> None:
        if self._error is not None:  # each block is counted all the same, and the last one ends it
            self._done(block)
            return
        view = self._view(block)
        start_s = time.perf_counter()
        self._digests[block] = xxhash.xxh3_128_hexdigest(view)
        hashed_s = time.perf_counter()
        if self._storage is None:
            self._account(hash_s=hashed_s - start_s)
            self._done(block)
        elif self._open():
            assert self._blob is not None  # noqa: S101 - just opened
            if self._blob.positional:
                self._write_at(block, view)
                self._done(block)
            else:
                self._write_in_order(block)
            self._account(hash_s=hashed_s - start_s, write_s=time.perf_counter() - hashed_s)
        else:
            self._done(block)

    def _view(self, block: int) -> memoryview:
        start = block * BLOCK_BYTES
        place = start % self._ring_bytes if self._ring_bytes else start
        return self._arena.view[place : place + min(BLOCK_BYTES, self._size - start)]

    def _open(self) -> bool:
        with self._opening:
            if self._error is None and self._blob is None:
                assert self._storage is not None  # noqa: S101 - the caller looked
                try:
                    self._before()
                    self._blob = self._storage.create(self._name, self._size)
                except Exception as error:  # noqa: BLE001 - it is the save's, told to all
                    self._fail(error)
            return self._error is None

    def _write_at(self, block: int, view: memoryview) -> None:
        assert self._blob is not None  # noqa: S101 - the caller opened it
        if self._error is None:
            try:
                self._blob.write_at(view, block * BLOCK_BYTES)
            except Exception as error:  # noqa: BLE001
                self._fail(error)

    def _write_in_order(self, block: int) -> None:
        with self._lock:
            self._waiting.add(block)
            if self._in_order:
                return
            self._in_order = True
        while True:
            with self._lock:
                if self._next not in self._waiting:
                    self._in_order = False
                    return
                block = self._next
                self._waiting.remove(block)
                self._next += 1
            self._write_at(block, self._view(block))
            self._done(block)

    def _done(self, block: int) -> None:
        self._on_block(block)  # also of a file that has failed: a loop may be waiting for room
        with self._lock:
            self._left -= 1

    def _finish_if_over(self) -> None:
        with self._lock:
            if self._over or self._busy or (self._left and not self._abandoned):
                return
            self._over = True
        self._finish()

    def _finish(self) -> None:
        start_s = time.perf_counter()
        if self._error is None and self._blob is not None:
            try:
                self._blob.finish()
            except Exception as error:  # noqa: BLE001
                self._fail(error)
        if self._error is not None and self._blob is not None:
            self._blob.abandon()
        self._account(sync_s=time.perf_counter() - start_s)
        self._on_done(self._error or FileEntry(size=self._size, xxh3_128=tuple(self._digests)))

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self._error = self._error or error

    def _account(self, **seconds: float) -> None:
        with self._lock:
            for name, value in seconds.items():
                self.timings[name] += value
