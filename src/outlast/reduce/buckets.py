"""Tensors laid out in flat buckets, so that few large messages carry them.

Where a bucket ends has no influence on any bit: sums are made element by element. Half-precision
tensors are summed in fp32 and rounded once, at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from outlast.reduce.tree import Fold, ReductionPlan

BUCKET_BYTES: Final = 25 << 20
FIRST_BYTES: Final = 1 << 20  # the first to be complete: the network has something to do early
WHOLE: Final = slice(None)
_ALIGNED: Final = (
    64  # bytes: where a tensor begins in a bucket is the same at any number of workers
)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """What tensors of ``dtype`` are summed in."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def group(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Indices of ``tensors``, bucket by bucket: the last ones first, as backward comes to them."""
    buckets: list[list[int]] = []
    open_ones: dict[Any, int] = {}  # by dtype and device: which bucket is being filled
    filled: dict[int, int] = {}
    for index in reversed(range(len(tensors))):
        tensor = tensors[index]
        key = tensor.dtype, tensor.device
        number = open_ones.get(key)
        if number is None or filled[number] >= (BUCKET_BYTES if number else FIRST_BYTES):
            number = open_ones[key] = len(buckets)
            buckets.append([])
            filled[number] = 0
        buckets[number].append(index)
        filled[number] += tensor.numel() * tensor.element_size()
    return buckets


class Bucket:
    """Room for some tensors' sums: one flat tensor for each of this worker's nodes, and the result.

    Args:
        tensors: what is laid out, all of one dtype and device.
        plan: the tree.

    Attributes:
        dtype: what is summed in.
        nodes: flat sums over this worker's nodes, each in ``world_size`` chunks of ``chunk``
            elements, of which the workers own one each.
        result: flat; the sum of all workers over the number of shards. Its memory is that of the
            first node where the dtypes are the same.
        results: views of ``result`` in the shapes and strides of ``tensors``; nobody else's, since
            one whose ``.data`` is set is no view any more.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], plan: ReductionPlan) -> None:
        self._plan = plan
        dtype, device = tensors[0].dtype, tensors[0].device
        step = max(_ALIGNED // tensors[0].element_size(), 1)
        starts, end = [], 0
        for tensor in tensors:
            starts.append(end)
            end += -(-tensor.numel() // step) * step
        self.chunk = -(-max(end, 1) // plan.world_size)
        length = self.chunk * plan.world_size
        self.dtype = sum_dtype(dtype)
        self.nodes = [torch.zeros(length, dtype=self.dtype, device=device) for _ in plan.mine]
        if self.nodes and self.dtype == dtype:
            self.result = self.nodes[0]
        else:
            self.result = torch.zeros(length, dtype=dtype, device=device)
        self._views = [_views(flat, starts, tensors) for flat in self.nodes]
        self.results = _views(self.result, starts, tensors)
        self._fold = Fold(torch._foreach_add_)

    def take(self, tensors: Sequence[torch.Tensor | None], number: int) -> None:
        """Take one shard's values.

        Args:
            tensors: in the order of the bucket; they become the bucket's own, to be changed. None
                counts as zeros.
            number: which of this worker's shards it was, from 0.
        """
        turn = self._plan.turns[number]
        leaf = [
            torch.zeros_like(view) if tensor is None else tensor.to(self.dtype)
            for tensor, view in zip(tensors, self._views[0], strict=True)
        ]
        self._fold.push(leaf, turn.merges)
        if turn.node is not None:
            torch._foreach_copy_(self._views[turn.node], self._fold.pop())

    def forget(self) -> None:
        """Let go of what a step that was not finished has left."""
        self._fold = Fold(torch._foreach_add_)

    def complete(
        self, others: Sequence[Sequence[torch.Tensor]], part: slice = WHOLE
    ) -> torch.Tensor:
        """Sum up this worker's own chunk and write it into ``result``.

        Args:
            others: for each worker the chunk of each of its nodes; this worker's own included.
                What is in them is used up.
            part: of the chunks, if only that is there yet.

        Returns:
            That part of the result.
        """
        own = self.piece(self.result, self._plan.rank)[part]
        fold = Fold(lambda left, right: left.add_(right))
        leaves = (chunk for chunks in others for chunk in chunks)
        for chunk, merges in zip(leaves, self._plan.upper, strict=True):
            fold.push(chunk[part], merges)
        total = fold.pop()
        if total.dtype == own.dtype:
            torch.div(total, self._plan.num_shards, out=own)
        else:
            own.copy_(total.div_(self._plan.num_shards))
        return own

    def piece(self, flat: torch.Tensor, rank: int) -> torch.Tensor:
        """The chunk of a flat tensor that ``rank`` owns."""
        return flat[rank * self.chunk : (rank + 1) * self.chunk]

    def own_pieces(self) -> list[torch.Tensor]:
        """This worker's own chunk of each of its nodes."""
        return [self.piece(flat, self._plan.rank) for flat in self.nodes]


def _views(
    flat: torch.Tensor, starts: Sequence[int], tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    views = []
    for start, tensor in zip(starts, tensors, strict=True):
        part = flat[start : start + tensor.numel()]
        # As autograd lays out a gradient: like the parameter, where that is dense (channels last).
        strides = torch.empty_like(tensor, device="meta").stride()
        dense = strides == tensor.stride()
        views.append(part.as_strided(tensor.shape, strides) if dense else part.view(tensor.shape))
    return views
