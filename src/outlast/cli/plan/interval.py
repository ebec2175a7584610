"""``outlast plan interval``: how often should I save?"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import click

from outlast.cli.plan import tiers as several
from outlast.cli.plan.answer import Answer, chance, drawn, figure, number, span, table
from outlast.cli.plan.facts import Failures, cost_flags, costs_of, failures, own, rate_flags
from outlast.cli.quantities import DURATION, GPUS_PER_NODE, SPAN, Rate
from outlast.plan.comparison import Row, compare, linear_validity, nearly_best_h
from outlast.plan.interval import (
    LINEAR_RANGE,
    Costs,
    best_h,
    exact_best_h,
    exact_parts,
    wrong_rate_ratio,
)
from outlast.plan.tiers import TierCosts

if TYPE_CHECKING:
    from outlast.report.chart import Picture

_PARTS = ("useful_h", "saving_h", "lost_h", "flushing_h", "detecting_h", "restoring_h")


def answer(
    known: Failures, costs: Costs, *, every_h: float | None = None, step_h: float | None = None
) -> Answer:
    """All models beside one another."""
    rows = compare(costs, known.per_h, every_h)
    best = next(row for row in rows if row.chosen)
    young = rows[0]
    range_h = [best_h(costs, per_h) for per_h in (known.high_per_h, known.low_per_h)]
    good_h = nearly_best_h(costs, known.per_h)
    valid = linear_validity(costs, known.per_h, young.interval_h)
    parts = exact_parts(costs, known.per_h, best.interval_h)
    data: dict[str, Any] = {
        **known.as_json(),
        "checkpoint_h": costs.checkpoint_h,
        "restore_h": costs.restore_h,
        "detect_h": costs.detect_h,
        "lag_h": costs.lag_h,
        "models": [_as_json(row, step_h) for row in rows],
        "interval_h": best.interval_h,
        "interval_low_h": range_h[0],
        "interval_high_h": range_h[1],
        "within_1_percent_low_h": good_h[0],
        "within_1_percent_high_h": good_h[1],
        "parts_per_useful_h": {name: getattr(parts, name) for name in _PARTS},
        "linear_failures_per_segment": valid.failures_per_segment,
        "linear_in_range": valid.in_range,
        "linear_error_fraction": valid.error,
        "waste_ratio_rate_off_2x": wrong_rate_ratio(2),
        "waste_ratio_rate_off_10x": wrong_rate_ratio(10),
    }
    if step_h is not None:
        data["step_h"] = step_h
        data["interval_steps"] = best.interval_h / step_h
    headline = [_headline(best, step_h)]
    lines = [
        *headline,
        f"The rate: a failure every {span(1 / known.per_h)}; {known.source}.",
        *table(
            ("model", "save every", "wall h per useful h", "by the exact model"),
            [_cells(row) for row in rows],
            [row.chosen for row in rows],
        ),
        *_range_words(best, range_h, good_h, known),
        linear_words(valid.failures_per_segment, valid.in_range, valid.error),
        (
            f"A rate that is off by 2 wastes {wrong_rate_ratio(2):.3f} times as much as need be, "
            f"by 10 {wrong_rate_ratio(10):.2f} times."
        ),
        "exact: exponential failures, which strike while saving and restoring too.",
    ]
    if best.interval_h == costs.lag_h > 0:
        lines.append(
            f"One save is in flight at a time, so the interval is no shorter than the lag; without "
            f"that it would be {span(exact_best_h(costs, known.per_h))}."
        )
    return Answer(
        question="how often should I save?",
        data=data,
        headline=headline,
        lines=lines,
        charts=lambda: [_chart(costs, known.per_h, rows)],
        next=f"outlast plan spot --rate {known.per_h:.4g}/h --checkpoint "
        f"{costs.checkpoint_h * 3600:.4g}s --spot 0.7 --on-demand 1",
    )


def _range_words(
    best: Row, range_h: list[float], good_h: tuple[float, float], known: Failures
) -> list[str]:
    """How sure the interval is; nothing where no interval helps."""
    if math.isinf(best.wall_per_useful):
        return []
    ends = [span(hours) for hours in range_h]
    words = f"{ends[0]} to {ends[1]}" if ends[0] != ends[1] else f"{ends[0]}, also"
    good = f"{span(good_h[0])} to {span(good_h[1])}"
    return [f"Range: {words} {known.range_is}; anything from {good} takes at most 1 % more hours."]


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.model,
        span(row.interval_h),
        number(row.wall_per_useful, 4),
        number(row.exact_wall_per_useful, 4),
    )


def _headline(best: Row, step_h: float | None) -> str:
    if math.isinf(best.wall_per_useful):
        return "The job makes no progress: failures come faster than it is restored and saved."
    steps = "" if step_h is None else f" ({best.interval_h / step_h:,.0f} steps)"
    wasted = f"{chance(best.wasted)} of the time goes to saving and failing"
    return f"Save every {span(best.interval_h)}{steps}; {wasted}."


def linear_words(per_segment: float, in_range: bool, error: float) -> str:
    """How far the linear model may be trusted here; a segment is endless if nothing is saved."""
    if math.isinf(per_segment) and math.isfinite(error):
        return f"The linear model is off by {_off(error)}; go by the exact one."
    if in_range:
        return (
            f"The linear model is in its range (λ(T+C) = {figure(per_segment)}, at most "
            f"{LINEAR_RANGE}) and off by {_off(error)}."
        )
    if math.isinf(error):
        return (
            "The linear model sees no progress (λ(T/2+R) ≥ 1): it is far out of its range; go by "
            "the exact one."
        )
    return (
        f"The linear model is out of its range (λ(T+C) = {figure(per_segment)}, above "
        f"{LINEAR_RANGE}) and off by {_off(error)}; go by the exact one."
    )


def _off(error: float) -> str:
    """An error in percent; what is nothing has no minus."""
    return f"{round(100 * error, 1) + 0.0:+.1f} %"


def _as_json(row: Row, step_h: float | None) -> dict[str, Any]:
    found = {
        "model": row.model,
        "interval_h": row.interval_h,
        "wall_h_per_useful_h": row.wall_per_useful,
        "wasted_fraction": row.wasted,
        "exact_wall_h_per_useful_h": row.exact_wall_per_useful,
        "makes_progress": not math.isinf(row.wall_per_useful),
        "chosen": row.chosen,
    }
    return found if step_h is None else found | {"interval_steps": row.interval_h / step_h}


def _chart(costs: Costs, per_h: float, rows: list[Row]) -> Picture:
    from outlast.cli.plan.charts import cost_against_interval

    return cost_against_interval(costs, per_h, rows)


@click.command(name="interval")
@rate_flags
@cost_flags
@click.option("--lag", "lag_h", type=DURATION, help="From a snapshot until it is durable.")
@click.option("--every", "every_h", type=SPAN, help="Another interval to look at.")
@click.option("--step", "step_h", type=SPAN, help="Of a step: the interval in steps, too.")
@click.option(
    "--tier",
    "tiers",
    type=several.TierType(),
    multiple=True,
    help="Several places to save, the fastest first: 50s,5.19e-7/s[,RESTORE] for each.",
)
@drawn
def command(
    *,
    rate: Rate | None,
    gpus: int | None,
    gpus_per_node: int,
    checkpoint_h: float | None,
    restore_h: float | None,
    detect_h: float | None,
    lag_h: float | None,
    every_h: float | None,
    step_h: float | None,
    tiers: tuple[TierCosts, ...],
) -> Answer:
    """How often to save: linear at Young and at its optimum, Daly, and the exact model, marked.

    With --tier, how often into each of several places: the Markov model, marked, and the additive.
    """
    if tiers:
        several.only_tiers(
            tiers,
            rate=rate,
            gpus=gpus,
            gpus_per_node=None if gpus_per_node == GPUS_PER_NODE else gpus_per_node,
            checkpoint=checkpoint_h,
            restore=restore_h,
            detect=detect_h,
            lag=lag_h,
            every=every_h,
            step=step_h,
        )
        return several.answer(tiers)
    ask = checkpoint_h is None or rate is None
    measured = own() if ask else None
    known = failures(rate, gpus, gpus_per_node, measured=measured, step_h=step_h)
    costs = costs_of(
        measured,
        checkpoint_h=checkpoint_h,
        restore_h=restore_h,
        detect_h=detect_h,
        lag_h=lag_h,
    )
    return answer(known, costs, every_h=every_h, step_h=step_h)
