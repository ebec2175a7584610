"""Which rank writes what, and where each piece lies in its file.

A piece is what one process holds of a tensor: all of it, or one of its chunks. Pieces that several
ranks hold are written by one of them each, so that a data-parallel group shares the work; the
others only hash theirs, and the commit compares. What is thought to be a replica and is not is
found by that comparison, and belongs to its rank from then on.

The plan is worked out once for a structure (names, shapes, dtypes) and holds until it changes.
Who writes what is worked out in ``shares``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import torch

from outlast.checkpoint.manifest import (
    BLOCK_BYTES,
    Chunk,
    TensorEntry,
    own_name,
    shard_file,
)
from outlast.checkpoint.parts import PLAIN, Contents, Holding, Slab, num_elements
from outlast.checkpoint.reshard import PLAIN as PLAIN_TYPES
from outlast.checkpoint.reshard import LocalPiece, is_spread, local_pieces, mesh_spread, why_not
from outlast.checkpoint.shard import DTYPES, NAMES, Placed, header
from outlast.checkpoint.spreads import Spread, pieces_at
from outlast.errors import ConfigError

OWN: Final = "outlast"  # the key whose tensors always belong to their rank: random states, data


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """What a rank holds of one tensor; equal pieces of two ranks are thought to be replicas."""

    name: str
    dtype: str
    whole: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def key(self) -> str:
        """One word for it."""
        return f"{self.name}[{','.join(map(str, self.offsets))}]"


class Where(NamedTuple):
    """Which part of this process's memory of a tensor a piece is."""

    number: int  # of the piece among those of its tensor
    cuts: tuple[tuple[int, int, int], ...]  # (axis, first row, number of rows); none: all of it
    spread: Spread | None = None  # of the tensor over ranks, as torch names it


Held = tuple[Piece, Where]
# What a tensor is besides its bytes, as far as a plan depends on it.
KIND: Final = operator.attrgetter("dtype", "shape", "layout", "is_meta", "is_quantized")


class Check(NamedTuple):
    """A piece that another rank writes: only its digest is reported."""

    piece: Piece
    where: Where
    dtype: torch.dtype  # as it is stored


class Write(NamedTuple):
    """A piece in its place in this rank's file."""

    piece: Piece
    where: Where
    dtype: torch.dtype  # as it is stored
    start: int
    end: int
    shared: bool  # others hold it too: its digest is reported
    parts: tuple[tuple[int, int], ...]  # (start, size in bytes), cut where blocks of the file end


class Plan(NamedTuple):
    """What one rank does of a save.

    Attributes:
        writes: pieces that it writes, in the order in which they lie in its file.
        checks: pieces that another rank writes; this one hashes its own.
        head: the file's first bytes.
        size: the file's size in bytes; 0 if there is nothing to write.
        tensors: what the manifest says of them.
        own: names of the tensors that are this rank's own.
        contents: what this rank's part says of all that it holds.
    """

    writes: tuple[Write, ...]
    checks: tuple[Check, ...]
    head: bytes
    size: int
    tensors: dict[str, TensorEntry]
    own: tuple[str, ...]
    contents: Contents


def structure(tensors: Mapping[str, torch.Tensor], narrow: Collection[str] = ()) -> list[Held]:
    """The pieces this process holds, and where.

    Args:
        tensors: name → tensor or DTensor.
        narrow: names of those that are stored in bfloat16.

    Raises:
        ConfigError: a tensor that cannot be saved; names it.
    """
    found: list[Held] = []
    # torch takes its time to say how a tensor is spread
    known: dict[Any, tuple[list[LocalPiece], Spread | None]] = {}
    spreads: dict[Any, Spread] = {}
    for name, tensor in tensors.items():
        refusal = why_not(tensor)
        if refusal:
            raise ConfigError(f"{name} {refusal}")
        dtype = torch.bfloat16 if name in narrow else tensor.dtype
        if dtype not in NAMES:
            raise ConfigError(f"{name} has dtype {tensor.dtype}, which safetensors cannot hold")
        key = spread_of(tensor)
        if key not in known:
            try:
                pieces = local_pieces(tensor)
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from None
            known[key] = pieces, _spread(tensor, pieces, spreads)
        whole = tuple(tensor.shape)
        pieces, spread = known[key]
        for index, (offsets, shape, cuts) in enumerate(pieces):
            where = Where(index, cuts, spread)
            found.append((Piece(name, NAMES[dtype], whole, offsets, shape), where))
    return found


def _spread(
    tensor: torch.Tensor, pieces: Sequence[LocalPiece], known: dict[Any, Spread]
) -> Spread | None:
    """How a tensor is spread over ranks, if its pieces are those that follow from it."""
    if not is_spread(tensor) or not tensor.numel():
        return None
    spread: Any = tensor
    key = spread.device_mesh, spread.placements
    if key not in known:
        known[key] = mesh_spread(*key)
    place = spread.device_mesh.get_coordinate()
    if known[key].problem() or place is None:
        return None
    expected = pieces_at(tuple(tensor.shape), known[key], place)
    is_right = sorted(expected) == sorted((offsets, shape) for offsets, shape, _ in pieces)
    return known[key] if is_right else None


def spread_of(tensor: torch.Tensor) -> Any:
    """What decides which pieces of a tensor this process holds; the same for equal ones."""
    if not is_spread(tensor):
        return tensor.shape
    spread: Any = tensor
    return spread.shape, spread.placements, spread.device_mesh, spread._local_tensor.shape


def outline(tensors: Mapping[str, torch.Tensor]) -> list[Any]:
    """What ``structure`` depends on, quickly: while it stays the same, so does the structure."""
    values = tensors.values()
    if set(map(type, values)) <= PLAIN_TYPES:
        return list(map(KIND, values))
    return [(KIND(tensor), spread_of(tensor)) for tensor in values]


def name_of(key: str) -> str:
    """The name of the tensor that a piece's key is of; it may have brackets of its own."""
    return key.rpartition("[")[0]


def num_bytes(piece: Piece) -> int:
    """Size of a piece."""
    return math.prod(piece.shape) * int(DTYPES[piece.dtype].itemsize)


class Share(msgspec.Struct, frozen=True):
    """A rank's part in what several ranks hold.

    Attributes:
        writers: key of a piece → the rank that writes it for all; the others hash theirs.
        private: names of tensors of which this rank writes a version of its own, besides those
            that belong to their rank always.
        uncompared: names of spread tensors whose replicas are known to differ: a piece has no
            versions, so that of its writer stands for all.
        groups: key of a piece → one word for the group of ranks that hold it: their digests of all
            such pieces are compared at once.
        structure: digest of this rank's structure.
        num_elements: of all tensors that are not their ranks' own; only rank 0 knows.
        problem: why the ranks' pieces cannot become one checkpoint, in words; "" if they can.
    """

    writers: dict[str, int] = {}
    private: frozenset[str] = frozenset()
    uncompared: tuple[str, ...] = ()
    groups: dict[str, str] = {}
    structure: str = ""
    num_elements: int = 0
    problem: str = ""


def make(pieces: Sequence[Held], rank: int, shared: Share, order: Mapping[str, int]) -> Plan:
    """This rank's plan.

    Args:
        pieces: what it holds, and where.
        rank: who it is.
        shared: its part in what several ranks hold.
        order: name → when the optimizer will touch it.
    """
    owners = shared.writers
    uncompared = set(shared.uncompared)
    mine, checks = [], []
    for piece, where in pieces:
        if owners.get(piece.key, rank) == rank:
            mine.append((piece, where))
        elif piece.name not in uncompared and num_bytes(piece):  # nothing has no digest
            checks.append(Check(piece, where, DTYPES[piece.dtype]))
    last = len(order)
    # As safetensors has it, the widest elements come first: each is aligned to its own size.
    mine.sort(
        key=lambda one: (-DTYPES[one[0].dtype].itemsize, order.get(one[0].name, last), one[0].name)
    )
    own = sorted({piece.name for piece, _ in mine if _is_own(piece.name, shared)})
    renamed = {name: own_name(name, rank) for name in own}
    placed: dict[str, Placed] = {}
    position = 0
    for piece, where in mine:
        end = position + num_bytes(piece)
        name = _stored(renamed.get(piece.name, piece.name), where.number, placed)
        placed[name] = Placed(piece.dtype, piece.shape, position, end)
        position = end
    head = header(placed) if placed else b""
    writes = [
        _write(
            piece,
            where,
            len(head) + place.start,
            len(head) + place.end,
            piece.key in owners and piece.name not in uncompared,
        )
        for (piece, where), place in zip(mine, placed.values(), strict=True)
    ]
    tensors = _entries(writes, rank, renamed)
    return Plan(
        writes=tuple(writes),
        checks=tuple(checks),
        head=head,
        size=len(head) + position if placed else 0,
        tensors=tensors,
        own=tuple(own),
        contents=_contents(pieces, tensors, rank, shared),
    )


def _is_own(name: str, shared: Share) -> bool:
    return name in shared.private or name.startswith(f"{OWN}.")


def _contents(
    pieces: Sequence[Held], written: Mapping[str, TensorEntry], rank: int, shared: Share
) -> Contents:
    """What this rank's part says: besides what it writes, what else it holds, and where that is."""
    numbers: dict[Spread, int] = {}
    tensors: dict[str, Holding] = {}
    elsewhere: dict[str, set[int]] = {}
    for piece, where in pieces:
        name = own_name(piece.name, rank) if _is_own(piece.name, shared) else piece.name
        if name not in tensors:
            number = PLAIN
            if where.spread is not None:
                number = numbers.setdefault(where.spread, len(numbers))
            chunks = written[name].chunks if name in written else ()
            slabs = tuple(Slab(chunk.offsets, chunk.shape, chunk.start) for chunk in chunks)
            tensors[name] = Holding(piece.dtype, piece.whole, number, slabs)
        writer = shared.writers.get(piece.key, rank)
        if writer != rank:
            elsewhere.setdefault(name, set()).add(writer)
    return Contents(
        structure=shared.structure,
        spreads=tuple(numbers),
        tensors=tensors,
        elsewhere={name: tuple(sorted(ranks)) for name, ranks in elsewhere.items()},
        num_elements=num_elements(tensors),
    )


def _write(piece: Piece, where: Where, start: int, end: int, shared: bool) -> Write:
    parts = []
    begin = start
    while begin < end:
        stop = min(end, (begin // BLOCK_BYTES + 1) * BLOCK_BYTES)
        parts.append((begin, stop - begin))
        begin = stop
    return Write(piece, where, DTYPES[piece.dtype], start, end, shared, tuple(parts))


def _stored(name: str, index: int, taken: Collection[str]) -> str:
    """The name in the file, which nothing but other readers of the format goes by."""
    unique, serial = f"{name}~chunk-{index}" if index else name, 0
    while unique in taken:  # somebody's tensor has such a name of its own
        serial += 1
        unique = f"{name}~chunk-{index}-{serial}"
    return unique


def _entries(
    writes: Sequence[Write], rank: int, renamed: Mapping[str, str]
) -> dict[str, TensorEntry]:
    chunks: dict[str, list[Chunk]] = {}
    kinds: dict[str, Piece] = {}
    for write in writes:
        piece = write.piece
        name = renamed.get(piece.name, piece.name)
        kinds[name] = piece
        chunks.setdefault(name, []).append(
            Chunk(
                offsets=piece.offsets,
                shape=piece.shape,
                file=shard_file(rank),
                start=write.start,
                end=write.end,
            )
        )
    return {
        name: TensorEntry(dtype=piece.dtype, shape=piece.whole, chunks=tuple(chunks[name]))
        for name, piece in kinds.items()
    }
