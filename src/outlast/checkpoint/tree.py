"""Turn nested state into data and named tensors, and back.

Tensors go to the shard under dotted names, the rest becomes JSON. JSON has no tuples, bytes,
non-string keys, NaN or tensors. Each of those becomes an object with the single-letter key ``$``
that names its kind; a dict that itself has a key starting with ``$`` is written as pairs. Nothing
else can be decoded into code: this is why there is no pickle.

A training state has the same structure each time, and at a step boundary every microsecond is the
loop's. So a ``Flattener`` remembers dicts that hold nothing but tensors: while their keys stay the
same, their data does too, and only the tensors are collected. Everything else is flattened anew.
The kinds of the tensors are looked at when they are planned (``plan.structure``).

Whoever wants the states of all ranks as one puts their small states together (``MergedState``).
"""

from __future__ import annotations

import base64
import collections
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from outlast.checkpoint.manifest import TensorEntry
from outlast.checkpoint.tensors import (
    DTYPES,
    PLAIN,
    Described,
    Parts,
    is_subclass,
    put_together,
    take_apart,
    why_not,
)
from outlast.errors import CheckpointInvalid, ConfigError

# --- any state ------------------------------------------------------------------------------------

KIND: Final = "$"
_PARTS: Final = "subclass"
Json = Any


class PlainData(dict[str, Any]):
    """What is data as it is, without tensors, and is not changed any more: it is not gone through.

    It comes back as a dict.
    """


_FACTORIES: Final = {"int": int, "float": float, "list": list, "dict": dict, "set": set}
_AS_THEY_ARE: Final = frozenset({bool, int, str, type(None), PlainData})
DTYPE_OF: Final = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}


def flatten(state: Any, name: str) -> tuple[Json, dict[str, torch.Tensor]]:
    """Split ``state`` into JSON-able data and tensors.

    Args:
        state: nested dicts, lists, tuples, sets, numbers, strings, bytes, arrays, tensors.
        name: prefix of every tensor's name.

    Returns:
        The data, in which each tensor is replaced by its name, and name → the tensor itself.

    Raises:
        ConfigError: something in ``state`` is neither data nor a tensor; names it.
    """
    tensors: dict[str, torch.Tensor] = {}
    return encode_into(state, name, tensors), tensors


def encode_into(state: Any, name: str, tensors: dict[str, torch.Tensor]) -> Json:
    """The data of ``state``; its tensors are added to ``tensors``.

    Raises:
        ConfigError: as ``flatten``.
    """
    try:
        return _encode(state, name, tensors)
    except RecursionError:
        raise ConfigError(f"{name} is nested too deeply to be saved, or holds itself") from None


def unflatten(
    data: Json,
    tensors: Mapping[str, torch.Tensor],
    whole: Callable[[Parts], Any] = put_together,
) -> Any:
    """The state that ``flatten`` split; ``tensors`` must hold every name in ``data``.

    Args:
        data: what ``flatten`` gave.
        tensors: name → tensor.
        whole: makes a tensor of a subclass of its parts, or whatever else stands for it.

    Raises:
        ValueError, KeyError, TypeError: ``data`` is not what ``flatten`` writes.
    """

    def tensor(leaf: Mapping[str, Any]) -> torch.Tensor:
        found = tensors[leaf["name"]]
        # What was stored in a narrower dtype than it had comes back in its own.
        return found.to(DTYPE_OF[leaf["dtype"]]) if "dtype" in leaf else found

    return replace(decode(data, tensor), Parts, whole) if _has_parts(data) else decode(data, tensor)


def decode(data: Json, leaf: Callable[[Mapping[str, Any]], Any]) -> Any:
    """The state that ``flatten`` split, with ``leaf`` of its data in place of each tensor.

    In place of a tensor of a subclass there are its ``Parts``.

    Raises:
        ValueError, KeyError, TypeError: ``data`` is not what ``flatten`` writes.
    """
    if isinstance(data, list):
        return [decode(value, leaf) for value in data]
    if not isinstance(data, dict):
        return data
    if KIND not in data:
        return {key: decode(value, leaf) for key, value in data.items()}
    kind = data[KIND]
    if kind == "tensor":
        return leaf(data)
    if kind not in _DECODERS:
        raise ValueError(f"{kind!r} is not a kind of data")
    return _DECODERS[kind](data, lambda value: decode(value, leaf))


def replace(state: Any, kind: type, by: Callable[[Any], Any]) -> Any:
    """``state`` with ``by`` of it in place of each value of type ``kind`` that containers hold."""
    if isinstance(state, kind):
        return by(state)
    if isinstance(state, Parts):
        return state.with_inner(lambda value: replace(value, kind, by))
    if isinstance(state, dict):
        changed = {key: replace(value, kind, by) for key, value in state.items()}
        if isinstance(state, collections.defaultdict):
            return collections.defaultdict(state.default_factory, changed)
        return changed if type(state) is dict else type(state)(changed)
    if isinstance(state, collections.deque):
        return collections.deque((replace(item, kind, by) for item in state), state.maxlen)
    if type(state) in (list, tuple):
        return type(state)(replace(item, kind, by) for item in state)
    return state


def mark_narrow(data: Json, names: Collection[str], dtype: str) -> None:
    """Note at each tensor of ``names`` that it is to be ``dtype`` again when it is read."""
    if isinstance(data, list):
        for value in data:
            mark_narrow(value, names, dtype)
    elif isinstance(data, dict):
        if data.get(KIND) == "tensor":
            if data["name"] in names:
                data["dtype"] = dtype
        else:
            mark_narrow(list(data.values()), names, dtype)


def tensor_names(data: Json) -> Iterable[str]:
    """Names of the tensors that ``data`` refers to."""
    if isinstance(data, list):
        for value in data:
            yield from tensor_names(value)
    elif isinstance(data, dict):
        if data.get(KIND) == "tensor":
            yield data["name"]
        else:
            yield from tensor_names(list(data.values()))


def names_in_parts(data: Json) -> Iterable[str]:
    """Names of the tensors that are parts of one of a subclass."""
    if isinstance(data, list):
        for value in data:
            yield from names_in_parts(value)
    elif isinstance(data, dict):
        if data.get(KIND) == _PARTS:
            yield from tensor_names(data["inner"])
        else:
            yield from names_in_parts(list(data.values()))


def _has_parts(data: Json) -> bool:
    return next(iter(names_in_parts(data)), None) is not None


def _encode(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Json:
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, name, tensors)
    if type(value) in _AS_THEY_ARE:
        return value
    if isinstance(value, float) and not isinstance(value, np.generic):
        sign = "-" if math.copysign(1.0, value) < 0 else ""  # repr leaves out that of a NaN
        finite = math.isfinite(value)
        return value if finite else {KIND: "float", "value": sign + repr(abs(float(value)))}
    if isinstance(value, dict):
        return _encode_dict(value, name, tensors)
    if type(value) is list:
        return _encode_items(value, name, tensors)
    if type(value) in _SEQUENCES:
        items = sorted(value, key=repr) if isinstance(value, set | frozenset) else list(value)
        return {KIND: _SEQUENCES[type(value)], "items": _encode_items(items, name, tensors)}
    if type(value) is collections.deque:
        items = _encode_items(list(value), name, tensors)
        return {KIND: "deque", "maxlen": value.maxlen, "items": items}
    return _encode_leaf(value, name)


def _encode_items(items: list[Any], name: str, tensors: dict[str, torch.Tensor]) -> list[Json]:
    if set(map(type, items)) <= _AS_THEY_ARE:  # names of a thousand parameters, say
        return items.copy()
    return [_encode(item, f"{name}.{index}", tensors) for index, item in enumerate(items)]


_SEQUENCES: Final[dict[type, str]] = {
    tuple: "tuple",
    set: "set",
    frozenset: "frozenset",
    torch.Size: "size",
}


def _encode_tensor(value: torch.Tensor, name: str, tensors: dict[str, torch.Tensor]) -> Json:
    if type(value) not in PLAIN and is_subclass(value):
        return _encode_parts(value, name, tensors)
    refusal = why_not(value)
    if refusal:
        raise ConfigError(f"{name} {refusal}")
    unique, serial = name, 1
    while unique in tensors:  # a key with a dot in it can spell another path
        unique, serial = f"{name}~{serial}", serial + 1
    tensors[unique] = value
    return {KIND: "tensor", "name": unique}


def _encode_parts(value: torch.Tensor, name: str, tensors: dict[str, torch.Tensor]) -> Json:
    try:
        parts = take_apart(value)
    except ConfigError as error:
        raise ConfigError(f"{name} {error}") from None
    return {
        KIND: _PARTS,
        "type": parts.kind,
        "inner": {
            inner: _encode_tensor(tensor, f"{name}.{inner}", tensors)
            for inner, tensor in parts.inner.items()
        },
        "settings": _encode(parts.settings, f"{name} (settings)", {}),
        "shape": list(parts.shape),
        "strides": list(parts.strides),
        "dtype": parts.dtype,
    }


def _parts(data: Json, inner: Callable[[Json], Any]) -> Parts:
    return Parts(
        kind=str(data["type"]),
        inner={str(name): inner(value) for name, value in data["inner"].items()},
        settings=inner(data["settings"]),
        shape=tuple(data["shape"]),
        strides=tuple(data["strides"]),
        dtype=str(data["dtype"]),
    )


def _encode_dict(value: dict[Any, Any], name: str, tensors: dict[str, torch.Tensor]) -> Json:
    if type(value) is dict and not any(type(key) is not str or key[:1] == KIND for key in value):
        return {  # as next to all are, at each step boundary
            key: inner if type(inner) in _AS_THEY_ARE else _encode(inner, f"{name}.{key}", tensors)
            for key, inner in value.items()
        }
    encoded = [(key, _encode(inner, f"{name}.{key}", tensors)) for key, inner in value.items()]
    plain = type(value) is dict
    if plain and all(isinstance(key, str) and not key.startswith(KIND) for key, _ in encoded):
        return dict(encoded)
    pairs = [[_encode(key, f"{name} (key)", tensors), inner] for key, inner in encoded]
    if plain:
        return {KIND: "dict", "pairs": pairs}
    if type(value) is collections.OrderedDict:
        return {KIND: "ordered", "pairs": pairs}
    if type(value) is collections.Counter:
        return {KIND: "counter", "pairs": pairs}
    if type(value) is collections.defaultdict:
        factory = getattr(value.default_factory, "__name__", None)
        if value.default_factory is None or _FACTORIES.get(str(factory)) is value.default_factory:
            return {KIND: "default", "factory": factory, "pairs": pairs}
    raise ConfigError(_not_data(value, name))


def _encode_leaf(value: Any, name: str) -> Json:
    if isinstance(value, bytes | bytearray):
        return {KIND: type(value).__name__, "value": base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        array = np.ascontiguousarray(value)
        return {
            KIND: "array" if isinstance(value, np.ndarray) else "scalar",
            "dtype": array.dtype.str,
            "shape": list(np.shape(value)),
            "value": base64.b64encode(array.tobytes()).decode(),
        }
    if isinstance(value, Described):
        kind, what, content = value
        return {KIND: what, "type": kind, "value": _encode(content, name, {})}
    if isinstance(value, complex):
        return {KIND: "complex", "value": [repr(value.real), repr(value.imag)]}
    if isinstance(value, torch.dtype):
        return {KIND: "dtype", "value": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {KIND: "device", "value": str(value)}
    raise ConfigError(_not_data(value, name))


def _not_data(value: Any, name: str) -> str:
    return (
        f"{name} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be saved "
        "as data; keep numbers, strings, tensors and containers of them in state_dict()"
    )


def _array(data: Json) -> np.ndarray[Any, Any]:
    flat = np.frombuffer(base64.b64decode(data["value"]), dtype=np.dtype(data["dtype"]))
    return flat.reshape(data["shape"]).copy()


Decode = Callable[[Json, Callable[[Json], Any]], Any]


def _pairs(data: Json, inner: Callable[[Json], Any]) -> list[tuple[Any, Any]]:
    return [(inner(key), inner(value)) for key, value in data["pairs"]]


_DECODERS: Final[dict[str, Decode]] = {
    "float": lambda data, _: float(data["value"]),
    "complex": lambda data, _: complex(*(float(part) for part in data["value"])),
    "bytes": lambda data, _: base64.b64decode(data["value"]),
    "bytearray": lambda data, _: bytearray(base64.b64decode(data["value"])),
    "array": lambda data, _: _array(data),
    "scalar": lambda data, _: _array(data)[()],
    _PARTS: _parts,
    "enum": lambda data, inner: Described((data["type"], "enum", inner(data["value"]))),
    "record": lambda data, inner: Described((data["type"], "record", inner(data["value"]))),
    "dtype": lambda data, _: DTYPE_OF[data["value"]],
    "device": lambda data, _: torch.device(data["value"]),
    "tuple": lambda data, inner: tuple(inner(item) for item in data["items"]),
    "set": lambda data, inner: {inner(item) for item in data["items"]},
    "frozenset": lambda data, inner: frozenset(inner(item) for item in data["items"]),
    "deque": lambda data, inner: collections.deque(
        (inner(item) for item in data["items"]), data["maxlen"]
    ),
    "size": lambda data, inner: torch.Size(inner(item) for item in data["items"]),
    "dict": lambda data, inner: dict(_pairs(data, inner)),
    "ordered": lambda data, inner: collections.OrderedDict(_pairs(data, inner)),
    "counter": lambda data, inner: collections.Counter(dict(_pairs(data, inner))),
    "default": lambda data, inner: collections.defaultdict(
        _FACTORIES[data["factory"]] if data["factory"] else None, _pairs(data, inner)
    ),
}


def without_dtypes(data: Any, found: dict[str, torch.dtype]) -> Any:
    """``data`` as if each tensor had been stored in the dtype it had; those go to ``found``."""
    if isinstance(data, list):
        return [without_dtypes(value, found) for value in data]
    if not isinstance(data, dict):
        return data
    if data.get(KIND) == "tensor" and "dtype" in data:
        dtype = getattr(torch, str(data["dtype"]), None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{data['dtype']!r} is not a dtype")
        found[str(data["name"])] = dtype
        return {key: value for key, value in data.items() if key != "dtype"}
    return {key: without_dtypes(value, found) for key, value in data.items()}


# --- a state of the same structure as last time ---------------------------------------------------

Tensors = dict[str, torch.Tensor]


class Changed(Exception):
    """The structure is another one than the last time."""


class Flattener:
    """Flattens states, and remembers of each name how that went."""

    def __init__(self) -> None:
        self._known: dict[str, _AnyValue] = {}

    def __call__(self, state: Any, name: str) -> tuple[Json, Tensors]:
        """As :func:`outlast.checkpoint.tree.flatten`; the data may be shared with the last one's.

        Raises:
            ConfigError: something in ``state`` is neither data nor a tensor; names it.
        """
        known = self._known.get(name)
        if known is not None:
            tensors: Tensors = {}
            try:
                return known.again(state, tensors), tensors
            except Changed:
                del self._known[name]
        data, tensors = flatten(state, name)
        self._known[name] = _learn(state, name, data)
        return data, tensors


class _AnyValue:
    """Anything: it is encoded anew."""

    def __init__(self, name: str) -> None:
        self._name = name

    def again(self, value: Any, tensors: Tensors) -> Json:
        return encode_into(value, self._name, tensors)


class _Dict(_AnyValue):
    """A plain dict with these keys."""

    def __init__(self, name: str, children: dict[str, _AnyValue]) -> None:
        super().__init__(name)
        self._children = children
        self._keys = list(children)

    def again(self, value: Any, tensors: Tensors) -> Json:
        if type(value) is not dict or list(value) != self._keys:
            raise Changed
        return {key: node.again(value[key], tensors) for key, node in self._children.items()}


class _TensorDict(_AnyValue):
    """A dict of tensors, as a model's state is."""

    def __init__(self, name: str, value: dict[str, Any], data: Json) -> None:
        super().__init__(name)
        self._type = type(value)
        self._keys = list(value)
        self._names = _names(data)
        self._data = data

    def again(self, value: Any, tensors: Tensors) -> Json:
        if type(value) is not self._type or list(value) != self._keys:
            raise Changed
        _collect(self._names, list(value.values()), tensors)
        return self._data


class _TensorTable(_AnyValue):
    """A dict of dicts of tensors, as an optimizer's state is."""

    def __init__(self, name: str, value: dict[str, Any], data: Json) -> None:
        super().__init__(name)
        self._keys = list(value)
        self._slots = list(map(tuple, value.values()))
        self._names = [name for inner in data.values() for name in _names(inner)]
        self._data = data

    def again(self, value: Any, tensors: Tensors) -> Json:
        if type(value) is not dict or list(value) != self._keys:
            raise Changed
        rows = value.values()
        if set(map(type, rows)) != {dict} or list(map(tuple, rows)) != self._slots:
            raise Changed
        _collect(self._names, [tensor for row in rows for tensor in row.values()], tensors)
        return self._data


def _collect(names: list[str], values: list[Any], tensors: Tensors) -> None:
    if not set(map(type, values)) <= PLAIN:
        raise Changed
    tensors.update(zip(names, values, strict=True))


def _learn(value: Any, name: str, data: Json) -> _AnyValue:
    if type(value) not in (dict, collections.OrderedDict) or not value:
        return _AnyValue(name)
    if not all(isinstance(key, str) for key in value):
        return _AnyValue(name)
    if _are_tensors(value):
        return _TensorDict(name, value, data)
    if type(value) is not dict or KIND in data:
        return _AnyValue(name)
    rows = list(value.values())
    if all(type(row) is dict and row and _are_tensors(row) for row in rows) and not any(
        KIND in inner for inner in data.values()
    ):
        return _TensorTable(name, value, data)
    return _Dict(name, {k: _learn(v, f"{name}.{k}", data[k]) for k, v in value.items()})


def _are_tensors(value: dict[str, Any]) -> bool:
    return all(type(inner) in PLAIN for inner in value.values())


def _names(data: Json) -> list[str]:
    """Names of the tensors in an encoded dict of tensors, in order."""
    leaves = [leaf for _, leaf in data["pairs"]] if KIND in data else list(data.values())
    return [leaf["name"] for leaf in leaves]


# --- several ranks' small states as one -----------------------------------------------------------


class MergedState(NamedTuple):
    """Several ranks' small states as one.

    Attributes:
        step: the checkpoint's step.
        data: key → data in which tensors are named; none of them tells a dtype of its own.
        entries: name of a tensor in ``data`` → its dtype and shape, and where its bytes are as far
            as that is known (see ``Checkpoint.locate``).
        stored: name → the name that the tensor has in the checkpoint.
        dtypes: name → the dtype it had, where it was stored in a narrower one.
    """

    step: int
    data: dict[str, Any]
    entries: dict[str, TensorEntry]
    stored: dict[str, str]
    dtypes: dict[str, torch.dtype]

    def build(self, make: Callable[[str, TensorEntry], torch.Tensor]) -> dict[str, Any]:
        """The states themselves, each tensor made by ``make(name, entry)``.

        Raises:
            CheckpointInvalid: ``data`` is not what ``tree.flatten`` writes.
        """
        tensors = {name: make(name, entry) for name, entry in self.entries.items()}
        try:
            return {key: unflatten(value, tensors, _inner) for key, value in self.data.items()}
        except (ValueError, KeyError, TypeError) as error:
            raise not_understood(self.step, error) from None

    def dtype(self, name: str) -> torch.dtype:
        """The dtype that the tensor ``name`` had when it was saved."""
        return self.dtypes.get(name, DTYPES[self.entries[name].dtype])


def _inner(parts: Parts) -> dict[str, Any]:
    """A tensor of a subclass, for whoever does not have its class: the tensors inside of it."""
    inner = parts.inner.items()
    return {name: _inner(one) if isinstance(one, Parts) else one for name, one in inner}


def not_understood(step: int, error: Exception) -> CheckpointInvalid:
    """What to raise where a small state is not what ``flatten`` writes."""
    return CheckpointInvalid(step, f"a small state is not understood: {error!r}")


def add_to(base: dict[str, Any], more: dict[str, Any], take: Callable[[Any], Any]) -> None:
    """Add to ``base`` what only ``more`` has; what both have stays as it is in ``base``."""
    for key, value in more.items():
        if key not in base:
            base[key] = take(value)
        elif isinstance(value, dict) and isinstance(base[key], dict) and KIND not in value:
            add_to(base[key], value, take)
        elif key == "param_groups" and isinstance(value, list) and len(value) == len(base[key]):
            for ours, theirs in zip(base[key], value, strict=True):
                ours["params"] += [name for name in theirs["params"] if name not in ours["params"]]
