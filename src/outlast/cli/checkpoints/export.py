"""``outlast checkpoints export``: one checkpoint as files that others read."""

from __future__ import annotations

import shlex
from pathlib import Path

import click
import msgspec

from outlast import units
from outlast.cli.checkpoints.survey import pick, size_of, survey
from outlast.cli.checkpoints.where import DIRECTORY, JSON, TIER, bar, find_job, in_words
from outlast.errors import ConfigError, StorageError, nearest

FORMATS = ("safetensors", "dcp", "torch")


@click.command(name="export")
@DIRECTORY
@click.option("--to", default=None, help="safetensors, dcp, or torch (torch.save).")
@click.option("--out", default=None, help="Where the files go; must be empty or not exist.")
@click.option(
    "--step", type=int, default=None, help="Which step (its newest save); the newest by default."
)
@TIER
@JSON
def command(
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
    from outlast.checkpoint.export import export

    number = picked.step
    with bar(num_bytes) as shown:
        shown.begin(f"step {number:,}")
        try:
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
