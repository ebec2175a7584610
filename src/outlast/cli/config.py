"""``outlast config``."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from outlast import config
from outlast.config import Settings


@click.command(name="config")
@click.option("--dir", "directory", default=None, help="The job's directory.")
@click.option("--explain", is_flag=True, help="Say where each setting came from.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object and nothing else.")
def command(directory: str | None, explain: bool, as_json: bool) -> None:
    """Print the settings in force: argument, then OUTLAST_*, then outlast.toml, then default."""
    settings = config.load({"dir": directory})
    rows = config.as_rows(settings)
    if as_json:
        click.echo(msgspec.json.encode(_found(settings, rows)))
        return
    width = max(len(key) for key, _, _ in rows)
    values = max(len(value) for _, value, _ in rows)
    for key, value, source in rows:
        tail = f"  {value:<{values}}  {source}" if explain else f"  {value}"
        click.echo(f"{key:<{width}}{tail}".rstrip())


def _found(settings: Settings, rows: list[tuple[str, str, str]]) -> dict[str, Any]:
    found: dict[str, Any] = {key: {"value": value, "from": source} for key, value, source in rows}
    for tier in settings.tiers:
        parts = {"kind": tier.kind, "url": tier.url, "every": tier.every, "keep": tier.keep}
        found[f"tier.{tier.name}"] |= parts
    return found
