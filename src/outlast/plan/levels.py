"""Several levels of checkpoints, exactly: the Markov model of Moody et al. (SC'10).

Levels are numbered from 1, the cheapest. A failure of level i is survived by checkpoints of level i
and above; the job then reads the newest of those, and goes on from there. Between two checkpoints
of level k+1 lie ``counts[k]`` of level k. Failures are exponential, and strike while computing,
saving and restoring. One that comes while level k is read back needs level k again if it is below
k, and the next level if it is k: the copy that was being read is gone.

How it is computed: each stretch of the job ends well or with a failure of some level, and each way
out has a probability and a mean time. Carried together as p + p·t·ε with ε² = 0, doing one stretch
after the other is a product and trying again a geometric series, so that the recursion over levels
is a few lines of arithmetic, without a matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple


class Way(NamedTuple):
    """A way out: its probability, and probability times mean time."""

    chance: float
    spent: float

    def then(self, other: Way) -> Way:
        """This, and the other one after it."""
        return Way(
            self.chance * other.chance, self.chance * other.spent + self.spent * other.chance
        )

    def plus(self, other: Way) -> Way:
        """This or the other one."""
        return Way(self.chance + other.chance, self.spent + other.spent)

    def repeated(self) -> Way:
        """Any number of times, none included."""
        stays = 1 - self.chance
        return Way(1 / stays, self.spent / stays**2)


_NEVER: Final = Way(0.0, 0.0)
_ALWAYS: Final = Way(1.0, 0.0)


class Stretch(NamedTuple):
    """Part of a job: how it ends well, and by a failure of each level (index 0 is level 1)."""

    well: Way
    fails: tuple[Way, ...]

    def then(self, other: Stretch) -> Stretch:
        """This, and if it ends well the other one."""
        after = [self.well.then(way) for way in other.fails]
        fails = tuple(way.plus(later) for way, later in zip(self.fails, after, strict=True))
        return Stretch(self.well.then(other.well), fails)

    def times(self, count: int) -> Stretch:
        """This so many times in a row."""
        whole, power = Stretch(_ALWAYS, (_NEVER,) * len(self.fails)), self
        while count:
            if count & 1:
                whole = whole.then(power)
            power, count = power.then(power), count >> 1
        return whole


class Levels:
    """One job.

    Args:
        cost_s: of a checkpoint of each level; reading one back takes as long.
        failures_per_s: of each level.
        counts: checkpoints of level k between two of the next, for all levels but the last.
    """

    def __init__(
        self, cost_s: Sequence[float], failures_per_s: Sequence[float], counts: Sequence[int]
    ) -> None:
        self._cost_s, self._per_s, self._counts = cost_s, failures_per_s, counts
        self._rate = math.fsum(failures_per_s)
        self._top = len(cost_s)

    def efficiency(self, interval_s: float) -> float:
        """Useful time over wall time, when a checkpoint is taken each ``interval_s`` of work."""
        if interval_s <= 0:
            return 0.0
        try:
            whole = self._recovered(self._top, self._top, interval_s)
        except (OverflowError, ZeroDivisionError):
            return 0.0  # so slow that floats have no word for it
        intervals = math.prod(count + 1 for count in self._counts)
        wall_s = whole.well.spent / whole.well.chance if whole.well.chance > 0 else math.inf
        return intervals * interval_s / wall_s if wall_s > 0 else 0.0

    def _run(self, seconds: float) -> Stretch:
        """Running for so long."""
        quiet = math.exp(-self._rate * seconds)
        failed = -math.expm1(-self._rate * seconds)
        spent = (failed - self._rate * seconds * quiet) / self._rate
        shares = [rate / self._rate for rate in self._per_s]
        fails = tuple(Way(share * failed, share * spent) for share in shares)
        return Stretch(Way(quiet, quiet * seconds), fails)

    def _restored(self, level: int) -> Stretch:
        """Reading back a checkpoint of this level, until it is there or a higher one is needed."""
        run = self._run(self._cost_s[level - 1])
        is_top = level == self._top
        again, above = _NEVER, list(run.fails)
        for number in range(1, level + is_top):
            again, above[number - 1] = again.plus(run.fails[number - 1]), _NEVER
        if not is_top:
            above[level] = above[level].plus(above[level - 1])
            above[level - 1] = _NEVER
        tries = again.repeated()
        return Stretch(tries.then(run.well), tuple(tries.then(way) for way in above))

    def _recovered(self, level: int, last: int, interval_s: float) -> Stretch:
        """A stretch whose failures up to ``level`` are made good, ending in one of ``last``."""
        once, back = self._protected(level, last, interval_s), self._restored(level)
        failed = _NEVER
        for way in once.fails[:level]:
            failed = failed.plus(way)
        tries = failed.then(back.well).repeated()
        fails = tuple(
            _NEVER if number < level else tries.then(way.plus(failed.then(back.fails[number])))
            for number, way in enumerate(once.fails)
        )
        return Stretch(tries.then(once.well), fails)

    def _protected(self, level: int, last: int, interval_s: float) -> Stretch:
        """From a checkpoint of ``level`` to one of ``last``, with those of lower levels between."""
        if level == 1:
            return self._run(interval_s + self._cost_s[last - 1])
        below = level - 1
        count = self._counts[below - 1]
        if not count:
            return self._protected(below, last, interval_s)
        first = self._protected(below, below, interval_s)
        more = self._recovered(below, below, interval_s).times(count - 1)
        return first.then(more).then(self._recovered(below, last, interval_s))
