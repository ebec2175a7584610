"""A rate that nobody knows: gamma-Poisson, learnt from what was seen.

λ ~ Γ(a, b): with n failures in t hours it becomes Γ(a+n, b+t) (conjugate prior; e.g. Gelman et al.,
Bayesian Data Analysis, 2.6). The prior Γ(1, 10 h) says "about one in ten hours, and I would not bet
on it". Forgetting lets what was seen fade with time, so that a market that changed is believed
after a while: what is left after h hours of memory m weighs e^{-h/m}; the prior does not fade.

Holds for failures that come one by one. Where many share a moment, count moments.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

from outlast.plan.distributions import gamma_quantile

PRIOR_SHAPE: Final = 1.0
PRIOR_EXPOSURE_H: Final = 10.0


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
