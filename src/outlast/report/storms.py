"""What a storm of failures has cost, and what it would have cost with another cadence.

A storm is what the cadence takes for one (:func:`outlast.policy.hazard.storms`): failures that were
more probably a burst's than calm's. What it cost is measured: the job's time by part, from the
first failure to the first new step after the last one. What another cadence would have cost is
simulated: the job's failures up to the storm's end, less those up to its beginning, with what its
saves, losses and resumes took in the mean. So the two are to be compared with care: the simulated
ones with each other, the measured one with none of them to the second.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import msgspec

from outlast.ledger.events import Event
from outlast.ledger.goodput import Goodput, goodput, in_order
from outlast.ledger.incidents import Incident, Lived, lived
from outlast.policy import hazard
from outlast.policy.interval import Costs
from outlast.report.forecast import HOUR_S, Forecast, as_case, costs_of, moments

POINTS: Final = 41
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


def storms(
    events: Iterable[Event], incidents: Iterable[Incident], forecast: Forecast | None
) -> list[Storm]:
    """The newest storms in a job's life, oldest first; none where it has not saved."""
    if forecast is None:
        return []
    ordered = in_order(events)
    life = lived(ordered, incidents)
    found = hazard.storms(_gaps_h(life, ordered[0].t))
    return [_storm(ordered, life, forecast, *one) for one in found[-TOLD:]]


def _gaps_h(life: Lived, start_t: float) -> list[float]:
    gaps_h, since_t = [], start_t
    for one in life.failures:
        gap_s = one.detected_t - since_t - life.away_s(since_t, one.detected_t)
        gaps_h.append(max(gap_s, 0.0) / HOUR_S)
        since_t = one.detected_t if one.back_t is None else one.back_t
    return gaps_h


def _storm(ordered: list[Event], life: Lived, forecast: Forecast, first: int, last: int) -> Storm:
    failures = life.failures[first : last + 1]
    begin_t, ended = failures[0].began_t, failures[-1]
    end_t = ended.detected_t if ended.back_t is None else ended.back_t
    before = _until(ordered, begin_t)
    after = _until(ordered, end_t)
    start_t = ordered[0].t
    length_s = ordered[-1].t - start_t - life.away_s(start_t, math.inf)
    moments_s = moments(life, start_t, length_s)
    over_s = min(moments_s[last] + end_t - ended.detected_t, length_s)
    calm_s = _calm_s(ordered, begin_t) or forecast.interval_s
    calm, best, auto = _simulated(
        costs_of(ordered, life), moments_s, moments_s[first], over_s, calm_s
    )
    return Storm(
        begin_t=begin_t,
        end_t=end_t,
        num_failures=len(failures),
        lost_s={part: max(_seconds(after, part) - _seconds(before, part), 0.0) for part in LOST},
        calm=calm,
        best=best,
        auto=auto,
    )


def _until(ordered: list[Event], t: float) -> Goodput:
    return goodput([event for event in ordered if event.t <= t], t)


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
