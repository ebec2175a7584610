"""``outlast config``."""

from __future__ import annotations

import click
import msgspec

from outlast import config


@click.command(name="config")
@click.option("--dir", "directory", default=None, help="The job's directory.")
@click.option("--explain", is_flag=True, help="Say where each setting came from.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object and nothing else.")
def command(directory: str | None, explain: bool, as_json: bool) -> None:
    """Print the settings in force: argument, then OUTLAST_*, then outlast.toml, then default."""
    rows = config.as_rows(config.load({"dir": directory}))
    if as_json:
        found = {key: {"value": value, "from": source} for key, value, source in rows}
        click.echo(msgspec.json.encode(found))
        return
    width = max(len(key) for key, _, _ in rows)
    values = max(len(value) for _, value, _ in rows)
    for key, value, source in rows:
        tail = f"  {value:<{values}}  {source}" if explain else f"  {value}"
        click.echo(f"{key:<{width}}{tail}".rstrip())
