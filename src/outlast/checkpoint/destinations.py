"""Say where the bytes of wanted tensors lie in a checkpoint's files, and where they go in memory.

What is wanted may be cut in another way than what was saved. What a saved chunk and a wanted box
share becomes runs of bytes that follow each other in the file and in memory. Long runs are copied
straight from the verified block. Where they are short (a matrix that was cut by rows and is wanted
by columns), where the destination is on a GPU, strided, of another dtype, or one that torch negates
or conjugates as it reads it, the verified bytes are collected in memory on the side, about
``STAGE_BYTES`` at a time, and copied on as a tensor. A destination's elements must not share memory
(``FillTargets``).
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch

from outlast.checkpoint import devices
from outlast.checkpoint.boundary import array_of
from outlast.checkpoint.manifest import BLOCK_BYTES, Chunk, TensorEntry
from outlast.checkpoint.spreads import common
from outlast.checkpoint.tensors import (
    DTYPES,
    is_deferred,
    is_spread,
    lay,
    local_chunks,
    local_of,
    overlaps,
    raw,
    span,
    spread_as,
)
from outlast.checkpoint.transfer import ReadRange
from outlast.errors import StateMismatch

SHORT_BYTES: Final = 64 << 10  # below this a call for each run costs more than a second copy
STAGE_BYTES: Final = BLOCK_BYTES

Extents = tuple[int, ...]


class FillTargets:
    """Tensors that are to be filled: those whose elements share memory first as whole ones.

    Args:
        wanted: name and tensor of each.

    Attributes:
        targets: the same, with new memory in place of such a tensor.
    """

    def __init__(self, wanted: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.targets: list[tuple[str, torch.Tensor]] = []
        self._apart: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        for name, tensor in wanted:
            whole = tensor
            if overlaps(local_of(tensor)):
                whole = fresh(tensor.shape, tensor.dtype, tensor)
                self._apart.append((name, whole, tensor))
            self.targets.append((name, whole))

    def lay(self, where: str) -> None:
        """All are filled, from ``where``: bring what was set apart to where it belongs.

        Raises:
            StateMismatch: elements that share memory were saved with several values.
        """
        for name, whole, tensor in self._apart:
            if not lay(local_of(whole), local_of(tensor)):
                raise StateMismatch(
                    f"{name} has several values in {where} where its elements share memory now (by "
                    "expand or as_strided); build it as it was"
                )


def fresh(
    shape: Sequence[int], dtype: torch.dtype, like: torch.Tensor | None = None
) -> torch.Tensor:
    """New memory for a tensor, aligned as torch aligns.

    Args:
        shape: of the whole tensor.
        dtype: its dtype.
        like: a DTensor of this shape: the new tensor is spread as it is, and this process gets
            memory for its own part.
    """
    if like is None or not is_spread(like):
        return torch.empty(tuple(shape), dtype=dtype)
    spread: Any = like
    local = spread.to_local()
    return spread_as(like, torch.empty(local.shape, dtype=dtype, device=local.device))


def pieces(entry: TensorEntry, target: torch.Tensor) -> Iterator[tuple[str, ReadRange]]:
    """What to read of which file so that ``target`` holds the tensor that was saved.

    Args:
        entry: its shape, dtype and chunks.
        target: a tensor of that shape: plain, or a DTensor, whose local part is filled. With
            another dtype the values are cast. Whoever reads must keep it until all is read.

    Raises:
        ConfigError: ``target`` is spread in a way that cannot be read into.
    """
    for offsets, _, view in local_chunks(target):
        yield from pieces_at(entry, offsets, view)


def pieces_at(
    entry: TensorEntry, offsets: Extents, target: torch.Tensor
) -> Iterator[tuple[str, ReadRange]]:
    """As ``pieces``, where ``target`` is a plain tensor, for the tensor's box at ``offsets``."""
    for chunk in entry.chunks:
        low, extent = common((chunk.offsets, chunk.shape), (offsets, tuple(target.shape)))
        if not math.prod(extent):
            continue
        region = target
        for axis, (start, length) in enumerate(zip(low, extent, strict=True)):
            region = region.narrow(axis, start - offsets[axis], length)
        inner = tuple(a - b for a, b in zip(low, chunk.offsets, strict=True))
        for piece in _pieces_of(chunk, inner, DTYPES[entry.dtype], region):
            yield chunk.file, piece


def _pieces_of(
    chunk: Chunk, offsets: Extents, dtype: torch.dtype, region: torch.Tensor
) -> Iterator[ReadRange]:
    """What to read of a chunk so that ``region`` holds the chunk's box at ``offsets``."""
    item, extent, strides = dtype.itemsize, tuple(region.shape), _strides(chunk.shape)
    start = chunk.start + _distance(offsets, strides) * item
    axis, run = _run(extent, chunk.shape, region)
    outer = extent[:axis]
    is_here = region.device.type == "cpu" and region.dtype == dtype
    direct = is_here and run > 0 and not is_deferred(region)
    if direct and (math.prod(outer) == 1 or run * item >= SHORT_BYTES):
        for index in itertools.product(*(range(length) for length in outer)):
            here = start + _distance(index, strides) * item
            there = _distance(index, region.stride()) * item
            yield ReadRange(here, here + run * item, region.data_ptr() + there)
        return
    stream = devices.stream_for(region)  # of whoever asks: behind what made the tensor
    for begin, target in _cut(region, strides, item):
        here, size = start + begin * item, span(target.shape, strides) * item
        yield ReadRange(here, here + size, 0, OverlapStage(size, dtype, strides, target, stream))


def _distance(index: Sequence[int], strides: Sequence[int]) -> int:
    """From a tensor's first element to the one at ``index``, in elements."""
    return sum(i * s for i, s in zip(index, strides, strict=False))


def _cut(region: torch.Tensor, strides: Extents, item: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Cut a box into parts of about ``STAGE_BYTES``, along the axes that vary slowest.

    Args:
        region: the memory it goes to.
        strides: of the chunk that it is a box of, in elements.
        item: bytes of an element of the chunk.

    Yields:
        How many elements behind the first one of the box the part begins in the chunk, and its own
        part of the memory.
    """
    axis = next((axis for axis, extent in enumerate(region.shape) if extent > 1), None)
    if axis is None or span(region.shape, strides) * item <= STAGE_BYTES:
        yield 0, region
        return
    rows = max(1, STAGE_BYTES // (strides[axis] * item))
    for row in range(0, region.shape[axis], rows):
        part = region.narrow(axis, row, min(rows, region.shape[axis] - row))
        for begin, target in [(0, part)] if rows > 1 else _cut(part, strides, item):
            yield row * strides[axis] + begin, target


def _strides(shape: Extents) -> Extents:
    """Strides of a contiguous tensor, in elements."""
    strides = [1]
    for extent in reversed(shape[1:]):
        strides.append(strides[-1] * max(extent, 1))
    return tuple(reversed(strides))[: len(shape)]


def _run(extent: Extents, saved: Extents, region: torch.Tensor) -> tuple[int, int]:
    """Elements that follow each other in the chunk and in memory, and the axis they start at."""
    run, axis = 1, len(extent)
    while axis:
        axis -= 1
        if extent[axis] > 1 and region.stride(axis) != run:
            return axis + 1, run if axis + 1 < len(extent) else 0
        run *= extent[axis]
        if extent[axis] != saved[axis]:
            break  # the next row of the chunk begins further on
    return axis, run


class OverlapStage:
    """Memory on the side for a box, made when its first bytes come, gone after its last.

    Args:
        num_bytes: from the first byte of the box in its chunk to its last.
        dtype: the chunk's.
        strides: the chunk's, in elements.
        target: the memory that the box goes to.
        stream: of the GPU that ``target`` is on.
    """

    def __init__(
        self,
        num_bytes: int,
        dtype: torch.dtype,
        strides: Extents,
        target: torch.Tensor,
        stream: Any,
    ) -> None:
        self._num_bytes = self._left = num_bytes
        self._dtype = dtype
        self._strides = strides
        self._target = target
        self._stream = stream
        self._memory: torch.Tensor | None = None
        self._lock = threading.Lock()

    def address(self) -> int:
        """Where the bytes go."""
        with self._lock:
            if self._memory is None:
                self._memory = torch.empty(self._num_bytes, dtype=torch.uint8)
            return int(self._memory.data_ptr())

    def arrived(self, num_bytes: int) -> None:
        """So many more bytes are there; after the last they are brought on."""
        with self._lock:
            self._left -= num_bytes
            if self._left:
                return
            memory, self._memory = self._memory, None
        if memory is not None:
            self._bring(memory.view(self._dtype).as_strided(self._target.shape, self._strides))

    def _bring(self, source: torch.Tensor) -> None:
        """Copy to the target, in this thread alone if that is in this memory."""
        target = self._target
        with torch.no_grad(), devices.on(self._stream):
            if target.device.type != "cpu" or target.dtype != source.dtype or is_deferred(target):
                target.copy_(source)
            else:
                np.copyto(array_of(raw(target)), array_of(raw(source)))
