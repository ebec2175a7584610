"""The gradients of shard after shard, as autograd delivers them, summed over all workers.

While the last shard of this worker goes backward, each bucket that is complete sets out at once;
buckets set out in one order on all workers, whatever the order in which they are completed.

What a shard gives a parameter is what its one backward pass gives: a parameter that it does not
reach has a gradient of zeros there, and one that no shard of any worker reaches has none at all.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch

from outlast.errors import ConfigError
from outlast.reduce.exchange import Bucket, GroupChannel, group, open_exchange
from outlast.reduce.losses import waiting
from outlast.reduce.tree import ReductionPlan


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

    def finish(self) -> None:
        """Wait for the sums.

        Raises:
            RuntimeError: a worker is gone.
        """
        with waiting():
            self._exchange.finish()

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
