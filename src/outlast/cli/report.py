"""``outlast report``."""

from __future__ import annotations

import contextlib
import gc
import itertools
import shlex
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import click
import msgspec
from rich.table import Table
from rich.text import Text

from outlast import config, units
from outlast.errors import ConfigError, OutlastError, StorageError
from outlast.ledger.clocks import steady
from outlast.ledger.events import Event
from outlast.ledger.file import read_events
from outlast.ledger.job import Job, read_job, settings_of
from outlast.prices import Prices
from outlast.report.compare import (
    MOST_JOBS,
    ComparedJob,
    CompareSection,
    compare_json,
    compared,
    furthest_step,
    names_of,
    sections,
    unlike,
    verdict,
)
from outlast.report.compare_page import compare_page
from outlast.report.facts import Facts, facts, to_json
from outlast.report.page import page
from outlast.report.text import (
    INCIDENT_TERMS,
    SAVED_TERM,
    Paper,
    breakdown_lines,
    forecast_lines,
    incident_lines,
    slow_lines,
    storm_lines,
    summary_lines,
    warning_lines,
    where_time_went,
)

# What a machine may say after the end: the doctor sent it away, its cloud has said its kind.
_LATE: Final = ("preflight", "machine")
_ANY_WIDTH: Final = 10_000  # of a line that goes into a file or a pipe
_CELL_LETTERS: Final = 48


@click.command(name="report")
@click.argument("directories", nargs=-1, metavar="[DIRECTORY]...")
@click.option("--json", "as_json", is_flag=True, help="One JSON object and nothing else.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write a page (.html).")
@click.option("--compare", is_flag=True, help="Several jobs, side by side.")
def command(
    directories: tuple[str, ...],
    as_json: bool,
    output: Path | None,
    compare: bool,
) -> None:
    """What happened to a job, where its time went, and what that cost."""
    if output is not None and (as_json or output.suffix.lower() not in (".html", ".htm")):
        why = "--json is for standard output" if as_json else f"{output.name} is no page"
        name = "compare" if compare else "report"
        raise ConfigError(f"{why}: outlast report -o {name}.html")
    if compare:
        _compare(directories, as_json=as_json, output=output)
        return
    if len(directories) > 1:
        raise ConfigError(
            f"one job has one report, and {len(directories)} were given: outlast report "
            f"{shlex.join(directories)} --compare"
        )
    _report(directories[0] if directories else None, as_json=as_json, output=output)


class _ReportedJob(NamedTuple):
    """A job that was found: who it is, and its prices."""

    directory: Path
    job: Job
    prices: Prices


def _find(directory: str | None) -> _ReportedJob:
    """Find a job; says what is wrong when this is no job's directory."""
    settings = config.load({"dir": directory})
    job = read_job(settings.dir)
    return _ReportedJob(settings.dir, job, settings_of(directory, settings, job).prices)


class _ReadLedger(NamedTuple):
    """A ledger that was read; ``now`` is None for a job that is over."""

    events: list[Event]
    now: float | None
    num_unread: int


def _read(directory: Path) -> _ReadLedger:
    unread: list[bool] = []
    read = read_events(directory, on_unread=lambda: unread.append(True))
    with _no_collection():
        events, shift_s = steady(read)
    last = next((one.event for one in reversed(events) if one.event not in _LATE), "")
    finished = last in ("job_finished", "drained")
    return _ReadLedger(events, None if finished else time.time() + shift_s, len(unread))


def _report(directory: str | None, *, as_json: bool, output: Path | None) -> None:
    place, job, prices = _find(directory)
    every = job.settings.get("checkpoint.every", "")
    events, now, num_unread = _read(place)
    if as_json:
        click.echo(msgspec.json.encode(to_json(events, now=now, prices=prices, every=every)))
        return
    if output is not None:
        _write(page(events, place, now=now, prices=prices, every=every), output)
        return
    console = Paper(highlight=False, soft_wrap=True)
    told = facts(events, now=now, prices=prices, every=every)
    # What is being written just now is not whole yet.
    num_unread = 0 if told.state == "running" else num_unread
    for line in summary_lines(told, now=now, num_unread=num_unread):
        console.print(line)
    for line in warning_lines(told, directory or ""):
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
    console.print(f"Next: outlast checkpoints list {Path(directory or place)}")


def _compare(directories: tuple[str, ...], *, as_json: bool, output: Path | None) -> None:
    jobs, left_out = _compared(directories)
    if as_json:
        click.echo(msgspec.json.encode(compare_json(jobs, left_out)))
        return
    if output is not None:
        _write(compare_page(jobs, left_out, written=units.when(time.time())), output)
        return
    console = Paper(highlight=False)
    width = console.width if console.is_terminal else None
    if width is None:
        console.width = _ANY_WIDTH
    for one in jobs:
        for note in one.notes:
            console.print(Text(f"{one.name} {note}"), soft_wrap=True)
    for directory, why in left_out.items():
        console.print(Text(f"{directory} is left out: {why}"), soft_wrap=True)
    for words in verdict(jobs):
        console.print(Text(words, style="bold"), soft_wrap=True)
    if differ := unlike(jobs):
        words = f"warning: the jobs are unlike, a difference may come of that: {'; '.join(differ)}"
        console.print(Text(words, style="yellow"), soft_wrap=True)
    for table in _tables(jobs, width):
        console.print(table)
    if any(one.money is not None and one.money.saved is not None for one in jobs):
        console.print(Text(f"saved: beside {SAVED_TERM}", style="dim"), soft_wrap=True)
    console.print(Text(f"Next: outlast report {directories[0]}"), soft_wrap=True)


def _compared(directories: tuple[str, ...]) -> tuple[list[ComparedJob], dict[str, str]]:
    """The jobs, and those that cannot be compared: directory → why.

    Raises:
        ConfigError: there are not two to compare, or too many, or one is given twice.
    """
    if not 2 <= len(directories) <= MOST_JOBS:
        raise ConfigError(
            f"--compare takes 2 to {MOST_JOBS} jobs, and was given {len(directories)}: "
            "outlast report JOB1 JOB2 --compare"
        )
    places = Counter(Path(one).resolve() for one in directories)
    twice = next((str(place) for place, num in places.items() if num > 1), "")
    if twice:
        raise ConfigError(f"{twice} was given twice; give each job once")
    found: dict[str, _ReportedJob] = {}
    steps, left_out = [], {}
    for given in directories:
        try:
            one = _find(given)
            # Of several ledgers one at a time is in memory, so each is read twice.
            steps.append(furthest_step(read_events(one.directory)))
            found[given] = one
        except OutlastError as error:
            left_out[given] = str(error)
        except OSError as error:
            left_out[given] = f"its ledger cannot be read: {error.strerror or error}"
    if len(found) < 2:
        raise ConfigError(f"fewer than two of these are jobs: {'; '.join(left_out.values())}")
    same_step = min(filter(None, steps), default=0)
    names = names_of(list(map(Path, found)))
    jobs = [
        _folded(name, given, one, same_step)
        for name, (given, one) in zip(names, found.items(), strict=True)
    ]
    return jobs, left_out


def _folded(name: str, given: str, found: _ReportedJob, same_step: int) -> ComparedJob:
    """One job of several; its events are let go when this returns."""
    events, now, num_unread = _read(found.directory)
    last_t = max((event.t for event in events), default=0.0)
    return compared(
        *(name, Path(given), found.job, events),
        same_step=same_step,
        age_s=None if now is None else now - last_t,
        prices=found.prices,
        num_unread=num_unread,
    )


def _tables(jobs: Sequence[ComparedJob], width: int | None) -> list[Table]:
    """The rows as tables for a terminal: as many jobs beside each other as there is room for.

    Args:
        jobs: those that are compared.
        width: cells of a line; None for any number.
    """
    found = sections(jobs)
    names = max(len(row.name) for one in found for row in one.rows) + 2
    widths = [
        max(len(job.name), *(len(_short(row.cells[place])) for one in found for row in one.rows))
        for place, job in enumerate(jobs)
    ]
    groups: list[list[int]] = [[]]
    for place, own in enumerate(widths):
        used = names + sum(widths[one] + 2 for one in groups[-1])
        if width is not None and groups[-1] and used + own + 2 > width:
            groups.append([])
        groups[-1].append(place)
    return [_table(jobs, found, group) for group in groups]


def _table(
    jobs: Sequence[ComparedJob], found: Sequence[CompareSection], group: Sequence[int]
) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("", no_wrap=True)
    for place in group:
        table.add_column(Text(jobs[place].name), no_wrap=True, justify="right")
    for section in found:
        table.add_row(Text(section.name, style="bold"))
        for row in section.rows:
            cells = [
                Text(_short(row.cells[place]), style="bold green" if place in row.best else "")
                for place in group
            ]
            table.add_row(Text(f"  {row.name}", style="dim"), *cells)
    return table


def _short(words: str) -> str:
    """What a cell shows of them."""
    return words if len(words) <= _CELL_LETTERS else f"{words[: _CELL_LETTERS - 1]}…"


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
    incidents = [incident_lines(one, job) for one in job.incidents]
    sections: list[tuple[str, list[list[Text]]]] = [
        ("incidents", [*incidents, *([[Text(INCIDENT_TERMS, "dim")]] if incidents else [])]),
        ("storms of failures", [storm_lines(one) for one in job.storms]),
        ("slow ranks", [slow_lines(job)] if job.slow_ranks else []),
    ]
    for name, told in sections:
        if told:
            console.print(f"[bold]{name}[/]")
        for line in itertools.chain.from_iterable(told):
            console.print(Text("  ").append(line))
