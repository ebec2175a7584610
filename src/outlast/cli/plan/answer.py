"""Say what a question of ``outlast plan`` is, what it gives back, and how that is shown.

An answer is data first: ``--json`` prints it as one object, each number with its unit in its name.
Text is made of the same numbers. What is endless is null in JSON and a word in text.
"""

from __future__ import annotations

import inspect
import math
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from outlast import units
from outlast.cli.quantities import JSON_FLAG, flag
from outlast.errors import ConfigError
from outlast.report.chart import Picture, write

_CHOSEN: Final = "→ "
_GLUE: Final = "\u00a0"
_UNIT: Final = re.compile(
    r"(?<=[0-9]) (?=(?:ms|s|min|h|d|%|[kMGTPE]?B)(?![a-z]))"
    r"|(?<= [hd]) (?=[0-9]{2} )|(?<=min) (?=[0-9]{2} s)"
)


class PlanAnswer(msgspec.Struct, kw_only=True):
    """An answer.

    Attributes:
        data: for ``--json``.
        headline: the answer in a line or two, one under the other, for the overview.
        details: what follows it where the question is asked alone.
        charts: makes the pictures, if there are any.
        next: a command that is useful now.
    """

    data: dict[str, Any]
    headline: str
    details: list[str]
    charts: Callable[[], list[Picture]] | None = None
    next: str = ""


class PlanQuestion(msgspec.Struct, frozen=True):
    """A question: how it is asked, and the function that answers it from its flags.

    Attributes:
        asks: as a person would ask it.
        answer: takes the flags by name; its docstring is the command's help.
        flags: of the command, in the order of its help.
        draws: whether there is a picture; where nothing is ever drawn --plot is refused in words,
            not listed.
        listed: how it is asked in the list of questions, if that is longer.
    """

    asks: str
    answer: Callable[..., PlanAnswer]
    flags: Sequence[click.Option]
    draws: bool = False
    listed: str = ""

    def command(self, name: str) -> click.Command:
        """Make the command of this name."""

        def ask(*, as_json: bool, plot: Path | None, **given: Any) -> None:
            show(self.answer(**given), self.asks, as_json=as_json, plot=plot)

        return click.Command(
            name,
            params=[*self.flags, *output_flags(draws=self.draws)],
            callback=ask,
            help=inspect.getdoc(self.answer),
        )


def output_flags(*, draws: bool = True) -> tuple[click.Option, ...]:
    """Make --plot, which is listed where something is ``draws``-n, and --json."""
    kind = click.Path(dir_okay=False, path_type=Path)
    words = "Draw it: .svg, .html or .png."
    return flag("--plot", kind, words, metavar="FILE", hidden=not draws), JSON_FLAG


def show(answer: PlanAnswer, asks: str, *, as_json: bool, plot: Path | None) -> None:
    """Print an answer, and draw it where that was asked for.

    Raises:
        ConfigError: there is no picture of it.
    """
    if plot is not None:
        if answer.charts is None:
            raise ConfigError(
                "there is no picture of this; --plot draws outlast plan interval (of one tier), "
                "spot and flush"
            )
        write(answer.charts(), plot, title=f"outlast plan: {asks}")
    if as_json:
        click.echo(msgspec.json.encode(answer.data))
        return
    for line in [*answer.headline.split("\n"), *answer.details]:
        say(line)
    if plot is not None:
        click.echo(f"wrote {plot}")
    if answer.next:
        click.echo(f"Next: {answer.next}")


def say(line: str, *, indent: str = "") -> None:
    """A line; on a terminal broken between words, tables excepted, of which the chosen row is bold.

    A number and its unit stay together, and so does what stands between two hyphens.
    """
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    if line.startswith(_CHOSEN):
        click.echo(click.style(line, bold=True))
        return
    if not columns or line.startswith(" "):
        click.echo(f"{indent}{line}")
        return
    broken = textwrap.wrap(
        _UNIT.sub(_GLUE, line),
        columns,
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_on_hyphens=False,
        break_long_words=False,
    )
    for part in broken or [""]:
        click.echo(part.replace(_GLUE, " "))


def lines(*parts: str | Sequence[str]) -> list[str]:
    """Put lines and tables one after the other; what is empty is left out."""
    return [line for part in parts if part for line in ([part] if isinstance(part, str) else part)]


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], chosen: Sequence[bool] = ()
) -> list[str]:
    """Rows under a header, the chosen one marked; the first column left, the others right."""
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]
    lines = []
    for row, mark in zip([header, *rows], [False, *chosen, *[False] * len(rows)], strict=False):
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append((_CHOSEN if mark else "  ") + "  ".join(cells))
    return lines


def span(hours: float) -> str:
    """Hours as people say them; ``never`` when endless, a dash when there is no such time."""
    if math.isnan(hours):
        return "–"
    return "never" if math.isinf(hours) else units.seconds(hours * 3600)


def number(value: float, digits: int = 3) -> str:
    """Some digits after the point, and two that count at least; ``no progress`` when endless."""
    if math.isinf(value) or math.isnan(value):
        return "no progress"
    if value:
        digits = max(digits, 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(digits, 12)}f}"


def figure(value: float) -> str:
    """Three significant digits, plainly: ``0.00213``, ``1.25``, ``5,671``."""
    if value == 0 or math.isinf(value):
        return "0" if value == 0 else "any"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(digits, 12)}f}"


def chance(share: float) -> str:
    """A share with one decimal; what is not all is not said to be all, nor a little nothing."""
    if 0.9995 <= share < 1:
        return "over 99.9 %"
    return "under 0.1 %" if 0 < share < 0.0005 else percent(share)


def percent(share: float) -> str:
    """A share with one decimal."""
    return f"{100 * share:.1f} %"
