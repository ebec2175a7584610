"""How far off a plan was: predicted against measured, and what the intervals cost.

Predicted is what the plan said that was kept before the job started (``outlast plan --save``, see
:mod:`outlast.ledger.planned`). Without one it is what a plan could have said: by the exact model
(:mod:`outlast.policy.interval`) from what saves, losses and resumes of this job took, at the rate
that is believed in before anything is known (one failure in 10 h).
The regret is found by replaying the job's own failures: what the best fixed interval would have
gained over the mean one that it had. Both are for a job of one kind of machine that saves to one
tier.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import msgspec

from outlast.ledger.events import Event
from outlast.ledger.goodput import Goodput, in_order
from outlast.ledger.incidents import Incident, Lived, lived
from outlast.ledger.planned import Prediction, newest
from outlast.policy.hazard import Posterior
from outlast.policy.interval import Costs, exact_wall

if TYPE_CHECKING:
    from outlast.planner.many import JobCase

HOUR_S: Final = 3600.0
POINTS: Final = 41


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted and measured, side by side.

    Attributes:
        planned: the plan that was kept, or None.
        interruptions_predicted, interruptions: of the time that it ran.
        productive_predicted, productive: share of the time that machines were held.
        interval_s: mean time from checkpoint to checkpoint.
        best_interval_s: the fixed one that would have done best on the same failures.
        regret: share of the time that it would have gained.
    """

    interruptions_predicted: float
    interruptions: int
    productive_predicted: float
    productive: float
    interval_s: float
    best_interval_s: float | None = None
    regret: float | None = None
    planned: Prediction | None = None
    ran_h: float = 0.0

    def cost_predicted(self, cost: float | None, price: float | None = None) -> float | None:
        """What the same steps would have cost as predicted, at the plan's price where it has one.

        Args:
            cost: what they did cost.
            price: per machine and hour, that this was reckoned with.
        """
        if cost is None or not self.productive_predicted:
            return None
        planned = None if self.planned is None else self.planned.price_per_machine_hour
        scale = planned / price if planned is not None and price else 1.0
        return scale * cost * self.productive / self.productive_predicted


def forecast(
    events: Iterable[Event], machines: Goodput, incidents: Iterable[Incident]
) -> Forecast | None:
    """Compare; None where the job has not trained or has not saved."""
    ordered = in_order(events)
    held = machines.total - machines.waiting
    blocked_s = _blocked_s(ordered)
    if held <= 0 or not machines.productive or not blocked_s:
        return None
    life = lived(ordered, incidents)
    costs = costs_of(ordered, life)
    share = held / machines.total
    trained_s = machines.wall_s * share * (machines.productive + machines.replayed) / held
    interval_s = trained_s / len(blocked_s)
    ran_h = life.ran_s / HOUR_S
    planned = newest(ordered)
    if planned is None:
        rate_per_h = Posterior().mean_per_h
        predicted = 1 / exact_wall(costs, rate_per_h, interval_s / HOUR_S)
    else:
        rate_per_h, predicted = planned.failures_per_h, planned.productive_fraction
    found = Forecast(
        interruptions_predicted=rate_per_h * ran_h,
        interruptions=life.num_failures,
        productive_predicted=predicted,
        planned=planned,
        ran_h=ran_h,
        productive=machines.productive / held,
        interval_s=interval_s,
    )
    if not life.failures or trained_s <= 0:
        return found
    start_t = ordered[0].t
    length_s = machines.wall_s - life.away_s(start_t, math.inf)
    moments_s = moments(life, start_t, length_s)
    best_s, regret = _regret(costs, moments_s, length_s, interval_s)
    return msgspec.structs.replace(found, best_interval_s=best_s, regret=regret)


def costs_of(ordered: list[Event], life: Lived) -> Costs:
    """What saves, losses and resumes of this job took; it has saved."""
    lags = [event.get("durable_s") for event in ordered if event.event == "commit"]
    return Costs(
        checkpoint_h=statistics.fmean(_blocked_s(ordered)) / HOUR_S,
        restore_h=_middle(life.downs_s()) / HOUR_S,
        detect_h=_middle(life.detections_s()) / HOUR_S,
        lag_h=_middle([one for one in lags if isinstance(one, int | float)]) / HOUR_S,
    )


def moments(life: Lived, start_t: float, length_s: float) -> list[float]:
    """Seconds from the start to each failure, without the time in which nobody had started it."""
    return [
        min(max(one.detected_t - start_t - life.away_s(start_t, one.detected_t), 0.0), length_s)
        for one in life.failures
    ]


def as_case(costs: Costs, length_s: float) -> JobCase:
    """The same job, for the simulator."""
    from outlast.planner.many import JobCase

    return JobCase(
        cost_s=costs.checkpoint_h * HOUR_S,
        restore_s=costs.restore_h * HOUR_S,
        detect_s=costs.detect_h * HOUR_S,
        lag_s=costs.lag_h * HOUR_S,
        horizon_s=length_s,
    )


def _blocked_s(ordered: list[Event]) -> list[float]:
    blocked = [event.get("blocked_s") for event in ordered if event.event == "snapshot"]
    return [float(one) for one in blocked if isinstance(one, int | float) and one >= 0]


def _regret(
    costs: Costs, moments_s: list[float], length_s: float, interval_s: float
) -> tuple[float, float]:
    """The best fixed interval on these failures, and what it gains over the one that was had."""
    import numpy as np

    from outlast.planner.many import FixedIntervals, Replayed, simulate

    # A thousandth to a thousand times as long, the interval that it had in the middle.
    tried = interval_s * np.exp(np.linspace(-np.log(1000), np.log(1000), POINTS))
    case = as_case(costs, length_s)
    failures = Replayed(moments_s, 2 * length_s, np.zeros(POINTS))
    ledger = simulate(case, failures, FixedIntervals(tried), POINTS)
    useful = ledger.useful / ledger.wall
    index = int(np.argmax(useful))
    return float(tried[index]), float(useful[index] - useful[POINTS // 2])


def _middle(values: list[float]) -> float:
    known = [value for value in values if value >= 0]
    return float(statistics.median(known)) if known else 0.0
