"""Spot or on demand: the price of a useful hour, and where the choice flips.

A machine on demand is taken as never interrupted: a useful hour costs its price. A spot machine is
paid for every wall hour: c_eff = c_sp · W(λ), with W of any model in
:mod:`outlast.plan.interval`. Both prices are per machine, or both per job; hours of the job cancel
out, so that the price of a useful hour does not depend on how long the job is.

What can go wrong: machines on demand fail too (at a published rate, see :mod:`outlast.plan.rates`);
where that rate is not small beside the spot market's, the price on demand is for a useful hour.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import msgspec

from outlast.plan.comparison import MODELS, Model, ModelOf, or_none
from outlast.plan.crossing import crossing
from outlast.plan.interval import Costs

_RATE_LEAST_PER_H: Final = 1e-12
_RATE_MOST_PER_H: Final = 1e9


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """What one model says about a spot price.

    Attributes:
        model: its name.
        interval_h: useful hours between two checkpoints.
        wall_per_useful: wall hours per useful hour; inf when the job makes no progress.
        wasted: share of the wall hours that is not useful, in [0, 1].
        price_per_useful_h: what a useful hour costs on spot.
        wins: whether that is less than on demand.
        break_even_failures_per_h: λ at which both cost the same; inf if spot always wins, 0 never.
        break_even_spot_price: the spot price per hour at which both cost the same, at this λ.
        chosen: whether this is the model to go by.
    """

    model: Model
    interval_h: float
    wall_per_useful: float
    wasted: float
    price_per_useful_h: float
    wins: bool
    break_even_failures_per_h: float
    break_even_spot_price: float
    chosen: bool = False


def offers(
    costs: Costs, failures_per_h: float, *, spot_price: float, on_demand_price: float
) -> list[Offer]:
    """Each model's verdict; prices per hour, in one currency."""
    return [_offer(model, costs, failures_per_h, spot_price, on_demand_price) for model in MODELS]


def _offer(
    model: ModelOf, costs: Costs, failures_per_h: float, spot_price: float, on_demand_price: float
) -> Offer:
    def wall(per_h: float) -> float:
        return model.wall(costs, per_h, model.interval_h(costs, per_h))

    taken = or_none(wall(failures_per_h))
    price = price_per_useful_h(spot_price, taken)
    return Offer(
        model=model.name,
        interval_h=model.interval_h(costs, failures_per_h),
        wall_per_useful=taken,
        wasted=1 - 1 / taken,
        price_per_useful_h=price,
        wins=price < on_demand_price,
        break_even_failures_per_h=break_even_per_h(wall, spot_price, on_demand_price),
        break_even_spot_price=on_demand_price / taken,
        chosen=model.name == "exact",
    )


def price_per_useful_h(price_per_h: float, wall_per_useful: float) -> float:
    """What a useful hour costs, at a price for each wall hour."""
    return price_per_h * wall_per_useful if price_per_h > 0 else 0.0


def price_of(useful_h: float, price_per_h: float, wall_per_useful: float) -> float:
    """What ``useful_h`` useful hours cost."""
    return useful_h * price_per_useful_h(price_per_h, wall_per_useful)


def break_even_per_h(
    wall: Callable[[float], float], spot_price: float, on_demand_price: float
) -> float:
    """Failures per hour at which spot costs as much as on demand.

    Args:
        wall: wall hours per useful hour at a rate per hour, which never falls as the rate rises.
        spot_price: per hour.
        on_demand_price: per hour.

    Returns:
        0 when spot is no cheaper without any failure, inf when it stays cheaper at any rate.
    """
    if spot_price <= 0:
        return math.inf

    def dearer(per_h: float) -> float:
        return spot_price * wall(per_h) - on_demand_price

    if dearer(_RATE_LEAST_PER_H) >= 0:
        return 0.0
    found = crossing(dearer, _RATE_LEAST_PER_H, _RATE_MOST_PER_H)
    return math.inf if found >= _RATE_MOST_PER_H else found
