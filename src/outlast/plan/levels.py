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

import functools
import math
from collections.abc import Sequence
from typing import Final, NamedTuple

_LEAST_STAYS: Final = 1e-10


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
        """Any number of times, none included.

        Raises:
            OverflowError: so many times that of 1 less the chance few digits are left.
        """
        stays = 1 - self.chance
        if stays < _LEAST_STAYS:
            raise OverflowError
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
            count >>= 1
            power = power.then(power) if count else power
        return whole


class Levels:
    """One job.

    Args:
        cost_s: of a checkpoint of each level.
        failures_per_s: of each level; 0 is a level that nothing ever needs.
        counts: checkpoints of level k between two of the next, for all levels but the last; with 0
            a level has none, and what it would have survived falls to the next.
        restore_s: to read a checkpoint of each level back; without it, as long as saving it.
    """

    def __init__(
        self,
        cost_s: Sequence[float],
        failures_per_s: Sequence[float],
        counts: Sequence[int],
        restore_s: Sequence[float] | None = None,
    ) -> None:
        self._cost_s, self._per_s, self._counts = cost_s, failures_per_s, counts
        self._restore_s = cost_s if restore_s is None else restore_s
        self._rate = math.fsum(failures_per_s)
        self._top = len(cost_s)

    def efficiency(self, interval_s: float) -> float:
        """Useful time over wall time, when a checkpoint is taken each ``interval_s`` of work."""
        if interval_s <= 0 or math.isinf(interval_s):
            return float(interval_s > 0 and not self._rate)
        try:
            whole = self._whole(interval_s)
        except OverflowError:
            return 0.0  # so slow that floats have no word for it
        intervals = math.prod(count + 1 for count in self._counts)
        wall_s = whole.well.spent / whole.well.chance if whole.well.chance > 0 else math.inf
        return intervals * interval_s / wall_s if wall_s > 0 else 0.0

    def _whole(self, interval_s: float) -> Stretch:
        """From a checkpoint of the last level to the next one, whatever fails.

        ``to[last]`` is a stretch that ends in a checkpoint of level ``last``: at first one interval
        alone, then with all that lies between two checkpoints of each level in turn.
        """
        to = {last: self._run(interval_s + cost_s) for last, cost_s in enumerate(self._cost_s, 1)}
        for level, count in enumerate(self._counts, 1):
            stretch = to.pop(level)
            if count:
                first = stretch.then(self._recovered(level, stretch).times(count - 1))
                to = {last: first.then(self._recovered(level, end)) for last, end in to.items()}
        return self._recovered(self._top, to[self._top])

    def _run(self, seconds: float) -> Stretch:
        """Running for so long."""
        if not self._rate:
            return Stretch(Way(1.0, seconds), (_NEVER,) * self._top)
        quiet = math.exp(-self._rate * seconds)
        failed = -math.expm1(-self._rate * seconds)
        spent = (failed - self._rate * seconds * quiet) / self._rate
        shares = [rate / self._rate for rate in self._per_s]
        fails = tuple(Way(share * failed, share * spent) for share in shares)
        return Stretch(Way(quiet, quiet * seconds), fails)

    @functools.cached_property
    def _back(self) -> tuple[Stretch, ...]:
        return tuple(self._restored(level) for level in range(1, self._top + 1))

    def _restored(self, level: int) -> Stretch:
        """Reading back a checkpoint of this level, until it is there or a higher one is needed."""
        run = self._run(self._restore_s[level - 1])
        is_top = level == self._top
        again, above = _NEVER, list(run.fails)
        for number in range(1, level + is_top):
            again, above[number - 1] = again.plus(run.fails[number - 1]), _NEVER
        if not is_top:
            above[level] = above[level].plus(above[level - 1])
            above[level - 1] = _NEVER
        tries = again.repeated()
        return Stretch(tries.then(run.well), tuple(tries.then(way) for way in above))

    def _recovered(self, level: int, once: Stretch) -> Stretch:
        """A stretch whose failures up to ``level`` are made good by reading that level back."""
        back = self._back[level - 1]
        failed = _NEVER
        for way in once.fails[:level]:
            failed = failed.plus(way)
        tries = failed.then(back.well).repeated()
        fails = tuple(
            _NEVER if number < level else tries.then(way.plus(failed.then(back.fails[number])))
            for number, way in enumerate(once.fails)
        )
        return Stretch(tries.then(once.well), fails)
