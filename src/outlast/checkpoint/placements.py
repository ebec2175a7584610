"""Where the tensors of an optimizer's state lie, where that cannot be told from their parameters.

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
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch

from outlast.checkpoint.overlaps import span
from outlast.checkpoint.references import like, rebuilt
from outlast.checkpoint.reshard import PLAIN, is_spread
from outlast.errors import ConfigError

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
    for name, inner in state["state"].items():
        for path, tensor in _tensors(inner, f"state.{name}"):
            note = _note(path, tensor, parameters.get(name), parameters)
            if path == f"state.{name}.step":
                note.pop("device", None)  # torch's own rule says where a step lies
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
        name: _but_step(inner, kept, f"state.{name}", parameters[name].device)
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


def _but_step(value: Any, kept: Any, path: str, home: torch.device) -> Any:
    """A parameter's state on its device; where a ``step`` lies is for torch to say."""
    if not isinstance(value, dict):
        return kept(value, path, home)
    pairs = {
        key: kept(inner, f"{path}.{key}", None if key == "step" else home)
        for key, inner in value.items()
    }
    return like(value, pairs)
