"""Answer what spot machines cost: the price of a useful hour, and whether a deadline is met."""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec

from outlast.cli.plan.answer import (
    COST_FLAGS,
    RATE_FLAGS,
    FailureRate,
    PlanAnswer,
    PlanQuestion,
    costs_of,
    failure_rate,
    figure,
    lines,
    needed,
    number,
    own,
    percent,
    prices,
    span,
    table,
)
from outlast.cli.plan.interval import linear_json, linear_words, spread_between
from outlast.cli.quantities import COUNT0, DISCOUNT, DURATION, PRICE, RATE, SHARE, SPAN, Rate, flag
from outlast.errors import ConfigError
from outlast.planner import deadline as market
from outlast.planner.intervals import MODELS, SpotOffer, linear_validity, offers, price_of
from outlast.policy.interval import Costs
from outlast.report.chart import Chart, Curve, Mark, decades

_NO_PRICE: Final = "outlast.toml has none under [price] for this kind of machine"
_FREE: Final = "--on-demand 0: machines on demand for nothing need no plan"


# --- the price of a useful hour -----------------------------------------------------------------


def spot(
    known: FailureRate,
    costs: Costs,
    *,
    spot_price: float,
    on_demand_price: float,
    useful_h: float | None = None,
) -> PlanAnswer:
    """Each model's price of a useful hour, and where it equals the one on demand."""

    def found(per_h: float, of: Costs = costs) -> list[SpotOffer]:
        return offers(of, per_h, spot_price=spot_price, on_demand_price=on_demand_price)

    def chosen(per_h: float, of: Costs = costs) -> SpotOffer:
        return next(offer for offer in found(per_h, of) if offer.chosen)

    rows, best = found(known.per_h), chosen(known.per_h)
    low, high = chosen(known.low_per_h), chosen(known.high_per_h)
    valid = linear_validity(costs, known.per_h, rows[0].interval_h)
    data: dict[str, Any] = {
        **known.as_json(),
        "checkpoint_h": costs.checkpoint_h,
        "restore_h": costs.restore_h,
        "detect_h": costs.detect_h,
        "flush_probability": costs.flush_probability,
        "flush_h": costs.flush_h,
        "spot_price_per_h": spot_price,
        "on_demand_price_per_h": on_demand_price,
    }
    flush_words: list[str] = []
    if costs.flush_probability:
        bare = chosen(
            known.per_h, msgspec.structs.replace(costs, flush_probability=0.0, flush_h=0.0)
        )
        data["price_without_flush_per_useful_h"] = bare.price_per_useful_h
        data["break_even_without_flush_failures_per_h"] = bare.break_even_failures_per_h
        flush_words = _flush_words(costs.flush_h, best, bare)
    data |= {
        "models": [_as_json(offer) for offer in rows],
        "spot_wins": best.wins,
        "price_per_useful_h": best.price_per_useful_h,
        "price_low_per_useful_h": low.price_per_useful_h,
        "price_high_per_useful_h": high.price_per_useful_h,
        "break_even_failures_per_h": best.break_even_failures_per_h,
        "break_even_spot_price_per_h": best.break_even_spot_price,
        "break_even_discount_fraction": 1 - best.break_even_spot_price / on_demand_price,
        **linear_json(valid),
    }
    total = ""
    if useful_h is not None:
        cost_spot = price_of(useful_h, spot_price, best.wall_per_useful)
        cost_on_demand = useful_h * on_demand_price
        data |= {"useful_h": useful_h, "cost_spot": cost_spot, "cost_on_demand": cost_on_demand}
        total = (
            f"{figure(useful_h)} useful hours: {number(cost_spot, 2)} on spot, "
            f"{number(cost_on_demand, 2)} on demand."
        )
    return PlanAnswer(
        data=data,
        headline=_headline(best, on_demand_price),
        details=lines(
            known.words,
            table(
                ("model", "save every", "per useful h", "wasted", "spot", "flips at"),
                [_cells(offer) for offer in rows],
                [offer.chosen for offer in rows],
            ),
            f"Range: {number(low.price_per_useful_h)} to {number(high.price_per_useful_h)} per "
            f"useful hour {known.range_is}; on demand {number(on_demand_price)}.",
            linear_words(valid),
            flush_words,
            "On demand is taken as never interrupted; waiting for spot machines costs nothing "
            "here.",
            total,
        ),
        charts=lambda: [_cost_against_rate(costs, known.per_h, best, spot_price, on_demand_price)],
        next="outlast plan flush --state 640GB --bandwidth 1.5GB/s --notice 120s",
    )


def _flush_words(flush_h: float, best: SpotOffer, bare: SpotOffer) -> list[str]:
    """What flushing at a notice gains or loses against a job that lets notices pass."""
    without = bare.price_per_useful_h
    if best.price_per_useful_h > without:
        verdict = (
            f"A flush of {span(flush_h)} costs more than it saves here: without, a useful "
            f"hour costs {number(without)}. Let notices pass."
        )
    elif best.break_even_failures_per_h < bare.break_even_failures_per_h:
        verdict = (
            f"At this rate the flush saves ({number(without)} without), at higher ones it costs "
            "more than it saves: without, the choice flips at "
            f"{figure(bare.break_even_failures_per_h)} failures per hour."
        )
    else:
        verdict = f"Without the flush a useful hour costs {number(without)}."
    no_use = "Every failure comes with a notice that ends in a flush: saving besides is no use."
    return lines(no_use if math.isinf(best.interval_h) else "", verdict)


def _headline(best: SpotOffer, on_demand_price: float) -> str:
    flip = best.break_even_failures_per_h
    if math.isinf(best.wall_per_useful):
        return f"On spot the job makes no progress; spot would pay below {figure(flip)} failures/h."
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
    return (
        f"{'Spot' if best.wins else 'On demand'} is cheaper: {number(best.price_per_useful_h)} per "
        f"useful hour on spot, {number(on_demand_price)} on demand.\n{at}"
    )


def _cells(offer: SpotOffer) -> tuple[str, ...]:
    flip = offer.break_even_failures_per_h
    return (
        offer.model,
        span(offer.interval_h),
        number(offer.price_per_useful_h),
        percent(offer.wasted),
        "wins" if offer.wins else "loses",
        "never" if math.isinf(flip) else f"{flip:.4f}/h",
    )


def _as_json(offer: SpotOffer) -> dict[str, Any]:
    flip = offer.break_even_failures_per_h
    return {
        "model": offer.model,
        "interval_h": offer.interval_h,
        "wall_h_per_useful_h": offer.wall_per_useful,
        "wasted_fraction": offer.wasted,
        "makes_progress": not math.isinf(offer.wall_per_useful),
        "price_per_useful_h": offer.price_per_useful_h,
        "spot_wins": offer.wins,
        "break_even_failures_per_h": flip,
        "break_even_mtbf_h": 1 / flip if flip else None,
        "break_even_spot_price_per_h": offer.break_even_spot_price,
        "chosen": offer.chosen,
    }


def _cost_against_rate(
    costs: Costs, per_h: float, best: SpotOffer, spot_price: float, on_demand_price: float
) -> Chart:
    """Draw the price of a useful hour over the rate, on-demand's beside it, break-even marked."""
    flip = best.break_even_failures_per_h
    middle = flip if 0 < flip < math.inf else per_h
    low, high = min(per_h, middle) / 10, max(per_h, middle) * 5
    rates, rounds = spread_between(low, high), decades(low, high)
    curves = [
        Curve(
            f"spot, {model.name}",
            [
                (rate, spot_price * model.wall(costs, rate, model.interval_h(costs, rate)))
                for rate in rates
            ],
            "solid" if model.name == "exact" else "dashed",
        )
        for model in MODELS
        if model.name in ("exact", "linear at Young")
    ]
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


def _asked_spot(
    *,
    rate: Rate | None,
    gpus: int | None,
    gpus_per_node: int,
    spot_price: float | None,
    discount: float | None,
    on_demand_price: float | None,
    useful_h: float | None,
    **costs: float | None,
) -> PlanAnswer:
    """Whether spot pays, what a useful hour costs, and at which rate or discount that flips."""
    if spot_price is not None and discount is not None:
        raise ConfigError("--spot and --discount say the same thing twice: leave one out")
    measured = own() if costs["checkpoint_h"] is None or rate is None else None
    if on_demand_price is None or (spot_price is None and discount is None):
        set_spot, set_on_demand = prices()
        spot_price = set_spot if spot_price is None else spot_price
        on_demand_price = set_on_demand if on_demand_price is None else on_demand_price
    known = failure_rate(rate, gpus, gpus_per_node, measured=measured)
    on_demand_price = needed(on_demand_price, "--on-demand", "1.00", _NO_PRICE)
    if on_demand_price <= 0:
        raise ConfigError(_FREE)
    if discount is not None:
        spot_price = on_demand_price * (1 - discount)
    return spot(
        known,
        costs_of(measured, lag_h=None, **costs),  # the lag as measured
        spot_price=needed(spot_price, "--spot", "0.70", _NO_PRICE),
        on_demand_price=on_demand_price,
        useful_h=useful_h,
    )


SPOT: Final = PlanQuestion(
    "what will it cost on spot and on demand?",
    _asked_spot,
    [
        *RATE_FLAGS,
        *COST_FLAGS,
        flag("--spot", PRICE, "Price per hour.", to="spot_price"),
        flag("--discount", DISCOUNT, "In place of --spot: 30% off on demand."),
        flag("--on-demand", PRICE, "Price per hour.", to="on_demand_price"),
        flag("--flush-probability", SHARE, "Notices that end in a save.", 0.0, show_default=False),
        flag(
            "--flush-cost",
            DURATION,
            "What such a save takes.",
            0.0,
            to="flush_h",
            show_default=False,
        ),
        flag("--useful", SPAN, "Useful hours, for a total."),
    ],
    draws=True,
    listed="what will it cost on spot and on demand, and where does the choice flip?",
)


# --- a deadline ---------------------------------------------------------------------------------

_SPELLS_MOST: Final = 8000  # of the market within the deadline: more take many seconds


def deadline(
    *,
    rate: Rate,
    away_h: float,
    spot_price: float,
    on_demand_price: float,
    seed: int,
    **work: float,
) -> PlanAnswer:
    """Whether a deadline is met with spot, and what on-demand machines must add."""
    task = market.Task(**work)
    if rate.of != "job":
        raise ConfigError("--rate is of the whole fleet here; write 0.5/h")
    if on_demand_price <= 0:
        raise ConfigError(_FREE)
    up_h = 1 / rate.per_h
    num_spells = 2 * task.deadline_h / (up_h + away_h)
    if num_spells > _SPELLS_MOST:
        raise ConfigError(
            f"spot machines that last {span(up_h)} and are away for {span(away_h)} come "
            f"and go too often within {span(task.deadline_h)} to draw that; ask about a tenth of "
            "the work and of the deadline, which comes to the same"
        )
    num_runs, results = market.compare(
        task, (up_h, away_h), (spot_price, on_demand_price), seed=seed
    )
    chosen = market.cheapest(results)
    within = f"Yes, within {span(task.deadline_h)}:"
    if chosen is None:
        headline = (
            f"No: {span(task.work_h)} of work and a changeover of {span(task.changeover_h)} do not "
            f"fit into {span(task.deadline_h)}."
        )
    elif chosen.policy == "on demand alone":
        headline = f"{within} {number(chosen.cost_mean, 2)} on demand alone; spot does not pay."
    else:
        headline = f"{within} about {number(chosen.cost_mean, 2)} with {chosen.policy}."
    cells = [
        (
            row.policy,
            percent(row.met_fraction),
            number(row.cost_mean, 2),
            f"{number(row.cost_p5, 2)} – {number(row.cost_p95, 2)}",
            span(row.ended_p95_h),
            span(row.on_demand_h),
        )
        for row in results
    ]
    header = ("", "in time", "cost", "nine of ten", "done by (p95)", "on demand")
    return PlanAnswer(
        data={
            **msgspec.to_builtins(task),
            "spot_price_per_h": spot_price,
            "on_demand_price_per_h": on_demand_price,
            "failures_per_h": 1 / up_h,
            "away_mean_h": away_h,
            "rate_source": rate.source,
            "num_runs": num_runs,
            "seed": seed,
            "policies": [msgspec.to_builtins(row) | {"chosen": row is chosen} for row in results],
        },
        headline=headline,
        details=lines(
            table(header, cells, [row is chosen for row in results]),
            f"The market: spot lasts {span(up_h)}, is away for {span(away_h)}, both exponential; "
            f"{rate.source}. {num_runs} runs from --seed {seed}.",
            "Model: uniform progress (Wu et al., NSDI'24): on demand when idle and behind, spot "
            "when it is to be had, on demand to the end once only work and two changeovers fit in.",
        ),
        next=f"outlast plan spot --rate {1 / up_h:.4g}/h --checkpoint 3min --spot {spot_price:g} "
        f"--on-demand {on_demand_price:g}",
    )


DEADLINE: Final = PlanQuestion(
    "will I meet the deadline?",
    deadline,
    [
        flag("--work", SPAN, "Hours without interruption.", required=True),
        flag("--deadline", SPAN, "From the start.", required=True),
        flag("--rate", RATE, "Spot machines are taken: 0.5/h.", required=True),
        flag("--away", SPAN, "Until there are some again.", required=True),
        flag("--spot", PRICE, "Price per hour.", to="spot_price", required=True),
        flag("--on-demand", PRICE, "Price per hour.", to="on_demand_price", required=True),
        flag("--changeover", DURATION, "From machines to new work, with what is rewound.", "6min"),
        flag("--seed", COUNT0, "Of the drawn markets.", 0),
    ],
)
