"""Look up what a checkpoint consists of, and check that its parts cover every tensor.

A manifest that names files and tensors itself (a job of one rank, formats 1 and 2) has all the
answers. One that names parts is asked rank by rank: the part of the rank that the reader stands for
first, then those that its hints lead to, and all of them only where no hint leads to what is asked.

A rank that resumes looks at its own regions only. A full verification (``check_parts``) looks at
all parts, one after the other, and finds whether together they hold every element of every tensor
once. What it has seen of a tensor is kept as few boxes, since neighbours are joined: the pieces of
a tensor that is cut evenly become one box, however many ranks there are.

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
    RankPart,
    TensorEntry,
    decode_part,
    part_file,
    rank_of_own,
    without_owner,
)
from outlast.checkpoint.spreads import Box, common, has_overlap, holders, overlap
from outlast.errors import CheckpointInvalid

# --- looking up -----------------------------------------------------------------------------------

_CACHED_PARTS: Final = 64

ReadFile = Callable[[str, FileEntry], bytes]
"""Reads one whole file, compared with its entry; raises CheckpointInvalid or OSError."""


class TensorInfo(NamedTuple):
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
        self._parts: collections.OrderedDict[int, RankPart] = collections.OrderedDict()

    # --- files --------------------------------------------------------------------------------

    def part(self, rank: int) -> RankPart:
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

    def tensor(self, name: str, rank: int) -> TensorInfo:
        """What the tensor ``name`` is; ``rank`` is one that may know.

        Raises:
            KeyError: there is none.
            CheckpointInvalid, OSError: a part that is needed is right in no place.
        """
        if not self.manifest.parts:
            entry = self.manifest.tensors[name]
            return TensorInfo(entry.dtype, entry.shape)
        for one in self._likely(name, rank):
            held = self.part(one).contents.tensors.get(name)
            if held is not None:
                return TensorInfo(held.dtype, held.shape)
        raise KeyError(name)

    def tensors(self) -> dict[str, TensorInfo]:
        """The tensors that one rank of each structure knows; of ranks' own ones only theirs.

        Raises:
            CheckpointInvalid, OSError: a part that is needed is right in no place.
        """
        if not self.manifest.parts:
            entries = self.manifest.tensors
            return {name: TensorInfo(entry.dtype, entry.shape) for name, entry in entries.items()}
        return {
            name: TensorInfo(held.dtype, held.shape)
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
        searches = {name: _TensorSearch(name, boxes) for name, boxes in wanted.items()}
        _ChunkFinder(self, searches, rank).run()
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


class _TensorSearch:
    """Regions of one tensor, and the chunks that were found for them."""

    def __init__(self, name: str, boxes: Sequence[Box]) -> None:
        self.name = name
        self.boxes = boxes
        self.known: TensorInfo | None = None
        self.chunks: list[Chunk] = []
        self._is_found: bool | None = None  # not worked out since the last chunk came

    def take(self, part: RankPart) -> None:
        """Look through one part.

        Raises:
            CheckpointInvalid: to it the tensor is another than to the parts before.
        """
        held = part.contents.tensors.get(self.name)
        if held is None:
            return
        known = TensorInfo(held.dtype, held.shape)
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


class _ChunkFinder:
    """Reads parts until everything that is searched for is found."""

    def __init__(
        self, inventory: Inventory, searches: Mapping[str, _TensorSearch], rank: int
    ) -> None:
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

    def _holders(self, part: RankPart, name: str, search: _TensorSearch) -> set[int]:
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


# --- whether the parts cover every tensor ---------------------------------------------------------

_JOIN_FROM = 32  # boxes of a tensor, before they are joined for the first time


def check_parts(
    inventory: Inventory, progress: Callable[[int], None] | None = None
) -> dict[str, FileEntry]:
    """Read all parts of a checkpoint; the other files, which are still to be verified.

    Args:
        inventory: the checkpoint's.
        progress: told the bytes of each part.

    Raises:
        CheckpointInvalid: a part is right in no place, or they do not cover every tensor.
        OSError: a part cannot be read.
    """
    manifest = inventory.manifest
    if not manifest.parts:
        return dict(manifest.files)
    coverage = Coverage(manifest.step)
    found: dict[str, FileEntry] = {}
    for rank, entry in enumerate(manifest.parts):
        part = inventory.part(rank)
        coverage.add(part)
        found.update(part.files)
        if progress is not None:
            progress(entry.size)
    coverage.finish()
    return found


class Coverage:
    """Which elements of which tensors the parts so far hold."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._tensors: dict[str, _CoveredTensor] = {}

    def add(self, part: RankPart) -> None:
        """Take note of a part.

        Raises:
            CheckpointInvalid: to it a tensor is another than to the parts before.
        """
        for name, held in part.contents.tensors.items():
            known = self._tensors.get(name)
            if known is None:
                known = self._tensors[name] = _CoveredTensor(held.dtype, held.shape)
            elif (known.dtype, known.shape) != (held.dtype, held.shape):
                raise CheckpointInvalid(
                    self._step,
                    f"{name} is {held.dtype} {held.shape} on rank {part.rank} and {known.dtype} "
                    f"{known.shape} on another",
                )
            for slab in held.slabs:
                known.add((slab.offsets, slab.shape))

    def finish(self) -> None:
        """After the last part.

        Raises:
            CheckpointInvalid: an element of a tensor is in no part, or in two.
        """
        for name, tensor in self._tensors.items():
            if not tensor.is_whole():
                raise CheckpointInvalid(
                    self._step, f"{MANIFEST}: the chunks of {name} do not cover it"
                )


class _CoveredTensor:
    def __init__(self, dtype: str, shape: tuple[int, ...]) -> None:
        self.dtype = dtype
        self.shape = shape
        self._boxes: list[Box] = []
        self._join_at = _JOIN_FROM

    def add(self, box: Box) -> None:
        if math.prod(box[1]):
            self._boxes.append(box)
        if len(self._boxes) >= self._join_at:
            self._boxes = joined(self._boxes)
            self._join_at = max(_JOIN_FROM, 2 * len(self._boxes))

    def is_whole(self) -> bool:
        boxes = joined(self._boxes)
        held = sum(math.prod(box[1]) for box in boxes)
        return held == math.prod(self.shape) and not has_overlap(boxes)


def joined(boxes: list[Box]) -> list[Box]:
    """The same elements, as often, in fewer boxes: neighbours are joined."""
    for axis in reversed(range(len(boxes[0][0]) if boxes else 0)):
        boxes = list(_joined_along(boxes, axis))
    return boxes


def _joined_along(boxes: list[Box], axis: int) -> Iterator[Box]:
    """Join boxes that follow each other along one axis and are alike along the others."""

    def others(box: Box) -> tuple[tuple[int, ...], ...]:
        return box[0][:axis] + box[0][axis + 1 :], box[1][:axis] + box[1][axis + 1 :]

    last: Box | None = None
    for box in sorted(boxes, key=lambda box: (others(box), box[0][axis])):
        if last is None:
            last = box
        elif others(last) == others(box) and last[0][axis] + last[1][axis] == box[0][axis]:
            extent = last[1][axis] + box[1][axis]
            last = last[0], (*last[1][:axis], extent, *last[1][axis + 1 :])
        else:
            yield last
            last = box
    if last is not None:
        yield last
