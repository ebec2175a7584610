"""How long a fixed number of restarts lasts.

A launcher that gives up after ``max_restarts`` (torchrun's ``--max-restarts``) spends one at each
failure, whoever's fault it was: P(given up by w hours) = P(Poisson(λw) > max_restarts).
"""

from __future__ import annotations

from outlast.plan.distributions import poisson_quantile, poisson_tail


def gives_up(failures_per_h: float, wall_h: float, max_restarts: int) -> float:
    """Probability that the budget is spent before ``wall_h`` hours are over."""
    return poisson_tail(max_restarts, failures_per_h * wall_h)


def mean_end_h(failures_per_h: float, max_restarts: int) -> float:
    """Mean hours until the failure that finds no restart left: (max_restarts + 1)/λ."""
    return (max_restarts + 1) / failures_per_h


def needed(failures_per_h: float, wall_h: float, *, sufficing: float) -> int:
    """The smallest budget that lasts ``wall_h`` hours with probability ``sufficing``."""
    return poisson_quantile(sufficing, failures_per_h * wall_h)
