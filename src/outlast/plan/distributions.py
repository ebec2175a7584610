"""Poisson and gamma distributions in a few lines of arithmetic.

scipy has them, and takes longer to import than ``outlast plan`` may take in all; nothing else here
needs it. The incomplete gamma function is its series below a+1 and its continued fraction (Lentz)
above, as everywhere (Abramowitz & Stegun 6.5.29, 6.5.31), good to about 1e-12; the tests compare
with mpmath. Both take as many terms as √a, so that above a million a normal approximation stands.
"""

from __future__ import annotations

import math
from typing import Final

from outlast.plan.crossing import crossing

_TINY: Final = 1e-300
_CLOSE: Final = 1e-16
_LARGE: Final = 1e6  # shapes above it: Wilson and Hilferty's cube root, good to 1e-7 there


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
