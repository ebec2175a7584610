"""One rank's files on their way to the fastest durable tier of their save.

They go into the save's own directory, which nothing else is ever written into. The shard is written
while it is copied, the small file once the copy is whole; each is tried again when it fails. What
has become of them is the rank's part.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Final

from outlast.checkpoint.manifest import FileEntry, hashed, shard_file, write_hashed
from outlast.checkpoint.names import sign
from outlast.keeper import trouble, wire
from outlast.keeper.commit import Part
from outlast.keeper.flight import RankSide, Save, part_of
from outlast.keeper.memory import Books
from outlast.keeper.persist import Pool, ShardFile
from outlast.storage import Storage

logger = logging.getLogger(__name__)

RETRY_S: Final = (0.2, 1.0)


class Files:
    """The files of this machine's ranks. All but what takes time is called with ``lock`` held.

    Args:
        job: id of the job.
        tiers: name → durable storage, the fastest first.
        books: the arenas.
        pool: threads for writing.
        lock: guards the saves.
        on_part: told of each rank's part, with ``lock`` held.
        on_quiet: told when nothing of a save is being written, with ``lock`` held.
    """

    def __init__(
        self,
        job: str,
        tiers: Mapping[str, Storage],
        books: Books,
        pool: Pool,
        *,
        lock: threading.RLock,
        on_part: Callable[[Save, int, Part], None],
        on_quiet: Callable[[Save], None],
    ) -> None:
        self._job = job
        self._tiers = tiers
        self._books = books
        self._pool = pool
        self._lock = lock
        self._on_part = on_part
        self._on_quiet = on_quiet

    def target(self, save: Save) -> tuple[str, Storage | None]:
        """The fastest durable tier that the save is for; "" and None: it stays in memory."""
        for name, storage in self._tiers.items():
            if save.tiers is None or name in save.tiers:
                return name, storage
        return "", None

    def begin(self, save: Save, rank: int) -> ShardFile | None:
        """Take the rank's shard file into work; None if it has none."""
        one = save.ranks[rank]
        if not one.layout.size:
            return None
        _, storage = self.target(save)
        peer, step, serial = one.peer, save.step, save.serial

        def written(block: int) -> None:
            if one.ring_bytes:
                peer.send(wire.Written(step=step, serial=serial, block=block))

        save.writing += 1
        one.shard = ShardFile(
            self._books.arenas[one.begin.arena],
            one.layout.size,
            storage,
            f"{save.name}/{shard_file(rank)}",
            pool=self._pool,
            on_done=lambda result: self._shard_done(save, rank, result),
            on_block=written,
            ring_bytes=one.ring_bytes,
            before=lambda: self._sign(save),
        )
        return one.shard

    def advance(self, save: Save, rank: int) -> None:
        """The copy is whole and the shard has ended, in either order: on to the small file."""
        one = save.ranks[rank]
        if one.complete_s is None or rank in save.parts or save.ended is not None:
            return
        if one.reads_arena:
            if one.failures:
                self._try_shard_again(save, rank, one)
            return
        save.writing += 1
        self._pool.put(lambda: self._write_small(save, rank, one))

    def _shard_done(self, save: Save, rank: int, result: FileEntry | Exception) -> None:
        words = "" if isinstance(result, FileEntry) else self._words(save, result)
        with self._lock:
            save.writing -= 1
            one = save.ranks[rank]
            if isinstance(result, FileEntry):
                one.entry = result
            else:
                one.failures.append(words)
            self.advance(save, rank)
            self._on_quiet(save)

    def _try_again(
        self, save: Save, rank: int, act: Callable[[], None], *, is_possible: bool = True
    ) -> None:
        """``act()`` after a while; after too many failures, or one for good, it is the part's."""
        failures = save.ranks[rank].failures
        words = failures[-1]
        if len(failures) > len(RETRY_S) or not is_possible:
            self._on_part(save, rank, Part(error=words))
            return
        logger.warning("step %d: %s; trying again", save.step, words)
        later(RETRY_S[len(failures) - 1], act)

    def _try_shard_again(self, save: Save, rank: int, one: RankSide) -> None:
        def again() -> None:
            with self._lock:
                if save.ended is not None or rank in save.parts:
                    return
                shard = self.begin(save, rank)
                assert shard is not None  # noqa: S101 - there was one before
                for block in range(shard.num_blocks):
                    shard.ready(block)

        # What went through a ring is not there any more.
        self._try_again(save, rank, again, is_possible=not one.ring_bytes)

    def _write_small(self, save: Save, rank: int, one: RankSide) -> None:
        _, storage = self.target(save)
        part, failure = None, ""
        try:
            part = part_of(save, rank, one, hashed(one.small), one.entry)
            if storage is not None:
                self._sign(save)
                for name, data in one.small_files(rank).items():
                    write_hashed(storage, f"{save.name}/{name}", [data])
        except Exception as error:  # noqa: BLE001 - it is the save's, told to all
            failure = self._words(save, error)
        with self._lock:
            save.writing -= 1
            if part is not None and not failure:
                self._on_part(save, rank, part)
            elif failure:
                one.failures.append(failure)
                self._try_again(save, rank, lambda: self._advance_later(save, rank))
            self._on_quiet(save)

    def _words(self, save: Save, error: Exception) -> str:
        return trouble.of_save(error, save, self.target(save)[1])

    def _advance_later(self, save: Save, rank: int) -> None:
        with self._lock:
            self.advance(save, rank)

    def _sign(self, save: Save) -> None:
        """Before its first file: say in its directory whose it is."""
        _, storage = self.target(save)
        if storage is not None and not save.is_signed:
            sign(storage, save.name, self._job)
            save.is_signed = True


def later(delay_s: float, act: Callable[[], None]) -> None:
    """``act()`` in a thread of its own, after a while."""
    timer = threading.Timer(delay_s, act)
    timer.name, timer.daemon = "outlast-retry", True
    timer.start()
