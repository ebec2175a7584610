"""The parts of all ranks become a manifest, or are refused.

A rank writes the tensors that the plan gave it, and hashes those that others hold too: a replica
that went its own way is found before the commit, not after a resume.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Mapping
from typing import Final

import msgspec

from outlast.checkpoint.manifest import FORMAT, Chunk, FileEntry, Manifest, TensorEntry
from outlast.storage import Storage

logger = logging.getLogger(__name__)

PAUSES_S: Final = (0.2, 1.0)  # between tries


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank wrote, or why it could not.

    Attributes:
        files: its files' sizes and hashes.
        tensors: what they hold.
        digests: of the tensors that other ranks hold too.
        error: why there is nothing.
        void: tensors that changed under the copy; the snapshot is then to be taken again.
        by_storage: whether an error is the storage's.
    """

    files: dict[str, FileEntry] = {}
    tensors: dict[str, TensorEntry] = {}
    digests: dict[str, str] = {}
    error: str = ""
    void: tuple[str, ...] = ()
    by_storage: bool = True


def disagreements(parts: Mapping[int, Part]) -> tuple[str, ...]:
    """Names of tensors that were taken for replicas and are not the same on all ranks."""
    first: dict[str, str] = {}
    differ = set()
    for part in parts.values():
        for name, digest in part.digests.items():
            if first.setdefault(name, digest) != digest:
                differ.add(name)
    return tuple(sorted(differ))


def merge(
    parts: Mapping[int, Part],
    *,
    job: str,
    step: int,
    attempt: int,
    kind: str,
    exact: bool,
    created_t: float,
) -> Manifest:
    """The manifest that names everything in ``parts``, one for each rank of the world.

    Raises:
        ValueError: two ranks wrote a tensor of one name in different shapes or dtypes.
    """
    tensors: dict[str, TensorEntry] = {}
    for rank in sorted(parts):
        for name, entry in parts[rank].tensors.items():
            known = tensors.get(name)
            if known is None:
                tensors[name] = entry
                continue
            if (known.shape, known.dtype) != (entry.shape, entry.dtype):
                raise ValueError(
                    f"{name} is {entry.dtype} {entry.shape} on rank {rank} and {known.dtype} "
                    f"{known.shape} on another"
                )
            chunks: tuple[Chunk, ...] = known.chunks + entry.chunks
            tensors[name] = msgspec.structs.replace(known, chunks=chunks)
    return Manifest(
        format=FORMAT,
        job=job,
        step=step,
        attempt=attempt,
        world_size=len(parts),
        layout={"world": len(parts)},
        created_t=created_t,
        files={name: e for rank in sorted(parts) for name, e in parts[rank].files.items()},
        tensors=tensors,
        kind=kind,
        exact=exact,
    )


def put_manifest(storage: Storage, name: str, data: bytes) -> None:
    """Commit, tried again when it fails.

    Raises:
        FileExistsError: another writer has committed this step.
        OSError: as the storage gave it.
    """
    for pause_s in (*PAUSES_S, None):
        try:
            # Of a try that failed the name may be there, and be ours.
            if not storage.put_new(name, data) and storage.read(name) != data:
                raise FileExistsError(
                    errno.EEXIST, "another writer has committed this step", storage.describe(name)
                )
        except FileExistsError:
            raise
        except OSError as error:
            if pause_s is None:
                raise
            logger.warning("%s: %s; trying again", storage.describe(name), error)
            time.sleep(pause_s)
        else:
            return
