"""How modules take their state back: filled where they lie, or in a way of their own.

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

``ModelState`` gives a model's ``state_dict`` while its modules stay the same, as in training. torch
walks the modules anew each time, which at a step boundary is a good part of what a save costs
the loop. Where nothing but stock modules without hooks is found, that walk has one outcome while
the modules hold the same names, and then only the tensors are collected. Every dict that torch's
walk reads is compared; whatever else there is goes torch's way.
"""

from __future__ import annotations

import collections
import itertools
import operator
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch
from torch.nn import Module

from outlast.checkpoint.tensors import PLAIN, holds, lay, memories, overlaps
from outlast.checkpoint.tree import flatten
from outlast.errors import StateMismatch

_TABLES: Final = ("_parameters", "_buffers", "_modules")
_STOCK: Final = ("state_dict", "_save_to_state_dict", "get_extra_state")
_READ: Final = operator.itemgetter(  # what Module.state_dict reads of a module
    *_TABLES,
    *("_non_persistent_buffers_set", "_state_dict_hooks", "_state_dict_pre_hooks"),
)
_chain: Final = itertools.chain.from_iterable


class ModelState:
    """The state of one model, as often as it is asked for.

    Args:
        model: of any kind.
    """

    def __init__(self, model: Module) -> None:
        self._model = model
        self._walk: _Walk | None = None

    def __call__(self) -> Any:
        """What ``state_dict`` returns; tensors are the live ones, parameters are parameters."""
        if self._walk is not None:
            values = self._walk.again()
            if values is not None:
                return OrderedDict(zip(self._walk.names, values, strict=True))
        self._walk = None
        if not is_stock(self._model):
            return self._model.state_dict()
        with torch.no_grad():  # whoever copies detaches, more cheaply than a DTensor does
            state = self._model.state_dict(keep_vars=True)
        self._walk = _learn(self._model, state)
        return state

    def walked(self) -> tuple[list[str], list[Any]] | None:
        """The names, the same list while they are the same ones, and what they stand for.

        None where the state has to be asked for.
        """
        values = self._walk.again() if self._walk is not None else None
        return None if self._walk is None or values is None else (self._walk.names, values)

    def places(self) -> list[tuple[dict[str, Any], str]]:
        """Of the same: which table of its module has it, and as what."""
        return [] if self._walk is None else self._walk.places()

    @property
    def is_known(self) -> bool:
        """Whether what was returned last has all parameters, each of them itself."""
        return self._walk is not None


def is_stock(model: Module) -> bool:
    """Whether the model's ``state_dict`` is torch's own."""
    return type(model).state_dict is Module.state_dict


class _Walk:
    """What torch's walk reads of these modules, and what it makes of it.

    Args:
        modules: in the order of the walk, one that is held twice twice.
        prefixes: of their names.
    """

    def __init__(self, modules: list[Module], prefixes: list[str]) -> None:
        self._modules = modules  # held on to: while one lives, no other module has its id
        self._dicts = [module.__dict__ for module in modules]
        self._read = list(map(_READ, self._dicts))  # held on to, so that an id is theirs alone
        self._ids = list(map(id, _chain(self._read)))
        parts = list(zip(*self._read, strict=True))
        parameters, buffers, self._children, self._skipped, *hooks = parts
        self._hooks = list(_chain(hooks))
        self._skips = list(map(set, self._skipped))
        self._tables = list(_chain(zip(parameters, buffers, strict=True)))
        self._keys = list(_chain(self._tables))
        values = list(_chain(map(dict.values, self._tables)))
        names, chosen = [], []
        at = 0
        for module, prefix in zip(modules, prefixes, strict=True):
            skipped = module._non_persistent_buffers_set
            own = [*module._parameters, *module._buffers]
            for name in own:
                if values[at] is not None and name not in skipped:
                    names.append(prefix + name)
                    chosen.append(at)
                at += 1
        self.names = names
        self._absent = [value is None for value in values]
        self._choose = chosen if len(chosen) < len(values) else None
        self._child_keys = list(_chain(self._children))
        self._child_ids = self._ids_of_children()

    def again(self) -> list[Any] | None:
        """The tensors, under ``names``; None if the walk would not be the same."""
        if (
            list(map(id, _chain(map(_READ, self._dicts)))) != self._ids
            or list(_chain(self._tables)) != self._keys
            or list(_chain(self._children)) != self._child_keys
            or self._ids_of_children() != self._child_ids
            or any(self._hooks)
            or any(map(operator.ne, self._skipped, self._skips))
        ):
            return None
        values = list(_chain(map(dict.values, self._tables)))
        if [value is None for value in values] != self._absent:
            return None
        return values if self._choose is None else [values[at] for at in self._choose]

    def places(self) -> list[tuple[dict[str, Any], str]]:
        """The dict that has each of them, and its key there."""
        every = [(table, key) for table in self._tables for key in table]
        return every if self._choose is None else [every[at] for at in self._choose]

    def _ids_of_children(self) -> list[int]:
        return list(map(id, _chain(map(dict.values, self._children))))


def _learn(model: Module, state: dict[str, Any]) -> _Walk | None:
    """The walk that made ``state``, if it is that of stock modules."""
    modules: list[Module] = []
    prefixes: list[str] = []

    def visit(module: Module, prefix: str) -> bool:
        own = module.__dict__
        if not all(isinstance(own.get(name), dict) for name in _TABLES):  # a scripted module
            return False
        if any(getattr(type(module), name) is not getattr(Module, name) for name in _STOCK):
            return False
        if any(name in own for name in _STOCK):
            return False
        modules.append(module)
        prefixes.append(prefix)
        children = module._modules.items()
        return all(child is None or visit(child, f"{prefix}{name}.") for name, child in children)

    if not visit(model, ""):
        return None
    walk = _Walk(modules, prefixes)
    values = walk.again()
    if values is None or walk.names != list(state):  # it has hooks, or what we did not think of
        return None
    return walk if all(map(operator.is_, values, state.values())) else None


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


def lies_in(model: torch.nn.Module, tensors: Mapping[str, Any]) -> bool:
    """Whether ``tensors`` are the model's memory; a copy, as FSDP1 gives, is filled in vain."""
    own = {at for tensor in [*model.parameters(), *model.buffers()] for at in storages(tensor)}
    return all(
        isinstance(tensor, torch.Tensor) and own.issuperset(storages(tensor))
        for tensor in tensors.values()
    )


def storages(tensor: torch.Tensor) -> list[int]:
    """Where the memory begins that a tensor, or those that it is made of, lies in."""
    return [int(one.untyped_storage().data_ptr()) for one in memories(tensor)]


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


def put(key: str, model: torch.nn.Module, state: Mapping[str, Any]) -> list[str]:
    """Give a model a state that is in memory, as a whole.

    Args:
        key: the model's, for messages.
        model: of any kind.
        state: name → what ``state_dict`` gave.

    Returns:
        What to say; see :func:`load`.

    Raises:
        StateMismatch: it does not fit.
        Exception: whatever a ``load_state_dict`` of the script's does.
    """
    owners, live = owners_of(model), model.state_dict()
    plain = {name: one for name, one in live.items() if owner_in(owners, name) is None}
    if not lies_in(model, plain):
        return load(model, ModuleInput(key, state, versions_in(live)), own=False)
    home = home_of(model)
    for name, value in state.items():
        if owner_in(owners, name) is not None:
            continue
        now, place = plain.pop(name, None), place_for(model, name)
        if place is not None and place.is_for(now, tuple(value.shape), value.dtype):
            place.put(value.clone(), home)
        elif now is None or (now.shape, now.dtype) != (value.shape, value.dtype):
            raise StateMismatch(f"{key} does not take its state: {key}.{name} is not what it was")
        else:
            _fill(f"{key}.{name}", now, value)
    if plain:
        raise StateMismatch(f"{key} does not take its state: {key}.{min(plain)} was not kept")
    said = []
    for prefix, module in owners.items():
        part, versions = part_of(state, prefix), versions_in(live, prefix)
        said += load(module, ModuleInput(name_of(key, prefix), part, versions), own=True)
    return said


def _fill(name: str, live: torch.Tensor, value: torch.Tensor) -> None:
    with torch.no_grad():
        if type(live) not in PLAIN or not overlaps(live):
            live.detach().copy_(value)
        elif not lay(value, live):
            raise StateMismatch(f"the elements of {name} share memory, and did not in its state")
