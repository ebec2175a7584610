"""How often each tier takes a checkpoint, and when a snapshot is enough.

Each place has an interval of its own, from what it survives and from what a copy costs. A failure
that takes processes leaves this machine's memory; one that takes a machine leaves what others hold;
one that takes all of them leaves the object store. So a slower tier is needed only by the failures
that no faster place survives: T = √(2C/λ) as in :mod:`outlast.policy.interval`, where λ is the rate
of those failures, and C is what a copy costs the job, in seconds of training: by how much it slows
steps down, for as long as it takes, and its money at what an hour of the machines costs. Where
snapshots stay in memory (``apart``), that holds of the first tier too: the job's cadence says when
there is a snapshot, and a tier takes one where its own time has come.

How often the job fails just now is one question (:mod:`outlast.policy.hazard`: bursts raise it
within two or three failures, and are forgotten as quickly), and how much a failure takes another,
which changes slowly: the share of the failures that took more than a place survives. λ is the
product. What a place survives is a belief: where the job came back from a slower tier more often
than that explains, that is what counts.

Guarantees: a tier takes all that the one before it takes until its cost is known. The first
checkpoint of an attempt goes to all tiers that are open, and so does the next one where a copy
failed. An interval has room for a copy and a quarter, since a copy that is overtaken is lost, and
is at most ``TIER_MAX_S``. It is told only where it is off by ``TIER_CHANGE``, which costs 1.4 % of
what the tier costs anyway. A tier that is due takes its checkpoint from the tiers before it, which
then take it too. What the owner has set stays: such a tier takes every Nth of the first tier's.

What can go wrong: a failure is taken for a greater one than it was (two machines lost at once may
have left a copy). Then a tier takes more than it needs to, which is the cheaper mistake.

Rejected: all intervals at once by the Markov model of :mod:`outlast.planner.intervals`. It needs
the cost of reading each tier back, which most jobs have never seen; the additive model is within
0.003 of it for jobs that are of use for 86 % of the time or more (``docs/simulator.md``). Every Nth
checkpoint: in a burst checkpoints come a hundred times as often, and what is N then is not N an
hour later. A filter of bursts for each severity: a storm of workers' deaths says that machines go,
too.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

import msgspec

from outlast.policy.cadence import AUTO_MEMORY_H, HOUR_S, OVERHEAD, Change, least_s, sooner_s
from outlast.policy.hazard import Hazard, forgetting, of_a_new_job
from outlast.policy.interval import TierCosts, intervals_h

TIER_MAX_S: Final = 12 * HOUR_S
TIER_CHANGE: Final = 1.4
COPY_ROOM: Final = 1.25  # times as long as a copy takes
COSTS_LEAST_S: Final = 1e-3
SLOWED: Final = 0.05  # share by which a copy slows steps down, until that was measured
ENOUGH: Final = 0.5  # of a time between checkpoints: a tier does not wait for another for less


class Scope(enum.IntEnum):
    """What a failure takes; as said of a place, the most that can fail and leave it.

    ``ALL`` is left by what stands apart from all machines. Even that may fail by itself, which no
    ledger has seen: that rate stays the assumed one.
    """

    PROCESS = 0
    MACHINE = 1
    ALL = 2


# The failures that are believed, beforehand, to take more than the scope, and of how many. SCR's
# clusters had fewer (Moody et al., SC'10: one in 15 and one in 280 of all), spot machines more.
# What is rare is believed to be so after more failures: that none of ten took all says little. What
# stands apart from all machines fails by itself, once in so many hours: no ledger has seen that.
PRIOR: Final = {Scope.PROCESS: (1.0, 2.0), Scope.MACHINE: (0.5, 5.0), Scope.ALL: (0.02, 2.0)}
APART_H: Final = 1000.0


class Beyond(msgspec.Struct, frozen=True, kw_only=True):
    """How much the job's failures took, forgotten with the time of running.

    Attributes:
        num: failures.
        num_machine: that took one machine or more.
        num_all: that took several at once, or all.
        read: tier → failures after which it was read.
    """

    num: float = 0.0
    num_machine: float = 0.0
    num_all: float = 0.0
    read: dict[str, float] = {}

    def share(self, scope: Scope, tiers: Sequence[str] = ()) -> float:
        """Of all failures, those that take more than ``scope``.

        Args:
            scope: that the faster tiers are believed to survive.
            tiers: the one in question and those behind it: it was needed when they were read.
        """
        seen = {Scope.PROCESS: self.num_machine, Scope.MACHINE: self.num_all, Scope.ALL: 0.0}
        needed = max((self.read.get(name, 0.0) for name in tiers), default=0.0)
        took = min(max(seen[scope], needed), self.num)
        believed, of = PRIOR[scope]
        return (believed + took) / (of + self.num)

    def after(self, hours: float, scope: Scope | None = None) -> Beyond:
        """What is known ``hours`` later, with a failure of ``scope`` (None: none) at their end."""
        kept, _ = forgetting(hours, AUTO_MEMORY_H)
        return Beyond(
            num=self.num * kept + (scope is not None),
            num_machine=self.num_machine * kept + (scope is not None and scope >= Scope.MACHINE),
            num_all=self.num_all * kept + (scope == Scope.ALL),
            read={name: number * kept for name, number in self.read.items()},
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


class TierStop(msgspec.Struct, frozen=True, kw_only=True):
    """A tier, as its cadence sees it.

    Attributes:
        name: of the tier.
        survives: the most that may fail and leave what is in there.
        every: it takes every Nth of the first tier's, as it was set; None where that is decided
            here.
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
        stops: the tiers, the fastest first.
        start_s: when training begins.
        known: what is known of how much failures take.
        hazard: and of how often there is one.
        told: the interval that each tier was last said to have.
        full_every: every Nth checkpoint can be resumed from; others are worth nothing to a tier.
        overhead: share of the time that all of them take at most while there is no evidence.

    Attributes:
        apart: what a snapshot survives that goes to no tier; None: the first tier takes each
            checkpoint.
    """

    def __init__(
        self,
        stops: Sequence[TierStop],
        start_s: float,
        known: Beyond | None = None,
        hazard: Hazard | None = None,
        *,
        told: Mapping[str, float] | None = None,
        full_every: int = 1,
        overhead: float = OVERHEAD,
    ) -> None:
        self.apart: Scope | None = None
        self._stops = stops
        self._told_s = start_s
        self._known = known or Beyond()
        self._hazard = hazard or of_a_new_job()
        self._told_before = dict(told or {})
        self._full_every = full_every
        self._overhead = overhead
        self._num_first = 0  # checkpoints that the first tier has taken
        self._interval_s = 0.0  # between two of the job's
        self._taken_s: dict[str, float] = {}
        self._wait_s: dict[str, float] = {}
        self._chosen: dict[str, Change] = {}
        self._costs: dict[str, Cost] = {}
        self._untold: list[Change] = []

    @property
    def is_fixed(self) -> bool:
        """Whether there is nothing to decide."""
        return all(self._every(position) is not None for position in range(len(self._stops)))

    def interval_s(self, name: str) -> float:
        """Between two checkpoints of a tier that is open, while it is calm; 0: it takes each."""
        chosen = self._chosen.get(name)
        return chosen.interval_s if chosen is not None else 0.0

    def takes_each(self, name: str) -> bool:
        """Whether a tier takes each checkpoint of the job."""
        position = [stop.name for stop in self._stops].index(name)
        every = self._every(position)
        return self.interval_s(name) <= self._interval_s if every is None else every == 1

    def due(self, turn: int, now_s: float) -> list[str]:
        """The tiers that take the job's checkpoint of this number, if it is taken now."""
        takes: dict[str, bool] = {}
        before, fed = True, True
        for position, stop in enumerate(self._stops):
            every = self._every(position)
            if every is not None:
                # A tier that counts is fed by what it counts: the first one's checkpoints.
                number = turn if self.apart is None else self._num_first
                before = number % every == 0
                fed = fed and before
            elif stop.name in self._costs:
                before = fed and turn % self._full_every == 0 and self._is_time(stop.name, now_s)
            takes[stop.name] = before
        if self.apart is not None and not self._any_open(takes):
            return []
        found: list[str] = []
        for position in reversed(range(len(self._stops))):
            name = self._stops[position].name
            if takes[name] or (found and self._every(position) is None):
                found.append(name)
        return found[::-1]

    def measured(self, name: str, cost: Cost) -> None:
        """What copies to this tier cost by now."""
        self._costs[name] = cost

    def taken(self, now_s: float, interval_s: float, names: Collection[str] | None) -> None:
        """A checkpoint was taken, and the next one is due after ``interval_s``.

        Args:
            now_s: now.
            interval_s: until then.
            names: the tiers that are to get it; None: all.
        """
        self._ran(now_s)
        first = self._stops[0].name
        self._num_first += names is None or first in names
        for stop in self._stops:
            if names is None or stop.name in names:
                self._taken_s[stop.name] = now_s
        self._choose(interval_s)

    def failed(self, names: Collection[str] | None) -> None:
        """What these tiers (None: all) were to get has come to nothing: the next is theirs."""
        for stop in self._stops:
            if names is None or stop.name in names:
                self._taken_s.pop(stop.name, None)

    def lost(self, now_s: float, scope: Scope) -> None:
        """The job has failed, and this much went with it."""
        self._ran(now_s, scope)

    def back_from(self, names: Iterable[str]) -> None:
        """After a failure the job goes on from what these tiers held."""
        self._known = self._known.back_from(names)

    def begun(self, now_s: float) -> None:
        """It trains again: while it was down it could not fail."""
        self._told_s = now_s
        self._taken_s.clear()

    def changed(self) -> list[Change]:
        """Changes that were not asked for yet."""
        changes, self._untold = self._untold, []
        return changes

    def _every(self, position: int) -> int | None:
        """As it was set; the first tier takes each, unless snapshots stay in memory."""
        if position:
            return self._stops[position].every
        return 1 if self.apart is None else None

    def _any_open(self, takes: dict[str, bool]) -> bool:
        return any(
            takes[stop.name]
            for position, stop in enumerate(self._stops)
            if self._every(position) is None
        )

    def _is_time(self, name: str, now_s: float) -> bool:
        taken_s = self._taken_s.get(name)
        if taken_s is None:
            return True
        # Not at a later checkpoint if this one comes nearer to it.
        return now_s - taken_s >= self._wait_s.get(name, 0.0) - ENOUGH * self._interval_s

    def _ran(self, now_s: float, scope: Scope | None = None) -> None:
        hours = max(now_s - self._told_s, 0.0) / HOUR_S
        self._told_s = now_s
        self._known = self._known.after(hours, scope)
        self._hazard = self._hazard.after(hours, failed=scope is not None)

    def _choose(self, interval_s: float) -> None:
        if self.is_fixed or interval_s <= 0:
            return
        self._interval_s = interval_s
        survived = self._stops[0].survives if self.apart is None else self.apart
        num_open = sum(self._every(position) is None for position in range(len(self._stops)))
        for position, stop in enumerate(self._stops):
            if self._every(position) is None and stop.name in self._costs:
                self._consider(stop, survived, num_open)
            survived = max(survived, stop.survives)

    def _consider(self, stop: TierStop, survived: Scope, num_open: int) -> None:
        """How long one tier waits, and whether that is worth a word.

        Args:
            stop: the tier.
            survived: what the faster ones survive.
            num_open: tiers that share what may be spent while nothing is known.
        """
        names = [one.name for one in self._stops]
        behind = names[names.index(stop.name) :]
        cost = self._costs[stop.name]
        share = self._known.share(survived, behind)
        per_h = share * self._hazard.calm_per_h
        if survived == Scope.ALL and not any(map(self._known.read.get, behind)):
            share, per_h = 0.0, 1 / APART_H
        wanted_h = intervals_h(
            [TierCosts(checkpoint_h=cost.total_s / HOUR_S, failures_per_h=per_h)]
        )
        room_s = max(COPY_ROOM * cost.copy_s, self._interval_s)
        calm_s = max(min(wanted_h[0] * HOUR_S, TIER_MAX_S), room_s)
        # At once in a burst, and at once when it is over; what is told is what holds in calm.
        self._wait_s[stop.name] = max(
            sooner_s(calm_s, cost.total_s, self._hazard, share),
            least_s(cost.total_s, self._hazard, self._overhead / num_open),
            COPY_ROOM * cost.copy_s,
        )
        last = self._chosen.get(stop.name)
        before_s = last.interval_s if last else self._told_before.get(stop.name, self._interval_s)
        is_news = not 1 / TIER_CHANGE < calm_s / before_s < TIER_CHANGE
        if not is_news and (last or stop.name not in self._told_before):
            return
        self._chosen[stop.name] = change = Change(
            interval_s=calm_s,
            before_s=before_s,
            cost_s=cost.total_s,
            failures_per_h=per_h,
            num_seen=self._known.num,
            seen_h=self._hazard.calm.seen_h,
            reason=_reason(last, cost, per_h, survived),
            tier=stop.name,
        )
        if is_news:
            self._untold.append(change)


_TAKEN: Final = {
    Scope.PROCESS: "losses of a machine",
    Scope.MACHINE: "losses of several machines at once",
    Scope.ALL: "losses of the other tiers",
}


def _reason(last: Change | None, cost: Cost, per_h: float, survived: Scope) -> str:
    """Why the interval is another one, in words."""
    if last is None:
        return f"only {_TAKEN[survived]} need it, and a copy was measured"
    by_cost = math.log(cost.total_s / last.cost_s)
    by_rate = math.log(per_h / last.failures_per_h)
    if abs(by_cost) >= abs(by_rate):
        return f"copies cost {'more' if by_cost > 0 else 'less'}"
    return f"{_TAKEN[survived]} are {'more' if by_rate > 0 else 'less'} frequent"
