"""A file's bytes and their hashes, block by block.

Nothing here knows of tensors or needs torch: the keeper does without it.
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

from outlast.checkpoint.manifest import BLOCK_BYTES, FileEntry
from outlast.storage import Storage


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
