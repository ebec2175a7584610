"""A model's buffers through the shards of a step.

Guarantees: each shard starts from the buffers that the step began with, and what they come to is
the same at any number of workers.

A buffer that a forward pass changes (the running mean and variance of a batch norm) ends the step
as the mean over the shards of what each made of it: one update a step, by the mean of the shards'
statistics. A single whole number (``num_batches_tracked``) must come out the same from all shards,
and is what came out: a step counts as one batch. A buffer that nobody changes is not touched, and
not averaged either, since the mean of equal numbers may be another one.

What cannot be done, and is refused: whole numbers that differ from shard to shard, and whole-number
buffers of several elements that change; a buffer that is gone, and one that came after the model
was wrapped (where the next step begins).

What changed is seen by the values (a NaN that stays one has not), since torch's batch norm writes
its statistics past the version counter; large buffers (tables of positions, masks) are not
compared, and seen by that counter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from outlast.errors import ConfigError
from outlast.reduce.exchange import Bucket, GroupChannel, group, open_exchange
from outlast.reduce.summary import Summary
from outlast.reduce.tree import ReductionPlan

# Elements: a larger buffer is compared in the first step, and later if it had changed there past
# its version counter.
COMPARED: Final = 1 << 16


class Buffers:
    """The buffers of one model.

    Args:
        module: the model.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        # One under two names counts once.
        places: dict[int, tuple[str, torch.nn.Module, str]] = {}
        for prefix, owner in module.named_modules():
            for key, tensor in owner._buffers.items():
                if tensor is not None:
                    name = f"{prefix}.{key}" if prefix else key
                    places.setdefault(id(tensor), (name, owner, key))
        self._places = list(places.values())
        self.names = [name for name, _, _ in self._places]
        self._kept: list[torch.Tensor] = []  # as the step began, in memory of our own
        # The live ones and their versions, while they hold what is kept.
        self._seen: list[tuple[torch.Tensor, int]] = []
        self._shards: list[dict[int, torch.Tensor]] = []  # of each shard here: what it changed
        self._num_begun = 0  # steps
        self._sly: set[int] = set()  # seen to change past their version counters
        self._averages: dict[tuple[int, ...], _Averages] = {}

    @property
    def live(self) -> list[torch.Tensor]:
        """The model's tensors.

        Raises:
            ConfigError: one is gone.
        """
        found = []
        for name, owner, key in self._places:
            tensor = owner._buffers[key] if key in owner._buffers else None  # noqa: SIM401 - scripted
            if tensor is None:
                raise ConfigError(
                    f"the model has lost the buffer {name} since it was wrapped; keep what comes "
                    "and goes out of its buffers"
                )
            found.append(tensor)
        return found

    @property
    def averaged(self) -> list[bool]:
        """For each buffer whether it is one of floating-point (or complex) numbers."""
        return [tensor.is_floating_point() or tensor.is_complex() for tensor in self.live]

    def begin(self) -> None:
        """A step begins: what the buffers hold now is what each of its shards starts from."""
        live = self.live
        self._num_begun += 1
        if not self._kept:
            self._kept = [tensor.detach().clone() for tensor in live]
        else:
            for index, tensor in enumerate(live):
                if self._is_compared(index, tensor) or self._is_written(index, tensor):
                    self._kept[index] = tensor.detach().clone()
        self._seen = [(tensor, tensor._version) for tensor in live]
        self._shards = []

    def collect(self) -> None:
        """A shard is over: note what it changed, and put it back."""
        live, changed = self.live, {}
        for index in self._changed_ones(live):
            tensor, kept = live[index], self._kept[index]
            if tensor.shape != kept.shape:
                raise ConfigError(
                    f"the forward pass changed the shape of the buffer {self.names[index]}: what "
                    "the shards of a step make of it cannot be put together; keep it out of the "
                    "model's buffers"
                )
            changed[index] = tensor.detach().clone()
            tensor.detach().copy_(kept)
            self._seen[index] = tensor, tensor._version
        self._shards.append(changed)

    def _is_compared(self, index: int, tensor: torch.Tensor) -> bool:
        return tensor.numel() <= COMPARED or self._num_begun == 1 or index in self._sly

    def _is_written(self, index: int, tensor: torch.Tensor) -> bool:
        seen, version = self._seen[index]
        return tensor is not seen or tensor._version != version

    def _changed_ones(self, live: Sequence[torch.Tensor]) -> list[int]:
        """Indices of the buffers that are not what is kept; on a GPU the host waits for that."""
        found, unsure = [], []
        for index, tensor in enumerate(live):
            if self._is_written(index, tensor):
                found.append(index)
            elif self._is_compared(index, tensor):
                unsure.append(index)
        if unsure:
            differ = torch.stack([(live[i] != self._kept[i]).any() for i in unsure]).tolist()
            # A constant NaN is no change; one that is known to change is not looked at so closely.
            sly = [
                index
                for index, is_other in zip(unsure, differ, strict=True)
                if is_other and (index in self._sly or _differ(live[index], self._kept[index]))
            ]
            self._sly.update(sly)
            found += sly
        return sorted(found)

    def value(self, shard: int, index: int) -> torch.Tensor:
        """What a shard held here made of a buffer."""
        found = self._shards[shard].get(index)
        return self._kept[index].clone() if found is None else found

    def changed(self) -> list[bool]:
        """For each buffer whether a shard here has changed it."""
        return [any(index in shard for shard in self._shards) for index in range(len(self.names))]

    def numbers(self) -> list[int]:
        """Indices of the buffers that are single whole numbers."""
        floating = self.averaged
        return [
            index
            for index, tensor in enumerate(self.live)
            if not floating[index] and tensor.numel() == 1
        ]

    def settle(
        self, plan: ReductionPlan, changed: Sequence[bool], summary: Summary, channel: GroupChannel
    ) -> None:
        """Give the model the step's buffers; all workers call it.

        Args:
            plan: the tree.
            changed: for each buffer whether a shard of any worker has changed it.
            summary: with :meth:`numbers` of all shards.
            channel: the model's.

        Raises:
            ConfigError: whole numbers that cannot be put together.
        """
        live, averaged = self.live, self.averaged
        indices = [index for index, is_changed in enumerate(changed) if is_changed]
        floating = tuple(index for index in indices if averaged[index])
        whole = [index for index in indices if not averaged[index]]
        if whole:
            self._settle_numbers(whole, summary.numbers())
        if not floating:
            return
        if floating not in self._averages:
            tensors = [live[index] for index in floating]
            self._averages = {floating: _Averages(plan, tensors, channel)}
        shards = [[self.value(n, index) for index in floating] for n in range(len(self._shards))]
        means = self._averages[floating](shards)
        for index, mean in zip(floating, means, strict=True):
            live[index].detach().copy_(mean)

    def _settle_numbers(self, indices: Sequence[int], rows: torch.Tensor) -> None:
        live, columns = self.live, self.numbers()
        for index in indices:
            name, tensor = self.names[index], live[index]
            if index not in columns:
                raise ConfigError(
                    f"the forward pass changed the buffer {name} ({tensor.dtype}, shape "
                    f"{tuple(tensor.shape)}): shards can be put together for floating-point "
                    "buffers and for single whole numbers; keep it out of the model's buffers"
                )
            found = rows[:, columns.index(index)]
            if not bool((found == found[0]).all()):
                raise ConfigError(
                    f"the shards of a step made {sorted(set(found.tolist()))} of the buffer "
                    f"{name}: a whole number must come out the same from each; count in the "
                    "training loop instead"
                )
            tensor.detach().copy_(found[0])

    def forget(self) -> None:
        """The workers are other ones from here on."""
        self._averages = {}


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether any value does; NaN does not differ from NaN."""
    return bool(((one != other) & ~(one.isnan() & other.isnan())).any())


class _Averages:
    """Means of some tensors over all shards, in the tree's order."""

    def __init__(
        self, plan: ReductionPlan, tensors: Sequence[torch.Tensor], channel: GroupChannel
    ) -> None:
        self._num_tensors = len(tensors)
        self._order = group(tensors)
        self._buckets = [Bucket([tensors[i] for i in indices], plan) for indices in self._order]
        self._exchange = open_exchange(plan, self._buckets, channel)

    def __call__(self, shards: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """The means, given the values of each shard held here; they become ours, to be changed."""
        self._exchange.begin()
        means: dict[int, torch.Tensor] = {}
        for number, (bucket, indices) in enumerate(zip(self._buckets, self._order, strict=True)):
            for shard, values in enumerate(shards):
                bucket.take([values[index] for index in indices], shard)
            self._exchange.launch(number)
            means |= zip(indices, bucket.results, strict=True)
        self._exchange.finish()
        return [means[index] for index in range(self._num_tensors)]
