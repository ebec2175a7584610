"""Find a job and its tiers as the command line names them; hold what all commands share.

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
from outlast.checkpoint.catalog import made_with
from outlast.checkpoint.manifest import Place
from outlast.config import Settings
from outlast.errors import ConfigError, OutlastError, nearest
from outlast.ledger.job import Job, read_job
from outlast.storage import open_storage
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
            self._progress = _line()
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


def _line() -> Progress:
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
