"""``flatten`` for a state that has the same structure each time, as a training state does.

At a step boundary every microsecond is the loop's. Where a dict holds nothing but tensors, and its
keys are those of the last time, its data is that of the last time too, and only the tensors are
collected; whatever else there is goes the ordinary way. What kind of tensors they are is seen when
they are planned, in ``plan.structure``.
"""

from __future__ import annotations

import collections
from typing import Any

import torch

from outlast.checkpoint.reshard import PLAIN
from outlast.checkpoint.tree import KIND, Json, encode_into, flatten

Tensors = dict[str, torch.Tensor]


class Changed(Exception):
    """The structure is another one than the last time."""


class Flattener:
    """Flattens states, and remembers of each name how that went."""

    def __init__(self) -> None:
        self._known: dict[str, _Node] = {}

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


class _Node:
    """Anything: it is encoded anew."""

    def __init__(self, name: str) -> None:
        self._name = name

    def again(self, value: Any, tensors: Tensors) -> Json:
        return encode_into(value, self._name, tensors)


class _Dict(_Node):
    """A plain dict with these keys."""

    def __init__(self, name: str, children: dict[str, _Node]) -> None:
        super().__init__(name)
        self._children = children
        self._keys = list(children)

    def again(self, value: Any, tensors: Tensors) -> Json:
        if type(value) is not dict or list(value) != self._keys:
            raise Changed
        return {key: node.again(value[key], tensors) for key, node in self._children.items()}


class _TensorDict(_Node):
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


class _TensorTable(_Node):
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


def _learn(value: Any, name: str, data: Json) -> _Node:
    if type(value) not in (dict, collections.OrderedDict) or not value:
        return _Node(name)
    if not all(isinstance(key, str) for key in value):
        return _Node(name)
    if _are_tensors(value):
        return _TensorDict(name, value, data)
    if type(value) is not dict or KIND in data:
        return _Node(name)
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
