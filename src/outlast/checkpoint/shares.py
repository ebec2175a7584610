"""Who writes what, worked out by each rank for itself from the same few facts.

Ranks that hold the same tensors, spread alike, have one structure. Known to all is which rank has
which structure; from it follows who else holds a piece, and who of them writes it. Each rank works
out its own share only: its work grows with its tensors, not with the number of ranks times them.

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
from collections.abc import Collection, Iterable, Sequence
from typing import Final

import msgspec
import xxhash

from outlast.checkpoint.manifest import ITEM_BYTES
from outlast.checkpoint.parts import PLAIN, rank_of_own
from outlast.checkpoint.plan import OWN, Held, Piece, Share, num_bytes
from outlast.checkpoint.spreads import Box, Spread, holders, overlap, pieces_of, replicas

SHARE_MIN_BYTES: Final = 1 << 16  # what is smaller is written by every rank: not worth comparing


class Tensor(msgspec.Struct, frozen=True, array_like=True):
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

    tensors: tuple[Tensor, ...]
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

    def pieces(self, tensor: Tensor, rank: int) -> Sequence[Box]:
        """What ``rank``, which has this structure, holds of a tensor."""
        if tensor.pieces:
            return tensor.pieces
        return pieces_of(tensor.shape, self.spread(tensor), rank)

    def spread(self, tensor: Tensor) -> Spread | None:
        """How a tensor is spread; None if it is not."""
        return None if tensor.spread == PLAIN else self.spreads[tensor.spread]


def describe(held: Iterable[Held], rank: int) -> Structure:
    """The structure of ``rank``, which holds these pieces."""
    by_name: dict[str, list[Held]] = {}
    for one in held:
        if not one[0].name.startswith(f"{OWN}."):
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
        tensors.append(Tensor(name, piece.dtype, piece.whole, number, explicit))
    return Structure(tuple(tensors), tuple(numbers))


class World:
    """What all ranks hold.

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
        self._named: dict[str, list[tuple[int, Tensor]]] = {}
        for number, structure in enumerate(structures):
            for tensor in structure.tensors:
                self._named.setdefault(tensor.name, []).append((number, tensor))
        self._alike: dict[tuple[int, int, tuple[int, ...]], frozenset[int]] = {}
        self._first: dict[tuple[int, int, tuple[int, ...]], int] = {}

    def variants(self, name: str) -> list[tuple[int, Tensor]]:
        """(number of the structure, tensor) of every structure that has a tensor of this name."""
        return self._named.get(name, [])

    def holders(self, piece: Piece, rank: int) -> tuple[frozenset[int], ...]:
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

    def is_cut_otherwise(self, number: int, tensor: Tensor, box: Box) -> bool:
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

    def _holders_in(self, number: int, tensor: Tensor, box: Box, rank: int) -> frozenset[int]:
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
    groups: dict[tuple[frozenset[int], ...], list[Piece]] = {}
    problem = ""
    for tensor in mine.tensors:
        name = tensor.name
        kinds = {(one.dtype, one.shape) for _, one in world.variants(name)}
        boxes = mine.pieces(tensor, rank)
        pieces = [Piece(name, tensor.dtype, tensor.shape, *box) for box in boxes]
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


def _conflict(world: World, tensor: Tensor, pieces: Sequence[Piece], rank: int) -> str:
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


def _dealt(pieces: list[Piece], members: Sequence[int]) -> Iterable[tuple[Piece, int]]:
    """Each piece and its writer: the largest first, each to whoever has the least to write."""
    load = [(0, rank) for rank in members]
    for piece in sorted(pieces, key=lambda piece: (-num_bytes(piece), piece.key, piece.dtype)):
        bytes_so_far, writer = load[0]
        heapq.heapreplace(load, (bytes_so_far + num_bytes(piece), writer))
        yield piece, writer


def _differs(piece: Piece, own: Collection[str]) -> bool:
    """Whether each rank writes its own version; a chunk of a spread tensor never is one."""
    if piece.shape != piece.whole:
        return False
    return math.prod(piece.shape) * ITEM_BYTES[piece.dtype] < SHARE_MIN_BYTES or piece.name in own
