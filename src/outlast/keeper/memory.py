"""Snapshots in memory: the keeper's books of them, and the tier that a worker reads.

A snapshot is readable from its commit until the next one begins to be copied over it. In the tier
it looks like any checkpoint: the same names, the same bytes. Snapshots are known by the names of
their saves: of a step that is saved again there may be two.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence

import msgspec

from outlast.checkpoint.manifest import MANIFEST
from outlast.checkpoint.names import SaveName, named
from outlast.keeper.arena import Arena
from outlast.storage import Blob


class Kept(msgspec.Struct, kw_only=True):
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


class Copy(msgspec.Struct, frozen=True, kw_only=True):
    """Another machine's newest snapshot, kept here for it, under its save's name."""

    save: str
    kept: Kept


class Due(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that a slower tier is to get: its save, where it lies, whose files are ours."""

    save: str
    source: str
    ranks: tuple[int, ...]


class Books:
    """Which snapshots are in memory, and in which arenas; not for several threads at once.

    ``kept`` are this machine's own, ``copies`` those of other machines, by node. Besides, what
    slower tiers have yet to get: a successor brings it to them.
    """

    def __init__(self) -> None:
        self.arenas: dict[int, Arena] = {}
        self.owners: dict[int, int] = {}  # arena → rank
        self.kept: dict[str, Kept] = {}  # by the name of the save
        self.copies: dict[str, Copy] = {}
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

    def alone(self) -> set[int]:
        """The arenas of the newest snapshot here, if no tier has it."""
        newest = max(self.kept, key=named, default="")
        if not newest or self.kept[newest].tier:
            return set()
        return {arena for arena, _ in self.kept[newest].files.values()}

    def overwrite(self, number: int) -> None:
        """What lies in this arena is no longer whole."""
        for save, kept in list(self.kept.items()):
            if any(arena == number for arena, _ in kept.files.values()):
                del self.kept[save]
        for node, copy in list(self.copies.items()):
            if any(arena == number for arena, _ in copy.kept.files.values()):
                del self.copies[node]

    def drop(self, number: int) -> None:
        """Give memory back."""
        self.overwrite(number)
        del self.owners[number]
        self.arenas.pop(number).close()

    def encode(self) -> bytes:
        """Everything but the memory itself, for a successor."""
        return msgspec.msgpack.encode((self.owners, self.kept, self.due, self.copies))

    def everything(self) -> dict[str, Kept]:
        """Save → what lies here of it: this machine's own files and those kept for others."""
        found: dict[str, Kept] = {}
        parts = [*self.kept.items(), *((copy.save, copy.kept) for copy in self.copies.values())]
        for save, part in parts:
            known = found.get(save)
            if known is None:
                found[save] = part
            elif known.manifest == part.manifest:
                files, small = {**part.files, **known.files}, {**part.small, **known.small}
                found[save] = Kept(files=files, small=small, attempt=known.attempt, tier=known.tier)
        return found

    def take_over(self, data: bytes, arenas: Mapping[int, Arena]) -> None:
        """Go on from what a predecessor wrote; what is not whole is left out."""
        try:
            owners, kept, self.due, copies = msgspec.msgpack.decode(
                data,
                type=tuple[dict[int, int], dict[str, Kept], dict[str, Due], dict[str, Copy]],
            )
        except msgspec.MsgspecError:
            owners, kept, copies = {}, {}, {}
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
        self.copies = {
            node: copy
            for node, copy in copies.items()
            if all(arena in self.arenas for arena, _ in copy.kept.files.values())
        }


class Memory:
    """The tier that reads snapshots; only what a Storage needs for reading.

    Args:
        arenas: number → memory.
        kept: name of a save → what it consists of.
        num_peers: how many other machines' memory the keeper can ask.
    """

    def __init__(
        self, arenas: Mapping[int, Arena], kept: Mapping[str, Kept], num_peers: int = 0
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

    def put(self, name: str, data: bytes) -> None:
        """Memory is written by the keeper alone."""
        raise OSError(errno.EROFS, "snapshots in memory are not changed", name)

    def put_new(self, name: str, data: bytes) -> bool:
        """Memory is written by the keeper alone."""
        raise OSError(errno.EROFS, "snapshots in memory are not changed", name)

    def create(self, name: str, size: int | None = None) -> Blob:
        """Memory is written by the keeper alone."""
        raise OSError(errno.EROFS, "snapshots in memory are not changed", name)

    def remove(self, name: str) -> None:
        """Memory is written by the keeper alone."""
        raise OSError(errno.EROFS, "snapshots in memory are not changed", name)

    def remove_tree(self, name: str, last: Sequence[str] = ()) -> None:
        """Memory is written by the keeper alone."""
        raise OSError(errno.EROFS, "snapshots in memory are not changed", name)


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
