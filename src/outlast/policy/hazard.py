"""How often a job fails just now, where failures come in bursts.

Most of the time a job is calm and fails at a rate that changes over weeks: its mean is learnt
(:mod:`outlast.plan.posterior`). Any failure may begin a burst, as when a market takes its machines
back or a cluster has its first hour: the next failure comes after minutes or seconds. How quickly
is not known beforehand: every rate of ``RATES`` is as probable as any other. While nothing happens,
the quick ones become improbable, and calm more probable; a failure makes those probable that
foretold it. So a burst is believed after two or three failures, and forgotten in a few of its own
intervals. It is the exact filter of a Markov-modulated Poisson process (e.g. Fischer &
Meier-Hellstern, "The Markov-modulated Poisson process cookbook", 1993), in closed form between two
failures:

- calm, a failure comes at the mean rate λ, and begins a burst with probability ``BEGINS``, as does
  the job's own beginning: the first hour of new machines is the worst;
- in a burst of rate r a failure comes at r, and the burst ends at ``ENDS`` r: after three failures
  in the mean, whatever r is; with probability ``CHANGES`` a failure changes the burst's rate.

Guarantees: how often it is asked between two failures changes the answer by less than a hundredth.
A failure counts for the calm's mean rate by the probability that it was no burst's: fifty in a
storm of minutes do not make the job save more often for weeks.

Rejected: the newest gaps' mean alone (it takes as long to forget a storm as the storm was long, and
one quick failure in months is taken for one); one rate with a short memory beside one with a long
one (as many memories are needed as there are kinds of storms).
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

from outlast.plan.posterior import Posterior

BEGINS: Final = 0.1
ENDS: Final = 0.5
CHANGES: Final = 0.05
MEMORY_H: Final = 500.0  # of calm: after so long a failure counts 1/e of what it did
RATES: Final = tuple(10 ** (number / 3) for number in range(-4, 11))  # per hour: 20 h to 1.7 s
FASTER: Final = 2.0  # times as quick as calm, at least: slower is no burst
EVIDENCE_H: Final = 1.0
NEGLIGIBLE: Final = 1e-12


class Hazard(msgspec.Struct, frozen=True):
    """What is known of a job's failures.

    Attributes:
        calm: of its rate outside of bursts.
        bursts: of each of ``RATES``, the probability that a burst of it goes on; what is missing
            from 1 is calm's. Empty: it is calm.
    """

    calm: Posterior = Posterior()
    bursts: tuple[float, ...] = ()

    @property
    def is_proven(self) -> bool:
        """Whether there is evidence: a failure, or ``EVIDENCE_H`` without one."""
        return self.calm.num_seen > NEGLIGIBLE or self.calm.seen_h >= EVIDENCE_H

    @property
    def calm_per_h(self) -> float:
        """Failures per hour, outside of bursts."""
        return self.calm.mean_per_h

    def burst_per_h(self, hours: float = 0.0) -> float:
        """Failures per hour that bursts add, if nothing happens for so many ``hours``."""
        if not self.bursts:
            return 0.0
        calm, bursts = self._after(hours)
        expected = math.fsum(rate * one for rate, one in zip(RATES, bursts, strict=True))
        return expected / (calm + math.fsum(bursts))

    def after(self, hours: float, *, failed: bool = False) -> Hazard:
        """What is known ``hours`` later, with a failure at their end or without."""
        calm, bursts = self._after(hours)
        whole = calm + math.fsum(bursts)
        calm, bursts = calm / whole, [one / whole for one in bursts]
        own, rate = 0.0, self.calm_per_h
        if failed:
            hits = [quick * one for quick, one in zip(RATES, bursts, strict=True)]
            whole = calm * rate + math.fsum(hits)
            own = calm * rate / whole
            bursts = _begun([one / whole for one in hits], own, rate)
        known = self.calm.after(max(hours - self._burst_h(hours), 0.0), 0, MEMORY_H)
        return Hazard(
            calm=msgspec.structs.replace(known, num_seen=known.num_seen + own),
            bursts=tuple(bursts) if max(bursts) > NEGLIGIBLE else (),
        )

    def _burst_h(self, hours: float) -> float:
        """How long of the next ``hours`` a burst is expected to go on."""
        return math.fsum(
            -one * math.expm1(-(1 + ENDS) * quick * hours) / ((1 + ENDS) * quick)
            for quick, one in zip(RATES, self.bursts, strict=False)
        )

    def _after(self, hours: float) -> tuple[float, list[float]]:
        """Calm and bursts ``hours`` later without a failure; what is missing is that of one."""
        bursts = self.bursts or (0.0,) * len(RATES)
        rate = self.calm_per_h
        lasts = math.exp(-rate * hours)
        calm = (1.0 - math.fsum(bursts)) * lasts
        left = []
        for quick, one in zip(RATES, bursts, strict=True):
            ending = (1 + ENDS) * quick
            stays = math.exp(-ending * hours)
            left.append(one * stays)
            # It may have ended at any moment, and calm has lasted from then on.
            if math.isclose(ending, rate, rel_tol=1e-9):
                calm += one * ENDS * quick * hours * lasts
            else:
                calm += one * ENDS * quick * (lasts - stays) / (ending - rate)
        return calm, left


def of_a_new_job() -> Hazard:
    """What is believed before anything was seen: it may begin in a burst."""
    calm = Hazard()
    return Hazard(bursts=tuple(_begun([0.0] * len(RATES), 1.0, calm.calm_per_h)))


def _begun(bursts: list[float], own: float, calm_per_h: float) -> list[float]:
    """Behind a failure that was calm's with the probability ``own``: it may have begun a burst."""
    possible = [rate > FASTER * calm_per_h for rate in RATES]
    share = (CHANGES * math.fsum(bursts) + BEGINS * own) / max(sum(possible), 1)
    return [
        (1 - CHANGES) * one + share * is_one for one, is_one in zip(bursts, possible, strict=True)
    ]
