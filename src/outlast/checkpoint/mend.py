"""Copy a save's files to another place, and mend one place from the others.

``copy_file`` copies a file; ``mend_file`` and ``mend_copy`` mend a place, block by block, from
wherever a block is right.

Guarantees: a file appears in its new place only in full; in a place that is mended, the manifest
comes last.
What can go wrong: a block is right nowhere (CheckpointInvalid), or the place cannot be written.

Before format 3 a place could hold another save of the same step under the same name: nothing of it
is mended from here. A place without a manifest has a copy in the making, or on its way out.

Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from outlast.checkpoint.manifest import (
    MANIFEST,
    FileEntry,
    LaterFormat,
    Manifest,
    Place,
    decode,
    part_file,
    sign,
)
from outlast.checkpoint.transfer import Bounce, FileCopies, in_words, inventory_of, look
from outlast.errors import CheckpointInvalid
from outlast.storage import Storage

Progress = Callable[[int, int], None]


class Repaired(NamedTuple):
    """A file that is whole again: its name, the place's name, and where its bytes came from."""

    file: str
    place: str
    source: str


class NotMended(NamedTuple):
    """A file that stays damaged: right in no place (CheckpointInvalid), or not written."""

    file: str
    error: CheckpointInvalid | OSError


def copy_file(
    source: Storage,
    target: Storage,
    name: str,
    entry: FileEntry,
    progress: Progress | None = None,
) -> None:
    """Copy one file, block by block, each verified; ``progress`` is told (bytes done, in all).

    Args:
        source: where it lies.
        target: where it shall lie; nothing appears there if anything goes wrong.
        name: its name in both, with the save's directory.
        entry: its size and hashes, from the manifest.
        progress: told after each block; what it raises ends the copy.

    Raises:
        CheckpointInvalid: the source's copy is missing, truncated or altered.
        OSError: as either storage gave it.
    """
    copies = FileCopies([Place(source.describe(), source)], name, entry)
    try:
        _write(copies, target, progress)
    finally:
        copies.close()


def mend_file(
    places: Sequence[Place],
    bad: Place,
    path: str,
    entry: FileEntry,
    progress: Progress | None = None,
) -> str:
    """Write ``path`` anew in the place ``bad``, of blocks that are right in any place.

    Returns:
        The name of the place that most of them came from.

    Raises:
        CheckpointInvalid, OSError: a block is right nowhere, or ``bad`` cannot be written.
    """
    others = [place for place in places if place.name != bad.name]
    copies = FileCopies([*others, bad], path, entry)
    try:
        _write(copies, bad.storage, progress)
    finally:
        copies.close()
    return copies.used.most_common(1)[0][0] if copies.used else bad.name


def _write(copies: FileCopies, target: Storage, progress: Progress | None) -> None:
    size = copies.entry.size
    buffer = Bounce(copies.entry).view
    blob = target.create(copies.path, size)
    try:
        for index in range(len(copies.entry.xxh3_128)):
            start, end = copies.block_range(index)
            blob.write_at(copies.block(index, buffer), start)
            if progress is not None:
                progress(end, size)
        blob.finish()
    except BaseException:
        blob.abandon()
        raise


def mend_manifest(place: Place, manifest: Manifest, data: bytes) -> None:
    """Put another place's manifest where it is missing or does not verify; its files come first.

    Retention may take the save away meanwhile, while this process is paused: what is missing then
    is not counted on.

    Raises:
        CheckpointInvalid: the files that it counts on are not there, or it is being removed.
        OSError: as the storage gave it.
    """
    save, storage = manifest.save, place.storage
    path = f"{save}/{MANIFEST}"
    if save.nonce:
        sign(storage, save, manifest.job)
    _see_that_all_are_there(place, manifest)
    if storage.exists(path):
        storage.put(path, data)
    elif not storage.put_new(path, data) and storage.read(path) != data:
        raise CheckpointInvalid(save.step, "it is being removed")
    try:
        _see_that_all_are_there(place, manifest)
    except CheckpointInvalid:
        storage.remove(path)
        raise


def _see_that_all_are_there(place: Place, manifest: Manifest) -> None:
    sizes = {name: entry.size for name, entry in manifest.files.items()}
    sizes |= {part_file(rank): part.size for rank, part in enumerate(manifest.parts)}
    for name, size in sizes.items():
        try:
            found = place.storage.size(f"{manifest.save}/{name}")
        except FileNotFoundError:
            found = -1
        if found != size:
            raise CheckpointInvalid(manifest.step, f"{name} is not there, and {MANIFEST} waits")


def mend_copy(
    here: Place,
    places: Sequence[Place],
    manifest: Manifest,
    source: Place | None,
    progress: Callable[[int], None],
) -> Iterator[Repaired | NotMended]:
    """Verify and mend every file of one place's copy of a save; the manifest comes last.

    Args:
        here: the place of the copy.
        places: all places that have a copy, in order of speed.
        manifest: what the copy should consist of.
        source: the place that ``manifest`` was read from; None if it is the copy's own. A copy
            whose own manifest is of a later format is left alone.
        progress: told the bytes of each file.

    Yields:
        Each file that was damaged: mended, or not mended.
    """
    whole = True
    if source is not None:
        own = look(here, manifest.save)
        if own.is_later:  # a newer version of Outlast knows what it is
            yield NotMended(MANIFEST, LaterFormat(manifest.step, own.problem))
            return
    # A part comes before the files that it names, and is mended by then.
    for name, entry in inventory_of(manifest, [here, *places]).walk():
        path = f"{manifest.save}/{name}"
        try:
            if find_problem(here, path, entry):
                yield Repaired(name, here.name, mend_file(places, here, path, entry))
        except (CheckpointInvalid, OSError) as error:
            whole = False
            yield NotMended(name, error)
        progress(entry.size)
    if whole and source is not None:
        try:
            data = source.storage.read(f"{manifest.save}/{MANIFEST}")
            # It was right a moment ago.
            mend_manifest(here, decode(data, manifest.save), data)
            yield Repaired(MANIFEST, here.name, source.name)
        except (CheckpointInvalid, OSError) as error:
            yield NotMended(MANIFEST, error)


def find_problem(place: Place, path: str, entry: FileEntry) -> str:
    """What is wrong with a file in one place, in words; "" if every block is right."""
    copies = FileCopies([place], path, entry)
    buffer = Bounce(entry).view
    try:
        for index in range(len(entry.xxh3_128)):
            copies.block(index, buffer)
        if not entry.size and place.storage.size(path):
            return f"{path.rpartition('/')[2]} should be empty"
    except CheckpointInvalid as error:
        return error.reason
    except OSError as error:
        return in_words(error)
    finally:
        copies.close()
    return ""
