"""``outlast plan spot``: does spot pay, and where does the choice flip?"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import click
import msgspec

from outlast.cli.plan.answer import Answer, drawn, figure, number, percent, span, table
from outlast.cli.plan.facts import (
    Failures,
    cost_flags,
    costs_of,
    failures,
    needed,
    own,
    prices,
    rate_flags,
)
from outlast.cli.plan.interval import linear_words
from outlast.cli.quantities import DISCOUNT, DURATION, PRICE, SHARE, SPAN, Rate
from outlast.errors import ConfigError
from outlast.plan.comparison import linear_validity
from outlast.plan.interval import Costs
from outlast.plan.spot import Offer, offers, price_of

if TYPE_CHECKING:
    from outlast.report.chart import Picture

_NO_PRICE = "outlast.toml has none under [price]"


def answer(
    known: Failures,
    costs: Costs,
    *,
    spot_price: float,
    on_demand_price: float,
    useful_h: float | None = None,
) -> Answer:
    """Each model's price of a useful hour, and where it equals the one on demand."""
    prices = {"spot_price": spot_price, "on_demand_price": on_demand_price}
    found = offers(costs, known.per_h, **prices)
    best = next(offer for offer in found if offer.chosen)
    low, high = (
        next(offer for offer in offers(costs, per_h, **prices) if offer.chosen)
        for per_h in (known.low_per_h, known.high_per_h)
    )
    valid = linear_validity(costs, known.per_h, found[0].interval_h)
    data: dict[str, Any] = {
        **known.as_json(),
        "checkpoint_h": costs.checkpoint_h,
        "restore_h": costs.restore_h,
        "detect_h": costs.detect_h,
        "flush_probability": costs.flush_probability,
        "flush_h": costs.flush_h,
        "spot_price_per_h": spot_price,
        "on_demand_price_per_h": on_demand_price,
        **(_unflushed(known, costs, prices) if costs.flush_probability else {}),
        "models": [_as_json(offer) for offer in found],
        "spot_wins": best.wins,
        "price_per_useful_h": best.price_per_useful_h,
        "price_low_per_useful_h": low.price_per_useful_h,
        "price_high_per_useful_h": high.price_per_useful_h,
        "break_even_failures_per_h": best.break_even_failures_per_h,
        "break_even_spot_price_per_h": best.break_even_spot_price,
        "break_even_discount_fraction": 1 - best.break_even_spot_price / on_demand_price,
        "linear_failures_per_segment": valid.failures_per_segment,
        "linear_in_range": valid.in_range,
        "linear_error_fraction": valid.error,
    }
    headline = _headline(best, on_demand_price)
    cells = [_cells(offer) for offer in found]
    lines = [
        *headline,
        f"The rate: a failure every {span(1 / known.per_h)}; {known.source}.",
        *table(
            ("model", "save every", "per useful h", "wasted", "spot", "flips at"),
            cells,
            [offer.chosen for offer in found],
        ),
        (
            f"Range: {number(low.price_per_useful_h)} to {number(high.price_per_useful_h)} per "
            f"useful hour {known.range_is}; on demand {number(on_demand_price)}."
        ),
        linear_words(valid.failures_per_segment, valid.in_range, valid.error),
        *_flush_words(data, best),
        "On demand is taken as never interrupted; waiting for spot machines costs nothing here.",
    ]
    if useful_h is not None:
        lines.append(_in_all(data, best, useful_h))
    return Answer(
        question="what will it cost on spot and on demand?",
        data=data,
        headline=headline,
        lines=lines,
        charts=lambda: [_chart(costs, known.per_h, prices)],
        next="outlast plan flush --state 640GB --bandwidth 1.5GB/s --notice 120s",
    )


def _unflushed(known: Failures, costs: Costs, prices: dict[str, float]) -> dict[str, Any]:
    """What a useful hour costs if notices are not answered with a flush, and where that flips."""
    bare = msgspec.structs.replace(costs, flush_probability=0.0, flush_h=0.0)
    best = next(offer for offer in offers(bare, known.per_h, **prices) if offer.chosen)
    return {
        "price_without_flush_per_useful_h": best.price_per_useful_h,
        "break_even_without_flush_failures_per_h": best.break_even_failures_per_h,
    }


def _flush_words(data: dict[str, Any], best: Offer) -> list[str]:
    """What flushing at a notice gains or loses; nothing where no notice ends in one."""
    if not data["flush_probability"]:
        return []
    without = data["price_without_flush_per_useful_h"]
    now, then = best.break_even_failures_per_h, data["break_even_without_flush_failures_per_h"]
    words = []
    if math.isinf(best.interval_h):
        words.append(
            "Every failure comes with a notice that ends in a flush: saving besides is no use."
        )
    if best.price_per_useful_h > without:
        words.append(
            f"A flush of {span(data['flush_h'])} costs more than it saves here: without, a useful "
            f"hour costs {number(without)}. Let notices pass."
        )
    elif now < then:
        words.append(
            f"At this rate the flush saves ({number(without)} without), at higher ones it costs "
            f"more than it saves: without, the choice flips at {figure(then)} failures per hour."
        )
    else:
        words.append(f"Without the flush a useful hour costs {number(without)}.")
    return words


def _in_all(data: dict[str, Any], best: Offer, useful_h: float) -> str:
    """What so many useful hours cost, as data and in words."""
    cost_spot = price_of(useful_h, data["spot_price_per_h"], best.wall_per_useful)
    cost_on_demand = useful_h * data["on_demand_price_per_h"]
    data |= {"useful_h": useful_h, "cost_spot": cost_spot, "cost_on_demand": cost_on_demand}
    return (
        f"{figure(useful_h)} useful hours: {number(cost_spot, 2)} on spot, "
        f"{number(cost_on_demand, 2)} on demand."
    )


def _headline(best: Offer, on_demand_price: float) -> list[str]:
    if math.isinf(best.wall_per_useful):
        flip = best.break_even_failures_per_h
        return [
            f"On spot the job makes no progress; spot would pay below {figure(flip)} failures/h."
        ]
    choice = "Spot" if best.wins else "On demand"
    prices = (
        f"{number(best.price_per_useful_h)} per useful hour on spot, {number(on_demand_price)} on "
        "demand"
    )
    flip = best.break_even_failures_per_h
    discount = percent(1 - best.break_even_spot_price / on_demand_price)
    if math.isinf(flip):
        at = "Spot is cheaper at any rate of failures."
    elif flip == 0:
        at = f"Spot is cheaper at no rate; at this one it would be at a discount above {discount}."
    else:
        at = (
            f"The choice flips at {figure(flip)} failures per hour (one in {span(1 / flip)}), or, "
            f"at this rate, at a discount of {discount}."
        )
    return [f"{choice} is cheaper: {prices}.", at]


def _cells(offer: Offer) -> tuple[str, ...]:
    flip = offer.break_even_failures_per_h
    return (
        offer.model,
        span(offer.interval_h),
        number(offer.price_per_useful_h),
        percent(offer.wasted),
        "wins" if offer.wins else "loses",
        "never" if math.isinf(flip) else f"{flip:.4f}/h",
    )


def _as_json(offer: Offer) -> dict[str, Any]:
    return {
        "model": offer.model,
        "interval_h": offer.interval_h,
        "wall_h_per_useful_h": offer.wall_per_useful,
        "wasted_fraction": offer.wasted,
        "makes_progress": not math.isinf(offer.wall_per_useful),
        "price_per_useful_h": offer.price_per_useful_h,
        "spot_wins": offer.wins,
        "break_even_failures_per_h": offer.break_even_failures_per_h,
        "break_even_mtbf_h": 1 / offer.break_even_failures_per_h
        if offer.break_even_failures_per_h
        else None,
        "break_even_spot_price_per_h": offer.break_even_spot_price,
        "chosen": offer.chosen,
    }


def _chart(costs: Costs, per_h: float, prices: dict[str, float]) -> Picture:
    from outlast.cli.plan.charts import cost_against_rate

    return cost_against_rate(costs, per_h, **prices)


@click.command(name="spot")
@rate_flags
@cost_flags
@click.option("--spot", "spot_price", type=PRICE, help="Price per hour.")
@click.option("--discount", type=DISCOUNT, help="In place of --spot: 30% off on demand.")
@click.option("--on-demand", "on_demand_price", type=PRICE, help="Price per hour.")
@click.option("--flush-probability", type=SHARE, default=0.0, help="Notices that end in a save.")
@click.option("--flush-cost", "flush_h", type=DURATION, default=0.0, help="What such a save takes.")
@click.option("--useful", "useful_h", type=SPAN, help="Useful hours, for a total.")
@drawn
def command(
    *,
    rate: Rate | None,
    gpus: int | None,
    gpus_per_node: int,
    checkpoint_h: float | None,
    restore_h: float | None,
    detect_h: float | None,
    spot_price: float | None,
    discount: float | None,
    on_demand_price: float | None,
    flush_probability: float,
    flush_h: float,
    useful_h: float | None,
) -> Answer:
    """Whether spot pays, what a useful hour costs, and at which rate or discount that flips."""
    if spot_price is not None and discount is not None:
        raise ConfigError("--spot and --discount say the same thing twice: leave one out")
    measured = own() if checkpoint_h is None or rate is None else None
    if on_demand_price is None or (spot_price is None and discount is None):
        spot, on_demand = prices()
        spot_price = spot if spot_price is None else spot_price
        on_demand_price = on_demand if on_demand_price is None else on_demand_price
    known = failures(rate, gpus, gpus_per_node, measured=measured)
    on_demand_price = needed(on_demand_price, "--on-demand", "1.00", _NO_PRICE)
    if on_demand_price <= 0:
        raise ConfigError("--on-demand 0: machines on demand for nothing need no plan")
    if discount is not None:
        spot_price = on_demand_price * (1 - discount)
    costs = costs_of(
        measured,
        checkpoint_h=checkpoint_h,
        restore_h=restore_h,
        detect_h=detect_h,
        lag_h=None,  # as measured
        flush_probability=flush_probability,
        flush_h=flush_h,
    )
    return answer(
        known,
        costs,
        spot_price=needed(spot_price, "--spot", "0.70", _NO_PRICE),
        on_demand_price=on_demand_price,
        useful_h=useful_h,
    )
