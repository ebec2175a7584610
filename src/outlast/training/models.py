"""A model's ``state_dict`` for a model of the same modules each time, as one in training is.

torch walks the modules anew each time, which at a step boundary is a good part of what a save costs
the loop. Where nothing but stock modules without hooks is found, that walk has one outcome while
the modules hold the same names, and then only the tensors are collected. Every dict that torch's
walk reads is compared; whatever else there is goes torch's way.
"""

from __future__ import annotations

import itertools
import operator
from collections import OrderedDict
from typing import Any, Final

import torch
from torch.nn import Module

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
