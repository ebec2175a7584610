"""Predicted and measured, and what storms of failures have cost: of a job, from its ledger.

Predicted is what the plan said that was kept before the job started (``outlast plan --save``, see
:mod:`outlast.ledger.job`). Without one it is what a plan could have said: by the exact model
(:mod:`outlast.policy.interval`) from what saves, losses and resumes of this job took, at the rate
that is believed in before anything is known (one failure in 10 h). The regret is found by replaying
the job's own failures: what the best fixed interval would have gained over the mean one that it
had. Both are for a job of one kind of machine that saves to one tier.

A storm is what the cadence takes for one (:func:`outlast.policy.hazard.storms`): failures that were
more probably a burst's than calm's. What it cost is measured: the job's time by part, from the
first failure to the first new step after the last one. What another cadence would have cost is
simulated: the job's failures up to the storm's end, less those up to its beginning, with what its
saves, losses and resumes took in the mean. So the two are to be compared with care: the simulated
ones with each other, the measured one with none of them to the second.
"""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Final

import msgspec

from outlast.ledger.events import Event
from outlast.ledger.goodput import Goodput, Split
from outlast.ledger.incidents import Lived
from outlast.ledger.job import Prediction, newest_plan
from outlast.policy import hazard
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


def forecast(ordered: list[Event], machines: Goodput, life: Lived) -> Forecast | None:
    """Compare; None where the job has not trained or has not saved.

    Args:
        ordered: the ledger's events but its samples, in the order of their times.
        machines: where its machines' time went.
        life: how it ran and failed.
    """
    held = machines.held
    blocked_s = _blocked_s(ordered)
    if held <= 0 or not machines.productive or not blocked_s:
        return None
    costs = costs_of(ordered, life)
    share = held / machines.total
    trained = machines.productive + machines.replayed + machines.data
    trained_s = machines.wall_s * share * trained / held
    interval_s = trained_s / len(blocked_s)
    ran_h = life.ran_s / HOUR_S
    planned = newest_plan(ordered)
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
    """A job with these costs, for the simulator."""
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


TOLD: Final = 5  # the newest ones
LOST: Final = ("replayed", "stalled", "detecting", "restarting")


class WhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """One cadence: its interval, if it is fixed, and what the storm would have cost with it."""

    interval_s: float | None = None
    lost_s: float


class Storm(msgspec.Struct, frozen=True, kw_only=True):
    """One storm.

    Attributes:
        begin_t, end_t: from its first failure to the first new step after its last one.
        num_failures: in it.
        lost_s: part → seconds of the job's time, measured.
        calm: with the interval that the job had in calm, simulated.
        best: with the fixed interval that would have done best in this storm.
        auto: with ``auto``.
    """

    begin_t: float
    end_t: float
    num_failures: int
    lost_s: dict[str, float]
    calm: WhatIf
    best: WhatIf
    auto: WhatIf

    @property
    def all_lost_s(self) -> float:
        """Of all parts."""
        return math.fsum(self.lost_s.values())


StormPlace = tuple[float, float, int, int]  # from, to, its first and its last failure


def storms_in(ordered: list[Event], life: Lived) -> list[StormPlace]:
    """Where the newest storms in a job's life are, oldest first."""
    if not ordered:
        return []
    found = hazard.storms(_gaps_h(life, ordered[0].t))[-TOLD:]
    places = []
    for first, last in found:
        ended = life.failures[last]
        end_t = ended.detected_t if ended.back_t is None else ended.back_t
        places.append((life.failures[first].began_t, end_t, first, last))
    return places


def storms(
    ordered: list[Event],
    life: Lived | None,
    forecast: Forecast | None,
    places: list[StormPlace],
    splits: list[Split],
) -> list[Storm]:
    """What each storm has cost; none where the job has not saved.

    Args:
        ordered: the ledger's events but its samples, in the order of their times.
        life: how it ran and failed.
        forecast: what was predicted of it.
        places: where they are.
        splits: of the job's time, as of each of their beginnings and ends in the order of times.
    """
    if forecast is None or life is None:
        return []
    edges = sorted(t for begin_t, end_t, _, _ in places for t in (begin_t, end_t))
    spent = dict(zip(edges, splits, strict=True))
    return [_storm(ordered, life, forecast, one, spent) for one in places]


def _gaps_h(life: Lived, start_t: float) -> list[float]:
    gaps_h, since_t = [], start_t
    for one in life.failures:
        gap_s = one.detected_t - since_t - life.away_s(since_t, one.detected_t)
        gaps_h.append(max(gap_s, 0.0) / HOUR_S)
        since_t = one.detected_t if one.back_t is None else one.back_t
    return gaps_h


def _storm(
    ordered: list[Event],
    life: Lived,
    forecast: Forecast,
    place: StormPlace,
    spent: dict[float, Split],
) -> Storm:
    begin_t, end_t, first, last = place
    before, after = spent[begin_t].workers, spent[end_t].workers
    start_t = ordered[0].t
    length_s = ordered[-1].t - start_t - life.away_s(start_t, math.inf)
    moments_s = moments(life, start_t, length_s)
    over_s = min(moments_s[last] + end_t - life.failures[last].detected_t, length_s)
    calm_s = _calm_s(ordered, begin_t) or forecast.interval_s
    calm, best, auto = _simulated(
        costs_of(ordered, life), moments_s, moments_s[first], over_s, calm_s
    )
    return Storm(
        begin_t=begin_t,
        end_t=end_t,
        num_failures=last - first + 1,
        lost_s={part: max(_seconds(after, part) - _seconds(before, part), 0.0) for part in LOST},
        calm=calm,
        best=best,
        auto=auto,
    )


def _seconds(found: Goodput, part: str) -> float:
    """Of the job: worker-seconds over the workers that it had."""
    parts = {str(name): value for name, value in found.parts().items()}
    return parts[part] * found.wall_s / found.total if found.total else 0.0


def _calm_s(ordered: list[Event], t: float) -> float | None:
    """The interval of calm as of this moment, or as of the storm's beginning behind it."""
    told = [one for one in ordered if one.event == "cadence" and not one.get("tier")]
    chosen = [one.get("interval_s") for one in told if one.t < t and not one.get("burst")]
    left = [one.get("before_s") for one in told if one.t >= t and one.get("burst")]
    known = [float(one) for one in (*chosen[-1:], *left) if isinstance(one, int | float)]
    return next((one for one in known if one > 0), None)


def _simulated(
    costs: Costs,
    moments_s: list[float],
    begin_s: float,
    over_s: float,
    calm_s: float,
) -> tuple[WhatIf, WhatIf, WhatIf]:
    """The interval of calm, the best one, and ``auto``: what each loses from begin to end."""
    import numpy as np

    from outlast.planner.many import Automatic, FixedIntervals, Intervals, Replayed, simulate

    tried = calm_s * np.exp(np.linspace(-math.log(1000), math.log(1000), POINTS))
    # One that saves more than it trains is never the best, and takes long to count.
    tried = np.maximum(tried, costs.checkpoint_h * HOUR_S)

    def lost_s(
        make: type[FixedIntervals] | type[Automatic], *given: object, count: int
    ) -> list[float]:
        until = []
        for horizon_s in (begin_s, over_s):
            if horizon_s <= 0:
                until.append(np.zeros(count))
                continue
            intervals: Intervals = make(*given)  # type: ignore[arg-type]
            failures = Replayed(moments_s, moments_s[-1] + 2 * over_s, np.zeros(count))
            ledger = simulate(as_case(costs, horizon_s), failures, intervals, count)
            until.append(ledger.wall - ledger.useful)
        return [float(one) for one in until[1] - until[0]]

    fixed = lost_s(FixedIntervals, tried, count=POINTS)
    index = int(np.argmin(fixed))
    (auto,) = lost_s(Automatic, costs.checkpoint_h * HOUR_S, 1, count=1)
    return (
        WhatIf(interval_s=float(tried[POINTS // 2]), lost_s=fixed[POINTS // 2]),
        WhatIf(interval_s=float(tried[index]), lost_s=fixed[index]),
        WhatIf(lost_s=auto),
    )
