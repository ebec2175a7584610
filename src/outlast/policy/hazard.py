"""How often a job fails: in the mean, and just now, where failures come in bursts.

The mean rate is unknown, and learned (:class:`Posterior`, gamma-Poisson). λ ~ Γ(a, b): with n
failures in t hours it becomes Γ(a+n, b+t) (conjugate prior; e.g. Gelman et al., Bayesian Data
Analysis, 2.6). The prior Γ(1, 10 h) says "about one in ten hours, and I would not bet on it".
Forgetting lets what was seen fade with time, so that a market that changed is believed after a
while: what is left after h hours of memory m weighs e^{-h/m}; the prior does not fade. It holds for
failures that come one by one. Where many share a moment, count moments.

Most of the time a job is calm and fails at a mean rate that changes over weeks. Any failure may
begin a burst (:class:`Hazard`), as when a market takes its machines back or a cluster has its first
hour: the next failure comes after minutes or seconds. How quickly is not known beforehand: each of
``KINDS`` is as probable as any other. While nothing happens, the quick ones become improbable, and
calm more probable; a failure makes those probable that foretold it. So a burst is believed after
two or three failures, and forgotten in a few of its own intervals. It is the exact filter of a
Markov-modulated Poisson process (e.g. Fischer & Meier-Hellstern, "The Markov-modulated Poisson
process cookbook", 1993), in closed form between two failures:

- calm, a failure comes at the mean rate λ, and begins a burst with probability ``BEGINS``, as does
  the job's own beginning: the first hour of new machines is the worst;
- in a burst of rate r a failure comes at r, and the burst ends at ``ENDS`` r: after three failures
  in the mean, whatever r is; or, where it is a storm, after fifty (``STORM_ENDS``). With
  probability ``CHANGES`` a failure changes what burst it is.

Guarantees: how often it is asked between two failures changes the answer by less than a hundredth.
A failure counts for the calm's mean rate by the probability that it was no burst's: fifty in a
storm of minutes do not make the job save more often for weeks.

Rejected: bursts of three failures alone (in a storm of hundreds, each pause of a few intervals was
taken for its end, and twice as much was lost); the newest gaps' mean alone (it takes as long to
forget a storm as the storm was long, and one quick failure in months is taken for one); one rate
with a short memory beside one with a long one (as many memories are needed as there are kinds of
storms).

Poisson and gamma distributions are a few lines of arithmetic here. Rejected: scipy, which takes
longer to import than ``outlast plan`` may take in all. The incomplete gamma function is its series
below a+1 and its continued fraction (Lentz) above, as everywhere (Abramowitz & Stegun 6.5.29,
6.5.31), good to about 1e-12; the tests compare with mpmath. Both take as many terms as √a, so that
above a million a normal approximation stands.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, NamedTuple, overload

import msgspec

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Numbers = npt.NDArray[np.float64]  # one, or one of each job

PRIOR_SHAPE: Final = 1.0
PRIOR_EXPOSURE_H: Final = 10.0
_TINY: Final = 1e-300
_CLOSE: Final = 1e-16
_LARGE: Final = 1e6  # shapes above it: Wilson and Hilferty's cube root, good to 1e-7 there
_HALVINGS_MOST: Final = 200  # a double has fewer
BEGINS: Final = 0.1
CHANGES: Final = 0.05
MEMORY_H: Final = 500.0  # of calm: after so long a failure counts 1/e of what it did
ENDS: Final = 0.5  # times for each failure: how often a burst ends
STORM_ENDS: Final = 0.02  # likewise, a storm
_RATES: Final = tuple(10 ** (number / 3) for number in range(-4, 11))  # per hour: 20 h to 1.7 s
SLOWEST_STORM: Final = 4.0  # per hour: what is slower is calm's
# The rate of each and how soon it ends, the slowest first.
KINDS: Final = tuple(
    (rate, ends)
    for rate in _RATES
    for ends in (ENDS, STORM_ENDS)
    if ends == ENDS or rate > SLOWEST_STORM
)
RATES: Final = tuple(rate for rate, _ in KINDS)
FASTER: Final = 2.0  # times as quick as calm, at least: slower is no burst
EVIDENCE_H: Final = 1.0
STORM_LEAST: Final = 3  # failures: two may be chance
NEGLIGIBLE: Final = 1e-12
NEAR: Final = 1e-6  # rates that differ by less are told apart by so much
LARGEST: Final = 600.0  # exponent


# --- in the mean ---------------------------------------------------------------------------------


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


# --- just now: bursts ----------------------------------------------------------------------------


# Calm's rate is unknown by decades, as a burst's is: one in 10 h, but three hours outweigh it.
PRIOR: Final = Posterior(prior_shape=0.3, prior_exposure_h=3.0)


class Hazard(msgspec.Struct, frozen=True):
    """What is known of a job's failures.

    Attributes:
        calm: of its rate outside of bursts.
        bursts: of each of ``KINDS``, the probability that a burst of it goes on; what is missing
            from 1 is calm's. Empty: it is calm.
    """

    calm: Posterior = PRIOR
    bursts: tuple[float, ...] = ()

    @property
    def is_proven(self) -> bool:
        """Whether there is evidence; see :func:`is_evidence`."""
        return bool(is_evidence(self.calm.num_seen, self.calm.seen_h))

    @property
    def calm_per_h(self) -> float:
        """Failures per hour, outside of bursts."""
        return self.calm.mean_per_h

    def burst_per_h(self, hours: float = 0.0) -> float:
        """Failures per hour that bursts add, if nothing happens for so many ``hours``."""
        return float(self._quiet().adds_per_h(hours)) if self.bursts else 0.0

    def after(self, hours: float, *, failed: bool = False) -> Hazard:
        """What is known ``hours`` later, with a failure at their end or without."""
        after = self._quiet().after(hours, failed=failed)
        known = self.calm.after(max(hours - float(after.burst_h), 0.0), 0, MEMORY_H)
        bursts = after.bursts.tolist()
        return Hazard(
            calm=msgspec.structs.replace(known, num_seen=known.num_seen + float(after.own)),
            bursts=tuple(bursts) if max(bursts) > NEGLIGIBLE else (),
        )

    def is_in_burst(self, hours: float) -> bool:
        """Whether a failure after so many ``hours`` is more probably a burst's than calm's."""
        return float(self._quiet().after(hours, failed=True).own) < 0.5

    def _quiet(self) -> Quiet:
        import numpy as np  # what tells of no failure is quick without it

        bursts = np.array(self.bursts) if self.bursts else np.zeros(len(KINDS))
        return Quiet(np.array(KINDS).T, bursts, np.float64(self.calm_per_h))


@overload
def is_evidence(num_seen: float, seen_h: float) -> bool: ...
@overload
def is_evidence(num_seen: Numbers, seen_h: Numbers) -> npt.NDArray[np.bool_]: ...
def is_evidence(num_seen: Any, seen_h: Any) -> Any:
    """Whether something is known: of a failure, or of ``EVIDENCE_H`` without one; of many, of each.

    Args:
        num_seen: failures of calm.
        seen_h: hours of it.
    """
    return (num_seen > NEGLIGIBLE) | (seen_h >= EVIDENCE_H)


@functools.cache
def of_a_new_job() -> Hazard:
    """What is believed before anything was seen: it may begin in a burst, as behind any failure."""
    # Without numpy: whoever looks at a ledger asks for it, and most need no more.
    possible = [rate > FASTER * PRIOR.mean_per_h for rate in RATES]
    share = BEGINS / sum(possible)
    return Hazard(bursts=tuple(share * one for one in possible))


def storms(gaps_h: Iterable[float]) -> list[tuple[int, int]]:
    """The first and the last failure of each storm, as numbers from 0.

    Args:
        gaps_h: hours of running before each failure.

    Returns:
        Failures that were more probably a burst's than calm's, with the one that began the burst:
        three at least.
    """
    known, found = Hazard(), list[tuple[int, int]]()
    for number, gap_h in enumerate(gaps_h):
        if number and known.is_in_burst(gap_h):
            first = found.pop()[0] if found and found[-1][1] == number - 1 else number - 1
            found.append((first, number))
        known = known.after(gap_h, failed=True)
    return [(first, last) for first, last in found if last - first >= STORM_LEAST - 1]


class After(NamedTuple):
    """What bursts are like after some time.

    Attributes:
        bursts: of each rate, the probability that a burst of it goes on.
        burst_h: of the time, how long a burst was expected to go on.
        own: the probability that it has ended with a failure that was no burst's.
    """

    bursts: Numbers
    burst_h: Numbers
    own: Numbers


class Quiet:
    """Bursts from some moment on, while nothing happens; of one job, or of many side by side.

    All chances are relative to that of a calm which has lasted (e^(-λh)): a number that was too
    small for a float would be divided by otherwise, days after the last failure of many.

    Args:
        kinds: of bursts: their rates, per hour, and how soon they end; of many jobs columns.
        bursts: the probability of each; of many jobs a column of each job.
        calm_per_h: failures per hour outside of bursts; of many jobs, of each.
    """

    def __init__(self, kinds: Numbers, bursts: Numbers, calm_per_h: Numbers | np.float64) -> None:
        import numpy as np

        rates, ends = kinds
        self._rates, self._bursts, self._calm_per_h = rates, bursts, calm_per_h
        self._gone_per_h = (1 + ends) * rates
        apart = self._gone_per_h - calm_per_h
        is_near = abs(apart) < NEAR * rates
        if is_near.any():
            apart = np.where(is_near, NEAR * rates, apart)
        self._apart = apart
        # A burst may have ended at any moment, and calm has lasted from then on.
        self._ended = bursts * (ends * rates) / apart
        self._lasting = 1.0 - bursts.sum(axis=0) + self._ended.sum(axis=0)

    def adds_per_h(self, hours: Numbers | float) -> Numbers:
        """Failures per hour that bursts add, ``hours`` later."""
        import numpy as np

        stays = self._stays(hours)
        whole = self._lasting + ((self._bursts - self._ended) * stays).sum(axis=0)
        return np.asarray((self._rates * self._bursts * stays).sum(axis=0) / whole)

    def after(self, hours: Numbers | float, *, failed: bool) -> After:
        """What is known ``hours`` later, with a failure at their end or without."""
        import numpy as np

        stays = self._stays(hours)
        calm = np.maximum(self._lasting - (self._ended * stays).sum(axis=0), 0.0)
        left = self._bursts * stays
        gone = -np.expm1(-(self._apart + self._calm_per_h) * hours)
        burst_h = (self._bursts * gone / self._gone_per_h).sum(axis=0)
        if failed:
            calm, left = calm * self._calm_per_h, left * self._rates
        whole = calm + left.sum(axis=0)
        left, own = left / whole, calm / whole
        if failed:
            return After(self._begun(left, own), burst_h, own)
        return After(left, burst_h, np.zeros_like(own))

    def of(self, jobs: npt.NDArray[np.intp]) -> Quiet:
        """The same of some of the jobs."""
        some = copy.copy(self)
        for name in ("_bursts", "_calm_per_h", "_apart", "_ended", "_lasting"):
            setattr(some, name, getattr(self, name)[..., jobs])
        return some

    def _stays(self, hours: Numbers | float) -> Numbers:
        """How much more probable it is that a burst goes on than that calm has lasted."""
        import numpy as np

        return np.asarray(np.exp(np.minimum(-self._apart * hours, LARGEST)))

    def _begun(self, bursts: Numbers, own: Numbers) -> Numbers:
        """Behind a failure that was calm's with the probability ``own``: it may begin a burst."""
        import numpy as np

        possible = self._rates > FASTER * self._calm_per_h
        share = CHANGES * bursts.sum(axis=0) + BEGINS * own
        share = share / np.maximum(possible.sum(axis=0), 1)
        return np.asarray((1 - CHANGES) * bursts + share * possible)
