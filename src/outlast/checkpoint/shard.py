"""One rank's tensors as a safetensors file that any reader of that format opens.

The data section starts at a multiple of 4 KiB (the header is padded with spaces, as the format
allows) so that it can be written in aligned blocks. Tensors follow each other without holes, as
the format demands, widest elements first, so that each is aligned to its own elements.

Rejected: the safetensors library's writer: it neither pads the header nor hashes nor fsyncs, and
wants the whole file as one buffer. Its readers open what is written here; a test holds that.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

import torch
import xxhash

from outlast.checkpoint.manifest import BLOCK_BYTES, FileEntry
from outlast.errors import ConfigError
from outlast.storage import Storage

ALIGNMENT: Final = 4096

_NAMES: Final = {
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
DTYPES: Final = {name: dtype for dtype, name in _NAMES.items()}


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
        if tensor.dtype not in _NAMES:
            raise ConfigError(f"{name} has dtype {tensor.dtype}, which safetensors cannot hold")
    placed: dict[str, Placed] = {}
    position = 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name)):
        tensor = tensors[name]
        end = position + tensor.numel() * tensor.dtype.itemsize
        placed[name] = Placed(_NAMES[tensor.dtype], tuple(tensor.shape), position, end)
        position = end
    return placed


def replace(placed: Mapping[str, Placed], names: Iterable[str]) -> dict[str, Placed]:
    """The layout of some of the tensors of another layout, in the same order without the holes."""
    wanted = set(names)
    moved: dict[str, Placed] = {}
    position = 0
    for name, old in placed.items():
        if name in wanted:
            end = position + old.end - old.start
            moved[name] = old._replace(start=position, end=end)
            position = end
    return moved


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


def read_verified(
    storage: Storage, name: str, entry: FileEntry, place_of: Callable[[int, int], memoryview]
) -> str | None:
    """Read ``name`` block by block, checking each one.

    Args:
        storage: where the file lies.
        name: the file.
        entry: its size and hashes.
        place_of: (start, size in bytes) → the memory that a block is read into.

    Returns:
        What is wrong with the file, in words, or None.

    Raises:
        OSError: as the storage gave it.
    """
    actual = storage.size(name)
    short = name.rpartition("/")[2]
    if actual != entry.size:
        return f"{short} has {actual} bytes and should have {entry.size}"
    for index, digest in enumerate(entry.xxh3_128):
        start = index * BLOCK_BYTES
        block = place_of(start, min(BLOCK_BYTES, entry.size - start))
        if storage.read_into(name, block, start) != len(block):
            return f"{short} ended while it was read"
        if xxhash.xxh3_128_hexdigest(block) != digest:
            return f"{short} does not match its checksum (block {index} of {len(entry.xxh3_128)})"
    return None
