"""``torch.distributed.checkpoint`` on Outlast's checkpoints: a reader and a writer for DCP.

    dcp.save(state, storage_writer=outlast.dcp_writer("ckpt", step))
    dcp.load(state, storage_reader=outlast.dcp_reader("ckpt"))

A path is a job's directory (its tiers are used), or any directory or bucket in which steps lie.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from outlast import config
from outlast.checkpoint.catalog import find_saves
from outlast.checkpoint.dcp_reader import StorageReader
from outlast.checkpoint.dcp_writer import StorageWriter
from outlast.checkpoint.names import parse
from outlast.checkpoint.places import Place
from outlast.checkpoint.source import Source
from outlast.checkpoint.standing import standing
from outlast.errors import CheckpointInvalid, ConfigError
from outlast.ledger import job as jobs
from outlast.storage import Directory
from outlast.storage.places import open_storage

__all__ = ["StorageReader", "StorageWriter", "dcp_reader", "dcp_writer"]

logger = logging.getLogger(__name__)


def dcp_reader(
    path: str | os.PathLike[str],
    step: int | None = None,
    tier: str | None = None,
    *,
    rank: int | None = None,
) -> StorageReader:
    """A reader for ``torch.distributed.checkpoint.load``.

    Args:
        path: a job's directory, a directory of steps, or one save's own directory.
        step: which checkpoint; the newest whose manifest verifies unless given. Of a step that
            was saved again, the newest save whose manifest verifies.
        tier: read from this tier of the job only; from all of them, fastest first, unless given.
        rank: whose small state and own tensors; this process's unless given.

    Raises:
        CheckpointInvalid: the step has no manifest that verifies.
        ConfigError: there is no checkpoint, or no such tier.
        OSError: the storage cannot be read.
    """

    def open_source(other: str | None) -> Source:
        return _open(os.fspath(path) if other is None else other, step, tier)

    return StorageReader(open_source, rank=rank)


def dcp_writer(
    path: str | os.PathLike[str], step: int, *, overwrite: bool = False
) -> StorageWriter:
    """A writer for ``torch.distributed.checkpoint.save`` and ``async_save``.

    Args:
        path: a job's directory, or any directory to put steps into.
        step: the step's number.
        overwrite: replace a committed checkpoint of that step, which stands until the new one does.

    Raises:
        ConfigError: ``step`` is not a step's number.
    """
    (_, url), *_ = _urls(os.fspath(path), None)
    return StorageWriter(url, step, job=_job_of(os.fspath(path)), overwrite=overwrite)


def _open(path: str, step: int | None, tier: str | None) -> Source:
    directory = Path(path).absolute()
    named = parse(directory.name)
    if named is not None and directory.is_dir():
        return Source(Directory(directory.parent), named if step is None else step)
    places = _places(path, tier)
    if step is not None:
        return Source(places, step)
    committed = {found for place in places for found in find_saves(place.storage).committed}
    for newest in sorted(committed, reverse=True):
        try:
            return Source(places, newest)
        except CheckpointInvalid as error:
            logger.warning("%s; trying an older one", error)
    raise ConfigError(f"there is no checkpoint in {places[0].storage.describe()}")


def _places(path: str, tier: str | None) -> Sequence[Place]:
    places = [Place(name, open_storage(url)) for name, url in _urls(path, tier)]
    job = _job_of(path)
    return standing(places, job, ()) if job else places


def _job_of(path: str) -> str:
    """The id of the job in a directory, "" where there is none."""
    directory = Path(path)
    return jobs.read_job(directory).id if (directory / jobs.FILE_NAME).exists() else ""


def _urls(path: str, tier: str | None) -> list[tuple[str, str]]:
    """Where the steps of ``path`` lie, fastest first; what is in memory only its keeper has."""
    directory = Path(path).absolute()
    if "://" in path or not (directory / jobs.FILE_NAME).exists():
        if tier is not None:
            raise ConfigError(f"{path} is not a job's directory, so it has no tier {tier!r}")
        if "://" in path:
            return [("object", path)]
        below = directory / "checkpoints"
        return [("local", str(below if below.is_dir() else directory))]
    tiers = [one for one in config.load({"dir": str(directory)}).tiers if one.kind != "memory"]
    chosen = [one for one in tiers if tier in (None, one.name)]
    if not chosen:
        known = ", ".join(one.name for one in tiers)
        raise ConfigError(f"{tier!r} is not a tier that can be read here; known: {known}")
    return [(one.name, one.url) for one in chosen]
