"""The runtime's ``auto`` of many jobs at once, in arrays.

What is known of bursts is filtered by the runtime's own object (:class:`.hazard.Quiet`, which takes
many jobs as it takes one). What is made of it is :class:`outlast.policy.cadence.Auto`, with its
constants.

Guarantees: with ``is_whole`` each wait is the one that ``Auto`` would choose (a test compares them
on storms). Without, a job goes save by save while its waits are those of a storm, less than a third
of calm's; and the wait then stays as it is until the next failure, as equal waits need not be gone
through one by one. That gives within 0.3 % of the same useful time.

Rejected: one wait from failure to failure. After any failure a burst is possible, and the wait that
is best in its first minute is many times too short for the hours after it.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from outlast.plan.interval import Costs, exact_best_h
from outlast.policy import cadence as auto
from outlast.policy.cadence import HOUR_S
from outlast.policy.hazard import (
    FASTER,
    KINDS,
    MEMORY_H,
    NEGLIGIBLE,
    PRIOR,
    RATES,
    Quiet,
    is_evidence,
    of_a_new_job,
)
from outlast.simulate.draws import Times
from outlast.simulate.many import Jobs

ALL: Final = slice(None)
GONE: Final = 1e-15  # a chance that nothing depends on


class Automatic:
    """``Auto`` of many jobs, with the same numbers.

    Args:
        cost_s: of a checkpoint; known once the first one is taken.
        count: of jobs.
        is_whole: whether each wait is chosen by itself, up to the next failure.
    """

    def __init__(self, cost_s: float, count: int, *, is_whole: bool = False) -> None:
        self._cost_s, self._is_whole = cost_s, is_whole
        self._num_seen, self._seen_h = np.zeros(count), np.zeros(count)
        self._kinds = np.array(KINDS).T[:, :, None]
        self._possible = ALL  # of the rates, those that a burst of any job can have
        self._bursts = np.tile(np.array(of_a_new_job().bursts)[:, None], count)
        self._interval_s = np.full(count, auto.AUTO_FIRST_S)
        self._chosen_per_h = np.zeros(count)
        self._is_known = np.zeros(count, dtype=bool)
        self._ran_s, self._wait_s = np.zeros(count), np.zeros(count)
        self._last: Quiet | None = None

    @property
    def calm_per_h(self) -> Times:
        """Of each job: failures per hour outside of bursts, as it believes."""
        return (PRIOR.shape + self._num_seen) / (PRIOR.exposure_h + self._seen_h)

    def wait(self, jobs: Jobs, since_s: Times) -> tuple[Times, npt.NDArray[np.bool_]]:
        """Until the next save, and whether it is the same until the next failure."""
        interval_s, is_known = self._interval_s[jobs], self._is_known[jobs]
        up = (since_s + interval_s / 2) / HOUR_S * self._chosen_per_h[jobs]
        calm_s = np.where(is_known, _calm_s(interval_s, up), auto.AUTO_FIRST_S)
        wait_s = self._in_bursts(jobs, calm_s, is_known)
        is_proven = is_evidence(self._num_seen[jobs], self._seen_h[jobs])
        most_s = np.where(is_proven | (since_s <= 0), np.inf, auto.GROWS * since_s)
        bound_s = np.where(is_known & ~is_proven, self._cost_s * (1 / auto.OVERHEAD - 1), 0.0)
        wait_s = np.maximum(np.minimum(wait_s, most_s), bound_s)
        if self._is_whole:
            return wait_s, np.zeros_like(is_known)
        self._wait_s[jobs] = wait_s
        is_calm = is_known & is_proven & (wait_s * auto.STORM > calm_s)
        # It grows until the failure: what it is half a mean time later.
        return np.where(is_calm, _calm_s(interval_s, up + 0.5), wait_s), is_calm

    def saved(self, jobs: Jobs, ran_s: Times) -> None:
        """They ran for so long since they were last told of, and have saved."""
        is_new = not self._is_known[jobs].all()
        self._is_known[jobs] = True
        self._ran_s[jobs] += ran_s
        if self._is_whole or is_new:
            self._learn(jobs, failed=False)

    def failed(self, ran_s: Times) -> None:
        """All of them ran for so long, and have failed."""
        self._ran_s += ran_s
        self._learn(ALL, failed=True)

    def _in_bursts(self, jobs: Jobs, calm_s: Times, is_known: npt.NDArray[np.bool_]) -> Times:
        """The rounds of :func:`outlast.policy.cadence.sooner_s`, until a wait and its rate fit."""
        calm_per_h, quiet, ran_s = self.calm_per_h[jobs], self._quiet(jobs), self._ran_s[jobs]
        cost_s = np.where(is_known, self._cost_s, auto.AUTO_GUESS_S)
        cost_h = np.maximum(cost_s, auto.COST_LEAST_S) / HOUR_S
        per_h = quiet.adds_per_h(ran_s / HOUR_S)
        least_s = np.minimum(auto.AUTO_LEAST * HOUR_S / (calm_per_h + per_h), calm_s)
        # After a quiet wait the next one is longer, and no round makes it shorter.
        wait_s = np.where(ran_s > 0, self._wait_s[jobs], 0.0)
        going = np.arange(len(calm_s))
        for _ in range(auto.ROUNDS):
            if wait_s.any():
                per_h = quiet.adds_per_h((ran_s[going] + wait_s[going] / 2) / HOUR_S)
            best_s = HOUR_S * best_h(cost_h[going], np.maximum(per_h, auto.NO_RATE))
            both_s = np.maximum(1 / np.sqrt(calm_s[going] ** -2 + best_s**-2), least_s[going])
            is_found = np.abs(both_s - wait_s[going]) <= auto.CLOSE * both_s
            wait_s[going] = both_s
            if not self._is_whole:
                is_found |= both_s * auto.STORM > calm_s[going]
            left = np.flatnonzero(~is_found)
            if not len(left):
                break
            going, quiet = going[left], quiet.of(left)
        return wait_s

    def _learn(self, jobs: Jobs, *, failed: bool) -> None:
        """As :meth:`Hazard.after` does; then choose as :meth:`Auto._choose` does."""
        hours = self._ran_s[jobs] / HOUR_S
        after = self._quiet(jobs).after(hours, failed=failed)
        kept_share = np.exp(-np.maximum(hours - after.burst_h, 0.0) / MEMORY_H)
        self._num_seen[jobs] = self._num_seen[jobs] * kept_share + after.own
        self._seen_h[jobs] = self._seen_h[jobs] * kept_share + MEMORY_H * (1 - kept_share)
        self._bursts[self._possible, jobs] = after.bursts * (after.bursts.max(axis=0) > NEGLIGIBLE)
        self._ran_s[jobs] = 0.0
        if failed:
            self._leave_out()
        self._last = None
        self._choose(jobs)

    def _leave_out(self) -> None:
        """The slowest rates, where all jobs fail so often that these would be no burst."""
        least_per_h = float(self.calm_per_h.min())
        first = sum(rate <= FASTER * least_per_h for rate in RATES[:-1])
        while first and self._bursts[:first].max() > GONE:
            first -= 1
        self._possible = slice(first, None)

    def _quiet(self, jobs: Jobs) -> Quiet:
        """What is known of their bursts, as they were last told of."""
        some = self._possible
        if self._last is None:
            self._last = Quiet(self._kinds[:, some], self._bursts[some], self.calm_per_h)
        return self._last if isinstance(jobs, slice) else self._last.of(jobs)

    def _choose(self, jobs: Jobs) -> None:
        """Another interval, where it is a sixth off."""
        per_h, is_known, interval_s = (
            self.calm_per_h[jobs],
            self._is_known[jobs],
            self._interval_s[jobs],
        )
        wanted_s = HOUR_S * best_h(np.full(len(per_h), self._cost_s / HOUR_S), per_h)
        wanted_s = np.clip(wanted_s, auto.AUTO_MIN_S, auto.AUTO_MAX_S)
        ratio = wanted_s / interval_s
        is_same = (ratio < auto.AUTO_CHANGE) & (ratio > 1 / auto.AUTO_CHANGE)
        is_other = is_known & ~(is_same & (self._chosen_per_h[jobs] > 0))
        self._interval_s[jobs] = np.where(is_other, wanted_s, interval_s)
        self._chosen_per_h[jobs] = np.where(is_other, per_h, self._chosen_per_h[jobs])


# ``exact_best_h`` for a rate of 1, by the logarithm of the cost: its own loop is for one number.
_LEAST, _MOST, _POINTS = math.log(1e-14), math.log(1e4), 6000
_STEP: Final = (_MOST - _LEAST) / (_POINTS - 1)
_BEST: Final = np.log(
    [
        exact_best_h(Costs(checkpoint_h=math.exp(_LEAST + number * _STEP)), 1.0)
        for number in range(_POINTS)
    ]
)


def best_h(cost_h: Times, per_h: Times) -> Times:
    """:func:`exact_best_h` of many, within 1e-5."""
    with np.errstate(divide="ignore"):
        place = (np.log(cost_h * per_h) - _LEAST) / _STEP
    place = np.minimum(np.maximum(place, 0.0), _POINTS - 1.001)
    index = place.astype(np.intp)
    share = place - index
    return np.asarray(np.exp(_BEST[index] * (1 - share) + _BEST[index + 1] * share) / per_h)


def _calm_s(interval_s: Times, up: Times) -> Times:
    """The wait without bursts, so many mean times after the last failure."""
    grows = (1 - auto.AUTO_SHAPE) / 2  # see :func:`auto.bunched`
    wait_s = interval_s * auto.bunched(1.0) * up**grows
    return np.asarray(np.minimum(np.maximum(wait_s, auto.AUTO_MIN_S), auto.AUTO_MAX_S))
