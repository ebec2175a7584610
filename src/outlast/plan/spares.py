"""How many machines to hold in reserve.

Machines under repair are Poisson with mean N·λ_node·t_repair (Palm's theorem: whatever the repair
times' distribution), so the spares that suffice with probability 1-ε are its quantile. Holds while
a spare fails no more often than a machine in use, and repairs do not wait for one another.
"""

from __future__ import annotations

from outlast.plan.distributions import poisson_quantile, poisson_tail


def num_spares(failures_per_h: float, repair_h: float, *, sufficing: float) -> int:
    """The fewest spares that suffice with probability ``sufficing``.

    Args:
        failures_per_h: of all machines together, N·λ_node.
        repair_h: mean hours until a failed machine is back.
        sufficing: 1-ε, in [0, 1).
    """
    return poisson_quantile(sufficing, failures_per_h * repair_h)


def shortage(num_spares: int, failures_per_h: float, repair_h: float) -> float:
    """Probability that more machines are away than there are spares."""
    return poisson_tail(num_spares, failures_per_h * repair_h)
