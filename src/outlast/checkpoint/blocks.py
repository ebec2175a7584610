"""A file's bytes and their hashes: written, read back and copied block by block.

Nothing here knows of tensors or needs torch: the keeper, which does without it, writes and copies
with these functions; a worker reads with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import xxhash

from outlast.checkpoint.manifest import BLOCK_BYTES, FileEntry
from outlast.storage import Storage


def hashed(data: bytes) -> FileEntry:
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
