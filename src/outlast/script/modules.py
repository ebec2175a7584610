"""Find the modules that take their state back in a way of their own, and load them.

torch.nn's modules have a fixed set of tensors, and filling these is all that ``load_state_dict``
does. A module with a ``_load_from_state_dict``, an extra state or hooks of its own (an observer of
quantization-aware training, whose ranges have no shape before its first batch) is given its part of
the state by its ``load_state_dict``, with all of what it holds; the modules around it are filled.

Guarantees: what a module has after loading in its own way is compared with what was saved. Other
names, shapes or dtypes are refused by the module's name, other values are said: some modules mean
it so.
A buffer that is None or empty in a new module, and was not when it was saved, is made for it. One
of any other shape is refused: it may as well be another model.

What can go wrong: state that no ``state_dict`` gives (``unnamed`` looks for it).
Rejected: giving the whole model its state because of one module in it: copies of all that could be
filled, and torch's refusal of what shares memory with itself.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch

from outlast.checkpoint.tensors import PLAIN, holds, memories
from outlast.checkpoint.tree import flatten
from outlast.errors import StateMismatch

Owners = Mapping[str, torch.nn.Module]  # prefix of its names, with the dot → a module

_METHODS: Final = (
    *("state_dict", "load_state_dict", "_load_from_state_dict", "_save_to_state_dict"),
    *("get_extra_state", "set_extra_state"),
)
_HOOKS: Final = (
    *("_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)


_LEFT_OUT: Final = frozenset({"_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def owners_of(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The outermost modules that keep, take or give state in a way of their own.

    Returns:
        Prefix of the names → module; with "", the model itself. Wrappers of torch's that leave
        themselves out of a state's names (activation checkpointing) are left out here.
    """
    found: dict[str, torch.nn.Module] = {}

    def look(module: torch.nn.Module, prefix: str) -> None:
        if not is_torchs_own(module):
            found[prefix] = module
            return
        for name, child in module._modules.items():
            if child is not None:
                look(child, prefix if name in _LEFT_OUT else f"{prefix}{name}.")

    look(model, "")
    return found


def owner_in(owners: Owners, name: str) -> str | None:
    """The prefix of the one in which ``name`` is; None if it is in none."""
    parts = name.split(".")
    prefixes = itertools.accumulate((f"{part}." for part in parts[:-1]), initial="")
    return next((prefix for prefix in prefixes if prefix in owners), None) if owners else None


def is_plain_parameter(model: torch.nn.Module, name: str) -> bool:
    """Whether a name is that of a parameter of a module of torch's own: it has one shape."""
    module, last = _holder(model, name)
    if module is None or module._parameters.get(last) is None:
        return False
    return is_torchs_own(module)


def hint(model: torch.nn.Module, name: str, what: str) -> str:
    """What else can be done about a tensor of another ``what``, to follow the usual remedy."""
    module, last = _holder(model, name)
    if module is None or last not in module._buffers or what != "shape":
        return ""
    return (
        f"; if training gives this buffer another shape, {type(module).__name__} needs a "
        "_load_from_state_dict that takes it"
    )


def _holder(model: torch.nn.Module, name: str) -> tuple[torch.nn.Module | None, str]:
    """The module that has a tensor of this name, and the last part of it."""
    path, _, last = name.rpartition(".")
    try:
        return model.get_submodule(path), last
    except AttributeError:
        return None, last


def is_torchs_own(module: torch.nn.Module) -> bool:
    """Whether a module keeps, takes and gives its state as torch.nn wrote it."""
    kind = type(module)
    for name in _METHODS:
        if name in vars(module) or not _from_torch(getattr(kind, name)):
            return False
    hooks = [hook for name in _HOOKS for hook in getattr(module, name).values()]
    return all(_from_torch(getattr(hook, "hook", hook)) for hook in hooks)


def _from_torch(function: Any) -> bool:
    room = str(getattr(function, "__module__", ""))
    return room.startswith("torch.") and not room.startswith("torch.ao.")


# --- buffers that are not there yet ---------------------------------------------------------------


class EmptyBuffer:
    """A buffer of a module of torch's own that holds nothing yet.

    Args:
        module: the module.
        name: the buffer's in it.
    """

    def __init__(self, module: torch.nn.Module, name: str) -> None:
        self._module = module
        self._name = name

    def is_for(self, now: Any, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        """Whether a tensor of this shape and dtype is to take the place of ``now``."""
        return now is None or (tuple(now.shape) != shape and now.dtype == dtype)

    def put(self, value: torch.Tensor, home: torch.device) -> None:
        """Have the module hold ``value``: where its empty buffer lies, or on ``home``."""
        live = self._module._buffers[self._name]
        device = home if live is None else live.device
        self._module._buffers[self._name] = value.detach().to(device)


def place_for(model: torch.nn.Module, name: str) -> EmptyBuffer | None:
    """The buffer of this name, if it is None or has no elements."""
    module, last = _holder(model, name)
    if module is None or last not in module._buffers or last in module._non_persistent_buffers_set:
        return None
    live = module._buffers[last]
    if live is not None and (type(live) not in PLAIN or live.numel()):
        return None
    return EmptyBuffer(module, last)


def home_of(model: torch.nn.Module) -> torch.device:
    """Where a model's tensors lie."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


# --- loading --------------------------------------------------------------------------------------


class ModuleInput(NamedTuple):
    """What a module is given.

    Attributes:
        name: the module's, for messages.
        state: its names → what was saved of them.
        versions: of its modules, as ``versions_in`` gives them.
    """

    name: str
    state: Mapping[str, Any]
    versions: Mapping[str, Any] | None


def load(module: torch.nn.Module, given: ModuleInput, *, own: bool) -> list[str]:
    """Give a module its state by its ``load_state_dict``.

    Args:
        module: of any kind.
        given: its state.
        own: whether it loads in a way of its own: then it is compared.

    Returns:
        What to say: values that are not what was given.

    Raises:
        StateMismatch: the module has other names, shapes or dtypes afterwards.
        Exception: whatever a ``load_state_dict`` of the script's does.
    """
    state = collections.OrderedDict(given.state)
    # Modules read their version from here; without it some convert "old" state.
    state._metadata = given.versions  # type: ignore[attr-defined]
    module.load_state_dict(state)
    return _compared(given.name, module, given.state) if own else []


def versions_in(live: Any, prefix: str = "") -> dict[str, Any] | None:
    """The versions of the modules under ``prefix`` that a ``state_dict`` carries, if it does."""
    known = getattr(live, "_metadata", None)
    if known is None:
        return None
    return {
        f"{path}.".removeprefix(prefix).rstrip("."): one
        for path, one in known.items()
        if f"{path}.".startswith(prefix)
    }


def part_of(state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """What of a state is under ``prefix``, without it."""
    return {n.removeprefix(prefix): one for n, one in state.items() if n.startswith(prefix)}


def name_of(key: str, prefix: str) -> str:
    """The name of the module of the model ``key`` whose names begin with ``prefix``."""
    return f"{key}.{prefix}".rstrip(".")


def _compared(name: str, module: torch.nn.Module, state: Mapping[str, Any]) -> list[str]:
    kind = type(module).__name__
    remedy = f"have {kind} take back what its state_dict gave"
    now = module.state_dict()
    for one in sorted({*state, *now}):
        if one not in now or one not in state:
            where = "does not have" if one not in now else "was not saved with"
            raise StateMismatch(
                f"{name} ({kind}) loads in a way of its own and {where} {name}.{one} afterwards; "
                f"{remedy}"
            )
    other = []
    for one, value in state.items():
        where = f"{name}.{one}"
        (then, tensors), (found, live) = flatten(value, where), flatten(now[one], where)
        if then != found:
            other.append(where)
            continue
        for at, tensor in tensors.items():
            for what, old, new in (
                ("shape", tuple(tensor.shape), tuple(live[at].shape)),
                ("dtype", tensor.dtype, live[at].dtype),
            ):
                if old != new:
                    raise StateMismatch(
                        f"{at} had {what} {old} and has {new} after {kind} loaded it in a way of "
                        f"its own; {remedy}"
                    )
            if not all(map(holds, memories(live[at]), memories(tensor))):
                other.append(at)
    if not other:
        return []
    more = f" and {len(other) - 1} more" if len(other) > 1 else ""
    are = "are" if more else "is"
    line = f"{other[0]}{more} {are} not what was saved: {kind} loads in a way of its own, and a "
    return [line + "resumed run may differ"]
