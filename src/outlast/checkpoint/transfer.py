"""Copying a checkpoint's files from place to place, and mending one place from the others.

Guarantees: a file appears in its new place only in full, and only of blocks that matched the
manifest; in a place that is mended, the manifest comes last.
What can go wrong: no place has a right copy of a block (CheckpointInvalid); a place cannot be read
or written (OSError).

A save has one manifest, the same everywhere. Before format 3 a place could hold another save of the
same step under the same name: nothing of it is mended from here. A place without a manifest has a
copy in the making, or on its way out.

Nothing here knows of tensors or needs torch: the keeper and the command line do without it.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from outlast.checkpoint.catalog import newest
from outlast.checkpoint.copies import MISSING, Bounce, FileCopies, in_words
from outlast.checkpoint.inventory import Inventory, num_bytes
from outlast.checkpoint.manifest import MANIFEST, FileEntry, LaterFormat, Manifest, decode
from outlast.checkpoint.names import SaveName, sign
from outlast.checkpoint.places import Place, as_places
from outlast.errors import CheckpointInvalid
from outlast.storage import Storage

Progress = Callable[[int, int], None]


class Repaired(NamedTuple):
    """A file that is whole again: its name, the place's name, and where its bytes came from."""

    file: str
    place: str
    source: str


class Found(NamedTuple):
    """A place's manifest of a save: its bytes, and what they say or why they say nothing."""

    data: bytes = b""
    manifest: Manifest | None = None
    problem: str = ""
    is_there: bool = True
    is_later: bool = False
    error: OSError | None = None


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


def inventory_of(manifest: Manifest, places: Sequence[Place]) -> Inventory:
    """What a save consists of, as any of the places where it lies says."""

    def read(name: str, entry: FileEntry) -> bytes:
        copies = FileCopies(places, f"{manifest.save}/{name}", entry)
        try:
            return copies.whole()
        finally:
            copies.close()

    return Inventory(manifest, read)


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


def look(place: Place, save: SaveName) -> Found:
    """The manifest of a save in one place; raises nothing."""
    try:
        data = place.storage.read(f"{save}/{MANIFEST}")
    except MISSING:
        return Found(problem=f"{MANIFEST} is missing", is_there=False)
    except OSError as error:
        return Found(problem=f"{MANIFEST}: {in_words(error)}", error=error)
    try:
        return Found(data, decode(data, save))
    except CheckpointInvalid as error:
        is_later = isinstance(error, LaterFormat)
        return Found(data, problem=error.reason, is_later=is_later)


def read_manifest(where: Storage | Sequence[Place], which: int | SaveName) -> Manifest:
    """The manifest of a save, or of the newest save of a step that has one that verifies.

    It is taken from the first place where it verifies.

    Raises:
        CheckpointInvalid: there is none, or none that verifies.
        OSError: a place failed in another way than by a missing file.
    """
    places = as_places(where)

    def read(save: SaveName) -> Manifest:
        found: dict[str, Found] = {}
        for place in places:
            one = found[place.name] = look(place, save)
            if one.manifest is not None:
                return one.manifest
        raise none_valid(found, save.step)

    return newest(places, which, read)


def none_valid(found: Mapping[str, Found], step: int) -> Exception:
    """What to raise when no place has a manifest that verifies."""
    several = len(found) > 1
    reason = "; ".join(
        f"{name}: {one.problem}" if several else one.problem for name, one in found.items()
    )
    failure = next((one.error for one in found.values() if one.error), None)
    if failure is None:
        return CheckpointInvalid(step, reason)
    return OSError(failure.errno or errno.EIO, reason) if several else failure


def mend_manifest(place: Place, manifest: Manifest, data: bytes) -> None:
    """Put another place's manifest where it is missing or does not verify; its files come first."""
    if manifest.save.nonce:
        sign(place.storage, manifest.save, manifest.job)
    place.storage.put(f"{manifest.save}/{MANIFEST}", data)


def repair_save(
    places: Sequence[Place], save: SaveName, progress: Progress | None = None
) -> list[Repaired]:
    """Verify every file of a save in every place that holds it, and mend what can be mended.

    Args:
        places: in order of speed.
        save: which.
        progress: told (bytes verified, bytes in all).

    Returns:
        What was mended, in the order in which it was done.

    Raises:
        CheckpointInvalid: something could not be mended; says what, in which place, and why. All
            else has been mended nevertheless.
        OSError: no place has a manifest that verifies, and one of them cannot be read.
    """
    found = {place.name: look(place, save) for place in places}
    first = next((one for one in found.values() if one.manifest is not None), None)
    if first is None:
        raise none_valid(found, save.step)
    torn = [p for p in places if is_torn(found[p.name])]
    # A torn manifest was the others' once, or its files are another save's and go with it.
    held = [
        (place, found[place.name] if found[place.name].manifest is not None else first)
        for place in places
        if found[place.name].manifest is not None or place in torn
    ]
    mending = _Mending(places, save, _total(held), progress)
    for place, one in held:
        is_whole = mending.mend_place(place, one)
        if is_whole and place in torn:
            source = next(name for name, other in found.items() if other is first)
            mending.mend_manifest(place, first, source)
    left = mending.left + [
        f"{name}: {one.problem}" for name, one in found.items() if one.error or one.is_later
    ]
    if left:
        raise CheckpointInvalid(save.step, "; ".join(left))
    return mending.repaired


def is_torn(found: Found) -> bool:
    """Whether there is a manifest that was readable once."""
    return found.is_there and not found.is_later and found.error is None and found.manifest is None


def _total(held: Sequence[tuple[Place, Found]]) -> int:
    return sum(num_bytes(one.manifest) for _, one in held if one.manifest is not None)


class _Mending:
    """One run of ``repair_save``: what was mended, and what is left in words."""

    def __init__(
        self, places: Sequence[Place], save: SaveName, total: int, progress: Progress | None
    ) -> None:
        self.repaired: list[Repaired] = []
        self.left: list[str] = []
        self._places = places
        self._save = save
        self._total = total
        self._done = 0
        self._progress = progress

    def mend_place(self, place: Place, found: Found) -> bool:
        """Verify and mend all files of one place; whether all are right now."""
        assert found.manifest is not None  # noqa: S101 - the caller has chosen one
        num_left = len(self.left)
        # A part comes before the files that it names, and is mended by then.
        for name, entry in inventory_of(found.manifest, self._places).walk():
            path = f"{self._save}/{name}"
            problem = find_problem(place, path, entry)
            if problem:
                try:
                    source = mend_file(self._places, place, path, entry)
                    self.repaired.append(Repaired(name, place.name, source))
                except CheckpointInvalid as error:
                    self.left.append(f"{place.name}: {problem} ({error.reason})")
                except OSError as error:
                    self.left.append(f"{place.name}: {problem} ({in_words(error)})")
            self._done += entry.size
            if self._progress is not None:
                self._progress(self._done, self._total)
        return len(self.left) == num_left

    def mend_manifest(self, place: Place, found: Found, source: str) -> None:
        """Put the manifest back where it was torn."""
        assert found.manifest is not None  # noqa: S101 - the caller has chosen one
        try:
            mend_manifest(place, found.manifest, found.data)
            self.repaired.append(Repaired(MANIFEST, place.name, source))
        except OSError as error:
            self.left.append(f"{place.name}: {MANIFEST}: {in_words(error)}")


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
