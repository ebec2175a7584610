"""Put all interval models beside one another, and price a useful hour on spot and on demand.

Each model proposes an interval and says what a useful hour takes at it; the exact model's answer
for the same interval stands beside, so that one sees both how far a model errs and what following
it costs. The exact one decides.

A machine on demand is taken as never interrupted: a useful hour costs its price. A spot machine is
paid for every wall hour: c_eff = c_sp · W(λ), with W of any model of
:mod:`outlast.policy.interval`. Both prices are per machine, or both per job; hours of the job
cancel out, so that the price of a useful hour does not depend on how long the job is.

What can go wrong: machines on demand fail too (at a published rate, see
:mod:`outlast.planner.formulas`); where that rate is not small beside the spot market's, the price
on demand is for a useful hour.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, Literal, NamedTuple, cast

import msgspec

from outlast.policy.hazard import crossing
from outlast.policy.interval import (
    LINEAR_RANGE,
    Costs,
    asynchronous_h,
    best_h,
    daly_h,
    exact_wall,
    linear_best_h,
    linear_wall,
    young_h,
)

Model = Literal[
    "linear at Young",
    "linear at its optimum",
    "Daly",
    "exact",
    "asynchronous",
    "yours, linear",
    "yours, exact",
]
NO_PROGRESS: Final = 1000.0  # wall hours for a useful one: nobody waits for that
NEARLY_BEST: Final = 1.01  # wall hours against the least, within which an interval is as good
_RATE_LEAST_PER_H: Final = 1e-12
_RATE_MOST_PER_H: Final = 1e9

Wall = Callable[[Costs, float, float], float]


class ModelRow(msgspec.Struct, frozen=True, kw_only=True):
    """One model's answer.

    Attributes:
        model: its name.
        interval_h: useful hours between two checkpoints that it proposes; nan if it has none.
        wall_per_useful: wall hours per useful hour, as this model says.
        exact_wall_per_useful: the same as the exact model says for that interval.
        chosen: whether this is the one to go by.
    """

    model: Model
    interval_h: float
    wall_per_useful: float
    exact_wall_per_useful: float
    chosen: bool = False

    @property
    def wasted(self) -> float:
        """Share of the wall hours that is not useful, in [0, 1]."""
        return 1 - 1 / self.wall_per_useful

    @property
    def walls(self) -> tuple[float, float]:
        """Wall hours per useful hour as this model says, and as the exact one does."""
        return self.wall_per_useful, self.exact_wall_per_useful


class ModelOf(NamedTuple):
    """A model: how it finds its interval, and how it counts."""

    name: Model
    interval_h: Callable[[Costs, float], float]
    wall: Wall


MODELS: Final = (
    ModelOf("linear at Young", young_h, linear_wall),
    ModelOf("linear at its optimum", linear_best_h, linear_wall),
    ModelOf("Daly", daly_h, exact_wall),
    ModelOf("exact", best_h, exact_wall),
)
_ASYNCHRONOUS: Final = ModelOf("asynchronous", asynchronous_h, linear_wall)


def compare(costs: Costs, failures_per_h: float, interval_h: float | None = None) -> list[ModelRow]:
    """Each model's interval and what a useful hour takes; the asynchronous one where there is lag.

    Args:
        costs: what saving and failing cost.
        failures_per_h: λ of the whole job.
        interval_h: another interval to look at, in useful hours.
    """
    models = list(MODELS)
    if costs.lag_h > 0:
        models.insert(3, _ASYNCHRONOUS)
    rows = [
        _row(model, costs, failures_per_h, model.interval_h(costs, failures_per_h))
        for model in models
    ]
    if interval_h is not None:
        for name, wall in (("yours, linear", linear_wall), ("yours, exact", exact_wall)):
            own = ModelOf(cast(Model, name), young_h, wall)
            rows.append(_row(own, costs, failures_per_h, interval_h))
    return rows


def _row(model: ModelOf, costs: Costs, failures_per_h: float, interval_h: float) -> ModelRow:
    return ModelRow(
        model=model.name,
        interval_h=interval_h,
        wall_per_useful=or_none(model.wall(costs, failures_per_h, interval_h)),
        exact_wall_per_useful=or_none(exact_wall(costs, failures_per_h, interval_h)),
        chosen=model.name == "exact",
    )


def or_none(wall_per_useful: float) -> float:
    """The same, or inf where a useful hour takes so many that the job makes no progress."""
    return math.inf if wall_per_useful > NO_PROGRESS else wall_per_useful


class Validity(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the linear model can be believed at an interval.

    Attributes:
        failures_per_segment: λ(T+C).
        in_range: whether that is at most 0.3, and the job makes progress by it.
        error: linear over exact, less one: 0.05 is 5 % too high; inf where it sees no progress.
    """

    failures_per_segment: float
    in_range: bool
    error: float


def linear_validity(costs: Costs, failures_per_h: float, interval_h: float) -> Validity:
    """How far the linear model is off at this interval."""
    per_segment = failures_per_h * (interval_h + costs.checkpoint_h)
    linear = linear_wall(costs, failures_per_h, interval_h)
    exact = exact_wall(costs, failures_per_h, interval_h)
    return Validity(
        failures_per_segment=per_segment,
        in_range=per_segment <= LINEAR_RANGE and not math.isinf(linear),
        error=math.inf if math.isinf(linear) else linear / exact - 1,
    )


def nearly_best_h(costs: Costs, failures_per_h: float) -> tuple[float, float]:
    """The shortest and the longest interval that take at most 1 % more hours than the best one."""
    chosen_h = best_h(costs, failures_per_h)
    if not 0 < chosen_h < math.inf:
        return chosen_h, chosen_h
    limit = NEARLY_BEST * exact_wall(costs, failures_per_h, chosen_h)

    def over(interval_h: float) -> float:
        return exact_wall(costs, failures_per_h, interval_h) - limit

    low_h = max(crossing(over, chosen_h, chosen_h / 1e6), costs.lag_h)
    return low_h, crossing(over, chosen_h, chosen_h * 1e6)


# --- spot or on demand ----------------------------------------------------------------------------


class SpotOffer(msgspec.Struct, frozen=True, kw_only=True):
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
) -> list[SpotOffer]:
    """Each model's verdict; prices per hour, in one currency."""
    return [_offer(model, costs, failures_per_h, spot_price, on_demand_price) for model in MODELS]


def _offer(
    model: ModelOf, costs: Costs, failures_per_h: float, spot_price: float, on_demand_price: float
) -> SpotOffer:
    def wall(per_h: float) -> float:
        return model.wall(costs, per_h, model.interval_h(costs, per_h))

    taken = or_none(wall(failures_per_h))
    price = price_per_useful_h(spot_price, taken)
    return SpotOffer(
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
