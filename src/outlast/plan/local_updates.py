"""Islands that train by themselves and meet every H steps (DiLoCo, Douillard et al. 2023).

A preemption loses on average half of what was done since the last meeting: scope · H·t_s/2 seconds
of the fleet, where scope is 1/k if one of k islands drops out of this round, and 1 if the round is
thrown away. Compare with T/2 for a job that rewinds to its checkpoint. What the fewer meetings cost
in quality of training is no matter of arithmetic, and is not in here.
"""

from __future__ import annotations


def lost_s(inner_steps: float, step_s: float, num_islands: int, *, whole_window: bool) -> float:
    """Fleet-seconds that one preemption loses.

    Args:
        inner_steps: H, steps between two meetings.
        step_s: t_s, seconds of a step.
        num_islands: k.
        whole_window: whether the round is thrown away, or only the island's part.
    """
    scope = 1.0 if whole_window else 1 / num_islands
    return scope * inner_steps * step_s / 2
