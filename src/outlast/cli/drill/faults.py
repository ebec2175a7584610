"""``outlast drill [FAULT …] -- train.py``: the faults, the screen, and the grades in three forms.

The table is for a person: what each fault cost, and what was promised and did not hold. ``--json``
has all that was measured. ``--junit`` writes a file that CI systems show: a test case for a fault.
"""

from __future__ import annotations

import os
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import click
import msgspec
from rich.table import Table
from rich.text import Text

from outlast import config, units
from outlast.cli.drill import DIRECTORY, split
from outlast.cli.drill.screen import DrillScreen
from outlast.cli.drill.soak import soaked
from outlast.drill.course import STEPS, TRAINED_S, Drill, DrillResult, DrillSetup
from outlast.drill.faults.aim import PlannedFault
from outlast.drill.faults.catalogue import FAULTS, Bounds, draw, planned
from outlast.drill.grade import Grade
from outlast.drill.network import NetworkError, unusable
from outlast.drill.target import Target
from outlast.drill.workplace import part_of, script_of
from outlast.errors import ConfigError, nearest
from outlast.ledger.narrator import place
from outlast.report.text import Paper

USUAL: Final = (  # without a name: what happens to jobs, and takes a few seconds each
    *("kill-worker", "kill-workers", "kill-agent", "kill-keeper", "stop-keeper", "oom-kill"),
    *("break-storage", "flip-bit", "truncate-file", "notice", "sigterm"),
)
SEVERAL: Final = ("kill-machine", "kill-leader", "cut-network")  # and of several machines
Plan = Callable[[Bounds, Target], Sequence[PlannedFault]]


class _Drilled(click.Command):
    """Whose job's command line stands behind ``--``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep the job's words from click."""
        ours, ctx.meta["job"] = split(args)
        return super().parse_args(ctx, ours)


@click.command(name="faults", cls=_Drilled, options_metavar="[OPTIONS]")
@click.argument("faults", nargs=-1, metavar="[FAULT]... -- train.py [ARGUMENTS]...")
@click.option("--list", "lists", is_flag=True, help="Say which faults there are, and end.")
@click.option(
    "--steps",
    type=int,
    default=None,
    help=f"How far each run goes; else {STEPS}, or {TRAINED_S:.0f} s of steps if those are more.",
)
@click.option("--workers", default=1, show_default=True, help="Workers on each machine.")
@click.option(
    "--machines",
    default=1,
    show_default=True,
    help="Machines: network namespaces on this one, as root.",
)
@click.option("--random", "count", type=int, default=None, help="So many faults that are drawn.")
@click.option("--soak", default=None, metavar="TIME", help="One run of so long, such as 30min.")
@click.option("--seed", default=0, show_default=True, help="Decides victims and moments.")
@DIRECTORY
@click.option("--junit", default=None, help="Write the grades to this file as JUnit XML.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object and nothing else.")
@click.pass_context
def command(
    ctx: click.Context,
    faults: tuple[str, ...],
    *,
    lists: bool,
    steps: int | None,
    workers: int,
    machines: int,
    count: int | None,
    soak: str | None,
    seed: int,
    directory: str,
    junit: str | None,
    as_json: bool,
) -> int:
    """Run a job undisturbed, then once for each FAULT, and grade what it shows.

    Each run works on a copy of this directory, with tiers of its own. Without a FAULT: those that
    happen most. The job is what stands behind --, as it would stand behind outlast run. Exit code
    1 if anything that is promised did not hold.
    """
    console = Paper(quiet=as_json, highlight=False, soft_wrap=True)
    if lists:
        _list(console, as_json=as_json)
        return 0
    _check(faults, steps=steps, workers=workers, machines=machines, random=count)
    if soak is not None and (count is not None or junit is not None):
        raise ConfigError("--soak is one run until its time is over; leave out --random, --junit")
    if machines > 1 and (why_not := unusable()):
        raise ConfigError(f"--machines {machines}: {why_not}")
    script = script_of(ctx.meta["job"])
    if junit is not None:
        _check_junit(Path(junit))
    settings = config.load({})
    setup = DrillSetup(
        script=script,
        root=part_of(Path(directory), "faults" if soak is None else "soak"),
        steps=steps,
        workers=workers,
        machines=machines,
        settings=settings,
        environ=dict(os.environ),
    )
    if soak is not None:
        return soaked(console, setup, soak, seed, faults, as_json=as_json)
    named = faults or (*USUAL, *(SEVERAL if machines > 1 else ()))
    with DrillScreen(console) as screen:
        screen.say(
            f"[bold]outlast drill[/]: {' '.join(script.words)}, "
            f"{units.count(workers, 'worker')}"
            + (f" on each of {machines} machines" if machines > 1 else "")
        )
        screen.tell_linked(setup.root)
        try:
            result = Drill(setup, screen).conduct(_plan(named, count, seed, bool(faults)))
        except NetworkError as error:
            raise ConfigError(f"--machines {machines}: {error}") from None
    if as_json:
        click.echo(msgspec.json.encode({"holds": result.holds, **_plain(result), "seed": seed}))
    else:
        _conclude(console, result, seed)
    if junit is not None:
        _write_junit(Path(junit), result)
    return 0 if result.holds else 1


def _check(faults: Sequence[str], **numbers: int | None) -> None:
    for name in faults:
        if name not in FAULTS:
            raise ConfigError(f"{name} is not a fault;{nearest(name, tuple(FAULTS))}")
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise ConfigError(f"--{name} {value}: there must be one at least")


def _check_junit(path: Path) -> None:
    """See ahead of a drill of minutes that its grades can be written.

    Raises:
        ConfigError: they cannot be.
    """
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"--junit {path} cannot be written; give a file in a directory of yours")


def _plan(names: Sequence[str], count: int | None, seed: int, are_named: bool) -> Plan:
    """Which faults, once it is known from what they are drawn."""

    def made(bounds: Bounds, target: Target) -> Sequence[PlannedFault]:
        if count is None:
            return [planned(name, seed, number, bounds) for number, name in enumerate(names)]
        try:
            return draw(seed, count, bounds, target, names if are_named else ())
        except ValueError as error:
            raise ConfigError(f"--random {count}: {error}") from None

    return made


def _list(console: Paper, *, as_json: bool) -> None:
    if as_json:
        rows = [
            {"name": e.name, "what": e.what, "promise": str(e.promise)} for e in FAULTS.values()
        ]
        click.echo(msgspec.json.encode({"faults": rows}))
        return
    width = max(map(len, FAULTS))
    for entry in FAULTS.values():
        console.print(Text(f"{entry.name:<{width}}  {entry.what}"))
        console.print(Text(f"{'':<{width}}    {entry.promise}", style="dim"))
    console.print("Next: outlast drill kill-worker -- train.py")


def _conclude(console: Paper, result: DrillResult, seed: int) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("fault", "holds", "found", "made again", "stood", "data", "verified", "state"):
        table.add_column(name, justify="left" if name in ("fault", "state") else "right")
    priced = any(one.cost is not None for one in result.grades)
    if priced:
        table.add_column("cost", justify="right")
    for one in result.grades:
        table.add_row(*_row(one), *([_cost(one)] if priced else []))
    console.print(table)
    if not result.has_session:
        console.print(
            "The script has no session: it is graded by its end. What it made again, and whether "
            "it is the same run, is told and not held against it. See docs/script.md."
        )
    elif not result.commits:
        console.print(
            f"No checkpoint was committed in {units.count(result.steps, 'step')}: every fault "
            "costs all of them. Next: the same with more --steps."
        )
    if result.differs_itself:
        console.print(
            f"[yellow]The script differs from itself[/], undisturbed, {result.differs_itself}: no "
            "resume can be shown to be exact."
        )
    bad = [one for one in result.grades if not one.holds and not one.is_open]
    unproven = [one for one in result.grades if one.is_open]
    tried = [one for one in result.grades if not one.why_not]
    of = units.count(len(tried), "fault")
    verdict = f"[green]everything promised held[/], in {of}"
    if bad:
        verdict = f"[red]{len(bad)} of {of} broke a promise[/]"
    if unproven:
        verdict = f"{verdict}, " if bad else ""
        verdict += f"[yellow]{len(unproven)} of {of} proved nothing[/]"
    where = place(Path(result.directory))
    console.print(
        f"{verdict} · each run to step {result.steps:,} · "
        f"{units.seconds(result.seconds)} · seed {seed} · {where}"
    )
    differs = any(one.differs and one.is_exact for one in result.grades)
    if differs:
        console.print("Next: outlast drill resume -- …, which looks for the cause")
    elif bad:
        console.print(f"Next: outlast report {place(Path(bad[0].directory) / 'job')}")
    elif unproven:
        console.print(f"Next: the same with --steps {2 * result.steps}")
    else:
        console.print("Next: the same with --random 20 --seed 1, or --machines 3")


def _row(one: Grade) -> list[Text | str]:
    if one.why_not:
        return [one.fault, Text("–", style="yellow"), *[""] * 5, Text(one.why_not, style="yellow")]
    holds = Text("yes", style="green") if one.holds else Text("NO", style="red")
    if one.is_open:
        holds = Text("open", style="yellow")
    seen = one.samples
    data = ""
    if seen is not None and seen.is_known:
        data = "same" if not seen.lost + seen.repeated else f"-{seen.lost} +{seen.repeated}"
    checked = one.verified
    return [
        one.fault,
        holds,
        "" if one.found_after_s is None else units.seconds(one.found_after_s),
        "" if one.lost_steps is None else units.count(one.lost_steps, "step"),
        "" if one.stood_s is None else units.seconds(one.stood_s),
        data,
        f"{len(checked.damaged)} bad" if checked.damaged else units.size(checked.num_bytes),
        Text(f"differs {one.differs}", style="red" if one.is_exact else "dim")
        if one.differs
        else "equal",
    ]


def _cost(one: Grade) -> str:
    return "" if one.cost is None else f"{one.cost:.4f}"


def _plain(result: DrillResult) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(result)
    for grade, one in zip(result.grades, found["grades"], strict=True):
        one |= {"holds": grade.holds, "is_open": grade.is_open}
        if grade.samples is not None:
            one["samples"] = grade.samples._asdict()
    return found


def _write_junit(path: Path, result: DrillResult) -> None:
    """Write the grades as JUnit XML, a test case for each fault.

    Raises:
        ConfigError: the file cannot be written.
    """
    failures = sum(not one.holds for one in result.grades)
    skipped = sum(bool(one.why_not) for one in result.grades)
    suite = ET.Element(
        "testsuite",
        name="outlast drill",
        tests=str(len(result.grades)),
        failures=str(failures),
        skipped=str(skipped),
        time=f"{result.seconds:.3f}",
    )
    for one in result.grades:
        case = ET.SubElement(
            suite, "testcase", classname="outlast.drill", name=one.fault, time=f"{one.seconds:.3f}"
        )
        if one.why_not:
            ET.SubElement(case, "skipped", message=one.why_not)
        elif not one.holds:
            broken = [each.what for each in one.held if not each.holds]
            failure = ET.SubElement(case, "failure", message="; ".join(broken))
            failure.text = f"{one.what}\n{one.directory}"
        ET.SubElement(case, "system-out").text = "\n".join(
            f"{'holds' if each.holds else 'OPEN' if each.is_open else 'BROKEN'}: {each.what}"
            for each in one.held
        )
    try:
        ET.ElementTree(suite).write(path, encoding="unicode", xml_declaration=True)
    except OSError as error:
        raise ConfigError(f"--junit {path} cannot be written: {error.strerror}") from None
