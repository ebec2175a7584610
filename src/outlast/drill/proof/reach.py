"""What the script's own names reach: looked at, kept, and put into another process.

State that is in no checkpoint is somewhere: in a global, in a variable of the function with the
loop, in an attribute of an object there. ``values`` walks from those names and gives each number,
tensor and generator under its path (``main().ema.shadow.weight``). Two runs are compared at the
same step by them, and what differs is a suspect. It is a cause if the difference between the runs
is gone once the value was brought across by hand: ``keep`` writes the values behind a step, ``put``
brings them into a process that has resumed there. A list, a deque, a set or a dictionary of nothing
but data (a replay buffer, a history) is one value: it may have grown.

What is left out: what the session was given and saves; modules, classes and functions; objects of
ours; iterators of loaders; names that begin with two underscores.

What can go wrong: paths are cut at ``DEPTH_MAX``, the walk at ``OBJECTS_MAX``, and containers that
are no one value, or have more than ``WHOLE_MAX`` parts, at ``ITEMS_MAX``. What lies in a closure,
in a generator's frame or in C code is not reached.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import random
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch

from outlast.checkpoint.attributes import put_state, state_of
from outlast.checkpoint.tensors import bytes_of
from outlast.drill.proof.conditions import FROZEN
from outlast.ledger.command import is_users

DEPTH_MAX: Final = 6
ITEMS_MAX: Final = 64
OBJECTS_MAX: Final = 20_000
WHOLE_MAX: Final = 10_000
COUNTED_MAX: Final = 200_000  # parts of all of these, in one walk
KEPT_BYTES_MAX: Final = 1 << 28
_LEAVES: Final = (bool, int, float, str, torch.Tensor, np.ndarray, np.generic, type(None))
_KEYS: Final = (str, int, float, bool)
_GENERATORS: Final = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_NOT_STATE: Final = (
    *(type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType),
    *(types.FrameType, types.GeneratorType, types.CodeType, torch.device, torch.dtype, Path),
)
_OURS: Final = "outlast"
_OF_TORCH: Final = (
    *("torch.utils.data.dataloader", "torch.distributed", "torch.nn.parallel", "torch._dynamo"),
)
_SEQUENCES: Final[dict[str, type[Any]]] = {
    "t": tuple,
    "l": list,
    "s": set,
    "d": collections.deque,
}
Put = Callable[[Any], None]


class Reached:
    """One value under its path.

    Args:
        path: from a name of the script's.
        value: itself.
        put: gives it another value; None where that cannot be.
        owner: path of the innermost object around it that gives and takes its state itself.
        kind: the class of that object; "" for none.
        of: the class of which it is an attribute, where a library made that; else "".
    """

    __slots__ = ("kind", "of", "owner", "path", "put", "value")

    def __init__(
        self, path: str, value: Any, put: Put, owner: str, kind: str, *, of: str = ""
    ) -> None:
        self.path, self.value, self.put = path, value, put
        self.owner, self.kind, self.of = owner, kind, of


def script_frames() -> list[types.FrameType]:
    """The script's frames that this one was called from, the innermost first."""
    frames = []
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            frames.append(frame)
        frame = frame.f_back
    return frames


def values(known: Mapping[int, Any]) -> Iterator[Reached]:
    """Everything that the script's names reach from here.

    Args:
        known: id → object, of what is saved, and seen otherwise.
    """
    walked: dict[int, Any] = {}
    todo = [
        Reached(path, value, put, "", "")
        for path, value, put in _roots()
        if not path.rpartition(".")[2].startswith("__")
    ]
    depths = [0] * len(todo)
    counted = 0
    while todo and len(walked) < OBJECTS_MAX:
        one, depth = todo.pop(0), depths.pop(0)
        value = one.value
        if isinstance(value, _LEAVES):
            if id(value) not in known:
                yield one
            continue
        if id(value) in walked or _is_no_state(value, known):
            continue
        walked[id(value)] = value
        if isinstance(value, _GENERATORS):
            yield Reached(one.path, value, _put_generator(value), one.owner, one.kind)
            continue
        parts = _data_in(value, known) if counted < COUNTED_MAX else 0
        counted += parts
        if 0 < parts <= WHOLE_MAX and not isinstance(value, tuple):
            yield Reached(one.path, value, _put_whole(value), one.owner, one.kind)
        elif depth < DEPTH_MAX:
            inner = _inside(one, known)
            todo += inner
            depths += [depth + 1] * len(inner)


def _data_in(value: Any, known: Mapping[int, Any]) -> int:
    """How many parts a container of nothing but data has, itself counted; 0 for anything else."""
    parts, todo = 0, [value]
    while todo and parts <= WHOLE_MAX:
        one, parts = todo.pop(), parts + 1
        if isinstance(one, _LEAVES):
            if id(one) in known:
                return 0
        elif isinstance(one, dict) and all(isinstance(key, _KEYS) for key in one):
            todo += one.values()
        elif isinstance(one, list | set | collections.deque) or type(one) is tuple:
            todo += one
        else:
            return 0
    return 0 if isinstance(value, _LEAVES) else parts


def _inside(one: Reached, known: Mapping[int, Any]) -> list[Reached]:
    owner, kind = one.owner, one.kind
    if id(one.value) not in known and _gives_state(one.value):
        owner, kind = one.path, type(one.value).__name__
    return [
        Reached(f"{one.path}{name}", part, put, owner, kind, of=_librarys(holder))
        for name, part, put, holder in _parts(one.value)
    ]


def _librarys(holder: Any) -> str:
    """The class of an object of a library's, as "torch.nn.Dropout"; "" for the script's own."""
    kind = type(holder)
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    if holder is None or kind.__module__ == "__main__" or file is None or is_users(file):
        return ""
    root = kind.__module__.partition(".modules.")[0]
    return f"{root}.{kind.__qualname__}"


def _gives_state(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _roots() -> Iterator[tuple[str, Any, Put]]:
    for frame in script_frames():
        if frame.f_code.co_name != "<module>":
            for name, value in dict(frame.f_locals).items():
                yield f"{frame.f_code.co_name}().{name}", value, _put_local(frame, name)
    main: dict[str, Any] = vars(sys.modules["__main__"])
    for name, value in dict(main).items():
        yield name, value, _put_item(main, name)


def _is_no_state(value: Any, known: Mapping[int, Any]) -> bool:
    # A module saves its tensors, and not what else it has.
    is_saved = id(value) in known and not isinstance(value, torch.nn.Module)
    return is_saved or isinstance(value, _NOT_STATE) or _is_left_out(value)


def _is_left_out(value: Any) -> bool:
    module = type(value).__module__ or ""
    return module.split(".")[0] == _OURS or module.startswith(_OF_TORCH)


def _parts(value: Any) -> Iterator[tuple[str, Any, Put, Any]]:
    """Name, value and way to put one, of each; and the object of which it is an attribute."""
    if isinstance(value, Mapping):
        for key in list(value)[:ITEMS_MAX]:
            if isinstance(key, str | int | float | bool):
                yield f"[{key!r}]", value[key], _put_item(value, key), None
    elif isinstance(value, list | tuple | collections.deque):
        for number, part in enumerate(islice(value, ITEMS_MAX)):
            yield f"[{number}]", part, _put_item(value, number), None
    elif isinstance(value, torch.nn.Module):
        yield from _parts_of_module(value)
    else:
        for name, part in list(getattr(value, "__dict__", {}).items()):
            yield f".{name}", part, _put_attribute(value, name), value


def _parts_of_module(value: torch.nn.Module) -> Iterator[tuple[str, Any, Put, Any]]:
    for name, tensor in [*value.named_parameters(), *value.named_buffers()]:
        yield f".{name}", tensor, _put_tensor(tensor), None
    for name, tensor in value.named_parameters():  # whether it is frozen is in no state_dict
        full = f".{name}.{FROZEN}"
        yield full, tensor.requires_grad, _put_attribute(tensor, FROZEN), None
    for where, module in value.named_modules():
        for name, part in list(vars(module).items()):
            if not name.startswith("_"):
                full = f".{where}.{name}" if where else f".{name}"
                yield full, part, _put_attribute(module, name), module


def _put_item(holder: Any, key: Any) -> Put:
    def put(value: Any) -> None:
        if isinstance(holder[key], torch.Tensor) and isinstance(value, torch.Tensor):
            _put_tensor(holder[key])(value)
        else:
            holder[key] = value

    return put


def _put_whole(holder: Any) -> Put:
    def put(value: Any) -> None:
        is_alike = len(holder) == len(value) and not isinstance(holder, set)
        if isinstance(holder, dict) and list(holder) == list(value):
            for key, part in value.items():
                _put_item(holder, key)(part)
        elif is_alike and not isinstance(holder, dict):
            for number, part in enumerate(value):
                _put_item(holder, number)(part)
        else:
            holder.clear()
            add = holder.update if isinstance(holder, dict | set) else holder.extend
            add(value)

    return put


def _put_attribute(holder: Any, name: str) -> Put:
    def put(value: Any) -> None:
        now = getattr(holder, name)
        if isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor):
            _put_tensor(now)(value)
        else:
            setattr(holder, name, value)

    return put


def _put_tensor(tensor: torch.Tensor) -> Put:
    def put(value: Any) -> None:
        with torch.no_grad():
            tensor.copy_(value)

    return put


def _put_generator(generator: Any) -> Put:
    return lambda state: put_state(generator, state)


def _put_local(frame: types.FrameType, name: str) -> Put:
    def put(value: Any) -> None:
        now = frame.f_locals.get(name)
        if isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor):
            _put_tensor(now)(value)
            return
        frame.f_locals[name] = value
        if sys.version_info < (3, 13):  # what was written there is not yet the variable
            ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))

    return put


# --- kept and brought across ----------------------------------------------------------------------


def keep(known: Mapping[int, Any], path: Path) -> None:
    """Write what is reached, to be put into another process at the same step."""
    kept: dict[str, Any] = {}
    room = KEPT_BYTES_MAX
    for one in values(known):
        with contextlib.suppress(Exception):  # what cannot be written is not brought across
            told = _told(one.value)
            room -= len(told[-1]) if isinstance(told[-1], bytes) else 0
            if room < 0:
                break
            kept[one.path] = told
    unfinished = path.with_suffix(".part")
    unfinished.write_bytes(msgspec.msgpack.encode(kept))
    unfinished.replace(path)


def put(known: Mapping[int, Any], path: Path, chosen: Collection[str]) -> list[str]:
    """Put kept values in their places; the paths of those that were.

    Args:
        known: as of :func:`values`.
        path: the file that :func:`keep` wrote.
        chosen: the paths of what is put.
    """
    kept = msgspec.msgpack.decode(path.read_bytes())
    done = []
    for one in list(values(known)):
        if one.path in chosen and one.path in kept:
            with contextlib.suppress(Exception):  # what cannot be put is no cause that is proved
                one.put(_read(kept[one.path]))
                done.append(one.path)
    return done


def _told(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        return ["tensor", kind, list(value.shape), bytes(bytes_of(value))]
    if isinstance(value, np.ndarray):
        return ["array", value.dtype.str, list(value.shape), value.tobytes()]
    if isinstance(value, np.generic):
        return ["number", value.dtype.str, [], value.tobytes()]
    if isinstance(value, _GENERATORS):
        return ["state", _plain(state_of(value))]
    return ["plain", value] if isinstance(value, _LEAVES) else ["state", _plain(value)]


def _plain(state: Any) -> Any:
    if isinstance(state, torch.Tensor | np.ndarray | np.generic):
        return {"$": _told(state)}
    if isinstance(state, Mapping):
        return {"m": [[key, _plain(value)] for key, value in state.items()]}
    if isinstance(state, tuple | list | set | collections.deque):
        letter = next(name for name, kind in _SEQUENCES.items() if isinstance(state, kind))
        return {letter: [_plain(one) for one in state]}
    is_whole = isinstance(state, int) and not isinstance(state, bool)
    return {"i": str(state)} if is_whole else {"v": state}


def _unplain(told: Any) -> Any:
    key, value = next(iter(told.items()))
    if key == "$":
        return _read(value)
    if key == "m":
        return {name: _unplain(one) for name, one in value}
    if key in _SEQUENCES:
        return _SEQUENCES[key](map(_unplain, value))
    return int(value) if key == "i" else value


def _read(told: list[Any]) -> Any:
    kind = told[0]
    if kind == "tensor":
        dtype: Any = getattr(torch, told[1])
        raw = torch.frombuffer(bytearray(told[3]), dtype=torch.uint8) if told[3] else None
        return torch.empty(told[2], dtype=dtype) if raw is None else raw.view(dtype).view(told[2])
    if kind in ("array", "number"):
        array = np.frombuffer(told[3], np.dtype(told[1])).reshape(told[2]).copy()
        return array[()] if kind == "number" else array
    return _unplain(told[1]) if kind == "state" else told[1]
