"""Which rank holds the others up, by what and since when, from the times of all at the same steps.

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

from outlast.policy import MAD_SIGMA

WINDOW: Final = 24
SHORT: Final = 8
MIDDLE: Final = 13  # for bursts that are longer, and weak beside the noise
CLUMPED: Final = 48
LEAST: Final = 18  # steps, before anybody is named
NOW: Final = 5  # the newest steps, which say whether it is over
LASTING: Final = 0.75
RELATIVE: Final = 0.10
ABSOLUTE_S: Final = 1e-3
CHANCE: Final = 5.0  # standard errors
SHORT_CHANCE: Final = 6.0  # of a few steps: noise with heavy tails looks like a burst in them
SPREAD: Final = 6.0  # standard deviations between healthy ranks, where there are enough of them
SPREAD_RANKS: Final = 8
WAITED_FOR: Final = 0.3  # of its excess, by the others
ONE_PAUSE: Final = 1.05 / SHORT  # what one pause comes to, in the mean over a short window
BURST_STEPS: Final = 1.25  # that a burst must have cost, in steps
BURST_REST: Final = 200  # steps between two bursts of one rank that are told
WARM_UP: Final = 5  # steps of an attempt: caches, compilation
EVERY: Final = 2  # steps between two looks
NOISE_RANKS: Final = 512  # of thousands
NOISE_EVERY: Final = 16  # steps between two looks at what is usual
OPEN_MAX: Final = 1024  # steps that some ranks have told
_OF_MEDIAN: Final = 1.2533  # the standard error of a median, in those of a mean
Array = Any


class Straggler(msgspec.Struct, frozen=True, kw_only=True):
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


class _StepRow(msgspec.Struct):
    """One step, by rank: excesses in parts of a step."""

    step: int
    times: dict[str, Array]  # seconds of "compute" and "loader"
    others: dict[str, Array]  # the others' medians of the same
    base: Array  # the others' median of both, together
    excess: dict[str, Array]
    is_high: dict[str, Array]  # whether the excess is above the floor
    clump: Array  # the loader's excess, within a step
    lag: Array  # how much longer the others waited
    saving: bool


class Stragglers:
    """Judges the slow ranks of one attempt.

    Args:
        kinds: of each rank, the number of its kind of work.
    """

    def __init__(self, kinds: Sequence[int]) -> None:
        self._kinds = _ranks_by_kind(kinds)
        self._rows: deque[_StepRow] = deque(maxlen=CLUMPED)
        self._num_seen = 0
        self._clumps = np.zeros(len(kinds))  # what the rows' clumps come to
        self._set_aside = 0  # of the last steps, in a row that forgets
        self._named: dict[int, Straggler] = {}
        self._limits: dict[int, float] = {}  # of those named: what they were above
        self._suspects: dict[tuple[int, str], _StepRow] = {}  # in a short window, not named yet
        self._noise: dict[str, float] = {}  # as it usually is
        self._bursts: dict[int, int] = {}  # rank → step of its last burst that was told

    @property
    def named(self) -> Mapping[int, Straggler]:
        """Who holds the others up now."""
        return self._named

    def see(
        self, step: int, compute: Array, wait: Array, data: Array, stall: Array
    ) -> list[Straggler]:
        """One more step, in order: seconds of all ranks.

        Returns:
            What is news: whoever is found, and whoever has recovered.
        """
        self._num_seen += 1
        if self._num_seen <= WARM_UP or len(compute) < 2:
            return []
        saving = bool((stall > 0).any())
        self._set_aside = (
            min(self._set_aside + 1, WINDOW) if saving else max(self._set_aside - 1, 0)
        )
        if saving and self._set_aside < WINDOW // 2:
            return []
        self._append(self._row(step, compute, wait, data, saving=saving))
        if len(self._rows) < LEAST or self._num_seen % EVERY:
            return []
        return self._look()

    def _append(self, row: _StepRow) -> None:
        if len(self._rows) == CLUMPED:
            self._clumps -= self._rows[0].clump
        self._clumps += row.clump
        self._rows.append(row)

    def _row(
        self, step: int, compute: Array, wait: Array, data: Array, *, saving: bool
    ) -> _StepRow:
        every = np.stack((compute + data, compute, data, wait))
        others = np.zeros_like(every)
        for group in self._kinds.groups:
            others[:, group] = _medians_of_others(every[:, group])
        base = np.maximum(others[0], 1e-6)
        excess = (every[1:3] - others[1:3]) / base * self._kinds.comparable
        return _StepRow(
            step=step,
            times={"compute": compute, "loader": data},
            others={"compute": others[1], "loader": others[2]},
            base=base,
            excess={"compute": excess[0], "loader": excess[1]},
            clump=excess[1].clip(-1, 1),
            is_high={"compute": excess[0] > RELATIVE, "loader": excess[1] > RELATIVE},
            lag=others[3] - wait,
            saving=saving,
        )

    # --- a look --------------------------------------------------------------------------------

    def _look(self) -> list[Straggler]:
        rows = list(self._rows)
        news = self._recovered(rows)
        for of in ("compute", "loader"):
            if self._num_seen % NOISE_EVERY == 0:
                now = _noise(_sample(rows, of))
                before = self._noise.get(of, now)
                self._noise[of] = before + (now - before) / 8
            if not self._is_any(of, rows):  # as in nearly all looks
                continue
            noise = max(self._noise.get(of, 0.0), _noise(_sample(rows, of)))
            long = _Window(rows[-WINDOW:], of, self._kinds, noise)
            lasting = long.lasting()
            if of == "loader" and len(rows) == CLUMPED:
                lasting |= _Window(rows, of, self._kinds, long.noise).clumped()
            for rank in np.flatnonzero(lasting).tolist():
                if rank not in self._named:
                    news.append(self._name(rank, of, rows, long.limit))
            news += self._bursting(rows, of, long.noise)
        return news

    def _is_any(self, of: str, rows: list[_StepRow]) -> bool:
        """Whether anybody not named yet could be above a limit, which is never below the floor.

        Whose median is above it is so in half of the steps; counting them is far cheaper.
        """
        if any(which == of for _, which in self._suspects):
            return True
        high = np.zeros(len(rows[0].base), dtype=bool)
        for steps in (rows[-WINDOW:], rows[-MIDDLE:], rows[-SHORT:]):
            times = np.sum([row.is_high[of] for row in steps], axis=0, dtype=np.uint8)
            high |= times >= (len(steps) + 1) // 2
        if of == "loader":
            high |= self._clumps > RELATIVE * len(rows)
        high[list(self._named)] = False
        return bool(high.any())

    def _name(self, rank: int, of: str, rows: list[_StepRow], limit: float) -> Straggler:
        found = _finding(rank, of, of, rows)
        self._named[rank], self._limits[rank] = found, limit
        for which in ("compute", "loader"):
            self._suspects.pop((rank, which), None)
        return found

    def _recovered(self, rows: list[_StepRow]) -> list[Straggler]:
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

    def _bursting(self, rows: list[_StepRow], of: str, noise: float) -> list[Straggler]:
        short = _Window(rows[-SHORT:], of, self._kinds, noise, SHORT_CHANCE)
        middle = _Window(rows[-MIDDLE:], of, self._kinds, noise)
        for slow in np.flatnonzero(short.lasting() | middle.lasting()).tolist():
            if slow not in self._named:
                since = rows[_onset([row.excess[of][slow] for row in rows])]
                self._suspects.setdefault((slow, of), since)
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
                high = [row for row in run if row.excess[of][rank] >= short.limit / 2]
                found = _finding(rank, "burst", of, high or run)
                step = rows[-1].step
                news.append(msgspec.structs.replace(found, step=step, over=True))
        return news


class StepReports:
    """Steps as they are told, rank by rank, until all ranks have told one.

    Args:
        world_size: how many ranks there are.
    """

    def __init__(self, world_size: int) -> None:
        self.kinds = [0] * world_size
        self._world_size = world_size
        self._said: dict[
            bytes, list[tuple[Sequence[int], bytes]]
        ] = {}  # numbers of steps → by whom
        self._open: dict[int, tuple[Array, Array]] = {}  # step → seconds, and who has told them
        self._done = -1  # the newest step that was complete

    def add(self, ranks: Sequence[int], kinds: Sequence[int], steps: bytes, seconds: bytes) -> None:
        """What ranks tell: numbers of steps (int64), and each rank's four times of each (float32).

        Raises:
            ValueError: the times do not fit the steps.
        """
        if len(steps) % 8 or len(seconds) != 2 * len(steps) * len(ranks):
            raise ValueError(f"ranks {list(ranks)} tell times that do not fit their steps")
        if ranks and min(ranks) >= 0 and max(ranks) < self._world_size:
            for rank, kind in zip(ranks, kinds, strict=True):
                self.kinds[rank] = kind
            self._said.setdefault(steps, []).append((ranks, seconds))

    def complete(self) -> list[tuple[int, Array]]:
        """Steps that all ranks have told, in order, each once; older ones are given up."""
        for steps, said in self._said.items():
            self._open_all(np.frombuffer(steps, dtype=np.int64), said)
        self._said = {}
        whole = sorted(step for step, (_, told) in self._open.items() if told.all())
        if whole:
            self._done = whole[-1]
        found = [(step, self._open[step][0]) for step in whole]
        newest = sorted(self._open)[-OPEN_MAX:]
        self._open = {step: self._open[step] for step in newest if step > self._done}
        return found

    def _open_all(self, numbers: Array, said: list[tuple[Sequence[int], bytes]]) -> None:
        """Ranks that have told the same steps, all at once: there are thousands of them."""
        first = int(np.searchsorted(numbers, self._done, side="right"))
        new = numbers[first:].tolist()
        if not new:
            return
        ranks = np.array([rank for some, _ in said for rank in some])
        raw = b"".join([seconds for _, seconds in said])
        times = np.frombuffer(raw, dtype=np.float32).reshape(len(ranks), len(numbers), 4)
        by_step = np.nan_to_num(times[:, first:].transpose(1, 2, 0), posinf=0.0, neginf=0.0)
        for step, rows in zip(new, by_step, strict=True):
            if step not in self._open:
                told = np.zeros(self._world_size, dtype=bool)
                self._open[step] = np.zeros((4, self._world_size)), told
            found, told = self._open[step]
            found[:, ranks] = rows
            told[ranks] = True


class _RanksByKind(msgspec.Struct):
    """Ranks by their kind of work."""

    groups: list[Array]
    comparable: Array  # whether there is another one of the kind


def _ranks_by_kind(kinds: Sequence[int]) -> _RanksByKind:
    of = np.asarray(kinds)
    groups = [np.flatnonzero(of == kind) for kind in dict.fromkeys(kinds)]
    comparable = np.zeros(len(of), dtype=bool)
    for group in groups:
        comparable[group] = len(group) > 1
    return _RanksByKind(groups, comparable)


class _Window:
    """Some steps, as all ranks saw them.

    Attributes:
        noise: of one rank's excess in one step, as a standard deviation.
        limit: above which an excess is not by chance.
    """

    def __init__(
        self,
        rows: list[_StepRow],
        of: str,
        kinds: _RanksByKind,
        noise: float,
        chance: float = CHANCE,
    ) -> None:
        self.excess = np.array([row.excess[of] for row in rows])
        self.median = _median(self.excess)
        self.noise = noise
        errors = chance * _OF_MEDIAN * self.noise / len(rows) ** 0.5
        self.limit = max(RELATIVE, errors, SPREAD * self._apart(kinds))
        self._base = _median(np.array([row.base for row in rows]))
        self._lag = np.mean([row.lag for row in rows], axis=0)

    def _apart(self, kinds: _RanksByKind) -> float:
        """How far healthy ranks lie apart: told from the quicker half, whoever is slow."""
        if max(len(group) for group in kinds.groups) < SPREAD_RANKS:
            return 0.0
        largest = max(kinds.groups, key=len)
        low, high = np.quantile(self.median[largest], (0.15, 0.40))
        return float(high - low) / 0.783  # between these, in standard deviations

    def lasting(self) -> Array:
        """Ranks that take longer in most of these steps, the newest ones included."""
        half = np.maximum(self.limit, self.median) / 2
        often = (self.excess > half).mean(axis=0) >= LASTING
        still = _median(self.excess[-NOW:]) > half
        return (self.median > self.limit) & often & still & self._is_waited_for(self.median)

    def clumped(self) -> Array:
        """Ranks that take longer in some of these steps, again and again."""
        excess = self.excess.clip(-1, 1)
        mean = np.sort(excess, axis=0)[: -(len(excess) // 10)].mean(axis=0)
        parts = np.array([part.mean(axis=0) for part in np.split(excess, len(excess) // SHORT)])
        again = (parts > ONE_PAUSE).sum(axis=0) >= len(parts) - 1
        return (mean > max(1.5 * RELATIVE, self.limit)) & again & self._is_waited_for(mean)

    def _is_waited_for(self, excess: Array) -> Array:
        seconds = excess * self._base
        return (seconds >= ABSOLUTE_S) & (self._lag >= WAITED_FOR * seconds)


def _sample(rows: list[_StepRow], of: str) -> Array:
    """The window's excesses, of as many ranks as are enough to know the noise by."""
    every = -(-len(rows[0].base) // NOISE_RANKS)
    return np.array([row.excess[of][::every] for row in rows[-WINDOW:]])


def _noise(excess: Array) -> float:
    """Of one rank in one step, as a standard deviation: that of the rank in the middle."""
    return MAD_SIGMA * float(np.median(_median(np.abs(excess - _median(excess)))))


def _median(values: Array) -> Array:
    """Down the columns; NumPy's own takes ten times as long for a few."""
    inorder, count = np.sort(values, axis=0), len(values)
    return (inorder[(count - 1) // 2] + inorder[count // 2]) / 2


def _medians_of_others(values: Array) -> Array:
    """In each row, for each of its values, the median of its other values."""
    count = values.shape[1]
    if count < 2:
        return values.copy()
    low, high = (count - 2) // 2, (count - 1) // 2  # of those that are left
    inorder = np.partition(values, sorted({low, high, low + 1, high + 1}), axis=1)

    def at(index: int) -> Array:
        here, after = inorder[:, index, None], inorder[:, index + 1, None]
        return np.where(values <= here, after, here)  # of equals it does not matter which goes

    return at(low) if low == high else (at(low) + at(high)) / 2


def _onset(excess: Sequence[float]) -> int:
    """Where a series begins to lie about its newest level rather than about nothing."""
    values = np.asarray(excess)
    level = float(np.median(values[-SHORT:]))
    upto = np.cumsum((np.clip(values, -level, 2 * level) - level / 2)[::-1])[::-1]
    return int(np.argmax(upto))


def _finding(rank: int, cause: str, of: str, rows: list[_StepRow]) -> Straggler:
    first = 0 if cause == "burst" else _onset([row.excess[of][rank] for row in rows])
    slow = rows[first:]
    clumps = float(np.median([row.excess[of][rank] for row in slow])) <= 0

    def usual(values: list[Any]) -> float:
        return float(np.mean(values) if clumps else np.median(values))

    own, others = (
        usual([side[of][rank] for side in sides])
        for sides in ([row.times for row in slow], [row.others for row in slow])
    )
    base, lag = usual([row.base[rank] for row in slow]), usual([row.lag[rank] for row in slow])
    more_s = own - others
    return Straggler(
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
