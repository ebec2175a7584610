"""The parts of all ranks become a manifest, or are refused.

A rank writes the tensors that the plan gave it, and hashes those that others hold too: a replica
that went its own way is found before the commit, not after a resume. What is compared is one digest
for each group of ranks that hold the same; only where two differ are the single ones looked at.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec
import xxhash

from outlast.checkpoint.manifest import FORMAT, FileEntry, Manifest, PartEntry, TensorEntry
from outlast.checkpoint.names import SaveName
from outlast.storage import Storage

logger = logging.getLogger(__name__)

PAUSES_S: Final = (0.2, 1.0)  # between tries


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank wrote, or why it could not.

    Attributes:
        entry: size and hash of the file that says what it wrote and holds (see
            ``checkpoint.manifest``); None in a job of one rank, where the manifest itself says it.
        structure: digest of what it holds, the same for ranks that hold the same.
        num_elements: how many elements it wrote of tensors that are nobody's own.
        num_files: how many files it wrote.
        files: in a job of one rank, its files' sizes and hashes.
        tensors: in a job of one rank, what they hold.
        replicas: of what other ranks hold too, one digest for each group of holders.
        error: why there is nothing.
        void: tensors that changed under the copy; the snapshot is then to be taken again.
        by_storage: whether an error is the storage's.
    """

    entry: PartEntry | None = None
    structure: str = ""
    num_elements: int = 0
    num_files: int = 0
    files: dict[str, FileEntry] = {}
    tensors: dict[str, TensorEntry] = {}
    replicas: dict[str, str] = {}
    error: str = ""
    void: tuple[str, ...] = ()
    by_storage: bool = True


def combined(digests: Mapping[str, str], groups: Mapping[str, str]) -> dict[str, str]:
    """One digest for each group of holders, of all the pieces that they share."""
    found: dict[str, xxhash.xxh3_128] = {}
    for key in sorted(digests):
        group = groups.get(key, "")
        hasher = found.get(group)
        if hasher is None:
            hasher = found[group] = xxhash.xxh3_128()
        hasher.update(f"{key}={digests[key]}\n".encode(errors="surrogatepass"))
    return {group: hasher.hexdigest() for group, hasher in found.items()}


def differing(digests: Iterable[Mapping[str, str]]) -> tuple[str, ...]:
    """Names of pieces that were taken for replicas and are not the same everywhere."""
    first: dict[str, str] = {}
    differ = set()
    for one in digests:
        for name, digest in one.items():
            if first.setdefault(name, digest) != digest:
                differ.add(name)
    return tuple(sorted(differ))


def merge(
    parts: Mapping[int, Part],
    *,
    job: str,
    save: SaveName,
    kind: str,
    exact: bool,
    created_t: float,
) -> Manifest:
    """The manifest of what all ranks of the world wrote: one entry each."""
    first = parts[0]
    structures: dict[str, int] = {}
    entries = []
    for rank in range(len(parts)):
        part = parts[rank]
        number = structures.setdefault(part.structure, len(structures))
        if part.entry is not None:
            size, hashes, num_bytes = part.entry.size, part.entry.xxh3_128, part.entry.num_bytes
            entries.append(PartEntry(size, hashes, number, num_bytes))
    return Manifest(
        format=FORMAT,
        job=job,
        step=save.step,
        attempt=save.attempt,
        serial=save.serial,
        nonce=save.nonce,
        world_size=len(parts),
        layout={"world": len(parts)},
        created_t=created_t,
        files={} if entries else first.files,
        tensors={} if entries else first.tensors,
        parts=tuple(entries),
        kind=kind,
        exact=exact,
    )


def put_manifest(storage: Storage, name: str, data: bytes) -> None:
    """Commit, tried again when it fails.

    Raises:
        FileExistsError: another manifest has the name, as that of a save that is being removed.
        OSError: as the storage gave it.
    """
    for pause_s in (*PAUSES_S, None):
        try:
            # Of a try that failed the name may be there, and be ours.
            if not storage.put_new(name, data) and storage.read(name) != data:
                raise FileExistsError(
                    errno.EEXIST, "another manifest is there already", storage.describe(name)
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
