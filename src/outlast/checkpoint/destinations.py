"""From a tensor that is wanted to bytes of files: which ranges go where, and through which memory.

What is wanted may be cut in another way than what was saved. DCP's planner says where the two
overlap; each overlap then becomes runs of bytes that follow each other in the file and in memory.
Long runs are copied straight from the verified block. Where they are short (a matrix that was cut
by rows and is wanted by columns), where the destination is on a GPU, strided, of another dtype, or
one that torch negates or conjugates as it reads it, the verified bytes are collected in memory on
the side and copied on as a tensor. A destination's elements must not share memory (``overlaps``).

Rejected: DCP's reading itself: it hashes nothing, and copies each overlap through fresh memory.
Asking for huge pages for new memory: on a virtual machine that gives free memory back to its host,
faulting 1.35 GB in took 2.0 to 3.6 s of CPU with them and 0.7 to 0.9 without; elsewhere four
threads fault pages of 4 KiB in faster than a disk reads.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from outlast.checkpoint import devices
from outlast.checkpoint.aliases import array_of
from outlast.checkpoint.manifest import Chunk, TensorEntry
from outlast.checkpoint.overlaps import is_deferred, lay, overlaps, raw, span
from outlast.checkpoint.read import Piece
from outlast.checkpoint.references import local_of
from outlast.checkpoint.reshard import is_spread, local_chunks, spread_as
from outlast.checkpoint.shard import DTYPES
from outlast.errors import StateMismatch

SHORT_BYTES: Final = 64 << 10  # below this a call for each run costs more than a second copy

Extents = tuple[int, ...]


class Overlap(NamedTuple):
    """What a saved chunk and a wanted one share: offsets in each, and the extent."""

    saved: Chunk
    saved_offsets: Extents
    wanted_offsets: Extents
    extent: Extents


class Apart:
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


def pieces(name: str, entry: TensorEntry, target: torch.Tensor) -> Iterator[tuple[str, Piece]]:
    """What to read of which file so that ``target`` holds the tensor that was saved.

    Args:
        name: the tensor's, for the planner.
        entry: its shape, dtype and chunks.
        target: a tensor of that shape: plain, or a DTensor, whose local part is filled. With
            another dtype the values are cast. Whoever reads must keep it until all is read.

    Raises:
        ConfigError: ``target`` is spread in a way that cannot be read into.
    """
    dtype = DTYPES[entry.dtype]
    for offsets, shape, view in local_chunks(target):
        for overlap in _overlaps(name, entry, offsets, shape):
            yield from _pieces_of(overlap, dtype, view)


def _overlaps(name: str, entry: TensorEntry, offsets: Extents, shape: Extents) -> Iterator[Overlap]:
    if not math.prod(shape):
        return
    if entry.chunks and entry.chunks[0].shape == entry.shape:
        # The whole tensor: no planner is needed, nor imported.
        yield Overlap(entry.chunks[0], offsets, (0,) * len(shape), shape)
        return
    same = next((c for c in entry.chunks if (c.offsets, c.shape) == (offsets, shape)), None)
    if same is not None:  # cut as it was saved
        yield Overlap(same, (0,) * len(shape), (0,) * len(shape), shape)
        return
    yield from _as_dcp_plans(name, entry, offsets, shape)


def _as_dcp_plans(
    name: str, entry: TensorEntry, offsets: Extents, shape: Extents
) -> Iterator[Overlap]:
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        TensorProperties,
        TensorStorageMetadata,
    )
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    saved = [chunk for chunk in entry.chunks if math.prod(chunk.shape)]
    stored = TensorStorageMetadata(
        properties=TensorProperties(dtype=DTYPES[entry.dtype]),
        size=torch.Size(entry.shape),
        chunks=[ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.shape)) for c in saved],
    )
    wanted = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(shape))]
    for item in create_read_items_for_chunk_list(name, stored, wanted):
        yield Overlap(
            saved[item.storage_index.index],
            tuple(item.storage_offsets),
            tuple(item.dest_offsets),
            tuple(item.lengths),
        )


def _pieces_of(
    overlap: Overlap, dtype: torch.dtype, view: torch.Tensor
) -> Iterator[tuple[str, Piece]]:
    chunk, item = overlap.saved, dtype.itemsize
    region = view
    for axis, (start, length) in enumerate(
        zip(overlap.wanted_offsets, overlap.extent, strict=True)
    ):
        region = region.narrow(axis, start, length)
    saved_strides = _strides(chunk.shape)
    first = sum(o * s for o, s in zip(overlap.saved_offsets, saved_strides, strict=True))
    start = chunk.start + first * item
    axis, run = _run(overlap.extent, chunk.shape, region)
    outer = overlap.extent[:axis]
    is_here = region.device.type == "cpu" and region.dtype == dtype
    direct = is_here and run > 0 and not is_deferred(region)
    if direct and (math.prod(outer) == 1 or run * item >= SHORT_BYTES):
        for index in itertools.product(*(range(extent) for extent in outer)):
            here = start + sum(i * s for i, s in zip(index, saved_strides, strict=False)) * item
            there = sum(i * s for i, s in zip(index, region.stride(), strict=False)) * item
            address = region.data_ptr() + there
            yield chunk.file, Piece(here, here + run * item, address)
        return
    last = span(overlap.extent, saved_strides)
    stream = devices.stream_for(region)  # of whoever asks: behind what made the tensor
    stage = _Stage(
        last * item,
        lambda memory: _bring(
            memory.view(dtype).as_strided(overlap.extent, saved_strides), region, stream
        ),
    )
    yield chunk.file, Piece(start, start + last * item, 0, stage)


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


class _Stage:
    """Memory on the side for one overlap, made when its first bytes come, gone after its last."""

    def __init__(self, num_bytes: int, bring: Callable[[torch.Tensor], None]) -> None:
        self._num_bytes = self._left = num_bytes
        self._bring = bring
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
            self._bring(memory)


def _bring(source: torch.Tensor, target: torch.Tensor, stream: Any) -> None:
    """Copy a tensor to where it belongs, in this thread alone if that is in this memory."""
    with torch.no_grad(), devices.on(stream):
        if target.device.type != "cpu" or target.dtype != source.dtype or is_deferred(target):
            target.copy_(source)
            return
        np.copyto(array_of(raw(target)), array_of(raw(source)))
