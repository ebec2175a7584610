"""Save an optimizer's state as it is, under its parameters' names instead of their positions.

torch numbers parameters in the order the optimizer saw them. A name (``layers.0.weight``) says what
a tensor is, lets a shape be checked, and stays right when parameters are split over ranks. A
parameter that no saved model holds keeps its number, as ``#3``.

Guarantees: what ``state_dict`` gave before a save is what it gives after the load, in types,
dtypes, devices and placements too, or the load is refused. torch's ``load_state_dict`` casts what
is nested, rebuilds containers and turns strings into others; classes with one of their own may do
anything. So it is called, for all that it sets up, and then the state is compared with what was
saved and put right where it lies.

What a class gives in another form than torch's is saved as it is (``own``), and needs its
parameters in the same order. Attributes that no ``state_dict`` gives: see ``attributes``.

By default a tensor of its parameter's shape is spread over the workers as its parameter is, any
other one is whole everywhere, and both are on their parameter's device. What differs from that (row
statistics of a sharded matrix, moments that are kept on the CPU) is noted when it is saved, by the
tensor's path, and obeyed when it is loaded. So are strides that are not those of a contiguous
tensor: a product of matrices has other bits where one of them lies otherwise in memory.

A placement is noted by dimensions: (dimension, split factor) for each axis of the device mesh, -1
for a replica. Over another mesh, where a tensor was cut as its parameter was, it is again.
"""

from __future__ import annotations

import collections
import enum
import functools
import itertools
import types
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch
from torch.optim import Optimizer

from outlast.checkpoint.attributes import (
    Attributes,
    holders_of,
    is_stock_class,
    keeping_links,
    like,
    memory_of,
    parameters_of,
    rebuilt,
    referring,
    resolved,
    tensors_of,
)
from outlast.checkpoint.tensors import PLAIN, holds, is_spread, is_subclass, local_of, span
from outlast.checkpoint.tree import flatten
from outlast.errors import ConfigError, StateMismatch

# --- where tensors of the state lie ---------------------------------------------------------------

SPREAD: Final = "spread"  # that parameters were, when this was saved
MAX_GAPS: Final = 8  # a strided tensor's span in memory, by its own size
_IS_CPU: Final = torch.Tensor.is_cpu.__get__
_WHOLE: Final = -1
_SECTIONS: Final = ("other", "own", "attributes")

Note = dict[str, Any]
Parameters = Mapping[str, torch.Tensor]


def notes_of(state: Mapping[str, Any], parameters: Parameters) -> dict[str, Note]:
    """Path of a tensor in an optimizer's saved state → what is not as it is by default.

    Args:
        state: with names in place of numbers.
        parameters: name → parameter.

    Raises:
        ConfigError: a tensor that is spread over a mesh that no parameter is spread over.
    """
    notes: dict[str, Note] = {}
    if _is_plain(state, parameters):
        return notes
    some_spread = any(type(p) not in PLAIN and is_spread(p) for p in parameters.values())
    of_torch = _steps_by_torchs_rule(state)
    for name, inner in state["state"].items():
        for path, tensor in _tensors(inner, f"state.{name}"):
            note = _note(path, tensor, parameters.get(name), parameters)
            if path == f"state.{name}.step":
                note.pop("device", None)
                if not tensor.is_cpu and name not in of_torch:
                    note["home"] = True
            if note:
                notes[path] = note
    for section in _SECTIONS:
        for path, tensor in _tensors(state.get(section), section):
            note = _note(path, tensor, None, parameters)
            if note:
                notes[path] = note
    if some_spread:
        notes[SPREAD] = {}
    return notes


def laid_out(state: dict[str, Any], parameters: Parameters) -> dict[str, Any]:
    """An optimizer's saved state with its tensors on their devices, and strided as they were.

    Args:
        state: with names in place of numbers.
        parameters: name → parameter.
    """
    notes = state.get("notes", {})

    def kept(value: Any, path: str, home: torch.device | None) -> Any:
        if isinstance(value, torch.Tensor):
            note = notes.get(path, {})
            device = torch.device(note["device"]) if "device" in note else home
            return _strided(value if device is None else value.to(device=device), note)
        steps = iter(value if isinstance(value, dict) else itertools.count())
        return rebuilt(value, lambda inner: kept(inner, f"{path}.{next(steps)}", home))

    found = dict(state)
    found["state"] = {
        name: _but_step(
            *(inner, kept, f"state.{name}", parameters[name].device),
            is_home="home" in notes.get(f"state.{name}.step", {}),
        )
        for name, inner in state["state"].items()
    }
    for section in _SECTIONS:
        if section in state:
            found[section] = kept(state[section], section, None)
    return found


def memory_for(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    note: Note | None,
    parameter: Any,
    parameters: Parameters,
    *,
    was_spread: bool,
) -> torch.Tensor | None:
    """New memory for a tensor of an optimizer's state; None where the default is right.

    Args:
        shape: of the whole tensor.
        dtype: its dtype.
        note: of the tensor; none for one that is as it is by default.
        parameter: the one it belongs to, if any.
        parameters: name → parameter of today.
        was_spread: whether parameters were spread when it was saved.
    """
    if note and note.get("plain"):
        return torch.empty(shape, dtype=dtype)
    if note and "placements" in note:
        of: Any = parameters.get(note["of"])
        if of is None or not is_spread(of):
            return torch.empty(shape, dtype=dtype)
        return _empty(shape, dtype, of.device_mesh, _placements(note, of, shape))
    if not shape or was_spread or not isinstance(parameter, torch.Tensor):
        return None
    if is_spread(parameter) and shape != tuple(parameter.shape):
        # It was whole, as its parameter was. What is whole on each worker is the same.
        of = parameter
        return _empty(shape, dtype, of.device_mesh, _replicas(of))
    return None


# --- inside ---------------------------------------------------------------------------------------


def _tensors(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _tensors(inner, f"{path}.{key}")
    elif isinstance(value, list | tuple | collections.deque):
        for index, inner in enumerate(value):
            yield from _tensors(inner, f"{path}.{index}")


def _note(
    path: str, tensor: torch.Tensor, parameter: torch.Tensor | None, parameters: Parameters
) -> Note:
    note: Note = {}
    if is_spread(tensor):
        if parameter is None or not _is_cut_alike(tensor, parameter):
            name = _of_same_mesh(path, tensor, parameter, parameters)
            note = {
                "of": name,
                "placements": _words(tensor),
                "parameter": _words(parameters[name]),
            }
    elif parameter is not None and is_spread(parameter) and tensor.shape == parameter.shape:
        note = {"plain": True}
    home = "cpu" if parameter is None else parameter.device.type
    if tensor.device.type != home:
        note["device"] = tensor.device.type
    if not is_spread(tensor) and not tensor.is_contiguous() and _fills_memory(tensor):
        note["stride"] = list(tensor.stride())
    return note


def _is_plain(state: Mapping[str, Any], parameters: Parameters) -> bool:
    """Whether all is as it is by default, told quickly: nearly always it is, at each save."""
    if any(section in state for section in _SECTIONS):
        return False
    tensors = list(parameters.values())
    for inner in state["state"].values():
        if type(inner) is not dict:
            return False
        tensors += inner.values()
    if not set(map(type, tensors)) <= PLAIN:
        return False
    return all(map(_IS_CPU, tensors)) and all(map(torch.Tensor.is_contiguous, tensors))


def _fills_memory(tensor: torch.Tensor) -> bool:
    """Whether no two elements share memory, and not much of it is left out between them."""
    if type(tensor) not in PLAIN or torch._debug_has_internal_overlap(tensor) != 0:
        return False
    return bool(span(tensor.shape, tensor.stride()) <= MAX_GAPS * tensor.numel())


def _strided(tensor: torch.Tensor, note: Note) -> torch.Tensor:
    stride = note.get("stride")
    if stride is None or list(tensor.stride()) == list(stride) or is_spread(tensor):
        return tensor
    found = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return found.copy_(tensor)


def _empty(
    shape: tuple[int, ...], dtype: torch.dtype, mesh: Any, placements: tuple[Any, ...]
) -> torch.Tensor:
    from torch.distributed import tensor

    empty: torch.Tensor = tensor.empty(shape, dtype=dtype, device_mesh=mesh, placements=placements)
    return empty


def _replicas(parameter: Any) -> tuple[Any, ...]:
    from torch.distributed.tensor import Replicate

    return tuple(Replicate() for _ in parameter.placements)


def _is_cut_alike(tensor: Any, parameter: Any) -> bool:
    return bool(
        is_spread(parameter)
        and tensor.shape == parameter.shape
        and tensor.placements == parameter.placements
        and tensor.device_mesh == parameter.device_mesh
    )


def _of_same_mesh(path: str, tensor: Any, parameter: Any, parameters: Parameters) -> str:
    first = [name for name, it in parameters.items() if it is parameter]
    for name in [*first, *parameters]:
        it: Any = parameters[name]
        if is_spread(it) and it.device_mesh == tensor.device_mesh:
            return name
    raise ConfigError(
        f"the optimizer's {path} is spread over another mesh than its parameters, "
        "which cannot be kept"
    )


def _words(spread: Any) -> list[list[int]]:
    return [
        [int(getattr(p, "dim", _WHOLE)), int(getattr(p, "split_factor", 1))]
        for p in spread.placements
    ]


def _placements(note: Note, parameter: Any, shape: tuple[int, ...]) -> tuple[Any, ...]:
    from torch.distributed.tensor import Replicate, Shard

    now = _words(parameter)
    saved = [list(pair) for pair in note["placements"]]
    if now != [list(pair) for pair in note["parameter"]]:
        # Cut otherwise by now: each dimension goes with that of the parameter it was cut with.
        went = {p[0]: s for p, s in zip(note["parameter"], saved, strict=True) if p[0] != _WHOLE}
        saved = [[went[dim][0], 1] if dim in went else [_WHOLE, 1] for dim, _ in now]
    found: list[Any] = []
    for axis, (dim, factor) in enumerate(saved):
        if dim == _WHOLE or dim >= len(shape):
            found.append(Replicate())
        elif factor != 1:
            found.append(type(parameter.placements[axis])(dim, split_factor=factor))
        else:
            found.append(Shard(dim))
    return tuple(found)


def _but_step(value: Any, kept: Any, path: str, home: torch.device, *, is_home: bool) -> Any:
    """A parameter's state on its device; where a ``step`` lies is mostly for torch to say."""
    if not isinstance(value, dict):
        return kept(value, path, home)
    pairs = {
        key: kept(inner, f"{path}.{key}", home if key != "step" or is_home else None)
        for key, inner in value.items()
    }
    return like(value, pairs)


def _steps_by_torchs_rule(state: Mapping[str, Any]) -> set[str]:
    """Names of parameters whose ``step`` torch's ``load_state_dict`` puts beside them."""
    return {
        name
        for group in state["param_groups"]
        if group.get("fused") or group.get("capturable")
        for name in group["params"]
    }


# --- the state under names ------------------------------------------------------------------------

KIND: Final = "optimizer_class"
OWN_FORM: Final = "own"
OTHER: Final = "other"
ATTRIBUTES: Final = "attributes"
NOTES: Final = "notes"
IN_ORDER: Final = "in_order"
OURS: Final = frozenset({KIND, OTHER, ATTRIBUTES, NOTES, IN_ORDER})  # torch knows none of them

_LIVE: Final = "@live"  # code in a parameter group: the script's, not the checkpoint's
_CODE: Final = (
    *(type, enum.Enum, functools.partial),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType),
)


def parameter_names(
    optimizer: torch.optim.Optimizer, models: Mapping[str, torch.nn.Module]
) -> list[str]:
    """Names of the optimizer's parameters, in the order in which torch numbers them.

    With several models a parameter's name starts with the model's key.
    """
    known: dict[int, str] = {}
    for key, model in models.items():
        for name, parameter in model.named_parameters():
            known.setdefault(id(parameter), name if len(models) == 1 else f"{key}.{name}")
    return [
        known.get(id(parameter), f"#{number}")
        for number, parameter in enumerate(parameters_of(optimizer))
    ]


def names_by_id(optimizer: torch.optim.Optimizer, names: list[str]) -> dict[int, str]:
    """Id of a parameter → its name."""
    return {id(p): name for p, name in zip(parameters_of(optimizer), names, strict=True)}


def named_state(
    optimizer: torch.optim.Optimizer, names: list[str], attributes: Attributes | None = None
) -> dict[str, Any]:
    """The optimizer's state with names in place of numbers.

    Args:
        optimizer: of any class.
        names: of its parameters.
        attributes: its attributes, if they are to be kept.

    Raises:
        ConfigError: what cannot be kept; names it.
    """
    state = _asked(optimizer)
    renamed: dict[str, Any]
    if _is_torchs_form(state, len(names)):
        renamed = _in_torchs_form(optimizer, state, names)
    else:
        groups = [{"params": group} for group in _by_group(optimizer, names)]
        renamed = {"state": {}, "param_groups": groups, OWN_FORM: state}
    renamed[KIND] = type(optimizer).__name__
    if not _tells_all(optimizer):
        renamed[IN_ORDER] = True
    if not is_stock_class(type(optimizer)):
        by_id, memory = names_by_id(optimizer, names), memory_of(optimizer)
        for section in ("state", OTHER, OWN_FORM):
            if section in renamed:
                renamed[section] = referring(renamed[section], by_id, memory)
        if attributes is not None:
            carried = {id(tensor) for tensor in tensors_of(state)}
            changed = attributes.changed(by_id, carried)
            if changed:
                renamed[ATTRIBUTES] = changed
    notes = notes_of(renamed, dict(zip(names, parameters_of(optimizer), strict=True)))
    if notes:
        renamed[NOTES] = notes
    return renamed


def difference(
    optimizer: torch.optim.Optimizer, names: list[str], state: Mapping[str, Any], then: str
) -> str:
    """How the parameters of a saved optimizer differ from today's, in words; "" if they do not.

    Their order within a group may differ: state goes by name.
    """
    kind = state.get(KIND, type(optimizer).__name__)
    if kind != type(optimizer).__name__:
        return f"was of class {kind} {then} and is of class {type(optimizer).__name__} now"
    before = [list(group["params"]) for group in state["param_groups"]]
    now = _by_group(optimizer, names)
    was, now_all = {name for group in before for name in group}, set(names)
    if was != now_all:
        other = ", ".join(sorted(was ^ now_all)[:3])
        return (
            f"had {len(was)} parameters {then} and has {len(now_all)} now "
            f"(only on one side: {other})"
        )
    if [sorted(group) for group in before] != [sorted(group) for group in now]:
        sizes = [", ".join(str(len(group)) for group in groups) for groups in (before, now)]
        return f"had its parameters in other groups {then} (of {sizes[0]}; now of {sizes[1]})"
    if state.get(IN_ORDER) and before != now:
        return f"had its parameters in another order {then}, which {kind} does not sort out"
    return ""


def load_named_state(
    optimizer: torch.optim.Optimizer,
    names: list[str],
    state: Mapping[str, Any],
    key: str,
    attributes: Attributes | None = None,
) -> None:
    """Load what ``named_state`` gave.

    Raises:
        StateMismatch: the saved optimizer had other parameters or other groups of them, or the
            optimizer does not take its state back as it was.
    """
    problem = difference(optimizer, names, state, "when it was saved")
    if problem:
        raise StateMismatch(f"{key} {problem}")
    by_name = dict(zip(names, parameters_of(optimizer), strict=True))
    state = resolved(laid_out(dict(state), by_name), by_name)
    loaded = state.get(OWN_FORM)
    if loaded is None:
        loaded = _numbered(optimizer, names, state, key)
    with keeping_links(optimizer):
        optimizer.load_state_dict(_guarded(loaded) if _loads_as_torch(optimizer) else loaded)
    if OWN_FORM not in state:
        loaded["state"] = _steps_as_placed(loaded["state"], optimizer.state_dict())
    if _tells_all(optimizer):
        _settle(optimizer, names, loaded["state"])
    else:
        _settle_by_words(optimizer, loaded)
    if attributes is not None:
        attributes.put(state.get(ATTRIBUTES, {}), key, by_name)
    if not _tells_all(optimizer):
        for path, _, _, live, saved in _differences(optimizer.state_dict(), loaded, key):
            raise StateMismatch(
                f"{type(optimizer).__name__} does not take its state back as it was saved: {path} "
                f"was {_short(saved)} and is {_short(live)}"
            )


# --- saving ---------------------------------------------------------------------------------------


def _asked(optimizer: torch.optim.Optimizer) -> Any:
    kind = type(optimizer).__name__
    if not is_stock_class(type(optimizer)):
        for key in optimizer.state:
            if type(key) is int:
                raise ConfigError(
                    f"{kind} keeps state under the number {key}, which its state_dict takes for a "
                    "parameter; use a string"
                )
    try:
        return optimizer.state_dict()
    except Exception as error:
        raise ConfigError(
            f"the state_dict of {kind} raises {type(error).__name__}: {error}"
        ) from error


def _is_torchs_form(state: Any, num_parameters: int) -> bool:
    if not isinstance(state, Mapping) or not isinstance(state.get("state"), Mapping):
        return False
    groups = state.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        return False
    numbers = [number for group in groups for number in group.get("params", ())]
    return numbers == list(range(num_parameters))


def _in_torchs_form(
    optimizer: torch.optim.Optimizer, state: Mapping[str, Any], names: list[str]
) -> dict[str, Any]:
    renamed = dict(state)
    numbers = range(len(names))
    inner = state["state"]
    renamed["state"] = {
        names[index]: value
        for index, value in inner.items()
        if type(index) is int and index in numbers
    }
    if len(renamed["state"]) != len(inner):
        renamed[OTHER] = {
            index: value
            for index, value in inner.items()
            if type(index) is not int or index not in numbers
        }
    renamed["param_groups"] = [
        {**_without_code(group, optimizer), "params": [names[index] for index in group["params"]]}
        for group in state["param_groups"]
    ]
    return renamed


def _without_code(group: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A group with descriptions in place of functions, classes and members of enumerations."""
    room = type(optimizer).__module__.partition(".")[0]
    return {
        name: (_LIVE, _description(value)) if _is_code(value, room) else value
        for name, value in group.items()
    }


def _is_code(value: Any, room: str) -> bool:
    if value is None or isinstance(value, bool | float | list | tuple | torch.Tensor):
        return False
    return isinstance(value, _CODE) or (
        hasattr(value, "__dict__") and type(value).__module__.partition(".")[0] == room != "torch"
    )


def _description(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    named = value.func if isinstance(value, functools.partial) else value
    return str(getattr(named, "__qualname__", type(value).__qualname__))


# --- loading --------------------------------------------------------------------------------------


def _tells_all(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``state_dict`` is torch's own: it gives the containers that ``step`` works on."""
    own = vars(optimizer)
    return (
        type(optimizer).state_dict is Optimizer.state_dict
        and "state_dict" not in own
        and {"state", "param_groups"} <= set(own)
        and not own.get("_optimizer_state_dict_post_hooks")
    )


def _loads_as_torch(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).load_state_dict is Optimizer.load_state_dict


def _numbered(
    optimizer: torch.optim.Optimizer, names: list[str], state: Mapping[str, Any], key: str
) -> dict[str, Any]:
    number = {name: index for index, name in enumerate(names)}
    plain = {name: value for name, value in state.items() if name not in OURS}
    plain["state"] = {number[name]: inner for name, inner in state["state"].items()}
    plain["state"] |= state.get(OTHER, {})
    # torch matches the two sides by position, so the saved side takes today's order.
    plain["param_groups"] = [
        _ordered(_with_code(group, live, key), now, number)
        for group, live, now in zip(
            state["param_groups"],
            optimizer.param_groups,
            _by_group(optimizer, names),
            strict=True,
        )
    ]
    return plain


def _by_group(optimizer: torch.optim.Optimizer, names: list[str]) -> list[list[str]]:
    left = iter(names)
    return [[next(left) for _ in group["params"]] for group in optimizer.param_groups]


def _ordered(group: Mapping[str, Any], now: list[str], number: Mapping[str, int]) -> dict[str, Any]:
    ordered = {**group, "params": [number[name] for name in now]}
    if "param_names" in group:  # torch keeps them for an optimizer made from named parameters
        given = dict(zip(group["params"], group["param_names"], strict=True))
        ordered["param_names"] = [given[name] for name in now]
    return ordered


def _with_code(group: Mapping[str, Any], live: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = dict(group)
    for name, value in group.items():
        if isinstance(value, tuple) and len(value) == 2 and value[0] == _LIVE:
            now = _description(live[name]) if name in live else "not there"
            if now != value[1]:
                raise StateMismatch(f"{key} had {name} {value[1]} and has {now} now")
            found[name] = live[name]
    return found


class _KeptWhole:
    """What torch's load_state_dict would cast or take apart, and cannot put together again."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _guarded(loaded: Any) -> Any:
    if isinstance(loaded, np.ndarray) or (isinstance(loaded, torch.Tensor) and is_subclass(loaded)):
        return _KeptWhole(loaded)
    return rebuilt(loaded, _guarded)


def _steps_as_placed(saved: Mapping[Any, Any], now: Any) -> dict[Any, Any]:
    """What was saved for each parameter, its ``step`` on the device where the load has put it.

    That is the parameter's where the group is fused or capturable: torch refuses any other there.
    """
    found = dict(saved)
    for number, live in now["state"].items():
        inner = saved.get(number)
        if isinstance(inner, dict) and isinstance(live, dict):
            then, here = inner.get("step"), live.get("step")
            if isinstance(then, torch.Tensor) and isinstance(here, torch.Tensor):
                found[number] = like(inner, {**inner, "step": then.to(here.device)})
    return found


def _settle(optimizer: torch.optim.Optimizer, names: list[str], saved: Mapping[Any, Any]) -> None:
    """Have ``optimizer.state`` be what was saved, where torch's load_state_dict changed it."""
    parameters = parameters_of(optimizer)
    for index, value in saved.items():
        if type(index) is int and index < len(names):
            parameter = parameters[index]
            live = optimizer.state.get(parameter)
            optimizer.state[parameter] = _settled(live, value)
        else:
            optimizer.state[index] = _settled(optimizer.state.get(index), value)


def _settled(live: Any, saved: Any) -> Any:
    """``live`` where it is what was saved, put right in place where it can be."""
    if isinstance(saved, torch.Tensor):
        return live if _same(live, saved) else saved
    if isinstance(live, torch.Tensor) and isinstance(saved, int | float):
        return live  # __setstate__ made a tensor of what older versions kept as a number
    if isinstance(saved, dict) and type(live) is type(saved):
        for key, value in saved.items():
            live[key] = _settled(live.get(key), value)
        return live
    if type(saved) is list and type(live) is list and len(live) == len(saved):
        live[:] = [_settled(now, then) for now, then in zip(live, saved, strict=True)]
        return live
    return saved


def _settle_by_words(optimizer: torch.optim.Optimizer, loaded: Any) -> None:
    """The same for a class with a ``state_dict`` of its own: what it gives is found by identity."""
    left = list(_differences(optimizer.state_dict(), loaded, ""))
    if not left:
        return
    holders = list(holders_of(optimizer))
    containers = {id(holder.it) for holder in holders}
    places = {
        id(value): (holder, name) for holder in holders for name, value in holder.values().items()
    }
    for _, container, name, live, saved in left:
        if id(container) in containers and isinstance(container, dict | list):
            container[name] = saved
        elif isinstance(live, torch.Tensor) and id(live) in places:
            holder, where = places[id(live)]
            holder.put(where, saved)


def _differences(live: Any, saved: Any, path: str) -> Iterator[tuple[str, Any, Any, Any, Any]]:
    """(path, container, key, what it holds, what was saved) of all that is not as it was saved."""
    if isinstance(saved, dict):
        pairs = [(key, live.get(key), value) for key, value in saved.items()]
    else:
        pairs = [(index, live[index], value) for index, value in enumerate(saved)]
    for key, now, then in pairs:
        here = f"{path}.{key}" if path else str(key)
        alike = type(now) is type(then) or (isinstance(now, dict) and isinstance(then, dict))
        if alike and isinstance(then, dict | list | tuple | collections.deque):
            if len(now) >= len(then):
                yield from _differences(now, then, here)
                continue
        elif _same(now, then):
            continue
        yield here, live, key, now, then


def _same(live: Any, saved: Any) -> bool:
    """Whether two values are the same, tensors to the bit."""
    if live is saved or type(live) is not type(saved):
        return live is saved
    if isinstance(saved, torch.Tensor):
        return _what(live) == _what(saved) and _have_same_bits(live, saved)
    try:
        return bool(flatten(live, "") == flatten(saved, ""))
    except ConfigError:
        return bool(live == saved)


def _what(tensor: Any) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.device, getattr(tensor, "placements", None)


def _have_same_bits(live: torch.Tensor, saved: torch.Tensor) -> bool:
    if is_subclass(saved):
        return False  # nobody knows what makes it equal: what was saved is taken
    mine, theirs = local_of(live), local_of(saved)
    if mine.data_ptr() == theirs.data_ptr() and mine.stride() == theirs.stride():
        return True
    return holds(mine, theirs)


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        return f"a tensor of {kind} and shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) < 60 else f"a {type(value).__name__}"
