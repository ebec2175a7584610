"""One job many times over, side by side: all replications go from failure to failure together.

Between two failures a job with a fixed interval does the same again and again, so what it gets
done is known without going through its checkpoints: a turn of the loop is one failure of every
replication, whatever the number of machines. :mod:`outlast.simulate.job` goes through every
checkpoint with the runtime's own objects and knows fleets, tiers and recovery modes; given the
same failures both say the same (a test compares them). The ``auto`` cadence goes save by save while
a burst may be on, and keeps its interval from then to the next failure
(:mod:`outlast.simulate.automatic`), where the runtime's may also change it in between.

What is assumed: failures come while a job trains, saves or restores, and none while it is being
noticed (``detect_s``) that it is down; a checkpoint is worth something once it is durable,
``lag_s`` after it was taken. No failure is announced: what a notice is worth depends on what the
job does as it is heard, and that is decided in :mod:`outlast.simulate.job` alone.
"""

from __future__ import annotations

import math
from typing import Final, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from outlast.simulate.draws import Law, Times

FAILURES_MAX: Final = 50_000_000  # of one replication: no computer gets there
SAME_S: Final = 1e-5  # moments that are no further apart are one


class Case(msgspec.Struct, frozen=True, kw_only=True):
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


class Ledger(msgspec.Struct, kw_only=True):
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


class Failures(Protocol):
    """When the next one comes."""

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


class Fixed:
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


def simulate(case: Case, failures: Failures, intervals: Intervals, count: int) -> Ledger:
    """Go through all of it.

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

    def __init__(self, case: Case, intervals: Intervals, count: int) -> None:
        self._case, self._intervals = case, intervals
        self.ledger = Ledger(**{name: np.zeros(count) for name in Ledger.__struct_fields__})
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
