"""Where a job under test works: its own directory, so that nothing of the user's is touched.

A run of the drill has a copy of the directory that the command was given in, settings of its own
made of the user's, and tiers below its own directory in place of the user's. What the script opens
by a relative name is therefore the copy's. What is large (more than 64 MB a file, 256 MB in all) is
linked to and not copied: a script that writes over such a file does so in the drill as well. A
directory with which there would be more than 20,000 entries is linked to as a whole: what a script
writes into it lands in the real one, and the command says so at its start.

Guarantees: no tier and no directory of the user's job is written to, whatever ``dir=`` the script
says; commands that tell people of events are not called.

What breaks the guarantee: names that a script has in full (``/data/out``), directories that are
linked to, and other machines that it talks to.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from outlast import config
from outlast.config import DRILL_VARIABLE, Settings
from outlast.drill.faults.storage import unmount_below
from outlast.errors import ConfigError

COPY: Final = "work"
MARK: Final = ".outlast-drill"
SETTINGS: Final = "outlast.toml"
FILE_BYTES_MAX: Final = 64 * 2**20
COPY_BYTES_MAX: Final = 256 * 2**20
FILES_MAX: Final = 20_000
_LEFT_OUT: Final = frozenset(
    {".git", ".hg", ".venv", "venv", "__pycache__", "node_modules", ".mypy_cache", ".ruff_cache"}
)
_OTHER: Final = "give another with --dir"
_JOB: Final = "job.json"  # what a job's directory has
_APART: Final = ("dir", "resume", "health.notify", "notice.")  # not taken over into a drill


class JobScript(msgspec.Struct, frozen=True, kw_only=True):
    """What is drilled.

    Attributes:
        name: the script's path, or the module's name.
        arguments: the script's.
        is_module: whether it is a module, as with ``python -m``.
    """

    name: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    @property
    def words(self) -> list[str]:
        """As they stand behind ``outlast run``."""
        return [*(["-m"] if self.is_module else []), self.name, *self.arguments]


def script_of(words: Sequence[str]) -> JobScript:
    """The script of a command line: ``[python] [-m] SCRIPT [ARGUMENT…]``.

    Raises:
        ConfigError: there is none, or it is not there.
    """
    words = list(words)
    if words and Path(words[0]).name.startswith("python"):
        words.pop(0)
    is_module = words[:1] == ["-m"]
    words = words[is_module:]
    if not words:
        raise ConfigError("no script is named; write: outlast drill -- train.py [ARGUMENTS]")
    if not is_module and not Path(words[0]).is_file():
        raise ConfigError(
            f"there is no script {words[0]}; behind -- stands the script alone, and its arguments"
        )
    return JobScript(name=words[0], arguments=tuple(words[1:]), is_module=is_module)


def part_of(root: Path, name: str) -> Path:
    """The part of a directory of drills that one command has: none empties another's.

    Raises:
        ConfigError: the directory holds something else, or cannot be written.
    """
    _refuse_others(root)
    try:
        root.mkdir(parents=True, exist_ok=True)
        (root / MARK).touch()
    except OSError as error:
        raise ConfigError(f"{root} cannot be written: {error.strerror}; {_OTHER}") from None
    return root / name


def _refuse_others(root: Path) -> None:
    if root.exists() and not root.is_dir():
        raise ConfigError(f"{root} is a file; {_OTHER}")
    if root.exists() and any(root.iterdir()) and not (root / MARK).exists():
        raise ConfigError(f"{root} is not empty and no drill made it; {_OTHER}")


@contextlib.contextmanager
def empty_place(root: Path) -> Iterator[None]:
    """Make a directory for a drill's runs, or empty one that an earlier drill has made.

    It is this drill's alone until the block ends. What a drill that was killed has left mounted in
    it is unmounted.

    Raises:
        ConfigError: it holds something else, is another drill's now, or cannot be written.
    """
    _refuse_others(root)
    try:
        root.mkdir(parents=True, exist_ok=True)
        mark = (root / MARK).open("w")
    except OSError as error:
        raise ConfigError(f"{root} cannot be written: {error.strerror}; {_OTHER}") from None
    with mark:
        try:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            words = f"another drill is at work in {root}; wait for its end, or {_OTHER}"
            raise ConfigError(words) from None
        unmount_below(root)
        try:
            # The mark last: what could not be emptied remains a drill's.
            for path in root.iterdir():
                if path.name != MARK:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        except OSError as error:
            words = f"{root} cannot be emptied: {error.filename}: {error.strerror}; {_OTHER}"
            raise ConfigError(words) from None
        yield


class Workplace:
    """The directory of one run.

    Args:
        run: it is made, and must not be there.
        settings: the user's.
        source: what is copied; None for the working directory.

    Attributes:
        directory: the job's own.
        copy: of the working directory; the job's processes are started there.
        tiers: name → directory.
        log: file with what the job says.
        linked: what was too large to be copied, relative to the working directory.
    """

    def __init__(self, run: Path, settings: Settings, source: Path | None = None) -> None:
        run.mkdir(parents=True)
        self.run = run.resolve()
        self.directory = self.run / "job"
        self.copy = self.run / COPY
        self.log = self.run / "output.txt"
        self.tiers: dict[str, Path] = {}
        self.linked = copy_tree(source or Path.cwd(), self.copy, apart=run.resolve().parent)
        (self.run / SETTINGS).write_text("".join(self._settings(settings)))

    def environ(self, environ: Mapping[str, str]) -> dict[str, str]:
        """What a process of the job has in its environment, made of the user's."""
        ours = ("OUTLAST_", "PET_", "TORCHELASTIC_")
        kept = {name: value for name, value in environ.items() if not name.startswith(ours)}
        return kept | {
            "OUTLAST_CONFIG": str(self.run / SETTINGS),
            DRILL_VARIABLE: str(self.run),
            "PYTHONUNBUFFERED": "1",
        }

    def _settings(self, settings: Settings) -> Iterator[str]:
        rows = [row for row in config.as_rows(settings) if not row.is_default]
        section = ""
        for row in sorted(rows, key=lambda one: "." in one.key):  # those of no section come first
            if row.key.startswith(_APART) or row.key.startswith("tier."):
                continue
            head, _, name = row.key.rpartition(".")
            if head != section:
                section = head
                yield f"\n[{head}]\n"
            yield f"{name} = {_quoted(row.value)}\n"
        if settings.origin["tier"] == "default":
            self.tiers["local"] = self.directory / "checkpoints"
            return
        for tier in settings.tiers:
            url = tier.url
            if tier.kind != "memory":
                self.tiers[tier.name] = self.run / "tiers" / tier.name
                url = str(self.tiers[tier.name])
            yield f'\n[[tier]]\nname = "{tier.name}"\nurl = {_quoted(url)}\nkeep = {tier.keep}\n'
            if tier.every is not None:
                yield f"every = {tier.every}\n"


def copy_tree(source: Path, target: Path, *, apart: Path) -> list[str]:
    """Copy a working directory; what is too large is linked to.

    Args:
        source: what is copied, without version control, environments, caches, jobs and drills.
        target: it is made.
        apart: a directory that is not copied, though it may lie inside.

    Returns:
        What was linked, relative to ``source``; whole directories end in a slash.
    """
    target.mkdir()
    linked = []
    for one in _walk(source, apart=(apart, target)):
        there = target / one.name
        if one.is_linked:
            there.symlink_to((source / one.name).resolve())
        if one.is_linked and not (source / one.name).is_symlink():
            linked.append(f"{one.name}/" if one.is_directory else one.name)
        elif one.is_directory and not one.is_linked:
            there.mkdir()
        elif not one.is_linked:
            shutil.copy2(source / one.name, there)
    return linked


def linked_directories(source: Path, root: Path) -> list[str]:
    """The directories that a drill with its runs below ``root`` will link to as a whole.

    What a script writes into one of them lands in the real one.
    """
    found = _walk(source, apart=(root.resolve(),))
    return [one.name for one in found if one.is_linked and one.is_directory]


class _PlacedFile(NamedTuple):
    """What is there of a working directory, by its path in it."""

    name: str
    is_directory: bool
    is_linked: bool


def _walk(source: Path, *, apart: Collection[Path]) -> Iterator[_PlacedFile]:
    """What a copy has, the shallow ahead of the deep: a script lies there, and data below.

    A directory with more entries than may still come is linked as a whole: neither its files nor
    what is below are looked at one by one.
    """
    room, entries = COPY_BYTES_MAX, 0
    waiting = deque([Path()])
    while waiting:
        here = waiting.popleft()
        left = FILES_MAX - entries
        # No more than that is listed; of the working directory itself everything is.
        names: list[str] = []
        with contextlib.suppress(PermissionError), os.scandir(source / here) as found:
            names = [one.name for one in islice(found, None if here == Path() else left + 1)]
        if here != Path():
            is_linked = len(names) > left
            yield _PlacedFile(str(here), is_directory=True, is_linked=is_linked)
            if is_linked:
                continue
        entries += len(names)
        for name in sorted(names):
            path, one = str(here / name), source / here / name
            if one.is_dir():
                is_run = (one / _JOB).exists() or (one / MARK).exists()
                if name in _LEFT_OUT or one.resolve() in apart or is_run:
                    continue
            if one.is_symlink():
                yield _PlacedFile(path, is_directory=False, is_linked=True)
            elif one.is_dir():
                waiting.append(here / name)
            elif one.is_file():
                size = one.stat().st_size
                is_linked = size > FILE_BYTES_MAX or size > room
                room -= 0 if is_linked else size
                yield _PlacedFile(path, is_directory=False, is_linked=is_linked)


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()  # TOML's basic strings are JSON's
