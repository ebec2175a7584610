"""``outlast checkpoints list``."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from outlast.cli.checkpoints.survey import Survey, size_of, survey
from outlast.cli.checkpoints.where import DIRECTORY, JSON, find_job, when
from outlast.report import humanise

_CELLS = {"committed": "yes", "invalid": "BAD", "unfinished": "part", "absent": "-", "unknown": "?"}


@click.command(name="list")
@DIRECTORY
@JSON
def command(directory: str | None, as_json: bool) -> None:
    """Every step and which tier has it, oldest first; manifests are verified, data is not."""
    at = find_job(directory)
    found = survey(at.settings)
    found.complain()
    rows = [as_row(step, found) for step in found.copies]
    if as_json:
        tiers = [
            {"name": tier.name, "url": tier.url, "unreadable": found.unreadable.get(tier.name)}
            for tier in at.settings.tiers
            if tier.name in found.tiers
        ]
        click.echo(msgspec.json.encode({"checkpoints": rows, "tiers": tiers}))
        return
    _print(rows, found)
    if not rows:
        click.echo(f"no checkpoint in {found.places_in_words()} yet{at.hint()}")
        return
    damaged = any(copy["state"] == "invalid" for row in rows for copy in row["tiers"].values())
    mendable = any(row["state"] in ("committed", "weights only") for row in rows if _bad(row))
    click.echo(at.next("repair" if damaged and mendable else "verify"))


def _bad(row: dict[str, Any]) -> bool:
    return any(copy["state"] == "invalid" for copy in row["tiers"].values())


def _print(rows: list[dict[str, Any]], found: Survey) -> None:
    if len(found.tiers) == 1:
        for row in rows:
            click.echo(f"step {row['step']:>9,}  {_about(row):<45}  {_seen(row)}".rstrip())
        return
    widths = [*(max(4, len(tier)) for tier in found.tiers), 0]
    lines = [[f"{'step':>9}  {'state':<12}{'size':>10}  {'committed (UTC)':<19}", *found.tiers, ""]]
    for row in rows:
        about = _about(row).removesuffix(" UTC")
        cells = [_CELLS[row["tiers"][tier]["state"]] for tier in found.tiers]
        lines.append([f"{row['step']:>9,}  {about:<43}", *cells, _seen(row)])
    for first, *cells in lines if rows else []:
        columns = (f"  {cell:<{width}}" for cell, width in zip(cells, widths, strict=True))
        click.echo(f"{first}{''.join(columns)}".rstrip())


def _about(row: dict[str, Any]) -> str:
    size = humanise.size(row["bytes"]) if "bytes" in row else ""
    made = when(row["created_t"]) if "created_t" in row else ""
    return f"{row['state']:<12}{size:>10}  {made}"


def _seen(row: dict[str, Any]) -> str:
    return "" if row["health"] == "unknown" else str(row["health"])


def as_row(step: int, found: Survey) -> dict[str, Any]:
    """One step as ``list --json`` gives it."""
    row: dict[str, Any] = {"step": step, "state": found.state(step)}
    copies = found.copies[step]
    manifests = found.manifests(step)
    for manifest in list(manifests.values())[:1]:
        row["bytes"] = size_of(manifest)
        row["created_t"] = manifest.created_t
        row["world_size"] = manifest.world_size
        row["kind"], row["exact"] = manifest.kind, manifest.exact
    reasons = {tier: copy.reason for tier, copy in copies.items() if copy.reason}
    if reasons and not manifests:
        row["reason"] = next(iter(reasons.values()))
    row["health"] = found.health(step)
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
