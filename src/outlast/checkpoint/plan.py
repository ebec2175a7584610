"""Plan which rank writes what, and where each piece lies in its file.

A piece is what one process holds of a tensor: all of it, or one of its chunks. Pieces that several
ranks hold are written by one of them each, so that a data-parallel group shares the work; the
others only hash theirs, and the commit compares. What is thought to be a replica and is not is
found by that comparison, and belongs to its rank from then on.

The plan is worked out once for a structure (names, shapes, dtypes) and holds until it changes.

Each rank works out its own share of the writing from the same few facts (``share``). Ranks that
hold the same tensors, spread alike, have one structure. All know which rank has which structure;
from it follows which ranks hold a piece, and which of them writes it. A rank's work grows with its
tensors, not with the number of ranks times them.

Guarantees: all ranks that hold a piece come to the same writer, since they look at the same pieces
in the same order: those that exactly this group of ranks holds.
What can go wrong: a tensor spread in a way that a grid of ranks does not describe is described by
its pieces; its ranks then have a structure each, which costs time and changes nothing else.

Rejected: rank 0 working out everybody's share (its time grows with ranks times tensors); balancing
between groups of ranks (no rank sees what the others' groups have to do).
"""

from __future__ import annotations

import heapq
import math
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import torch
import xxhash

from outlast.checkpoint.manifest import (
    BLOCK_BYTES,
    ITEM_BYTES,
    PLAIN,
    Chunk,
    Contents,
    Holding,
    Slab,
    TensorEntry,
    num_elements,
    own_name,
    rank_of_own,
    shard_file,
)
from outlast.checkpoint.spreads import Box, Spread, holders, overlap, pieces_at, pieces_of, replicas
from outlast.checkpoint.tensors import (
    DTYPES,
    NAMES,
    LocalPiece,
    Placed,
    header,
    is_spread,
    local_pieces,
    mesh_spread,
    why_not,
)
from outlast.checkpoint.tensors import PLAIN as PLAIN_TYPES
from outlast.errors import ConfigError

# --- one rank's plan ------------------------------------------------------------------------------

OWN: Final = "outlast"  # the key whose tensors always belong to their rank: random states, data


class HeldPiece(msgspec.Struct, frozen=True, array_like=True):
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


class PieceLocation(NamedTuple):
    """Which part of this process's memory of a tensor a piece is."""

    number: int  # of the piece among those of its tensor
    cuts: tuple[tuple[int, int, int], ...]  # (axis, first row, number of rows); none: all of it
    spread: Spread | None = None  # of the tensor over ranks, as torch names it


Held = tuple[HeldPiece, PieceLocation]
# What a tensor is besides its bytes, as far as a plan depends on it.
KIND: Final = operator.attrgetter("dtype", "shape", "layout", "is_meta", "is_quantized")


class DigestCheck(NamedTuple):
    """A piece that another rank writes: only its digest is reported."""

    piece: HeldPiece
    where: PieceLocation
    dtype: torch.dtype  # as it is stored


class Write(NamedTuple):
    """A piece in its place in this rank's file."""

    piece: HeldPiece
    where: PieceLocation
    dtype: torch.dtype  # as it is stored
    start: int
    end: int
    shared: bool  # others hold it too: its digest is reported
    parts: tuple[tuple[int, int], ...]  # (start, size in bytes), cut where blocks of the file end


class WritePlan(NamedTuple):
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
    checks: tuple[DigestCheck, ...]
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
            where = PieceLocation(index, cuts, spread)
            found.append((HeldPiece(name, NAMES[dtype], whole, offsets, shape), where))
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


def num_bytes(piece: HeldPiece) -> int:
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


def make(pieces: Sequence[Held], rank: int, shared: Share, order: Mapping[str, int]) -> WritePlan:
    """Make this rank's plan of a save.

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
            checks.append(DigestCheck(piece, where, DTYPES[piece.dtype]))
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
    return WritePlan(
        writes=tuple(writes),
        checks=tuple(checks),
        head=head,
        size=len(head) + position if placed else 0,
        tensors=tensors,
        own=tuple(own),
        contents=_contents(pieces, tensors, rank, shared),
    )


def is_of_one_rank(name: str) -> bool:
    """Whether a tensor of this name always belongs to its rank."""
    return name.startswith(f"{OWN}.")


def _is_own(name: str, shared: Share) -> bool:
    return name in shared.private or is_of_one_rank(name)


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


def _write(piece: HeldPiece, where: PieceLocation, start: int, end: int, shared: bool) -> Write:
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
    kinds: dict[str, HeldPiece] = {}
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


# --- which rank writes what -----------------------------------------------------------------------

SHARE_MIN_BYTES: Final = 1 << 16  # what is smaller is written by every rank: not worth comparing


class StructureTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of a structure.

    Attributes:
        name: its name.
        dtype: safetensors' name.
        shape: of the whole tensor.
        spread: number of its spread; ``PLAIN`` if it is not spread, or not as a grid of ranks can
            describe.
        pieces: what is held of it, where that is neither all nor follows from a spread.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    spread: int = PLAIN
    pieces: tuple[Box, ...] = ()


class Structure(msgspec.Struct, frozen=True, array_like=True):
    """What a rank holds, in words that are the same for all ranks that hold the like.

    Attributes:
        tensors: by name, without those that belong to their rank.
        spreads: how they are spread.
    """

    tensors: tuple[StructureTensor, ...]
    spreads: tuple[Spread, ...] = ()

    def encode(self) -> bytes:
        """Its bytes."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Structure:
        """The structure with these bytes.

        Raises:
            msgspec.MsgspecError: they are not one's.
        """
        return msgspec.msgpack.decode(data, type=cls)

    def digest(self) -> str:
        """One word for it."""
        return str(xxhash.xxh3_128_hexdigest(self.encode()))

    def pieces(self, tensor: StructureTensor, rank: int) -> Sequence[Box]:
        """What ``rank``, which has this structure, holds of a tensor."""
        if tensor.pieces:
            return tensor.pieces
        return pieces_of(tensor.shape, self.spread(tensor), rank)

    def spread(self, tensor: StructureTensor) -> Spread | None:
        """How a tensor is spread; None if it is not."""
        return None if tensor.spread == PLAIN else self.spreads[tensor.spread]


def describe(held: Iterable[Held], rank: int) -> Structure:
    """The structure of ``rank``, which holds these pieces."""
    by_name: dict[str, list[Held]] = {}
    for one in held:
        if not is_of_one_rank(one[0].name):
            by_name.setdefault(one[0].name, []).append(one)
    numbers: dict[Spread, int] = {}
    tensors = []
    for name, pieces in sorted(by_name.items()):
        piece, spread = pieces[0][0], pieces[0][1].spread
        boxes = sorted((one.offsets, one.shape) for one, _ in pieces)
        if boxes == [((0,) * len(piece.whole), piece.whole)]:
            explicit: tuple[Box, ...] = ()
        else:
            explicit = tuple(boxes)
        number = PLAIN
        if spread is not None and sorted(pieces_of(piece.whole, spread, rank)) == boxes:
            number, explicit = numbers.setdefault(spread, len(numbers)), ()
        tensors.append(StructureTensor(name, piece.dtype, piece.whole, number, explicit))
    return Structure(tuple(tensors), tuple(numbers))


class World:
    """What all ranks hold: who has which structure.

    Args:
        table: for each rank, the number of its structure.
        structures: the structures.
    """

    def __init__(self, table: Sequence[int], structures: Sequence[Structure]) -> None:
        self.table = table
        self.structures = structures
        self.members: list[list[int]] = [[] for _ in structures]
        for rank, number in enumerate(table):
            self.members[number].append(rank)
        self._sets = [frozenset(ranks) for ranks in self.members]
        self._named: dict[str, list[tuple[int, StructureTensor]]] = {}
        for number, structure in enumerate(structures):
            for tensor in structure.tensors:
                self._named.setdefault(tensor.name, []).append((number, tensor))
        self._alike: dict[tuple[int, int, tuple[int, ...]], frozenset[int]] = {}
        self._first: dict[tuple[int, int, tuple[int, ...]], int] = {}

    def variants(self, name: str) -> list[tuple[int, StructureTensor]]:
        """(number of the structure, tensor) of every structure that has a tensor of this name."""
        return self._named.get(name, [])

    def holders(self, piece: HeldPiece, rank: int) -> tuple[frozenset[int], ...]:
        """Disjoint sets of ranks that hold this very piece, which ``rank`` does.

        A set is one object for all the pieces that have the same holders.
        """
        box = piece.offsets, piece.shape
        found = []
        for number, tensor in self._named[piece.name]:
            if (tensor.dtype, tensor.shape) == (piece.dtype, piece.whole):
                ranks = self._holders_in(number, tensor, box, rank)
                if ranks:
                    found.append(ranks)
        return tuple(found)

    def first_holder(self, name: str) -> int:
        """The lowest rank that holds anything under this name."""
        found = []
        for number, tensor in self._named[name]:
            key = number, tensor.spread, tensor.shape
            if key not in self._first:
                structure, members = self.structures[number], self.members[number]
                self._first[key] = next(
                    (rank for rank in members if structure.pieces(tensor, rank)), len(self.table)
                )
            found.append(self._first[key])
        return min(found)

    def num_elements(self) -> int:
        """How many elements there are of all tensors that are not their ranks' own."""
        total = 0
        for name, variants in self._named.items():
            if rank_of_own(name) is not None:  # as parts have it
                continue
            shapes = {number: tensor.shape for number, tensor in variants}
            number = self.table[self.first_holder(name)] if len(shapes) > 1 else variants[0][0]
            total += math.prod(shapes[number])
        return total

    def is_cut_otherwise(self, number: int, tensor: StructureTensor, box: Box) -> bool:
        """Whether a structure has pieces of a tensor that overlap ``box`` and are not equal."""
        structure = self.structures[number]
        spread = structure.spread(tensor)
        if spread is not None:
            groups = holders(tensor.shape, spread, box)
            members = self._sets[number]
            there = [next((one for one in group if one in members), None) for group in groups]
            pieces = [
                piece
                for one in there
                if one is not None
                for piece in pieces_of(tensor.shape, spread, one)
            ]
        else:
            pieces = list(structure.pieces(tensor, self.members[number][0]))
        return any(piece != box and overlap(piece, box) for piece in pieces)

    def _holders_in(
        self, number: int, tensor: StructureTensor, box: Box, rank: int
    ) -> frozenset[int]:
        """The ranks of one structure that hold exactly this piece."""
        spread = self.structures[number].spread(tensor)
        if tensor.pieces:
            return self._sets[number] if box in tensor.pieces else frozenset()
        if spread is None:
            return self._sets[number] if box[1] == tensor.shape else frozenset()
        place = spread.coordinate(rank)
        if place is None or box not in pieces_of(tensor.shape, spread, rank):
            # Another grid than this rank's: of a tensor that two stages share, say.
            groups = holders(tensor.shape, spread, box)
            place = next(
                (
                    spread.coordinate(group[0])
                    for group in groups
                    if box in pieces_of(tensor.shape, spread, group[0])
                ),
                None,
            )
            if place is None:
                return frozenset()
        key = number, tensor.spread, place
        if key not in self._alike:
            self._alike[key] = self._sets[number] & frozenset(replicas(spread, place))
        return self._alike[key]


def share(world: World, rank: int, own: Collection[str]) -> Share:
    """What ``rank`` does of what several ranks hold.

    Args:
        world: what all ranks hold.
        rank: whose share it is.
        own: names of tensors that are known to differ from rank to rank.
    """
    mine = world.structures[world.table[rank]]
    private, uncompared = set[str](), set[str]()
    groups: dict[tuple[frozenset[int], ...], list[HeldPiece]] = {}
    problem = ""
    for tensor in mine.tensors:
        name = tensor.name
        kinds = {(one.dtype, one.shape) for _, one in world.variants(name)}
        boxes = mine.pieces(tensor, rank)
        pieces = [HeldPiece(name, tensor.dtype, tensor.shape, *box) for box in boxes]
        if name in own and any(piece.shape != piece.whole for piece in pieces):
            uncompared.add(name)
        problem = problem or _conflict(world, tensor, pieces, rank)
        for piece in pieces:
            if len(kinds) > 1 or _differs(piece, own):
                if rank != world.first_holder(name):  # the first one's goes by the plain name
                    private.add(name)
                continue
            ranks = world.holders(piece, rank)
            if sum(map(len, ranks)) > 1:
                groups.setdefault(ranks, []).append(piece)
    writers: dict[str, int] = {}
    words: dict[str, str] = {}
    for ranks, pieces in groups.items():
        members = sorted(frozenset[int]().union(*ranks))
        word = xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(members))
        for piece, writer in _dealt(pieces, members):
            writers[piece.key] = writer
            words[piece.key] = word
    return Share(
        writers=writers,
        private=frozenset(private),
        uncompared=tuple(sorted(uncompared)),
        groups=words,
        structure=mine.digest(),
        num_elements=world.num_elements() if rank == 0 else 0,
        problem=problem,
    )


def _conflict(world: World, tensor: StructureTensor, pieces: Sequence[HeldPiece], rank: int) -> str:
    """Why another structure's tensor of the same name cannot be saved with these pieces of it."""
    mine = world.structures[world.table[rank]]
    for number, other in world.variants(tensor.name):
        if other is tensor:
            continue
        there = world.members[number][0]
        if (other.dtype, other.shape) != (tensor.dtype, tensor.shape):
            is_cut = [one for one in pieces if one.shape != one.whole]
            if is_cut or other.pieces or other.spread != PLAIN:
                return (
                    f"{tensor.name} is {tensor.dtype} {tensor.shape} on rank {rank} and "
                    f"{other.dtype} {other.shape} on rank {there}, and spread over several ranks"
                )
            continue
        spread = world.structures[number].spread(other)
        if spread is not None and spread == mine.spread(tensor):
            continue
        for piece in pieces:
            if world.is_cut_otherwise(number, other, (piece.offsets, piece.shape)):
                return f"{tensor.name} is cut into other pieces on rank {rank} than on rank {there}"
    return ""


def _dealt(pieces: list[HeldPiece], members: Sequence[int]) -> Iterable[tuple[HeldPiece, int]]:
    """Each piece and its writer: the largest first, each to whoever has the least to write."""
    load = [(0, rank) for rank in members]
    for piece in sorted(pieces, key=lambda piece: (-num_bytes(piece), piece.key, piece.dtype)):
        bytes_so_far, writer = load[0]
        heapq.heapreplace(load, (bytes_so_far + num_bytes(piece), writer))
        yield piece, writer


def _differs(piece: HeldPiece, own: Collection[str]) -> bool:
    """Whether each rank writes its own version; a chunk of a spread tensor never is one."""
    if piece.shape != piece.whole:
        return False
    return math.prod(piece.shape) * ITEM_BYTES[piece.dtype] < SHARE_MIN_BYTES or piece.name in own
