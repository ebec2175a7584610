"""Parameters inside an optimizer's state: kept as references, for they are the model's.

An optimizer may hold a parameter itself, a view of its memory, a table by parameters or by their
``id``. As values they would be saved a second time, and come back as tensors of their own, which
the model no longer changes.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from outlast.checkpoint.reshard import PLAIN, is_spread
from outlast.errors import StateMismatch

PARAMETER: Final = "@parameter"
NUMBER: Final = "@id"  # a key that is another number in each process
VIEW: Final = "@view"
_MARKS: Final = frozenset({PARAMETER, NUMBER, VIEW})

Names = Mapping[str, torch.Tensor]  # a parameter's name → it


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All of an optimizer's parameters, in the order in which torch numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def memory_of(optimizer: torch.optim.Optimizer) -> dict[int, torch.Tensor]:
    """Address of a parameter's memory → the parameter."""
    found = {address(parameter): parameter for parameter in parameters_of(optimizer)}
    found.pop(0, None)
    return found


def address(tensor: torch.Tensor) -> int:
    """Where a tensor's memory begins; 0 if it has none of its own."""
    if type(tensor) not in PLAIN and not is_spread(tensor):
        return 0
    return int(local_of(tensor).untyped_storage().data_ptr())


def local_of(tensor: torch.Tensor) -> Any:
    """This process's part of a DTensor; any other tensor itself, detached."""
    spread: Any = tensor.detach()
    return spread.to_local() if is_spread(tensor) else spread


def referring(value: Any, names: Mapping[int, str], memory: Mapping[int, torch.Tensor]) -> Any:
    """``value`` with references in place of parameters, of views of them, and of their ids as keys.

    Args:
        value: data, with tensors.
        names: id of a parameter → its name.
        memory: see :func:`memory_of`.
    """
    if isinstance(value, torch.Tensor):
        if id(value) in names:
            return (PARAMETER, names[id(value)])
        owner = memory.get(address(value))
        if owner is None or id(owner) not in names or value.dtype != owner.dtype:
            return value
        spot = local_of(value)
        return (VIEW, names[id(owner)], spot.shape, spot.stride(), int(spot.storage_offset()))
    return rebuilt(
        value,
        lambda inner: referring(inner, names, memory),
        lambda key: key_referring(key, names),
    )


def key_referring(key: Any, names: Mapping[int, str]) -> Any:
    """A key, with a reference in place of a parameter or its id."""
    if isinstance(key, torch.Tensor):
        return (PARAMETER, names[id(key)]) if id(key) in names else key
    return (NUMBER, names[key]) if type(key) is int and key in names else key


def resolved(value: Any, names: Names) -> Any:
    """What ``referring`` was given: parameters in place of references.

    Raises:
        StateMismatch: a parameter that is not there.
    """
    if isinstance(value, tuple) and value and isinstance(value[0], str) and value[0] in _MARKS:
        parameter = names.get(value[1])
        if parameter is None:
            raise StateMismatch(f"it holds the parameter {value[1]}, which is not there now")
        if value[0] == VIEW:
            return local_of(parameter).as_strided(*value[2:])
        return parameter if value[0] == PARAMETER else id(parameter)
    return rebuilt(value, lambda inner: resolved(inner, names), lambda key: resolved(key, names))


def rebuilt(
    value: Any, change: Callable[[Any], Any], change_key: Callable[[Any], Any] | None = None
) -> Any:
    """A container of the same type with ``change`` of what it holds; anything else as it is."""
    if isinstance(value, dict):
        pairs = {change_key(k) if change_key else k: change(v) for k, v in value.items()}
        return like(value, pairs)
    if type(value) in (list, tuple):
        return type(value)(map(change, value))
    if type(value) is collections.deque:
        return collections.deque(map(change, value), value.maxlen)
    return value


def like(value: Any, pairs: dict[Any, Any]) -> Any:
    """A dict of the type of ``value`` with these items."""
    if type(value) is dict:
        return pairs
    if isinstance(value, collections.defaultdict):
        return type(value)(value.default_factory, pairs)
    return type(value)(pairs)
