"""``outlast plan spares``: how many machines in reserve?"""

from __future__ import annotations

from typing import Any

import click

from outlast.cli.plan.answer import Answer, answered, figure, span, table
from outlast.cli.plan.facts import Failures, rated
from outlast.cli.quantities import SPAN
from outlast.plan.spares import num_spares, shortage
from outlast.report import humanise

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
            f"Hold {humanise.count(counts[1], 'machine')} in reserve: "
            f"{'they suffice' if counts[1] > 1 else 'that suffices'} 99 % of the time, where a "
            f"repair takes {span(repair_h)}."
        )
    ]
    rows = [
        (f"{100 * share:g} %", f"{count:,}", f"{100 * gap:.2g} %")
        for share, count, gap in zip(_SUFFICING, counts, short, strict=True)
    ]
    lines = [
        *headline,
        (
            f"The rate: {figure(known.per_h * 24)} per day; {known.source}; "
            f"{figure(known.per_h * repair_h)} machines are away on average."
        ),
        *table(("suffice", "spares", "too few"), rows, [False, True, False]),
        f"Range: {low:,} to {high:,} for 99 % {known.range_is}.",
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
@rated
@click.option("--repair", "repair_h", type=SPAN, required=True, help="Until a machine is back.")
@answered
def command(
    *,
    known: Failures,
    repair_h: float,
) -> Answer:
    """How many machines to hold in reserve while others are repaired."""
    return answer(known, repair_h)
