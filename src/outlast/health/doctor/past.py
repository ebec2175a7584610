"""What the job's own record says: how large its state is, how long a step takes, its versions."""

from __future__ import annotations

from pathlib import Path

import msgspec

from outlast.errors import OutlastError
from outlast.ledger.file import read_events
from outlast.ledger.job import read_job
from outlast.ledger.measured import Measured


class PriorRun(msgspec.Struct, frozen=True, kw_only=True):
    """What is known from before; None where nothing is.

    Attributes:
        state_bytes: of the newest whole checkpoint.
        step_s: a slow step.
        versions: with which the job began.
        problem: why its record cannot be read, in words.
    """

    state_bytes: int | None = None
    step_s: float | None = None
    versions: dict[str, str] | None = None
    problem: str = ""


def probe(directory: str) -> PriorRun:
    """Read the record of the job in ``directory``; an empty answer where there is no job yet."""
    path = Path(directory)
    if not (path / "job.json").exists():
        return PriorRun()
    try:
        job = read_job(path)
        measured = Measured(read_events(path))
    except OutlastError as error:
        return PriorRun(problem=str(error))
    step = measured.step
    return PriorRun(
        state_bytes=max(measured.sizes.values(), default=None),
        step_s=step.slow_s if step else None,
        versions=job.versions,
    )
