"""A step that a loss interrupts comes to the end of its loop's body, and changes nothing.

Where a sum has no end because the attempt is over, the script is not to hear of it: the code of its
loop goes on to the boundary, where the session takes over. From the moment that a sum has failed
until then

- backward passes end without an exception, whatever they have left in ``.grad``;
- the script's own collectives do too (:mod:`outlast.training.collectives`);
- DDP's forward passes sum and send nothing;
- an optimizer's step is made by a stand-in that has its hyperparameters and no parameters: no
  weight, no state and no counter of the optimizer itself changes.

What else the body changes (schedules, scalers, averages, buffers, random numbers) the session puts
back. In a step in which nothing fails only what is called more is paid for: three calls of Python
a pass.

What can go wrong: an optimizer that is none of torch's kind, or whose step is compiled as a whole:
the weights are seen to have changed, and are taken from another worker.
"""

from __future__ import annotations

import functools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from outlast.attempt.over import over
from outlast.checkpoint.attributes import parameters_of
from outlast.reduce import losses
from outlast.training.collectives import Collectives
from outlast.training.lazy import FULLGRAPH, Hook


def stand(
    optimizers: Callable[[], Iterable[torch.optim.Optimizer]],
    collectives: Collectives,
    stepped: Callable[..., None] = lambda *_: None,
) -> Hook:
    """From now on, until it is removed, interrupted steps change nothing.

    Args:
        optimizers: gives those that the session knows.
        collectives: the script's own.
        stepped: told of each optimizer's step that is made.
    """
    ddp = torch.nn.parallel.DistributedDataParallel

    def instead(optimizer: torch.optim.Optimizer, args: Any, options: Any) -> Any:
        if not over.is_void:
            return None
        return (_stand_in(optimizer), *args[1:]), options

    if "torch._dynamo" in sys.modules:
        instead = torch.compiler.disable(instead, reason=FULLGRAPH)
        stepped = torch.compiler.disable(stepped, reason=FULLGRAPH)
    losses.voiding.append(over.voids)
    return Hook(
        lambda: losses.voiding.remove(over.voids),
        register_optimizer_step_pre_hook(instead).remove,
        register_optimizer_step_post_hook(stepped).remove,
        _replaced(torch.autograd, "backward", lambda call: _backward(call, optimizers)),
        _replaced(ddp, "_pre_forward", _before_forward),
        _replaced(ddp, "_post_forward", _after_forward),
        *collectives.stand(_replaced),
    )


def _replaced(owner: Any, name: str, around: Callable[[Any], Any]) -> Callable[[], None]:
    before = vars(owner)[name]  # of a class of C++ what getattr gives would be bound to nothing
    setattr(owner, name, around(getattr(owner, name)))
    return lambda: setattr(owner, name, before)


def _backward(call: Any, optimizers: Callable[[], Iterable[torch.optim.Optimizer]]) -> Any:
    @functools.wraps(call)
    def backward(*args: Any, **options: Any) -> None:
        try:
            call(*args, **options)
        except RuntimeError as error:
            if not over.voids(error):
                raise
            for optimizer in optimizers():
                _leave_a_gradient(optimizer)

    return backward


def _leave_a_gradient(optimizer: torch.optim.Optimizer) -> None:
    """A scaler that finds none at all takes that for a mistake of the script."""
    trained = [one for one in parameters_of(optimizer) if one.requires_grad]
    if trained and all(one.grad is None for one in trained):
        trained[0].grad = torch.zeros_like(trained[0])


def _before_forward(call: Any) -> Any:
    @functools.wraps(call)
    def before_forward(ddp: Any, *args: Any, **options: Any) -> Any:
        try:
            return call(ddp, *args, **options)
        except RuntimeError as error:
            if not over.voids(error):
                raise
        if ddp.device_ids:
            moved, named = ddp.to_kwargs(args, options, ddp.device_ids[0])
            return moved[0], named[0]
        return args, options

    return before_forward


def _after_forward(call: Any) -> Any:
    @functools.wraps(call)
    def after_forward(ddp: Any, output: Any) -> Any:
        try:
            return call(ddp, output)
        except RuntimeError as error:
            if not over.voids(error):
                raise
        return output

    return after_forward


def _stand_in(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """One of the same kind with nothing to change."""
    made = object.__new__(type(optimizer))
    made.__dict__.update(optimizer.__dict__)
    made.param_groups = [{**group, "params": []} for group in optimizer.param_groups]
    made.state = defaultdict(dict)
    return made
