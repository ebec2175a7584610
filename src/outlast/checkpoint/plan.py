"""Which rank writes what, and where each piece lies in its file.

A piece is what one process holds of a tensor: all of it, or one of its chunks. Pieces that several
ranks hold are written by one of them each, so that a data-parallel group shares the work; the
others only hash theirs, and the commit compares. What is thought to be a replica and is not is
found by that comparison, and belongs to its rank from then on.

The plan is worked out once for a structure (names, shapes, dtypes) and holds until it changes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import torch
import xxhash

from outlast.checkpoint.manifest import (
    BLOCK_BYTES,
    Chunk,
    TensorEntry,
    own_name,
    shard_file,
)
from outlast.checkpoint.reshard import PLAIN, LocalPiece, is_spread, local_pieces, why_not
from outlast.checkpoint.shard import DTYPES, NAMES, Placed, header
from outlast.errors import ConfigError

OWN: Final = "outlast"  # the key whose tensors always belong to their rank: random states, data
SHARE_MIN_BYTES: Final = 1 << 16  # what is smaller is written by every rank: not worth comparing


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
    """

    writes: tuple[Write, ...]
    checks: tuple[Check, ...]
    head: bytes
    size: int
    tensors: dict[str, TensorEntry]
    own: tuple[str, ...]


def structure(tensors: Mapping[str, torch.Tensor], narrow: Collection[str] = ()) -> list[Held]:
    """The pieces this process holds, and where.

    Args:
        tensors: name → tensor or DTensor.
        narrow: names of those that are stored in bfloat16.

    Raises:
        ConfigError: a tensor that cannot be saved; names it.
    """
    found: list[Held] = []
    known: dict[Any, list[LocalPiece]] = {}  # torch takes its time to say how a tensor is spread
    for name, tensor in tensors.items():
        refusal = why_not(tensor)
        if refusal:
            raise ConfigError(f"{name} {refusal}")
        dtype = torch.bfloat16 if name in narrow else tensor.dtype
        if dtype not in NAMES:
            raise ConfigError(f"{name} has dtype {tensor.dtype}, which safetensors cannot hold")
        key = spread_of(tensor)
        pieces = known.get(key)
        if pieces is None:
            try:
                pieces = known[key] = local_pieces(tensor)
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from None
        whole = tuple(tensor.shape)
        for index, (offsets, shape, cuts) in enumerate(pieces):
            found.append((Piece(name, NAMES[dtype], whole, offsets, shape), Where(index, cuts)))
    return found


def spread_of(tensor: torch.Tensor) -> Any:
    """What decides which pieces of a tensor this process holds; the same for equal ones."""
    if not is_spread(tensor):
        return tensor.shape
    spread: Any = tensor
    return spread.shape, spread.placements, spread.device_mesh, spread._local_tensor.shape


def outline(tensors: Mapping[str, torch.Tensor]) -> list[Any]:
    """What ``structure`` depends on, quickly: while it stays the same, so does the structure."""
    values = tensors.values()
    if set(map(type, values)) <= PLAIN:
        return list(map(KIND, values))
    return [(KIND(tensor), spread_of(tensor)) for tensor in values]


def signature(pieces: Sequence[Piece]) -> str:
    """One word for a structure."""
    return str(xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(pieces)))


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
        private: names of tensors of which this rank writes a version of its own.
        uncompared: names of spread tensors whose replicas are known to differ: a piece has no
            versions, so that of its writer stands for all.
    """

    writers: dict[str, int] = {}
    private: tuple[str, ...] = ()
    uncompared: tuple[str, ...] = ()


def share(structures: Sequence[Sequence[Piece]], own: Collection[str]) -> list[Share]:
    """Who writes each piece that several ranks hold.

    Args:
        structures: each rank's pieces.
        own: names of tensors that are known to differ from rank to rank.

    Returns:
        Each rank's share. A piece that one rank alone holds, as in a pipeline, is in none: it is
        written by whoever has it, under its name.
    """
    holders: dict[Piece, list[int]] = {}
    by_name: dict[str, list[int]] = {}
    kinds: dict[str, set[tuple[str, tuple[int, ...]]]] = {}
    for rank, pieces in enumerate(structures):
        for piece in pieces:
            holders.setdefault(piece, []).append(rank)
            by_name.setdefault(piece.name, []).append(rank)
            kinds.setdefault(piece.name, set()).add((piece.dtype, piece.whole))
    load = [0] * len(structures)
    writers: list[dict[str, int]] = [{} for _ in structures]
    private: list[set[str]] = [set() for _ in structures]
    # The largest first, each to the rank that has the least to write: nobody waits long for one.
    for piece in sorted(holders, key=lambda piece: (-num_bytes(piece), piece.key, piece.dtype)):
        ranks = holders[piece]
        if piece.name.startswith(f"{OWN}."):
            for rank in ranks:
                private[rank].add(piece.name)
        elif _differs(piece, own) or len(kinds[piece.name]) > 1:
            for rank in ranks:
                if rank != by_name[piece.name][0]:  # the first one's goes by the plain name
                    private[rank].add(piece.name)
        elif len(ranks) > 1:
            writer = min(ranks, key=lambda rank: (load[rank], rank))
            load[writer] += num_bytes(piece)
            for rank in ranks:
                writers[rank][piece.key] = writer
    spread = {piece.name for piece in holders if piece.shape != piece.whole}
    uncompared = tuple(sorted(spread & set(own)))
    return [Share(w, tuple(sorted(p)), uncompared) for w, p in zip(writers, private, strict=True)]


def _differs(piece: Piece, own: Collection[str]) -> bool:
    """Whether each rank writes its own version; a chunk of a spread tensor never is one."""
    if piece.shape != piece.whole:
        return False
    return num_bytes(piece) < SHARE_MIN_BYTES or piece.name in own


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
        elif piece.name not in uncompared:
            checks.append(Check(piece, where, DTYPES[piece.dtype]))
    last = len(order)
    # As safetensors has it, the widest elements come first: each is aligned to its own size.
    mine.sort(
        key=lambda one: (-DTYPES[one[0].dtype].itemsize, order.get(one[0].name, last), one[0].name)
    )
    own = sorted({piece.name for piece, _ in mine} & set(shared.private))
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
    return Plan(
        writes=tuple(writes),
        checks=tuple(checks),
        head=head,
        size=len(head) + position if placed else 0,
        tensors=_entries(writes, rank, renamed),
        own=tuple(own),
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
