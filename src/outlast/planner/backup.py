"""Reckon with workers that are late or gone: backup workers, and redundancy in the data.

Backup workers (Chen et al., arXiv 1604.00981): of N + b workers the first N gradients count. A step
takes as long as the N-th of N + b. Where each takes a common time and an exponential tail, that is
a sum of harmonic numbers (Rényi, 1953): common + tail·(H(N+b) - H(b)).

SPARe (arXiv 2603.00357): N groups hold r of N shards each, so that no two hold two in common. A
step needs each shard from one group that is left: of N - k groups each makes ⌈N/(N-k)⌉ of them.
The job restarts once some shard is lost with all of its r groups, after μ = Γ(1/r)/r · N^(1-1/r)
losses on average. With replication each group makes all of its r, and there are N/r sets.

What can go wrong: slowness that goes with the data (a gradient that never counts is a bias, see
docs/plan-modes.md), and losses that come in bursts: μ takes them as uniform.
"""

from __future__ import annotations

import functools
import math
from typing import Final

import msgspec

from outlast.policy.interval import Costs, exact_best_h, exact_wall

REDUNDANCY_MOST: Final = 64
_ADDED: Final = 0.833  # of the best redundancy, in the paper's closed form


@functools.lru_cache(maxsize=1024)
def harmonic(count: int) -> float:
    """1 + 1/2 + … + 1/count."""
    return math.fsum(1 / one for one in range(1, count + 1))


def backup_step_s(needed: int, backups: int, *, common_s: float, tail_s: float) -> float:
    """Mean seconds until ``needed`` of ``needed`` + ``backups`` workers are done.

    Args:
        needed: N, at least 1.
        backups: b.
        common_s: that every worker takes.
        tail_s: mean of what each takes besides, exponential.
    """
    return common_s + tail_s * (harmonic(needed + backups) - harmonic(backups))


def best_backups(workers: int, *, common_s: float, tail_s: float) -> int:
    """Find b of ``workers`` = N + b for the most gradients per second, N over a step's time."""

    def pace(backups: int) -> float:
        needed = workers - backups
        return needed / backup_step_s(needed, backups, common_s=common_s, tail_s=tail_s)

    return max(range(workers), key=pace)


class Redundancy(msgspec.Struct, frozen=True, kw_only=True):
    """N groups, each of which holds r shards of the data.

    Attributes:
        groups: N.
        copies: r, at least 1 and at most N.
        is_stacked: whether a group makes only those shards that are needed of it (SPARe), or all
            of its r (replication).
    """

    groups: int
    copies: int
    is_stacked: bool = True

    @property
    def masked(self) -> float:
        """Mean losses until a shard is lost: Γ(1/r)/r · N · sets^(-1/r)."""
        sets = self.groups if self.is_stacked else self.groups / self.copies
        inverse = 1 / self.copies
        return math.gamma(inverse) * inverse * self.groups * float(sets**-inverse)

    @property
    def work(self) -> float:
        """Mean shards that each group makes in a step: r, or ⌈N/(N-k)⌉ over k < μ losses."""
        if not self.is_stacked:
            return float(self.copies)
        last = max(int(self.masked), 1)
        needed = (-(-self.groups // (self.groups - gone)) for gone in range(last))
        return min(sum(needed) / last, float(self.copies))

    def time_ratio(self, costs: Costs, loss_h: float) -> float:
        """Time to the end over that of one copy that is never disturbed.

        Args:
            costs: of a checkpoint and of a restart.
            loss_h: between two losses of a group.

        The exact model of :mod:`outlast.policy.interval` with a restart every μ losses.
        """
        per_h = 1 / (self.masked * loss_h)
        return self.work * exact_wall(costs, per_h, exact_best_h(costs, per_h))


def best_copies(groups: int) -> int:
    """r* ≈ ⌊log2 N + 0.833⌋ of SPARe."""
    return int(math.log2(groups) + _ADDED)


def best_redundancy(groups: int, costs: Costs, loss_h: float, *, is_stacked: bool) -> Redundancy:
    """The r with the least time to the end."""
    choices = [
        Redundancy(groups=groups, copies=copies, is_stacked=is_stacked)
        for copies in range(1, min(groups, REDUNDANCY_MOST) + 1)
    ]
    return min(choices, key=lambda one: one.time_ratio(costs, loss_h))
