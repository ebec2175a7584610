"""Simulate one job many times over, side by side: all replications go from failure to failure.

Between two failures a job with a fixed interval does the same again and again, so what it gets
done is known without going through its checkpoints: a turn of the loop is one failure of every
replication, whatever the number of machines. :mod:`outlast.planner.job` goes through every
checkpoint with the runtime's own objects and knows fleets, tiers and recovery modes; given the
same failures both say the same (a test compares them).

What is assumed: failures come while a job trains, saves or restores, and none while it is being
noticed (``detect_s``) that it is down; a checkpoint is worth something once it is durable,
``lag_s`` after it was taken. No failure is announced: what a notice is worth depends on what the
job does as it is heard, and that is decided in :mod:`outlast.planner.job` alone.

The runtime's ``auto`` (:class:`Automatic`) goes save by save while a burst may be on. What is known
of bursts is filtered by the runtime's own object (:class:`outlast.policy.hazard.Quiet`, which takes
many jobs as it takes one). What is made of it is :class:`outlast.policy.cadence.Auto`, with its
constants. With ``is_whole`` each wait is the one that ``Auto`` would choose (a test compares them
on storms). Without, a job goes save by save while its waits are those of a storm, less than a third
of calm's; the wait then stays as it is until the next failure, where the runtime's may also change
in between. That gives within 0.3 % of the same useful time.

Rejected: one wait from failure to failure. After any failure a burst is possible, and the wait that
is best in its first minute is many times too short for the hours after it.
"""

from __future__ import annotations

import functools
import math
from typing import Final, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from outlast.planner.draws import Law, Times
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
from outlast.policy.interval import Costs, exact_best_h

FAILURES_MAX: Final = 50_000_000  # of one replication: no computer gets there
SAME_S: Final = 1e-5  # moments that are no further apart are one
_ALL: Final = slice(None)
_GONE: Final = 1e-15  # a chance that nothing depends on


class JobCase(msgspec.Struct, frozen=True, kw_only=True):
    """One job; exactly one of ``work_s`` and ``horizon_s`` ends it.

    Attributes:
        cost_s: training is blocked for so long by a checkpoint.
        restore_s: from the new start to the first step; a failure in it begins it anew.
        detect_s: from the failure to the new start.
        lag_s: from the end of a checkpoint until it is durable.
        work_s: useful time to be done.
        horizon_s: wall time after which it is looked at.
    """

    cost_s: float
    restore_s: float = 0.0
    detect_s: float = 0.0
    lag_s: float = 0.0
    work_s: float = math.inf
    horizon_s: float = math.inf


class TimeSpent(msgspec.Struct, kw_only=True):
    """Where the time went, in seconds; one number for each replication.

    Attributes:
        useful: training that was not lost.
        stalled: checkpoints that were not lost.
        replayed: training, and checkpoints in the making, that failures undid.
        detecting, restarting: the way back.
        failures: how many there were (a number, not seconds).
    """

    useful: Times
    stalled: Times
    replayed: Times
    detecting: Times
    restarting: Times
    failures: Times

    def parts(self) -> dict[str, Times]:
        """By the names of the job's ledger; they add up to the wall time."""
        return {
            "productive": self.useful,
            "replayed": self.replayed,
            "stalled": self.stalled,
            "detecting": self.detecting,
            "restarting": self.restarting,
        }

    @property
    def wall(self) -> Times:
        """All of it."""
        return np.asarray(sum(self.parts().values()))


class FailureGaps(Protocol):
    """When the next failure comes, of many jobs."""

    def gap(self, now_s: Times) -> Times:
        """Seconds from each job's ``now_s`` to its next failure."""


class Renewed:
    """Each time a job starts, the law begins anew; with a constant hazard that is no assumption.

    Each turn has a generator of its own, that fills an array from its first number on: so the gaps
    of a job follow from the seed and its place alone, however many others stand beside it.

    Args:
        law: of the gaps.
        seed: of all of them.
        copies: how many times over the same jobs stand there, with the same gaps.
    """

    def __init__(self, law: Law, seed: int, copies: int = 1) -> None:
        self._law, self._seed, self._copies = law, seed, copies
        self._turn = 0

    def gap(self, now_s: Times) -> Times:
        """Drawn."""
        chance = np.random.default_rng((self._seed, self._turn))
        self._turn += 1
        return np.tile(self._law.draw(chance, len(now_s) // self._copies), self._copies)


class Replayed:
    """Moments that were recorded, for each job from another one of them on, and round again.

    Args:
        moments_s: in order.
        length_s: of the recording.
        offsets_s: where each job begins in it; it stands for the job's time 0.
    """

    def __init__(self, moments_s: list[float], length_s: float, offsets_s: Times) -> None:
        self._moments_s = np.unique(np.asarray(moments_s))
        self._length_s, self._offsets_s = length_s, offsets_s

    def gap(self, now_s: Times) -> Times:
        """To the next moment after it."""
        at_s = (now_s + self._offsets_s[: len(now_s)]) % self._length_s
        # A moment that was reached may be a rounding error ahead: it must not come for ever.
        index = np.searchsorted(self._moments_s, at_s + SAME_S, side="right")
        round_again = index == len(self._moments_s)
        moments = self._moments_s[np.where(round_again, 0, index)]
        return np.asarray(moments + round_again * self._length_s - at_s)


Jobs = npt.NDArray[np.intp] | slice  # some of them, or all


class Intervals(Protocol):
    """When each job saves, and what changes it."""

    def wait(self, jobs: Jobs, since_s: Times) -> tuple[Times, npt.NDArray[np.bool_]]:
        """What these jobs do next, ``since_s`` after their starts.

        Returns:
            Seconds until the next save begins; and whether it stays so until the next failure.
        """

    def saved(self, jobs: Jobs, ran_s: Times) -> None:
        """They have saved, and ran for so long since they last saved, failed or started."""

    def failed(self, ran_s: Times) -> None:
        """All jobs have failed, and ran for so long since then."""


class FixedIntervals:
    """The same for ever: one for all jobs, or one for each."""

    def __init__(self, interval_s: float | Times) -> None:
        self._interval_s = interval_s

    def wait(self, jobs: Jobs, since_s: Times) -> tuple[Times, npt.NDArray[np.bool_]]:
        """As it was given."""
        mine = self._interval_s
        chosen = mine[jobs] if isinstance(mine, np.ndarray) else np.full(len(since_s), mine)
        return chosen, np.ones(len(since_s), dtype=bool)

    def saved(self, jobs: Jobs, ran_s: Times) -> None:
        """Nothing to learn."""

    def failed(self, ran_s: Times) -> None:
        """Nor here."""


class Begun(msgspec.Struct):
    """What each job has done since its start, save by save, before its waits are all the same.

    Attributes:
        interval: that it has from then on.
        ran: until then.
        trained: of that.
        kept: of that, what is durable before the job fails.
        saves: that are.
    """

    interval: Times
    ran: Times
    trained: Times
    kept: Times
    saves: Times


def simulate(case: JobCase, failures: FailureGaps, intervals: Intervals, count: int) -> TimeSpent:
    """Simulate a job many times, side by side.

    Args:
        case: the job.
        failures: when they come.
        intervals: how often it saves.
        count: of replications.
    """
    assert math.isinf(case.work_s) != math.isinf(case.horizon_s)  # noqa: S101 - one of them ends it
    jobs = _Jobs(case, intervals, count)
    for _ in range(FAILURES_MAX):
        jobs.until_failure(failures.gap(jobs.now_s))
        if not jobs.alive.any():
            break
        jobs.come_back()
    assert not jobs.alive.any()  # noqa: S101 - whoever asks has counted the failures before
    return jobs.ledger


class _Jobs:
    """All replications, each at its own moment."""

    def __init__(self, case: JobCase, intervals: Intervals, count: int) -> None:
        self._case, self._intervals = case, intervals
        self.ledger = TimeSpent(**{name: np.zeros(count) for name in TimeSpent.__struct_fields__})
        self.now_s = np.zeros(count)
        self.alive = np.ones(count, dtype=bool)
        self._restore_s = np.zeros(count)  # nothing to restore at the first start
        self._down_s = np.zeros(count)

    def come_back(self) -> None:
        """From the failure to the new start."""
        case = self._case
        down_s = np.where(self.alive, np.minimum(case.detect_s, case.horizon_s - self.now_s), 0.0)
        self.ledger.detecting += down_s
        self.now_s += down_s
        self.alive &= self.now_s < case.horizon_s
        self._down_s = down_s
        self._restore_s = np.full(len(self.now_s), case.restore_s)

    def until_failure(self, gap_s: Times) -> None:
        """From a start to the failure after it, or to the end."""
        case, ledger, alive = self._case, self.ledger, self.alive
        to_end_s = np.where(alive, case.horizon_s - self.now_s, 0.0)
        room_s = np.where(alive, np.minimum(gap_s, to_end_s), 0.0)
        restoring = np.minimum(self._restore_s, room_s)
        has_begun = restoring >= self._restore_s
        left_s = np.where(alive, case.work_s - ledger.useful, 0.0)
        begun = self._save_by_save(np.flatnonzero(alive & has_begun), room_s - restoring, left_s)
        interval = begun.interval
        needed_s = begun.ran + _needed(left_s - begun.trained, interval, case.cost_s)
        is_done = alive & has_begun & (needed_s <= room_s - restoring)
        is_over = alive & ~is_done & (gap_s >= to_end_s - SAME_S)
        failed = alive & ~is_done & ~is_over
        run_s = np.where(is_done, needed_s, room_s - restoring)
        rest_s = run_s - begun.ran
        saves = _saved(rest_s - case.lag_s, interval, case.cost_s)
        useful = np.where(
            is_done,
            np.where(is_done, left_s, 0.0),
            np.where(
                # At the horizon nothing is lost: what is not saved or not durable yet counts.
                is_over,
                begun.trained + _trained(rest_s, interval, case.cost_s),
                begun.kept + saves * interval,
            ),
        )
        saves = begun.saves + saves
        stalled = np.where(is_done | is_over, run_s - useful, saves * case.cost_s)
        ledger.useful += useful
        ledger.stalled += stalled
        ledger.replayed += run_s - useful - stalled
        ledger.restarting += restoring
        ledger.failures += failed
        # One that fails while it comes back has learnt of nothing since the failure before.
        self._intervals.failed(np.where(has_begun, rest_s, restoring + self._down_s))
        self.now_s += restoring + run_s
        self.alive = failed

    def _save_by_save(self, going: npt.NDArray[np.intp], room_s: Times, left_s: Times) -> Begun:
        """Those that have begun, up to where their waits are all the same.

        Args:
            going: who has begun.
            room_s: from the start to the failure, or to the end.
            left_s: work that is left.
        """
        case, count = self._case, len(room_s)
        begun = Begun(np.ones(count), *np.zeros((4, count)))
        while len(going):
            jobs: Jobs = going if len(going) < count else slice(None)
            wait_s, is_same = self._intervals.wait(jobs, begun.ran[jobs])
            begun.interval[jobs] = wait_s
            took_s = wait_s + case.cost_s
            ran_s, trained_s = begun.ran[jobs] + took_s, begun.trained[jobs] + wait_s
            goes_on = ~is_same & (ran_s <= room_s[jobs]) & (trained_s < left_s[jobs])
            chosen = np.flatnonzero(goes_on)
            going, ran_s, trained_s = going[chosen], ran_s[chosen], trained_s[chosen]
            is_kept = ran_s + case.lag_s <= room_s[going]
            begun.ran[going], begun.trained[going] = ran_s, trained_s
            begun.kept[going] = np.where(is_kept, trained_s, begun.kept[going])
            begun.saves[going] += is_kept
            if len(going):
                self._intervals.saved(going, took_s[chosen])
        return begun


def _saved(run_s: Times, interval: Times, cost_s: float) -> Times:
    """Checkpoints that are complete after so long."""
    return np.asarray(np.floor(np.maximum(run_s, 0.0) / (interval + cost_s) * (1 + 1e-15)))


def _trained(run_s: Times, interval: Times, cost_s: float) -> Times:
    """Training that was done in so long, saved or not."""
    saves = _saved(run_s, interval, cost_s)
    return np.asarray(saves * interval + np.minimum(run_s - saves * (interval + cost_s), interval))


def _needed(left_s: Times, interval: Times, cost_s: float) -> Times:
    """Time without a failure until the work is done: its last part is saved, too."""
    with np.errstate(invalid="ignore"):
        saves = np.ceil(left_s / interval - 1e-9)
        return np.asarray(np.where(np.isinf(left_s), np.inf, left_s + saves * cost_s))


# --- the runtime's auto ---------------------------------------------------------------------------


class Automatic:
    """The cadence ``Auto`` of many jobs, with the runtime's numbers.

    Args:
        cost_s: of a checkpoint; known once the first one is taken.
        count: of jobs.
        is_whole: whether each wait is chosen by itself, up to the next failure.
    """

    def __init__(self, cost_s: float, count: int, *, is_whole: bool = False) -> None:
        self._cost_s, self._is_whole = cost_s, is_whole
        self._num_seen, self._seen_h = np.zeros(count), np.zeros(count)
        self._kinds = np.array(KINDS).T[:, :, None]
        self._possible = _ALL  # of the rates, those that a burst of any job can have
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
        self._learn(_ALL, failed=True)

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
        while first and self._bursts[:first].max() > _GONE:
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


@functools.cache
def _best() -> Times:
    costs = (Costs(checkpoint_h=math.exp(_LEAST + number * _STEP)) for number in range(_POINTS))
    return np.log([exact_best_h(one, 1.0) for one in costs])


def best_h(cost_h: Times, per_h: Times) -> Times:
    """:func:`exact_best_h` of many, within 1e-5."""
    with np.errstate(divide="ignore"):
        place = (np.log(cost_h * per_h) - _LEAST) / _STEP
    place = np.minimum(np.maximum(place, 0.0), _POINTS - 1.001)
    index = place.astype(np.intp)
    share = place - index
    best = _best()
    return np.asarray(np.exp(best[index] * (1 - share) + best[index + 1] * share) / per_h)


def _calm_s(interval_s: Times, up: Times) -> Times:
    """The wait without bursts, so many mean times after the last failure."""
    grows = (1 - auto.AUTO_SHAPE) / 2  # see :func:`auto.bunched`
    wait_s = interval_s * auto.bunched(1.0) * up**grows
    return np.asarray(np.minimum(np.maximum(wait_s, auto.AUTO_MIN_S), auto.AUTO_MAX_S))
