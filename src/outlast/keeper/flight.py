"""One save: what each rank has copied and written, what all ranks' parts add up to, what failed.

A rank's files go into the save's own directory in the fastest durable tier of the save; nothing
else is ever written there. The shard is written while it is copied, the small file once the copy is
whole; each is tried again when it fails. The outcome is the rank's part.

Parts: a rank writes the tensors that the plan gave it, and hashes those that others hold too. A
replica that went its own way is found before the commit, not after a resume. Compared is one digest
for each group of ranks that hold the same; only where two differ are the single ones looked at. The
cost of a part does not depend on how many there are already: a save's end costs rank 0's keeper the
same for each rank.

Failures are one line: the error, the path, and what to do about it. A disk that is full says how
much room is missing: what the save needs on it, and what there is for it. What the save has written
already counts as room, because a save that fails is not kept.
"""

from __future__ import annotations

import collections
import errno
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Final, Protocol

import msgspec
import xxhash

from outlast.checkpoint.manifest import (
    FORMAT,
    FULL,
    FileEntry,
    Manifest,
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
from outlast.errors import FULL as NO_ROOM
from outlast.errors import remedy
from outlast.keeper import wire
from outlast.keeper.memory import Books
from outlast.keeper.persist import Pool, ShardFile
from outlast.storage import Directory, Storage

logger = logging.getLogger(__name__)
MAX_ASKED: Final = 16  # ranks that are asked for single digests, for each group that differs
RETRY_S: Final = (0.2, 1.0)
KEEP_FEWER: Final = (
    "free space there, keep fewer checkpoints (checkpoint.keep, or keep of a [[tier]]), or save "
    "to another place (--dir, or url of a [[tier]])"
)
_UNITS: Final = ("bytes", "KiB", "MiB", "GiB", "TiB")


class WorkerPeer(Protocol):
    """A worker's connection, as a save sees it."""

    rank: int | None
    is_gone: bool

    def send(self, message: wire.Message, blob: bytes = b"") -> None:
        """Queue a message; never waits."""


class Side(Protocol):
    """This machine's part in a save of ranks on several machines; nothing of it waits."""

    leads: bool  # whether this machine has rank 0

    def report(self, step: int, serial: int, rank: int, part: RankOutcome) -> None:
        """Tell rank 0's keeper of a rank's part."""

    def tell(self, ended: wire.SaveEnded, manifest: bytes, to: object = None) -> None:
        """Tell the other machines, or one of them, how a save ended."""

    def detail(self, step: int, serial: int, rank: int, groups: tuple[str, ...]) -> bool:
        """Ask for a rank's single digests; whether its machine can be asked."""

    def want(self, step: int, serial: int) -> None:
        """Ask rank 0's keeper for the manifest of a save."""

    def done(self, serial: int) -> None:
        """Tell rank 0's keeper that nothing more is needed of it for a save."""

    def close(self) -> None:
        """No save of this attempt is in flight any more."""


class SaveLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How long nothing of a save may move, in seconds, before it has failed.

    Attributes:
        gone_s: while a rank is missing whose machine's keeper was there, and is not any more.
        absent_s: while one is missing whose machine's keeper has not come yet.
        stall_s: while it is keepers and their tiers that have something to do.
        late_s: while a living worker has to begin, or to copy: its step may take long.
    """

    gone_s: float = 5.0
    absent_s: float = 20.0
    stall_s: float = 60.0
    late_s: float = 300.0


class SavePatience(Protocol):
    """How long a save may wait for other machines: the side of an attempt that has rank 0."""

    limits: SaveLimits

    def moves(self, serial: int) -> int:
        """Grows when something of a save has moved on another machine."""

    def patience(self, save: Save, rank: int) -> tuple[float, str]:
        """How long this rank may be missing while nothing moves; and what is then said of it."""


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
    """

    def __init__(self, name: SaveName, world_size: int, local: Collection[int]) -> None:
        self.name = name
        self.attempt, self.step, self.serial = name.attempt, name.step, name.serial
        self.local = local
        self.world_size = world_size
        self.tiers: tuple[str, ...] | None = None
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
            self.started_s = begin.started_s
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


class Committed(msgspec.Struct, frozen=True, kw_only=True):
    """What follows a commit needs to know.

    Attributes:
        manifest: what was committed.
        data: its bytes.
        ranks: whose files this machine has.
        tiers: where it is to go, None for everywhere.
        tier: where it lies already, "" if only in memory.
        by_us: whether this keeper put the manifest there.
    """

    manifest: Manifest
    data: bytes
    ranks: tuple[int, ...]
    tiers: tuple[str, ...] | None
    tier: str
    by_us: bool


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


def merge(
    parts: Mapping[int, RankOutcome],
    *,
    job: str,
    save: SaveName,
    kind: str,
    exact: bool,
    created_t: float,
) -> Manifest:
    """The manifest of what all ranks of the world wrote: one entry each."""
    first = parts[0]
    structures: dict[str, int] = {}
    entries = []
    for rank in range(len(parts)):
        part = parts[rank]
        number = structures.setdefault(part.structure, len(structures))
        if part.entry is not None:
            size, hashes, num_bytes = part.entry.size, part.entry.xxh3_128, part.entry.num_bytes
            entries.append(PartEntry(size, hashes, number, num_bytes))
    return Manifest(
        format=FORMAT,
        job=job,
        step=save.step,
        attempt=save.attempt,
        serial=save.serial,
        nonce=save.nonce,
        world_size=len(parts),
        layout={"world": len(parts)},
        created_t=created_t,
        files={} if entries else first.files,
        tensors={} if entries else first.tensors,
        parts=tuple(entries),
        kind=kind,
        exact=exact,
    )


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
        return of_save(error, save, self.target(save)[1])

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


def in_words(error: Exception, storage: Storage | None = None) -> str:
    """An error as people and the ledger read it; of a directory, with where and what to do."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError) and error.errno and isinstance(storage, Directory):
        where = "" if error.filename else f" in {storage.describe()}"
        text += f"{where}; {remedy(error)}"
    return _plain(text)


def of_save(error: Exception, save: Save, storage: Storage | None) -> str:
    """Why a save cannot be written to its storage. May take time: not under the saves' lock."""
    sizes = [size for rank, one in list(save.ranks.items()) for size in one.sizes(rank)]
    part = "this machine's part of step" if save.is_shared else "step"
    return _of_files(error, storage, str(save.name), sizes, f"{part} {save.step}")


def of_copy(error: Exception, storage: Storage, name: str, sizes: list[int], step: int) -> str:
    """Why files of ``sizes`` bytes cannot be copied below ``name`` of a storage."""
    return _of_files(error, storage, name, sizes, f"step {step}")


def _of_files(
    error: Exception, storage: Storage | None, name: str, sizes: list[int], what: str
) -> str:
    number = getattr(error, "errno", None)
    if number not in NO_ROOM:
        return in_words(error, storage)
    if not isinstance(storage, Directory):
        return f"{in_words(error)}; {KEEP_FEWER}"
    place = storage.describe()
    words = f"{getattr(error, 'strerror', None) or error}: {what} needs "
    try:
        room = storage.room(name)
    except OSError:
        return _plain(f"{words}{size_of(sum(sizes))} in {place}; {KEEP_FEWER}")
    needed = sum(-(-size // room.block_bytes) + 1 for size in (*sizes, 1)) * room.block_bytes
    if number == errno.EDQUOT:
        there = "of which your quota there leaves less"
    elif not room.num_files:
        there = "which makes more files than the file system can hold (no inodes are free)"
    else:
        free, by_now = size_of(room.num_bytes), " by now" * (room.num_bytes >= needed)
        if free == size_of(needed):
            free = f"{needed - room.num_bytes} bytes less"
        there = f"and {free} are free{by_now}"
    return _plain(f"{words}{size_of(needed)} in {place}, {there}; {KEEP_FEWER}")


def _plain(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()  # a path may be in any encoding


def size_of(num_bytes: float) -> str:
    """A number of bytes for people, to three digits."""
    unit = 0
    while num_bytes >= 1000 and unit < len(_UNITS) - 1:
        num_bytes, unit = num_bytes / 1024, unit + 1
    return f"{num_bytes:.3g} {_UNITS[unit]}"
