"""Which saves there are, and removing those that may go.

Guarantees: the manifest of a save that goes is removed durably before any file that it names; an
unfinished save is never taken for a checkpoint; one whose manifest does not verify is not counted
among those that are kept. Removed is only what was read and recognised as this job's: by its
manifest, or where there is none that verifies by the note that was written first (see ``names``).
Another job's saves, those of a later format, and whatever does not say whose it is stay, and count
for nothing.

An unfinished save goes when a later one of the job is committed in the same place. Its writer may
still live (a machine that was paused and goes on). Of the two, one takes the manifest's name: the
writer, and the save stays; or whoever removes it, with a manifest that says so, and the writer
finds the name taken. A writer that comes when all of it is gone puts a manifest into a directory
without the note: that counts for nothing.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from outlast.checkpoint.manifest import ABANDONED, FULL, MANIFEST, LaterFormat, decode
from outlast.checkpoint.names import NOTE, SaveName, parse, signed_by
from outlast.checkpoint.places import Place
from outlast.checkpoint.standing import stands
from outlast.errors import CheckpointInvalid
from outlast.policy.retention import removable
from outlast.policy.rollbacks import Rollback
from outlast.storage import Storage

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class Saves(NamedTuple):
    """The saves that have a directory, oldest first: those with a manifest, and those without."""

    committed: list[SaveName]
    unfinished: list[SaveName]


def find_saves(storage: Storage) -> Saves:
    """All saves, of whichever job. A manifest's presence is a claim; only reading can verify it.

    Raises:
        OSError: the storage cannot be listed.
    """
    found = Saves([], [])
    for save in sorted(filter(None, map(parse, storage.children()))):
        there = storage.exists(f"{save}/{MANIFEST}")
        (found.committed if there else found.unfinished).append(save)
    return found


def find_standing(places: Sequence[Place]) -> set[int] | None:
    """The committed steps of all places together; None where no place can be listed."""
    found: list[Saves] = []
    for place in places:
        with contextlib.suppress(OSError):
            found.append(find_saves(place.storage))
    return {save.step for saves in found for save in saves.committed} if found else None


def saves_of(places: Sequence[Place], step: int) -> list[SaveName]:
    """The saves of a step that have a manifest in any place, the newest first.

    Where there is none it is the name that formats 1 and 2 gave it: whoever looks for that finds
    nothing, and says so.

    Raises:
        OSError: no place can be listed.
    """
    found: set[SaveName] = set()
    failure: OSError | None = None
    for place in places:
        try:
            found |= {save for save in find_saves(place.storage).committed if save.step == step}
        except OSError as error:
            failure = failure or error
    if not found and failure is not None:
        raise failure
    return sorted(found, reverse=True) or [SaveName(step)]


def newest(
    places: Sequence[Place], which: int | SaveName, act: Callable[[SaveName], Result]
) -> Result:
    """``act(save)``; of a step with the newest of its saves with which that works.

    Raises:
        CheckpointInvalid, OSError: it works with none: what was wrong with the newest.
    """
    saves = [which] if isinstance(which, SaveName) else saves_of(places, which)
    failure: Exception | None = None
    for save in saves:
        try:
            return act(save)
        except (CheckpointInvalid, OSError) as error:
            if len(saves) > 1:
                logger.warning("%s: %s", save, error)
            failure = failure or error
    assert failure is not None  # noqa: S101 - there is always a name to try
    raise failure


def remove_save(storage: Storage, save: SaveName, *, is_unfinished: bool = False) -> bool:
    """Remove one save: first, durably, the manifest; then the rest. Whether it was removed.

    Args:
        storage: where it lies.
        save: which.
        is_unfinished: it had no manifest; if it has one by now, it stays.

    Raises:
        OSError: as the storage gave it.
    """
    manifest = f"{save}/{MANIFEST}"
    if is_unfinished:
        if not storage.put_new(manifest, ABANDONED) and storage.read(manifest) != ABANDONED:
            return False
    else:
        storage.remove(manifest)
    # What is left when this is cut short says whose it is.
    storage.remove_tree(str(save), (NOTE, MANIFEST))
    return True


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the checkpoints besides what lies in them.

    Attributes:
        healthy: steps that were seen to be healthy; None where nobody watches.
        rollbacks: what they have undone counts as not valid.
    """

    healthy: frozenset[int] | None = None
    rollbacks: tuple[Rollback, ...] = ()


class Expendable(msgspec.Struct, frozen=True):
    """What retention allows to remove.

    Attributes:
        saves: those that may go, oldest first.
        unfinished: those of them that have no manifest.
        unreadable: the first manifest that could not be read; its save is left alone.
    """

    saves: tuple[SaveName, ...]
    unfinished: frozenset[SaveName]
    unreadable: OSError | None = None


def expendable(
    storage: Storage,
    job: str,
    *,
    keep: int,
    invalid: Collection[SaveName] = (),
    in_use: Callable[[], Collection[SaveName]] = tuple,
    health: Health = Health(),  # noqa: B008 - frozen
) -> Expendable:
    """The saves of a job that may go; see ``policy.retention``. Manifests are read, data is not.

    Args:
        storage: where checkpoints lie.
        job: id of the job.
        keep: how many that a job can be resumed from stay, at least 1.
        invalid: saves that are known not to verify, besides those whose manifests do not.
        in_use: gives the saves that somebody writes or reads now; they stay. Asked once it is known
            which are there: what is committed, and to be read, later than that is not listed.
        health: which were seen to be healthy, and which were undone.

    Raises:
        OSError: the storage cannot be listed.
    """
    found = find_saves(storage)
    read = _Read()
    for save in found.committed:
        read.look(storage, save, job, is_invalid=save in invalid, rollbacks=health.rollbacks)
    ours, healthy = read.ours, health.healthy
    full = [save for save in ours if save not in read.rotten and save not in read.weights_only]
    newest = max(full, key=lambda save: save.written, default=None)
    unfinished = {
        save
        for save in {*found.unfinished, *read.abandoned}
        if newest is not None and _is_before(save, newest) and read.may_go(storage, save, job)
    }
    gone = removable(
        ours,
        unfinished,
        keep=keep,
        invalid=read.rotten,
        weights_only=read.weights_only,
        superseded=_superseded(read),
        in_use=in_use(),
        healthy=None if healthy is None else {save for save in ours if save.step in healthy},
    )
    return Expendable(tuple(gone), frozenset(unfinished), read.unreadable)


def _is_before(save: SaveName, newest: SaveName) -> bool:
    """Whether the job has gone on since this unfinished save was begun.

    Of two sessions that carry one attempt's number nobody knows which is the job's.
    """
    if save.attempt == newest.attempt:
        return save.nonce == newest.nonce and 0 <= save.serial < newest.serial
    return 0 <= save.attempt < newest.attempt


class _Read:
    """What the manifests of a place say of a job's saves."""

    def __init__(self) -> None:
        self.ours: list[SaveName] = []
        self.rotten: set[SaveName] = set()
        self.abandoned: set[SaveName] = set()
        self.weights_only: set[SaveName] = set()
        self.unreadable: OSError | None = None

    def look(
        self,
        storage: Storage,
        save: SaveName,
        job: str,
        *,
        is_invalid: bool,
        rollbacks: Sequence[Rollback],
    ) -> None:
        """Read one manifest; what cannot be read or recognised now is left out."""
        try:
            data = storage.read(f"{save}/{MANIFEST}")
            if data == ABANDONED:  # whoever began to remove it did not come to the end
                self.abandoned.add(save)
                return
            manifest = decode(data, save)
        except FileNotFoundError:
            return  # somebody removes it at this moment
        except LaterFormat:
            return
        except CheckpointInvalid:
            if self.is_signed(storage, save, job):
                self.ours.append(save)
                self.rotten.add(save)
            return
        except OSError as error:
            self.unreadable = self.unreadable or error
            return
        if manifest.job != job:
            return
        self.ours.append(save)
        if is_invalid or not stands(manifest, rollbacks) or not self._is_noted(storage, save):
            self.rotten.add(save)
        elif manifest.kind != FULL:
            self.weights_only.add(save)

    def is_signed(self, storage: Storage, save: SaveName, job: str) -> bool:
        """Whether the save's directory says that it is of ``job``."""
        try:
            return signed_by(storage, save) == job
        except OSError as error:
            self.unreadable = self.unreadable or error
            return False

    def may_go(self, storage: Storage, save: SaveName, job: str) -> bool:
        """Whether an unfinished save is the job's, or the last of what somebody has removed.

        A directory with nothing in it is the job's if its session's name is that of other saves:
        whoever wrote or removed it was killed just then.
        """
        if self.is_signed(storage, save, job):
            return True
        if save in self.abandoned:
            return not self._is_noted(storage, save)
        sessions = {(one.attempt, one.nonce) for one in self.ours}
        return (save.attempt, save.nonce) in sessions and not storage.children(str(save))

    def _is_noted(self, storage: Storage, save: SaveName) -> bool:
        """Whether nothing was removed from under the writer's hands: the note came first."""
        try:
            return not save.nonce or storage.exists(f"{save}/{NOTE}")
        except OSError as error:
            self.unreadable = self.unreadable or error
            return True


def _superseded(read: _Read) -> set[SaveName]:
    """Saves of which there is a newer one of the same step that says at least as much."""
    old = set()
    newest: dict[int, tuple[bool, bool]] = {}  # of each step: whether there is a full one, and one
    for save in sorted(set(read.ours) - read.rotten, reverse=True):
        is_full = save not in read.weights_only
        has_full, has_any = newest.get(save.step, (False, False))
        if has_full or (has_any and not is_full):
            old.add(save)
        newest[save.step] = (has_full or is_full, True)
    return old


def prune(
    storage: Storage,
    job: str,
    *,
    keep: int,
    invalid: Collection[SaveName],
    in_use: Callable[[], Collection[SaveName]] = tuple,
    health: Health = Health(),  # noqa: B008 - frozen
) -> list[SaveName]:
    """Remove what retention allows; returns the saves removed.

    Raises:
        OSError: the first save that could not be read or removed; all others were tried, so that
            one that cannot go does not fill the storage with those after it.
    """
    found = expendable(storage, job, keep=keep, invalid=invalid, in_use=in_use, health=health)
    removed = []
    failure = found.unreadable
    for save in found.saves:
        try:
            is_gone = remove_save(storage, save, is_unfinished=save in found.unfinished)
        except OSError as error:
            failure = failure or error
        else:
            removed += [save] * is_gone
    if failure is not None:
        raise failure
    return removed
