"""What a step is made of: gradients, buffers, and one small message of each worker's.

**Gradients** of shard after shard, as autograd delivers them, summed over all workers. While the
last shard of this worker goes backward, each bucket that is complete sets out at once; buckets set
out in one order on all workers, whatever the order in which they are completed. What a shard gives
a parameter is what its one backward pass gives: a parameter that it does not reach has a gradient
of zeros there, and one that no shard of any worker reaches has none at all.

**Buffers.** Each shard starts from the buffers that the step began with, and what they come to is
the same at any number of workers. A buffer that a forward pass changes (the running mean and
variance of a batch norm) ends the step as the mean over the shards of what each made of it: one
update a step, by the mean of the shards' statistics. A single whole number
(``num_batches_tracked``) must come out the same from all shards, and is what came out: a step
counts as one batch. A buffer that nobody changes is not touched, and not averaged either, since the
mean of equal numbers may be another one.

What cannot be done, and is refused: whole numbers that differ from shard to shard, and whole-number
buffers of several elements that change; a buffer that is gone, and one that came after the model
was wrapped (where the next step begins). What changed is seen by the values (a NaN that stays one
has not), since torch's batch norm writes its statistics past the version counter; large buffers
(tables of positions, masks) are not compared, and seen by that counter.

**Shards that are left out** (a worker that is over its time makes no more of its own): what is
there is summed, and the mean is that of the shards that are there, whichever these are.

**Summary**: what the workers tell each other at the end of a step, in one small message each. Each
shard's loss and whole-number buffers; which parameters had a gradient and which buffers changed,
anywhere; how the parameters are laid out; how many shards each worker has made; and a few words of
each worker's. On a GPU nothing of it
is read by the host unless somebody asks.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from outlast.errors import ConfigError
from outlast.reduce.exchange import (
    Bucket,
    Fold,
    GroupChannel,
    ReductionPlan,
    gather,
    group,
    open_exchange,
)
from outlast.reduce.losses import waiting


def rescale(result: torch.Tensor, num_shards: int, num_made: int) -> None:
    """A mean over ``num_made`` of what was divided by ``num_shards``, rounded once.

    By one factor, in fp32 whatever the dtype: sums over all shards may be too large for fp16.
    """
    factor = num_shards / num_made
    if result.dtype in (torch.float16, torch.bfloat16):
        result.copy_(result.to(torch.float32).mul_(factor))
    else:
        result.mul_(factor)


class ModelGradients:
    """The trained parameters of one model.

    Args:
        parameters: name → parameter; those that want a gradient.
        plan: the tree.
        channel: the model's.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        plan: ReductionPlan,
        channel: GroupChannel,
    ) -> None:
        self._names = list(parameters)
        self._parameters = list(parameters.values())
        self._order = group(self._parameters)
        tensors = [[self._parameters[index] for index in indices] for indices in self._order]
        self._buckets = [Bucket(each, plan) for each in tensors]
        self._exchange = open_exchange(plan, self._buckets, channel)
        self._num_held = len(plan.held)
        self._place = {
            index: (number, position)
            for number, indices in enumerate(self._order)
            for position, index in enumerate(indices)
        }
        self._handles = [
            parameter.register_post_accumulate_grad_hook(functools.partial(self._arrived, index))
            for index, parameter in enumerate(self._parameters)
        ]
        self.present = [False] * len(self._parameters)  # reached by a shard here, in this step
        self._shard: int | None = None  # which of ours goes backward now
        self._found: list[list[torch.Tensor | None]] = []
        self._missing: list[int] = []
        self._memory: set[int] = set()  # that this shard's gradients lie in
        self._is_complete: list[bool] = []
        self._num_launched = 0

    def close(self) -> None:
        """Let go of the parameters, and leave no gradient of an earlier step to one now frozen."""
        for handle in self._handles:
            handle.remove()
        for parameter in self._parameters:
            parameter.grad = None

    def begin(self) -> None:
        """A step begins: what gradients there are belong to the one before."""
        self.present = [False] * len(self._parameters)
        self._num_launched = 0
        for parameter in self._parameters:
            parameter.grad = None
        for bucket in self._buckets:
            bucket.forget()

    def backward(self, loss: torch.Tensor, shard: int) -> None:
        """Go backward from the loss of a shard.

        Args:
            loss: of one element.
            shard: which of this worker's it is, from 0.
        """
        self._found = [[None] * len(indices) for indices in self._order]
        self._missing = [len(indices) for indices in self._order]
        self._memory = set()
        self._is_complete = [False] * len(self._order)
        self._shard = shard
        is_last = shard == self._num_held - 1
        if is_last:
            self._exchange.begin()
        try:
            loss.backward()
            for number, is_complete in enumerate(self._is_complete):
                if not is_complete:
                    self._complete(number)
        except BaseException:
            if is_last:
                self._exchange.abort()
            raise
        finally:
            self._shard = None
            self._found = []

    def set_out(self) -> None:
        """A worker without shards takes its part in the sums."""
        if not self._num_held:
            self._exchange.begin()
            for number in range(len(self._buckets)):
                self._exchange.launch(number)

    def leave_out(self, num_made: int) -> None:
        """This worker makes no more of its shards than these, one at least."""
        for number in range(num_made, self._num_held):
            for bucket in self._buckets:
                bucket.leave_out(number)
        self._exchange.begin()
        for number in range(len(self._buckets)):
            self._exchange.launch(number)

    def finish(self) -> None:
        """Wait for the sums.

        Raises:
            RuntimeError: a worker is gone.
        """
        with waiting():
            self._exchange.finish()

    def scale(self, num_shards: int, num_made: int) -> None:
        """Make means over ``num_made`` shards of sums that were divided by ``num_shards``."""
        for bucket in self._buckets:
            rescale(bucket.result, num_shards, num_made)

    def give_up(self) -> None:
        """The step has no sums."""
        self._exchange.abort()
        for parameter in self._parameters:
            parameter.grad = None

    def give(self, present: Sequence[bool]) -> None:
        """Give each parameter its gradient, and those that no shard has reached none.

        Each time in a new tensor: whoever gives the old one other memory (``grad.data = …``, or a
        module that is cast or moved and back) takes that one away from the bucket, and no other.
        """
        for bucket, indices in zip(self._buckets, self._order, strict=True):
            for index, gradient in zip(indices, bucket.results, strict=True):
                self._parameters[index].grad = gradient.detach() if present[index] else None

    def _arrived(self, index: int, parameter: torch.Tensor) -> None:
        """Autograd has a parameter's gradient."""
        gradient, parameter.grad = parameter.grad, None
        if self._shard is None or gradient is None:
            raise ConfigError(
                f"{self._names[index]} got a gradient outside of model.backward(loss): nobody "
                "would add it to that of the other workers. Write for shard in "
                "model.shards(batch): … model.backward(loss); or work on model.module with "
                "requires_grad off, or with torch.autograd.grad"
            )
        if gradient.is_sparse:
            raise ConfigError(
                f"{self._names[index]} has a sparse gradient, and these are not added up here; "
                "build the layer with sparse=False"
            )
        number, position = self._place[index]
        if self._is_complete[number] or self._found[number][position] is not None:
            raise ConfigError(
                f"{self._names[index]} got a gradient twice in one backward pass, as reentrant "
                "checkpointing does it; use torch.utils.checkpoint with use_reentrant=False"
            )
        # Autograd may give two parameters views of one memory; sums are made in place later.
        memory = gradient.untyped_storage().data_ptr()
        self._found[number][position] = gradient.clone() if memory in self._memory else gradient
        self._memory.add(memory)
        self.present[index] = True
        self._missing[number] -= 1
        if not self._missing[number]:
            self._complete(number)

    def _complete(self, number: int) -> None:
        """A bucket has all that this shard will give it."""
        assert self._shard is not None  # noqa: S101 - called in backward()
        with torch.no_grad():
            self._buckets[number].take(self._found[number], self._shard)
        self._found[number] = []
        self._is_complete[number] = True
        if self._shard < self._num_held - 1:
            return
        while self._num_launched < len(self._order) and self._is_complete[self._num_launched]:
            self._exchange.launch(self._num_launched)
            self._num_launched += 1


_DTYPE = torch.float64  # holds losses of any dtype, and whole numbers up to 2^53


class Summary:
    """What the workers tell each other at the end of one step.

    Args:
        plan: the tree.
        device: where the messages are made.
        group: the process group; None is the default one.
        losses: of each shard that was made here, 0-dimensional; those that were not come last.
        numbers: likewise, the whole-number buffers as it left them.
        bits: truths about this worker, to be or-ed over all workers.
        layout: a word for how this worker's parameters are laid out, below 2^53.
        words: of this worker, ``NUM_WORDS`` of them, below 2^53.
        late_words: likewise, ``LATE_WORDS`` of them, of its time.
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
        late_words: Sequence[float],
    ) -> None:
        self._plan = plan
        self._width = 1 + num_numbers  # of a shard's part
        self._bits_here = list(bits)
        self._counts = [len(each) for each in plan.ranges]
        self._end = end = max(self._counts) * self._width
        self._late = end + 2 + len(words)
        self._start = self._late + len(late_words)  # of the bits
        values = [
            value.detach().reshape(()).to(device, _DTYPE)
            for loss, more in zip(losses, numbers, strict=True)
            for value in (loss, *more)
        ]
        row = torch.zeros(self._start + len(bits), dtype=_DTYPE, device=device)
        if values:
            row[: len(values)] = torch.stack(values)
        rest = [layout, len(losses), *words, *late_words, *bits]
        row[end:] = torch.tensor(rest, dtype=_DTYPE).to(device, non_blocking=True)
        self._rows = row[None]
        if plan.world_size > 1:
            self._rows = row.new_empty(plan.world_size, row.numel())
            gather(self._rows.view(-1), row, group)

    def _of_shards(self) -> torch.Tensor:
        """(V, width): the shards' parts, in order; zeros for those that were left out."""
        parts = [
            row[: count * self._width].view(count, self._width)
            for count, row in zip(self._counts, self._rows, strict=True)
        ]
        return torch.cat(parts)

    def loss(self, made: Sequence[int]) -> torch.Tensor:
        """The mean over the shards, summed in the tree's order: 0-dimensional, float64.

        Args:
            made: by worker, how many of its shards are there; [] where all are.
        """
        fold = Fold(lambda left, right: left.add_(right))
        losses: list[torch.Tensor | None] = [*self._of_shards()[:, 0].clone()]
        if made:
            losses = [
                loss if is_there else None
                for loss, is_there in zip(losses, self.are_there(made), strict=True)
            ]
        for leaf, merges in zip(losses, self._plan.shard_folds, strict=True):
            fold.push(leaf, merges)
        mean: torch.Tensor = fold.pop() / (sum(made) or self._plan.num_shards)
        return mean

    def are_there(self, made: Sequence[int]) -> list[bool]:
        """For each of the shards whether it was made."""
        of_workers = zip(self._counts, made, strict=True)
        return [number < there for count, there in of_workers for number in range(count)]

    def numbers(self, made: Sequence[int]) -> torch.Tensor:
        """(shards that are there, num_numbers): whole-number buffers as each left them."""
        rows = self._of_shards()[:, 1:]
        return rows[torch.tensor(self.are_there(made), device=rows.device)] if made else rows

    def made(self) -> list[int]:
        """By worker, how many shards it has made; on a GPU the host waits for it."""
        return [int(count) for count in self._rows[:, self._end + 1].tolist()]

    def layouts(self) -> list[float]:
        """Each worker's word; on a GPU the host waits for it."""
        found: list[float] = self._rows[:, self._end].tolist()
        return found

    def words(self) -> torch.Tensor:
        """(world_size, NUM_WORDS): each worker's words."""
        return self._rows[:, self._end + 2 : self._late]

    def late_words(self) -> torch.Tensor:
        """(world_size, LATE_WORDS): what each worker says of its time."""
        return self._rows[:, self._late : self._start]

    def bits(self) -> list[bool]:
        """Which bits are set on any worker; where all are set here, nothing is waited for."""
        if all(self._bits_here):
            return self._bits_here
        found: list[bool] = self._rows[:, self._start :].amax(0).bool().tolist()
        return found


# Elements: a larger buffer is compared in the first step, and later if it had changed there past
# its version counter.
COMPARED: Final = 1 << 16


class Buffers:
    """The buffers of one model, the same at any number of workers.

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
        self,
        plan: ReductionPlan,
        changed: Sequence[bool],
        summary: Summary,
        channel: GroupChannel,
        made: Sequence[int],
    ) -> None:
        """Give the model the step's buffers; all workers call it.

        Args:
            plan: the tree.
            changed: for each buffer whether a shard of any worker has changed it.
            summary: with :meth:`numbers` of all shards.
            channel: the model's.
            made: by worker, how many of its shards are there; [] where all are.

        Raises:
            ConfigError: whole numbers that cannot be put together.
        """
        live, averaged = self.live, self.averaged
        indices = [index for index, is_changed in enumerate(changed) if is_changed]
        floating = tuple(index for index in indices if averaged[index])
        whole = [index for index in indices if not averaged[index]]
        if whole:
            self._settle_numbers(whole, summary.numbers(made))
        if not floating:
            return
        if floating not in self._averages:
            tensors = [live[index] for index in floating]
            self._averages = {floating: _Averages(plan, tensors, channel)}
        shards = [[self.value(n, index) for index in floating] for n in range(len(self._shards))]
        means = self._averages[floating](shards, sum(made))
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
        self._plan = plan
        self._order = group(tensors)
        self._buckets = [Bucket([tensors[i] for i in indices], plan) for indices in self._order]
        self._exchange = open_exchange(plan, self._buckets, channel)

    def __call__(
        self, shards: Sequence[Sequence[torch.Tensor]], num_made: int
    ) -> list[torch.Tensor]:
        """The means, given the values of each shard made here; they become ours, to be changed.

        ``num_made`` are those of all workers; 0 where none was left out.
        """
        self._exchange.begin()
        means: dict[int, torch.Tensor] = {}
        for number, (bucket, indices) in enumerate(zip(self._buckets, self._order, strict=True)):
            for shard, values in enumerate(shards):
                bucket.take([values[index] for index in indices], shard)
            for shard in range(len(shards), len(self._plan.held)):
                bucket.leave_out(shard)
            self._exchange.launch(number)
            means |= zip(indices, bucket.results, strict=True)
        self._exchange.finish()
        for bucket in self._buckets if num_made else ():
            rescale(bucket.result, self._plan.num_shards, num_made)
        return [means[index] for index in range(self._num_tensors)]
