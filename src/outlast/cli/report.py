"""``outlast report``."""

from __future__ import annotations

import contextlib
import gc
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click
import msgspec
from rich.text import Text

from outlast import config, units
from outlast.errors import ConfigError, StorageError
from outlast.ledger.clocks import steady
from outlast.ledger.file import read_events
from outlast.ledger.job import read_job, settings_of
from outlast.report.facts import Facts, facts, to_json
from outlast.report.page import page
from outlast.report.text import (
    Paper,
    breakdown_lines,
    forecast_lines,
    incident_lines,
    slow_line,
    storm_lines,
    summary_lines,
    where_time_went,
)

# What a machine may say after the end: the doctor sent it away, its cloud has said its kind.
_LATE: Final = ("preflight", "machine")


@click.command(name="report")
@click.argument("directory", required=False)
@click.option("--json", "as_json", is_flag=True, help="One JSON object and nothing else.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write a page (.html).")
def command(directory: str | None, as_json: bool, output: Path | None) -> None:
    """What happened to a job, where its time went, and what that cost."""
    if output is not None and (as_json or output.suffix.lower() not in (".html", ".htm")):
        why = "--json is for standard output" if as_json else f"{output.name} is no page"
        raise ConfigError(f"{why}: outlast report -o report.html")
    settings = config.load({"dir": directory})
    job = read_job(settings.dir)  # says what is wrong when this is no job's directory
    prices = settings_of(directory, settings, job).prices
    unread: list[bool] = []
    read = read_events(settings.dir, on_unread=lambda: unread.append(True))
    with _no_collection():
        events, shift_s = steady(read)
    last = next((one.event for one in reversed(events) if one.event not in _LATE), "")
    finished = last in ("job_finished", "drained")
    now = None if finished else time.time() + shift_s
    if as_json:
        click.echo(msgspec.json.encode(to_json(events, now=now, prices=prices)))
        return
    if output is not None:
        _write(page(events, settings.dir, now=now, prices=prices), output)
        return
    console = Paper(highlight=False, soft_wrap=True)
    told = facts(events, now=now, prices=prices)
    # What is being written just now is not whole yet.
    num_unread = 0 if told.state.startswith("running") else len(unread)
    for line in summary_lines(told, now=now, num_unread=num_unread):
        console.print(line)
    _tell_what_went_wrong(console, told)
    if events:
        console.print("[bold]where the time went[/]")
        width = 20 if console.is_terminal else 0
        for line in where_time_went(told.workers, money=told.money, bar_width=width):
            console.print(Text("  ").append(line))
    if lines := breakdown_lines(told):
        console.print("[bold]attempts, machines and tiers[/]")
        for line in lines:
            console.print(line)
    if told.forecast is not None:
        console.print("[bold]predicted and measured[/]")
        for line in forecast_lines(told):
            console.print(line)
    console.print(f"Next: outlast checkpoints list {Path(directory or settings.dir)}")


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """What is read are no cycles: to look for some takes as long as reading does."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.freeze()  # nor are they looked at later
            gc.enable()


def _write(content: str, path: Path) -> None:
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error.strerror}; give another file"
        ) from None
    click.echo(f"{path}: {units.size(len(content.encode()))}, one file; open it in a browser")


def _tell_what_went_wrong(console: Paper, job: Facts) -> None:
    """The incidents, the storms that they make, and the slow ranks."""
    sections: list[tuple[str, list[list[Text]]]] = [
        ("incidents", [incident_lines(one, job.state) for one in job.incidents]),
        ("storms of failures", [storm_lines(one) for one in job.storms]),
        ("slow ranks", [[slow_line(one)] for one in job.slow_ranks]),
    ]
    for name, told in sections:
        if told:
            console.print(f"[bold]{name}[/]")
        for line in itertools.chain.from_iterable(told):
            console.print(Text("  ").append(line))
