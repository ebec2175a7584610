"""Keep what an optimizer holds besides what its ``state_dict`` gives: attributes, also helpers'.

An optimizer is an object with attributes, and some of them change as it steps: a counter, a running
estimate in a tensor, a helper object, an optimizer inside it whose state its ``state_dict`` leaves
out, a random-number generator. All of it that is data is kept, under the path of the object that
has it.

Kept are values that are not what they were when the session opened, and tensors, except those that
``state_dict`` gives already. What never changes stays as the script made it, so that a changed
argument of the constructor is obeyed.

A parameter, a view of its memory, or a table by parameters or by their ``id`` is kept as
references, in the ``state_dict`` too. As values they would be saved a second time, and come back as
tensors of their own, which the model no longer changes.

What can go wrong: an iterator is refused by name, since nobody can read how far it is. Objects are
followed whose class is written in the module of the optimizer's class or of one of its bases, or in
torch.optim; what others hold is not seen.

Rejected: following all objects. An optimizer that refers to a trainer would have the whole script
saved, and changed by a resume.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import random
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from outlast.checkpoint.tensors import PLAIN, is_spread, local_of
from outlast.checkpoint.tree import decode, flatten
from outlast.errors import ConfigError, StateMismatch

# --- parameters kept as references ----------------------------------------------------------------

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


# --- random-number generators ---------------------------------------------------------------------


def state_of(generator: Any) -> Any:
    """Where a random-number generator stands.

    Args:
        generator: Python's, NumPy's of either kind, one of NumPy's bit generators, or torch's.
    """
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return _bits(generator).state


def put_state(generator: Any, state: Any) -> None:
    """Have it stand where :func:`state_of` found one of its kind; lists may stand for tuples."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state.cpu())
    elif isinstance(generator, random.Random):
        generator.setstate(_tuples(state))
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        _bits(generator).state = state


def _bits(generator: Any) -> Any:
    return generator.bit_generator if isinstance(generator, np.random.Generator) else generator


def _tuples(state: Any) -> Any:
    return tuple(map(_tuples, state)) if isinstance(state, list | tuple) else state


# --- attributes -----------------------------------------------------------------------------------

MAX_OBJECTS: Final = 256  # beyond, it is not the optimizer's own that we walk through
_CONTAINERS: Final = (dict, list, tuple)
_GENERATORS: Final = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_CODE: Final = (type, types.ModuleType, enum.Enum)
# What torch.optim.Optimizer has for itself: hooks, names of profiles, nothing that steps change.
_OF_TORCH: Final = frozenset(
    {
        *("defaults", "_zero_grad_profile_name", "_warned_capturable_if_run_uncaptured"),
        *("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),
        *("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks"),
        *("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks"),
    }
)
_IN_STATE_DICT: Final = frozenset({"state", "param_groups"})

Values = dict[str, dict[Any, Any]]


class Holder(NamedTuple):
    """Something that holds values: an object, by attributes, or a container, by keys."""

    path: str
    it: Any

    def values(self) -> Mapping[Any, Any]:
        """Name or key → what it holds there."""
        if isinstance(self.it, dict):
            return self.it
        if isinstance(self.it, list | tuple):
            return dict(enumerate(self.it))
        return _attributes(self.it)

    def put(self, name: Any, value: Any) -> None:
        """Have it hold ``value``; a tuple stays as it is."""
        if isinstance(self.it, dict | list):
            self.it[name] = value
        elif not isinstance(self.it, tuple):
            object.__setattr__(self.it, name, value)


class Attributes:
    """The attributes of one optimizer, compared with what they were when the session opened.

    Args:
        optimizer: of any class; torch's own have none that matter.
        names: id of a parameter → its name.
        models: modules that are saved by themselves.

    Raises:
        ConfigError: an attribute whose state nobody can read; names it.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Mapping[int, str],
        models: Collection[torch.nn.Module] = (),
    ) -> None:
        self._optimizer = optimizer
        self._models = {id(module) for model in models for module in model.modules()}
        self._is_stock = is_stock_class(type(optimizer))
        self._initial: Values = {}
        if not self._is_stock:
            # As data: a list that grows would be compared with itself.
            self._initial = {
                path: {
                    name: flatten(value, "it")[0]
                    for name, value in values.items()
                    if not holds_tensor(value)
                }
                for path, values in self._values(names, frozenset()).items()
            }

    def changed(self, names: Mapping[int, str], carried: Collection[int]) -> Values:
        """Path of an object → name of an attribute → what it has become.

        Args:
            names: id of a parameter → its name.
            carried: ids of the tensors that ``state_dict`` gives.

        Raises:
            ConfigError: an attribute whose state nobody can read; names it.
        """
        found: Values = {}
        if self._is_stock:
            return found
        for path, values in self._values(names, carried).items():
            initial = self._initial.get(path, {})
            new = {
                name: value
                for name, value in values.items()
                if holds_tensor(value)
                or name not in initial
                or flatten(value, "it")[0] != initial[name]
            }
            if new:
                found[path] = new
        return found

    def put(self, saved: Mapping[str, Mapping[Any, Any]], key: str, names: Names) -> None:
        """Have the optimizer hold what ``changed`` gave, and else what it held at first.

        Args:
            saved: of the checkpoint.
            key: the optimizer's, for messages.
            names: name of a parameter → it.

        Raises:
            StateMismatch: an object that held something is no longer there.
        """
        if self._is_stock and not saved:
            return
        holders = {holder.path: holder for holder in self._owners(_by_id(names))}
        for path in dict.fromkeys([*self._initial, *saved]):
            holder = holders.get(path)
            if holder is None and path in saved:
                kept = ", ".join(map(str, saved[path]))
                raise StateMismatch(
                    f"{key} kept {kept} in {key}.{path}, which it does not have now; "
                    "build it as it was"
                )
            if holder is not None:
                first = {name: decode(it, dict) for name, it in self._initial.get(path, {}).items()}
                _put_all(holder, saved.get(path, {}), first, names)

    def _values(self, names: Mapping[int, str], carried: Collection[int]) -> Values:
        """What each owner holds that is data, with references in place of parameters."""
        memory = memory_of(self._optimizer)
        links = Links(self._optimizer)
        found: Values = {}
        for holder in self._owners(names):
            values: dict[Any, Any] = {}
            for name, value in holder.values().items():
                if self._is_left_out(holder, name, links) or links.of(value) is not None:
                    continue
                if isinstance(value, Iterator) and not isinstance(value, torch.Tensor):
                    raise ConfigError(
                        f"the optimizer's {_joined(holder, name, names)} is an iterator "
                        f"({type(value).__name__}), which cannot be saved; count in a number"
                    )
                if not _is_data(value):
                    continue
                tensors = [tensor for tensor in tensors_of(value) if id(tensor) not in names]
                if tensors and all(id(tensor) in carried for tensor in tensors):
                    continue
                if isinstance(value, _GENERATORS):
                    value = state_of(value)  # noqa: PLW2901 - it is what is kept of it
                values[key_referring(name, names)] = referring(value, names, memory)
            if values:
                found[holder.path] = values
        return found

    def _is_left_out(self, holder: Holder, name: Any, links: Links) -> bool:
        if isinstance(holder.it, tuple) or links.of(holder.it) is not None:
            return True
        if not isinstance(holder.it, torch.optim.Optimizer):
            return False
        return name in _OF_TORCH or (holder.it is self._optimizer and name in _IN_STATE_DICT)

    def _owners(self, names: Mapping[int, str]) -> list[Holder]:
        """The optimizer, the objects that it holds and that are followed, and what holds those."""
        optimizer: Any = self._optimizer
        rooms = _rooms(optimizer)
        seen = {id(optimizer), *self._models}
        seen.add(id(getattr(optimizer, "state", None)))
        found = [Holder("", optimizer)]
        for holder in found:
            for name, value in holder.values().items():
                if isinstance(holder.it, torch.optim.Optimizer) and name in _OF_TORCH:
                    continue
                if id(value) not in seen and _is_owner(value, rooms, seen):
                    seen.add(id(value))
                    found.append(Holder(_joined(holder, name, names), value))
            if len(found) > MAX_OBJECTS:
                return found[:1]
        return found


def is_stock_class(kind: type) -> bool:
    """Whether an optimizer's class is torch's own, which keeps all in its ``state_dict``."""
    return kind.__module__.startswith("torch.optim.")


class Links:
    """Which values are the optimizer's ``state``, its groups, or one of them."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        groups = optimizer.param_groups
        self._state, self._groups = id(optimizer.state), id(groups)
        self._each = {id(group): index for index, group in enumerate(groups)}

    def of(self, value: Any) -> Callable[[], Any] | None:
        """How to get what ``value`` is now that the optimizer has other ones; None: it is none."""
        optimizer = self._optimizer
        if id(value) == self._state:
            return lambda: optimizer.state
        if id(value) == self._groups:
            return lambda: optimizer.param_groups
        if id(value) in self._each:
            index = self._each[id(value)]
            return lambda: optimizer.param_groups[index]
        if type(value) is list and value and all(id(item) in self._each for item in value):
            indices = [self._each[id(item)] for item in value]
            return lambda: [optimizer.param_groups[index] for index in indices]
        return None


@contextlib.contextmanager
def keeping_links(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let what shares ``state`` and groups with the optimizer go on doing so.

    ``load_state_dict`` gives the optimizer new ones; an optimizer inside it would keep the old.
    """
    links = Links(optimizer)
    found = [
        (holder, name, again)
        for holder in ([] if is_stock_class(type(optimizer)) else holders_of(optimizer))
        if holder.it is not optimizer and holder.it is not optimizer.param_groups
        for name, value in holder.values().items()
        if (again := links.of(value)) is not None
    ]
    yield
    for holder, name, again in found:
        holder.put(name, again())


def holders_of(optimizer: Any) -> Iterator[Holder]:
    """All that can be reached from an optimizer: objects that are followed, and containers."""
    rooms = _rooms(optimizer)
    seen, queue = {id(optimizer)}, [Holder("", optimizer)]
    while queue:
        holder = queue.pop()
        yield holder
        for value in list(holder.values().values()):
            if id(value) not in seen and (
                isinstance(value, _CONTAINERS) or _is_object(value, rooms)
            ):
                seen.add(id(value))
                queue.append(Holder("", value))


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors that containers hold."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from tensors_of(inner)
    elif isinstance(value, collections.deque | list | tuple):
        for inner in value:
            yield from tensors_of(inner)


def holds_tensor(value: Any) -> bool:
    """Whether there is a tensor in it."""
    return next(tensors_of(value), None) is not None


# --- inside ---------------------------------------------------------------------------------------


def _attributes(it: Any) -> dict[str, Any]:
    found = dict(getattr(it, "__dict__", {}))
    for kind in type(it).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(it, name):
                found.setdefault(name, getattr(it, name))
    return found


def _rooms(optimizer: Any) -> set[str]:
    """The modules in which a class and its bases are written."""
    return {kind.__module__ for kind in type(optimizer).__mro__} - {"builtins", "abc"}


def _is_object(value: Any, rooms: Collection[str]) -> bool:
    if isinstance(value, (torch.Tensor, *_CODE, *_GENERATORS)):
        return False
    room = type(value).__module__
    return (room in rooms or room.startswith("torch.optim.")) and bool(
        hasattr(value, "__dict__") or hasattr(type(value), "__slots__")
    )


def _is_owner(value: Any, rooms: Collection[str], seen: Collection[int]) -> bool:
    """Whether it is an object that is entered, or a container in which there is one."""
    if isinstance(value, _CONTAINERS):
        inner = value.values() if isinstance(value, dict) else value
        return any(id(item) not in seen and _is_owner(item, rooms, seen) for item in inner)
    return _is_object(value, rooms)


def _is_data(value: Any) -> bool:
    if isinstance(value, (torch.Tensor, *_GENERATORS)):
        return True
    if isinstance(value, dict):
        keys = [key for key in value if not isinstance(key, torch.Tensor)]
        return all(map(_is_data, value.values())) and all(map(_is_data, keys))
    if type(value) in (list, tuple):
        return all(map(_is_data, value))
    try:
        flatten(value, "it")
    except ConfigError:
        return False
    return True


def _joined(holder: Holder, name: Any, names: Mapping[int, str]) -> str:
    if isinstance(holder.it, _CONTAINERS):
        word = names.get(id(name), name)
        return f"{holder.path}[{word}]"
    return f"{holder.path}.{name}" if holder.path else str(name)


def _by_id(names: Names) -> dict[int, str]:
    return {id(parameter): name for name, parameter in names.items()}


def _put_all(
    holder: Holder, values: Mapping[Any, Any], first: Mapping[Any, Any], names: Names
) -> None:
    now = holder.values()
    parameters = {id(parameter) for parameter in names.values()}
    for key, saved in {**first, **values}.items():
        name, value = resolved(key, names), resolved(saved, names)
        live = now.get(name)
        if isinstance(live, _GENERATORS):
            put_state(live, value)
        elif key in values or not holds_tensor(live):  # what holds one now came by state_dict
            holder.put(name, _merged(live, value, parameters))


def _merged(live: Any, value: Any, parameters: Collection[int]) -> Any:
    """``live`` with what ``value`` is, where it can hold that: others may refer to it."""
    if isinstance(value, torch.Tensor):
        if id(value) in parameters or not _is_memory_for(live, value):
            return value
        with torch.no_grad():
            live.copy_(value)
        return live
    if isinstance(value, dict) and type(live) is type(value):
        for key in [key for key in live if key not in value]:
            del live[key]
        for key, inner in value.items():
            live[key] = _merged(live.get(key), inner, parameters)
        return live
    if type(value) is list and type(live) is list and len(live) == len(value):
        live[:] = [_merged(n, v, parameters) for n, v in zip(live, value, strict=True)]
        return live
    return live if isinstance(value, set | frozenset) and live == value else value


def _is_memory_for(live: Any, value: torch.Tensor) -> bool:
    return (
        isinstance(live, torch.Tensor)
        and live is not value
        and (live.is_leaf or not live.requires_grad)
        and (live.dtype, live.shape, live.stride()) == (value.dtype, value.shape, value.stride())
        and (type(live) is type(value) or isinstance(live, torch.nn.Parameter))
        and torch._debug_has_internal_overlap(local_of(live)) != 1
    )
