"""Find how often to save, and how many hours a useful hour then takes.

Models, each with the interval that is best by itself:

- linear: saves and failures each lose their share, and no failure comes while another is mended:
  W = (1 + C/T) / (1 - λ·loss) with loss = (1-q)(T/2 + L) + qE + R + D per failure. A first-order
  approximation: good to a few percent while λ(T+C) ≤ 0.3, and infinite once 1 - λ·loss ≤ 0.
- Young (CACM 17(9), 1974): T = √(2CM), for C much smaller than M.
- Daly (FGCS 22(3), 2006), higher order, for C < 2M.
- exact for exponential failures, which also strike while saving and while restoring:
  W = λ[(M+D)e^{R/M} + qE] · e^{μL}(e^{μ(T+C)} - 1) / (μT), μ = λ(1-q), M = 1/λ. With q = L = 0
  that is (M+D)e^{R/M}(e^{(T+C)/M} - 1)/T (Daly's complete model). Its best
  T = [1 + W₀(-e^{-1-μC})]/μ is moved by C and μ alone, neither by R nor by D.

Where the exact one with lag and notices comes from: a failure without notice (rate μ) starts the
segment of T+C anew, which takes (e^{μ(T+C)} - 1)/μ hours of running for each that is completed.
With a lag, what counts is durable L after its snapshot, so that between two such failures only
those segments count that were complete L before: e^{μL} times the hours. Each failure of either
kind brings D, and R until one succeeds, (M+D)e^{R/M} - M in all; a noticed one the flush E besides.

Where there are several places to save, :func:`intervals_h` takes each as if alone.

Rejected: minimising numerically where there is a closed form; Lambert's W by its power series,
which is slow at the branch point where all real cases are. All is homogeneous in time: hours here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec

LINEAR_RANGE: Final = 0.3  # λ(T+C) above which the linear model should not be believed


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """What saving and failing cost a job.

    Attributes:
        checkpoint_h: C (or s): the loop is blocked by one checkpoint for so long.
        restore_h: R: restore and rejoin.
        detect_h: D: until a failure is noticed.
        lag_h: L: from a snapshot until it is durable.
        flush_probability: q: that a failure comes with a notice that ends in a durable flush.
        flush_h: E: what such a flush takes.
    """

    checkpoint_h: float
    restore_h: float = 0.0
    detect_h: float = 0.0
    lag_h: float = 0.0
    flush_probability: float = 0.0
    flush_h: float = 0.0


class TierCosts(msgspec.Struct, frozen=True, kw_only=True):
    """What one tier costs, and how often it is needed.

    Attributes:
        checkpoint_h: C: the loop is blocked for so long by a save into it.
        failures_per_h: λ of the failures after which the job resumes from it.
        restore_h: R: to resume from it.
    """

    checkpoint_h: float
    failures_per_h: float
    restore_h: float = 0.0


class HourParts(msgspec.Struct, frozen=True, kw_only=True):
    """Where the hours of one useful hour go; they add up to the exact model's wall hours."""

    useful_h: float
    saving_h: float
    lost_h: float
    flushing_h: float
    detecting_h: float
    restoring_h: float

    @property
    def wall_h(self) -> float:
        """All of it."""
        return math.fsum(msgspec.structs.astuple(self))


def fatal_per_h(costs: Costs, failures_per_h: float) -> float:
    """μ = λ(1-q): failures per hour that lose work."""
    return failures_per_h * (1 - costs.flush_probability)


def young_h(costs: Costs, failures_per_h: float) -> float:
    """Young's interval √(2C/λ), hours; for failures that lose work, so never when q = 1."""
    fatal = fatal_per_h(costs, failures_per_h)
    return math.sqrt(2 * costs.checkpoint_h / fatal) if fatal > 0 else math.inf


def asynchronous_h(costs: Costs, failures_per_h: float) -> float:
    """√(2sM), and no shorter than the lag: only one save is in flight. Hours."""
    return max(young_h(costs, failures_per_h), costs.lag_h)


def daly_h(costs: Costs, failures_per_h: float) -> float:
    """Daly's interval, hours: √(2CM)[1 + ⅓√(C/2M) + (C/2M)/9] - C for C < 2M, else M."""
    fatal = fatal_per_h(costs, failures_per_h)
    if fatal <= 0:
        return math.inf
    half = costs.checkpoint_h * fatal / 2  # C/2M
    if half >= 1:
        return 1 / fatal
    series = 1 + math.sqrt(half) / 3 + half / 9
    return young_h(costs, failures_per_h) * series - costs.checkpoint_h


def linear_best_h(costs: Costs, failures_per_h: float) -> float:
    """The linear model's own optimum -C + √(C² + 2C(1 - λF)/(λ(1-q))), hours; nan if none.

    F is what a failure costs whatever T is: (1-q)L + qE + R + D.
    """
    fatal = fatal_per_h(costs, failures_per_h)
    if fatal <= 0:
        return math.inf
    room = 1 - failures_per_h * _fixed_loss_h(costs)
    if room <= 0:
        return math.nan
    cost = costs.checkpoint_h
    return -cost + math.sqrt(cost**2 + 2 * cost * room / fatal)


def exact_best_h(costs: Costs, failures_per_h: float) -> float:
    """The exact model's optimum [1 + W₀(-e^{-1-μC})]/μ, hours.

    Solved as w - (e^w - 1) + μC = 0 for w = ln(-W₀): Newton comes from the left without ever
    leaving it, and loses no digits where W₀ is near -1.
    """
    fatal = fatal_per_h(costs, failures_per_h)
    if fatal <= 0:
        return math.inf
    cost = costs.checkpoint_h * fatal
    if cost <= 0:
        return 0.0
    w = -math.sqrt(2 * cost)
    for _ in range(64):
        step = (w - math.expm1(w) + cost) / math.expm1(w)
        w += step
        if abs(step) <= 1e-15 * abs(w):
            break
    return -math.expm1(w) / fatal


def best_h(costs: Costs, failures_per_h: float) -> float:
    """The exact optimum, and no shorter than the lag: only one save is in flight. Hours.

    The exact model's hours rise on either side of its optimum, so that the lag is the best of the
    intervals that are left where it is longer.
    """
    return max(exact_best_h(costs, failures_per_h), costs.lag_h)


def linear_wall(costs: Costs, failures_per_h: float, interval_h: float) -> float:
    """Wall hours per useful hour in the linear model; inf when the job makes no progress."""
    if math.isnan(interval_h):
        return math.inf
    stays = 1 - costs.flush_probability
    # Never saving is no loss where every failure comes with a flush, and endless otherwise.
    rewound_h = 0.0 if stays <= 0 else stays * interval_h / 2
    progress = 1 - failures_per_h * (rewound_h + _fixed_loss_h(costs))
    if progress <= 0:
        return math.inf
    return (1 + _per(costs.checkpoint_h, interval_h)) / progress


def exact_wall(costs: Costs, failures_per_h: float, interval_h: float) -> float:
    """Wall hours per useful hour when failures are exponential and strike at any time."""
    if math.isnan(interval_h):
        return math.inf
    return exact_parts(costs, failures_per_h, interval_h).wall_h


def exact_parts(costs: Costs, failures_per_h: float, interval_h: float) -> HourParts:
    """Where the hours go, per useful hour; what is endless is inf."""
    saving_h = _per(costs.checkpoint_h, interval_h)
    try:
        running_h = _running_h(costs, fatal_per_h(costs, failures_per_h), interval_h)
        again = math.expm1(failures_per_h * costs.restore_h)  # of a failure's, restores that fail
    except OverflowError:
        running_h = again = math.inf
    num_failures = failures_per_h * running_h
    lost_h = math.inf if math.isinf(running_h) else max(running_h - 1 - saving_h, 0.0)
    return HourParts(
        useful_h=1.0,
        saving_h=saving_h,
        lost_h=lost_h,
        flushing_h=_times(num_failures * costs.flush_probability, costs.flush_h),
        detecting_h=_times(num_failures * (1 + again), costs.detect_h),
        restoring_h=_times(num_failures, _times(again, 1 / failures_per_h)),
    )


def intervals_h(tiers: Sequence[TierCosts]) -> list[float]:
    """Each tier's interval √(2C/λ), hours; inf where nothing ever needs it."""
    return [
        math.sqrt(2 * tier.checkpoint_h / tier.failures_per_h)
        if tier.failures_per_h > 0
        else math.inf
        for tier in tiers
    ]


def wrong_rate_ratio(times: float) -> float:
    """Waste against the least possible when the rate is off by a factor: (√x + 1/√x)/2."""
    return (math.sqrt(times) + 1 / math.sqrt(times)) / 2


def _running_h(costs: Costs, fatal_per_h: float, interval_h: float) -> float:
    """Hours of running, saving and running once more, per useful hour; OverflowError for many."""
    if fatal_per_h <= 0:
        return 1 + _per(costs.checkpoint_h, interval_h)
    if interval_h == 0:
        return math.inf if costs.checkpoint_h > 0 else math.exp(fatal_per_h * costs.lag_h)
    if math.isinf(interval_h):
        return math.inf
    ran = math.expm1(fatal_per_h * (interval_h + costs.checkpoint_h)) / (fatal_per_h * interval_h)
    return ran * math.exp(fatal_per_h * costs.lag_h)


def _fixed_loss_h(costs: Costs) -> float:
    flushed = costs.flush_probability
    rest_h = costs.restore_h + costs.detect_h
    return (1 - flushed) * costs.lag_h + flushed * costs.flush_h + rest_h


def _per(cost: float, interval: float) -> float:
    """A cost for each interval; nothing costs nothing, however often."""
    if cost == 0:
        return 0.0
    return cost / interval if interval > 0 else math.inf


def _times(count: float, cost: float) -> float:
    """A product in which nothing, however often, is nothing."""
    return count * cost if cost > 0 and count > 0 else 0.0
