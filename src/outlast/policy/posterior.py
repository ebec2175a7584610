"""Learn a rate that nobody knows: gamma-Poisson, from what was seen.

λ ~ Γ(a, b): with n failures in t hours it becomes Γ(a+n, b+t) (conjugate prior; e.g. Gelman et al.,
Bayesian Data Analysis, 2.6). The prior Γ(1, 10 h) says "about one in ten hours, and I would not bet
on it". Forgetting lets what was seen fade with time, so that a market that changed is believed
after a while: what is left after h hours of memory m weighs e^{-h/m}; the prior does not fade.
Holds for failures that come one by one. Where many share a moment, count moments.

Poisson and gamma distributions are a few lines of arithmetic here. Rejected: scipy, which takes
longer to import than ``outlast plan`` may take in all. The incomplete gamma function is its series
below a+1 and its continued fraction (Lentz) above, as everywhere (Abramowitz & Stegun 6.5.29,
6.5.31), good to about 1e-12; the tests compare with mpmath. Both take as many terms as √a, so that
above a million a normal approximation stands.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import msgspec

PRIOR_SHAPE: Final = 1.0
PRIOR_EXPOSURE_H: Final = 10.0
_TINY: Final = 1e-300
_CLOSE: Final = 1e-16
_LARGE: Final = 1e6  # shapes above it: Wilson and Hilferty's cube root, good to 1e-7 there
_HALVINGS_MOST: Final = 200  # a double has fewer


class Posterior(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a rate.

    Attributes:
        num_seen: failures, each weighing what is left of it.
        seen_h: hours in which they came, likewise.
        prior_shape: a₀, failures that the prior stands for.
        prior_exposure_h: b₀, hours that it stands for.
    """

    num_seen: float = 0.0
    seen_h: float = 0.0
    prior_shape: float = PRIOR_SHAPE
    prior_exposure_h: float = PRIOR_EXPOSURE_H

    @property
    def shape(self) -> float:
        """Failures: a = a₀ + n."""
        return self.prior_shape + self.num_seen

    @property
    def exposure_h(self) -> float:
        """Hours in which they came: b = b₀ + t."""
        return self.prior_exposure_h + self.seen_h

    @property
    def mean_per_h(self) -> float:
        """Expected failures per hour."""
        return self.shape / self.exposure_h

    def interval_per_h(self, probability: float = 0.9) -> tuple[float, float]:
        """Failures per hour, the interval that holds λ with this probability, equal tails."""
        tail = (1 - probability) / 2
        low = gamma_quantile(self.shape, self.exposure_h, tail)
        return low, gamma_quantile(self.shape, self.exposure_h, 1 - tail)

    def after(self, hours: float, num_failures: int, memory_h: float = math.inf) -> Posterior:
        """What is known ``hours`` later, with ``num_failures`` at their end.

        Args:
            hours: that were watched.
            num_failures: that were seen.
            memory_h: in which what was seen fades to 1/e; inf forgets nothing.
        """
        kept, new_h = forgetting(hours, memory_h)
        return msgspec.structs.replace(
            self,
            num_seen=self.num_seen * kept + num_failures,
            seen_h=self.seen_h * kept + new_h,
        )


def forgetting(hours: float, memory_h: float) -> tuple[float, float]:
    """What is left of what was seen before, and what the ``hours`` since then count for."""
    kept = math.exp(-hours / memory_h)
    return kept, hours if math.isinf(memory_h) else -memory_h * math.expm1(-hours / memory_h)


def gamma_cdf(shape: float, x: float) -> float:
    """Probability that a gamma variable of this shape and scale 1 is at most ``x``."""
    return _incomplete(shape, x)[0]


def gamma_quantile(shape: float, rate: float, probability: float) -> float:
    """The value that a gamma variable Γ(shape, rate) stays below with this probability, in (0, 1).

    Args:
        shape: a, above 0.
        rate: b, in units of 1/value.
        probability: of staying below.
    """
    most = shape + 40 * math.sqrt(shape) + 800
    least = most * 1e-300
    return crossing(lambda x: gamma_cdf(shape, x) - probability, least, most) / rate


def poisson_cdf(count: int, mean: float) -> float:
    """Probability of at most ``count`` events where ``mean`` are expected."""
    return 0.0 if count < 0 else _incomplete(count + 1.0, mean)[1]


def poisson_tail(count: int, mean: float) -> float:
    """Probability of more than ``count`` events where ``mean`` are expected."""
    return 1.0 if count < 0 else _incomplete(count + 1.0, mean)[0]


def poisson_quantile(probability: float, mean: float) -> int:
    """The smallest count that is not exceeded with at least this probability, in [0, 1)."""
    low, high = -1, 1
    while poisson_cdf(high, mean) < probability:
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if poisson_cdf(middle, mean) < probability else (low, middle)
    return high


def _incomplete(a: float, x: float) -> tuple[float, float]:
    """The regularised lower and upper incomplete gamma functions P(a, x) and Q(a, x)."""
    if x <= 0:
        return 0.0, 1.0
    if a > _LARGE:
        z = 3 * math.sqrt(a) * ((x / a) ** (1 / 3) - 1 + 1 / (9 * a))
        return math.erfc(-z / math.sqrt(2)) / 2, math.erfc(z / math.sqrt(2)) / 2
    front = math.exp(a * math.log(x) - x - math.lgamma(a))
    if x < a + 1:
        lower = front * _series(a, x)
        return lower, 1 - lower
    upper = front * _fraction(a, x)
    return 1 - upper, upper


def _series(a: float, x: float) -> float:
    term = total = 1 / a
    n = a
    while term > total * _CLOSE:
        n += 1
        term *= x / n
        total += term
    return total


def _fraction(a: float, x: float) -> float:
    b = x + 1 - a
    c = 1 / _TINY
    d = 1 / b
    h = d
    for i in range(1, 100_000):
        factor = -i * (i - a)
        b += 2
        d = 1 / _away(factor * d + b)
        c = _away(b + factor / c)
        h *= d * c
        if abs(d * c - 1) < _CLOSE * 10:
            break
    return h


def _away(value: float) -> float:
    return value if abs(value) > _TINY else _TINY


def crossing(function: Callable[[float], float], inside: float, outside: float) -> float:
    """Find the point between two positive ones at which ``function`` turns positive.

    By bisection between logarithms. Rejected: Newton and secants, because the functions that are
    asked are infinite beyond some point, where only the sign can be relied on.

    Args:
        function: at most 0 at ``inside``, positive from some point on the way to ``outside``;
            inf is positive.
        inside: where it is not positive.
        outside: where it is; given back when it is not.
    """
    if not function(outside) > 0:
        return outside
    for _ in range(_HALVINGS_MOST):
        middle = math.sqrt(inside) * math.sqrt(outside)
        if middle in (inside, outside):
            break
        if function(middle) > 0:
            outside = middle
        else:
            inside = middle
    return inside
