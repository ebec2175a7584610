"""How often to save into each of several places, by the Markov model of :mod:`outlast.plan.levels`.

A schedule is an interval and, for each slower place, how many saves into the faster one come before
one into it. That is what can be set (``every`` of a tier), and what the additive model of
:mod:`outlast.plan.tiers` cannot say: its intervals are of any length, and each as if alone.

How it is found: for given counts the interval by parabolas over its logarithm; the counts by steps
of shrinking size from the additive model's, two at a time, because one count more often goes with
another one less; last with each place left out. The hours are flat around their least: in 40 cases
that were drawn it missed the best counts three times, by at most 2.5e-6 of the hours.

Rejected: all counts in turn, which for three places takes a minute; the additive model's counts
alone, which take 2 % more hours where a save into the slowest place takes six of them (SCR's
vectors with ten times the failures and a last level fifty times as dear).
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from outlast.plan.levels import Levels
from outlast.plan.tiers import TierCosts, intervals_h

_HOUR_S: Final = 3600.0
_STEP: Final = 0.3  # of logarithms of intervals
_ROUGH, _FINE = 0.03, 1e-5
_STEPS_MOST: Final = 60
_DOUBLINGS_MOST: Final = 8  # from the first guess to e^150 of it
_MOST: Final = 100_000  # saves between two into the next place
_TOGETHER_MOST: Final = 2  # counts that change in one step
_ROUNDS_MOST: Final = 60


PLACES_MOST: Final = 5  # memory, peer, local, shared, object


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """When to save where.

    Attributes:
        interval_h: useful hours between two saves; inf where none is needed.
        counts: saves into each place between two into the next, but for the last one; 0 is a place
            that is left out.
        wall_per_useful: wall hours per useful hour; inf without any progress.
    """

    interval_h: float
    counts: tuple[int, ...]
    wall_per_useful: float

    @property
    def every(self) -> tuple[int | None, ...]:
        """Of all saves, each so many-th goes to a place, or to one behind it; None is never."""
        times = (count + 1 for count in self.counts)
        each = itertools.accumulate(times, operator.mul, initial=1)
        used = [*(count > 0 for count in self.counts), True]
        return tuple(nth if is_used else None for nth, is_used in zip(each, used, strict=True))


def wall_of(tiers: Sequence[TierCosts], interval_h: float, counts: Sequence[int]) -> float:
    """Wall hours per useful hour of a schedule, by the Markov model; inf without any progress."""
    return _wall(_levels(tiers, counts), interval_h)


def nearest(tiers: Sequence[TierCosts]) -> Schedule:
    """The additive model's intervals, in whole numbers of saves."""
    interval_h, counts = _additive(tiers)
    return Schedule(
        interval_h=interval_h, counts=counts, wall_per_useful=wall_of(tiers, interval_h, counts)
    )


def best(tiers: Sequence[TierCosts]) -> Schedule:
    """The one that takes the fewest hours.

    Args:
        tiers: from the fastest to the slowest, each with the rate of the failures that need it and
            no slower one; saves into each take some time.
    """
    if not any(tier.failures_per_h for tier in tiers):
        return Schedule(interval_h=math.inf, counts=(0,) * (len(tiers) - 1), wall_per_useful=1.0)
    start_h, counts = _additive(tiers)
    found = _walked(tiers, _at(tiers, counts, start_h))
    for number in range(len(counts)):
        if found.counts[number]:
            without = (*found.counts[:number], 0, *found.counts[number + 1 :])
            tried = _at(tiers, without, found.interval_h)
            if tried.wall_per_useful < found.wall_per_useful:
                found = _walked(tiers, tried)
    return of_counts(tiers, found.counts, found.interval_h)


def of_counts(tiers: Sequence[TierCosts], counts: Sequence[int], start_h: float) -> Schedule:
    """The best interval for these counts, looked for from ``start_h`` on."""
    return _at(tiers, tuple(counts), start_h, _FINE)


def _walked(tiers: Sequence[TierCosts], found: Schedule) -> Schedule:
    """The best within reach, by steps from large to small."""
    ways = itertools.product((-1, 0, 1), repeat=len(found.counts))
    directions = [way for way in ways if 0 < sum(map(abs, way)) <= _TOGETHER_MOST]
    scale, seen = 0.5, {found.counts}
    for _ in range(_ROUNDS_MOST):
        steps = (_moved(found.counts, way, scale) for way in directions)
        around = [counts for counts in dict.fromkeys(steps) if counts not in seen]
        is_last = scale * max(found.counts, default=0) <= 1
        if is_last:  # each with its own interval; before, all with this one
            tried = [_at(tiers, counts, found.interval_h) for counts in around]
            seen.update(around)
        else:
            walls = {counts: wall_of(tiers, found.interval_h, counts) for counts in around}
            tried = [_at(tiers, counts, found.interval_h) for counts in _least_of(walls)]
        ahead = min(tried, key=_hours, default=found)
        if _hours(ahead) < _hours(found):
            found = ahead
        elif is_last or math.isinf(_hours(found)):
            break
        else:
            scale /= 2
    return found


def _hours(schedule: Schedule) -> float:
    return schedule.wall_per_useful


def _least_of(walls: dict[tuple[int, ...], float]) -> list[tuple[int, ...]]:
    """The one that takes the fewest hours, if there is any."""
    return sorted(walls, key=walls.__getitem__)[:1]


def _additive(tiers: Sequence[TierCosts]) -> tuple[float, tuple[int, ...]]:
    """The additive model's intervals, from the slowest place on, in whole numbers of saves."""
    wanted_h = intervals_h(tiers)
    longest_h = 1 / math.fsum(tier.failures_per_h for tier in tiers)
    counts, used_h = [], wanted_h[-1]
    for number in range(len(tiers) - 2, -1, -1):
        times = min(used_h / wanted_h[number], _MOST) if wanted_h[number] > 0 else _MOST
        counts.append(max(round(times) - 1, 0))
        used_h /= counts[-1] + 1
    return min(used_h, longest_h), tuple(reversed(counts))


def _moved(counts: Sequence[int], way: Sequence[int], scale: float) -> tuple[int, ...]:
    return tuple(
        min(max(count + sign * max(round(scale * count), 1), 0), _MOST)
        for count, sign in zip(counts, way, strict=True)
    )


def _at(
    tiers: Sequence[TierCosts], counts: tuple[int, ...], start_h: float, exact: float = _ROUGH
) -> Schedule:
    """The best interval for these counts, looked for from ``start_h`` on."""
    levels = _levels(tiers, counts)
    start = math.log(start_h)
    interval_h = math.exp(_least(lambda x: _wall(levels, math.exp(x)), start, _STEP, exact))
    return Schedule(interval_h=interval_h, counts=counts, wall_per_useful=_wall(levels, interval_h))


def _least(function: Callable[[float], float], start: float, step: float, exact: float) -> float:
    """Where a function with one valley is least: downhill from ``start``, then by parabolas."""
    left, middle, right = ((at, function(at)) for at in (start - step, start, start + step))
    for _ in range(_DOUBLINGS_MOST):
        if right[1] < middle[1]:
            step *= 2
            left, middle, right = middle, right, _point(function, right[0] + step)
        elif left[1] < middle[1] or math.isinf(middle[1]):
            # Where all is endless, the intervals are too long.
            step *= 2
            left, middle, right = _point(function, left[0] - step), left, middle
        else:
            break
    if math.isinf(middle[1]):
        return start
    for _ in range(_STEPS_MOST):
        at = _vertex(left, middle, right)
        if abs(at - middle[0]) < exact:
            break
        new = _point(function, at)
        if new[1] < middle[1]:
            left, middle, right = (left, new, middle) if at < middle[0] else (middle, new, right)
        else:
            left, right = (new, right) if at < middle[0] else (left, new)
    return middle[0]


_Point = tuple[float, float]


def _point(function: Callable[[float], float], at: float) -> _Point:
    return at, function(at)


def _vertex(left: _Point, middle: _Point, right: _Point) -> float:
    """Of the parabola through three points; halfway where one of them is endless."""
    before, after = middle[0] - left[0], right[0] - middle[0]
    falls, rises = left[1] - middle[1], right[1] - middle[1]
    bend = falls * after + rises * before
    if not 0 < bend < math.inf:
        longer = before if before > after else -after
        return middle[0] - longer / 2 if max(before, after) > 1e-9 else middle[0]
    return middle[0] - (rises * before**2 - falls * after**2) / (2 * bend)


def _wall(levels: Levels, interval_h: float) -> float:
    efficiency = levels.efficiency(interval_h * _HOUR_S)
    return 1 / efficiency if efficiency > 0 else math.inf


def _levels(tiers: Sequence[TierCosts], counts: Sequence[int]) -> Levels:
    return Levels(
        [tier.checkpoint_h * _HOUR_S for tier in tiers],
        [tier.failures_per_h / _HOUR_S for tier in tiers],
        counts,
        [tier.restore_h * _HOUR_S for tier in tiers],
    )
