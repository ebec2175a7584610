"""Which part of a tensor is whose: the pieces this process holds, and where they lie in the whole.

A tensor that is spread over workers (FSDP2, tensor parallelism, both at once, HSDP) is saved as the
pieces of each worker with their offsets in the whole; a reader cuts what it wants out of them,
whichever way it is spread itself. The rules of who holds what are torch's own: DCP's planner is
asked (it is imported only when there is such a tensor: it costs a second).

What can go wrong: a tensor whose pieces torch describes otherwise than it holds them (uneven tensor
parallelism under FSDP2) is refused in words rather than saved wrong.

Rejected: DCP's description of a ``_StridedShard`` whose rows do not follow each other: it names the
first row only. Those pieces are worked out here.
"""

from __future__ import annotations

import itertools
import math
import sys
from typing import Any, Final

import torch

from outlast.checkpoint.shard import NAMES
from outlast.checkpoint.spreads import WHOLE, Box, Spread, boxes_at, spread_over
from outlast.errors import ConfigError

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
