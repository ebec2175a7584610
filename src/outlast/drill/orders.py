"""What a worker does to itself on an order: the faults that nobody can do from outside.

=================  =============================================================================
kind               what is done
=================  =============================================================================
nan                the next training module that the script calls gets a NaN into its batch
hold_gil           the interpreter's lock is held for ``value`` seconds, in C, as by a bad extension
skip_collective    the next collective is left out, and another one is entered in its place
slow               each step from now on takes ``value`` seconds more, until an order says 0
memory             the address space is limited, and memory is taken until the allocator refuses
leak               ``value`` bytes of memory are taken and touched, and never given back
=================  =============================================================================

``obey`` is called in the thread that trains, ahead of a step. It needs torch for the kinds that
touch the training, and leaves nothing behind but what the order asked for: patches take themselves
away once they have acted.

What each is true to. A NaN comes with the data where the model takes floating-point input; token
ids have none, so there it comes out of the model, as an overflow does, and the loss has it. A rank
that has left out a collective is in its next one while the others wait in that: where both are
alike and of one size the backend pairs them, and the ranks train on, shifted by one, on sums that
mean nothing, until the last one is missing. In place of the one left out a collective of another
kind is entered here (a barrier), so that neither side is ever met, as in a script with a branch
that only one rank takes.

Rejected: patching Python's ``torch.distributed`` functions (DDP sums in C++ and calls none of
them); a kernel of our own for c10d's operators (it warns, and cannot be taken away while it runs).
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from outlast.drill.target import Order, take_orders

CHUNK_BYTES: Final = 1 << 20
MARGIN_BYTES: Final = 64 << 20  # of address space, above what there is when it is limited
_taken: list[bytearray] = []  # memory that is never given back


def ahead_of_step(run: Path, rank: int, step: int) -> None:
    """Take the orders that a rank has ahead of ``step``, and obey them.

    Raises:
        MemoryError: that was the order.
    """
    for order in take_orders(run, rank, step):
        obey(order)


def obey(order: Order) -> None:
    """Do what an order says.

    Raises:
        ValueError: there is no such kind.
        MemoryError: that was the order.
    """
    act = KINDS.get(order.kind)
    if act is None:
        raise ValueError(f"no order is of kind {order.kind!r}; there are {', '.join(KINDS)}")
    act(order.value)


# --- a NaN ----------------------------------------------------------------------------------------


def _nan(_: float) -> None:
    from torch import nn

    _Poison(nn.Module).arm()


class _Poison:
    """The next outermost call of a module in training has a NaN in its batch, or in its output."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._call = module.__call__
        self._is_spent = False

    def arm(self) -> None:
        """Stand in front of every module's call."""
        poison = self

        def call(module: Any, *arguments: Any, **named: Any) -> Any:
            if poison._is_spent or not _trains(module):
                return poison._call(module, *arguments, **named)
            return poison._strike(module, arguments, named)

        self._standing_in = call
        self._module.__call__ = call

    def _strike(self, module: Any, arguments: Any, named: Any) -> Any:
        self._is_spent = True
        if self._module.__call__ is self._standing_in:  # else somebody stands in front of us
            self._module.__call__ = self._call
        (arguments, named), hit = _replaced((arguments, named), _with_one_nan)
        output = self._call(module, *arguments, **named)
        if not hit:
            output, hit = _replaced(output, lambda tensor: tensor * float("nan"))
        if not hit:
            sys.stderr.write("outlast drill: the model takes and gives no floating-point tensor\n")
        return output


def _trains(module: Any) -> bool:
    import torch

    return (
        module.training
        and torch.is_grad_enabled()
        and any(parameter.requires_grad for parameter in module.parameters())
    )


def _with_one_nan(tensor: Any) -> Any:
    # Of a copy: the batch may be a view of the data set.
    changed = tensor.clone()
    changed.view(-1)[:1] = float("nan")
    return changed


def _replaced(tree: Any, change: Callable[[Any], Any]) -> tuple[Any, bool]:
    """A tree of containers with its first floating-point tensor changed; whether it had one."""
    import torch
    from torch.utils import _pytree as pytree

    leaves, shape = pytree.tree_flatten(tree)
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.numel():
            leaves[place] = change(leaf)
            return pytree.tree_unflatten(leaves, shape), True
    return tree, False


# --- the interpreter's lock, and time -------------------------------------------------------------


def _hold_gil(seconds: float) -> None:
    # A function of a PyDLL is called without giving the lock away. A signal ends the sleep early.
    usleep = ctypes.PyDLL(None).usleep
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        usleep(ctypes.c_uint(min(int(left * 1e6) + 1, 900_000_000)))


class _Slowness:
    """Seconds that each step takes longer, spent ahead of the first optimizer's update."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._handle: Any = None
        self._first: int | None = None

    def set(self, seconds: float) -> None:
        """Slow down by so much from now on; 0: no more."""
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self.seconds = seconds
        if self._handle is None and seconds:
            self._handle = register_optimizer_step_pre_hook(self._sleep)

    def _sleep(self, optimizer: Any, *_: Any) -> None:
        if self._first is None:
            self._first = id(optimizer)
        if id(optimizer) == self._first:
            time.sleep(self.seconds)


_slowness = _Slowness()


# --- collectives ----------------------------------------------------------------------------------


def _skip_collective(_: float) -> None:
    import torch
    import torch.distributed as dist
    from torch.utils._python_dispatch import TorchDispatchMode

    class Skipping(TorchDispatchMode):
        """Sees each operator, also those that DDP's reducer calls in C++."""

        is_spent = False

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if not self.is_spent and func.namespace in ("c10d", "_c10d_functional"):
                self.is_spent = True
                if "barrier" in str(func):
                    dist.all_reduce(
                        torch.zeros(1, device=dist.distributed_c10d._get_pg_default_device())
                    )
                else:
                    dist.barrier()
            return func(*args, **(kwargs or {}))

    if not (dist.is_available() and dist.is_initialized()):
        sys.stderr.write("outlast drill: this job has no process group: nothing can be skipped\n")
        return
    # Never left: the process ends with the attempt, and once spent it changes nothing.
    Skipping().__enter__()


# --- memory ---------------------------------------------------------------------------------------


def _limit_memory(_: float) -> None:
    """Limit what there may be in all, and take what is left: what a leak in a container does."""
    page = os.sysconf("SC_PAGE_SIZE")
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * page
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MARGIN_BYTES, hard))
    try:
        _leak(float(16 * MARGIN_BYTES))
    except MemoryError:
        _taken.clear()  # there has to be room for the traceback
        raise


def _leak(num_bytes: float) -> None:
    taken = 0
    while taken < num_bytes:
        _taken.append(bytearray(b"\1") * CHUNK_BYTES)  # touched: zeros would only be promised
        taken += CHUNK_BYTES


KINDS: Final[dict[str, Callable[[float], None]]] = {
    "nan": _nan,
    "hold_gil": _hold_gil,
    "skip_collective": _skip_collective,
    "slow": _slowness.set,
    "memory": _limit_memory,
    "leak": _leak,
}
