"""``outlast checkpoints show``."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Final

import click
import msgspec

from outlast import units
from outlast.checkpoint.inventory import Inventory
from outlast.checkpoint.manifest import FULL, Place, SaveName
from outlast.checkpoint.plan import OWN
from outlast.checkpoint.transfer import inventory_of
from outlast.cli.checkpoints.survey import pick, size_of, survey
from outlast.cli.checkpoints.where import DIRECTORY, JSON, TIER, find_job
from outlast.errors import OutlastError

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
def command(
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
        from outlast.cli.checkpoints.samples import answer

        answer(places, manifest, samples=samples, ids=ids, as_json=as_json)
        return
    also = [name for name in manifests if name != where]
    inventory = inventory_of(manifest, places)
    origins = _origins(places, picked)
    if as_json:
        shown = _as_json(inventory, where, also)
        health = found.health(picked)
        more = {"save": str(picked), "health": health, "origins": origins}
        click.echo(msgspec.json.encode({**shown, **more}))
        return
    for line in _lines(inventory, where, also):
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
    from outlast.checkpoint.reader import open_checkpoint

    with contextlib.suppress(OutlastError, OSError):
        own = open_checkpoint(places, save, rank=None).small(0).data.get(OWN)
        found = own.get("origins") if isinstance(own, dict) else None
        return [one for one in found or [] if isinstance(one, dict)]
    return []


def _as_json(inventory: Inventory, where: str, also: list[str]) -> dict[str, Any]:
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


def _lines(inventory: Inventory, where: str, also: list[str]) -> list[str]:
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
    lines += [f"  {name:<28}{units.size(f.size):>10}" for name, f in inventory.walk()]
    lines += [
        f"  {tensor.dtype:<5} {'x'.join(map(str, tensor.shape)) or 'scalar':<16} {name}"
        for name, tensor in sorted(inventory.tensors().items())
    ]
    return lines
