"""Say what a question of ``outlast plan`` is, what it starts from, and how its answer is shown.

An answer is data first: ``--json`` prints it as one object, each number with its unit in its name.
Text is made of the same numbers. What is endless is null in JSON and a word in text.

A plan starts from a rate of failures, with its source and range, and from what the job has
measured. Where no rate is given, the job's own failures speak (as a posterior, so that few failures
give a wide range); where there is no job, a published rate over the given number of GPUs, by name.
"""

from __future__ import annotations

import inspect
import math
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from outlast import units
from outlast.cli.quantities import (
    DURATION,
    GPUS,
    GPUS_PER_NODE,
    JSON_FLAG,
    RATE,
    SPAN,
    Rate,
    flag,
    learnt,
)
from outlast.errors import ConfigError
from outlast.planner.formulas import PUBLISHED
from outlast.policy.interval import Costs
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


_DEFAULT: Final = PUBLISHED[0]  # where none is given: Llama 3's
_LEAST_PER_H, _MOST_PER_H = 1e-9, 1e6
NEWEST: Final = 20  # saves and incidents that are looked at
_WITHIN: Final = "with 90 % probability"
_HALF_OR_TWICE: Final = "if the rate is half or twice that"

# --rate and what turns it into the job's.
RATE_FLAGS: Final = (
    flag(
        "--rate",
        RATE,
        "2/h, 0.5%/gpu-day (a probability), 3 in 5h (seen), llama-3, rsc-1, … "
        "Without it: the job's own, or else Llama 3's.",
    ),
    flag("--gpus", GPUS, "How many: rates per GPU add up."),
    flag("--gpus-per-node", GPUS, "For a rate per node.", GPUS_PER_NODE),
)
# What saving and failing cost.
COST_FLAGS: Final = (
    flag("--checkpoint", SPAN, "A save blocks the loop for so long."),
    flag("--restore", DURATION, "Restore and rejoin."),
    flag("--detect", DURATION, "Until a failure is noticed."),
)


class FailureRate(msgspec.Struct, frozen=True, kw_only=True):
    """How often the whole job fails.

    Attributes:
        per_h: λ.
        low_per_h, high_per_h: the range that is answered for.
        range_is: what that range is.
        source: where the rate is from.
        num_gpus: that it was added up over, where they were named.
    """

    per_h: float
    low_per_h: float
    high_per_h: float
    range_is: str
    source: str
    num_gpus: int | None = None

    def as_json(self) -> dict[str, Any]:
        """With units in the names."""
        return {
            "failures_per_h": self.per_h,
            "mtbf_h": 1 / self.per_h,
            "failures_low_per_h": self.low_per_h,
            "failures_high_per_h": self.high_per_h,
            "range_is": self.range_is,
            "rate_source": self.source,
        }

    @property
    def words(self) -> str:
        """The rate and its source, as a line."""
        return f"The rate: a failure every {span(1 / self.per_h)}; {self.source}."


class OwnJob(msgspec.Struct, frozen=True, kw_only=True):
    """What the job in this directory has measured; None where it has not.

    Attributes:
        directory: the job's.
        rate: its failures.
        checkpoint_h: how long a save blocks its loop.
        lag_h: until a save is durable.
        restore_h: from a failure's detection to the first new step.
        detect_h: until a failure is noticed.
        state_bytes: of its newest checkpoint.
    """

    directory: str
    rate: Rate
    checkpoint_h: float | None
    lag_h: float | None
    restore_h: float | None
    detect_h: float | None
    state_bytes: int | None


def own() -> OwnJob | None:
    """What the job that the settings name has measured; None where there is no job."""
    from outlast import config
    from outlast.ledger.file import read_events
    from outlast.ledger.incidents import incidents, lived

    settings = config.load({})
    if not (settings.dir / "ledger.jsonl").exists():
        return None
    events = list(read_events(settings.dir))
    life = lived(events, incidents(events))
    if life.ran_s <= 0:
        return None
    whole = [event for event in events if event.get("kind", "full") == "full"]
    blocked = [event.get("blocked_s") for event in whole if event.event == "snapshot"]
    commits = [event for event in whole if event.event == "commit"]
    sizes = [event.get("bytes") for event in commits if isinstance(event.get("bytes"), int)]
    rate = learnt(life.num_failures, life.ran_s / 3600, life.known)
    return OwnJob(
        directory=str(settings.dir),
        rate=msgspec.structs.replace(rate, source=f"this job's ledger: {rate.source}"),
        checkpoint_h=_middle_h(blocked),
        lag_h=_middle_h(event.get("durable_s") for event in commits),
        restore_h=_middle_h(life.downs_s()),
        detect_h=_middle_h(life.detections_s()),
        state_bytes=sizes[-1] if sizes else None,
    )


def prices() -> tuple[float | None, float | None]:
    """Those that the settings name for this kind of machine, per hour: spot and on demand."""
    from outlast import config

    settings = config.load({})
    kind = settings.price_kind or ""
    return settings.price_spot.of(kind), settings.price_on_demand.of(kind)


def _middle_h(seconds: Iterable[object]) -> float | None:
    """The median of the newest, in hours."""
    known = [float(value) for value in seconds if isinstance(value, int | float) and value >= 0]
    known = sorted(known[-NEWEST:])
    return known[len(known) // 2] / 3600 if known else None


def rated(answer: Callable[..., PlanAnswer]) -> Callable[..., PlanAnswer]:
    """Answer from the flags of a rate where the question wants only the failures they name."""

    def asked(rate: Rate | None, gpus: int | None, gpus_per_node: int, **given: Any) -> PlanAnswer:
        measured = own() if rate is None else None
        return answer(failure_rate(rate, gpus, gpus_per_node, measured=measured), **given)

    asked.__doc__ = answer.__doc__
    return asked


def failure_rate(
    rate: Rate | None,
    gpus: int | None,
    gpus_per_node: int = GPUS_PER_NODE,
    *,
    measured: OwnJob | None = None,
    step_h: float | None = None,
) -> FailureRate:
    """The whole job's rate.

    Raises:
        ConfigError: there is none, or a number that it needs is missing.
    """
    if rate is None and measured is not None:
        rate = measured.rate
    if rate is None and gpus is not None:
        known = _DEFAULT
        source = f"no rate was given; {known.source}: {known.per_gpu_day:.3g} per GPU-day"
        rate = Rate(per_h=known.per_gpu_day / 24, of="gpu", source=source)
    if rate is None:
        raise ConfigError(
            "no rate is known; give --rate 2/h, --rate 0.5%/gpu-day with --gpus, or --gpus alone "
            "for a published rate"
        )
    per_h = rate.per_h * _times(rate, gpus, gpus_per_node, step_h)
    if not _LEAST_PER_H <= per_h <= _MOST_PER_H:
        raise ConfigError(
            f"{per_h:.3g} failures per hour of the whole job are beyond what can be planned for, "
            f"{_LEAST_PER_H:g} to {_MOST_PER_H:g}; {rate.source}"
        )
    source = rate.source
    if rate.of in ("gpu", "node") and gpus is not None:
        source += f", times {gpus:,} GPUs" + (
            f" in machines of {gpus_per_node}" * (rate.of == "node")
        )
    if rate.seen is None:
        low, high, range_is = per_h / 2, per_h * 2, _HALF_OR_TWICE
    else:
        (low, high), range_is = rate.seen.interval_per_h(), _WITHIN
    return FailureRate(
        per_h=per_h, low_per_h=low, high_per_h=high, range_is=range_is, source=source, num_gpus=gpus
    )


def _times(rate: Rate, gpus: int | None, gpus_per_node: int, step_h: float | None) -> float:
    if rate.of == "job":
        return 1.0
    if rate.of == "step":
        if step_h is None:
            raise ConfigError("a rate per step needs the step's time: --step 0.8s")
        return 1 / step_h
    if gpus is None:
        raise ConfigError(f"a rate per {rate.of} needs the number of GPUs: --gpus 64")
    return gpus if rate.of == "gpu" else gpus / gpus_per_node


def costs_of(measured: OwnJob | None, **given: float | None) -> Costs:
    """What saving and failing cost: as given, else as this job has measured it, else nothing.

    Raises:
        ConfigError: nobody knows what a checkpoint costs.
    """
    known = {
        name: getattr(measured, name, None) if value is None else value
        for name, value in given.items()
    }
    checkpoint_h = needed(known.pop("checkpoint_h"), "--checkpoint", "3min")
    return Costs(checkpoint_h=checkpoint_h, **{name: value or 0.0 for name, value in known.items()})


def needed(
    value: float | None, flag: str, example: str, why: str = "no job here has measured it"
) -> float:
    """A number that is not known otherwise, ``why`` says why.

    Raises:
        ConfigError: it was not given either.
    """
    if value is None:
        raise ConfigError(f"{flag} is missing, and {why}; like {flag} {example}")
    return value
