"""Describe a tensor: its bytes in a file, its memory, its spread over workers, its inner tensors.

**Bytes.** One rank's tensors are a safetensors file that any reader of that format opens. The data
section starts at a multiple of 4 KiB (the header is padded with spaces, as the format allows) so
that it can be written in aligned blocks. Tensors follow each other without holes, as the format
demands, widest elements first, so that each is aligned to its own elements. Rejected: the
safetensors library's writer: it neither pads the header nor hashes nor fsyncs, and wants the whole
file as one buffer.

**Memory.** ``expand`` gives all elements along an axis one place, and windows over a row
(``as_strided``, ``unfold``) overlap. torch refuses to write to the former; a write to the latter in
pieces would leave what came last. Here the values are laid where the elements lie, and then
compared: such a tensor holds them only if those that share a place are equal. Of some tensors torch
keeps ``-x`` or ``conj(x)`` as a bit beside the memory of ``x``: their bytes are not their values.

**Spread.** A tensor that is spread over workers (FSDP2, tensor parallelism, both at once, HSDP) is
saved as the pieces of each worker with their offsets in the whole; a reader cuts its own pieces out
of them, whichever way it is spread itself. The rules are torch's own: DCP's planner is asked (it is
imported only when there is such a tensor: it costs a second). A tensor whose pieces torch describes
otherwise than it holds them (uneven tensor parallelism under FSDP2) is refused rather than saved
wrong. Rejected: DCP's description of a ``_StridedShard`` whose rows do not follow each other: it
names the first row only. Those pieces are worked out here.

**Subclasses.** A subclass that torch can take apart (``__tensor_flatten__``: quantized weights,
8-bit optimizer states, pairs of tensors, subclasses in subclasses) has no memory of its own: its
inner tensors are saved, under the names that it gives them, and its settings beside them as data.
It comes back by ``__tensor_unflatten__``. Guarantee: what a file names is never imported. A class
is taken from the live tensor in that place, or is one that the script has loaded; a class of
settings must belong to the same package. Rejected: pickling the settings; dequantizing (it comes
back as another type, with other bits).
"""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import itertools
import json
import math
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from outlast.checkpoint.spreads import WHOLE, Box, Spread, boxes_at, spread_over
from outlast.errors import ConfigError, StateMismatch

# --- bytes in a file ------------------------------------------------------------------------------

ALIGNMENT: Final = 4096

NAMES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
DTYPES: Final = {name: dtype for dtype, name in NAMES.items()}


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as uint8 on the CPU; its own memory where it lies there already."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor's elements, in their order; see :func:`array_of`."""
    return array_of(as_bytes(tensor)).data


class Placed(NamedTuple):
    """A tensor's place in a data section, in bytes from the section's start."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def place(tensors: Mapping[str, torch.Tensor]) -> dict[str, Placed]:
    """Lay tensors out one after the other, widest elements first, then by name.

    Raises:
        ConfigError: a dtype that the format has no name for.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in NAMES:
            raise ConfigError(f"{name} has dtype {tensor.dtype}, which safetensors cannot hold")
    placed: dict[str, Placed] = {}
    position = 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name)):
        tensor = tensors[name]
        end = position + tensor.numel() * tensor.dtype.itemsize
        placed[name] = Placed(NAMES[tensor.dtype], tuple(tensor.shape), position, end)
        position = end
    return placed


def header(placed: Mapping[str, Placed]) -> bytes:
    """The file's first bytes: length, JSON, spaces up to the alignment."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for name, tensor in placed.items():
        entries[name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": (tensor.start, tensor.end),
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    padded = -(-(len(text) + 8) // ALIGNMENT) * ALIGNMENT - 8
    return struct.pack("<Q", padded) + text.ljust(padded)


# --- memory of elements ---------------------------------------------------------------------------

_RAW: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def overlaps(tensor: torch.Tensor) -> bool:
    """Whether two elements of a plain tensor may share memory."""
    if tensor.is_contiguous() or not tensor.numel():
        return False
    axes = sorted((n, size) for n, size in zip(tensor.stride(), tensor.shape, strict=True))
    axes = [(stride, size) for stride, size in axes if size > 1]
    ends = itertools.accumulate(((size - 1) * stride for stride, size in axes), initial=0)
    return any(stride <= end for (stride, _), end in zip(axes, ends, strict=False))


def span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """From the first of a tensor's elements to its last as they lie, in elements; 0 without any."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def is_deferred(tensor: torch.Tensor) -> bool:
    """Whether its bytes are not its values: they are to be negated or conjugated."""
    return bool(tensor.is_neg() or tensor.is_conj())


def lay(values: torch.Tensor, target: torch.Tensor) -> bool:
    """Give ``target`` these values; whether it holds them then, to the bit.

    Args:
        values: of the shape and dtype of ``target``.
        target: a plain tensor whose elements may share memory.
    """
    if not target.numel():
        return True
    with torch.no_grad():
        values = values.detach().to(target.device)
        places, stored = target.detach(), values
        if places.is_neg():
            places, stored = torch._neg_view(places), -stored
        if places.is_conj():
            places, stored = places.conj(), stored.conj()
        stored = stored.resolve_conj().resolve_neg()
        for axis, stride in enumerate(target.stride()):
            if not stride:
                places, stored = places.narrow(axis, 0, 1), stored.narrow(axis, 0, 1)
        size = span(places.shape, places.stride())
        memory = raw(places.as_strided((size,), (1,)))
        index = torch.arange(size, device=memory.device).as_strided(
            places.shape, places.stride(), 0
        )
        memory.index_put_((index,), raw(stored.contiguous()))
        return holds(target, values)


def holds(target: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype have the same elements, to the bit."""
    one, other = (
        raw(tensor.detach().resolve_conj().resolve_neg().contiguous())
        for tensor in (target, values)
    )
    if one.is_complex():  # its parts are compared as they are: NaN is NaN
        one, other = (raw(torch.view_as_real(tensor).reshape(-1)) for tensor in (one, other))
    return bool(torch.equal(one, other.to(one.device)))


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's elements as integers: there is no operation that all dtypes have."""
    kind = _RAW.get(tensor.element_size())
    return tensor if kind is None else tensor.view(kind)


def array_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The memory of a plain tensor of integers as an array, of which torch takes no note.

    ``tensor.numpy()`` would forbid for good that the tensor's storage is resized, and FSDP2 does
    that to a model's own in each step. The array keeps the tensor.
    """
    width = tensor.element_size()
    memory = (ctypes.c_char * (width * span(tensor.shape, tensor.stride()))).from_address(
        tensor.data_ptr()
    )
    memory.tensor = tensor
    return np.ndarray(
        tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        buffer=memoryview(memory),
        strides=[stride * width for stride in tensor.stride()],
    )


# --- spread over workers --------------------------------------------------------------------------

LocalChunk = tuple[tuple[int, ...], tuple[int, ...], torch.Tensor]
Cuts = tuple[tuple[int, int, int], ...]  # (axis, first row, number of rows) in the local tensor
LocalPiece = tuple[tuple[int, ...], tuple[int, ...], Cuts]
PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter})  # most tensors: told at a glance


def is_spread(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a DTensor; imports nothing to find out."""
    if type(tensor) in PLAIN:
        return False
    room = sys.modules.get("torch.distributed.tensor")
    kind = getattr(room, "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def spread_as(like: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """A DTensor of the shape of ``like``, spread as it is, of which this process has ``part``."""
    from torch.distributed.tensor import DTensor

    spread: Any = like
    return DTensor.from_local(
        part,
        spread.device_mesh,
        spread.placements,
        run_check=False,
        shape=spread.shape,
        stride=spread.stride(),
    )


def local_of(tensor: torch.Tensor) -> Any:
    """This process's part of a DTensor; any other tensor itself, detached."""
    spread: Any = tensor.detach()
    return spread.to_local() if is_spread(tensor) else spread


def local_chunks(tensor: torch.Tensor) -> list[LocalChunk]:
    """The pieces of ``tensor`` that this process holds.

    Args:
        tensor: a plain tensor, or a DTensor whose placements shard or replicate it.

    Returns:
        (offsets in the whole, shape, view of this process's memory) of each piece. A plain tensor
        is one piece. A replica holds the same piece as the others of its kind. There are none where
        this process has no part; a tensor without elements is one empty piece everywhere.

    Raises:
        ConfigError: its placements cannot be saved, or do not say what it holds.
    """
    found = local_pieces(tensor)
    if not is_spread(tensor):
        return [(offsets, shape, tensor.detach()) for offsets, shape, _ in found]
    with torch.no_grad():
        local: torch.Tensor = tensor.to_local()
    if tensor.numel() == 0:
        return [(offsets, shape, local.new_empty(shape)) for offsets, shape, _ in found]
    return [(offsets, shape, view(local, cuts)) for offsets, shape, cuts in found]


def view(local: torch.Tensor, cuts: Cuts) -> torch.Tensor:
    """The piece of a local tensor that ``cuts`` stand for."""
    piece = local.detach()
    for axis, start, length in cuts:
        piece = piece.narrow(axis, start, length)
    return piece


def local_pieces(tensor: torch.Tensor) -> list[LocalPiece]:
    """As ``local_chunks``, with the cuts that make the view in its place.

    They are the same for all tensors of the same shape that are spread alike.
    """
    shape = tuple(tensor.shape)
    if not is_spread(tensor):
        return [((0,) * len(shape), shape, ())]
    spread: Any = tensor
    refusal = why_not(spread)
    if refusal:
        raise ConfigError(f"a tensor of shape {shape} {refusal}")
    if math.prod(shape) == 0:
        return [((0,) * len(shape), shape, ())]
    if spread.device_mesh.get_coordinate() is None:
        return []
    pieces = _strided(spread, shape) if _is_strided(spread) else _as_dcp_says(spread)
    pieces = [(offsets, extent) for offsets, extent in pieces if math.prod(extent)]
    return _cuts(spread, pieces, spread._local_tensor)


def mesh_spread(mesh: Any, placements: tuple[Any, ...]) -> Spread:
    """What a DTensor's mesh and placements say of where its pieces are."""
    ranks = mesh.mesh.flatten().tolist()
    return spread_over(ranks, tuple(mesh.mesh.shape), _cuts_along(placements))


def _cuts_along(placements: tuple[Any, ...]) -> tuple[tuple[int, int], ...]:
    """For each axis of a mesh, the dimension it cuts and its split factor."""
    return tuple(
        (int(one.dim), int(getattr(one, "split_factor", 1))) if hasattr(one, "dim") else (WHOLE, 1)
        for one in placements
    )


def why_not(tensor: Any) -> str:
    """Why a tensor or DTensor cannot be saved, in words that follow its name; "" if it can."""
    if type(tensor) not in PLAIN and torch.nn.parameter.is_lazy(tensor):
        return "has no shape before the first batch; run one through the model before the session"
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta or tensor.is_nested:
        return f"is a {tensor.layout} tensor on {tensor.device}; only dense ones can be saved"
    if tensor.dtype not in NAMES:
        return f"has dtype {tensor.dtype}, which safetensors cannot hold"
    if type(tensor) in PLAIN:
        return ""
    if is_spread(tensor):
        if any(placement.is_partial() for placement in tensor.placements):
            return (
                "is spread over workers as terms of a sum (Partial), which is no state yet; "
                "redistribute it to Shard or Replicate"
            )
        local = tensor._local_tensor
        if not _lies_in_memory(local):
            return (
                f"is spread over workers in pieces that are {type(local).__qualname__}s, which "
                "have no memory of their own and cannot be saved"
            )
    elif not _lies_in_memory(tensor):
        return (
            f"is a {type(tensor).__qualname__}, which has no memory of its own and no "
            "__tensor_flatten__, and cannot be saved"
        )
    return ""


def _lies_in_memory(tensor: torch.Tensor) -> bool:
    """Whether the elements lie where the tensor says, as those of some subclasses do not."""
    if type(tensor) in PLAIN or not tensor.numel():
        return True
    try:
        return bool(tensor.data_ptr())
    except RuntimeError:
        return False


def _as_dcp_says(tensor: Any) -> list[Box]:
    return [
        (tuple(int(x) for x in chunk.offsets), tuple(int(x) for x in chunk.sizes))
        for chunk in tensor.__create_chunk_list__()
    ]


def _is_strided(tensor: Any) -> bool:
    return any(hasattr(placement, "split_factor") for placement in tensor.placements)


def _strided(tensor: Any, shape: tuple[int, ...]) -> list[Box]:
    mesh = tensor.device_mesh
    return boxes_at(shape, mesh.mesh.shape, _cuts_along(tensor.placements), mesh.get_coordinate())


def _cuts(tensor: Any, pieces: list[Box], local: torch.Tensor) -> list[LocalPiece]:
    """Pieces lie in the local tensor in the order of their offsets, along each axis."""
    axes = [sorted({(o[axis], e[axis]) for o, e in pieces}) for axis in range(local.dim())]
    if [sum(length for _, length in runs) for runs in axes] != list(local.shape) and pieces:
        raise _otherwise(tensor, local)
    if not pieces and local.numel():
        raise _otherwise(tensor, local)
    places = []
    for runs in axes:
        starts = itertools.accumulate((length for _, length in runs), initial=0)
        places.append({run[0]: start for run, start in zip(runs, starts, strict=False)})
    return [
        (
            offsets,
            extent,
            tuple(
                (axis, places[axis][offset], length)
                for axis, (offset, length) in enumerate(zip(offsets, extent, strict=True))
                if length != local.shape[axis]
            ),
        )
        for offsets, extent in pieces
    ]


def _otherwise(tensor: Any, local: torch.Tensor) -> ConfigError:
    return ConfigError(
        f"a tensor of shape {tuple(tensor.shape)} is spread as {tensor.placements}, and this "
        f"worker holds a piece of shape {tuple(local.shape)} of it, which is not the piece that "
        "torch names; make its size divisible by the number of workers along each axis"
    )


# --- to be filled ---------------------------------------------------------------------------------


class FillTargets:
    """Tensors that are to be filled: those whose elements share memory first as whole ones.

    Args:
        wanted: name and tensor of each.

    Attributes:
        targets: the same, with new memory in place of such a tensor.
    """

    def __init__(self, wanted: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.targets: list[tuple[str, torch.Tensor]] = []
        self._apart: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        for name, tensor in wanted:
            whole = tensor
            if overlaps(local_of(tensor)):
                whole = fresh(tensor.shape, tensor.dtype, tensor)
                self._apart.append((name, whole, tensor))
            self.targets.append((name, whole))

    def lay(self, where: str) -> None:
        """All are filled, from ``where``: bring what was set apart to where it belongs.

        Raises:
            StateMismatch: elements that share memory were saved with several values.
        """
        for name, whole, tensor in self._apart:
            if not lay(local_of(whole), local_of(tensor)):
                raise StateMismatch(
                    f"{name} has several values in {where} where its elements share memory now (by "
                    "expand or as_strided); build it as it was"
                )


def fresh(
    shape: Sequence[int], dtype: torch.dtype, like: torch.Tensor | None = None
) -> torch.Tensor:
    """New memory for a tensor, aligned as torch aligns.

    Args:
        shape: of the whole tensor.
        dtype: its dtype.
        like: a DTensor of this shape: the new tensor is spread as it is, and this process gets
            memory for its own part.
    """
    if like is None or not is_spread(like):
        return torch.empty(tuple(shape), dtype=dtype)
    spread: Any = like
    local = spread.to_local()
    return spread_as(like, torch.empty(local.shape, dtype=dtype, device=local.device))


# --- subclasses -----------------------------------------------------------------------------------

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


def parts_difference(saved: Any, live: torch.Tensor, of: Callable[[Any], tuple[Any, Any]]) -> str:
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
        problem = parts_difference(value, now.inner[name], of)
        if problem:
            return f"{problem}, in {name}"
    return ""


def paired_parts(saved: Any, live: torch.Tensor) -> Iterator[tuple[Any, torch.Tensor]]:
    """What was saved and the live tensor that it fills, for each plain tensor."""
    if not isinstance(saved, Parts):
        yield saved, live
        return
    now = take_apart(live)
    for name, value in saved.inner.items():
        yield from paired_parts(value, now.inner[name])


def memories(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that ``tensor`` lies in: itself, its local part, or its inner ones."""
    if is_subclass(tensor):
        return [one for inner in take_apart(tensor).inner.values() for one in memories(inner)]
    return [local_of(tensor)]


def storages(tensor: torch.Tensor) -> list[int]:
    """Where the memory begins that a tensor, or those that it is made of, lies in."""
    return [int(one.untyped_storage().data_ptr()) for one in memories(tensor)]


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
