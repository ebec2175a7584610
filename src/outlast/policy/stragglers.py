"""Which rank holds the others up, by what, since when; from the times of all ranks at the same steps.

Only times of one rank are added or subtracted, never clocks of two machines compared. A rank is
compared with the others of its kind at the same step: how much more time its own work takes than
the median of theirs, in parts of that. In a synchronous step the late rank waits least, so whoever
is named must be waited for as well: what takes long on a rank and holds nobody up is not named.

==========  =====================================================================================
cause       when
==========  =====================================================================================
compute     its computing took longer in ``LASTING`` of the last ``WINDOW`` steps, and the median
            of what it took longer is above the floor and above what chance does
loader      the same with its wait for batches; or, where a loader's processes deliver in clumps,
            in the mean over ``CLUMPED`` steps, without the worst
burst       the same over ``SHORT`` steps, and it was over before it was lasting
==========  =====================================================================================

The floor is ``RELATIVE`` of a step and ``ABSOLUTE_S``. What chance does is told from the ranks' own
noise in the window (the median of their MADs), and from how far healthy ranks of a large job lie
apart. One pause, however long, moves no median: it is not named. Who was named stays so until its
excess is below half of what it was named for.

Steps in which a save was under way are left aside, since ranks write different shares; where most
steps are such, they are judged as well, and the finding says so.

What can go wrong: a kind that one rank alone has (a stage of a pipeline) cannot be compared;
work that is spread unevenly by design looks like a slow rank, and is one; half of two ranks' noise
is all there is to judge chance by.

Rejected: comparing with a rank's own past (a machine may be slow from the start), means (one pause
of seconds blames a healthy rank), z-scores over ranks alone (four ranks have no spread).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np

WINDOW: Final = 24
SHORT: Final = 8
CLUMPED: Final = 48
LEAST: Final = 18  # steps, before anybody is named
NOW: Final = 5  # the newest steps, which say whether it is over
LASTING: Final = 0.75
RELATIVE: Final = 0.10
ABSOLUTE_S: Final = 1e-3
CHANCE: Final = 5.0  # standard errors
SPREAD: Final = 6.0  # standard deviations between healthy ranks, where there are enough of them
SPREAD_RANKS: Final = 8
WAITED_FOR: Final = 0.3  # of its excess, by the others
BURST_STEPS: Final = 1.5  # that a burst must have cost, in steps
BURST_REST: Final = 200  # steps between two bursts of one rank that are told
WARM_UP: Final = 5  # steps of an attempt: caches, compilation
EVERY: Final = 2  # steps between two looks
_MAD: Final = 1.4826  # of a normal distribution, in standard deviations
_OF_MEDIAN: Final = 1.2533  # the standard error of a median, in those of a mean
Array = Any


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that holds the others up, or does so no more.

    Attributes:
        rank: whose.
        cause: "compute", "loader" or "burst".
        of: what took long, of a burst too: "compute" or "loader".
        factor: how many times as long as the others its own work takes, batch included.
        since_step: the step it began with.
        step: the newest step that was judged.
        own_s, others_s: what ``of`` took, on it and on the others, in the median.
        lost_s: seconds of each step that the others wait for it.
        saving: judged in steps in which saves were under way.
        over: it has recovered; of a burst always.
    """

    rank: int
    cause: str
    of: str
    factor: float
    since_step: int
    step: int
    own_s: float
    others_s: float
    lost_s: float
    saving: bool = False
    over: bool = False


class _Row(msgspec.Struct):
    """One step, by rank: excesses in parts of a step."""

    step: int
    times: dict[str, Array]  # seconds of "compute" and "loader"
    others: dict[str, Array]  # the others' medians of the same
    base: Array  # the others' median of both, together
    excess: dict[str, Array]
    lag: Array  # how much longer the others waited
    saving: bool


class Stragglers:
    """Judges one attempt.

    Args:
        kinds: of each rank, the number of its kind of work.
    """

    def __init__(self, kinds: Sequence[int]) -> None:
        self._kinds = _groups(kinds)
        self._rows: deque[_Row] = deque(maxlen=CLUMPED)
        self._num_seen = 0
        self._set_aside = 0  # of the last steps, in a row that forgets
        self._named: dict[int, Finding] = {}
        self._limits: dict[int, float] = {}  # of those named: what they were above
        self._suspects: dict[tuple[int, str], _Row] = {}  # in a short window, not named yet
        self._bursts: dict[int, int] = {}  # rank → step of its last burst that was told

    @property
    def named(self) -> Mapping[int, Finding]:
        """Who holds the others up now."""
        return self._named

    def see(self, step: int, compute: Array, wait: Array, data: Array, stall: Array) -> list[Finding]:
        """One more step, in order: seconds of all ranks.

        Returns:
            What is news: whoever is found, and whoever has recovered.
        """
        self._num_seen += 1
        if self._num_seen <= WARM_UP or len(compute) < 2:
            return []
        saving = bool((stall > 0).any())
        self._set_aside = min(self._set_aside + 1, WINDOW) if saving else max(self._set_aside - 1, 0)
        if saving and self._set_aside < WINDOW // 2:
            return []
        self._rows.append(self._row(step, compute, wait, data, saving=saving))
        if len(self._rows) < LEAST or self._num_seen % EVERY:
            return []
        return self._look()

    def _row(self, step: int, compute: Array, wait: Array, data: Array, *, saving: bool) -> _Row:
        own = compute + data
        base, waits = np.maximum(self._others(own), 1e-6), self._others(wait)
        times = {"compute": compute, "loader": data}
        others = {of: self._others(each) for of, each in times.items()}
        excess = {of: (times[of] - others[of]) / base for of in times}
        for of in excess:
            excess[of][~self._kinds.comparable] = 0.0
        return _Row(step, times, others, base, excess, waits - wait, saving)

    def _others(self, values: Array) -> Array:
        """For each rank, the median of the other ranks of its kind."""
        found = np.zeros(len(values))
        for group in self._kinds.groups:
            found[group] = _median_of_others(values[group])
        return found

    # --- a look --------------------------------------------------------------------------------

    def _look(self) -> list[Finding]:
        rows = list(self._rows)
        news = self._recovered(rows)
        for of in ("compute", "loader"):
            long = _Window(rows[-WINDOW:], of, self._kinds)
            lasting = long.lasting()
            if of == "loader" and len(rows) == CLUMPED:
                lasting |= _Window(rows, of, self._kinds).clumped()
            for rank in np.flatnonzero(lasting):
                if int(rank) not in self._named:
                    news.append(self._name(int(rank), of, rows, float(long.limit)))
            news += self._bursting(rows, of, float(long.noise))
        return news

    def _name(self, rank: int, of: str, rows: list[_Row], limit: float) -> Finding:
        found = _finding(rank, of, of, rows)
        self._named[rank], self._limits[rank] = found, limit
        for which in ("compute", "loader"):
            self._suspects.pop((rank, which), None)
        return found

    def _recovered(self, rows: list[_Row]) -> list[Finding]:
        news = []
        for rank, found in list(self._named.items()):
            recent = [row for row in rows[-WINDOW // 2 :] if row.step > found.step]
            if len(recent) < WINDOW // 2:
                continue
            excess = np.array([row.excess[found.of][rank] for row in recent])
            # Clumps move no median.
            if max(np.median(excess), np.clip(excess, -1, 1).mean()) < self._limits[rank] / 2:
                del self._named[rank], self._limits[rank]
                news.append(msgspec.structs.replace(found, step=rows[-1].step, over=True))
        return news

    def _bursting(self, rows: list[_Row], of: str, noise: float) -> list[Finding]:
        short = _Window(rows[-SHORT:], of, self._kinds, noise=noise)
        for rank in np.flatnonzero(short.lasting()):
            if int(rank) not in self._named:
                since = rows[_onset([row.excess[of][rank] for row in rows])]
                self._suspects.setdefault((int(rank), of), since)
        news = []
        for (rank, which), since in list(self._suspects.items()):
            run = [row for row in rows if row.step >= since.step]
            recent = np.array([row.excess[which][rank] for row in rows[-NOW:]])
            if which != of or np.median(recent) >= short.limit / 2:
                continue
            del self._suspects[rank, which]
            cost = float(np.clip([row.excess[of][rank] for row in run], -1, None).sum())
            rested = rows[-1].step - self._bursts.get(rank, -BURST_REST) >= BURST_REST
            if rank not in self._named and cost >= BURST_STEPS and rested:
                self._bursts[rank] = rows[-1].step
                slow = [row for row in run if row.excess[of][rank] >= short.limit / 2]
                found = _finding(rank, "burst", of, slow or run)
                step = rows[-1].step
                news.append(msgspec.structs.replace(found, step=step, over=True))
        return news


class _Groups(msgspec.Struct):
    """Ranks by their kind of work."""

    groups: list[Array]
    comparable: Array  # whether there is another one of the kind


def _groups(kinds: Sequence[int]) -> _Groups:
    of = np.asarray(kinds)
    groups = [np.flatnonzero(of == kind) for kind in dict.fromkeys(kinds)]
    comparable = np.zeros(len(of), dtype=bool)
    for group in groups:
        comparable[group] = len(group) > 1
    return _Groups(groups, comparable)


class _Window:
    """Some steps, as all ranks saw them.

    Attributes:
        noise: of one rank's excess in one step, as a standard deviation.
        limit: above which an excess is not by chance.
    """

    def __init__(
        self, rows: list[_Row], of: str, kinds: _Groups, *, noise: float | None = None
    ) -> None:
        self.excess = np.array([row.excess[of] for row in rows])
        self.median = np.median(self.excess, axis=0)
        spread = _MAD * np.median(np.abs(self.excess - self.median), axis=0)
        self.noise = float(np.median(spread)) if noise is None else noise
        chance = CHANCE * _OF_MEDIAN * self.noise / len(rows) ** 0.5
        self.limit = max(RELATIVE, chance, SPREAD * self._apart(kinds))
        self._base = np.median([row.base for row in rows], axis=0)
        self._lag = np.mean([row.lag for row in rows], axis=0)

    def _apart(self, kinds: _Groups) -> float:
        """How far healthy ranks lie apart: told from the quicker half, whoever is slow."""
        if max(len(group) for group in kinds.groups) < SPREAD_RANKS:
            return 0.0
        largest = max(kinds.groups, key=len)
        low, high = np.quantile(self.median[largest], (0.15, 0.40))
        return float(high - low) / 0.783  # between these, in standard deviations

    def lasting(self) -> Array:
        """Ranks that take longer in most of these steps, the newest ones included."""
        often = (self.excess > self.limit / 2).mean(axis=0) >= LASTING
        still = np.median(self.excess[-NOW:], axis=0) > self.limit / 2
        return (self.median > self.limit) & often & still & self._is_waited_for(self.median)

    def clumped(self) -> Array:
        """Ranks that take longer in some of these steps, again and again."""
        mean = np.sort(np.clip(self.excess, -1, 1), axis=0)[: -len(self.excess) // 10].mean(axis=0)
        late = np.clip(self.excess[-SHORT:], -1, 1).mean(axis=0) > RELATIVE
        return (mean > max(1.5 * RELATIVE, self.limit)) & late & self._is_waited_for(mean)

    def _is_waited_for(self, excess: Array) -> Array:
        seconds = excess * self._base
        return (seconds >= ABSOLUTE_S) & (self._lag >= WAITED_FOR * seconds)


def _median_of_others(values: Array) -> Array:
    """For each of the values, the median of all others; the value itself where there is none."""
    count = len(values)
    if count < 2:
        return values.copy()
    order = np.argsort(values, kind="stable")
    inorder = values[order]
    place = np.empty(count, dtype=int)
    place[order] = np.arange(count)
    low, high = (count - 2) // 2, (count - 1) // 2  # of those that are left

    def at(index: int) -> Array:
        return np.where(place <= index, inorder[min(index + 1, count - 1)], inorder[index])

    return (at(low) + at(high)) / 2


def _onset(excess: Sequence[float]) -> int:
    """Where a series begins to lie about its newest level rather than about nothing."""
    values = np.asarray(excess)
    level = float(np.median(values[-SHORT:]))
    upto = np.cumsum((np.clip(values, -level, 2 * level) - level / 2)[::-1])[::-1]
    return int(np.argmax(upto))


def _finding(rank: int, cause: str, of: str, rows: list[_Row]) -> Finding:
    first = 0 if cause == "burst" else _onset([row.excess[of][rank] for row in rows])
    slow = rows[first:]
    clumps = float(np.median([row.excess[of][rank] for row in slow])) <= 0
    average = np.mean if clumps else np.median
    own, others, base, lag = (
        float(average([pick(row) for row in slow]))
        for pick in (
            lambda row: row.times[of][rank],
            lambda row: row.others[of][rank],
            lambda row: row.base[rank],
            lambda row: row.lag[rank],
        )
    )
    more_s = own - others
    return Finding(
        rank=rank,
        cause=cause,
        of=of,
        factor=(base + more_s) / base,
        since_step=slow[0].step,
        step=rows[-1].step,
        own_s=own,
        others_s=others,
        lost_s=max(min(more_s, lag), 0.0),
        saving=sum(row.saving for row in slow) > len(slow) / 2,
    )
