"""``torch.distributed.checkpoint`` on Outlast's checkpoints: a reader and a writer for DCP.

    dcp.save(state, storage_writer=outlast.dcp_writer("ckpt", step))
    dcp.load(state, storage_reader=outlast.dcp_reader("ckpt"))

A path is a job's directory (its tiers are used), or any directory or bucket in which steps lie.
"""

from __future__ import annotations

import logging
import os

from outlast.checkpoint.dcp_reader import StorageReader
from outlast.checkpoint.dcp_writer import StorageWriter
from outlast.checkpoint.paths import job_of, saves_at, urls_of
from outlast.checkpoint.source import Source
from outlast.errors import CheckpointInvalid

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
    (_, url), *_ = urls_of(os.fspath(path))
    return StorageWriter(url, step, job=job_of(os.fspath(path)), overwrite=overwrite)


def _open(path: str, step: int | None, tier: str | None) -> Source:
    places, saves = saves_at(path, step, tier)
    if step is not None:
        return Source(places, step)
    failure: CheckpointInvalid | None = None
    for newest in saves:
        try:
            return Source(places, newest)
        except CheckpointInvalid as error:
            logger.warning("%s; trying an older one", error)
            failure = failure or error
    assert failure is not None  # noqa: S101 - there is a save, or saves_at says that there is none
    raise failure
