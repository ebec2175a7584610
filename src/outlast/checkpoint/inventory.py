"""What a checkpoint consists of, looked up as it is asked for.

A manifest that names files and tensors itself (a job of one rank, formats 1 and 2) has all the
answers. One that names parts is asked rank by rank: the part of the rank that the reader stands for
first, then those that its hints lead to, and all of them only where no hint leads to what is asked.

Guarantees: a part is believed only after it was compared with the manifest, and checked. The chunks
that are named for a region cover all of it, each element once. Hints decide what is looked at first
and nothing else.
What can go wrong: a part is right in no place, or no part has what is asked for
(CheckpointInvalid); a place cannot be read (OSError).
Memory: ``_CACHED_PARTS`` parts, whatever the number of ranks.

Nothing here needs torch.
"""

from __future__ import annotations

import collections
import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from outlast.checkpoint.manifest import (
    FILE_NAME,
    MANIFEST,
    PART_NAME,
    Chunk,
    FileEntry,
    Manifest,
    TensorEntry,
    part_file,
)
from outlast.checkpoint.parts import Part, decode_part, rank_of_own, without_owner
from outlast.checkpoint.spreads import Box, common, has_overlap, holders, overlap
from outlast.errors import CheckpointInvalid

_CACHED_PARTS: Final = 64

ReadFile = Callable[[str, FileEntry], bytes]
"""Reads one whole file, compared with its entry; raises CheckpointInvalid or OSError."""


class Known(NamedTuple):
    """What a tensor is, wherever its bytes are."""

    dtype: str
    shape: tuple[int, ...]


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
        self._parts: collections.OrderedDict[int, Part] = collections.OrderedDict()

    # --- files --------------------------------------------------------------------------------

    def part(self, rank: int) -> Part:
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

    def tensor(self, name: str, rank: int) -> Known:
        """What the tensor ``name`` is; ``rank`` is one that may know.

        Raises:
            KeyError: there is none.
            CheckpointInvalid, OSError: a part that is needed is right in no place.
        """
        if not self.manifest.parts:
            entry = self.manifest.tensors[name]
            return Known(entry.dtype, entry.shape)
        for one in self._likely(name, rank):
            held = self.part(one).contents.tensors.get(name)
            if held is not None:
                return Known(held.dtype, held.shape)
        raise KeyError(name)

    def tensors(self) -> dict[str, Known]:
        """The tensors that one rank of each structure knows; of ranks' own ones only theirs.

        Raises:
            CheckpointInvalid, OSError: a part that is needed is right in no place.
        """
        if not self.manifest.parts:
            entries = self.manifest.tensors
            return {name: Known(entry.dtype, entry.shape) for name, entry in entries.items()}
        return {
            name: Known(held.dtype, held.shape)
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
        searches = {name: _Search(name, boxes) for name, boxes in wanted.items()}
        _Finder(self, searches, rank).run()
        return {name: one.entry() for name, one in searches.items()}

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


class _Search:
    """Regions of one tensor, and the chunks that were found for them."""

    def __init__(self, name: str, boxes: Sequence[Box]) -> None:
        self.name = name
        self.boxes = boxes
        self.known: Known | None = None
        self.chunks: list[Chunk] = []
        self._is_found: bool | None = None  # not worked out since the last chunk came

    def take(self, part: Part) -> None:
        """Look through one part.

        Raises:
            CheckpointInvalid: to it the tensor is another than to the parts before.
        """
        held = part.contents.tensors.get(self.name)
        if held is None:
            return
        known = Known(held.dtype, held.shape)
        if self.known is not None and self.known != known:
            raise CheckpointInvalid(
                part.step,
                f"{self.name} is {known.dtype} {known.shape} in {part_file(part.rank)} and "
                f"{self.known.dtype} {self.known.shape} in another",
            )
        fresh = [
            chunk
            for chunk in part.chunks(self.name)
            if any(overlap((chunk.offsets, chunk.shape), box) for box in self.boxes)
        ]
        if fresh or self.known is None:
            self.known, self._is_found = known, None
            self.chunks += fresh

    @property
    def is_found(self) -> bool:
        """Whether every element of every box is in exactly one chunk."""
        if self._is_found is None:
            self._is_found = self.known is not None and all(
                covers(self.chunks, box) for box in self.boxes
            )
        return self._is_found

    def entry(self) -> TensorEntry:
        """The tensor with these chunks."""
        assert self.known is not None  # noqa: S101 - it was found
        chunks = tuple(sorted(self.chunks, key=lambda chunk: chunk.offsets))
        return TensorEntry(dtype=self.known.dtype, shape=self.known.shape, chunks=chunks)


class _Finder:
    """Reads parts until everything that is searched for is found."""

    def __init__(self, inventory: Inventory, searches: Mapping[str, _Search], rank: int) -> None:
        self._inventory = inventory
        self._searches = searches
        self._pending = dict(searches)
        self._seen: set[int] = set()
        self._likely = iter(dict.fromkeys([rank, *inventory.firsts()]))
        self._rest = iter(range(inventory.manifest.world_size))

    def run(self) -> None:
        """Find everything.

        Raises:
            CheckpointInvalid, OSError: see ``Inventory.locate``.
        """
        owners = {rank_of_own(name) for name in self._pending}
        fresh = {one for one in owners if one is not None and one < self._world_size}
        if len(owners) != 1 or None in owners:
            fresh.add(next(self._likely))
        while fresh:
            hints: set[int] = set()
            for rank in sorted(fresh):
                hints |= self._take(rank)
            self._pending = {name: one for name, one in self._pending.items() if not one.is_found}
            if not self._pending:
                return
            fresh = hints - self._seen or self._next()
        missing = next(iter(self._pending.values()))
        reason = "no part names" if missing.known is None else "the parts do not cover, once each,"
        raise CheckpointInvalid(
            self._inventory.manifest.step, f"{reason} the wanted elements of {missing.name}"
        )

    @property
    def _world_size(self) -> int:
        return self._inventory.manifest.world_size

    def _next(self) -> set[int]:
        """The next rank to ask when nothing hints at one; none when all were asked."""
        is_unknown = any(one.known is None for one in self._pending.values())
        ranks = [self._likely] if is_unknown else []
        for source in [*ranks, self._rest]:
            rank = next((one for one in source if one not in self._seen), None)
            if rank is not None:
                return {rank}
        return set()

    def _take(self, rank: int) -> set[int]:
        """Take what one part has; the ranks that it says to ask next."""
        part = self._inventory.part(rank)
        self._seen.add(rank)
        hints: set[int] = set()
        for name, search in self._pending.items():
            search.take(part)
            if name in part.contents.tensors and not search.is_found:
                hints.update(part.contents.elsewhere.get(name, ()))
                hints |= self._holders(part, name, search)
        return hints

    def _holders(self, part: Part, name: str, search: _Search) -> set[int]:
        """Of each group of replicas that holds something wanted, one: it knows who wrote it."""
        spread, shape = part.spread(name), part.contents.tensors[name].shape
        found: set[int] = set()
        if spread is None or any(len(box[0]) != len(shape) for box in search.boxes):
            return found
        for box in search.boxes:
            for group in holders(shape, spread, box):
                if self._seen.isdisjoint(group) and group[-1] < self._world_size:
                    found.add(group[0])
        return found


def covers(chunks: Sequence[Chunk], box: Box) -> bool:
    """Whether every element of ``box`` is in exactly one chunk."""
    clipped = []
    for chunk in chunks:
        one = common((chunk.offsets, chunk.shape), box)
        if math.prod(one[1]):
            clipped.append(one)
    if sum(math.prod(one[1]) for one in clipped) != math.prod(box[1]):
        return False
    return not has_overlap(clipped)


def rank_of(name: str) -> int | None:
    """The rank whose file ``name`` is; None if it is no rank's."""
    match = FILE_NAME.match(name) or PART_NAME.match(name)
    return int(match[1]) if match else None


def num_bytes(manifest: Manifest) -> int:
    """Size of all files of a checkpoint together, without the manifest."""
    if manifest.parts:
        return sum(part.size + part.num_bytes for part in manifest.parts)
    return sum(entry.size for entry in manifest.files.values())
