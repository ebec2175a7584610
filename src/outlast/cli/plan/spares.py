"""``outlast plan spares``: how many machines in reserve?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from outlast.cli.plan.answer import Answer, figure, show, shown, span, table
from outlast.cli.plan.facts import Failures, failures, own, rate_flags
from outlast.cli.quantities import SPAN, Rate
from outlast.plan.spares import num_spares, shortage

_SUFFICING = (0.9, 0.99, 0.999)


def answer(known: Failures, repair_h: float) -> Answer:
    """Spares for three degrees of safety."""
    counts = [num_spares(known.per_h, repair_h, sufficing=share) for share in _SUFFICING]
    low, high = (
        num_spares(per_h, repair_h, sufficing=0.99) for per_h in (known.low_per_h, known.high_per_h)
    )
    short = [shortage(count, known.per_h, repair_h) for count in counts]
    data: dict[str, Any] = {
        **known.as_json(),
        "repair_h": repair_h,
        "mean_away_machines": known.per_h * repair_h,
        "num_spares_90_percent": counts[0],
        "num_spares_99_percent": counts[1],
        "num_spares_99_9_percent": counts[2],
        "num_spares_99_percent_low": low,
        "num_spares_99_percent_high": high,
    }
    headline = [
        (
            f"Hold {counts[1]} machines in reserve: they suffice 99 % of the time, where a "
            f"repair takes {span(repair_h)}."
        )
    ]
    rows = [
        (f"{100 * share:g} %", str(count), f"{100 * gap:.2g} %")
        for share, count, gap in zip(_SUFFICING, counts, short, strict=True)
    ]
    lines = [
        *headline,
        (
            f"The rate: {figure(known.per_h * 24)} per day; {known.source}; "
            f"{figure(known.per_h * repair_h)} machines are away on average."
        ),
        *table(("suffice", "spares", "too few"), rows, [False, True, False]),
        f"Range: {low} to {high} for 99 % {known.range_is}.",
        "Model: Poisson (Palm); valid while repairs do not wait for one another.",
    ]
    return Answer(
        question="how many spares?",
        data=data,
        headline=headline,
        lines=lines,
        next=f"outlast plan restarts --rate {known.per_h:.4g}/h --max-restarts 50",
    )


@click.command(name="spares")
@rate_flags
@click.option("--repair", "repair_h", type=SPAN, required=True, help="Until a machine is back.")
@shown
def command(
    *,
    rate: Rate | None,
    gpus: int | None,
    gpus_per_node: int,
    repair_h: float,
    as_json: bool,
    plot: Path | None,
) -> None:
    """How many machines to hold in reserve while others are repaired."""
    measured = own() if rate is None and gpus is None else None
    known = failures(rate, gpus, gpus_per_node, measured=measured)
    show(answer(known, repair_h), as_json=as_json, plot=plot)
