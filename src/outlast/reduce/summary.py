"""What the workers tell each other at the end of a step, in one small message each.

Each shard's loss and whole-number buffers; which parameters had a gradient and which buffers
changed, anywhere; how the parameters are laid out; and a few words of each worker's. On a GPU
nothing of it is read by the host unless somebody asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from outlast.data.order import held
from outlast.reduce.exchange import gather
from outlast.reduce.tree import Fold, ReductionPlan

_DTYPE = torch.float64  # holds losses of any dtype, and whole numbers up to 2^53


class Summary:
    """One step's.

    Args:
        plan: the tree.
        device: where the messages are made.
        group: the process group; None is the default one.
        losses: of each shard held here, 0-dimensional.
        numbers: of each shard held here, the whole-number buffers as it left them.
        bits: truths about this worker, to be or-ed over all workers.
        layout: a word for how this worker's parameters are laid out, below 2^53.
        words: of this worker, ``NUM_WORDS`` of them, below 2^53.
    """

    def __init__(
        self,
        plan: ReductionPlan,
        device: torch.device,
        group: Any,
        *,
        losses: Sequence[torch.Tensor],
        numbers: Sequence[Sequence[torch.Tensor]],
        num_numbers: int,
        bits: Sequence[bool],
        layout: int,
        words: Sequence[float],
    ) -> None:
        self._plan = plan
        self._width = 1 + num_numbers  # of a shard's part
        self._bits_here = list(bits)
        most = -(-plan.num_shards // plan.world_size)
        self._end = end = most * self._width
        self._start = end + 1 + len(words)  # of the bits
        values = [
            value.detach().reshape(()).to(device, _DTYPE)
            for loss, more in zip(losses, numbers, strict=True)
            for value in (loss, *more)
        ]
        row = torch.zeros(self._start + len(bits), dtype=_DTYPE, device=device)
        if values:
            row[: len(values)] = torch.stack(values)
        more = torch.tensor([layout, *words, *bits], dtype=_DTYPE)
        row[end:] = more.to(device, non_blocking=True)
        self._rows = row[None]
        if plan.world_size > 1:
            self._rows = row.new_empty(plan.world_size, row.numel())
            gather(self._rows.view(-1), row, group)

    def _of_shards(self) -> torch.Tensor:
        """(V, width): the shards' parts, in order."""
        parts = []
        for rank, row in enumerate(self._rows):
            count = len(held(self._plan.num_shards, rank, self._plan.world_size))
            parts.append(row[: count * self._width].view(count, self._width))
        return torch.cat(parts)

    def loss(self) -> torch.Tensor:
        """The mean over the shards, summed in the tree's order: 0-dimensional, float64."""
        fold = Fold(lambda left, right: left.add_(right))
        losses = self._of_shards()[:, 0].clone()
        for leaf, merges in zip(losses, self._plan.shard_folds, strict=True):
            fold.push(leaf, merges)
        mean: torch.Tensor = fold.pop() / self._plan.num_shards
        return mean

    def numbers(self) -> torch.Tensor:
        """(V, num_numbers): whole-number buffers as each shard left them."""
        return self._of_shards()[:, 1:]

    def layouts(self) -> list[float]:
        """Each worker's word; on a GPU the host waits for it."""
        found: list[float] = self._rows[:, self._end].tolist()
        return found

    def words(self) -> torch.Tensor:
        """(world_size, NUM_WORDS): each worker's words."""
        return self._rows[:, self._end + 1 : self._start]

    def bits(self) -> list[bool]:
        """Which bits are set on any worker; where all are set here, nothing is waited for."""
        if all(self._bits_here):
            return self._bits_here
        found: list[bool] = self._rows[:, self._start :].amax(0).bool().tolist()
        return found
