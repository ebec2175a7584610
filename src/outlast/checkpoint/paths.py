"""From a path that a person gives to the places in which checkpoints of ours lie.

A path is a job's directory (its tiers are used, and only what is that job's), any directory or
bucket in which steps lie, or one save's own directory.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from outlast import config
from outlast.checkpoint.catalog import find_saves, saves_of
from outlast.checkpoint.names import SaveName, parse
from outlast.checkpoint.places import Place
from outlast.checkpoint.standing import standing
from outlast.errors import ConfigError
from outlast.ledger import job as jobs
from outlast.storage import Directory
from outlast.storage.places import open_storage
from outlast.tiers import Tier, parse_tiers

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
