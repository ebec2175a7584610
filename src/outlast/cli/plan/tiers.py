"""``outlast plan interval --tier …``: how often should I save into each of several places?"""

from __future__ import annotations

import math
from typing import Any

import click

from outlast.cli.plan.answer import Answer, number, percent, span, table
from outlast.cli.quantities import RATE, SPAN, Rate
from outlast.errors import ConfigError
from outlast.plan.tiers import TierCosts, intervals_h, wall_per_useful, waste


class TierType(click.ParamType):  # type: ignore[type-arg]  # older ones are not generic
    """``9s,7.78e-6/s`` or ``9s,7.78e-6/s,30s``: what a save blocks, failures, restore."""

    name = "tier"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read one tier."""
        if not isinstance(value, str):
            return value
        parts = [part.strip() for part in value.split(",")]
        if len(parts) not in (2, 3):
            self.fail(
                f"{value!r} is not a tier; write what a save blocks, the rate of the failures that "
                "need it, and the restore: 50s,5.19e-7/s,120s",
                param,
                ctx,
            )
        rate: Rate = RATE.convert(parts[1], param, ctx)
        restore_h = SPAN.convert(parts[2], param, ctx) if len(parts) == 3 else 0.0
        if rate.of != "job":
            self.fail(f"{parts[1]!r}: a tier's rate is the whole job's, like 0.1/h", param, ctx)
        return TierCosts(
            checkpoint_h=SPAN.convert(parts[0], param, ctx),
            failures_per_h=rate.per_h,
            restore_h=restore_h,
        )


def answer(tiers: tuple[TierCosts, ...]) -> Answer:
    """Each tier's interval, and what all of them cost."""
    chosen = intervals_h(tiers)
    wall = wall_per_useful(tiers, chosen)
    rows = [
        {
            "checkpoint_h": tier.checkpoint_h,
            "failures_per_h": tier.failures_per_h,
            "restore_h": tier.restore_h,
            "interval_h": interval_h,
            "interval_low_h": interval_h / math.sqrt(2),
            "interval_high_h": interval_h * math.sqrt(2),
            "waste_fraction": waste([tier], [interval_h]),
        }
        for tier, interval_h in zip(tiers, chosen, strict=True)
    ]
    lost = waste(tiers, chosen)
    data: dict[str, Any] = {
        "model": "tiers, additive",
        "tiers": rows,
        "waste_fraction": lost,
        "wall_h_per_useful_h": wall,
        "makes_progress": not math.isinf(wall),
    }
    if math.isinf(wall):
        headline = ["The job makes no progress: failures come faster than it is restored."]
    else:
        headline = [f"{percent(1 - 1 / wall)} of the time goes to saving and failing."]
    cells = [
        (
            f"tier {i}",
            span(row["checkpoint_h"]),
            span(1 / row["failures_per_h"]),
            span(row["interval_h"]),
            f"{span(row['interval_low_h'])} – {span(row['interval_high_h'])}",
            percent(row["waste_fraction"]),
        )
        for i, row in enumerate(rows, 1)
    ]
    lines = [
        *headline,
        *table(("", "a save", "needed every", "save every", "rate off by 2", "waste"), cells),
        f"Waste in all {number(lost, 4)}, {number(wall, 4)} wall hours per useful hour.",
        "Model: additive, Σ C/T + Σ λ(T/2+R), each T = √(2C/λ); first order, good while the",
        "waste is below some 20 %. Rates as given, of failures that need this tier and no other.",
    ]
    return Answer(question="how often should I save?", data=data, headline=headline, lines=lines)


def only_tiers(**others: object) -> None:
    """Tiers bring their own rates and costs.

    Raises:
        ConfigError: something else was given besides.
    """
    given = [name for name, value in others.items() if value is not None]
    if given:
        raise ConfigError(
            f"--{given[0]} and --tier do not go together: each tier has its own rate and cost"
        )
