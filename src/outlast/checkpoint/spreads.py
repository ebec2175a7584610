"""Describe how a tensor is spread over ranks, in few words, and find the holders of each piece.

A spread names a grid of ranks (a device mesh) and what each of its axes does with the tensor: it
cuts one dimension, or holds replicas. From it follows, for any rank, which pieces that rank holds,
and for any box, which ranks hold a piece of it. It says nothing of one rank's offsets, so all ranks
of a job that spreads its state evenly have the same few, however many ranks there are.

Nothing here needs torch. ``tensors`` compares what follows from a spread with what torch says
before anything relies on it.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec

Run = tuple[int, int]  # (first row, number of rows)
Box = tuple[tuple[int, ...], tuple[int, ...]]  # (offsets, extents) in the whole tensor
WHOLE: Final = -1  # in place of a dimension: this axis of the grid holds replicas


class Spread(msgspec.Struct, frozen=True, array_like=True):
    """A grid of ranks and what each of its axes does.

    Attributes:
        sizes: number of ranks along each axis of the grid.
        placements: for each axis, the dimension it cuts (``WHOLE``: none) and its split factor:
            into so many groups the rows are cut before each group is cut into parts.
        first: the rank at the grid's origin.
        strides: for each axis, the difference of the ranks of two neighbours.
        ranks: of a grid that no strides describe, all ranks, row by row; otherwise empty.
    """

    sizes: tuple[int, ...]
    placements: tuple[tuple[int, int], ...]
    first: int = 0
    strides: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Where ``rank`` stands in the grid; None if it does not."""
        if self.ranks:
            found = _positions(self.ranks).get(rank)
            return None if found is None else _unravel(found, self.sizes)
        left, found_at = rank - self.first, [0] * len(self.sizes)
        for axis in sorted(range(len(self.sizes)), key=lambda axis: -self.strides[axis]):
            if self.sizes[axis] > 1:
                found_at[axis] = min(max(left, 0) // self.strides[axis], self.sizes[axis] - 1)
                left -= found_at[axis] * self.strides[axis]
        return None if left else tuple(found_at)

    def rank_at(self, coordinate: Sequence[int]) -> int:
        """The rank that stands at ``coordinate``."""
        if self.ranks:
            position = 0
            for size, index in zip(self.sizes, coordinate, strict=True):
                position = position * size + index
            return self.ranks[position]
        return self.first + sum(i * s for i, s in zip(coordinate, self.strides, strict=True))

    def problem(self) -> str:
        """What makes it no spread at all, in words; "" if nothing does."""
        sizes, num_axes = self.sizes, len(self.sizes)
        if len(self.placements) != num_axes or any(size < 1 for size in sizes):
            return f"{len(self.placements)} placements on a grid of {sizes}"
        if any(dim < WHOLE or factor < 1 for dim, factor in self.placements):
            return f"placements {self.placements}"
        if self.ranks:
            is_grid = len(self.ranks) == math.prod(sizes) == len(set(self.ranks))
            return "" if is_grid and min(self.ranks) >= 0 else f"a grid of {sizes} of other ranks"
        if len(self.strides) != num_axes or self.first < 0 or not _is_nested(sizes, self.strides):
            return f"strides {self.strides} on a grid of {sizes}"
        return ""


def spread_over(
    ranks: Sequence[int], sizes: Sequence[int], placements: Iterable[tuple[int, int]]
) -> Spread:
    """The spread over a grid of ``ranks``, which are given row by row."""
    shape, axes = tuple(sizes), tuple(placements)
    steps = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    strides = tuple(
        ranks[step] - ranks[0] if size > 1 else 0 for size, step in zip(shape, steps, strict=True)
    )
    regular = Spread(shape, axes, ranks[0], strides)
    if _is_nested(shape, strides) and all(
        regular.rank_at(place) == rank
        for place, rank in zip(itertools.product(*map(range, shape)), ranks, strict=True)
    ):
        return regular
    return Spread(shape, axes, ranks=tuple(ranks))


def pieces_at(shape: tuple[int, ...], spread: Spread, coordinate: Sequence[int]) -> list[Box]:
    """The pieces of a tensor that the rank at ``coordinate`` holds, none of them empty.

    A tensor without elements is one empty piece, everywhere.
    """
    return boxes_at(shape, spread.sizes, spread.placements, coordinate)


def boxes_at(
    shape: tuple[int, ...],
    sizes: Sequence[int],
    placements: Iterable[tuple[int, int]],
    coordinate: Sequence[int],
) -> list[Box]:
    """The pieces at ``coordinate`` of a grid whose ranks are not known.

    Args:
        shape: of the whole tensor.
        sizes: of the grid, as in :class:`Spread`.
        placements: the same.
        coordinate: in the grid.
    """
    if not math.prod(shape):
        return [((0,) * len(shape), shape)]
    axes: list[list[Run]] = [[(0, size)] for size in shape]
    for axis, (dim, factor) in enumerate(placements):
        if dim != WHOLE:
            axes[dim] = cut(axes[dim], sizes[axis], coordinate[axis], factor)
    return [
        (tuple(start for start, _ in runs), tuple(length for _, length in runs))
        for runs in itertools.product(*axes)
    ]


def pieces_of(shape: tuple[int, ...], spread: Spread | None, rank: int) -> list[Box]:
    """The pieces that ``rank`` holds; all of it where the tensor is not spread."""
    if spread is None:
        return [((0,) * len(shape), shape)]
    coordinate = spread.coordinate(rank)
    return [] if coordinate is None else pieces_at(shape, spread, coordinate)


def replicas(spread: Spread, coordinate: Sequence[int]) -> list[int]:
    """The ranks that hold what the rank at ``coordinate`` holds, itself among them, ascending."""
    axes = [
        range(size) if dim == WHOLE else (coordinate[axis],)
        for axis, ((dim, _), size) in enumerate(zip(spread.placements, spread.sizes, strict=True))
    ]
    return sorted(spread.rank_at(place) for place in itertools.product(*axes))


@functools.lru_cache(maxsize=4096)
def holders(shape: tuple[int, ...], spread: Spread, box: Box) -> tuple[tuple[int, ...], ...]:
    """The ranks that hold a part of ``box``: groups of replicas, in the order of their pieces."""
    if not math.prod(shape):
        return (tuple(replicas(spread, (0,) * len(spread.sizes))),)
    choices: list[list[tuple[tuple[int, int], ...]]] = []  # per dimension: (axis, index) pairs
    for dim, size in enumerate(shape):
        begin, end = box[0][dim], box[0][dim] + box[1][dim]
        choices.append(
            [
                indices
                for indices, runs in _cuts_of(size, dim, spread)
                if any(start < end and begin < start + length for start, length in runs)
            ]
        )
    found = []
    for chosen in itertools.product(*choices):
        coordinate = [0] * len(spread.sizes)
        for axis, index in itertools.chain.from_iterable(chosen):
            coordinate[axis] = index
        found.append(tuple(replicas(spread, coordinate)))
    return tuple(found)


@functools.lru_cache(maxsize=256)
def _cuts_of(size: int, dim: int, spread: Spread) -> list[tuple[tuple[Run, ...], tuple[Run, ...]]]:
    """Every way in which the axes that cut ``dim`` can be chosen, and the rows of each."""
    axes = [axis for axis, (cuts, _) in enumerate(spread.placements) if cuts == dim]

    def deeper(
        number: int, chosen: tuple[Run, ...], runs: list[Run]
    ) -> Iterator[tuple[tuple[Run, ...], tuple[Run, ...]]]:
        if number == len(axes):
            yield chosen, tuple(runs)
            return
        axis = axes[number]
        for index in range(spread.sizes[axis]):
            inner = cut(runs, spread.sizes[axis], index, spread.placements[axis][1])
            if inner:
                yield from deeper(number + 1, (*chosen, (axis, index)), inner)

    return list(deeper(0, (), [(0, size)]))


def common(one: Box, other: Box) -> Box:
    """The box of the elements that two boxes have in common; without elements if there is none."""
    low = tuple(map(max, one[0], other[0]))
    high = tuple(
        min(a + m, b + n) for a, m, b, n in zip(one[0], one[1], other[0], other[1], strict=True)
    )
    return low, tuple(max(0, end - start) for start, end in zip(low, high, strict=True))


def is_within(box: Box, shape: Sequence[int]) -> bool:
    """Whether ``box`` lies in a tensor of this shape."""
    offsets, extents = box
    return len(offsets) == len(extents) == len(shape) and all(
        0 <= offset <= offset + extent <= whole
        for offset, extent, whole in zip(offsets, extents, shape, strict=True)
    )


def overlap(one: Box, other: Box) -> bool:
    """Whether two boxes have an element in common."""
    return all(
        max(start, begin) < min(start + extent, begin + length)
        for start, extent, begin, length in zip(*one, *other, strict=True)
    )


def has_overlap(boxes: Iterable[Box]) -> bool:
    """Whether two of these share an element: a sweep along the axis that is cut most often."""
    full = [box for box in boxes if math.prod(box[1])]
    if len(full) < 2:
        return False
    axis = max(range(len(full[0][0])), key=lambda axis: len({box[0][axis] for box in full}))
    active: list[Box] = []
    for box in sorted(full, key=lambda box: box[0][axis]):
        start = box[0][axis]
        active = [other for other in active if other[0][axis] + other[1][axis] > start]
        if any(overlap(box, other) for other in active):
            return True
        active.append(box)
    return False


def cut(runs: Sequence[Run], parts: int, index: int, split_factor: int = 1) -> list[Run]:
    """Rows of part ``index`` of ``parts``, as torch.chunk cuts; runs that touch become one.

    With a split factor the rows are cut into so many groups first and each group into parts: what
    ``_StridedShard`` stands for.
    """
    kept: list[Run] = []
    for group in range(split_factor):
        for start, length in _chunk(_chunk(runs, split_factor, group), parts, index):
            if kept and sum(kept[-1]) == start:
                kept[-1] = (kept[-1][0], kept[-1][1] + length)
            else:
                kept.append((start, length))
    return kept


def _chunk(runs: Sequence[Run], parts: int, index: int) -> list[Run]:
    total = sum(length for _, length in runs)
    size = -(-total // parts)
    begin, end = size * index, min(size * (index + 1), total)
    kept, position = [], 0
    for start, length in runs:
        low, high = max(begin, position), min(end, position + length)
        if low < high:
            kept.append((start + low - position, high - low))
        position += length
    return kept


def _is_nested(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether each stride reaches beyond all that the smaller ones reach together."""
    reach = 0
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size > 1:
            if stride <= reach:
                return False
            reach += stride * (size - 1)
    return True


@functools.lru_cache(maxsize=16)
def _positions(ranks: tuple[int, ...]) -> dict[int, int]:
    return {rank: position for position, rank in enumerate(ranks)}


def _unravel(position: int, sizes: Sequence[int]) -> tuple[int, ...]:
    found = []
    for size in reversed(sizes):
        position, index = divmod(position, size)
        found.append(index)
    return tuple(reversed(found))
