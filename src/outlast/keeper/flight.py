"""One save: each rank's blocks, hashed and written as they fill; its files; all ranks' parts.

A rank's files go into the save's own directory in the fastest durable tier of the save; nothing
else is ever written there. The shard is written while it is copied, the small file once the copy is
whole; each is tried again when it fails. The outcome is the rank's part.

Blocks: a few threads take those of all files in flight from one queue, in the order in which they
became full. A file is finished (fsync, rename, fsync of the directory) by the thread that writes
its last block. Where blocks cannot be written in any order (an object store), one thread at a time
writes those that are next.

Parts: a rank writes the tensors that the plan gave it, and hashes those that others hold too. A
replica that went its own way is found before the commit, not after a resume. Compared is one digest
for each group of ranks that hold the same; only where two differ are the single ones looked at. The
cost of a part does not depend on how many there are already: a save's end costs rank 0's keeper the
same for each rank.

Rejected: hashing in a pass of its own (a second reading of memory); a thread per file (as many
queues at the disk as ranks).
"""

from __future__ import annotations

import collections
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final, Protocol

import msgspec
import xxhash

from outlast.checkpoint.manifest import (
    BLOCK_BYTES,
    FULL,
    FileEntry,
    PartEntry,
    SaveName,
    TensorEntry,
    encode_part,
    hashed,
    make_part,
    part_entry,
    part_file,
    shard_file,
    sign,
    state_file,
    write_hashed,
)
from outlast.keeper import wire
from outlast.keeper.memory import Arena, Books
from outlast.storage import Blob, Storage, unwritten

if TYPE_CHECKING:
    from outlast.keeper.shared_saves import Side

logger = logging.getLogger(__name__)

NUM_WRITERS: Final = 2
MAX_ASKED: Final = 16  # ranks that are asked for single digests, for each group that differs
RETRY_S: Final = (0.2, 1.0)


# --- blocks ---------------------------------------------------------------------------------------


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


# --- one save -------------------------------------------------------------------------------------


class WorkerPeer(Protocol):
    """A worker's connection, as a save sees it."""

    rank: int | None
    is_gone: bool

    def send(self, message: wire.Message, blob: bytes = b"") -> None:
        """Queue a message; never waits."""


class RankSide:
    """One local rank's side of a save."""

    def __init__(
        self, peer: WorkerPeer, begin: wire.BeginSave, layout: wire.Layout, ring_bytes: int
    ) -> None:
        self.peer = peer
        self.begin = begin
        self.layout = layout
        self.ring_bytes = ring_bytes
        self.shard: ShardFile | None = None
        self.entry: FileEntry | None = None
        self.full: set[int] = set()  # blocks
        self.small = b""
        self.part = b""  # what it wrote, as other ranks will read it; none in a job of one rank
        self.digests: dict[str, str] = {}
        self.complete_s: float | None = None  # when the copy was whole
        self.failures: list[str] = []  # in words
        self.is_overwritten = False  # the arena holds a later snapshot by now

    def in_groups(self, groups: Collection[str]) -> dict[str, str]:
        """The single digests of pieces that are held by these groups of ranks."""
        known = self.layout.groups
        return {key: one for key, one in self.digests.items() if known.get(key, "") in groups}

    def small_files(self, rank: int) -> dict[str, bytes]:
        """The files that do not lie in the arena."""
        part = {part_file(rank): self.part} if self.part else {}
        return {state_file(rank): self.small, **part}

    def sizes(self, rank: int) -> list[int]:
        """Bytes of each of its files, as far as they are known."""
        return [self.layout.size, *map(len, self.small_files(rank).values())]

    @property
    def reads_arena(self) -> bool:
        """Whether bytes of the arena have yet to be hashed or written."""
        return bool(self.layout.size) and self.entry is None


class Save:
    """One save in flight, as this machine knows it.

    Attributes:
        name: of its directory, in each tier.
        local: the ranks of this machine.
        gathered: all ranks' parts, as far as they are known here.
        writing: how many acts are under way that may still read its memory. A save ends only when
            there is none.
        is_concluding: a commit is under way; nothing else decides any more.
        ended: how it ends, once that is known.
        manifest: what was committed, for the keepers of other machines.
        is_left: no later attempt waits for it any more; see ``conclude``.
        each_step: training waits for it, and for its copies on other machines.
        held: of ``wire.SaveEnded``, once rank 0's keeper has said so.
    """

    def __init__(self, name: SaveName, world_size: int, local: Collection[int]) -> None:
        self.name = name
        self.attempt, self.step, self.serial = name.attempt, name.step, name.serial
        self.local = local
        self.world_size = world_size
        self.tiers: tuple[str, ...] | None = None
        self.each_step = False
        self.held = 0
        self.kind = FULL
        self.exact = True
        self.started_s = time.monotonic()
        self.absent: dict[int, WorkerPeer] = {}
        self.ranks: dict[int, RankSide] = {}
        self.gathered = GatheredParts(world_size)
        self.writing = 0
        self.is_concluding = False
        self.is_signed = False
        self.by_storage = True  # whether it is the storage's failure, if it fails
        self.is_told = False  # whether another machine's keeper has put its failure on record
        self.ended: wire.SaveEnded | None = None
        self.manifest = b""
        self.mark: object = None  # what it was like when it was looked at last
        self.moved_s = self.started_s  # when that was not what it had been before
        self.num_moves = 0
        self.is_waited_for = self.is_being_left = self.is_left = False

    def join(self, rank: int, one: RankSide) -> None:
        """A rank has begun; the first one says what kind of save it is."""
        begin = one.begin
        if not self.ranks:
            self.tiers, self.kind, self.exact = begin.tiers, begin.kind, begin.exact
            self.started_s, self.each_step = begin.started_s, begin.each_step
        self.ranks[rank] = one

    @property
    def parts(self) -> dict[int, RankOutcome]:
        """The parts that are known, by rank."""
        return self.gathered.parts

    @property
    def is_shared(self) -> bool:
        """Whether other machines have ranks of it too."""
        return len(self.local) < self.world_size

    @property
    def has_rank_0(self) -> bool:
        """Whether rank 0 has begun it here, or has said that it cannot."""
        return 0 in self.ranks or 0 in self.absent

    @property
    def here(self) -> dict[int, WorkerPeer]:
        """The connections of this machine's ranks."""
        return {rank: one.peer for rank, one in self.ranks.items()} | self.absent

    @property
    def is_open(self) -> bool:
        """Whether it may still be refused."""
        return self.ended is None and not self.is_concluding

    @property
    def needs_workers(self) -> bool:
        """Whether it can only be committed with what workers of this machine have yet to do."""
        done = sum(one.complete_s is not None for one in self.ranks.values())
        return done < len(self.local)

    @property
    def progress(self) -> object:
        """The same for as long as nothing of it moves."""
        shards = tuple(one.shard.num_left if one.shard else 0 for one in self.ranks.values())
        return self.writing, self.is_concluding, self.ended is None, len(self.parts), shards

    def timings(self, commit_s: float) -> dict[str, float]:
        """Where the time went, in seconds; those of the slowest rank, work of all threads."""
        now = time.monotonic()
        found = {"commit_s": now - commit_s}
        for one in self.ranks.values():
            copied = (one.complete_s or now) - self.started_s
            parts = {"copy_s": copied, **(one.shard.timings if one.shard else {})}
            for name, value in parts.items():
                found[name] = max(found.get(name, 0.0), value)
        return {name: round(value, 6) for name, value in found.items()}


class PastSave(msgspec.Struct):
    """How a save has ended."""

    ended: wire.SaveEnded
    manifest: bytes
    each_step: bool = False


class SaveTable:
    """All saves that this machine knows of, and the lock that guards them.

    Attributes:
        lock: nothing is written or sent to a slow receiver under it.
        changed: notified when a save has ended.
        open: those in flight, by attempt and number.
        past: those that have ended, likewise.
        sides: attempt → the way to other machines.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.open: dict[tuple[int, int], Save] = {}
        self.past: collections.OrderedDict[tuple[int, int], PastSave] = collections.OrderedDict()
        self.sides: dict[int, Side] = {}


def part_of(
    save: Save, rank: int, one: RankSide, small: FileEntry, shard: FileEntry | None
) -> RankOutcome:
    """A rank's part, once the hashes of its files are known; the file of it is in ``one.part``."""
    files = {state_file(rank): small}
    if shard is not None:
        files[shard_file(rank)] = shard
    if save.world_size == 1:
        return RankOutcome(files=files, tensors=one.layout.tensors, num_files=len(files))
    contents = one.layout.contents
    one.part = encode_part(make_part(save.step, rank, files, contents))
    return RankOutcome(
        entry=part_entry(one.part, 0, files.values()),
        structure=contents.structure,
        num_elements=contents.num_elements,
        num_files=len(files) + 1,
        replicas=combined(one.digests, one.layout.groups),
    )


class RankOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank wrote, or why it could not.

    Attributes:
        entry: size and hash of the file that says what it wrote and holds (see
            ``checkpoint.manifest``); None in a job of one rank, where the manifest itself says it.
        structure: digest of what it holds, the same for ranks that hold the same.
        num_elements: how many elements it wrote of tensors that are nobody's own.
        num_files: how many files it wrote.
        files: in a job of one rank, its files' sizes and hashes.
        tensors: in a job of one rank, what they hold.
        replicas: of what other ranks hold too, one digest for each group of holders.
        error: why there is nothing.
        void: tensors that changed under the copy; the snapshot is then to be taken again.
        by_storage: whether an error is the storage's.
        held: of a save of each step, the newest one before it that other machines hold a copy of.
    """

    entry: PartEntry | None = None
    structure: str = ""
    num_elements: int = 0
    num_files: int = 0
    files: dict[str, FileEntry] = {}
    tensors: dict[str, TensorEntry] = {}
    replicas: dict[str, str] = {}
    error: str = ""
    void: tuple[str, ...] = ()
    by_storage: bool = True
    held: int = 0


def combined(digests: Mapping[str, str], groups: Mapping[str, str]) -> dict[str, str]:
    """One digest for each group of holders, of all the pieces that they share."""
    found: dict[str, xxhash.xxh3_128] = {}
    for key in sorted(digests):
        group = groups.get(key, "")
        hasher = found.get(group)
        if hasher is None:
            hasher = found[group] = xxhash.xxh3_128()
        hasher.update(f"{key}={digests[key]}\n".encode(errors="surrogatepass"))
    return {group: hasher.hexdigest() for group, hasher in found.items()}


def differing(digests: Iterable[Mapping[str, str]]) -> tuple[str, ...]:
    """Names of pieces that were taken for replicas and are not the same everywhere."""
    first: dict[str, str] = {}
    differ = set()
    for one in digests:
        for name, digest in one.items():
            if first.setdefault(name, digest) != digest:
                differ.add(name)
    return tuple(sorted(differ))


class GatheredParts:
    """What is known of a save's parts.

    Attributes:
        parts: by rank.
        failed: ranks that have none, in the order in which they said so.
        void: names of the tensors that made it so.
        num_elements: how many elements they wrote together.
    """

    def __init__(self, world_size: int) -> None:
        self.parts: dict[int, RankOutcome] = {}
        self.failed: list[int] = []
        self.void: set[str] = set()
        self.num_elements = 0
        self._world_size = world_size
        self._seen: dict[str, dict[str, int]] = {}  # group → digest → the first rank that has it
        self._split: set[str] = set()
        self._asked: dict[int, dict[str, str] | None] | None = None

    def add(self, rank: int, part: RankOutcome) -> bool:
        """Take a rank's part; whether it had none before."""
        if rank in self.parts or not 0 <= rank < self._world_size:
            return False
        self.parts[rank] = part
        self.num_elements += part.num_elements
        if part.error:
            self.failed.append(rank)
            self.void.update(part.void)
        for group, digest in part.replicas.items():
            seen = self._seen.setdefault(group, {})
            seen.setdefault(digest, rank)
            if len(seen) > 1:
                self._split.add(group)
        return True

    @property
    def is_whole(self) -> bool:
        """Whether every rank has said something."""
        return len(self.parts) == self._world_size

    @property
    def differs(self) -> bool:
        """Whether what was taken for replicas is not the same everywhere."""
        return bool(self._split)

    def missing(self) -> Iterator[int]:
        """Ranks that are still waited for: those without a part, then those that were asked."""
        for rank in range(self._world_size):
            if rank not in self.parts:
                yield rank
        for rank, digests in (self._asked or {}).items():
            if digests is None:
                yield rank

    # --- which replicas differ --------------------------------------------------------------------

    def ask(self) -> dict[int, tuple[str, ...]]:
        """Whose single digests are needed, and of which groups: one rank for each version.

        Empty when they were asked for before.
        """
        if self._asked is not None:
            return {}
        needed: dict[int, list[str]] = {}
        for group in sorted(self._split):
            for rank in sorted(self._seen[group].values())[:MAX_ASKED]:
                needed.setdefault(rank, []).append(group)
        self._asked = dict.fromkeys(needed)
        return {rank: tuple(groups) for rank, groups in needed.items()}

    def answer(self, rank: int, digests: dict[str, str]) -> bool:
        """A rank's single digests, none if it cannot say; whether all that were asked are there."""
        if self._asked is None or self._asked.get(rank, digests) is not None:
            return False
        self._asked[rank] = digests
        return all(one is not None for one in self._asked.values())

    def waits_for(self, rank: int) -> bool:
        """Whether this rank was asked and has not answered."""
        return self._asked is not None and rank in self._asked and self._asked[rank] is None

    def differing(self) -> tuple[str, ...]:
        """What differs, by name, once all have answered."""
        return differing(one for one in (self._asked or {}).values() if one is not None)


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
        on_part: Callable[[Save, int, RankOutcome], None],
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
                peer.send(wire.BlockWritten(step=step, serial=serial, block=block))

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
        words = "" if isinstance(result, FileEntry) else self.words(save, result)
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
            self._on_part(save, rank, RankOutcome(error=words))
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
            failure = self.words(save, error)
        with self._lock:
            save.writing -= 1
            if part is not None and not failure:
                self._on_part(save, rank, part)
            elif failure:
                one.failures.append(failure)
                self._try_again(save, rank, lambda: self._advance_later(save, rank))
            self._on_quiet(save)

    def words(self, save: Save, error: Exception) -> str:
        """Why a save cannot be written to its storage. May take time: not under the saves' lock."""
        sizes = [size for rank, one in list(save.ranks.items()) for size in one.sizes(rank)]
        part = "this machine's part of step" if save.is_shared else "step"
        where = self.target(save)[1]
        return unwritten(error, where, str(save.name), sizes, f"{part} {save.step}")

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
