"""When the next checkpoint is due.

A cadence in steps is exact: every multiple of it. A cadence in seconds counts from the last
checkpoint. ``auto`` is the interval at which least time is lost, T = M [1 + W₀(-e^(-1-C/M))], from
the time C that a checkpoint was measured to cost (``cost_of``) and the mean time M between failures
that the job's own failures tell (:mod:`outlast.policy.hazard`). It stays within bounds; and it
is changed only where the new one differs by a sixth, as one that is off by so much costs about a
percent of what is lost anyway. Until C is known it saves once after ``AUTO_FIRST_S``.

Failures come in bunches: the longer a job has run since the last one, the less probable is the
next. Published fits of clusters' and spot machines' times between failures are Weibull with shapes
of 0.7 to 0.9 (Schroeder & Gibson, DSN 2006: 0.7 to 0.8). So ``auto`` waits less than T soon after a
start and more when it has run for long: T √(mean rate / hazard), the interval that is best where
the rate is the hazard's. If failures come evenly after all, this costs about a hundredth of what is
lost; the mean rate alone lost to Young's interval on a recording of years (docs/simulator.md).

Before a job has failed once, or has run for an hour, there is a belief and no evidence. Then it
waits for a fifth of the time that it has run, so that the first failure costs no more than that,
whenever it comes; unless saving took more than a hundredth of the time so.

And they come in storms. What a burst adds to the rate just now (:mod:`outlast.policy.hazard`)
shortens the next wait: T of both rates, at the middle of that wait, at least a fiftieth of the mean
time to the next failure. While a storm lasts, that is seconds; when it is over, the interval is
what it was before. What a checkpoint costs is known from the attempts before, and is taken for
``AUTO_GUESS_S`` where none has come to its first.

Failures are forgotten with the time that the job runs, so that one that moves to worse machines
learns it within weeks. Rejected: a window of the last n failures (it forgets nothing while nothing
fails, which is when there is something to learn); n/t alone (no answer before the first failure,
and all hangs on one number after it).

Once an early notice was heard (``Hurried``), a machine is thought to last ten minutes more.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Final, Protocol

import msgspec

from outlast.policy.hazard import MEMORY_H, Hazard, of_a_new_job
from outlast.policy.interval import Costs, exact_best_h

AUTO_MIN_S: Final = 5.0  # while it is calm
AUTO_MAX_S: Final = 4 * 3600.0
AUTO_FIRST_S: Final = 5.0
AUTO_GUESS_S: Final = 0.1  # that a checkpoint costs, before any was measured
AUTO_LEAST: Final = 1 / 50  # of the mean time to the next failure
AUTO_MEMORY_H: Final = MEMORY_H  # of running: after so long a failure counts 1/e of what it did
AUTO_SHAPE: Final = 0.85  # of the times between failures; 1: they come evenly
_SHAPE_GAMMA: Final = math.gamma(1 + 1 / AUTO_SHAPE)
AUTO_CHANGE: Final = 7 / 6  # times as long, or as short: less is not worth a word
OVERHEAD: Final = 0.01  # of the time, while nothing is known of how the job fails
GROWS: Final = 0.2  # of the time that a job has run: it waits no longer, likewise
BURDEN: Final = 0.25  # of the time until a save is durable, that steps lose meanwhile
STORM: Final = 3.0  # times as often as in calm: worth a word
STORM_OVER: Final = 1.5
COSTS_KEPT: Final = 20
ROUNDS: Final = 12  # until the wait and the rate in its middle belong to each other
CLOSE: Final = 0.01
COST_LEAST_S: Final = 1e-4
NO_RATE: Final = 1e-9
HOUR_S: Final = 3600.0
HURRIED_MTBF_S: Final = 600.0
HURRIED_MIN_S: Final = 5.0
HURRIED_MAX_S: Final = 60.0


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """Another interval between saves than before.

    Attributes:
        interval_s: from now on.
        before_s: the one before; None for the first.
        cost_s: what a checkpoint was measured to cost.
        failures_per_h: that are believed in.
        num_seen, seen_h: failures, and hours of running, that this rests on; what was forgotten
            counts no more, so they are no whole numbers.
        reason: what has changed, in words.
        tier: whose interval it is (see :mod:`outlast.policy.tier_cadence`); None for the job's.
        burst: whether failures come in a burst.
    """

    interval_s: float
    before_s: float | None
    cost_s: float
    failures_per_h: float
    num_seen: float
    seen_h: float
    reason: str
    tier: str | None = None
    burst: bool = False


class Cadence(Protocol):
    """Asked at each step boundary by one rank; the answer is for the boundary after it.

    A cadence that learns nothing from an event leaves its method out.
    """

    def due(self, next_step: int, now_s: float) -> bool:
        """Whether a checkpoint should be taken once ``next_step`` is complete."""

    def due_s(self, step: int, now_s: float, step_s: float) -> float:
        """When one will be due, if steps go on from ``step`` and take ``step_s`` each."""

    def taken(self, step: int, now_s: float, blocked_s: float) -> None:
        """A checkpoint was taken at ``step`` and blocked the loop for ``blocked_s``."""
        return

    def lost(self, now_s: float) -> None:
        """The job has failed."""
        return

    def begun(self, now_s: float) -> None:
        """It trains again."""
        return


class EverySteps(Cadence):
    """A checkpoint at every multiple of ``steps``."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def due(self, next_step: int, now_s: float) -> bool:
        """Whether ``next_step`` is a multiple."""
        return next_step % self.steps == 0

    def due_s(self, step: int, now_s: float, step_s: float) -> float:
        """After the steps that are missing."""
        return now_s + (self.steps - step % self.steps) * step_s


class EverySeconds(Cadence):
    """A checkpoint when ``seconds`` have passed since the last one, or since ``start_s``."""

    def __init__(self, seconds: float, start_s: float) -> None:
        self.seconds = seconds
        self._last_s = start_s

    def due(self, next_step: int, now_s: float) -> bool:
        """Whether the time has come."""
        return now_s >= self._last_s + self.seconds

    def due_s(self, step: int, now_s: float, step_s: float) -> float:
        """When they will have passed."""
        return self._last_s + self.seconds

    def taken(self, step: int, now_s: float, blocked_s: float) -> None:
        """Count from here."""
        self._last_s = now_s

    def begun(self, now_s: float) -> None:
        """Count from here."""
        self._last_s = now_s


class Auto:
    """The interval at which least is lost, from measured cost and observed failures.

    Args:
        start_s: when training begins.
        known: what is known of failures; nothing unless it is given.
        costs_s: what the newest checkpoints of earlier attempts cost, oldest first.
        storms: whether the attempt before has told of a burst that was not over.
        overhead: share of the time that saving takes at most while there is no evidence.
    """

    def __init__(
        self,
        start_s: float,
        known: Hazard | None = None,
        costs_s: Sequence[float] = (),
        *,
        storms: bool = False,
        overhead: float = OVERHEAD,
    ) -> None:
        self._overhead = overhead
        self._last_s = self._told_s = self._begun_s = start_s
        self._known = known or of_a_new_job()
        self._costs_s: deque[float] = deque(costs_s, maxlen=COSTS_KEPT)
        self._chosen: Change | None = None
        self._untold: Change | None = None
        self._storms = storms
        self._choose()
        if self._untold is self._chosen:
            self._untold = None  # as it was in the attempt before

    @property
    def interval_s(self) -> float:
        """Seconds from one checkpoint to the next, at the mean rate."""
        return self._chosen.interval_s if self._chosen else AUTO_FIRST_S

    def due(self, next_step: int, now_s: float) -> bool:
        """Whether the interval of this moment has passed."""
        return now_s >= self._due_s

    def due_s(self, step: int, now_s: float, step_s: float) -> float:
        """When it will have passed."""
        return self._due_s

    def taken(self, step: int, now_s: float, blocked_s: float) -> None:
        """Learn what one costs: the mean of the latest."""
        self._ran(now_s, failed=False)
        self._last_s = now_s
        self._costs_s.append(blocked_s)
        self._choose()

    def lost(self, now_s: float) -> None:
        """Learn from a failure."""
        self._ran(now_s, failed=True)
        self._choose()

    def begun(self, now_s: float) -> None:
        """Count from here: while the job was down it could not fail."""
        self._last_s = self._told_s = self._begun_s = now_s
        self._wait()

    def forget_costs(self) -> None:
        """What checkpoints were seen to cost so far was not all of it."""
        self._costs_s.clear()

    def changed(self) -> Change | None:
        """The latest change that was not asked for yet."""
        change, self._untold = self._untold, None
        return change

    @property
    def storms(self) -> bool:
        """Whether checkpoints come much closer together than in calm."""
        return self._storms

    def _wait(self) -> None:
        """Choose the next moment: the wait whose middle has the rate that it is best for."""
        calm_s = AUTO_FIRST_S
        if self._chosen is not None:
            interval_s = self._chosen.interval_s
            middle_h = (self._last_s - self._begun_s + interval_s / 2) / HOUR_S
            calm_s = interval_s * bunched(middle_h * self._chosen.failures_per_h)
            calm_s = min(max(calm_s, AUTO_MIN_S), AUTO_MAX_S)
        wait_s = sooner_s(calm_s, self._cost_s, self._known)
        if not self._known.is_proven:
            up_s = self._last_s - self._begun_s
            wait_s = min(wait_s, GROWS * up_s) if up_s else wait_s
        if self._costs_s:
            wait_s = max(wait_s, least_s(self._cost_s, self._known, self._overhead))
        self._due_s = self._last_s + wait_s
        if self._chosen is not None:
            self._tell_of_storm(wait_s, calm_s)

    def _tell_of_storm(self, wait_s: float, calm_s: float) -> None:
        """Say it when a storm has begun, and when it is over; that there may be one is no news."""
        times = calm_s / wait_s if self._known.calm.num_seen else 1.0
        if self._storms != (times > (STORM_OVER if self._storms else STORM)):
            self._storms = not self._storms
            before_s = self._chosen.interval_s if self._chosen else None
            words = "failures come in a burst" if self._storms else "the burst is over"
            self._untold = self._change(
                wait_s if self._storms else calm_s,
                before_s,
                self._known.calm_per_h + self._known.burst_per_h(),
                words,
            )

    @property
    def _cost_s(self) -> float:
        costs = self._costs_s
        return sum(costs) / len(costs) if costs else AUTO_GUESS_S

    def _ran(self, now_s: float, *, failed: bool) -> None:
        hours = max(now_s - self._told_s, 0.0) / HOUR_S
        self._told_s = now_s
        self._known = self._known.after(hours, failed=failed)

    def _choose(self) -> None:
        if self._costs_s:
            cost_s, per_h = self._cost_s, self._known.calm_per_h
            best_h = exact_best_h(Costs(checkpoint_h=cost_s / HOUR_S), per_h)
            wanted_s = min(max(best_h * HOUR_S, AUTO_MIN_S), AUTO_MAX_S)
            before = self._chosen
            if not before or not 1 / AUTO_CHANGE < wanted_s / before.interval_s < AUTO_CHANGE:
                before_s = before.interval_s if before else None
                reason = _reason(before, cost_s, per_h)
                self._chosen = self._change(wanted_s, before_s, per_h, reason)
                if not self._storms:  # else it is not what holds, and hides what was told of that
                    self._untold = self._chosen
        self._wait()

    def _change(
        self, interval_s: float, before_s: float | None, per_h: float, reason: str
    ) -> Change:
        return Change(
            burst=self._storms,
            interval_s=interval_s,
            before_s=before_s,
            cost_s=self._cost_s,
            failures_per_h=per_h,
            num_seen=self._known.calm.num_seen,
            seen_h=self._known.calm.seen_h,
            reason=reason,
        )


def sooner_s(calm_s: float, cost_s: float, known: Hazard, share: float = 1.0) -> float:
    """How long to wait where there may be a burst: as is best for the rate in its middle.

    Args:
        calm_s: how long in calm.
        cost_s: of a checkpoint.
        known: how often the job fails just now.
        share: of the failures that the checkpoint is needed for.
    """
    if not known.bursts or not share:
        return calm_s
    costs = Costs(checkpoint_h=max(cost_s, COST_LEAST_S) / HOUR_S)
    shortest_s = AUTO_LEAST * HOUR_S / ((known.calm_per_h + known.burst_per_h()) * share)
    wait_s = 0.0
    for _ in range(ROUNDS):
        rate = share * known.burst_per_h(wait_s / 2 / HOUR_S)
        best_s = HOUR_S * exact_best_h(costs, rate) if rate > NO_RATE else math.inf
        # Rates add up, and an interval goes with the root of its rate.
        both_s = max(1 / math.hypot(1 / calm_s, 1 / best_s), min(shortest_s, calm_s))
        is_found = abs(both_s - wait_s) <= CLOSE * both_s
        wait_s = both_s
        if is_found:
            break
    return wait_s


def least_s(cost_s: float, known: Hazard, overhead: float) -> float:
    """How long to wait at least: while a belief is all there is, saving is to cost little.

    Args:
        cost_s: of a checkpoint.
        known: what is known of failures.
        overhead: share of the time that it may take.
    """
    return 0.0 if known.is_proven else cost_s * (1 / overhead - 1)


def cost_of(blocked_s: float, took_s: float) -> float:
    """What a checkpoint costs training, in seconds.

    Besides what it blocks the loop for, copying and writing make steps longer: measured between 0.1
    of the time until it is durable, where cores are to spare, and 0.9 where none is
    (docs/performance.md, "What a save takes from the steps").
    """
    return blocked_s + BURDEN * took_s


def bunched(up: float) -> float:
    """How much longer than at the mean rate to wait, ``up`` mean times after the last failure.

    √(mean rate / hazard) of a Weibull distribution with shape ``AUTO_SHAPE`` (k): its hazard over
    its mean rate is k g (up g)^(k-1), with g = Γ(1 + 1/k).
    """
    if up <= 0:
        return 0.0
    hazard = AUTO_SHAPE * _SHAPE_GAMMA * (up * _SHAPE_GAMMA) ** (AUTO_SHAPE - 1)
    return 1 / math.sqrt(hazard)


def _reason(before: Change | None, cost_s: float, per_h: float) -> str:
    """Which of the two has changed more."""
    if before is None:
        return "the first checkpoint was measured"
    if not before.cost_s or not cost_s:
        return "checkpoints cost something else"
    by_cost, by_rate = math.log(cost_s / before.cost_s), math.log(per_h / before.failures_per_h)
    if abs(by_cost) > abs(by_rate):
        return f"checkpoints cost training {'more' if by_cost > 0 else 'less'}"
    return f"the job fails {'more often' if by_rate > 0 else 'less often'}"


class Hurried:
    """Another cadence, and besides it Young's interval for a machine that will soon be gone."""

    def __init__(self, inner: Cadence) -> None:
        self.inner = inner
        self._last_s: float | None = None  # the first one is due at once
        self._interval_s = HURRIED_MIN_S

    def due(self, next_step: int, now_s: float) -> bool:
        """Whether either says so."""
        if self._last_s is None or now_s - self._last_s >= self._interval_s:
            return True
        return self.inner.due(next_step, now_s)

    def due_s(self, step: int, now_s: float, step_s: float) -> float:
        """When the earlier of both will."""
        own_s = now_s if self._last_s is None else self._last_s + self._interval_s
        return min(own_s, self.inner.due_s(step, now_s, step_s))

    def taken(self, step: int, now_s: float, blocked_s: float) -> None:
        """Count from here."""
        self._last_s = now_s
        young = math.sqrt(2 * blocked_s * HURRIED_MTBF_S)
        self._interval_s = min(max(young, HURRIED_MIN_S), HURRIED_MAX_S)
        self.inner.taken(step, now_s, blocked_s)

    def lost(self, now_s: float) -> None:
        """The other cadence may learn from it."""
        self.inner.lost(now_s)

    def begun(self, now_s: float) -> None:
        """Again at once."""
        self._last_s = None
        self.inner.begun(now_s)


def cadence(
    steps: int | None,
    seconds: float | None,
    now_s: float,
    known: Hazard | None = None,
    costs_s: Sequence[float] = (),
    *,
    storms: bool = False,
    overhead: float = OVERHEAD,
) -> Cadence:
    """The cadence that the settings ask for: by steps, by seconds, or (both None) automatic.

    Args:
        steps: as it is set.
        seconds: likewise.
        now_s: when training begins.
        known: what is known of the job's failures.
        costs_s: what its newest checkpoints cost, oldest first.
        storms: whether failures were last said to come in a burst.
        overhead: share of the time that saving takes at most while there is no evidence.
    """
    if steps is not None:
        return EverySteps(steps)
    if seconds is not None:
        return EverySeconds(seconds, now_s)
    return Auto(now_s, known, costs_s, storms=storms, overhead=overhead)
