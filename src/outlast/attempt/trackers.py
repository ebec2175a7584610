"""Experiment trackers: a run that was continued is one run there too.

W&B takes an id that we choose: the job's. MLflow gives out ids itself, so the one that a worker is
using is written down in the job's directory and handed to the next attempt. TensorBoard knows no
ids, only directories: one in the job's is offered. All of it goes through variables that these
tools read themselves, and none that somebody has set is touched.

What can go wrong: a tracker that no longer knows the run (its database was wiped) refuses it in
its own words; remove ``runs.json`` from the job's directory, or set its variable.

Rejected: importing a tracker to ask it (slow, and it may not be installed).
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any, Final

import msgspec

logger = logging.getLogger(__name__)

JOB_VARIABLE: Final = "OUTLAST_JOB_ID"  # set by our agent
RUN_VARIABLE: Final = "OUTLAST_RUN_ID"
TENSORBOARD_VARIABLE: Final = "OUTLAST_TENSORBOARD_DIR"
_MLFLOW_MARK: Final = "OUTLAST_MLFLOW_RUN_ID"  # what we have set MLflow's variable to
_OURS: Final = re.compile(r"outlast-[0-9a-f]{12}(-\d+)?")
_FILE: Final = "runs.json"
_MLFLOW_ID: Final = re.compile(r"[0-9a-f]{32}")


class _Runs(msgspec.Struct, kw_only=True):
    """What is in ``runs.json``."""

    mlflow: str = ""


def export(
    job: str, directory: Path, rank: int, environ: MutableMapping[str, str] = os.environ
) -> set[str]:
    """Set what trackers read, before a script asks them for a run.

    Args:
        job: the job's id.
        directory: the job's directory.
        rank: of this worker. Where every rank logs, each has a run of its own, as without us.
        environ: the environment to set it in.

    Returns:
        The names that are new there: what comes behind the job in the same process, a notebook
        say, is no part of its run.
    """
    _forget_another(job, environ)
    before = set(environ)
    run = f"outlast-{job}" if rank == 0 else f"outlast-{job}-{rank}"
    environ.setdefault(RUN_VARIABLE, run)
    environ.setdefault(TENSORBOARD_VARIABLE, str(directory / "tensorboard"))
    if "WANDB_RUN_ID" not in environ:
        environ["WANDB_RUN_ID"] = environ[RUN_VARIABLE]
        environ.setdefault("WANDB_RESUME", "allow")
    known = _read(directory).mlflow
    if rank == 0 and known and "MLFLOW_RUN_ID" not in environ:
        environ["MLFLOW_RUN_ID"] = environ[_MLFLOW_MARK] = known
    return set(environ) - before


def _forget_another(job: str, environ: MutableMapping[str, str]) -> None:
    """What was set for another job, in this process or by the one that started it, is not ours."""
    run = environ.get(RUN_VARIABLE, "")
    if not _OURS.fullmatch(run) or run.startswith(f"outlast-{job}"):
        return
    if environ.get("WANDB_RUN_ID") == run:
        del environ["WANDB_RUN_ID"]
    mlflow = environ.pop(_MLFLOW_MARK, None)
    if mlflow is not None and environ.get("MLFLOW_RUN_ID") == mlflow:
        del environ["MLFLOW_RUN_ID"]
    del environ[RUN_VARIABLE]
    environ.pop(TENSORBOARD_VARIABLE, None)


def forget_rank(environ: MutableMapping[str, str] = os.environ) -> None:
    """This process may be another rank in the next attempt: what was set for its rank goes."""
    run = environ.get(RUN_VARIABLE, "")
    if _OURS.fullmatch(run):
        if environ.get("WANDB_RUN_ID") == run:
            del environ["WANDB_RUN_ID"]
        del environ[RUN_VARIABLE]
    mlflow = environ.pop(_MLFLOW_MARK, None)
    if mlflow is not None and environ.get("MLFLOW_RUN_ID") == mlflow:
        del environ["MLFLOW_RUN_ID"]


def export_here() -> None:
    """Do as :func:`export` does, in a worker that our agent has started."""
    job, directory = os.environ.get(JOB_VARIABLE), os.environ.get("OUTLAST_DIR")
    if job and directory:
        export(job, Path(directory), int(os.environ.get("RANK", "0")))


def note(directory: Path) -> None:
    """On rank 0, once training goes: remember the run that MLflow has begun, if it is in use."""
    mlflow: Any = sys.modules.get("mlflow")
    if mlflow is None:
        return
    try:
        run = mlflow.active_run()
        found = str(run.info.run_id) if run is not None else ""
        if _MLFLOW_ID.fullmatch(found) and _read(directory).mlflow != found:
            whole = directory / f".{_FILE}.{os.getpid()}"
            whole.write_bytes(msgspec.json.encode(_Runs(mlflow=found)))
            whole.replace(directory / _FILE)
    except Exception as error:  # noqa: BLE001 - a tracker's trouble is not training's
        logger.warning("MLflow's run is not remembered: %s", error)


def _read(directory: Path) -> _Runs:
    try:
        runs = msgspec.json.decode((directory / _FILE).read_bytes(), type=_Runs)
    except (OSError, msgspec.MsgspecError):
        return _Runs()
    return runs if _MLFLOW_ID.fullmatch(runs.mlflow) else _Runs()
