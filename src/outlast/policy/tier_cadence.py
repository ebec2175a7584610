"""How often each slower tier takes a checkpoint.

A checkpoint goes to the first tier at the job's cadence; a slower one is needed only by failures
that no faster one survives (a dead process leaves memory, a dead machine leaves what others hold,
a dead cluster leaves the object store). So each has an interval of its own, T = √(2C/λ) as in
:mod:`outlast.plan.tiers`: λ is the rate of those failures, learnt like the job's own; C is what a
copy costs the job, in seconds of training: by how much it slows steps down, for as long as it
takes, and its money at what an hour of the machines costs. What a tier survives is a belief: where
the job came back from a slower one more often than that explains, that is what counts.

Guarantees: a tier takes all that the one before it takes until its cost is known. Afterwards its
interval is a whole number of the one before it (it is fed from there), at least the time of a copy
and a quarter, since a copy that is overtaken is lost, and at most ``TIER_MAX_S``. It is changed
only where it is off by ``TIER_CHANGE``, which costs 1.4 % of what the tier costs anyway. What the
owner has set stays.

What can go wrong: a failure is taken for a greater one than it was (two machines lost at once may
have left a copy). Then a tier takes more than it needs to, which is the cheaper mistake.

Rejected: all intervals at once by the Markov model of :mod:`outlast.plan.levels`. It needs the cost
of reading each tier back, which most jobs have never seen; the additive model is within 0.003 of it
for jobs that are of use for 86 % of the time or more (``docs/simulator.md``).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from outlast.plan.posterior import Posterior, forgetting
from outlast.plan.tiers import TierCosts, intervals_h
from outlast.policy.cadence import AUTO_MEMORY_H, HOUR_S, Change

TIER_MAX_S: Final = 12 * HOUR_S
TIER_CHANGE: Final = 1.4
COPY_ROOM: Final = 1.25  # times as long as a copy takes
COSTS_LEAST_S: Final = 1e-3
SLOWED: Final = 0.05  # share by which a copy slows steps down, until that was measured


class Scope(enum.IntEnum):
    """What a failure takes; as said of a place, the most that can fail and leave it.

    ``ALL`` is left by what stands apart from all machines. Even that may fail by itself, which no
    ledger has seen: that rate stays the assumed one.
    """

    PROCESS = 0
    MACHINE = 1
    ALL = 2


# Hours, one failure each, that are believed in beforehand of those that take more than the scope.
# SCR's clusters had fewer (Moody et al., SC'10: one in 15 and in 280 of all), spot machines more.
PRIOR_H: Final = {Scope.PROCESS: 20.0, Scope.MACHINE: 100.0, Scope.ALL: 1000.0}


class Beyond(msgspec.Struct, frozen=True, kw_only=True):
    """The failures that took more than a process, forgotten with the time of running.

    Attributes:
        num_machine: that took one machine or more.
        num_all: that took several at once, or all.
        read: tier → failures after which it was read.
        seen_h: hours of running that this rests on.
    """

    num_machine: float = 0.0
    num_all: float = 0.0
    read: dict[str, float] = {}
    seen_h: float = 0.0

    def rate(self, scope: Scope, tiers: Sequence[str] = ()) -> Posterior:
        """What is known of failures that take more than ``scope``.

        Args:
            scope: that the faster tiers are believed to survive.
            tiers: the one in question and those behind it: it was needed when they were read.
        """
        seen = {Scope.PROCESS: self.num_machine, Scope.MACHINE: self.num_all, Scope.ALL: 0.0}
        needed = max((self.read.get(name, 0.0) for name in tiers), default=0.0)
        hours = 0.0 if scope == Scope.ALL and not needed else self.seen_h
        return Posterior(
            num_seen=max(seen[scope], needed), seen_h=hours, prior_exposure_h=PRIOR_H[scope]
        )

    def after(self, hours: float, scope: Scope | None = None) -> Beyond:
        """What is known ``hours`` later, with a failure of ``scope`` (None: none) at their end."""
        kept, new_h = forgetting(hours, AUTO_MEMORY_H)
        return Beyond(
            num_machine=self.num_machine * kept + (scope is not None and scope >= Scope.MACHINE),
            num_all=self.num_all * kept + (scope == Scope.ALL),
            read={name: number * kept for name, number in self.read.items()},
            seen_h=self.seen_h * kept + new_h,
        )

    def worse(self, before: Scope, now: Scope) -> Beyond:
        """The newest failure has turned out to be one of ``now``."""
        return msgspec.structs.replace(
            self,
            num_machine=self.num_machine + (before < Scope.MACHINE <= now),
            num_all=self.num_all + (before < Scope.ALL <= now),
        )

    def back_from(self, tiers: Iterable[str]) -> Beyond:
        """The job is back after a failure, from what these held."""
        more = {name: self.read.get(name, 0.0) + 1 for name in tiers}
        return msgspec.structs.replace(self, read={**self.read, **more})


class Stop(msgspec.Struct, frozen=True, kw_only=True):
    """A tier, as its cadence sees it.

    Attributes:
        name: of the tier.
        survives: the most that may fail and leave what is in there.
        every: it takes every Nth checkpoint, as it was set; None where that is decided here.
    """

    name: str
    survives: Scope
    every: int | None = None


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What a copy to a tier was measured to cost.

    Attributes:
        copy_s: that it takes.
        slowed: share by which steps are slower meanwhile; None where that was not seen yet.
        money_s: its price, in seconds of what the machines cost.
        blocked_s: that the loop waits for it.
    """

    copy_s: float
    slowed: float | None = None
    money_s: float = 0.0
    blocked_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds of training that one costs."""
        share = SLOWED if self.slowed is None else self.slowed
        return max(self.blocked_s + share * self.copy_s + self.money_s, COSTS_LEAST_S)


class TierCadence:
    """Which tiers take the next checkpoint.

    Args:
        stops: the tiers, the first one included.
        start_s: when training begins.
        known: what is known of the failures.
        full_every: every Nth checkpoint can be resumed from; others are worth nothing to a tier.
    """

    def __init__(
        self,
        stops: Sequence[Stop],
        start_s: float,
        known: Beyond | None = None,
        *,
        full_every: int = 1,
    ) -> None:
        self._stops = stops
        self._told_s = start_s
        self._known = known or Beyond()
        self._full_every = full_every
        self._every = {stop.name: stop.every or 1 for stop in stops}
        self._chosen: dict[str, Change] = {}
        self._costs: dict[str, Cost] = {}
        self._untold: list[Change] = []

    @property
    def is_fixed(self) -> bool:
        """Whether there is nothing to decide."""
        return all(stop.every is not None for stop in self._stops)

    def every(self, name: str) -> int:
        """This tier takes every Nth checkpoint."""
        return self._every[name]

    def due(self, turn: int) -> list[str]:
        """The tiers that take the checkpoint of this number."""
        return [stop.name for stop in self._stops if turn % self._every[stop.name] == 0]

    def measured(self, name: str, cost: Cost) -> None:
        """What copies to this tier cost by now."""
        self._costs[name] = cost

    def taken(self, now_s: float, interval_s: float) -> None:
        """A checkpoint was taken, and the next one is due after ``interval_s``."""
        self._ran(now_s)
        self._choose(interval_s)

    def lost(self, now_s: float, scope: Scope) -> None:
        """The job has failed, and this much went with it."""
        self._ran(now_s, scope)

    def back_from(self, names: Iterable[str]) -> None:
        """After a failure the job goes on from what these tiers held."""
        self._known = self._known.back_from(names)

    def begun(self, now_s: float) -> None:
        """It trains again: while it was down it could not fail."""
        self._told_s = now_s

    def changed(self) -> list[Change]:
        """Changes that were not asked for yet."""
        changes, self._untold = self._untold, []
        return changes

    def _ran(self, now_s: float, scope: Scope | None = None) -> None:
        hours = max(now_s - self._told_s, 0.0) / HOUR_S
        self._told_s = now_s
        self._known = self._known.after(hours, scope)

    def _choose(self, interval_s: float) -> None:
        if self.is_fixed or interval_s <= 0:
            return
        before, survived = 1, self._stops[0].survives
        for position, stop in enumerate(self._stops):
            if not position or stop.every is not None:
                pass
            elif stop.name in self._costs:
                later = [one.every for one in self._stops[position:] if one.every is not None]
                self._consider(stop, survived, interval_s, before, later[0] if later else None)
            else:
                self._every[stop.name] = before
            before, survived = self._every[stop.name], max(survived, stop.survives)

    def _consider(
        self, stop: Stop, survived: Scope, interval_s: float, before: int, later: int | None
    ) -> None:
        """Another interval for one tier, if it is worth it.

        Args:
            stop: the tier.
            survived: what the faster ones survive.
            interval_s: between checkpoints.
            before: the tier before it takes every so many-th.
            later: the next one that was set does.
        """
        names = [one.name for one in self._stops]
        known = self._known.rate(survived, names[names.index(stop.name) :])
        cost = self._costs[stop.name]
        wanted_h = intervals_h(
            [TierCosts(checkpoint_h=cost.total_s / HOUR_S, failures_per_h=known.mean_per_h)]
        )
        wanted_s = min(wanted_h[0] * HOUR_S, TIER_MAX_S)
        wanted_s = max(wanted_s, COPY_ROOM * cost.copy_s, interval_s)
        now = self._every[stop.name]
        fits = now % before == 0 and (later is None or later % now == 0)
        if fits and 1 / TIER_CHANGE < wanted_s / (now * interval_s) < TIER_CHANGE:
            return
        every = _whole(wanted_s / interval_s, before, later, self._full_every)
        if every == now:
            return
        last = self._chosen.get(stop.name)
        change = Change(
            interval_s=every * interval_s,
            before_s=now * interval_s,
            cost_s=cost.total_s,
            failures_per_h=known.mean_per_h,
            num_seen=known.num_seen,
            seen_h=known.seen_h,
            reason=_reason(last, cost, known, survived, interval_s),
            tier=stop.name,
            every=every,
        )
        self._every[stop.name] = every
        self._chosen[stop.name] = change
        self._untold.append(change)


def _whole(times: float, before: int, later: int | None, full_every: int) -> int:
    """The whole number nearest to ``times`` that goes together with the tiers around it."""
    unit = math.lcm(before, full_every) if times > before else before
    wanted = max(round(times / unit), 1) * unit
    if later is None:
        return wanted
    fitting = [one for one in range(before, later + 1, before) if later % one == 0]
    return min(fitting, key=lambda one: abs(math.log(one / times)), default=before)


_TAKEN: Final = {
    Scope.PROCESS: "losses of a machine",
    Scope.MACHINE: "losses of several machines at once",
    Scope.ALL: "losses of the other tiers",
}


def _reason(
    last: Change | None, cost: Cost, known: Posterior, survived: Scope, interval_s: float
) -> str:
    """Why the interval is another one, in words."""
    if last is None:
        return f"only {_TAKEN[survived]} need it, and a copy was measured"
    by_cost = math.log(cost.total_s / last.cost_s)
    by_rate = math.log(known.mean_per_h / last.failures_per_h)
    by_job = math.log(interval_s * (last.every or 1) / last.interval_s)
    if abs(by_job) >= max(abs(by_cost), abs(by_rate)):
        return f"the job saves {'more seldom' if by_job > 0 else 'more often'}"
    if abs(by_cost) >= abs(by_rate):
        return f"copies cost {'more' if by_cost > 0 else 'less'}"
    return f"{_TAKEN[survived]} are {'more' if by_rate > 0 else 'less'} frequent"
