"""Find saves, decide whose they are, and remove those that may go.

A job sees a place without what rollbacks have undone and without other jobs' saves (``standing``).
Both follow from the manifest (see ``policy.rollbacks``), so they hold for every tier, and for what
is copied there late. A manifest that cannot be understood is another job's if its directory says so
(see ``manifest``). Where nothing says so, it is taken for this job's: a job that has lost what it
had must not begin anew in silence.

Guarantees of removal (``prune``): the manifest of a save that goes is removed durably before any
file that it names; an unfinished save is never taken for a checkpoint; one whose manifest does not
verify is not counted among those that are kept. Only what was read and recognised as this job's is
removed: by its manifest, or where there is none that verifies by the note that was written first.
Another job's saves, those of a later format, and whatever does not say whose it is stay, and count
for nothing.

An unfinished save goes when a later one of the job is committed in the same place. Its writer may
still live (a machine that was paused and goes on). One of the two takes the manifest's name. If it
is the writer, the save stays. If it is the remover, its manifest says that the save is abandoned,
and the writer finds the name taken. A writer that comes when everything is gone puts a manifest
into a directory without the note: that counts for nothing.

A path that a person gives (``saves_at``) is a job's directory (its tiers are used, and only what is
that job's), any directory or bucket in which steps lie, or one save's own directory.

``job.json`` says which job a directory belongs to (``open_job``). A job that takes itself for
another one does not see its own checkpoints, and begins anew. So a record that is missing, empty or
damaged is made again only with the id that the job had, as far as that is proven:

- by the ledger, each of whose lines names the job, if all name the same one;
- by the checkpoints below the job's directory, if all name the same one, and the ledger no other.

Where neither proves it, and the directory holds something of a job, nothing is begun, and the error
says what to do. Checkpoints elsewhere prove nothing, because jobs may share a tier; where a job has
lived they are reason enough not to begin anew. A directory that nobody has used is a new job's.

Rejected: the newest of several ids (a job that began anew by mistake has the newest lines, and
nothing to go on from).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import re
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from outlast import config
from outlast.checkpoint.manifest import (
    ABANDONED,
    FULL,
    MANIFEST,
    NOTE,
    LaterFormat,
    Manifest,
    Place,
    SaveName,
    decode,
    parse,
    signed_by,
)
from outlast.config import Settings
from outlast.errors import (
    CheckpointInvalid,
    ConfigError,
    OutlastError,
    ResumeRefused,
    StorageError,
    remedy,
)
from outlast.ledger import job as jobs
from outlast.ledger.file import FILE_NAME as LEDGER
from outlast.ledger.job import (
    FILE_NAME,
    Job,
    NoRecord,
    ids_in_ledger,
    make_directory,
    new_job,
    raise_unless_writable,
    read_record,
    write_record,
)
from outlast.ledger.narrator import say
from outlast.policy.retention import removable
from outlast.policy.rollbacks import Rollback, is_undone
from outlast.storage import Directory, Storage, open_storage
from outlast.tiers import Tier, parse_tiers

# --- which saves count for a job ------------------------------------------------------------------


class _ManifestHead(msgspec.Struct):
    job: str
    attempt: int
    step: int


class Standing:
    """A storage without the manifests of what is no checkpoint of this job, or was undone.

    Args:
        storage: the place itself; whatever is not about manifests is asked of it.
        job: id of the job.
        rollbacks: of the job.

    Attributes:
        others: newest step of each other job whose checkpoints were seen here.
    """

    def __init__(self, storage: Any, job: str, rollbacks: Sequence[Rollback]) -> None:
        self.others: dict[str, int] = {}
        self._storage = storage
        self._job = job
        self._rollbacks = rollbacks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def exists(self, name: str) -> bool:
        """Whether there is a file ``name``, and is not the manifest of what is not this job's."""
        if not _is_manifest(name):
            return bool(self._storage.exists(name))
        try:
            self.read(name)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return bool(self._storage.exists(name))  # it is there, and cannot be read now
        return True

    def read(self, name: str) -> bytes:
        """The whole (small) file ``name``.

        Raises:
            FileNotFoundError: there is none, or it is the manifest of what is not this job's.
        """
        data: bytes = self._storage.read(name)
        if _is_manifest(name) and not self._stands(name, data):
            raise FileNotFoundError(errno.ENOENT, "not a checkpoint of this job that stands", name)
        return data

    def _stands(self, name: str, data: bytes) -> bool:
        if data == ABANDONED:
            return False
        save = parse(name.partition("/")[0])
        try:
            head = msgspec.json.decode(data, type=_ManifestHead)
        except (msgspec.MsgspecError, UnicodeDecodeError):  # damaged: whoever reads it finds out
            job = None if save is None else signed_by(self._storage, save)
            return job in (None, self._job)
        if head.job != self._job:
            self.others[head.job] = max(self.others.get(head.job, 0), head.step)
            return False
        return not is_undone(self._rollbacks, head.attempt, head.step)


def standing(places: Sequence[Place], job: str, rollbacks: Sequence[Rollback]) -> list[Place]:
    """The places as a job sees them after ``rollbacks``."""
    return [place._replace(storage=Standing(place.storage, job, rollbacks)) for place in places]


def stands(manifest: Manifest, rollbacks: Sequence[Rollback]) -> bool:
    """Whether a checkpoint may be gone on from."""
    return not is_undone(rollbacks, manifest.attempt, manifest.step)


def _is_manifest(name: str) -> bool:
    return name.rpartition("/")[2] == MANIFEST


# --- finding and removing saves -------------------------------------------------------------------

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class FoundSaves(NamedTuple):
    """The saves that have a directory, oldest first: those with a manifest, and those without."""

    committed: list[SaveName]
    unfinished: list[SaveName]


def find_saves(storage: Storage) -> FoundSaves:
    """All saves, of whichever job. A manifest's presence is a claim; only reading can verify it.

    Raises:
        OSError: the storage cannot be listed.
    """
    found = FoundSaves([], [])
    for save in sorted(filter(None, map(parse, storage.children()))):
        there = storage.exists(f"{save}/{MANIFEST}")
        (found.committed if there else found.unfinished).append(save)
    return found


def find_standing(places: Sequence[Place]) -> set[int] | None:
    """The committed steps of all places together; None where no place can be listed."""
    found: list[FoundSaves] = []
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


def is_still_there(storage: Storage, save: SaveName) -> bool:
    """Whether a save whose manifest was just put is still there; if not, the manifest goes, too.

    A writer may be paused ahead of its manifest, and be taken for one that is gone: then its files
    are removed as those of an unfinished save, the save's note last of all (``remove_save``).

    Raises:
        OSError: as the storage gave it.
    """
    if storage.exists(f"{save}/{NOTE}"):
        return True
    storage.remove(f"{save}/{MANIFEST}")
    return False


class KnownHealth(msgspec.Struct, frozen=True, kw_only=True):
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
    health: KnownHealth = KnownHealth(),  # noqa: B008 - frozen
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
    read = _ManifestsRead()
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


class _ManifestsRead:
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


def _superseded(read: _ManifestsRead) -> set[SaveName]:
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
    health: KnownHealth = KnownHealth(),  # noqa: B008 - frozen
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


# --- from a path to places ------------------------------------------------------------------------

_TIER: Final = re.compile(  # as Tier is written into job.json
    r"^(?P<url>.+), every (?P<every>auto|[0-9]+), keep (?P<keep>[0-9]+)(?:, .*)?\Z"
)


def saves_at(
    path: str, step: int | None = None, tier: str | None = None
) -> tuple[Sequence[Place], list[SaveName]]:
    """Where checkpoints lie, and those that may be meant, the likeliest first.

    Args:
        path: see the top of this file.
        step: which step; any unless given.
        tier: this tier of the job only.

    Raises:
        ConfigError: there is none, or no such tier.
        OSError: the storage cannot be read.
    """
    directory = Path(path).absolute()
    named = parse(directory.name)
    if named is not None and directory.is_dir():
        places: Sequence[Place] = (Place("local", Directory(directory.parent)),)
        return places, [named] if step is None else saves_of(places, step)
    places = places_at(path, tier)
    if step is not None:
        return places, saves_of(places, step)
    committed = {found for place in places for found in find_saves(place.storage).committed}
    if not committed:
        raise ConfigError(f"there is no checkpoint in {places[0].storage.describe()}")
    return places, sorted(committed, reverse=True)


def places_at(path: str, tier: str | None = None) -> Sequence[Place]:
    """The places of ``path``, the fastest first.

    Raises:
        ConfigError: no such tier.
    """
    places = [Place(name, open_storage(url)) for name, url in urls_of(path, tier)]
    job = job_of(path)
    return standing(places, job, ()) if job else places


def job_of(path: str) -> str:
    """The id of the job in a directory, "" where there is none."""
    directory = Path(path)
    return jobs.read_job(directory).id if (directory / jobs.FILE_NAME).exists() else ""


def urls_of(path: str, tier: str | None = None) -> list[tuple[str, str]]:
    """Where the steps of ``path`` lie, fastest first; what is in memory only its keeper has.

    Raises:
        ConfigError: no such tier.
    """
    directory = Path(path).absolute()
    if "://" in path or not (directory / jobs.FILE_NAME).exists():
        if tier is not None:
            raise ConfigError(f"{path} is not a job's directory, so it has no tier {tier!r}")
        if "://" in path:
            return [("object", path)]
        below = directory / "checkpoints"
        return [("local", str(below if below.is_dir() else directory))]
    # Settings are those of whoever reads; the job may have been run with others.
    tiers = [(one.name, one.url, one.kind) for one in config.load({"dir": str(directory)}).tiers]
    made = [(one.name, one.url, one.kind) for one in made_with(jobs.read_job(directory))]
    below = directory / "checkpoints"
    if below.is_dir():
        made.append(("local", str(below), "directory"))
    for name, url, kind in made:
        if url not in {one[1] for one in tiers}:
            is_taken = name in {one[0] for one in tiers}
            tiers.append((url if is_taken else name, url, kind))
    readable = [(name, url) for name, url, kind in tiers if kind != "memory"]
    chosen = [one for one in readable if tier in (None, one[0])]
    if not chosen:
        names = ", ".join(name for name, _ in readable)
        raise ConfigError(f"{tier!r} is not a tier that can be read here; known: {names}")
    return chosen


def made_with(job: jobs.Job) -> tuple[Tier, ...]:
    """The tiers in job.json; none if they are no tiers, or the one that a job has by default."""
    tables = []
    for key, value in job.settings.items():
        found = _TIER.match(value) if key.startswith("tier.") else None
        if found:
            tables.append({"name": key.removeprefix("tier."), **found.groupdict()})
    if [table["name"] for table in tables] in ([], ["local"]):
        return ()
    try:
        return parse_tiers(tables, keep=1)
    except ConfigError:
        return ()


# --- which job a directory belongs to -------------------------------------------------------------

_TRACES: Final = (LEDGER, "membership", "rollbacks")  # of a job that has lived in a directory
_TRIES: Final = 20  # each is lost to somebody else who writes the record too
_PAUSE_S: Final = 0.05


class Proof(NamedTuple):
    """Which job it is, since when, and what says so."""

    id: str
    since_t: float
    by: str


class _OwnersSeen(NamedTuple):
    """What checkpoints say of whose they are: the jobs, and how many say nothing."""

    jobs: set[str]
    num_unknown: int


class _JobOf(msgspec.Struct):
    job: str


def open_job(directory: Path, settings: Settings) -> Job:
    """The job in ``directory``, made now if there is none, and found again if its record is lost.

    Raises:
        ConfigError: the directory cannot be one; or its record is damaged, and a job runs there.
        StorageError: it cannot be made, read or written.
        ResumeRefused: something of a job is there, and nothing says of which.
    """
    make_directory(directory)
    for _ in range(_TRIES):
        found = read_record(directory)
        if isinstance(found, Job):
            raise_unless_writable(directory)
            return found
        proof = _prove(directory, settings, found)
        job = new_job(settings, *(proof[:2] if proof else ()))
        if write_record(directory, job, found):
            _say(directory / FILE_NAME, found, job, proof)
        else:
            time.sleep(_PAUSE_S)
    if proof is not None:  # a job runs there, perhaps our own agent: its lock decides, not this
        return job
    raise ConfigError(
        f"{directory / FILE_NAME} is not a job's record, and is held by a job that runs; wait for "
        "it, or give another --dir"
    )


def _say(path: Path, found: NoRecord, job: Job, proof: Proof | None) -> None:
    if proof is not None:
        say(f"{path}: {found.why}; it is job {job.id}, as {proof.by} says, and is written anew")
    elif found.there:
        say(
            f"{path}: {found.why}, and nothing else is left of its job; this is a new one, {job.id}"
        )


def _prove(directory: Path, settings: Settings, found: NoRecord) -> Proof | None:
    """Which job it was; None where there was none.

    Raises:
        StorageError: what could say so cannot be read.
        ResumeRefused: it is not known which.
    """
    in_ledger = ids_in_ledger(directory)
    if len(in_ledger) == 1:
        ((job, since_t),) = in_ledger.items()
        return Proof(job, since_t, str(directory / LEDGER))
    tiers = [tier.url for tier in settings.tiers if tier.kind != "memory"]
    below = [url for url in tiers if Path(url).resolve().is_relative_to(directory.resolve())]
    here = _look(below)
    if len(here.jobs) == 1 and here.jobs <= (in_ledger.keys() or here.jobs):
        (job,) = here.jobs
        return Proof(job, in_ledger.get(job, 0.0), f"each checkpoint in {' and '.join(below)}")
    if in_ledger or here.jobs or here.num_unknown:
        raise _refused(directory, found, in_ledger.keys() | here.jobs)
    if not found.there and not any((directory / name).exists() for name in _TRACES):
        return None
    there = _look([url for url in tiers if url not in below])
    if there.jobs or there.num_unknown:
        raise _refused(directory, found, there.jobs)
    return None


def _refused(directory: Path, found: NoRecord, jobs: Iterable[str]) -> ResumeRefused:
    path = directory / FILE_NAME
    choice = " or ".join(f'{{"id": "{job}"}}' for job in sorted(jobs)) or "its old content"
    return ResumeRefused(
        f"{path}: {found.why}, and there are checkpoints that may be this job's, which nothing "
        f"proves; put {choice} into it to go on from them, or start anew with another --dir"
    )


def _look(urls: Iterable[str]) -> _OwnersSeen:
    """What the checkpoints in these places say.

    Raises:
        StorageError: a place does not answer: nothing may be concluded from that.
    """
    jobs: set[str] = set()
    num_unknown = 0
    for url in urls:
        try:
            storage = open_storage(url)
            for save in filter(None, map(parse, storage.children())):
                job, is_committed = _owner(storage, save)
                jobs |= {job} if job else set()
                num_unknown += is_committed and not job
        except (OSError, OutlastError) as error:
            words = getattr(error, "strerror", None) or error
            raise StorageError(
                f"whose checkpoints lie in {url} cannot be read: {words}; {remedy(error)}, or "
                f"bring {FILE_NAME} back from a copy"
            ) from None
    return _OwnersSeen(jobs, num_unknown)


def _owner(storage: Storage, save: SaveName) -> tuple[str, bool]:
    """Whose a save is, "" where it does not say; and whether it was committed."""
    try:
        data = storage.read(f"{save}/{MANIFEST}")
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        data = ABANDONED
    job = signed_by(storage, save) or ""
    if not job:
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
            job = msgspec.json.decode(data, type=_JobOf).job
    return job, data != ABANDONED
