"""A consistent copy of tensors in this process's memory, laid out like the shard's data section.

The copy is taken at a step boundary by the thread that trains, into memory that is kept from one
snapshot to the next (copying into fresh memory is five times slower). While it is being written the
arena is busy; the owner sees to it that no second snapshot is taken meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import xxhash

from outlast.checkpoint.shard import DTYPES, Placed, place


class Snapshot:
    """Tensors as bytes: ``placed`` says where each lies in ``data``."""

    def __init__(self, placed: Mapping[str, Placed], data: memoryview) -> None:
        self.placed = placed
        self.data = data

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return max((tensor.end for tensor in self.placed.values()), default=0)

    def bytes_of(self, name: str) -> memoryview:
        """The bytes of one tensor."""
        tensor = self.placed[name]
        return self.data[tensor.start : tensor.end]

    def digest(self, name: str) -> str:
        """XXH3-128 of a tensor's dtype, shape and bytes: equal digests are equal tensors."""
        tensor = self.placed[name]
        hasher = xxhash.xxh3_128(f"{tensor.dtype}{tensor.shape}".encode())
        hasher.update(self.bytes_of(name))
        return hasher.hexdigest()


class Arena:
    """Memory for snapshots, reused; pinned where the state is on a GPU."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def take(self, tensors: Mapping[str, torch.Tensor]) -> Snapshot:
        """Copy ``tensors``; returns when the copy is complete.

        Raises:
            ConfigError: a tensor whose dtype cannot be saved.
        """
        placed = place(tensors)
        total = max((tensor.end for tensor in placed.values()), default=0)
        on_gpu = any(tensor.is_cuda for tensor in tensors.values())
        if self._buffer.numel() < total or self._buffer.is_pinned() != on_gpu:
            self._buffer = torch.empty(total, dtype=torch.uint8, pin_memory=on_gpu)
        for name, where in placed.items():
            target = self._buffer[where.start : where.end].view(DTYPES[where.dtype])
            target.view(where.shape).copy_(tensors[name], non_blocking=on_gpu)
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return Snapshot(placed, memoryview(self._buffer.numpy()))
