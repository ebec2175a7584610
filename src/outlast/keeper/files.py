"""One rank's files on their way to the fastest durable tier of their save.

The shard is written while it is copied, the small file once the copy is whole; each is tried again
when it fails. What has become of them is the rank's part.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Final

from outlast.checkpoint.blocks import hashed, write_hashed
from outlast.checkpoint.manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    decode,
    shard_file,
    state_file,
    step_name,
)
from outlast.errors import CheckpointInvalid
from outlast.keeper import wire
from outlast.keeper.commit import Part
from outlast.keeper.flight import RankSide, Save, in_words, part_of
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
            f"{step_name(step)}/{shard_file(rank)}",
            pool=self._pool,
            on_done=lambda result: self._shard_done(save, rank, result),
            on_block=written,
            ring_bytes=one.ring_bytes,
            before=lambda: self._make_way(save),
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
        with self._lock:
            save.writing -= 1
            one = save.ranks[rank]
            if isinstance(result, FileEntry):
                one.entry = result
            else:
                one.failures.append(result)
            self.advance(save, rank)
            self._on_quiet(save)

    def _try_again(
        self, save: Save, rank: int, act: Callable[[], None], *, is_possible: bool = True
    ) -> None:
        """``act()`` after a while; after too many failures, or one for good, it is the part's."""
        failures = save.ranks[rank].failures
        words = in_words(failures[-1])
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
        name = state_file(rank)
        entry, failure = None, None
        try:
            if storage is None:
                entry = hashed(one.small)
            else:
                self._make_way(save)
                entry = write_hashed(storage, f"{step_name(save.step)}/{name}", [one.small])
        except Exception as error:  # noqa: BLE001 - it is the save's, told to all
            failure = error
        with self._lock:
            save.writing -= 1
            if entry is not None:
                self._on_part(save, rank, part_of(rank, one, entry, one.entry))
            elif failure is not None:
                one.failures.append(failure)
                self._try_again(save, rank, lambda: self._advance_later(save, rank))
            self._on_quiet(save)

    def _advance_later(self, save: Save, rank: int) -> None:
        with self._lock:
            self.advance(save, rank)

    def _make_way(self, save: Save) -> None:
        """A manifest of this step that lies there names files that are about to be replaced.

        It was rejected by a resume, or the step would be behind us.
        """
        _, storage = self.target(save)
        if storage is not None and not save.is_way_free:
            make_way(storage, save.step, self._job, save.attempt)
            save.is_way_free = True


def make_way(storage: Storage, step: int, job: str, attempt: int) -> None:
    """Remove a manifest of ``step`` whose files an attempt of a job is about to replace.

    Raises:
        FileExistsError: it is another job's, or that of a later attempt.
        OSError: as the storage gave it.
    """
    path = f"{step_name(step)}/{MANIFEST}"
    other: Manifest | None = None
    try:
        other = decode(storage.read(path), step)
    except FileNotFoundError:
        return
    except (CheckpointInvalid, IsADirectoryError):
        pass
    if other is not None and (other.job != job or other.attempt > attempt):
        raise FileExistsError(
            f"another writer (job {other.job}, attempt {other.attempt}) has committed step {step} "
            f"to {storage.describe()}"
        )
    storage.remove(path)


def later(delay_s: float, act: Callable[[], None]) -> None:
    """``act()`` in a thread of its own, after a while."""
    timer = threading.Timer(delay_s, act)
    timer.name, timer.daemon = "outlast-retry", True
    timer.start()
