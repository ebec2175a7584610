"""``outlast checkpoints list``."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from outlast import units
from outlast.checkpoint.manifest import SaveName
from outlast.cli.checkpoints.survey import SaveCopy, Survey, size_of, survey
from outlast.cli.checkpoints.where import DIRECTORY, JSON, find_job

_CELLS = {"committed": "yes", "invalid": "BAD", "unfinished": "part", "absent": "-", "unknown": "?"}


@click.command(name="list")
@DIRECTORY
@JSON
def command(directory: str | None, as_json: bool) -> None:
    """Every step and which tier has it, oldest first; manifests are verified, data is not.

    Older saves of a step that was saved again, and other jobs' checkpoints, are listed apart.
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
    _print(rows, found)
    if old:
        click.echo("saved again since, and removed by the next commit:")
        _print(old, found, is_apart=True)
    _print_others(found)
    if not rows:
        click.echo(f"no checkpoint in {found.places_in_words()} yet{at.hint()}")
        return
    damaged = any(_bad(row) for row in rows)
    mendable = any(row["state"] in ("committed", "weights only") for row in rows if _bad(row))
    click.echo(at.next("repair" if damaged and mendable else "verify"))


def _bad(row: dict[str, Any]) -> bool:
    return any(copy["state"] == "invalid" for copy in row["tiers"].values())


def _print(rows: list[dict[str, Any]], found: Survey, *, is_apart: bool = False) -> None:
    if len(found.tiers) == 1:
        for row in rows:
            click.echo(f"step {row['step']:>9,}  {_about(row):<45}  {_seen(row)}".rstrip())
        return
    widths = [*(max(4, len(tier)) for tier in found.tiers), 0]
    head = f"{'step':>9}  {'state':<12}{'size':>10}  {'committed (UTC)':<19}"
    lines = [] if is_apart else [[head, *found.tiers, ""]]
    for row in rows:
        about = _about(row).removesuffix(" UTC")
        cells = [_CELLS[row["tiers"][tier]["state"]] for tier in found.tiers]
        lines.append([f"{row['step']:>9,}  {about:<43}", *cells, _seen(row)])
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
    return row
