"""What a simulated job has saved: what of it goes with which machines, and where a drain goes."""

from __future__ import annotations

from collections.abc import Iterable

from outlast.policy import drain, retention
from outlast.simulate.setup import Level

Holders = dict[str, tuple[str, ...]]  # machine → the others that keep its copies


class Saved:
    """What is in one level: work → when it is durable there."""

    def __init__(self, level: Level) -> None:
        self.level = level
        self.durable_s: dict[float, float] = {}
        self._copies: dict[float, Holders] = {}  # who held whose, when it was taken
        self._gone: dict[float, set[str]] = {}  # since then

    def add(self, work_s: float, durable_s: float, holders: Holders) -> None:
        """One more; what retention lets go is gone."""
        self.durable_s[work_s] = durable_s
        self._copies[work_s], self._gone[work_s] = holders, set()
        order = sorted(self.durable_s)
        steps = dict(enumerate(order, 1))  # the policy knows whole steps
        for step in retention.removable(steps, (), keep=self.level.keep, invalid=()):
            self.remove(steps[step])

    def forget(self, now_s: float, gone: set[int]) -> None:
        """What went with these machines, and what had not arrived anywhere."""
        lost = {str(number) for number in gone}
        for work_s, at_s in list(self.durable_s.items()):
            away = self._gone[work_s]
            away |= lost
            is_gone = at_s > now_s
            if self.level.survives == "process":
                is_gone |= bool(lost)
            elif self.level.survives == "holders":
                copies = self._copies[work_s]
                is_gone |= any(away.issuperset(copies[one]) for one in away if one in copies)
            if is_gone:
                self.remove(work_s)

    def remove(self, work_s: float) -> None:
        """It cannot be read any more."""
        del self.durable_s[work_s], self._copies[work_s], self._gone[work_s]


def flushed_to(levels: Iterable[Level], left_s: float, rest_s: float) -> str | None:
    """The level to which the runtime flushes in these seconds, after the step's rest; or none."""
    lanes = [
        drain.Lane(
            name=level.name,
            outlasts=True,
            slow_s=level.cost_s + level.lag_s,
            fast_s=level.cost_s + level.lag_s,
        )
        for level in levels
        if level.survives == "all"
    ]
    plan = drain.plan(left_s, lanes, step_slow_s=rest_s, step_fast_s=rest_s)
    return plan.tiers[0] if plan.choice != "keep" and plan.tiers else None
