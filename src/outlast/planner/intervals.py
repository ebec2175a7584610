"""Find how often to save: into one place by every model, into several exactly; price a useful hour.

**Models.** Each proposes an interval and says what a useful hour takes at it; the exact model's
answer for the same interval stands beside, so that one sees both how far a model errs and what
following it costs. The exact one decides.

**Price.** A machine on demand is taken as never interrupted: a useful hour costs its price. A spot
machine is paid for every wall hour: c_eff = c_sp · W(λ), with W of any model of
:mod:`outlast.policy.interval`. Both prices are per machine, or both per job; hours of the job
cancel out, so that the price of a useful hour does not depend on how long the job is. What can go
wrong: machines on demand fail too (at a published rate, see :mod:`outlast.planner.formulas`); where
that rate is not small beside the spot market's, the price on demand is for a useful hour.

**Several places, additive**: each place as if alone. Waste per hour is Σ Cᵢ/Tᵢ + Σ λᵢ(Tᵢ/2 + Rᵢ),
and each Tᵢ ≈ √(2Cᵢ/λᵢ), where λᵢ is the rate of the failures that need tier i (a process that died
needs memory alone, a lost machine its peer, a lost zone the object store). First order, like the
linear model, and as good: no two failures at once, no failure while another is mended.

**Several places, exact**: the Markov model of Moody et al. (SC'10). Levels are numbered from 1, the
cheapest. A failure of level i is survived by checkpoints of level i and above; the job then reads
the newest of those, and goes on from there. Between two checkpoints of level k+1 lie ``counts[k]``
of level k. Failures are exponential, and strike while computing, saving and restoring. One that
comes while level k is read back needs level k again if it is below k, and the next level if it is
k: the copy that was being read is gone. Each segment of the job ends well or with a failure of some
level, and each way out has a probability and a mean time. Carried together as p + p·t·ε with
ε² = 0, doing one segment after the other is a product and trying again a geometric series, so that
the recursion over levels is a few lines of arithmetic, without a matrix.

A schedule is an interval and, for each slower place, how many saves into the faster one come before
one into it. That is what can be set (``every`` of a tier); the additive model's intervals are of
any length. It is found so: for given counts the interval by parabolas over its logarithm; the
counts by steps of shrinking size from the additive model's, two at a time, because one count more
often goes with another one less; last with each place left out. The hours are flat around their
least: in 40 cases that were drawn it missed the best counts three times, by at most 2.5e-6 of the
hours. Rejected: all counts in turn, which for three places takes a minute; the additive model's
counts alone, which take 2 % more hours where a save into the slowest place takes six of them (SCR's
vectors with ten times the failures and a last level fifty times as dear).
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Final, Literal, NamedTuple, cast

import msgspec

from outlast.policy.hazard import crossing
from outlast.policy.interval import (
    LINEAR_RANGE,
    Costs,
    TierCosts,
    asynchronous_h,
    best_h,
    daly_h,
    exact_wall,
    intervals_h,
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
    """One model's answer to how often to save.

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
    """``wall_per_useful``, or inf where it is so large that the job makes no progress."""
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


_HOUR_S: Final = 3600.0
_STEP: Final = 0.3  # of logarithms of intervals
_ROUGH, _FINE = 0.03, 1e-5
_STEPS_MOST: Final = 60
_DOUBLINGS_MOST: Final = 8  # from the first guess to e^150 of it
_MOST: Final = 100_000  # saves between two into the next place
_TOGETHER_MOST: Final = 2  # counts that change in one step
_ROUNDS_MOST: Final = 60
PLACES_MOST: Final = 5  # memory, peer, local, shared, object
_LEAST_STAYS: Final = 1e-10


# --- additive -------------------------------------------------------------------------------------


def saving_share(tiers: Sequence[TierCosts], intervals_h: Sequence[float]) -> float:
    """Hours of saving per useful hour: Σ Cᵢ/Tᵢ."""
    return math.fsum(
        tier.checkpoint_h / interval_h
        for tier, interval_h in zip(tiers, intervals_h, strict=True)
        if tier.checkpoint_h > 0
    )


def failing_share(tiers: Sequence[TierCosts], intervals_h: Sequence[float]) -> float:
    """Hours lost to failures per wall hour: Σ λᵢ(Tᵢ/2 + Rᵢ)."""
    return math.fsum(
        tier.failures_per_h * (interval_h / 2 + tier.restore_h)
        for tier, interval_h in zip(tiers, intervals_h, strict=True)
        if tier.failures_per_h > 0
    )


def waste(tiers: Sequence[TierCosts], intervals_h: Sequence[float]) -> float:
    """Σ Cᵢ/Tᵢ + Σ λᵢ(Tᵢ/2 + Rᵢ): hours wasted per hour, to first order."""
    return saving_share(tiers, intervals_h) + failing_share(tiers, intervals_h)


def wall_per_useful(tiers: Sequence[TierCosts], intervals_h: Sequence[float]) -> float:
    """Wall hours per useful hour, (1 + Σ C/T) / (1 - Σ λ·loss); inf without any progress."""
    progress = 1 - failing_share(tiers, intervals_h)
    return (1 + saving_share(tiers, intervals_h)) / progress if progress > 0 else math.inf


# --- the Markov model -----------------------------------------------------------------------------


class _Way(NamedTuple):
    """A way out: its probability, and probability times mean time."""

    chance: float
    spent: float

    def then(self, other: _Way) -> _Way:
        """This, and the other one after it."""
        return _Way(
            self.chance * other.chance, self.chance * other.spent + self.spent * other.chance
        )

    def plus(self, other: _Way) -> _Way:
        """This or the other one."""
        return _Way(self.chance + other.chance, self.spent + other.spent)

    def repeated(self) -> _Way:
        """Any number of times, none included.

        Raises:
            OverflowError: so many times that of 1 less the chance few digits are left.
        """
        stays = 1 - self.chance
        if stays < _LEAST_STAYS:
            raise OverflowError
        return _Way(1 / stays, self.spent / stays**2)


_NEVER: Final = _Way(0.0, 0.0)
_ALWAYS: Final = _Way(1.0, 0.0)


class _Segment(NamedTuple):
    """Part of a job: how it ends well, and by a failure of each level (index 0 is level 1)."""

    well: _Way
    fails: tuple[_Way, ...]

    def then(self, other: _Segment) -> _Segment:
        """This, and if it ends well the other one."""
        after = [self.well.then(way) for way in other.fails]
        fails = tuple(way.plus(later) for way, later in zip(self.fails, after, strict=True))
        return _Segment(self.well.then(other.well), fails)

    def times(self, count: int) -> _Segment:
        """This so many times in a row."""
        whole, power = _Segment(_ALWAYS, (_NEVER,) * len(self.fails)), self
        while count:
            if count & 1:
                whole = whole.then(power)
            count >>= 1
            power = power.then(power) if count else power
        return whole


class Levels:
    """The Markov model of one job's levels.

    Args:
        cost_s: of a checkpoint of each level.
        failures_per_s: of each level; 0 is a level that nothing ever needs.
        counts: checkpoints of level k between two of the next, for all levels but the last; with 0
            a level has none, and what it would have survived falls to the next.
        restore_s: to read a checkpoint of each level back; without it, as long as saving it.
    """

    def __init__(
        self,
        cost_s: Sequence[float],
        failures_per_s: Sequence[float],
        counts: Sequence[int],
        restore_s: Sequence[float] | None = None,
    ) -> None:
        self._cost_s, self._per_s, self._counts = cost_s, failures_per_s, counts
        self._restore_s = cost_s if restore_s is None else restore_s
        self._rate = math.fsum(failures_per_s)
        self._top = len(cost_s)

    def efficiency(self, interval_s: float) -> float:
        """Useful time over wall time, when a checkpoint is taken each ``interval_s`` of work."""
        if interval_s <= 0 or math.isinf(interval_s):
            return float(interval_s > 0 and not self._rate)
        try:
            whole = self._whole(interval_s)
        except OverflowError:
            return 0.0  # so slow that floats have no word for it
        intervals = math.prod(count + 1 for count in self._counts)
        wall_s = whole.well.spent / whole.well.chance if whole.well.chance > 0 else math.inf
        return intervals * interval_s / wall_s if wall_s > 0 else 0.0

    def _whole(self, interval_s: float) -> _Segment:
        """From a checkpoint of the last level to the next one, whatever fails.

        ``to[last]`` is a segment that ends in a checkpoint of level ``last``: at first one interval
        alone, then with all that lies between two checkpoints of each level in turn.
        """
        to = {last: self._run(interval_s + cost_s) for last, cost_s in enumerate(self._cost_s, 1)}
        for level, count in enumerate(self._counts, 1):
            segment = to.pop(level)
            if count:
                first = segment.then(self._recovered(level, segment).times(count - 1))
                to = {last: first.then(self._recovered(level, end)) for last, end in to.items()}
        return self._recovered(self._top, to[self._top])

    def _run(self, seconds: float) -> _Segment:
        """Running for so long."""
        if not self._rate:
            return _Segment(_Way(1.0, seconds), (_NEVER,) * self._top)
        quiet = math.exp(-self._rate * seconds)
        failed = -math.expm1(-self._rate * seconds)
        spent = (failed - self._rate * seconds * quiet) / self._rate
        shares = [rate / self._rate for rate in self._per_s]
        fails = tuple(_Way(share * failed, share * spent) for share in shares)
        return _Segment(_Way(quiet, quiet * seconds), fails)

    @functools.cached_property
    def _back(self) -> tuple[_Segment, ...]:
        return tuple(self._restored(level) for level in range(1, self._top + 1))

    def _restored(self, level: int) -> _Segment:
        """Reading back a checkpoint of this level, until it is there or a higher one is needed."""
        run = self._run(self._restore_s[level - 1])
        is_top = level == self._top
        again, above = _NEVER, list(run.fails)
        for number in range(1, level + is_top):
            again, above[number - 1] = again.plus(run.fails[number - 1]), _NEVER
        if not is_top:
            above[level] = above[level].plus(above[level - 1])
            above[level - 1] = _NEVER
        tries = again.repeated()
        return _Segment(tries.then(run.well), tuple(tries.then(way) for way in above))

    def _recovered(self, level: int, once: _Segment) -> _Segment:
        """A segment whose failures up to ``level`` are made good by reading that level back."""
        back = self._back[level - 1]
        failed = _NEVER
        for way in once.fails[:level]:
            failed = failed.plus(way)
        tries = failed.then(back.well).repeated()
        fails = tuple(
            _NEVER if number < level else tries.then(way.plus(failed.then(back.fails[number])))
            for number, way in enumerate(once.fails)
        )
        return _Segment(tries.then(once.well), fails)


# --- schedules ------------------------------------------------------------------------------------


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


def nearest_schedule(tiers: Sequence[TierCosts]) -> Schedule:
    """The additive model's intervals, in whole numbers of saves."""
    interval_h, counts = _additive(tiers)
    return Schedule(
        interval_h=interval_h, counts=counts, wall_per_useful=wall_of(tiers, interval_h, counts)
    )


def best_schedule(tiers: Sequence[TierCosts]) -> Schedule:
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
    return schedule_of(tiers, found.counts, found.interval_h)


def schedule_of(tiers: Sequence[TierCosts], counts: Sequence[int], start_h: float) -> Schedule:
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
