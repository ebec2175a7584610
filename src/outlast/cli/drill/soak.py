"""``outlast drill --soak 30min``: one long run; what was proved of it, and its curves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import click
import msgspec
from rich.text import Text

from outlast import config, units
from outlast.cli.drill.screen import DrillScreen
from outlast.drill.course import DrillSetup
from outlast.drill.network import NetworkError
from outlast.drill.soak import Footprint, Soak, SoakResult
from outlast.errors import ConfigError
from outlast.ledger.narrator import place
from outlast.report.chart import Chart, Curve, Mark, write
from outlast.report.text import Paper

PICTURE: Final = "soak.svg"
SOAK_MIN_S: Final = 60.0
_MB: Final = 1e6
_CURVES: Final = (
    ("memory", "memory of the job's processes", "MB", _MB),
    ("shared", "shared memory", "MB", _MB),
    ("threads", "threads", "", 1.0),
    ("files", "open files", "", 1.0),
)


def soaked(
    console: Paper,
    setup: DrillSetup,
    time_: str,
    seed: int,
    names: Sequence[str],
    *,
    as_json: bool,
) -> int:
    """Run one, and say what came of it; the exit code.

    Raises:
        ConfigError: no such time, or the job does not train by itself.
    """
    try:
        seconds = config.parse_span(time_)
    except ConfigError as error:
        raise ConfigError(f"--soak: {error}") from None
    if seconds < SOAK_MIN_S:
        raise ConfigError(
            f"--soak {time_}: nothing is seen to grow in so short a time; give 1 min or more"
        )
    with DrillScreen(console) as screen:
        screen.say(
            f"[bold]outlast drill --soak[/]: {' '.join(setup.script.words)} for "
            f"{units.seconds(seconds)}, {units.count(setup.machines, 'machine')}"
        )
        screen.tell_linked(setup.root)
        try:
            result = Soak(setup, seconds, seed, screen, names).run()
        except NetworkError as error:
            raise ConfigError(f"--machines {setup.machines}: {error}") from None
    if len(result.footprints) > 1:
        write([*pictures(result)], setup.root / PICTURE, title="a soak")
    if as_json:
        click.echo(
            msgspec.json.encode(
                {"holds": result.holds, **msgspec.to_builtins(result), "seed": seed}
            )
        )
        return 0 if result.holds else 1
    for one in result.held:
        mark = Text("  ✔ ", style="green") if one.holds else Text("  ✖ ", style="red")
        console.print(mark.append(one.what, style="default"))
    verdict = "[green]all of it holds[/]" if result.holds else "[red]not all of it holds[/]"
    console.print(
        f"{verdict} · {units.count(len(result.faults), 'fault')} · "
        f"{units.count(result.steps, 'step')} · {units.seconds(result.seconds)} · seed {seed}"
    )
    console.print(f"Its curves: {place(setup.root / PICTURE)}")
    console.print(f"Next: outlast report {place(setup.root / 'soak' / 'job')}")
    return 0 if result.holds else 1


def pictures(result: SoakResult) -> list[Chart]:
    """A chart of each thing that must be flat, over the minutes of the soak."""
    return [_chart(result.footprints, *one) for one in _CURVES]


def _chart(footprints: Sequence[Footprint], name: str, title: str, unit: str, size: float) -> Chart:
    points = [(one.t / 60.0, getattr(one, name) / size) for one in footprints]
    marks: list[Mark] = []
    return Chart(
        title=title,
        x_label="minutes",
        y_label=unit,
        x_words=lambda x: f"{x:.3g}",
        x_rounds=lambda low, high: [float(n) for n in range(int(low) + 1, int(high) + 1)],
        curves=[Curve(title, points, "solid")],
        marks=marks,
        y_low=0.0,
        y_high=1.2 * max(1e-9, *(y for _, y in points)),
        is_linear=True,
    )
