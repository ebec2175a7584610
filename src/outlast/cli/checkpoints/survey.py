"""Find a job and its tiers as the command line names them, and which save is in which tier.

Manifests are read, data is not; of the files in directories the sizes are looked at where that is
asked for (``odd_files``). A step is shown as its newest save that verifies. Older saves of
it, which retention has yet to remove, and other jobs' checkpoints are kept apart.

``bar`` says how far a long command is: a line on standard error, where a person is looking at it.
It appears after two seconds, so that what is quick says nothing; it goes when the work is done.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

import click
import msgspec

from outlast import config
from outlast.checkpoint.catalog import find_saves, made_with, stands
from outlast.checkpoint.manifest import (
    ABANDONED,
    FULL,
    MANIFEST,
    Manifest,
    Place,
    SaveName,
    decode,
    num_bytes,
    parse,
    part_file,
    shard_file,
    signed_by,
    state_file,
)
from outlast.checkpoint.transfer import inventory_of
from outlast.config import Settings
from outlast.errors import CheckpointInvalid, ConfigError, OutlastError, StorageError, nearest
from outlast.ledger.file import read_events
from outlast.ledger.job import Job, read_job
from outlast.ledger.past import Past
from outlast.policy.rollbacks import is_undone
from outlast.storage import Directory, Storage, open_storage
from outlast.tiers import Tier

if TYPE_CHECKING:
    from rich.progress import Progress

DIRECTORY = click.argument("directory", required=False)
JSON = click.option("--json", "as_json", is_flag=True, help="One JSON object and nothing else.")
TIER = click.option("--tier", default=None, help="Only this tier, by its name.")


class JobAt(NamedTuple):
    """A job that was found where the command line says.

    Attributes:
        given: the directory as it was typed, or None.
        settings: those in force there.
        job: who it is.
    """

    given: str | None
    settings: Settings
    job: Job

    def next(self, name: str, *flags: str) -> str:
        """The line that says which command to go on with."""
        where = [shlex.quote(self.given)] if self.given else []
        return " ".join(["Next: outlast checkpoints", name, *where, *flags])

    def hint(self) -> str:
        """Where else checkpoints may lie: in the tiers that the job was made with."""
        made = [value for key, value in self.job.settings.items() if key.startswith("tier")]
        urls = {value.partition(", every ")[0] for value in made}
        elsewhere = sorted(urls - {tier.url for tier in self.settings.tiers})
        if not elsewhere:
            return ""
        return (
            f". The job was made with checkpoints in {', '.join(elsewhere)}: go where its "
            "outlast.toml is, or name that file in OUTLAST_CONFIG"
        )


def find_job(directory: str | None, *, writes: bool = False) -> JobAt:
    """The job in ``directory``, or where the settings say.

    Where no settings say which tiers it has, they are those that it was made with.

    Args:
        directory: as it was typed.
        writes: whether files in the tiers will be written or removed. What a file says is not
            enough for that.

    Raises:
        ConfigError, StorageError: there is none, or it cannot be read.
    """
    settings = config.load({"dir": directory})
    at = JobAt(directory, settings, read_job(settings.dir))
    made = made_with(at.job) if settings.origin["tier"] == "default" else ()
    if not made:
        return at
    if writes:
        raise ConfigError(f"which tiers to write to must be set{at.hint()}")
    return at._replace(settings=msgspec.structs.replace(settings, tiers=made))


def tiers_of(settings: Settings, only: str | None = None) -> list[Tier]:
    """The tiers that can be reached from here.

    Raises:
        ConfigError: ``only`` is none of them.
    """
    reachable = [tier for tier in settings.tiers if tier.kind != "memory"]
    if only is None:
        return reachable
    for tier in settings.tiers:
        if tier.name == only and tier.kind == "memory":
            choice = " or ".join(tier.name for tier in reachable)
            raise ConfigError(
                f"tier {only} is memory, which only the running job reaches; choose {choice}"
            )
    found = [tier for tier in reachable if tier.name == only]
    if not found:
        names = tuple(tier.name for tier in reachable)
        raise ConfigError(f"{only!r} is not a tier of this job;{nearest(only, names)}")
    return found


def places_of(
    settings: Settings, only: str | None = None
) -> tuple[dict[str, Place], dict[str, str]]:
    """Tier → place of those that could be opened, and tier → reason of the others."""
    places: dict[str, Place] = {}
    unreadable: dict[str, str] = {}
    for tier in tiers_of(settings, only):
        try:
            places[tier.name] = Place(tier.name, open_storage(tier.url))
        except (OutlastError, OSError) as error:
            unreadable[tier.name] = f"it cannot be opened: {in_words(error)}"
    return places, unreadable


def in_words(error: Exception) -> str:
    """What an error says, in one line."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(str(text).split()) or type(error).__name__


APPEARS_AFTER_S: Final = 2.0


class Bar:
    """Bytes done of bytes in all, over several parts of the work.

    Args:
        total: bytes in all.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._before = self._done = 0
        self._label = ""
        self._began_s = time.monotonic()
        self._progress: Progress | None = None
        self._terminal = sys.stderr.isatty()

    def begin(self, label: str) -> None:
        """The next part starts; its bytes are counted on top of what was done before."""
        self._label, self._before = label, self._done

    def part(self, done: int, _total: int) -> None:
        """``done`` bytes of this part are done."""
        self.advance(self._before + done - self._done)

    def advance(self, num_bytes: int) -> None:
        """So many more bytes are done; may be called from any one thread at a time."""
        self._done += max(num_bytes, 0)
        if not self._terminal or time.monotonic() - self._began_s < APPEARS_AFTER_S:
            return
        if self._progress is None:
            self._progress = _progress_line()
            self._progress.add_task(self._label, total=self._total)
            self._progress.start()
        self._progress.update(
            self._progress.task_ids[0],
            description=self._label,
            completed=min(self._done, self._total),
        )

    def close(self) -> None:
        """Take the line away."""
        if self._progress is not None:
            self._progress.stop()


def _progress_line() -> Progress:
    from rich.console import Console  # only where somebody waits so long
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        DownloadColumn(),
        TimeRemainingColumn(),
        TextColumn("left"),
        console=Console(stderr=True),
        transient=True,
    )


@contextlib.contextmanager
def bar(total: int) -> Iterator[Bar]:
    """A bar for ``total`` bytes that goes away with the block."""
    shown = Bar(total)
    try:
        yield shown
    finally:
        shown.close()


def size_of(manifest: Manifest) -> int:
    """Bytes of the files that a manifest names."""
    return num_bytes(manifest)


class SaveCopy(NamedTuple):
    """One save in one tier.

    Attributes:
        state: "committed", "invalid" (its manifest does not verify) or "unfinished" (it has none).
        manifest: where it is committed.
        reason: why it is invalid.
        job: whose it says it is; "" where it does not say.
    """

    state: str
    manifest: Manifest | None = None
    reason: str = ""
    job: str = ""

    @property
    def num_bytes(self) -> int:
        """Bytes of the files that the manifest names."""
        return size_of(self.manifest) if self.manifest else 0

    @property
    def restartable(self) -> bool:
        """Whether a job can be resumed from it, if its bytes verify."""
        return self.manifest is not None and self.manifest.kind == FULL


class Survey(NamedTuple):
    """What checkpoints there are, in which tiers.

    Attributes:
        past: what the ledger says besides: which were seen to be healthy, which were undone.
        tiers: names of the tiers that were asked for, in order of speed.
        places: tier → place, of those that could be listed.
        unreadable: tier → why it could not be listed.
        copies: save → tier → what is there of this job, oldest first.
        others: the same of other jobs.
    """

    tiers: tuple[str, ...]
    places: dict[str, Place]
    unreadable: dict[str, str]
    copies: dict[SaveName, dict[str, SaveCopy]]
    others: dict[SaveName, dict[str, SaveCopy]]
    past: Past

    def manifests(self, save: SaveName) -> dict[str, Manifest]:
        """Tier → manifest of a save, of those that verify."""
        here = self.copies.get(save, {})
        return {tier: copy.manifest for tier, copy in here.items() if copy.manifest}

    def at(self, tier: str) -> dict[SaveName, SaveCopy]:
        """Save → what is in ``tier``, oldest first."""
        return {save: here[tier] for save, here in self.copies.items() if tier in here}

    def saves(self) -> list[SaveName]:
        """Saves with a manifest that verifies in some tier, oldest first."""
        return [save for save in self.copies if self.manifests(save)]

    def newest(self) -> dict[int, SaveName]:
        """Step → the save that a reader takes of it: the newest that verifies, or the newest."""
        return {save.step: save for save in [*self.copies, *self.saves()]}

    def superseded(self) -> list[SaveName]:
        """Saves whose step was saved again since, oldest first."""
        newest = self.newest()
        return [save for save in self.copies if save < newest[save.step]]

    def state(self, save: SaveName) -> str:
        """What a save is in the best of its copies."""
        for manifest in self.manifests(save).values():
            return "committed" if manifest.kind == FULL else "weights only"
        states = {copy.state for copy in self.copies[save].values()}
        return "invalid" if "invalid" in states else "unfinished"

    def health(self, save: SaveName) -> str:
        """What is known of the loss behind a save: "healthy", "unhealthy" or "unknown"."""
        manifests = self.manifests(save).values()
        if manifests and not any(stands(one, self.past.rollbacks) for one in manifests):
            return "unhealthy"
        return "healthy" if manifests and save.step in self.past.healthy else "unknown"

    def places_in_words(self) -> str:
        """The places that could be listed, as a person would write them."""
        return " or ".join(place.storage.describe() for place in self.places.values())

    def complain(self) -> None:
        """Say on standard error which tiers could not be read."""
        for tier, reason in self.unreadable.items():
            click.echo(f"outlast: tier {tier}: {reason}; going on without it", err=True)


def survey(at: JobAt, only: str | None = None) -> Survey:
    """List every tier and read every manifest.

    Raises:
        ConfigError: ``only`` is not a tier.
        StorageError: no tier can be listed.
    """
    places, unreadable = places_of(at.settings, only)
    ours: dict[SaveName, dict[str, SaveCopy]] = {}
    others: dict[SaveName, dict[str, SaveCopy]] = {}
    for tier, place in list(places.items()):
        try:
            for save, copy in _copies_in(place.storage):
                found = ours if copy.job in ("", at.job.id) else others
                found.setdefault(save, {})[tier] = copy
        except OSError as error:
            del places[tier]
            unreadable[tier] = f"{place.storage.describe()} cannot be listed: {in_words(error)}"
    if not places:
        reasons = "; ".join(unreadable.values())
        raise StorageError(f"{reasons}. Look at the disk, the network and its permissions")
    names = tuple(tier.name for tier in tiers_of(at.settings, only))
    past = Past(at.settings.dir).look()
    in_order, theirs = dict(sorted(ours.items())), dict(sorted(others.items()))
    return Survey(names, places, unreadable, in_order, theirs, past)


def _copies_in(storage: Storage) -> Iterator[tuple[SaveName, SaveCopy]]:
    found = find_saves(storage)
    for save in found.committed:
        yield save, look(storage, save)
    for save in found.unfinished:
        yield save, _unfinished(storage, save)


def look(storage: Storage, save: SaveName) -> SaveCopy:
    """One save in one place, its manifest read."""
    try:
        data = storage.read(f"{save}/{MANIFEST}")
        if data == ABANDONED:
            return _unfinished(storage, save)
        manifest = decode(data, save)
        return SaveCopy("committed", manifest, job=manifest.job)
    except CheckpointInvalid as error:
        return SaveCopy("invalid", reason=error.reason, job=_job_of(storage, save))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return _unfinished(storage, save)
    except OSError as error:
        return SaveCopy("invalid", reason=f"{MANIFEST} cannot be read: {in_words(error)}")


class OddFiles(NamedTuple):
    """What the sizes of a copy's files say.

    Attributes:
        num: files that the manifest names.
        found: name → what is wrong with its size, of those that have not the manifest's.
    """

    num: int
    found: dict[str, str]


def odd_files(found: Survey, save: SaveName) -> dict[str, OddFiles]:
    """Tier → files of a save that are missing or cut short there; only tiers with such files.

    Three look-ups a rank, and nothing is read, unless sizes do not add up: then that rank's part,
    which says which file it is. An object store's objects are whole or not there at all, and each
    look-up is a request: only directories are looked at.
    """
    odd = {}
    for tier, manifest in found.manifests(save).items():
        place = found.places.get(tier)
        if place is not None and isinstance(place.storage, Directory):
            sizes = _sizes(place, manifest)
            if sizes.found and place.storage.exists(f"{save}/{MANIFEST}"):  # else it was removed
                odd[tier] = sizes
    return odd


def _sizes(place: Place, manifest: Manifest) -> OddFiles:
    num, odd = 0, {}
    for files in _by_rank(place, manifest):
        num += len(files)
        for name, size in files.items():
            has = _size(place, manifest.save, name)
            if has != size:
                odd[name] = "is missing" if has is None else f"has {has:,} of {size:,} bytes"
    return OddFiles(num, odd)


def _by_rank(place: Place, manifest: Manifest) -> Iterator[dict[str, int]]:
    """The files that a manifest names, with their sizes; of a rank's part the sum is enough."""
    if not manifest.parts:
        yield {name: entry.size for name, entry in manifest.files.items()}
    inventory = inventory_of(manifest, [place])
    for rank, part in enumerate(manifest.parts):
        said = {part_file(rank): part.size}
        has = {
            name: size
            for name in (shard_file(rank), state_file(rank))
            if (size := _size(place, manifest.save, name)) is not None
        }
        if sum(has.values()) != part.num_bytes:
            with contextlib.suppress(CheckpointInvalid, OSError):
                has = {name: entry.size for name, entry in inventory.part(rank).files.items()}
        yield said | has


def _size(place: Place, save: SaveName, name: str) -> int | None:
    try:
        return place.storage.size(f"{save}/{name}")
    except OSError:
        return None


def _unfinished(storage: Storage, save: SaveName) -> SaveCopy:
    return SaveCopy("unfinished", reason=f"{MANIFEST} is missing", job=_job_of(storage, save))


def _job_of(storage: Storage, save: SaveName) -> str:
    try:
        return signed_by(storage, save) or ""
    except OSError:
        return ""


def promised(settings: Settings) -> dict[str, SaveName]:
    """Tier → the newest save that the ledger says was committed there."""
    first = next(tier.name for tier in settings.tiers if tier.kind != "memory")
    newest: dict[str, SaveName] = {}
    rollbacks = Past(settings.dir).look().rollbacks
    for event in read_events(settings.dir):
        if event.event in ("commit", "tier_copied"):
            tier, step = str(event.get("tier") or first), event.get("step")
            if isinstance(step, int) and not is_undone(rollbacks, event.attempt, step):
                save = parse(str(event.get("save") or "")) or SaveName(step)
                newest[tier] = max(newest.get(tier, save), save)
    return newest


def pick(at: JobAt, found: Survey, step: int | None) -> SaveName:
    """The newest save of ``step`` if some tier has one committed; by default the newest of all.

    By default what a rollback has undone is passed over.

    Raises:
        ConfigError: there is no such step.
        CheckpointInvalid: it is there and does not verify.
    """
    saves, newest = found.saves(), found.newest()
    if step is None and saves:
        return max((one for one in saves if found.health(one) != "unhealthy"), default=saves[-1])
    if step is None:
        raise nothing_there(at, found)
    if step in newest and newest[step] in saves:
        return newest[step]
    if step in newest:
        reason = next(iter(found.copies[newest[step]].values())).reason
        raise CheckpointInvalid(step, f"{reason}. See: outlast checkpoints verify --step {step}")
    steps = sorted({save.step for save in saves})
    raise ConfigError(
        f"step {step} is not in {found.places_in_words()}; committed steps: {known(steps)}"
    )


def nothing_there(at: JobAt, found: Survey) -> ConfigError:
    """The error that says that there is no checkpoint."""
    return ConfigError(
        f"there is no checkpoint in {found.places_in_words()} yet; train first, or give the job's "
        f"directory{at.hint()}"
    )


def known(steps: list[int]) -> str:
    """Steps for a message; of many, the newest."""
    shown = ", ".join(map(str, steps[-12:]))
    return f"…, {shown}" if len(steps) > 12 else shown or "none yet"
