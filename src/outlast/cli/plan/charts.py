"""The pictures: cost against interval, cost against rate, and the timeline of a flush."""

from __future__ import annotations

import math
from typing import Final

from outlast.cli.plan.answer import figure, span
from outlast.plan.comparison import MODELS, Row
from outlast.plan.flush import Flush
from outlast.plan.interval import Costs, best_h, exact_wall, linear_wall
from outlast.plan.spot import offers
from outlast.report.chart import Chart, Curve, Mark, Piece, Timeline, decades

_POINTS: Final = 160
_MIN: Final = 1 / 60
_SPANS_H: Final = (
    *(seconds / 3600 for seconds in (1, 2, 5, 10, 20)),
    *(minutes * _MIN for minutes in (0.5, 1, 2, 5, 10, 20, 30)),
    *(1.0, 2.0, 4.0, 8.0, 12.0),
    *(24.0 * days for days in (1, 2, 4, 7, 14, 30, 60, 120, 365)),
)


def _between(low: float, high: float) -> list[float]:
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


def cost_against_interval(costs: Costs, per_h: float, rows: list[Row]) -> Chart:
    """Wall hours per useful hour over the interval, with what each model proposes."""
    middle_h = best_h(costs, per_h)
    middle_h = middle_h if 0 < middle_h < math.inf else 1.0
    hours = _between(middle_h / 12, middle_h * 12)
    marks = [
        Mark(
            row.interval_h,
            row.exact_wall_per_useful,
            f"{row.model}: {span(row.interval_h)}",
            row.chosen,
        )
        for row in rows
        if row.model in ("linear at Young", "exact", "yours, exact")
    ]
    least = exact_wall(costs, per_h, middle_h)
    return Chart(
        title="Cost against interval",
        x_label="useful time between checkpoints",
        y_label="wall hours per useful hour",
        x_words=_short_span,
        x_rounds=_round_spans,
        curves=[
            Curve("exact", [(h, exact_wall(costs, per_h, h)) for h in hours], "solid"),
            Curve("linear", [(h, linear_wall(costs, per_h, h)) for h in hours], "dashed"),
        ],
        marks=marks,
        y_low=1.0,
        y_high=1 + 3 * (least - 1) if math.isfinite(least) else 4.0,
    )


def cost_against_rate(
    costs: Costs, per_h: float, *, spot_price: float, on_demand_price: float
) -> Chart:
    """The price of a useful hour over the rate, on-demand's beside it, break-even marked."""
    verdicts = offers(costs, per_h, spot_price=spot_price, on_demand_price=on_demand_price)
    best = next(offer for offer in verdicts if offer.chosen)
    flip = best.break_even_failures_per_h
    middle = flip if 0 < flip < math.inf else per_h
    low, high = min(per_h, middle) / 10, max(per_h, middle) * 5
    rates, rounds = _between(low, high), decades(low, high)
    curves = []
    for model in MODELS:
        if model.name in ("exact", "linear at Young"):
            points = [
                (rate, spot_price * model.wall(costs, rate, model.interval_h(costs, rate)))
                for rate in rates
            ]
            style = "solid" if model.name == "exact" else "dashed"
            curves.append(Curve(f"spot, {model.name}", points, style))
    curves.append(Curve("on demand", [(low, on_demand_price), (high, on_demand_price)], "other"))
    marks = [Mark(per_h, best.price_per_useful_h, f"yours: {figure(per_h)}/h", False)]
    if 0 < flip < math.inf:
        marks.append(Mark(flip, on_demand_price, f"break-even: {figure(flip)}/h", True))
    return Chart(
        title="Cost against rate",
        x_label="failures per hour of the whole job",
        y_label="price per useful hour",
        x_words=lambda value: f"{value:g}/h" if value in rounds else f"{figure(value)}/h",
        x_rounds=decades,
        curves=curves,
        marks=marks,
        y_low=0.0,
        y_high=2 * max(on_demand_price, spot_price),
    )


def flush_timeline(flush: Flush) -> Timeline:
    """What happens between the notice and the end."""
    pieces = [
        Piece("poll", flush.poll_s, "wait"),
        Piece("answer", flush.http_s, "wait"),
        Piece("agreement", flush.agreement_s, "wait"),
        Piece("step", flush.step_s, "work"),
        Piece("write", flush.write_s, "write"),
        Piece("fsync", flush.fsync_s, "write"),
        Piece("margin", flush.margin_s, "margin"),
    ]
    verdict = "fits" if flush.fits else "does not fit"
    return Timeline(
        title=f"Flush: {flush.total_s:,.0f} s within a notice of {flush.notice_s:,.0f} s {verdict}",
        pieces=[piece for piece in pieces if piece.seconds > 0],
        limit_s=flush.notice_s,
        limit_words=f"the machine goes: {flush.notice_s:,.0f} s",
        fits=flush.fits,
    )
