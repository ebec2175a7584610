"""Find tensors in the ranks' parts, and check that together these cover every tensor.

The part of the rank that the reader stands for is asked first, then those that its hints lead to,
and all of them only where no hint leads to what is asked. So a rank that resumes looks at its own
regions only. A full verification (``check_parts``) looks at all parts, one after the other, and
finds whether together they hold every element of every tensor once. What it has seen of a tensor is
kept as few boxes, since neighbours are joined: the pieces of a tensor that is cut evenly become one
box, however many ranks there are.

Guarantees: the chunks that are named for a region cover all of it, each element once. Hints decide
what is looked at first and nothing else.
What can go wrong: no part has what is asked for (CheckpointInvalid).

Nothing here needs torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from outlast.checkpoint.manifest import (
    MANIFEST,
    Chunk,
    FileEntry,
    RankPart,
    TensorEntry,
    part_file,
    rank_of_own,
)
from outlast.checkpoint.spreads import Box, common, has_overlap, holders, overlap
from outlast.errors import CheckpointInvalid

if TYPE_CHECKING:
    from outlast.checkpoint.transfer import Inventory

# --- where regions of tensors are -----------------------------------------------------------------


class TensorInfo(NamedTuple):
    """What a tensor is, wherever its bytes are."""

    dtype: str
    shape: tuple[int, ...]


def find_chunks(
    inventory: Inventory, wanted: Mapping[str, Sequence[Box]], rank: int
) -> dict[str, TensorEntry]:
    """Find the chunks that make up regions of tensors; see ``Inventory.locate``."""
    searches = {name: _TensorSearch(name, boxes) for name, boxes in wanted.items()}
    _ChunkFinder(inventory, searches, rank).run()
    return {name: one.entry() for name, one in searches.items()}


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
