"""Answer how often to save, into one place or into several.

One place: every model stands beside the exact one, which decides. Several: the additive model
stands beside the Markov model, which decides. Each answer says how far the simpler model is off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from outlast.cli.plan.answer import (
    COST_FLAGS,
    RATE_FLAGS,
    FailureRate,
    PlanAnswer,
    PlanQuestion,
    chance,
    costs_of,
    failure_rate,
    figure,
    lines,
    number,
    own,
    span,
    table,
)
from outlast.cli.quantities import DURATION, GPUS_PER_NODE, SPAN, TIER, Rate, flag
from outlast.errors import ConfigError
from outlast.planner import intervals
from outlast.policy import interval as formulas
from outlast.policy.interval import Costs, TierCosts
from outlast.report.chart import Chart, Curve, Mark, decades

_PARTS: Final = ("useful_h", "saving_h", "lost_h", "flushing_h", "detecting_h", "restoring_h")
_NOWHERE: Final = "The job makes no progress: failures come faster than it is restored and saved."


# --- one place ----------------------------------------------------------------------------------


def interval(
    known: FailureRate, costs: Costs, *, every_h: float | None = None, step_h: float | None = None
) -> PlanAnswer:
    """All models beside one another."""
    rows = intervals.compare(costs, known.per_h, every_h)
    chosen = next(row for row in rows if row.chosen)
    range_h = [formulas.best_h(costs, per_h) for per_h in (known.high_per_h, known.low_per_h)]
    good_h = intervals.nearly_best_h(costs, known.per_h)
    valid = intervals.linear_validity(costs, known.per_h, rows[0].interval_h)
    parts = formulas.exact_parts(costs, known.per_h, chosen.interval_h)
    off = [formulas.wrong_rate_ratio(times) for times in (2, 10)]
    data: dict[str, Any] = {
        **known.as_json(),
        "checkpoint_h": costs.checkpoint_h,
        "restore_h": costs.restore_h,
        "detect_h": costs.detect_h,
        "lag_h": costs.lag_h,
        "models": [
            {
                "model": row.model,
                "interval_h": row.interval_h,
                "wall_h_per_useful_h": row.wall_per_useful,
                "wasted_fraction": row.wasted,
                "exact_wall_h_per_useful_h": row.exact_wall_per_useful,
                "makes_progress": not math.isinf(row.wall_per_useful),
                "chosen": row.chosen,
                **({} if step_h is None else {"interval_steps": row.interval_h / step_h}),
            }
            for row in rows
        ],
        "interval_h": chosen.interval_h,
        "interval_low_h": range_h[0],
        "interval_high_h": range_h[1],
        "within_1_percent_low_h": good_h[0],
        "within_1_percent_high_h": good_h[1],
        "parts_per_useful_h": {name: getattr(parts, name) for name in _PARTS},
        **linear_json(valid),
        "waste_ratio_rate_off_2x": off[0],
        "waste_ratio_rate_off_10x": off[1],
    }
    steps = ""
    if step_h is not None:
        data |= {"step_h": step_h, "interval_steps": chosen.interval_h / step_h}
        steps = f" ({chosen.interval_h / step_h:,.0f} steps)"
    headline, sure = _NOWHERE, ""
    if not math.isinf(chosen.wall_per_useful):
        headline = (
            f"Save every {span(chosen.interval_h)}{steps}; {chance(chosen.wasted)} of the time "
            "goes to saving and failing."
        )
        ends = [span(hours) for hours in range_h]
        ends_words = f"{ends[0]} to {ends[1]}" if ends[0] != ends[1] else f"{ends[0]}, also"
        sure = (
            f"Range: {ends_words} {known.range_is}; anything from {span(good_h[0])} to "
            f"{span(good_h[1])} takes at most 1 % more hours."
        )
    cells = [
        (row.model, span(row.interval_h), *(number(wall, 4) for wall in row.walls)) for row in rows
    ]
    return PlanAnswer(
        data=data,
        headline=headline,
        details=lines(
            known.words,
            table(
                ("model", "save every", "wall h per useful h", "by the exact model"),
                cells,
                [row.chosen for row in rows],
            ),
            sure,
            linear_words(valid),
            f"A rate that is off by 2 wastes {off[0]:.3f} times as much as need be, "
            f"by 10 {off[1]:.2f} times.",
            "exact: exponential failures, which strike while saving and restoring too.",
            ""
            if not chosen.interval_h == costs.lag_h > 0
            else "One save is in flight at a time, so the interval is no shorter than the lag; "
            f"without that it would be {span(formulas.exact_best_h(costs, known.per_h))}.",
        ),
        charts=lambda: [_cost_against_interval(costs, known.per_h, rows)],
        next=f"outlast plan spot --rate {known.per_h:.4g}/h --checkpoint "
        f"{costs.checkpoint_h * 3600:.4g}s --spot 0.7 --on-demand 1",
    )


def linear_json(valid: intervals.Validity) -> dict[str, Any]:
    """Give the same as data."""
    return {
        "linear_failures_per_segment": valid.failures_per_segment,
        "linear_in_range": valid.in_range,
        "linear_error_fraction": valid.error,
    }


def linear_words(valid: intervals.Validity) -> str:
    """Say how far the linear model may be trusted; a segment is endless if nothing is saved."""
    per_segment, error = valid.failures_per_segment, valid.error
    off = f"off by {round(100 * error, 1) + 0.0:+.1f} %"  # what is nothing has no minus
    if math.isinf(per_segment) and math.isfinite(error):
        return f"The linear model is {off}; go by the exact one."
    bound = f"{'at most' if valid.in_range else 'above'} {formulas.LINEAR_RANGE}"
    what = f"(λ(T+C) = {figure(per_segment)}, {bound})"
    if valid.in_range:
        return f"The linear model is in its range {what} and {off}."
    if math.isinf(error):
        return (
            "The linear model sees no progress (λ(T/2+R) ≥ 1): it is far out of its range; go by "
            "the exact one."
        )
    return f"The linear model is out of its range {what} and {off}; go by the exact one."


_POINTS: Final = 160
_MIN: Final = 1 / 60
_SPANS_H: Final = (
    *(seconds / 3600 for seconds in (1, 2, 5, 10, 20)),
    *(minutes * _MIN for minutes in (0.5, 1, 2, 5, 10, 20, 30)),
    *(1.0, 2.0, 4.0, 8.0, 12.0),
    *(24.0 * days for days in (1, 2, 4, 7, 14, 30, 60, 120, 365)),
)


def spread_between(low: float, high: float) -> list[float]:
    """Choose the points of a curve, equally far apart on a logarithmic axis."""
    step = math.log(high / low) / (_POINTS - 1)
    return [low * math.exp(step * i) for i in range(_POINTS)]


def _round_spans(low_h: float, high_h: float) -> list[float]:
    found = [hours for hours in _SPANS_H if low_h <= hours <= high_h]
    return found or decades(low_h, high_h)


def _short_span(hours: float) -> str:
    words = span(hours)
    for nothing in (" 00 s", " 00 min", " 00 h"):
        words = words.removesuffix(nothing)
    return words


def _cost_against_interval(costs: Costs, per_h: float, rows: list[intervals.ModelRow]) -> Chart:
    """Draw wall hours per useful hour over the interval, with what each model proposes."""
    middle_h = formulas.best_h(costs, per_h)
    middle_h = middle_h if 0 < middle_h < math.inf else 1.0
    hours = spread_between(middle_h / 12, middle_h * 12)
    least = formulas.exact_wall(costs, per_h, middle_h)
    return Chart(
        title="Cost against interval",
        x_label="useful time between checkpoints",
        y_label="wall hours per useful hour",
        x_words=_short_span,
        x_rounds=_round_spans,
        curves=[
            Curve("exact", [(h, formulas.exact_wall(costs, per_h, h)) for h in hours], "solid"),
            Curve("linear", [(h, formulas.linear_wall(costs, per_h, h)) for h in hours], "dashed"),
        ],
        marks=[
            Mark(
                row.interval_h,
                row.exact_wall_per_useful,
                f"{row.model}: {span(row.interval_h)}",
                row.chosen,
            )
            for row in rows
            if row.model in ("linear at Young", "exact", "yours, exact")
        ],
        y_low=1.0,
        y_high=1 + 3 * (least - 1) if math.isfinite(least) else 4.0,
    )


# --- several places -----------------------------------------------------------------------------

_RANGE_IS: Final = "if all rates are twice or half that"


def _several(given: Sequence[TierCosts]) -> PlanAnswer:
    """The schedule that the Markov model finds, and the additive one beside it."""
    chosen, alone = intervals.best_schedule(given), intervals.nearest_schedule(given)
    range_h = []
    for times in (2.0, 0.5):  # the best interval if all rates were so; the counts hardly change
        rated = [
            msgspec.structs.replace(tier, failures_per_h=tier.failures_per_h * times)
            for tier in given
        ]
        range_h.append(intervals.schedule_of(rated, chosen.counts, chosen.interval_h).interval_h)
    additive_h = formulas.intervals_h(given)
    wasted = intervals.waste(given, additive_h)
    wall = intervals.or_none(chosen.wall_per_useful)
    additive = intervals.or_none(intervals.wall_per_useful(given, additive_h))
    markov = intervals.or_none(alone.wall_per_useful)
    error = math.inf if math.isinf(additive) or math.isinf(markov) else additive / markov - 1
    headline, sure = _NOWHERE, ""
    if not math.isinf(wall):
        parts = [
            f", every {_nth(every)} into tier {i}"
            for i, every in enumerate(chosen.every, 1)
            if every and every > 1
        ]
        left = [str(i) for i, every in enumerate(chosen.every, 1) if every is None]
        parts += [f", nothing into tier {' and '.join(left)}"] if left else []
        headline = (
            f"Save every {span(chosen.interval_h)}{''.join(parts)}; {chance(1 - 1 / wall)} of the "
            "time goes to saving and failing."
        )
    if not math.isinf(chosen.wall_per_useful):
        sure = f"Range: every {span(range_h[0])} to {span(range_h[1])} {_RANGE_IS}."
    if math.isinf(error):
        error_words = "The additive model is far out of its range here; go by the Markov one."
    else:
        error_words = (
            f"The additive model's own figure is off by {100 * error:+.2f} % here; go by the "
            "Markov one."
        )
    cells = [
        (
            f"tier {i}",
            *(
                span(hours)
                for hours in (tier.checkpoint_h, tier.restore_h, 1 / tier.failures_per_h)
            ),
            span(_every_h(chosen, every)),
            _nth(every),
            span(alone_h),
        )
        for i, (tier, every, alone_h) in enumerate(
            zip(given, chosen.every, additive_h, strict=True), 1
        )
    ]
    return PlanAnswer(
        data={
            "model": "Markov",
            "interval_h": chosen.interval_h,
            "interval_low_h": range_h[0],
            "interval_high_h": range_h[1],
            "range_is": _RANGE_IS,
            "tiers": [
                msgspec.to_builtins(tier)
                | {"every_saves": every, "interval_h": _every_h(chosen, every)}
                for tier, every in zip(given, chosen.every, strict=True)
            ],
            "wall_h_per_useful_h": wall,
            "wasted_fraction": 1 - 1 / wall,
            "makes_progress": not math.isinf(wall),
            "models": [
                _model_json("Markov", chosen, wall, wall, is_chosen=True),
                _model_json("additive", alone, additive, markov, is_chosen=False)
                | {"tier_intervals_h": additive_h, "waste_fraction": wasted},
            ],
            "additive_error_fraction": error,
        },
        headline=headline,
        details=lines(
            table(
                ("", "a save", "restore", "needed every", "save every", "of all", "additive"), cells
            ),
            table(
                ("model", "wall h per useful h", "by the Markov model"),
                [
                    ("Markov", number(wall, 4), number(wall, 4)),
                    ("additive", number(additive, 4), number(markov, 4)),
                ],
                [True, False],
            ),
            sure,
            error_words,
            "Markov: exponential failures, which strike while saving and restoring too (Moody et "
            "al., SC'10). A save into a slower tier takes the place of one into the faster ones, "
            "and is read after any failure that comes before the next save.",
            "additive: Σ C/T + Σ λ(T/2+R), each T = √(2C/λ); first order, each tier as if alone.",
            "Rates as given, of failures that need this tier and no slower one. Set it with every "
            "= in each [[tier]] of outlast.toml; without, the running job finds its own.",
        ),
    )


def _every_h(schedule: intervals.Schedule, every: int | None) -> float:
    return every * schedule.interval_h if every else math.inf


def _nth(every: int | None) -> str:
    if every is None:
        return "none"
    if every == 1:
        return "each"
    ending = {1: "st", 2: "nd", 3: "rd"}.get(every % 10 if every % 100 not in (11, 12, 13) else 0)
    return f"{every:,}{ending or 'th'}"


def _model_json(
    name: str, schedule: intervals.Schedule, wall: float, markov: float, *, is_chosen: bool
) -> dict[str, Any]:
    return {
        "model": name,
        "interval_h": schedule.interval_h,
        "every_saves": list(schedule.every),
        "wall_h_per_useful_h": wall,
        "wasted_fraction": 1 - 1 / wall,
        "markov_wall_h_per_useful_h": markov,
        "makes_progress": not math.isinf(wall),
        "chosen": is_chosen,
    }


# --- the question -------------------------------------------------------------------------------


def _asked(
    *,
    rate: Rate | None,
    gpus: int | None,
    gpus_per_node: int,
    every_h: float | None,
    step_h: float | None,
    places: tuple[TierCosts, ...],
    **costs_h: float | None,
) -> PlanAnswer:
    """How often to save: linear at Young and at its optimum, Daly, and the exact model, marked.

    With --tier, how often into each of several places: the Markov model, marked, and the additive.
    """
    if places:
        if len(places) > intervals.PLACES_MOST:
            raise ConfigError(
                f"{len(places)} times --tier: more than {intervals.PLACES_MOST} are not planned for"
            )
        others = {
            "rate": rate,
            "gpus": gpus,
            "gpus-per-node": None if gpus_per_node == GPUS_PER_NODE else gpus_per_node,
            **{name.removesuffix("_h"): value for name, value in costs_h.items()},
            "every": every_h,
            "step": step_h,
        }
        for name, value in others.items():
            if value is not None:
                raise ConfigError(
                    f"--{name} and --tier do not go together: each tier has its own rate and cost"
                )
        return _several(places)
    measured = own() if costs_h["checkpoint_h"] is None or rate is None else None
    known = failure_rate(rate, gpus, gpus_per_node, measured=measured, step_h=step_h)
    return interval(known, costs_of(measured, **costs_h), every_h=every_h, step_h=step_h)


INTERVAL: Final = PlanQuestion(
    "how often should I save?",
    _asked,
    [
        *RATE_FLAGS,
        *COST_FLAGS,
        flag("--lag", DURATION, "From a snapshot until it is durable."),
        flag("--every", SPAN, "Another interval to look at."),
        flag("--step", SPAN, "Of a step: the interval in steps, too."),
        flag(
            "--tier",
            TIER,
            "Several places to save, the fastest first: 50s,5.19e-7/s[,RESTORE] for each.",
            to="places",
            multiple=True,
        ),
    ],
    draws=True,
)
