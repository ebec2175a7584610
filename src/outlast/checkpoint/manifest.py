"""The manifest: what a checkpoint consists of. Writing it is the commit.

``manifest.json`` names every tensor's global shape, dtype and chunks (offsets in the whole tensor →
byte range of a file), and every file's size and XXH3-128 per 16 MiB block. Its own ``checksum`` is
the XXH3-128 of its bytes with the checksum's digits set to zero, so that a flipped bit anywhere in
it is seen. A replicated tensor has one chunk; a sharded one has one for each piece.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec
import xxhash

from outlast.checkpoint.names import SaveName
from outlast.checkpoint.spreads import has_overlap, is_within
from outlast.errors import CheckpointInvalid

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


class PartEntry(msgspec.Struct, frozen=True, array_like=True):
    """What the manifest says of one rank's part; see ``parts``.

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
