"""``outlast plan restarts``: how long does a number of restarts last?"""

from __future__ import annotations

from typing import Any

import click

from outlast.cli.plan.answer import Answer, answered, chance, figure, span
from outlast.cli.plan.facts import Failures, rated
from outlast.cli.quantities import COUNT0, DAYS
from outlast.plan.restarts import gives_up, mean_end_h, needed

_SURE = 1 - 1e-9  # that a run of failures is over by then: nothing is said to be more certain


def answer(known: Failures, *, max_restarts: int, days: float) -> Answer:
    """When the budget is spent, and which one would do."""
    end_h = mean_end_h(known.per_h, max_restarts)
    probability = gives_up(known.per_h, days * 24, max_restarts)
    enough = needed(known.per_h, days * 24, sufficing=0.99)
    low, high = (mean_end_h(per_h, max_restarts) for per_h in (known.high_per_h, known.low_per_h))
    data: dict[str, Any] = {
        **known.as_json(),
        "max_restarts": max_restarts,
        "days": days,
        "spent_after_h": end_h,
        "spent_after_low_h": low,
        "spent_after_high_h": high,
        "spent_after_days": end_h / 24,
        "gives_up_probability": probability,
        "needed_restarts_99_percent": enough,
    }
    headline = [
        (
            f"{max_restarts:,} restarts are spent after {span(end_h)} on average; "
            f"within {days:,g} days with probability {chance(min(probability, _SURE))}."
        )
    ]
    lines = [
        *headline,
        f"The rate: {figure(known.per_h * 24)} per day; {known.source}.",
        (
            f"{enough:,} restarts last {days:,g} days with probability 99 %. Every failed "
            "round spends one, whoever's fault it was (--max-restarts)."
        ),
        f"Range: spent after {span(low)} to {span(high)} {known.range_is}.",
        "Model: P(Poisson(λ·wall) > max restarts).",
    ]
    return Answer(
        question="how many restarts?",
        data=data,
        headline=headline,
        lines=lines,
        next=f"outlast plan spares --rate {known.per_h:.4g}/h --repair 24h",
    )


@click.command(name="restarts")
@rated
@click.option("--max-restarts", type=COUNT0, default=3, show_default=True, help="Of the launcher.")
@click.option("--days", type=DAYS, default="30", show_default=True, help="How long it runs.")
@answered
def command(
    *,
    known: Failures,
    max_restarts: int,
    days: float,
) -> Answer:
    """When a launcher with a fixed number of restarts gives up."""
    return answer(known, max_restarts=max_restarts, days=days)
