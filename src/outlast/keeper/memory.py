"""Snapshots in memory: the arenas that the keeper holds, its books of them, and the tier they make.

A snapshot is readable from its commit until the next one begins to be copied over it. In the tier
it looks like any checkpoint: the same names, the same bytes. Snapshots are known by the names of
their saves: of a step that is saved again there may be two.

Arenas are given to workers, held by supervisors, and written into the books. The books lie in
memory of their own, which a successor inherits with the arenas: two pages written in turn, so that
one is whole whenever the keeper dies.

Guarantees: an arena that a save has yet to be written from is neither given back nor given away.
What can go wrong: there is too little memory (fewer snapshots at once, or none: a ring that a
snapshot goes through block by block), or none at all (no arena; the save fails and says so).

An arena is an anonymous file: it lives as long as a process holds its descriptor. Pages are touched
once, in the background, and reused ever after: copying into fresh memory is four to eight times
slower. Huge pages are asked for; whether the kernel gives them to shared memory is its setting.
What can be had is the machine's free memory, or less where a control group limits this process.
"""

from __future__ import annotations

import abc
import contextlib
import ctypes
import errno
import logging
import mmap
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
import xxhash

from outlast.checkpoint.manifest import BLOCK_BYTES, MANIFEST, SaveName, named
from outlast.keeper import wire
from outlast.policy.retention import Admission, admit
from outlast.storage import Blob

logger = logging.getLogger(__name__)

HUGE_BYTES: Final = 2 << 20
_MADV_DONTNEED: Final = 4
_MADV_POPULATE_WRITE: Final = 23
_POPULATE_BYTES: Final = 64 << 20
_libc = ctypes.CDLL(None, use_errno=True)
CGROUPS: Final = Path("/sys/fs/cgroup")
_UNLIMITED: Final = 1 << 62
# Version 2 and version 1 of control groups: files with the limit, the use, and what of it is cache.
_V2: Final = ("memory.max", "memory.current", "inactive_file ")
_V1: Final = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file ")


class Arena:
    """A piece of shared memory, mapped into this process.

    Args:
        fd: its descriptor, from then on the arena's to close.
        num_bytes: its size.
    """

    def __init__(self, fd: int, num_bytes: int) -> None:
        self.fd = fd
        self.num_bytes = num_bytes
        self._map = mmap.mmap(fd, num_bytes)
        with contextlib.suppress(OSError, AttributeError):  # a kernel without them
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    @classmethod
    def make(cls, num_bytes: int) -> Arena:
        """New memory, not touched yet.

        Raises:
            OSError: there is none to be had.
        """
        rounded = max(-(-num_bytes // HUGE_BYTES) * HUGE_BYTES, HUGE_BYTES)
        fd = os.memfd_create("outlast-arena", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, rounded)
            return cls(fd, rounded)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def of(cls, fd: int) -> Arena:
        """Memory that another process has made, to be handed on."""
        return cls(fd, os.fstat(fd).st_size)

    @classmethod
    def seen(cls, fd: int) -> Arena:
        """Memory that another process has made, only to be looked at: it goes with the object."""
        arena = cls.of(fd)
        arena.close()
        return arena

    def touch(self) -> None:
        """Have the kernel give all pages now; content stays. Takes a while: call it in a thread."""
        self._advise(_MADV_POPULATE_WRITE)

    def look_away(self) -> None:
        """Take the pages out of this process; the memory has them still.

        To unmap two gigabytes takes a tenth of a second, which is Python's unless it is done so.
        """
        self._advise(_MADV_DONTNEED)

    def _advise(self, advice: int) -> None:
        for start in range(0, self.num_bytes, _POPULATE_BYTES):
            size = min(_POPULATE_BYTES, self.num_bytes - start)
            address = ctypes.c_void_p(self.address + start)
            if _libc.madvise(address, ctypes.c_size_t(size), advice):
                return  # an older kernel, or no memory: pages come when they are written

    def touch_in_background(self) -> None:
        """``touch`` in a thread of its own."""
        threading.Thread(target=self.touch, name="outlast-touch", daemon=True).start()

    def close(self) -> None:
        """Let go of the memory; what still looks at it keeps it mapped."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)


def available_bytes(of: Path = Path("/proc/self/cgroup"), root: Path = CGROUPS) -> int:
    """Memory that can be had without swapping: the machine's, or less where a limit is set.

    Args:
        of: the list of the control groups that this process is in.
        root: where control groups are mounted.
    """
    import psutil  # which costs 20 ms, and a training process has no use for it

    return int(min(psutil.virtual_memory().available, *limits(of, root), _UNLIMITED))


def limits(of: Path, root: Path) -> list[int]:
    """What is left below the limit of each control group above this process."""
    return [left for names, group, top in _groups(of, root) for left in _left(names, group, top)]


def _groups(of: Path, root: Path) -> Iterator[tuple[tuple[str, str, str], Path, Path]]:
    """The names of its files, the group, and the topmost one, for each version."""
    try:
        lines = of.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield _V2, root / path.lstrip("/"), root
        elif "memory" in controllers.split(","):
            yield _V1, root / "memory" / path.lstrip("/"), root / "memory"


def _left(names: tuple[str, str, str], group: Path, top: Path) -> Iterator[int]:
    limit_name, used_name, cache = names
    for directory in (group, *group.parents):
        limit, used = _number(directory / limit_name), _number(directory / used_name)
        if limit is not None and used is not None:
            yield max(limit - used + _reclaimable(directory, cache), 0)
        if directory == top:
            return


def _reclaimable(directory: Path, cache: str) -> int:
    """Page cache that the kernel drops before it refuses memory."""
    try:
        lines = (directory / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(cache))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max" is no number: no limit
        return None


RING_BYTES: Final = 4 * BLOCK_BYTES
BOOKS: Final = 0  # number of the books among the held descriptors
COPIES: Final = -1  # in place of a rank: arenas with other machines' snapshots
ROUNDING: Final = 8  # ranks' shares differ by less than one part in this many
_BOOKS_BYTES: Final = 1 << 30  # of which only what is written exists
_MAGIC: Final = b"outlast1"
_HEAD_BYTES: Final = 40
Tell = Callable[[wire.Message, tuple[int, ...]], None]


class KeptSnapshot(msgspec.Struct, kw_only=True):
    """A committed snapshot: large files lie in arenas, small ones here.

    Attributes:
        files: name → (arena, bytes).
        small: name → content; the manifest is among them.
        attempt: that wrote it.
        tier: the one that it was committed to; "" where it is in memory alone.
    """

    files: dict[str, tuple[int, int]]
    small: dict[str, bytes]
    attempt: int = 0
    tier: str = ""

    @property
    def manifest(self) -> bytes:
        """The manifest's bytes."""
        return self.small[MANIFEST]


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """Another machine's newest snapshot, kept here for it, under its save's name."""

    save: str
    kept: KeptSnapshot


class Due(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that a slower tier is to get: its save, where it lies, whose files are ours."""

    save: str
    source: str
    ranks: tuple[int, ...]


class Books:
    """Which snapshots are in memory, and in which arenas; not for several threads at once.

    ``kept`` are this machine's own, ``copies`` those of other machines, by node, and ``before`` the
    copies before these, until their memory is taken for the next. Besides, what slower tiers have
    yet to get: a successor brings it to them.
    """

    def __init__(self) -> None:
        self.arenas: dict[int, Arena] = {}
        self.owners: dict[int, int] = {}  # arena → rank
        self.kept: dict[str, KeptSnapshot] = {}  # by the name of the save
        self.copies: dict[str, Replica] = {}
        self.before: dict[str, Replica] = {}
        self.due: dict[str, Due] = {}  # by tier
        self._number = 0

    def make(self, rank: int, num_bytes: int) -> int:
        """New memory for ``rank``.

        Raises:
            OSError: there is none.
        """
        return self.adopt(Arena.make(num_bytes), rank)

    def adopt(self, arena: Arena, rank: int, number: int | None = None) -> int:
        """Memory that exists already."""
        number = self._number + 1 if number is None else number
        self._number = max(self._number, number)
        self.arenas[number] = arena
        self.owners[number] = rank
        return number

    def of_rank(self, rank: int) -> list[int]:
        """The arenas of ``rank``."""
        return [number for number, owner in self.owners.items() if owner == rank]

    def newest_in(self, number: int) -> SaveName:
        """The newest save of which something lies in this arena."""
        parts = (
            named(save)
            for save, kept in self.kept.items()
            if any(arena == number for arena, _ in kept.files.values())
        )
        return max(parts, default=SaveName(-1))

    def alone(self, versions: int = 1) -> set[int]:
        """The arenas of the newest snapshot here, if no tier has it; or of so many of these."""
        if versions > 1:
            here = sorted((save for save in self.kept if not self.kept[save].tier), key=named)
            newest_ones = [self.kept[save] for save in here[-versions:]]
            return {arena for one in newest_ones for arena, _ in one.files.values()}
        newest = max(self.kept, key=named, default="")
        if not newest or self.kept[newest].tier:
            return set()
        return {arena for arena, _ in self.kept[newest].files.values()}

    def overwrite(self, number: int) -> None:
        """What lies in this arena is no longer whole."""
        for save, kept in list(self.kept.items()):
            if any(arena == number for arena, _ in kept.files.values()):
                del self.kept[save]
        for copies in (self.copies, self.before):
            for node, copy in list(copies.items()):
                if any(arena == number for arena, _ in copy.kept.files.values()):
                    del copies[node]

    def drop(self, number: int) -> None:
        """Give memory back."""
        self.overwrite(number)
        del self.owners[number]
        self.arenas.pop(number).close()

    def encode(self) -> bytes:
        """Everything but the memory itself, for a successor."""
        return msgspec.msgpack.encode((self.owners, self.kept, self.due, self.copies, self.before))

    def everything(self) -> dict[str, KeptSnapshot]:
        """Save → what lies here of it: this machine's own files and those kept for others."""
        found: dict[str, KeptSnapshot] = {}
        copies = [*self.copies.values(), *self.before.values()]
        parts = [*self.kept.items(), *((copy.save, copy.kept) for copy in copies)]
        for save, part in parts:
            known = found.get(save)
            if known is None:
                found[save] = part
            elif known.manifest == part.manifest:
                files, small = {**part.files, **known.files}, {**part.small, **known.small}
                found[save] = KeptSnapshot(
                    files=files, small=small, attempt=known.attempt, tier=known.tier
                )
        return found

    def take_over(self, data: bytes, arenas: Mapping[int, Arena]) -> None:
        """Go on from what a predecessor wrote; what is not whole is left out."""
        try:
            owners, kept, self.due, copies, before = msgspec.msgpack.decode(
                data,
                type=tuple[
                    dict[int, int],
                    dict[str, KeptSnapshot],
                    dict[str, Due],
                    dict[str, Replica],
                    dict[str, Replica],
                ],
            )
        except msgspec.MsgspecError:
            owners, kept, copies, before = {}, {}, {}, {}
        for number, arena in arenas.items():
            if number in owners:
                self.adopt(arena, owners[number], number)
            else:
                arena.close()
        self.kept = {
            save: one
            for save, one in kept.items()
            if all(arena in self.arenas for arena, _ in one.files.values())
        }
        self.copies, self.before = (
            {
                node: copy
                for node, copy in found.items()
                if all(arena in self.arenas for arena, _ in copy.kept.files.values())
            }
            for found in (copies, before)
        )


class ReadOnlyTier(abc.ABC):
    """What a Storage has for writing, in a tier that is only read: the keeper alone writes."""

    @abc.abstractmethod
    def _read_only(self, name: str) -> OSError:
        """The error that says so."""

    def put(self, name: str, data: bytes) -> None:
        """Refuse it."""
        raise self._read_only(name)

    def put_new(self, name: str, data: bytes) -> bool:
        """Refuse it."""
        raise self._read_only(name)

    def create(self, name: str, size: int | None = None) -> Blob:
        """Refuse it."""
        raise self._read_only(name)

    def remove(self, name: str) -> None:
        """Refuse it."""
        raise self._read_only(name)

    def remove_tree(self, name: str, last: Sequence[str] = ()) -> None:
        """Refuse it."""
        raise self._read_only(name)


class MemoryTier(ReadOnlyTier):
    """The tier that reads snapshots; only what a Storage needs for reading.

    Args:
        arenas: number → memory.
        kept: name of a save → what it consists of.
        num_peers: how many other machines' memory the keeper can ask.
    """

    def __init__(
        self, arenas: Mapping[int, Arena], kept: Mapping[str, KeptSnapshot], num_peers: int = 0
    ) -> None:
        self.num_peers = num_peers
        self._arenas = arenas
        self._kept = kept

    def look_away(self) -> None:
        """Nobody reads any more; what is still held on to can be read all the same."""
        for arena in self._arenas.values():
            arena.look_away()

    def describe(self, name: str = "") -> str:
        """The place of ``name`` in words."""
        return f"this machine's memory ({name})" if name else "this machine's memory"

    def children(self, name: str = "") -> list[str]:
        """Saves, or the files of a save."""
        if not name:
            return sorted(self._kept)
        kept = self._kept.get(name)
        return sorted([*kept.files, *kept.small]) if kept else []

    def exists(self, name: str) -> bool:
        """Whether there is a file ``name``."""
        return self.view(name) is not None

    def size(self, name: str) -> int:
        """Size in bytes."""
        return len(self._content(name))

    def read(self, name: str) -> bytes:
        """A whole file."""
        return bytes(self._content(name))

    def view(self, name: str) -> memoryview | None:
        """A file's bytes as they lie in memory, or None if there is none."""
        save, _, file = name.partition("/")
        kept = self._kept.get(save)
        if kept is None:
            return None
        if file in kept.small:
            return memoryview(kept.small[file])
        if file not in kept.files:
            return None
        arena, size = kept.files[file]
        return self._arenas[arena].view[:size].toreadonly()

    def read_into(self, name: str, buffer: memoryview, offset: int = 0) -> int:
        """Fill ``buffer`` from byte ``offset``; returns the bytes read."""
        part = self._content(name)[offset : offset + len(buffer)]
        buffer[: len(part)] = part
        return len(part)

    def open(self, name: str) -> _MemoryReader:
        """Open ``name``."""
        return _MemoryReader(self._content(name))

    def _content(self, name: str) -> memoryview:
        view = self.view(name)
        if view is None:
            raise FileNotFoundError(errno.ENOENT, "no such file in memory", name)
        return view

    def _read_only(self, name: str) -> OSError:
        return OSError(errno.EROFS, "snapshots in memory are not changed", name)


class _MemoryReader:
    def __init__(self, view: memoryview) -> None:
        self._view = view
        self.size = len(view)

    def read_into(self, buffer: memoryview, offset: int) -> int:
        part = self._view[offset : offset + len(buffer)]
        buffer[: len(part)] = part
        return len(part)

    def close(self) -> None:
        pass


class Holdings:
    """Arenas and books; not for several threads at once.

    Args:
        inherited: number → descriptor of memory that a predecessor left.
        tell: sends a message with descriptors to every supervisor.
    """

    def __init__(self, inherited: Mapping[int, int], tell: Tell) -> None:
        self.books = Books()
        self._tell = tell
        self._turn = 0
        self._admitted: tuple[int, int, Admission] | None = None  # attempt, bytes, decision
        self._granted: dict[int, tuple[int, ...]] = {}  # rank → what it was given last
        self._page = self._take_over(inherited)

    def all(self) -> dict[int, int]:
        """Number → descriptor of everything that a supervisor is to hold."""
        return {BOOKS: self._page.fd} | {n: arena.fd for n, arena in self.books.arenas.items()}

    def note(self) -> None:
        """Leave word of what is in memory."""
        self._turn += 1
        write_page(self._page, self._turn, self.books.encode())

    def reserve(
        self,
        message: wire.Reserve,
        *,
        rank: int,
        attempt: int,
        ranks: Collection[int],
        in_use: Collection[int],
    ) -> wire.Reserved:
        """Arenas for a rank, as many and as large as the machine's memory allows.

        Args:
            message: what is asked for.
            rank: who asks.
            attempt: in which attempt.
            ranks: all ranks of this machine.
            in_use: arenas that saves in flight have yet to be written from.
        """
        decision = self._admit(attempt, message, ranks, in_use)
        ring = 0 if decision.buffers else RING_BYTES
        size = ring or max(message.num_bytes, 1)
        wanted = max(decision.buffers, 1)
        free = [number for number in self.books.of_rank(rank) if number not in in_use]
        # The first one is written first: what is newest stays for longest.
        free.sort(key=self.books.newest_in)
        fitting = [n for n in free if self.books.arenas[n].num_bytes >= size][-wanted:]
        alone, versions = self.books.alone(), self.books.alone(message.versions)
        # What no tier has is given back behind the next commit, if there is room until then.
        has_room = versions and admit(size, wanted=1, available_bytes=available_bytes()).buffers
        kept = versions if has_room else ()
        self._give_back(number for number in free if number not in fitting and number not in kept)
        words = decision.words
        try:
            for place in range(wanted - len(fitting)):
                fitting.insert(place, self._make(rank, size))
        except OSError as error:
            words = f"no memory for snapshots: {error.strerror or error}"
            logger.warning("%s", words)
        self._granted[rank] = tuple(fitting)
        self.note()
        return wire.Reserved(
            arenas=tuple(fitting),
            num_bytes=size,
            ring_bytes=ring,
            words=words,
            alone=next((number for number in fitting if number in alone), -1),
        )

    def room(self, sizes: Sequence[int], spare: Collection[int], num_left: int = 0) -> list[int]:
        """Arenas for files of these sizes of another machine; what is not used is given back.

        Args:
            sizes: of the files, in bytes.
            spare: arenas that may be used again.
            num_left: how many of these stay, the largest, for what others send soon.

        Raises:
            OSError: this machine has no memory for them.
        """
        left = sorted(spare, key=lambda number: self.books.arenas[number].num_bytes)
        fitting: list[int | None] = []
        for size in sizes:
            fits = (n for n in left if self.books.arenas[n].num_bytes >= size)
            number = next(fits, None)
            fitting.append(number)
            if number is not None:
                left.remove(number)
        self._give_back(left[: max(len(left) - num_left, 0)])
        missing = sum(size for size, n in zip(sizes, fitting, strict=True) if n is None)
        if missing and not admit(missing, wanted=1, available_bytes=available_bytes()).buffers:
            self._give_back(number for number in fitting if number is not None)
            self.note()
            raise OSError(errno.ENOMEM, f"no memory for {missing / 2**30:.2f} GiB of a copy")
        return [
            self._make(COPIES, size) if number is None else number
            for size, number in zip(sizes, fitting, strict=True)
        ]

    def drop(self, numbers: Collection[int]) -> None:
        """Give arenas back."""
        if self._give_back(numbers):
            self.note()

    def leave_out(self, ranks: Collection[int], in_use: Collection[int]) -> None:
        """A snapshot of these ranks is committed: what others have left is of no use any more."""
        useless = {
            number
            for number, owner in self.books.owners.items()
            if owner != COPIES
            and (owner not in ranks or number not in self._granted.get(owner, (number,)))
        }
        if self._give_back(useless - set(in_use)):
            self.note()

    def _make(self, rank: int, size: int) -> int:
        number = self.books.make(rank, size)
        arena = self.books.arenas[number]
        arena.touch_in_background()
        self._tell(wire.Hold(arena=number), (arena.fd,))
        return number

    def _give_back(self, numbers: Iterable[int]) -> bool:
        gone = list(numbers)
        for number in gone:
            self.books.drop(number)
            self._tell(wire.Drop(arena=number), ())
        return bool(gone)

    def _admit(
        self,
        attempt: int,
        message: wire.Reserve,
        ranks: Collection[int],
        in_use: Collection[int],
    ) -> Admission:
        """Decide once an attempt for all workers of this machine, before memory is taken.

        Ranks' snapshots differ a little in size, and all ranks must be told the same.
        """
        known = self._admitted
        if known is not None and known[0] == attempt and message.num_bytes <= known[1]:
            return known[2]
        most = message.num_bytes + message.num_bytes // ROUNDING
        # Of an arena that is not touched yet nothing is missing in what is available.
        ours = sum(
            os.fstat(arena.fd).st_blocks * 512
            for number, arena in self.books.arenas.items()
            if self.books.owners[number] in ranks and number not in in_use
        )
        foreign = self._foreign_bytes(message, most)
        decision = admit(
            most * message.workers,
            wanted=message.buffers,
            useful=message.useful,
            available_bytes=max(available_bytes() + ours - foreign, 0),
        )
        if decision.words and foreign:
            words = f"{decision.words} ({foreign / 2**30:.2f} GiB more are for others' copies)"
            decision = msgspec.structs.replace(decision, words=words)
        self._admitted = (attempt, most, decision)
        return decision

    def _foreign_bytes(self, message: wire.Reserve, most: int) -> int:
        """What other machines' snapshots, of the same size as ours, have yet to take here."""
        there = sum(self.books.arenas[number].num_bytes for number in self.books.of_rank(COPIES))
        return max(message.copies * most * message.workers - there, 0)

    def _take_over(self, inherited: Mapping[int, int]) -> Arena:
        if BOOKS not in inherited:
            return Arena.make(_BOOKS_BYTES)
        page = Arena.of(inherited[BOOKS])
        arenas = {number: Arena.of(fd) for number, fd in inherited.items() if number != BOOKS}
        pages = (read_page(page, turn) for turn in (0, 1))
        self._turn, data = max((one for one in pages if one is not None), default=(0, b""))
        self.books.take_over(data, arenas)
        return page


def write_page(arena: Arena, turn: int, data: bytes) -> None:
    """Write ``data`` into the page of this turn; a reader sees all of it or none."""
    start = turn % 2 * (arena.num_bytes // 2)
    head = turn.to_bytes(8, "little") + len(data).to_bytes(8, "little")
    whole = _MAGIC + head + xxhash.xxh3_128_digest(head + data) + data
    if len(whole) > arena.num_bytes // 2:
        whole = bytes(_HEAD_BYTES)  # too much to be kept: nothing is better than the page before
    arena.view[start : start + len(whole)] = whole


def read_page(arena: Arena, turn: int) -> tuple[int, bytes] | None:
    """What ``write_page`` wrote, with its turn; None where nothing whole lies."""
    start = turn % 2 * (arena.num_bytes // 2)
    head = bytes(arena.view[start : start + _HEAD_BYTES])
    size = int.from_bytes(head[16:24], "little")
    if head[:8] != _MAGIC or size > arena.num_bytes // 2 - _HEAD_BYTES:
        return None
    data = bytes(arena.view[start + _HEAD_BYTES : start + _HEAD_BYTES + size])
    if xxhash.xxh3_128_digest(head[8:24] + data) != head[24:_HEAD_BYTES]:
        return None
    return int.from_bytes(head[8:16], "little"), data
