"""``outlast requeue``: for batch scripts; people type ``scontrol requeue``."""

from __future__ import annotations

import os

import click

from outlast.launch.requeue import requeue


@click.command(hidden=True)
def command() -> None:
    """Ask Slurm to run the job that this is called in once more, unless it was cancelled."""
    if "SLURM_JOB_ID" not in os.environ:
        raise click.UsageError("this is no Slurm job; outlast requeue is for batch scripts")
    requeue(os.environ)
