"""Draw when things fail, and find the law of times that were recorded.

Drawn are gaps between failures of a job, lifetimes of machines, and what happens to whole fleets.
A law is asked for some gaps at once; all times are seconds. What a job of many machines sees is the
superposition of theirs: with a constant hazard a Poisson process at the summed rate, however many
there are; with any other it is only drawn right from the machines themselves (:func:`fleet`). These
are of any age at the start, as in a fleet that has been up for long: so the mean rate is the law's
at any moment. Rejected: all new at the start, which for a Weibull shape of 0.5 can be several times
as many failures in the first month as the rate says.

A law is found by the largest likelihood, from times of which some did not end while anybody looked
(right-censored). A lifetime that was cut off counts with what it is known to have lasted; leaving
it out, or taking its end for a failure, makes machines worse than they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from outlast.errors import ConfigError

Times = npt.NDArray[np.float64]
HOUR_S: Final = 3600.0
_ROUNDS: Final = 200
_EXACT: Final = 1e-12

# Hazard per hour of a preemptible machine from each age on, in hours: early deaths, a quiet day,
# the end at 24 hours. From the 1,442 lifetimes of Kadupitiya et al. (2020): failures over lifetime.
BATHTUB_HOURS: Final = (0.0, 0.25, 0.5, 1.0, 2.0, 3.0, 6.0, 12.0, 18.0, 21.0, 24.0, 24.5)
BATHTUB_PER_HOUR: Final = (0.92, 0.47, 0.31, 0.22, 0.1, 0.045, 0.037, 0.02, 0.013, 0.025, 3.3, 6.1)


class Law(Protocol):
    """How long until something fails that has just begun."""

    def draw(self, chance: np.random.Generator, count: int) -> Times:
        """So many times in seconds."""


class Aged(Law, Protocol):
    """A law that is also known for what has been there for any time."""

    def rest(self, chance: np.random.Generator, count: int) -> Times:
        """How long so many will still last that are found at any moment; seconds.

        A moment is in a lifetime the more likely the longer it is, and anywhere in it alike.
        """


class Exponential:
    """A constant hazard: what is old fails as often as what is new."""

    def __init__(self, mean_s: float) -> None:
        self.mean_s = mean_s

    def draw(self, chance: np.random.Generator, count: int) -> Times:
        """So many times in seconds."""
        return chance.exponential(self.mean_s, count)

    def rest(self, chance: np.random.Generator, count: int) -> Times:
        """As long as what is new."""
        return self.draw(chance, count)


class Weibull:
    """A hazard that falls with age where ``shape`` is below one, and grows where it is above."""

    def __init__(self, mean_s: float, shape: float) -> None:
        self.scale_s, self.shape = mean_s / math.gamma(1 + 1 / shape), shape

    def draw(self, chance: np.random.Generator, count: int) -> Times:
        """So many times in seconds."""
        return self.scale_s * chance.weibull(self.shape, count)

    def rest(self, chance: np.random.Generator, count: int) -> Times:
        """Of a lifetime x drawn by x·density, a uniform part: (x/scale)^shape ~ Γ(1 + 1/shape)."""
        whole = chance.standard_gamma(1 + 1 / self.shape, count) ** (1 / self.shape)
        return np.asarray(self.scale_s * whole * chance.random(count))


class HazardByAge:
    """Any hazard that is constant between given ages; the last one goes on for ever.

    Args:
        ages_s: where each hazard begins, from 0.
        per_s: hazard from there on.
    """

    def __init__(self, ages_s: Sequence[float], per_s: Sequence[float]) -> None:
        self._ages_s, self._per_s = np.asarray(ages_s), np.asarray(per_s)
        steps = np.diff(self._ages_s) * self._per_s[:-1]
        self._summed = np.concatenate([[0.0], np.cumsum(steps)])

    def draw(self, chance: np.random.Generator, count: int) -> Times:
        """So many times in seconds: where the summed hazard reaches an exponential draw."""
        wanted = chance.exponential(1.0, count)
        within = np.searchsorted(self._summed, wanted, side="right") - 1
        rest = wanted - self._summed[within]
        return np.asarray(self._ages_s[within] + rest / self._per_s[within])

    def rest(self, chance: np.random.Generator, count: int) -> Times:
        """Where the integral of what survives each age, a share of the mean, reaches a uniform."""
        wanted = chance.random(count) * self.mean_s
        integral = np.concatenate([[0.0], np.cumsum(self._pieces_s)])
        within = np.minimum(
            np.searchsorted(integral, wanted, side="right") - 1, len(self._ages_s) - 1
        )
        # Within a piece ∫S = S(start)(1 - e^{-hτ})/h; what is needed is τ.
        over_s = (wanted - integral[within]) * np.exp(self._summed[within])
        per_s = self._per_s[within]
        with np.errstate(divide="ignore", invalid="ignore"):
            since_s = np.where(
                per_s > 0, -np.log1p(-np.minimum(over_s * per_s, 1.0)) / per_s, over_s
            )
        return np.asarray(self._ages_s[within] + since_s)

    @property
    def mean_s(self) -> float:
        """Of a lifetime: the integral of the share that survives each age."""
        return math.fsum(self._pieces_s)

    @property
    def _pieces_s(self) -> Times:
        """That integral from each age to the next."""
        lasts_s = np.append(np.diff(self._ages_s), math.inf)
        with np.errstate(divide="ignore", invalid="ignore"):
            within = np.where(
                self._per_s > 0, -np.expm1(-self._per_s * lasts_s) / self._per_s, lasts_s
            )
        return np.asarray(np.exp(-self._summed) * within)


class Recorded:
    """Lifetimes that were recorded, any of them as likely as the other."""

    def __init__(self, lifetimes_s: Sequence[float]) -> None:
        self._lifetimes_s = np.asarray(lifetimes_s)

    def draw(self, chance: np.random.Generator, count: int) -> Times:
        """So many times in seconds."""
        return np.asarray(chance.choice(self._lifetimes_s, count))

    def rest(self, chance: np.random.Generator, count: int) -> Times:
        """A uniform part of one, the longer it is the more likely."""
        share = self._lifetimes_s / self._lifetimes_s.sum()
        return np.asarray(chance.choice(self._lifetimes_s, count, p=share) * chance.random(count))


def bathtub(mean_s: float | None = None) -> HazardByAge:
    """A preemptible machine's, as it was recorded or with all ages stretched to another mean."""
    as_recorded = HazardByAge(
        [hour * HOUR_S for hour in BATHTUB_HOURS], [rate / HOUR_S for rate in BATHTUB_PER_HOUR]
    )
    if mean_s is None:
        return as_recorded
    times = mean_s / as_recorded.mean_s
    return HazardByAge(
        [hour * HOUR_S * times for hour in BATHTUB_HOURS],
        [rate / HOUR_S / times for rate in BATHTUB_PER_HOUR],
    )


def fleet(
    law: Aged, machines: int, duration_s: float, chance: np.random.Generator
) -> tuple[Times, npt.NDArray[np.int64]]:
    """Moments at which machines go, each replaced at once by a new one, and which one it was.

    At the start they are of any age.
    """
    at_s, who = [], []
    number = np.arange(machines)
    now_s = law.rest(chance, machines)
    while len(number):
        is_within = now_s < duration_s
        now_s, number = now_s[is_within], number[is_within]
        at_s.append(now_s)
        who.append(number)
        now_s = now_s + law.draw(chance, len(number))
    moments, numbers = np.concatenate(at_s), np.concatenate(who)
    order = np.argsort(moments, kind="stable")
    return moments[order], numbers[order]


def zone_reclaims(
    zones: int, per_hour: float, duration_s: float, chance: np.random.Generator
) -> list[tuple[float, int]]:
    """Moments at which a zone takes its machines back, and which zone; each alone, as often."""
    found = []
    for zone in range(zones):
        at_s = 0.0
        while (at_s := at_s + chance.exponential(HOUR_S / per_hour)) < duration_s:
            found.append((at_s, zone))
    return sorted(found)


class Fitted(msgspec.Struct, frozen=True, kw_only=True):
    """A Weibull law; with ``shape`` 1 it is the exponential one.

    Attributes:
        scale_s: time by which 63.2 % have failed.
        shape: below one, what is old fails less often.
        mean_s: of the law.
        failures, censored: times that it comes from.
    """

    scale_s: float
    shape: float
    mean_s: float
    failures: int
    censored: int


def fitted_weibull(times_s: Sequence[float], failed: Sequence[bool]) -> Fitted:
    """The Weibull law that these times are most likely under.

    Args:
        times_s: how long each lasted, or was seen to last; above 0.
        failed: whether it failed then; otherwise nobody looked any longer.

    Raises:
        ConfigError: nothing failed, or a time is not above 0.
    """
    times, did = np.asarray(times_s, dtype=float), np.asarray(failed, dtype=bool)
    num_failures = int(np.sum(failed))
    if not num_failures:
        raise ConfigError("nothing failed in these times: they tell no rate, only how low it is")
    if not np.all(times > 0):
        raise ConfigError("a time of 0 s or less is no lifetime; leave it out")
    logs = np.log(times / times.max())  # at most 0, so that no power overflows
    mean_log = float(logs[did].mean())
    low, high = 1e-3, 1e3

    def slope(shape: float) -> float:
        weights = np.exp(shape * logs)
        return float((weights @ logs) / weights.sum() - 1 / shape - mean_log)

    for _ in range(_ROUNDS):  # it grows with the shape: halve
        shape = (low * high) ** 0.5
        if slope(shape) > 0:
            high = shape
        else:
            low = shape
        if high / low - 1 < _EXACT:
            break
    scale_s = float(times.max() * (np.exp(shape * logs).sum() / num_failures) ** (1 / shape))
    return Fitted(
        scale_s=scale_s,
        shape=shape,
        mean_s=scale_s * math.gamma(1 + 1 / shape),
        failures=num_failures,
        censored=len(times) - num_failures,
    )
