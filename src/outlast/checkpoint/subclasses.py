"""Tensor subclasses as plain tensors and data, and back.

A subclass that torch can take apart (``__tensor_flatten__``: quantized weights, 8-bit optimizer
states, pairs of tensors, subclasses in subclasses) has no memory of its own: its inner tensors are
saved, under the names that it gives them, and its settings beside them as data. It comes back by
``__tensor_unflatten__`` as what it was.

Guarantees: what a file names is never imported. A class is taken from the live tensor in that
place, or is one that the script has loaded; a class of settings must belong to the same package.
Rejected: pickling the settings; dequantizing (it comes back as another type, with other bits).
"""

from __future__ import annotations

import dataclasses
import enum
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch

from outlast.checkpoint.references import local_of
from outlast.checkpoint.reshard import PLAIN, is_spread
from outlast.errors import ConfigError

_SEPARATOR: Final = ":"


@dataclasses.dataclass(frozen=True)
class Parts:
    """A tensor of a subclass, taken apart.

    Attributes:
        kind: its class, as ``module:qualname``.
        inner: the names it gives its inner tensors → what is known of them: tensors, other parts,
            or what stands for a tensor that has not been read.
        settings: what ``__tensor_flatten__`` says besides, as ``describe`` gives it.
        shape: of the whole.
        strides: of the whole, in elements.
        dtype: of the whole, without "torch.".
    """

    kind: str
    inner: Mapping[str, Any]
    settings: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    def with_inner(self, change: Callable[[Any], Any]) -> Parts:
        """The same with ``change`` of each inner tensor."""
        inner = {name: change(value) for name, value in self.inner.items()}
        return dataclasses.replace(self, inner=inner)

    def leaves(self) -> Iterator[Any]:
        """What stands for tensors, in subclasses in subclasses too."""
        for value in self.inner.values():
            if isinstance(value, Parts):
                yield from value.leaves()
            else:
                yield value


def is_subclass(tensor: torch.Tensor) -> bool:
    """Whether torch can take ``tensor`` apart; a DTensor is spread, and no such one."""
    kind = type(tensor)
    return (
        kind not in PLAIN
        and hasattr(kind, "__tensor_flatten__")
        and hasattr(kind, "__tensor_unflatten__")
        and not is_spread(tensor)
    )


def take_apart(tensor: Any) -> Parts:
    """The inner tensors of ``tensor``, as they lie there, and what else it takes to build it.

    Raises:
        ConfigError: it cannot be taken apart into tensors and data; says why, to follow its name.
    """
    kind = type(tensor)
    try:
        names, settings = tensor.__tensor_flatten__()
        inner = {str(name): getattr(tensor, name) for name in names}
    except Exception as error:  # noqa: BLE001 - somebody else's code
        raise ConfigError(
            f"is a {kind.__qualname__}, which does not let itself be taken apart: "
            f"{type(error).__name__}: {error}"
        ) from None
    if not all(isinstance(value, torch.Tensor) for value in inner.values()):
        raise ConfigError(f"is a {kind.__qualname__} whose inner tensors are none")
    shape, strides = tuple(tensor.shape), tuple(tensor.stride()) if _has_strides(tensor) else ()
    if not all(type(number) is int for number in (*shape, *strides)):
        raise ConfigError(f"is a {kind.__qualname__} of a shape that is no numbers ({shape})")
    return Parts(
        kind=_name_of(kind),
        inner=inner,
        settings=describe(settings, kind),
        shape=shape,
        strides=strides,
        dtype=str(tensor.dtype).removeprefix("torch."),
    )


def put_together(parts: Parts, like: Any = None) -> Any:
    """The tensor that ``parts``, of tensors, is of.

    Args:
        parts: taken apart.
        like: a live tensor in that place, if there is one: it says which class is meant.

    Raises:
        ValueError: the class is not loaded, or is none that torch can put together.
    """
    inner = {
        name: put_together(value) if isinstance(value, Parts) else value
        for name, value in parts.inner.items()
    }
    if like is not None and _name_of(type(like)) == parts.kind:
        kind: Any = type(like)
    else:
        kind = _loaded(parts.kind)
    if not (isinstance(kind, type) and issubclass(kind, torch.Tensor)):
        raise ValueError(f"{parts.kind} is no class of tensors")
    if not hasattr(kind, "__tensor_unflatten__"):
        raise ValueError(f"{parts.kind} cannot be put together")
    settings = _settings_of(parts.settings, kind)
    with torch.no_grad():
        made = kind.__tensor_unflatten__(inner, settings, torch.Size(parts.shape), parts.strides)
    if type(made) is not kind:
        raise ValueError(f"{parts.kind} was put together as a {type(made).__qualname__}")
    return made


def difference(saved: Any, live: torch.Tensor, of: Callable[[Any], tuple[Any, Any]]) -> str:
    """Why a live tensor cannot be filled with what was saved; "" if it can.

    Args:
        saved: ``Parts``, or what stands for a plain tensor.
        live: the tensor in that place.
        of: shape and dtype of what stands for a plain tensor.
    """
    if not isinstance(saved, Parts):
        if is_subclass(live):
            return f"was a plain tensor and is a {type(live).__qualname__} now"
        is_now = tuple(live.shape), live.dtype
        for what, old, new in zip(("shape", "dtype"), of(saved), is_now, strict=True):
            if old != new:
                return f"had {what} {old} and has {new} now"
        return ""
    if not is_subclass(live):
        return f"was a {_short(saved.kind)} and is a plain tensor now"
    now = take_apart(live)
    if now.kind != saved.kind:
        return f"was a {saved.kind} and is a {now.kind} now"
    for what, old, new in (
        ("shape", saved.shape, now.shape),
        ("dtype", saved.dtype, now.dtype),
        ("settings", saved.settings, now.settings),
        ("inner tensors", sorted(saved.inner), sorted(now.inner)),
    ):
        if old != new:
            return f"had {what} {old} and has {new} now"
    for name, value in saved.inner.items():
        problem = difference(value, now.inner[name], of)
        if problem:
            return f"{problem}, in {name}"
    return ""


def pairs(saved: Any, live: torch.Tensor) -> Iterator[tuple[Any, torch.Tensor]]:
    """What was saved and the live tensor that it fills, for each plain tensor."""
    if not isinstance(saved, Parts):
        yield saved, live
        return
    now = take_apart(live)
    for name, value in saved.inner.items():
        yield from pairs(value, now.inner[name])


def memories(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that ``tensor`` lies in: itself, its local part, or its inner ones."""
    if is_subclass(tensor):
        return [one for inner in take_apart(tensor).inner.values() for one in memories(inner)]
    return [local_of(tensor)]


# --- settings ------------------------------------------------------------------------------------

# Data that nests; what else there is must be one of these or a leaf of ``tree``.
_LEAVES: Final = (bool, int, float, str, bytes, complex, type(None), torch.dtype, torch.device)


class Described(tuple[Any, ...]):
    """An enumeration's member or a record, as (class, "enum" or "record", name or fields)."""

    __slots__ = ()


def describe(settings: Any, kind: type) -> Any:
    """``settings`` with a ``Described`` in place of each object that is no plain data.

    Raises:
        ConfigError: something is neither data, nor an enumeration, nor a record of them.
    """
    if isinstance(settings, enum.Enum):
        return Described((_name_of(type(settings)), "enum", settings.name))
    if isinstance(settings, _LEAVES) or type(settings) is torch.Size:
        return settings
    if isinstance(settings, dict) and type(settings) is dict:
        return {key: describe(value, kind) for key, value in settings.items()}
    if type(settings) in (list, tuple):
        return type(settings)(describe(value, kind) for value in settings)
    fields = _fields(settings)
    if fields is not None:
        inner = {name: describe(value, kind) for name, value in fields.items()}
        return Described((_name_of(type(settings)), "record", inner))
    raise ConfigError(
        f"is a {kind.__qualname__} whose settings hold a {_name_of(type(settings))}, which cannot "
        "be saved as data"
    )


def _fields(value: Any) -> dict[str, Any] | None:
    """What a record consists of, if that is all it is."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    return None


def _settings_of(described: Any, kind: type) -> Any:
    """What ``describe`` was given.

    Raises:
        ValueError: a class of it is not loaded, or is not of the subclass's own package.
    """
    if isinstance(described, Described):
        name, what, content = described
        package = kind.__module__.partition(".")[0]
        if name.partition(_SEPARATOR)[0].partition(".")[0] != package:
            raise ValueError(f"{name} is not of the package {package}")
        found = _loaded(name)
        if what == "enum" and isinstance(found, type) and issubclass(found, enum.Enum):
            return found[content]
        is_record = dataclasses.is_dataclass(found) or hasattr(found, "_fields")
        if what != "record" or not isinstance(found, type) or not is_record:
            raise ValueError(f"{name} is no {what}")
        return found(**{key: _settings_of(value, kind) for key, value in content.items()})
    if type(described) is dict:
        return {key: _settings_of(value, kind) for key, value in described.items()}
    if type(described) in (list, tuple):
        return type(described)(_settings_of(value, kind) for value in described)
    return described


# --- names of classes ----------------------------------------------------------------------------


def _name_of(kind: type) -> str:
    return f"{kind.__module__}{_SEPARATOR}{kind.__qualname__}"


def _short(name: str) -> str:
    return name.rpartition(".")[2].rpartition(_SEPARATOR)[2]


def _loaded(name: str) -> Any:
    """The class of that name in the modules that are loaded: nothing is imported.

    Raises:
        ValueError: there is none.
    """
    module, _, path = name.partition(_SEPARATOR)
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = vars(found).get(part) if isinstance(found, type | type(sys)) else None
    if not isinstance(found, type) or _name_of(found) != name:
        raise ValueError(f"{name} is not loaded; import {module} before the session begins")
    return found


def _has_strides(tensor: torch.Tensor) -> bool:
    return bool(tensor.layout == torch.strided)
