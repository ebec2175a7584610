"""Several places to save, each against the failures that only it survives.

Waste per hour, additive: Σ Cᵢ/Tᵢ + Σ λᵢ(Tᵢ/2 + Rᵢ), and each Tᵢ ≈ √(2Cᵢ/λᵢ), where λᵢ is the rate
of the failures that need tier i (a process that died needs memory alone, a lost machine its peer, a
lost zone the object store). First order, like the linear model, and as good: no two failures at
once, no failure while another is mended. Moody et al. (SC'10) solve the Markov model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec


class TierCosts(msgspec.Struct, frozen=True, kw_only=True):
    """One tier.

    Attributes:
        checkpoint_h: C: the loop is blocked for so long by a save into it.
        failures_per_h: λ of the failures after which the job resumes from it.
        restore_h: R: to resume from it.
    """

    checkpoint_h: float
    failures_per_h: float
    restore_h: float = 0.0


def intervals_h(tiers: Sequence[TierCosts]) -> list[float]:
    """Each tier's interval √(2C/λ), hours; inf where nothing ever needs it."""
    return [
        math.sqrt(2 * tier.checkpoint_h / tier.failures_per_h)
        if tier.failures_per_h > 0
        else math.inf
        for tier in tiers
    ]


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
