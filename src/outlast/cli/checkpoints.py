"""``outlast checkpoints``: list, show, verify."""

from __future__ import annotations

import datetime
import sys
from typing import Any

import click
import msgspec

from outlast import config
from outlast.checkpoint.catalog import find_steps
from outlast.checkpoint.load import load, read_manifest, verify
from outlast.checkpoint.manifest import Manifest
from outlast.checkpoint.save import OWN
from outlast.errors import CheckpointInvalid, ConfigError, StorageError
from outlast.ledger.file import read_events
from outlast.ledger.job import read_job
from outlast.report import humanise
from outlast.storage import Directory

_JSON = click.option("--json", "as_json", is_flag=True, help="One JSON object and nothing else.")
_STEP = click.option("--step", type=int, default=None, help="Which step; the newest by default.")
_WHERE = click.argument("directory", required=False)


@click.group(name="checkpoints")
def command() -> None:
    """What checkpoints a job has and whether they can be believed."""


@command.command(name="list")
@_WHERE
@_JSON
def list_command(directory: str | None, as_json: bool) -> None:
    """Every step that has a directory, oldest first; manifests are verified, data is not."""
    storage = _storage(directory)
    steps = _steps(storage)
    rows = [_row(storage, step) for step in steps.committed]
    rows += [{"step": step, "state": "unfinished"} for step in steps.unfinished]
    rows.sort(key=lambda row: int(row["step"]))
    if as_json:
        click.echo(msgspec.json.encode({"checkpoints": rows}))
        return
    for row in rows:
        size = humanise.size(row["bytes"]) if "bytes" in row else ""
        made = _clock(row["created_t"]) if "created_t" in row else ""
        click.echo(f"step {row['step']:>9,}  {row['state']:<12}{size:>10}  {made}".rstrip())
    if not rows:
        click.echo(f"no checkpoint in {storage.describe()} yet")
    click.echo(f"Next: outlast checkpoints verify {directory or ''}".rstrip())


@command.command(name="show")
@_WHERE
@_STEP
@click.option("--samples", is_flag=True, help="The ids of every sample consumed until then.")
@_JSON
def show_command(directory: str | None, step: int | None, samples: bool, as_json: bool) -> None:
    """What one checkpoint holds."""
    storage = _storage(directory)
    manifest = read_manifest(storage, _pick(storage, step))
    loaded = load(storage, manifest.step, everything=False)
    own = loaded.state(OWN)
    position = own["data"].get("position", {}) if own["data"] else {}
    if samples:
        _print_samples(position, manifest.step, as_json)
        return
    found = {
        "step": manifest.step,
        "job": manifest.job,
        "attempt": manifest.attempt,
        "world_size": manifest.world_size,
        "layout": manifest.layout,
        "created_t": manifest.created_t,
        "bytes": sum(file.size for file in manifest.files.values()),
        "files": {name: file.size for name, file in manifest.files.items()},
        "tensors": {
            name: {"dtype": tensor.dtype, "shape": tensor.shape}
            for name, tensor in manifest.tensors.items()
        },
    }
    if as_json:
        click.echo(msgspec.json.encode(found))
        return
    click.echo(
        f"step {manifest.step} of job {manifest.job}, attempt {manifest.attempt}, "
        f"{humanise.count(manifest.world_size, 'worker')}, {_clock(manifest.created_t)}"
    )
    for name, file in manifest.files.items():
        click.echo(f"  {name:<28}{humanise.size(file.size):>10}")
    for name, tensor in manifest.tensors.items():
        click.echo(f"  {tensor.dtype:<5} {'x'.join(map(str, tensor.shape)) or 'scalar':<16} {name}")


@command.command(name="verify")
@_WHERE
@_STEP
@_JSON
def verify_command(directory: str | None, step: int | None, as_json: bool) -> int:
    """Read every byte and compare it with its checksum; exit code 1 if one does not match."""
    storage = _storage(directory)
    wanted = _expected(storage, directory) if step is None else [step]
    if not wanted:
        raise ConfigError(f"there is no checkpoint in {storage.describe()} yet")
    rows = [_verified(storage, one) for one in wanted]
    if as_json:
        click.echo(msgspec.json.encode({"checkpoints": rows}))
    for row in rows if not as_json else []:
        mark = "ok " if row["valid"] else "BAD"
        click.echo(f"{mark} step {row['step']:>9,}  {row.get('reason') or _size(row)}")
    return 0 if all(row["valid"] for row in rows) else 1


def _expected(storage: Directory, directory: str | None) -> list[int]:
    """The committed steps, and the newest of the ledger's if its manifest has gone since."""
    committed: list[int] = _steps(storage).committed
    events = read_events(config.load({"dir": directory}).dir)
    promised = max((e["step"] for e in events if e.event == "commit"), default=0)
    return committed + [promised] * (promised > max(committed, default=0))


def _verified(storage: Directory, step: int) -> dict[str, Any]:
    label = f"step {step}"
    try:
        with click.progressbar(length=1, label=label, file=sys.stderr) as bar:
            last = 0

            def progress(done: int, total: int) -> None:
                nonlocal last
                bar.length = total
                bar.update(done - last)
                last = done

            manifest = verify(storage, step, progress if sys.stderr.isatty() else None)
    except CheckpointInvalid as error:
        return {"step": step, "valid": False, "reason": error.reason}
    except OSError as error:
        return {"step": step, "valid": False, "reason": f"it cannot be read: {error}"}
    return {"step": step, "valid": True, "bytes": _bytes(manifest)}


def _size(row: dict[str, Any]) -> str:
    return humanise.size(row["bytes"])


def _bytes(manifest: Manifest) -> int:
    return sum(file.size for file in manifest.files.values())


def _row(storage: Directory, step: int) -> dict[str, Any]:
    try:
        manifest = read_manifest(storage, step)
    except CheckpointInvalid as error:
        return {"step": step, "state": "invalid", "reason": error.reason}
    return {
        "step": step,
        "state": "committed",
        "bytes": _bytes(manifest),
        "created_t": manifest.created_t,
        "world_size": manifest.world_size,
    }


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


def _storage(directory: str | None) -> Directory:
    settings = config.load({"dir": directory})
    read_job(settings.dir)
    return Directory(settings.checkpoints_dir)


def _steps(storage: Directory) -> Any:
    try:
        return find_steps(storage)
    except OSError as error:
        raise StorageError(f"{storage.describe()} cannot be listed: {error.strerror}") from None


def _pick(storage: Directory, step: int | None) -> int:
    committed = _steps(storage).committed
    if step is None and committed:
        return int(committed[-1])
    if step is None or step not in committed:
        known = ", ".join(map(str, committed)) or "none yet"
        raise ConfigError(f"step {step} is not in {storage.describe()}; committed steps: {known}")
    return step


def _clock(t: float) -> str:
    return datetime.datetime.fromtimestamp(t, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
