"""A rank's part: what it wrote of a checkpoint, and where the rest of what it holds is.

``rank-NNNNN.part.json`` lies beside the rank's other files. It names those with their hashes, every
tensor that the rank holds (dtype, global shape, how it is spread), the chunks of it that this rank
wrote, and the ranks that wrote what it holds and did not write. The manifest has the size and the
hash of each part and nothing that grows with the number of tensors. So a rank that resumes reads
the manifest, the part of the rank it stands for, and of other parts those in which its pieces are.

Guarantees: a part is believed only after it was compared with the hash in the manifest and checked
to be about itself: files, chunks and names of its own rank.
How tensors are spread is a hint of where to look. What is read is decided by chunks alone.

Nothing here needs torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from outlast.checkpoint.blocks import hashed
from outlast.checkpoint.manifest import (
    FORMAT,
    ITEM_BYTES,
    Chunk,
    FileEntry,
    PartEntry,
    TensorEntry,
    check_file,
    part_file,
    shard_file,
    state_file,
)
from outlast.checkpoint.spreads import Spread, is_within
from outlast.errors import CheckpointInvalid

PLAIN: Final = -1  # in place of a spread's number: the tensor is not spread
_OWN: Final = re.compile(r"@rank-(\d{5})\Z")


class Slab(msgspec.Struct, frozen=True, array_like=True):
    """A chunk that this rank wrote: where it lies in the tensor, and where in the rank's file."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    start: int


class Holding(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of which this rank holds something, or a version of its own.

    Attributes:
        dtype: safetensors' name.
        shape: of the whole tensor.
        spread: number of the spread, or ``PLAIN``.
        slabs: the chunks that this rank wrote.
    """

    dtype: str
    shape: tuple[int, ...]
    spread: int = PLAIN
    slabs: tuple[Slab, ...] = ()


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """What can be said of a part before its files are written; it holds until the plan changes.

    Attributes:
        structure: digest of what the rank holds, the same for all ranks that hold the same tensors,
            spread alike.
        spreads: how tensors are spread.
        tensors: name → what this rank has of it. A name ending in ``@rank-NNNNN`` is a version of
            that rank's own.
        elsewhere: name → the ranks that wrote pieces which this rank holds and did not write.
        num_elements: how many elements this rank wrote of tensors that are nobody's own.
    """

    structure: str = ""
    spreads: tuple[Spread, ...] = ()
    tensors: dict[str, Holding] = {}
    elsewhere: dict[str, tuple[int, ...]] = {}
    num_elements: int = 0


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's part.

    Attributes:
        format: version of the layout.
        step: completed optimizer steps.
        rank: whose part it is.
        files: the rank's other files: name → size and hashes.
        contents: what they hold, and what else the rank holds.
    """

    format: int
    step: int
    rank: int
    files: dict[str, FileEntry]
    contents: Contents

    def entry(self, name: str) -> TensorEntry:
        """A tensor with the chunks of it that this rank wrote.

        Raises:
            KeyError: the rank holds nothing of it.
        """
        held = self.contents.tensors[name]
        return TensorEntry(dtype=held.dtype, shape=held.shape, chunks=tuple(self.chunks(name)))

    def chunks(self, name: str) -> list[Chunk]:
        """The chunks of a tensor that this rank wrote; none if it holds nothing of it."""
        held = self.contents.tensors.get(name)
        if held is None:
            return []
        item, file = ITEM_BYTES[held.dtype], shard_file(self.rank)
        return [
            Chunk(
                offsets=slab.offsets,
                shape=slab.shape,
                file=file,
                start=slab.start,
                end=slab.start + math.prod(slab.shape) * item,
            )
            for slab in held.slabs
        ]

    def spread(self, name: str) -> Spread | None:
        """How a tensor is spread; None if it is not, or the rank holds nothing of it."""
        held = self.contents.tensors.get(name)
        if held is None or held.spread == PLAIN:
            return None
        return self.contents.spreads[held.spread]


def rank_of_own(name: str) -> int | None:
    """The rank whose version ``name`` stands for, or None."""
    match = _OWN.search(name)
    return int(match[1]) if match else None


def without_owner(name: str) -> str:
    """The name that a rank's own version is known by to that rank."""
    return _OWN.sub("", name)


def num_elements(tensors: Mapping[str, Holding]) -> int:
    """Elements that a rank wrote of tensors that are nobody's own."""
    return sum(
        math.prod(slab.shape)
        for name, held in tensors.items()
        for slab in held.slabs
        if rank_of_own(name) is None
    )


def make_part(step: int, rank: int, files: Mapping[str, FileEntry], contents: Contents) -> Part:
    """The part of ``rank``."""
    return Part(format=FORMAT, step=step, rank=rank, files=dict(files), contents=contents)


def encode_part(part: Part) -> bytes:
    """The bytes of the part file."""
    return msgspec.json.encode(part)


def part_entry(data: bytes, structure: int, files: Iterable[FileEntry]) -> PartEntry:
    """What the manifest says of a part.

    Args:
        data: the part file's bytes.
        structure: number of the rank's structure.
        files: the rank's other files.
    """
    entry = hashed(data)
    return PartEntry(entry.size, entry.xxh3_128, structure, sum(file.size for file in files))


def decode_part(data: bytes, step: int, rank: int, world_size: int) -> Part:
    """Read a part whose bytes have been compared with the manifest.

    Raises:
        CheckpointInvalid: it is not understood, or not the part of ``rank`` at ``step``.
    """
    try:
        part = msgspec.json.decode(data, type=Part)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointInvalid(step, f"{part_file(rank)} is not understood ({error})") from None
    check_part(part, step, rank, world_size)
    return part


def check_part(part: Part, step: int, rank: int, world_size: int) -> None:
    """See what no hash sees: a part that was written wrong, or by somebody else.

    Raises:
        CheckpointInvalid: it is not the part of ``rank`` at ``step``, or does not fit itself.
    """

    def refuse(reason: str) -> CheckpointInvalid:
        return CheckpointInvalid(step, f"{part_file(rank)}: {reason}")

    if (part.step, part.rank) != (step, rank):
        raise refuse(f"it is that of rank {part.rank} at step {part.step}")
    for name, file in part.files.items():
        if name not in (shard_file(rank), state_file(rank)):
            raise refuse(f"{name!r} is not a file of rank {rank}")
        check_file(name, file, refuse)
    for spread in part.contents.spreads:
        if spread.problem():
            raise refuse(f"it names a spread that cannot be: {spread.problem()}")
    shard = part.files.get(shard_file(rank), FileEntry(size=0, xxh3_128=()))
    for name, held in part.contents.tensors.items():
        problem = _problem(name, held, part, shard.size)
        if problem:
            raise refuse(problem)
    for name, ranks in part.contents.elsewhere.items():
        if name not in part.contents.tensors or not all(0 <= one < world_size for one in ranks):
            raise refuse(f"it looks for {name} at ranks {ranks}")


def _problem(name: str, held: Holding, part: Part, file_bytes: int) -> str:
    """What is wrong with what a part says of one tensor; "" if nothing is."""
    item = ITEM_BYTES.get(held.dtype)
    if item is None:
        return f"{name} has the unknown dtype {held.dtype!r}"
    if any(size < 0 for size in held.shape):
        return f"{name} has the shape {held.shape}"
    if not PLAIN <= held.spread < len(part.contents.spreads):
        return f"{name} has a spread that is not named"
    if held.spread != PLAIN:
        placements = part.contents.spreads[held.spread].placements
        if any(dim >= len(held.shape) for dim, _ in placements):
            return f"{name} is cut along a dimension that it has not"
    own = rank_of_own(name)
    if own is not None and own != part.rank:
        return f"{name} is another rank's own"
    for slab in held.slabs:
        end = slab.start + math.prod(slab.shape) * item
        fits = is_within((slab.offsets, slab.shape), held.shape)
        if not fits or not 0 <= slab.start <= end <= file_bytes:
            return f"a chunk of {name} does not fit its tensor or its file"
    return ""
