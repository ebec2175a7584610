"""How often a job fails just now, where failures come in bursts.

Most of the time a job is calm and fails at a rate that changes over weeks: its mean is learnt
(:mod:`outlast.policy.posterior`). Any failure may begin a burst, as when a market takes its
machines back or a cluster has its first hour: the next failure comes after minutes or seconds. How
quickly is not known beforehand: each of ``KINDS`` is as probable as any other. While nothing
happens, the quick ones become improbable, and calm more probable; a failure makes those probable
that foretold it. So a burst is believed after two or three failures, and forgotten in a few of its
own intervals. It is the exact filter of a Markov-modulated Poisson process (e.g. Fischer &
Meier-Hellstern, "The Markov-modulated Poisson process cookbook", 1993), in closed form between two
failures:

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
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, NamedTuple, overload

import msgspec

from outlast.policy.posterior import Posterior

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Numbers = npt.NDArray[np.float64]  # one, or one of each job

BEGINS: Final = 0.1
CHANGES: Final = 0.05
MEMORY_H: Final = 500.0  # of calm: after so long a failure counts 1/e of what it did
# Calm's rate is unknown by decades, as a burst's is: one in 10 h, but three hours outweigh it.
PRIOR: Final = Posterior(prior_shape=0.3, prior_exposure_h=3.0)
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
