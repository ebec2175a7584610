"""``outlast checkpoints show --samples`` and ``--ids``: which samples went into which step."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import click
import msgspec

from outlast import units
from outlast.checkpoint.manifest import Manifest, Place
from outlast.checkpoint.plan import OWN
from outlast.checkpoint.reader import open_checkpoint
from outlast.data.audit import History, SampleVerdict
from outlast.data.feed import TRAIL
from outlast.data.trail import SampleRecord, read_record
from outlast.errors import CheckpointInvalid, ConfigError

SHOWN_MAX: Final = 20
_STEPS = re.compile(r"^([0-9]{1,18})(?:-([0-9]{1,18}))?\Z")


def answer(
    places: Sequence[Place], manifest: Manifest, *, samples: bool, ids: str | None, as_json: bool
) -> None:
    """Print the audit of a checkpoint's run, or the ids of some of its steps; exit 1 on a fault.

    Raises:
        ConfigError: ``ids`` is no step of the run, or nothing was noted.
        CheckpointInvalid: the workers' records do not verify.
    """
    history = read(places, manifest)
    found: dict[str, Any] = {"step": manifest.step, "job": manifest.job}
    lines: list[str] = []
    faults = 0
    if ids is not None:
        listed = _listed(history, ids, manifest.step)
        found["ids"] = {str(step): its for step, its in listed.items()}
        lines += [f"step {step}: {' '.join(map(str, its))}" for step, its in listed.items()]
    if samples:
        verdict = history.verdict()
        faults = len(verdict.faults)
        found |= msgspec.to_builtins(verdict)
        lines += _lines(verdict, manifest)
    click.echo(msgspec.json.encode(found) if as_json else "\n".join(lines))
    if faults:
        click.get_current_context().exit(1)


def read(places: Sequence[Place], manifest: Manifest) -> History:
    """What all the workers of a checkpoint noted.

    Raises:
        ConfigError: nothing was noted.
        CheckpointInvalid: a record does not verify, or is not understood.
    """
    checkpoint = open_checkpoint(places, manifest.save)
    records: list[SampleRecord] = []
    for rank in range(manifest.world_size):
        try:
            data = (checkpoint.outline(OWN, rank) or {}).get("data") or {}
            if TRAIL in data:
                records.append(read_record(data[TRAIL]))
        except (KeyError, AttributeError, ValueError) as error:
            if isinstance(error, CheckpointInvalid):
                raise
            raise CheckpointInvalid(
                manifest.step, f"what rank {rank} noted of its samples is not understood ({error})"
            ) from None
    if not any(record.stretches for record in records):
        raise ConfigError(
            f"step {manifest.step} holds no record of samples: they are noted for "
            "outlast.data.Loader and outlast.data.Stream, and this job used another loader or an "
            "older version"
        )
    return History(records, manifest.step)


def _listed(history: History, ids: str, newest: int) -> dict[int, list[int]]:
    match = _STEPS.match(ids)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last <= newest:
        raise ConfigError(
            f"--ids {ids} is not a step from 1 to {newest}, nor two with a dash between them, as "
            f"in --ids 1-{min(10, newest)}"
        )
    listed = {}
    for step in range(first, last + 1):
        try:
            listed[step] = history.ids(step)
        except ValueError as error:
            raise ConfigError(f"the samples of step {step} cannot be listed: {error}") from None
    return listed


def _lines(verdict: SampleVerdict, manifest: Manifest) -> list[str]:
    counts = sorted({one.world_size for one in verdict.stretches if one.world_size})
    workers = " or ".join(map(str, counts)) or "several"
    times = units.count(max(one.number for one in verdict.stretches), "stretch", "stretches")
    head = f"step {manifest.step:,} of job {manifest.job}: {verdict.samples:,} samples in "
    lines = [f"{head}{units.count(verdict.steps, 'step')}, by {workers} workers in {times}"]
    for one in verdict.left_out:
        ids = " ".join(map(str, one.ids[:SHOWN_MAX])) + (" …" if one.samples > SHOWN_MAX else "")
        lines.append(
            f"  left out on purpose before step {one.step:,}, after a rollback: "
            f"{units.count(one.samples, 'sample')} ({ids})"
        )
    if verdict.proved:
        return [*lines, "proved: each came exactly when it was its turn, none lost, none repeated"]
    lines += [f"  {fault.text}" for fault in verdict.faults[:SHOWN_MAX]]
    if len(verdict.faults) > SHOWN_MAX:
        lines.append(f"  and {len(verdict.faults) - SHOWN_MAX} more; --json lists them")
    first = min(fault.step for fault in verdict.faults)
    return [*lines, f"not proved; the first step that is not as it should be: {first}"]
