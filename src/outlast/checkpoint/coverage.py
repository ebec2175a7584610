"""Whether the parts of a checkpoint together hold every element of every tensor once.

A rank that resumes looks at its own regions only; who verifies a checkpoint looks at all parts, one
after the other. What has been seen of a tensor is kept as few boxes, since neighbours are joined:
the pieces of a tensor that is cut evenly become one box, however many ranks there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from outlast.checkpoint.inventory import Inventory
from outlast.checkpoint.manifest import MANIFEST, FileEntry
from outlast.checkpoint.parts import Part
from outlast.checkpoint.spreads import Box, has_overlap
from outlast.errors import CheckpointInvalid

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
    """What the parts so far hold."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._tensors: dict[str, _Tensor] = {}

    def add(self, part: Part) -> None:
        """Take note of a part.

        Raises:
            CheckpointInvalid: to it a tensor is another than to the parts before.
        """
        for name, held in part.contents.tensors.items():
            known = self._tensors.get(name)
            if known is None:
                known = self._tensors[name] = _Tensor(held.dtype, held.shape)
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


class _Tensor:
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
    """The same elements, as often, in fewer boxes."""
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
