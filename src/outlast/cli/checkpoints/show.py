"""List what checkpoints there are, show what one holds, and export one as files for others.

``show --samples`` and ``--ids`` say which samples went into which step.
"""

from __future__ import annotations

import contextlib
import math
import re
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from outlast import units
from outlast.checkpoint.manifest import FULL, Manifest, Place, SaveName
from outlast.checkpoint.transfer import Inventory, inventory_of
from outlast.cli.checkpoints.survey import (
    DIRECTORY,
    JSON,
    TIER,
    JobAt,
    OddFiles,
    SaveCopy,
    Survey,
    bar,
    find_job,
    in_words,
    odd_files,
    pick,
    size_of,
    survey,
)
from outlast.errors import CheckpointInvalid, ConfigError, OutlastError, StorageError, nearest
from outlast.ledger.job import settings_of
from outlast.policy.cadence import AUTO_FIRST_S

_CELLS = {"committed": "yes", "invalid": "BAD", "unfinished": "part", "absent": "-", "unknown": "?"}


@click.command(name="list")
@DIRECTORY
@JSON
def list_command(directory: str | None, as_json: bool) -> None:
    """Every step and which tier has it, oldest first; manifests are verified, data is not.

    A file that is missing or cut short is seen by its size; verify reads every byte. Older saves of
    a step that was saved again, and other jobs' checkpoints, are listed apart.
    """
    at = find_job(directory)
    found = survey(at)
    found.complain()
    superseded = set(found.superseded())
    rows = [as_row(save, found) for save in found.copies if save not in superseded]
    old = [as_row(save, found) for save in found.copies if save in superseded]
    if as_json:
        tiers = [
            {"name": tier.name, "url": tier.url, "unreadable": found.unreadable.get(tier.name)}
            for tier in at.settings.tiers
            if tier.name in found.tiers
        ]
        others = [_others_row(save, copies) for save, copies in found.others.items()]
        answer = {"checkpoints": rows, "superseded": old, "others": others, "tiers": tiers}
        click.echo(msgspec.json.encode(answer))
        return
    _print_rows(rows, found)
    if old:
        click.echo("saved again since, and removed by the next commit:")
        _print_rows(old, found, is_apart=True)
    _print_others(found)
    if not rows:
        for line in _none_yet(at, found):
            click.echo(line)
        return
    damaged = any(_bad(row) for row in rows)
    mendable = any(row["state"] in ("committed", "weights only") for row in rows if _bad(row))
    click.echo(at.next("repair" if damaged and mendable else "verify"))


def _none_yet(at: JobAt, found: Survey) -> list[str]:
    """Where nothing is saved: how the job stands, when something will be, and what to do."""
    from outlast.cli.top.draw import status_line  # the ledger is read for this alone
    from outlast.cli.top.view import Following

    lines = [f"no checkpoint in {found.places_in_words()} yet{at.hint()}"]
    settings = settings_of(at.given, at.settings, at.job)
    following = Following(settings.dir, at.job, settings)
    while following.look():
        pass
    following.settle()
    view, where = following.view(time.time()), f" {shlex.quote(at.given)}" if at.given else ""
    if view.state == "not started":
        return [*lines, "nothing has been started here yet. Next: outlast run YOUR_SCRIPT"]
    lines.append(f"the job: {status_line(view)}")
    if view.note:
        lines.append(view.note)
    if view.state != "running":
        return [*lines, f"Next: outlast report{where}"]
    every = settings.checkpoint_every
    if view.step is None:
        lines.append("it is before its first step; without outlast.session a script saves nothing")
    elif every.steps is not None and view.step >= 2 * every.steps:
        lines.append(
            f"with checkpoint.every = {every} there would be some: the script sets its own (every= "
            "of outlast.session), or none of its saves has arrived"
        )
    elif every.steps is not None:
        due = every.steps * max(math.ceil(view.step / every.steps), 1)
        lines.append(f"the next one is due at step {due:,} (checkpoint.every = {every})")
    else:
        due_s = AUTO_FIRST_S if every.seconds is None else every.seconds
        words = f"{units.set_seconds(due_s)} after training began (checkpoint.every = {every})"
        lines.append(f"the first one is due {words}, and there once it is written")
    return [*lines, f"Next: outlast top{where}"]


def _bad(row: dict[str, Any]) -> bool:
    return any(copy["state"] == "invalid" for copy in row["tiers"].values())


def _print_rows(rows: list[dict[str, Any]], found: Survey, *, is_apart: bool = False) -> None:
    tiers = found.tiers if len(found.tiers) > 1 else ()  # one has what is listed
    widths = [*(max(4, len(tier)) for tier in tiers), 0]
    head = f"{'step':>9}  {'state':<12}{'size':>10}  {'committed (UTC)':<19}"
    lines = [] if is_apart else [[head, *tiers, ""]]
    for row in rows:
        about = _about(row).removesuffix(" UTC")
        cells = [_CELLS[row["tiers"][tier]["state"]] for tier in tiers]
        lines.append([f"{row['step']:>9,}  {about:<43}", *cells, _seen(row)])
        lines += [
            [f"           {tier}: {copy['reason']}", *[""] * len(widths)]
            for tier, copy in row["tiers"].items()
            if copy.get("odd_files")
        ]
    for first, *cells in lines if rows else []:
        columns = (f"  {cell:<{width}}" for cell, width in zip(cells, widths, strict=True))
        click.echo(f"{first}{''.join(columns)}".rstrip())


def _print_others(found: Survey) -> None:
    """One line for each other job that keeps checkpoints in these tiers."""
    jobs: dict[str, list[SaveName]] = {}
    for save, copies in found.others.items():
        jobs.setdefault(next(iter(copies.values())).job, []).append(save)
    for job, saves in sorted(jobs.items()):
        steps = units.count(len({save.step for save in saves}), "step")
        tiers = [name for name in found.tiers if any(name in found.others[s] for s in saves)]
        click.echo(
            f"not of this job: {steps} of job {job}, the newest {saves[-1].step:,}, "
            f"in {', '.join(tiers)}; left alone"
        )


def _others_row(save: SaveName, copies: dict[str, SaveCopy]) -> dict[str, Any]:
    """One of another job's saves as ``list --json`` gives it."""
    return {
        "step": save.step,
        "save": str(save),
        "job": next(iter(copies.values())).job,
        "tiers": {tier: {"state": copy.state} for tier, copy in copies.items()},
    }


def _about(row: dict[str, Any]) -> str:
    size = units.size(row["bytes"]) if "bytes" in row else ""
    made = units.when(row["created_t"]) if "created_t" in row else ""
    return f"{row['state']:<12}{size:>10}  {made}"


def _seen(row: dict[str, Any]) -> str:
    return "" if row["health"] == "unknown" else str(row["health"])


def as_row(save: SaveName, found: Survey) -> dict[str, Any]:
    """One save as ``list --json`` gives it."""
    row: dict[str, Any] = {"step": save.step, "save": str(save), "state": found.state(save)}
    copies = found.copies[save]
    manifests = found.manifests(save)
    for manifest in list(manifests.values())[:1]:
        row["bytes"] = size_of(manifest)
        row["created_t"] = manifest.created_t
        row["attempt"] = manifest.attempt
        row["world_size"] = manifest.world_size
        row["kind"], row["exact"] = manifest.kind, manifest.exact
    reasons = {tier: copy.reason for tier, copy in copies.items() if copy.reason}
    if reasons and not manifests:
        row["reason"] = next(iter(reasons.values()))
    row["health"] = found.health(save)
    row["tiers"] = {
        tier: {
            "state": copies[tier].state,
            **({"reason": reasons[tier]} if tier in reasons else {}),
        }
        if tier in copies
        else {"state": "unknown" if tier in found.unreadable else "absent"}
        for tier in found.tiers
    }
    odd = odd_files(found, save)
    for tier, sizes in odd.items():
        first, what = next(iter(sizes.found.items()))
        left = sizes.num - len(sizes.found)
        whole = f"{left:,} of {sizes.num:,} files whole: {first} {what}"
        row["tiers"][tier] = {"state": "invalid", "reason": whole, "odd_files": sizes.found}
    if manifests and set.intersection(*(set(_odd_names(odd, tier)) for tier in manifests)):
        row["state"], row["reason"] = "invalid", "a file is whole in no tier"
    return row


def _odd_names(odd: dict[str, OddFiles], tier: str) -> dict[str, str]:
    return odd[tier].found if tier in odd else {}


if TYPE_CHECKING:
    from outlast.data.audit import History, SampleVerdict
    from outlast.data.trail import SampleRecord

HEALTH: Final = {
    "healthy": "seen to be healthy: its loss and what came of it showed no sign of trouble",
    "unhealthy": "undone by a rollback: no job is resumed from it",
    "unknown": "not known to be healthy: no loss was logged, or not for long enough after it",
}


@click.command(name="show")
@DIRECTORY
@click.option(
    "--step", type=int, default=None, help="Which step (its newest save); the newest by default."
)
@TIER
@click.option("--samples", is_flag=True, help="Prove which samples went into which step.")
@click.option("--ids", metavar="STEP[-STEP]", default=None, help="The samples of these steps.")
@JSON
def show_command(
    *,
    directory: str | None,
    step: int | None,
    tier: str | None,
    samples: bool,
    ids: str | None,
    as_json: bool,
) -> None:
    """What one checkpoint holds, as the first tier that has it says.

    With --samples: whether each sample came exactly once, when it was its turn; exit code 1 if not.
    """
    at = find_job(directory)
    found = survey(at, tier)
    found.complain()
    picked = pick(at, found, step)
    manifests = found.manifests(picked)
    where, manifest = next(iter(manifests.items()))
    places = [found.places[name] for name in manifests]
    if samples or ids is not None:
        print_samples(places, manifest, samples=samples, ids=ids, as_json=as_json)
        return
    also = [name for name in manifests if name != where]
    inventory = inventory_of(manifest, places)
    origins = _origins(places, picked)
    if as_json:
        shown = _shown_as_json(inventory, where, also)
        health = found.health(picked)
        more = {"save": str(picked), "health": health, "origins": origins}
        click.echo(msgspec.json.encode({**shown, **more}))
        return
    for line in _shown_lines(inventory, where, also):
        click.echo(line)
    for one in origins:
        what = ", ".join(map(str, one.get("objects") or []))
        then = "" if one.get("step") is None else f", step {one['step']}"
        click.echo(
            f"its job took {what} from {one.get('source')}{then} (digest {one.get('digest')})"
        )
    click.echo(HEALTH[found.health(picked)])
    click.echo(at.next("verify", "--step", str(picked.step)))


def _origins(places: Sequence[Place], save: SaveName) -> list[dict[str, Any]]:
    """Where the job's first state came from, where it was not the script's; none if unreadable."""
    from outlast.checkpoint.plan import OWN
    from outlast.checkpoint.reader import open_checkpoint

    with contextlib.suppress(OutlastError, OSError):
        own = open_checkpoint(places, save, rank=None).small(0).data.get(OWN)
        found = own.get("origins") if isinstance(own, dict) else None
        return [one for one in found or [] if isinstance(one, dict)]
    return []


def _shown_as_json(inventory: Inventory, where: str, also: list[str]) -> dict[str, Any]:
    manifest = inventory.manifest
    return {
        "step": manifest.step,
        "job": manifest.job,
        "attempt": manifest.attempt,
        "world_size": manifest.world_size,
        "layout": manifest.layout,
        "created_t": manifest.created_t,
        "kind": manifest.kind,
        "exact": manifest.exact,
        "tier": where,
        "also_in": also,
        "bytes": size_of(manifest),
        "files": {name: file.size for name, file in inventory.walk()},
        "tensors": {
            name: {"dtype": tensor.dtype, "shape": tensor.shape}
            for name, tensor in sorted(inventory.tensors().items())
        },
    }


def _shown_lines(inventory: Inventory, where: str, also: list[str]) -> list[str]:
    manifest = inventory.manifest
    workers = units.count(manifest.world_size, "worker")
    kind = (
        "everything that a resume needs"
        if manifest.kind == FULL
        else ("weights only: it cannot be resumed from")
    )
    exact = (
        "with the bits of training"
        if manifest.exact
        else ("the optimizer's moments rounded to bf16: a resume is not bit for bit the same run")
    )
    elsewhere = f"; also in {', '.join(also)}" if also else ""
    attempt = f"attempt {manifest.attempt}, {workers}, {units.when(manifest.created_t)}"
    lines = [
        f"step {manifest.step:,} of job {manifest.job}, {attempt}",
        f"holds {kind}, {exact}",
        f"{units.size(size_of(manifest))} in tier {where}{elsewhere}",
    ]
    lines.append(f"  {'file':<28}{'size':>10}")
    lines += [f"  {name:<28}{units.size(f.size):>10}" for name, f in inventory.walk()]
    lines.append(f"  {'dtype':<5} {'shape':<16} tensor")
    lines += [
        f"  {tensor.dtype:<5} {'x'.join(map(str, tensor.shape)) or 'scalar':<16} {name}"
        for name, tensor in sorted(inventory.tensors().items())
    ]
    return lines


SHOWN_MAX: Final = 20
_STEPS = re.compile(r"^([0-9]{1,18})(?:-([0-9]{1,18}))?\Z")


def print_samples(
    places: Sequence[Place], manifest: Manifest, *, samples: bool, ids: str | None, as_json: bool
) -> None:
    """Print the audit of a checkpoint's run, or the ids of some of its steps; exit 1 on a fault.

    Raises:
        ConfigError: ``ids`` is no step of the run, or nothing was noted.
        CheckpointInvalid: the workers' records do not verify.
    """
    history = samples_of(places, manifest)
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
        lines += _sample_lines(verdict, manifest)
    click.echo(msgspec.json.encode(found) if as_json else "\n".join(lines))
    if faults:
        click.get_current_context().exit(1)


def samples_of(places: Sequence[Place], manifest: Manifest) -> History:
    """What all the workers of a checkpoint noted.

    Raises:
        ConfigError: nothing was noted.
        CheckpointInvalid: a record does not verify, or is not understood.
    """
    from outlast.checkpoint.plan import OWN  # torch, for this alone
    from outlast.checkpoint.reader import open_checkpoint
    from outlast.data.audit import History
    from outlast.data.feed import TRAIL
    from outlast.data.trail import read_record

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


def _sample_lines(verdict: SampleVerdict, manifest: Manifest) -> list[str]:
    counts = sorted({one.world_size for one in verdict.stretches if one.world_size})
    workers = f"{' or '.join(map(str, counts)) or 'several'} worker{'s'[: counts != [1]]}"
    times = units.count(max(one.number for one in verdict.stretches), "stretch", "stretches")
    head = f"step {manifest.step:,} of job {manifest.job}: {verdict.samples:,} samples in "
    lines = [f"{head}{units.count(verdict.steps, 'step')}, by {workers} in {times}"]
    for one in verdict.left_out:
        ids = " ".join(map(str, one.ids[:SHOWN_MAX])) + (" …" if one.samples > SHOWN_MAX else "")
        lines.append(
            f"  left out on purpose before step {one.step:,}, after a rollback: "
            f"{units.count(one.samples, 'sample')} ({ids})"
        )
    if verdict.num_dropped:
        first = min(one.step for one in verdict.dropped)
        last = max(one.last_step for one in verdict.dropped)
        of_steps = f"step {first:,}" if first == last else f"steps from {first:,} on"
        lines.append(
            f"  dropped, as workers.late has it: {units.count(verdict.num_dropped, 'sample')} of "
            f"late workers came in their turn and are in no sum ({of_steps})"
        )
    if verdict.proved:
        return [*lines, "proved: each came exactly when it was its turn, none lost, none repeated"]
    lines += [f"  {fault.text}" for fault in verdict.faults[:SHOWN_MAX]]
    if len(verdict.faults) > SHOWN_MAX:
        lines.append(f"  and {len(verdict.faults) - SHOWN_MAX} more; --json lists them")
    first = min(fault.step for fault in verdict.faults)
    return [*lines, f"not proved; the first step that is not as it should be: {first}"]


FORMATS = ("safetensors", "dcp", "torch", "trainer")


@click.command(name="export")
@DIRECTORY
@click.option(
    "--to", default=None, help="safetensors, dcp, torch (torch.save), or trainer (a checkpoint-N)."
)
@click.option("--out", default=None, help="Where the files go; must be empty or not exist.")
@click.option(
    "--step", type=int, default=None, help="Which step (its newest save); the newest by default."
)
@TIER
@JSON
def export_command(
    *,
    directory: str | None,
    to: str | None,
    out: str | None,
    step: int | None,
    tier: str | None,
    as_json: bool,
) -> None:
    """Write one checkpoint as files for other programs; every byte is verified on the way."""
    if to not in FORMATS:
        problem = f"{to} is not a format;{nearest(to, FORMATS)}" if to else "say which format"
        raise ConfigError(f"{problem} (--to {', --to '.join(FORMATS)})" if not to else problem)
    if not out:
        raise ConfigError("say where the files go with --out PATH")
    target = _vacant(Path(out))
    at = find_job(directory)
    found = survey(at, tier)
    found.complain()
    picked = pick(at, found, step)
    manifests = found.manifests(picked)
    places = [found.places[name] for name in manifests]
    num_bytes = size_of(next(iter(manifests.values())))
    from outlast.checkpoint.export import export, export_by

    number = picked.step
    with bar(num_bytes) as shown:
        shown.begin(f"step {number:,}")
        try:
            if to == "trainer":
                from outlast.integrations.trainer_export import write_trainer

                export_by(write_trainer, places, picked, target, shown.part)
            else:
                export(places, picked, to, target, shown.part)
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise StorageError(
                f"step {number} could not be written to {target}: {in_words(error)}; free space "
                "there, or give another --out"
            ) from None
    if as_json:
        click.echo(msgspec.json.encode({"step": number, "to": to, "out": str(target)}))
        return
    click.echo(
        f"step {number:,} as {to} ({units.size(num_bytes)}) in {target}, every byte verified"
    )
    click.echo(f"Next: ls {shlex.quote(str(target))}")


def _vacant(out: Path) -> Path:
    """``out`` as an absolute path, if nothing would be written over.

    Raises:
        ConfigError: something is there, or it cannot be looked at.
    """
    try:
        if "\0" in str(out):
            raise ValueError("it holds a zero byte")
        target = out.expanduser().absolute()
        occupied = target.exists() and (not target.is_dir() or any(target.iterdir()))
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"{out} cannot be used: {in_words(error)}; give another --out") from None
    if occupied:
        raise ConfigError(f"{target} exists and is not empty; give another --out")
    return target
