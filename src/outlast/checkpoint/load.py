"""Verifying and reading a checkpoint: nothing is believed before its hash was computed.

A file is read block by block into memory, each block hashed before anything looks at it; tensors
are then views of that memory. What fails names the file and the reason, so that a person can see
whether a disk, a truncation or a missing rank is behind it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from outlast.checkpoint.blocks import read_verified
from outlast.checkpoint.manifest import (
    BLOCK_BYTES,
    MANIFEST,
    Manifest,
    decode,
    own_name,
    state_file,
    step_name,
)
from outlast.checkpoint.shard import DTYPES
from outlast.checkpoint.tree import tensor_names, unflatten
from outlast.errors import CheckpointInvalid
from outlast.storage import Storage


class Loaded:
    """A verified checkpoint as one rank sees it.

    Attributes:
        manifest: what it consists of.
        data: key → small state, in which tensors are named.
        source_rank: the rank whose small state this is.
    """

    def __init__(
        self,
        manifest: Manifest,
        data: dict[str, Any],
        own: Iterable[str],
        source_rank: int,
        files: dict[str, memoryview],
    ) -> None:
        self.manifest = manifest
        self.data = data
        self.source_rank = source_rank
        self._own = frozenset(own)
        self._files = files

    def state(self, key: str, *, shared: bool = False) -> Any:
        """The state saved under ``key``.

        Whoever keeps a tensor gets one in memory of its own, aligned as torch aligns: at another
        alignment a sum takes another path through the vector unit, and other last bits.

        Args:
            key: its name.
            shared: tensors are views of this object's memory instead, to be copied from at once.

        Raises:
            KeyError: nothing was saved under ``key``.
        """
        data = self.data[key]
        tensors = {name: self.tensor(name) for name in set(tensor_names(data))}
        if not shared:
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        return unflatten(data, tensors)

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, by the name that the small state uses."""
        stored = own_name(name, self.source_rank) if name in self._own else name
        entry = self.manifest.tensors[stored]
        dtype = DTYPES[entry.dtype]
        pieces = [
            _as_tensor(self._files[chunk.file][chunk.start : chunk.end], dtype, chunk.shape)
            for chunk in entry.chunks
        ]
        if len(pieces) == 1 and entry.chunks[0].shape == entry.shape:
            return pieces[0]
        whole = torch.empty(entry.shape, dtype=dtype)
        for chunk, piece in zip(entry.chunks, pieces, strict=True):
            where = tuple(
                slice(offset, offset + extent)
                for offset, extent in zip(chunk.offsets, chunk.shape, strict=True)
            )
            whole[where].copy_(piece)
        return whole


def read_manifest(storage: Storage, step: int) -> Manifest:
    """The verified manifest of ``step``.

    Raises:
        CheckpointInvalid: there is none, or it does not verify.
        OSError: the storage failed in another way than a missing file.
    """
    try:
        data = storage.read(f"{step_name(step)}/{MANIFEST}")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise CheckpointInvalid(step, f"{MANIFEST} is missing") from None
    return decode(data, step)


def load(storage: Storage, step: int, *, rank: int = 0, everything: bool = True) -> Loaded:
    """Verify ``step`` and read what ``rank`` needs of it.

    Args:
        storage: where checkpoints lie.
        step: which one.
        rank: whose state; beyond the ranks that saved, they are taken in turn.
        everything: verify the other ranks' files too.

    Raises:
        CheckpointInvalid: a file is missing, truncated or altered; names it.
        OSError: the storage failed in another way.
    """
    manifest = read_manifest(storage, step)
    source = rank % manifest.world_size
    if state_file(source) not in manifest.files:
        raise CheckpointInvalid(step, f"{MANIFEST} does not name {state_file(source)}")
    files = {state_file(source): _read(storage, manifest, state_file(source))}
    try:
        small = json.loads(bytes(files[state_file(source)]))
        data, own = small["state"], frozenset(small["own"])
        stored = [
            own_name(name, source) if name in own else name for name in set(tensor_names(data))
        ]
        needed = {c.file for name in stored for c in manifest.tensors[name].chunks}
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointInvalid(step, f"{state_file(source)} is not understood: {error}") from None
    for name in sorted(needed):
        files[name] = _read(storage, manifest, name)
    if everything:
        for name in sorted(set(manifest.files) - set(files)):
            verify_file(storage, manifest, name)
    return Loaded(manifest, data, own, source, files)


def verify(
    storage: Storage, step: int, progress: Callable[[int, int], None] | None = None
) -> Manifest:
    """Verify every byte of ``step``; ``progress`` is told (bytes done, bytes in all).

    Raises:
        CheckpointInvalid: names the first file that does not verify.
        OSError: the storage failed in another way.
    """
    manifest = read_manifest(storage, step)
    total = sum(entry.size for entry in manifest.files.values())
    done = 0
    for name, entry in sorted(manifest.files.items()):
        verify_file(storage, manifest, name)
        done += entry.size
        if progress is not None:
            progress(done, total)
    return manifest


def verify_file(storage: Storage, manifest: Manifest, name: str) -> None:
    """Verify one file without keeping it; memory for one block is enough.

    Raises:
        CheckpointInvalid: it is missing, truncated or altered.
    """
    scratch = _memory(min(manifest.files[name].size, BLOCK_BYTES))
    _check(storage, manifest, name, lambda _, size: scratch[:size])


def _read(storage: Storage, manifest: Manifest, name: str) -> memoryview:
    memory = _memory(manifest.files[name].size)
    _check(storage, manifest, name, lambda start, size: memory[start : start + size])
    return memory


def _memory(num_bytes: int) -> memoryview:
    return np.empty(num_bytes, dtype=np.uint8).data


def _check(
    storage: Storage,
    manifest: Manifest,
    name: str,
    place_of: Callable[[int, int], memoryview],
) -> None:
    path = f"{step_name(manifest.step)}/{name}"
    try:
        problem = read_verified(storage, path, manifest.files[name], place_of)
    except (FileNotFoundError, IsADirectoryError):
        problem = f"{name} is missing"
    if problem:
        raise CheckpointInvalid(manifest.step, problem)


def _as_tensor(data: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not len(data):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).view(shape)
