"""``outlast checkpoints show``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click
import msgspec

from outlast.checkpoint.manifest import FULL, Manifest
from outlast.checkpoint.places import Place
from outlast.cli.checkpoints.survey import pick, size_of, survey
from outlast.cli.checkpoints.where import DIRECTORY, JSON, TIER, find_job, when
from outlast.errors import ConfigError
from outlast.report import humanise


@click.command(name="show")
@DIRECTORY
@click.option("--step", type=int, default=None, help="Which step; the newest by default.")
@TIER
@click.option("--samples", is_flag=True, help="The ids of every sample consumed until then.")
@JSON
def command(
    *, directory: str | None, step: int | None, tier: str | None, samples: bool, as_json: bool
) -> None:
    """What one checkpoint holds, as the first tier that has it says."""
    at = find_job(directory)
    found = survey(at.settings, tier)
    found.complain()
    picked = pick(at, found, step)
    manifests = found.manifests(picked)
    where, manifest = next(iter(manifests.items()))
    if samples:
        _print_samples(
            _position([found.places[name] for name in manifests], picked), picked, as_json
        )
        return
    also = [name for name in manifests if name != where]
    if as_json:
        click.echo(msgspec.json.encode(_as_json(manifest, where, also)))
        return
    for line in _lines(manifest, where, also):
        click.echo(line)
    click.echo(at.next("verify", "--step", str(picked)))


def _as_json(manifest: Manifest, where: str, also: list[str]) -> dict[str, Any]:
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
        "files": {name: file.size for name, file in manifest.files.items()},
        "tensors": {
            name: {"dtype": tensor.dtype, "shape": tensor.shape}
            for name, tensor in manifest.tensors.items()
        },
    }


def _lines(manifest: Manifest, where: str, also: list[str]) -> list[str]:
    workers = humanise.count(manifest.world_size, "worker")
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
    attempt = f"attempt {manifest.attempt}, {workers}, {when(manifest.created_t)}"
    lines = [
        f"step {manifest.step:,} of job {manifest.job}, {attempt}",
        f"holds {kind}, {exact}",
        f"{humanise.size(size_of(manifest))} in tier {where}{elsewhere}",
    ]
    lines += [f"  {name:<28}{humanise.size(f.size):>10}" for name, f in manifest.files.items()]
    lines += [
        f"  {tensor.dtype:<5} {'x'.join(map(str, tensor.shape)) or 'scalar':<16} {name}"
        for name, tensor in manifest.tensors.items()
    ]
    return lines


def _position(places: Sequence[Place], step: int) -> dict[str, Any]:
    from outlast.checkpoint.load import open_checkpoint
    from outlast.checkpoint.plan import OWN

    own = open_checkpoint(places, step).state(OWN)
    found: dict[str, Any] = (own["data"] or {}).get("position", {})
    return found


def _print_samples(position: dict[str, Any], step: int, as_json: bool) -> None:
    from outlast.data.order import sample_ids

    if position.get("kind") != "outlast":
        raise ConfigError(
            "the ids of samples are known for outlast.data.Loader only; this job used another"
        )
    ids = sample_ids(
        0,
        position["position"],
        size=position["size"],
        seed=position["seed"],
        shuffle=position["shuffle"],
    )
    if as_json:
        click.echo(msgspec.json.encode({"step": step, "samples": ids}))
        return
    for sample in ids:
        click.echo(sample)
