"""Name a save, and describe what it consists of: the manifest, which is its commit, and the parts.

``manifest.json`` names every file's size and its XXH3-128 per 16 MiB block, and of every tensor the
global shape, dtype and chunks (offsets in the whole tensor → byte range of a file). Its own
``checksum`` is the XXH3-128 of its bytes with the checksum's digits set to zero, so a flipped bit
anywhere in it is seen. A replicated tensor has one chunk; a sharded one has one for each piece.

In a job of several ranks the manifest names parts instead. ``rank-NNNNN.part.json`` lies beside the
rank's other files. It names those with their hashes, every tensor that the rank holds (dtype,
global shape, how it is spread), the chunks of it that this rank wrote, and the ranks that wrote
what it holds and did not write. The manifest has each part's size and hash, and nothing that grows
with the number of tensors. So a rank that resumes reads the manifest, the part of the rank it
stands for, and of other parts only those in which its pieces are.

Guarantees: a part is believed only after it was compared with the hash in the manifest and checked
to be about itself: files, chunks and names of its own rank. How tensors are spread is a hint of
where to look; chunks alone decide what is read.

Nothing here needs torch: the keeper writes and checks files without it.

A save's name has the step, the attempt, the save's number and a nonce:

    step-000000001200.a0003.s0017.1f3c9a2b
    step-STEP.aATTEMPT.sSERIAL.NONCE

Each save of a step has a directory that no other save ever writes into. Each session draws a new
nonce, so two attempts with one number (each half of a split job takes itself for the job) share no
name either. What an older attempt still writes goes into its own directories. A step that is saved
again is superseded by another directory's manifest; the older save stays until retention removes
it.

Saves sort by step, then by attempt and number: of several saves of a step the last one is the
newest. ``step-000000001200`` alone is how formats 1 and 2 wrote it; it sorts before all others.

A directory says whose it is before anything else is written into it (``save.json``): retention must
recognise what it removes, also where there is no manifest, or one that does not verify.

Places are memory, local, shared and object storage, in order of speed. All have the same layout, so
a block that is wrong in one place can be taken from another.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import xxhash

from outlast.checkpoint.spreads import Spread, has_overlap, is_within
from outlast.errors import CheckpointInvalid
from outlast.storage import Storage

# --- names of saves -------------------------------------------------------------------------------

NOTE: Final = "save.json"
_NOTE_FORMAT: Final = 1
_NO_NOTE: Final = (
    *(FileNotFoundError, NotADirectoryError, IsADirectoryError),
    *(msgspec.MsgspecError, UnicodeDecodeError),
)
_NAME: Final = re.compile(
    r"^step-([0-9]{12})(?:\.a([0-9]{4,12})\.s([0-9]{4,12})\.([0-9a-f]{8}))?\Z"
)


class SaveName(NamedTuple):
    """Which save of which step; ``str`` of it is its directory's name.

    Attributes:
        step: completed optimizer steps.
        attempt: the attempt that wrote it.
        serial: its number among the session's saves.
        nonce: eight hexadecimal digits, the session's own; "" for a directory of format 1 or 2.
    """

    step: int
    attempt: int = -1
    serial: int = -1
    nonce: str = ""

    def __str__(self) -> str:
        if not self.nonce:
            return f"step-{self.step:012d}"
        return f"step-{self.step:012d}.a{self.attempt:04d}.s{self.serial:04d}.{self.nonce}"

    @property
    def written(self) -> tuple[int, int]:
        """When it was begun, beside the job's other saves: (attempt, number)."""
        return self.attempt, self.serial


def new_nonce() -> str:
    """What tells a session's saves from those of all others."""
    return os.urandom(4).hex()


def parse(name: str) -> SaveName | None:
    """The save whose directory has this name; None for what is not a save's."""
    found = _NAME.match(name)
    if found is None:
        return None
    step, attempt, serial, nonce = found.groups()
    if nonce is None:
        return SaveName(int(step))
    save = SaveName(int(step), int(attempt), int(serial), nonce)
    return save if str(save) == name else None  # one name for each save, and no other spelling


def named(name: str) -> SaveName:
    """``parse`` of what must be a save's name.

    Raises:
        ValueError: it is not.
    """
    save = parse(name)
    if save is None:
        raise ValueError(f"{name!r} is not the name of a save")
    return save


def save_of(path: str) -> SaveName:
    """The save whose directory ``path`` lies in.

    Raises:
        ValueError: it lies in none.
    """
    return named(path.partition("/")[0])


class _Note(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    job: str
    step: int
    attempt: int
    serial: int


def sign(storage: Storage, save: SaveName, job: str) -> None:
    """Say in the save's directory whose it is; comes before all of its files.

    Raises:
        OSError: as the storage gave it.
    """
    note = _Note(
        format=_NOTE_FORMAT, job=job, step=save.step, attempt=save.attempt, serial=save.serial
    )
    storage.put(f"{save}/{NOTE}", msgspec.json.encode(note))


def signed_by(storage: Storage, save: SaveName) -> str | None:
    """The job that a save's directory says it is of; None where it does not say.

    Raises:
        OSError: it cannot be read now.
    """
    with contextlib.suppress(*_NO_NOTE):
        note = msgspec.json.decode(storage.read(f"{save}/{NOTE}"), type=_Note)
        if (note.step, note.attempt, note.serial) == save[:3]:
            return note.job
    return None


# --- places ---------------------------------------------------------------------------------------


class Place(NamedTuple):
    """One tier as a reader sees it.

    Attributes:
        name: of the tier.
        storage: where its files lie.
        in_memory: whether that is some machine's memory, and no storage at all.
    """

    name: str
    storage: Storage
    in_memory: bool = False


def as_places(where: Storage | Sequence[Place]) -> tuple[Place, ...]:
    """Several places as they are; a storage by itself is one."""
    if isinstance(where, Sequence):
        return tuple(where)
    return (Place("local", where),)


# --- the manifest ---------------------------------------------------------------------------------

FORMAT: Final = 3
MANIFEST: Final = "manifest.json"
BLOCK_BYTES: Final = 16 << 20
FILE_NAME: Final = re.compile(r"^rank-(\d{5})\.(safetensors|json)\Z")
PART_NAME: Final = re.compile(r"^rank-(\d{5})\.part\.json\Z")
FULL: Final = "full"
WEIGHTS: Final = "weights"
ABANDONED: Final = b'{"format":3,"abandoned":true}'  # in place of a manifest that never was
_NO_CHECKSUM: Final = "0" * 32

# safetensors' names of dtypes → bytes per element
ITEM_BYTES: Final = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"), 1),
}


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of a tensor: where it lies in the tensor, and in which bytes of which file."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    start: int
    end: int


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor: global shape, dtype (safetensors' name) and chunks."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A file: size in bytes and the XXH3-128 of each 16 MiB block, in hexadecimal."""

    size: int
    xxh3_128: tuple[str, ...]


class SmallState(NamedTuple):
    """One rank's small state.

    Attributes:
        rank: whose.
        data: key → data in which tensors are named, as ``tree.flatten`` writes it.
        own: names of the tensors that belong to this rank alone.
    """

    rank: int
    data: dict[str, Any]
    own: frozenset[str]


class PartEntry(msgspec.Struct, frozen=True, array_like=True):
    """What the manifest says of one rank's part.

    Attributes:
        size: of the part file, in bytes.
        xxh3_128: of each 16 MiB block of the part file; as a rule there is one.
        structure: number of the rank's structure: ranks with the same one hold the same tensors,
            spread alike. It only says where to look first.
        num_bytes: size of the rank's other files together.
    """

    size: int
    xxh3_128: tuple[str, ...]
    structure: int
    num_bytes: int

    @property
    def file(self) -> FileEntry:
        """The part file as any other file."""
        return FileEntry(size=self.size, xxh3_128=self.xxh3_128)


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a reader must know of a checkpoint, or of where to find it.

    Files and tensors stand either here (a job of one rank; formats 1 and 2) or in the ranks' parts,
    of which ``parts`` has one entry each: nothing here then grows with the number of tensors.

    Attributes:
        format: version of the layout; a reader refuses a later one.
        job: id of the job.
        step: completed optimizer steps.
        attempt: the attempt that wrote it.
        serial, nonce: with step and attempt they are the save's name; -1 and "" before format 3.
        world_size: number of workers that wrote it.
        layout: how state is spread over workers: axis → workers along it.
        created_t: wall-clock time of the commit, in seconds since the epoch.
        files: name → size and hashes.
        tensors: name → shape, dtype, chunks. A name ending in ``@rank-NNNNN`` is that rank's own.
        parts: of each rank, size and hash of the file that says the rest.
        kind: "full", or "weights" when it lacks the optimizer's state and cannot be resumed from.
        exact: whether every tensor has the bits it had in training.
        checksum: of the manifest itself.
    """

    format: int
    job: str
    step: int
    attempt: int
    world_size: int
    layout: dict[str, int]
    created_t: float
    files: dict[str, FileEntry] = {}
    tensors: dict[str, TensorEntry] = {}
    parts: tuple[PartEntry, ...] = ()
    kind: str = FULL
    exact: bool = True
    serial: int = -1
    nonce: str = ""
    checksum: str = _NO_CHECKSUM

    @property
    def save(self) -> SaveName:
        """Which save it is, and so the name of its directory."""
        if not self.nonce:
            return SaveName(self.step)
        return SaveName(self.step, self.attempt, self.serial, self.nonce)


def shard_file(rank: int) -> str:
    """The file of ``rank``'s tensors."""
    return f"rank-{rank:05d}.safetensors"


def state_file(rank: int) -> str:
    """The file of ``rank``'s small state."""
    return f"rank-{rank:05d}.json"


def part_file(rank: int) -> str:
    """The file that says what ``rank`` wrote."""
    return f"rank-{rank:05d}.part.json"


def small_state(step: int, rank: int, own: Iterable[str], data: dict[str, Any]) -> bytes:
    """The content of ``state_file(rank)``.

    Args:
        step: completed steps.
        rank: whose it is.
        own: names of the tensors of which this rank has a version of its own.
        data: key → state, in which tensors are named.
    """
    small = {"format": FORMAT, "step": step, "rank": rank, "own": list(own), "state": data}
    return json.dumps(small, allow_nan=False, separators=(",", ":")).encode()


def read_small_state(data: bytes, step: int, rank: int) -> SmallState:
    """Read a rank's small state; the opposite of ``small_state``.

    Raises:
        CheckpointInvalid: it is not understood.
    """
    try:
        small = json.loads(data)
        return SmallState(rank, {**small["state"]}, frozenset(small["own"]))
    except (ValueError, KeyError, TypeError) as error:
        reason = f"{state_file(rank)} is not understood: {error}"
        raise CheckpointInvalid(step, reason) from None


def own_name(name: str, rank: int) -> str:
    """The name of a tensor that belongs to ``rank`` alone."""
    return f"{name}@rank-{rank:05d}"


def encode(manifest: Manifest) -> bytes:
    """The manifest's bytes, its checksum filled in."""
    blank = msgspec.json.encode(msgspec.structs.replace(manifest, checksum=_NO_CHECKSUM))
    digest = xxhash.xxh3_128_hexdigest(blank)
    return _with_checksum(blank, _NO_CHECKSUM, digest)


class LaterFormat(CheckpointInvalid):
    """A checkpoint of a format that this version does not know: nothing can be said of it."""


def decode(data: bytes, save: SaveName) -> Manifest:
    """Read and verify the manifest of a save.

    Raises:
        CheckpointInvalid: torn, altered, of a later format, or not that of ``save``.
    """
    step = save.step
    if not data:
        raise CheckpointInvalid(step, f"{MANIFEST} is empty")
    if data == ABANDONED:
        raise CheckpointInvalid(step, "it was not committed, and is being removed")
    try:
        version = msgspec.json.decode(data, type=_Version).format
        if version > FORMAT:
            raise LaterFormat(
                step,
                f"it has format {version} and this version reads up to {FORMAT}; upgrade outlast",
            )
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointInvalid(step, f"{MANIFEST} is torn or altered ({error})") from None
    blank = _with_checksum(data, manifest.checksum, _NO_CHECKSUM)
    if xxhash.xxh3_128_hexdigest(blank) != manifest.checksum:
        raise CheckpointInvalid(step, f"{MANIFEST} does not match its own checksum")
    if manifest.step != step:
        raise CheckpointInvalid(step, f"{MANIFEST} is that of step {manifest.step}")
    if manifest.save != save:
        raise CheckpointInvalid(step, f"{MANIFEST} is that of {manifest.save}, not of {save}")
    _check(manifest)
    return manifest


class _Version(msgspec.Struct):
    format: int


def _with_checksum(data: bytes, old: str, new: str) -> bytes:
    head, mark, tail = data.rpartition(f'"checksum":"{old}"'.encode())
    return head + mark.replace(old.encode(), new.encode()) + tail


def _check(manifest: Manifest) -> None:
    """What the checksum cannot see: a manifest that was written wrong, or by somebody else."""

    def refuse(reason: str) -> CheckpointInvalid:
        return CheckpointInvalid(manifest.step, f"{MANIFEST}: {reason}")

    if manifest.world_size < 1:
        raise refuse(f"it has a world size of {manifest.world_size}")
    if manifest.parts:
        _check_parts(manifest, refuse)
    for name, file in manifest.files.items():
        if not FILE_NAME.match(name):
            raise refuse(f"{name!r} is not the name of a file of a checkpoint")
        check_file(name, file, refuse)
    for name, tensor in manifest.tensors.items():
        item = ITEM_BYTES.get(tensor.dtype)
        if item is None:
            raise refuse(f"{name} has the unknown dtype {tensor.dtype!r}")
        for chunk in tensor.chunks:
            size = math.prod(chunk.shape) * item
            inside = chunk.file in manifest.files and (
                0 <= chunk.start <= chunk.end <= manifest.files[chunk.file].size
            )
            fits = is_within((chunk.offsets, chunk.shape), tensor.shape)
            if not inside or not fits or chunk.end - chunk.start != size:
                raise refuse(f"a chunk of {name} does not fit its tensor or its file")
        covered = sum(math.prod(chunk.shape) for chunk in tensor.chunks)
        if covered != math.prod(tensor.shape) or has_overlap(
            (chunk.offsets, chunk.shape) for chunk in tensor.chunks
        ):
            raise refuse(f"the chunks of {name} do not cover it")


def _check_parts(manifest: Manifest, refuse: Callable[[str], Exception]) -> None:
    if manifest.files or manifest.tensors:
        raise refuse("it names parts and what belongs into them")
    if len(manifest.parts) != manifest.world_size:
        raise refuse(f"it names {len(manifest.parts)} parts of {manifest.world_size}")
    for rank, part in enumerate(manifest.parts):
        if part.size < 1 or part.num_bytes < 0 or part.structure < 0:
            raise refuse(f"it says of {part_file(rank)} what cannot be: {part}")
        check_file(part_file(rank), part.file, refuse)


def check_file(name: str, file: FileEntry, refuse: Callable[[str], Exception]) -> None:
    """See that a file has as many hashes as blocks; raises what ``refuse`` makes of the reason."""
    if file.size < 0 or len(file.xxh3_128) != math.ceil(file.size / BLOCK_BYTES):
        raise refuse(f"{name} has {len(file.xxh3_128)} hashes for {file.size} bytes")


def rank_of(name: str) -> int | None:
    """The rank whose file ``name`` is; None if it is no rank's."""
    match = FILE_NAME.match(name) or PART_NAME.match(name)
    return int(match[1]) if match else None


def num_bytes(manifest: Manifest) -> int:
    """Size of all files of a checkpoint together, without the manifest."""
    if manifest.parts:
        return sum(part.size + part.num_bytes for part in manifest.parts)
    return sum(entry.size for entry in manifest.files.values())


# --- a file's bytes and their hashes --------------------------------------------------------------


def hashed(data: bytes | memoryview) -> FileEntry:
    """What a manifest says of a file that holds ``data``."""
    starts = range(0, len(data), BLOCK_BYTES)
    view = memoryview(data)
    digests = tuple(xxhash.xxh3_128_hexdigest(view[i : i + BLOCK_BYTES]) for i in starts)
    return FileEntry(size=len(data), xxh3_128=digests)


def write_hashed(storage: Storage, name: str, pieces: Iterable[memoryview | bytes]) -> FileEntry:
    """Write ``pieces`` as the file ``name``, durably, hashing each block on the way.

    Raises:
        OSError: as the storage gave it; nothing is left under ``name``.
    """
    blob = storage.create(name)
    size, digests, hasher = 0, [], xxhash.xxh3_128()
    try:
        for piece in pieces:
            view = memoryview(piece)
            while view:
                part = view[: BLOCK_BYTES - size % BLOCK_BYTES]
                hasher.update(part)
                blob.write(part)
                size += len(part)
                view = view[len(part) :]
                if size % BLOCK_BYTES == 0:
                    digests.append(hasher.hexdigest())
                    hasher.reset()
        if size % BLOCK_BYTES:
            digests.append(hasher.hexdigest())
        blob.finish()
    except BaseException:
        blob.abandon()
        raise
    return FileEntry(size=size, xxh3_128=tuple(digests))


# --- the ranks' parts -----------------------------------------------------------------------------

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


class RankPart(msgspec.Struct, frozen=True, kw_only=True):
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


def make_part(step: int, rank: int, files: Mapping[str, FileEntry], contents: Contents) -> RankPart:
    """The part of ``rank``."""
    return RankPart(format=FORMAT, step=step, rank=rank, files=dict(files), contents=contents)


def encode_part(part: RankPart) -> bytes:
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


def decode_part(data: bytes, step: int, rank: int, world_size: int) -> RankPart:
    """Read a part whose bytes have been compared with the manifest.

    Raises:
        CheckpointInvalid: it is not understood, or not the part of ``rank`` at ``step``.
    """
    try:
        part = msgspec.json.decode(data, type=RankPart)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointInvalid(step, f"{part_file(rank)} is not understood ({error})") from None
    check_part(part, step, rank, world_size)
    return part


def check_part(part: RankPart, step: int, rank: int, world_size: int) -> None:
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


def _problem(name: str, held: Holding, part: RankPart, file_bytes: int) -> str:
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
