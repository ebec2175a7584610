"""Which worker is late in a synchronous step, and what follows: shares of the work, or a limit.

All workers hear the same times at the same step and have one of these objects each, so that all
decide alike; nothing is sent for it. A worker's **cost** is what one shard takes it: its time of a
step over the shards that it made in it, in the median over ``WINDOW`` steps, so that one pause
makes nobody late. It is **late** from ``factor`` times the median of the others' costs on, and so
until it is below the middle between that and theirs.

==========  =====================================================================================
answer      what follows
==========  =====================================================================================
move        shards are shared out so that the longest time of a worker is the shortest: each one
            in turn goes to whoever would be ready first with it (for equal tasks on machines of
            several speeds that is the best: Graham, "Bounds on Multiprocessing Timing Anomalies",
            1969). Workers that are not late count as equally fast, so that noise moves nothing.
            A late worker may be left without any; then nobody knows how fast it is, so it gets
            one for some steps now and then (``PROBE_EVERY``, twice as long each time)
drop        a worker makes no further shard whose end would lie behind ``factor`` times what its
            shards usually take, in the median of the others; the first one it makes always. The
            limit is each worker's own, and goes on being one for all: one that is late now does
            not keep the next one from being waited for no longer (Giladi et al., "DropCompute",
            2023, has one limit, chosen beforehand)
==========  =====================================================================================

What can go wrong: a step that is slower on all workers (longer samples, a save) is one in which all
leave something out; a cost that no share changes (the optimizer's step, a wait between two steps)
is not seen, and nothing helps against it.

Rejected: shares in proportion to measured speeds (they would move at each step, and each change
costs new buckets); one worker that decides for all (a message more, and a step later).
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections import deque
from collections.abc import Sequence
from typing import Final

import msgspec

WAIT, MOVE, DROP = ANSWERS = ("wait", "move", "drop")
WARM_UP: Final = 3  # steps: caches, compilation
WINDOW: Final = 7
LEAST: Final = 5  # times of a worker, before it is judged
GAIN: Final = 0.10  # of the longest time: a smaller one is not worth new buckets
PROBE_STEPS: Final = LEAST
PROBE_EVERY: Final = 64  # steps, at first
PROBE_EVERY_MOST: Final = 1024


class ShareChange(msgspec.Struct, frozen=True, kw_only=True):
    """Other shares from a later step on.

    Attributes:
        counts: how many shards each worker holds.
        late: the workers that are late.
        back: those that were, and are no more.
        factors: of each late one, how many times as long as the others it takes.
        probes: those that get a shard to see how fast they are, for ``PROBE_STEPS``.
    """

    counts: tuple[int, ...]
    late: tuple[int, ...] = ()
    back: tuple[int, ...] = ()
    factors: tuple[float, ...] = ()
    probes: tuple[int, ...] = ()


def balanced(num_shards: int, costs: Sequence[float], least: int = 0) -> tuple[int, ...]:
    """How many shards each worker makes so that the longest time is the shortest.

    Args:
        num_shards: in all.
        costs: of a shard, for each worker, above 0.
        least: how many each worker has, where there are enough for that.

    Returns:
        As many numbers as ``costs``; among equals whoever has fewer gets the next one, then the
        lower rank.
    """
    start = least if least * len(costs) <= num_shards else 0
    counts = [start] * len(costs)
    ends = [((start + 1) * cost, start, rank) for rank, cost in enumerate(costs)]
    heapq.heapify(ends)
    for _ in range(num_shards - sum(counts)):
        _, _, rank = ends[0]
        counts[rank] += 1
        heapq.heapreplace(ends, ((counts[rank] + 1) * costs[rank], counts[rank], rank))
    return tuple(counts)


def longest(counts: Sequence[int], costs: Sequence[float]) -> float:
    """The longest time of a worker, in the unit of ``costs``."""
    return max(count * cost for count, cost in zip(counts, costs, strict=True))


def _median(costs: Sequence[float]) -> float:
    """Of few numbers; 0 where they are too few."""
    num = len(costs)
    if num < LEAST:
        return 0.0
    inorder = sorted(costs)
    return (inorder[(num - 1) // 2] + inorder[num // 2]) / 2


class LateJudge:
    """Judges the workers of one loader's steps.

    Args:
        usual: how many shards each worker holds where nobody is late.
        answer: "move" or "drop".
        factor: from how many times the others' cost on a worker is late, above 1.
        counts: how many each holds as yet; () for the usual ones.

    Attributes:
        least: shards that each worker keeps, where there are enough: 0, or 1.
        late: rank → how many times as long as the others it takes, of those that are late.
    """

    def __init__(
        self, usual: Sequence[int], *, answer: str, factor: float, counts: Sequence[int] = ()
    ) -> None:
        self._usual = tuple(usual)
        self._answer, self._factor = answer, factor
        self._costs: list[deque[float]] = [deque(maxlen=WINDOW) for _ in usual]
        self._medians = [0.0] * len(self._usual)  # 0 where too little is known
        self._in_order: list[float] = []  # of those that are known
        self._num_with = sum(count > 0 for count in self._usual)
        self._counts = tuple(counts) or self._usual  # agreed, perhaps for steps to come
        self._seen = 0
        self._since_probe = 0
        self._probe_every = PROBE_EVERY
        self._probing: tuple[int, ...] = ()
        self.least = 0
        self.late: dict[int, float] = {}

    def see(self, seconds: Sequence[float], made: Sequence[int]) -> None:
        """One more step, in order: each worker's time, and the shards that it made in it."""
        self._seen += 1
        if self._seen <= WARM_UP or (self._answer == MOVE and tuple(made) != self._in_force):
            return  # the latter: of shares that are over already, or not in force yet
        for costs, time_s, count in zip(self._costs, seconds, made, strict=True):
            if count and time_s > 0 and math.isfinite(time_s):
                costs.append(time_s / count)
        self._medians = [_median(costs) for costs in self._costs]
        self._in_order = sorted(one for one in self._medians if one)

    @property
    def _in_force(self) -> tuple[int, ...]:
        return self._probed() if self._probing else self._counts

    # --- drop ------------------------------------------------------------------------------------

    def limit_s(self, rank: int) -> float | None:
        """How long a worker's shards may take it; None while too little is known."""
        usual_s = self._others(rank)
        return None if usual_s is None else self._factor * usual_s * self._usual[rank]

    # --- move ------------------------------------------------------------------------------------

    def change(self) -> ShareChange | None:
        """Behind a step that was seen: other shares, if that pays or somebody is back."""
        if self._probing:
            return self._probed_change()
        if self.late:
            self._since_probe += 1
        known = zip(self._counts, self._costs, strict=True)
        if any(count and len(costs) < LEAST for count, costs in known):
            return None
        before = set(self.late)
        self._judge()
        back = tuple(sorted(before - set(self.late)))
        counts = self._best()
        if counts != self._counts and (back or self._pays(counts)):
            return self._changed(counts, back)
        return self._probe()

    def _judge(self) -> None:
        """Who is late now."""
        found: dict[int, float] = {}
        for rank, cost_s in enumerate(self._medians):
            others_s = self._others(rank)
            if not cost_s or others_s is None:  # nobody knows: as before
                if rank in self.late:
                    found[rank] = self.late[rank]
                continue
            times = cost_s / others_s
            if times >= (self._middle if rank in self.late else self._factor):
                found[rank] = times
        # Of all at once nobody is: somebody has to make the shards.
        self.late = found if len(found) < len(self._usual) else {}

    @property
    def _middle(self) -> float:
        return (1 + self._factor) / 2

    def _others(self, rank: int) -> float | None:
        """The median of the others' costs; None while too little is known."""
        costs, own_s = self._in_order, self._medians[rank]
        num = own = len(costs)
        if own_s:
            own = bisect.bisect_left(costs, own_s)
            num -= 1
        if not num or 2 * num < self._num_with - (self._usual[rank] > 0):
            return None
        low, high = (at + (at >= own) for at in ((num - 1) // 2, num // 2))  # without its own
        return (costs[low] + costs[high]) / 2

    def _relative(self) -> list[float]:
        """What a shard costs each worker, in what it costs one that is not late."""
        return [self.late.get(rank, 1.0) for rank in range(len(self._usual))]

    def _best(self) -> tuple[int, ...]:
        if not self.late:
            return self._usual
        return balanced(sum(self._usual), self._relative(), self.least)

    def _pays(self, counts: Sequence[int]) -> bool:
        costs = self._relative()
        return longest(counts, costs) <= (1 - GAIN) * longest(self._counts, costs)

    def _changed(self, counts: tuple[int, ...], back: tuple[int, ...]) -> ShareChange:
        self._counts, self._since_probe = counts, 0
        if back:
            self._probe_every = PROBE_EVERY
        self._forget()
        return self._as_change(counts, back=back)

    def _as_change(
        self, counts: tuple[int, ...], *, back: tuple[int, ...] = (), probes: tuple[int, ...] = ()
    ) -> ShareChange:
        late = sorted(self.late)
        factors = tuple(round(self.late[rank], 2) for rank in late)
        return ShareChange(
            counts=counts, late=tuple(late), back=back, factors=factors, probes=probes
        )

    def _forget(self) -> None:
        """Times of other shares are other times: what a step costs besides is spread otherwise."""
        for costs in self._costs:
            costs.clear()
        self._medians, self._in_order = [0.0] * len(self._usual), []

    # --- those without any ------------------------------------------------------------------------

    def _probe(self) -> ShareChange | None:
        idle = tuple(rank for rank in sorted(self.late) if not self._counts[rank])
        if not idle or self._since_probe < self._probe_every:
            return None
        self._since_probe = 0
        self._probe_every = min(2 * self._probe_every, PROBE_EVERY_MOST)
        self._probing = idle
        self._forget()
        return self._as_change(self._probed(), probes=idle)

    def _probed(self) -> tuple[int, ...]:
        """The shares in which each of those has one, taken from whoever has most."""
        counts = list(self._counts)
        for rank in self._probing:
            most = max(range(len(counts)), key=lambda one: (counts[one], -one))
            counts[most] -= 1
            counts[rank] += 1
        return tuple(counts)

    def _probed_change(self) -> ShareChange | None:
        """Once they were seen in ``PROBE_STEPS``: the shares that are best now."""
        if any(len(self._costs[rank]) < PROBE_STEPS for rank in self._probing):
            return None
        before = set(self.late)
        self._judge()
        self._probing = ()
        return self._changed(self._best(), tuple(sorted(before - set(self.late))))
