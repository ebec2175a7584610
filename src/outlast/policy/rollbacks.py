"""When a loss is wrong, what is done about it, and what a rollback undoes.

A value is wrong that is no number, infinite, or a spike: it lies above the median of the last good
values by more than each of three measures, so that no single one of them raises the alarm:

- ``factor`` times their spread (1.4826 times the median absolute deviation, which is the standard
  deviation where noise is normal, and which a few outliers do not move);
- half of the median itself, and a millionth: a loss that hardly varies may move a little;
- twice the distance of the largest of them: noise with heavy tails has shown what it does.

Only what goes up is a spike. Wrong values stay out of the window, and a level that lasts for a
whole window is the new one: a curriculum that gets harder is reported once. The window outlives an
attempt: what is behind a rollback is compared with what was before it.

A spike of the gradients' norm alone is reported and nothing else: before clipping such peaks are
ordinary and harmless. One that is no number, or infinite, is a sign as the loss's is.

A state counts as seen to be healthy once ``settle`` further steps have passed without a sign: the
loss of the next step is the first that is computed from it. A rollback goes to the newest such
checkpoint from before the first sign (without any: to the newest commit before it, or to the
start), leaves out batches from the one of the first sign on, and at each further rollback within
``stretch`` steps twice as many. How many does not depend on when somebody noticed: the same data
give the same run. The target must be there, as far as that is known: a checkpoint that the ledger
remembers may have been removed since. One that was seen to be healthy stays the target also where
the step behind it goes wrong at once: ``settle`` good steps speak for it, and the machine is as
likely the cause. Only a checkpoint that was not seen to be healthy is skipped then, while there is
another.

A rollback goes back to ``step``. Later steps of attempts up to its own are on a branch that nobody
goes on from, also those that are committed late, or copied to a slow tier tomorrow. A manifest
names its attempt and its step, so that each reader sees by itself whether it stands
(:func:`is_undone`); nothing is written into a checkpoint, and none has to be found and removed
before a job may go on. Steps count optimizer updates, so the steps after a rollback have the
numbers of those that were undone. Batches are therefore counted apart: in each loop of the script
from 1, those left out included. A batch keeps its number through rollbacks.

Rejected: leaving out all batches up to the last that was seen bad (after the first bad one the
weights are bad: what later batches show says nothing about them, and how many there are depends on
threads); a limit in standard deviations alone (a loss near zero, or one that hardly varies, is
never still); removing what is undone (a tier that cannot be reached would keep it, and the evidence
would be gone); a flag in each checkpoint (a crash between two of them, and the manifest is what
commits: it does not change).

Prior art: PaLM (Chowdhery et al., 2022, section 5.1) went back about 100 steps before a spike and
left out 200 to 500 batches, by hand.
"""

from __future__ import annotations

import collections
import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

import msgspec

from outlast.policy import MAD_SIGMA

_NONE: Final = "health.rollbacks allows none"
ACTIONS: Final = ("report", "stop", "rollback")
WATCHED: Final = ("loss", "grad_norm")
LEAST: Final = 20  # good values before any is called a spike
RELATIVE: Final = 0.5
ABSOLUTE: Final = 1e-6
BEYOND: Final = 2.0
DOUBLINGS_MAX: Final = 16
CARRIED_MAX: Final = 100  # good values of a kind that an attempt hands on
CLEAN_MAX: Final = 16  # stretches without a sign that are remembered


# --- what a rollback undoes ----------------------------------------------------------------------


class Batches(msgspec.Struct, frozen=True, kw_only=True):
    """Batches that follow each other in one loop of the script.

    Attributes:
        loop: number of the loop, from 1.
        first, last: their numbers in it, from 1.
    """

    loop: int
    first: int
    last: int


class Rollback(msgspec.Struct, frozen=True, kw_only=True):
    """One rollback.

    Attributes:
        attempt: the newest attempt whose work it undoes.
        step: completed steps that stand; 0 for none.
        first: the first step that showed a sign.
        batches: what is left out from now on; None where the job was stopped.
    """

    attempt: int
    step: int
    first: int
    batches: Batches | None = None


def is_undone(rollbacks: Iterable[Rollback], attempt: int, step: int) -> bool:
    """Whether what ``attempt`` made of ``step`` completed steps is not to be gone on from."""
    return any(one.attempt >= attempt and step > one.step for one in rollbacks)


def left_out(rollbacks: Sequence[Rollback]) -> list[Batches]:
    """The batches that no attempt is to train on from now on."""
    return [one.batches for one in rollbacks if one.batches is not None]


def is_left_out(ranges: Iterable[Batches], loop: int, number: int) -> bool:
    """Whether batch ``number`` of ``loop`` is one of them."""
    return any(one.loop == loop and one.first <= number <= one.last for one in ranges)


# --- when a loss is wrong ------------------------------------------------------------------------


class LossRules(msgspec.Struct, frozen=True, kw_only=True):
    """What the owner has set.

    Attributes:
        action: one of ``ACTIONS``.
        window: how many good values a new one is compared with.
        factor: of their spread.
        settle: steps without a sign after which a checkpoint counts as healthy.
        skip: batches left out by the first rollback of a stretch.
        rollbacks: how many there may be in a stretch.
        stretch: steps.
    """

    action: str = "report"
    window: int = 100
    factor: float = 20.0
    settle: int = 10
    skip: int = 1
    rollbacks: int = 3
    stretch: int = 1000


class StepValue(msgspec.Struct, frozen=True, kw_only=True):
    """One value of a step, put together from all ranks.

    Attributes:
        value: their mean.
        worst: the ranks whose own value is no finite number, or else the one with the largest.
    """

    value: float
    worst: tuple[int, ...] = ()


class Sign(msgspec.Struct, frozen=True, kw_only=True):
    """The first sign that a loss goes wrong.

    Attributes:
        first: the first step that it may have begun in: that after the last good value.
        step: the step whose value is wrong.
        what: its name, such as "loss".
        kind: "nan", "infinity" or "spike".
        value: what it was.
        usual: the median of the values before; None without any.
        limit: beyond which it is a spike; None where there was none yet.
        ranks: where it was worst.
    """

    first: int
    step: int
    what: str
    kind: str
    value: float
    usual: float | None = None
    limit: float | None = None
    ranks: tuple[int, ...] = ()


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What is done about a sign.

    Attributes:
        action: one of ``ACTIONS``.
        step: completed steps to go back to, for "stop" and "rollback"; 0 for the start.
        num_batches: how many are left out, from that of the sign's first step on.
        why: why the job stops rather than going back; "" where that was asked for.
    """

    action: str
    step: int = 0
    num_batches: int = 0
    why: str = ""


class Series:
    """One kind of value, such as the loss.

    Args:
        window: how many good values are remembered.
        factor: of their spread.
    """

    def __init__(self, window: int, factor: float) -> None:
        self._factor = factor
        self._good: collections.deque[float] = collections.deque(maxlen=window)
        self._strange: list[float] = []
        # with their steps, some more of them: a checkpoint is known to be healthy later
        self._history: collections.deque[tuple[int, float]] = collections.deque(maxlen=2 * window)

    def begin(self, values: Sequence[float], step: int) -> None:
        """Go on from the good values of before ``step``."""
        for value in values:
            self._good.append(value)
            self._history.append((step, value))

    def until(self, step: int) -> list[float]:
        """The newest good values of up to ``step``; all that are known where these are too few."""
        known = [value for at, value in self._history if at <= step]
        if len(known) < LEAST:
            known = [value for _, value in self._history]
        newest = known[-min(CARRIED_MAX, self._good.maxlen or LEAST) :]
        return [float(f"{value:.7g}") for value in newest]

    @property
    def usual(self) -> float | None:
        """The median of the good values."""
        return statistics.median(self._good) if self._good else None

    @property
    def limit(self) -> float | None:
        """Beyond which a value is a spike; None before there are enough to tell."""
        if len(self._good) < min(LEAST, self._good.maxlen or LEAST):
            return None
        median = statistics.median(self._good)
        spread = MAD_SIGMA * statistics.median(abs(value - median) for value in self._good)
        furthest = max(self._good) - median
        return median + max(
            self._factor * spread, RELATIVE * abs(median), ABSOLUTE, BEYOND * furthest
        )

    def see(self, value: float, step: int = 0) -> str:
        """Take the next value: "nan", "infinity" or "spike", or "" where it is good."""
        if not math.isfinite(value):
            return "nan" if math.isnan(value) else "infinity"
        limit = self.limit
        if limit is None or value <= limit:
            self._good.append(value)
            self._history.append((step, value))
            self._strange.clear()
            return ""
        self._strange.append(value)
        if len(self._strange) >= (self._good.maxlen or LEAST):
            self._good.extend(self._strange)
            self._history.extend((step, one) for one in self._strange)
            self._strange.clear()
            return ""
        return "spike"


class LossJudge:
    """Sees the values of one attempt, step by step, and knows which commits are healthy.

    Args:
        rules: the owner's.
        step: completed steps at the attempt's beginning.
        windows: good values of before, as :meth:`windows` gave them.
    """

    def __init__(
        self, rules: LossRules, step: int, windows: Mapping[str, Sequence[float]] | None = None
    ) -> None:
        self._rules = rules
        self._series = {what: Series(rules.window, rules.factor) for what in WATCHED}
        for what, values in (windows or {}).items():
            if what in self._series:
                self._series[what].begin(values, step)
        self._had_peak = False
        self._last_good = step
        self._is_clean = True
        # (first, last) of steps in a row without a sign, the newest stretch last
        self._clean: collections.deque[tuple[int, int]] = collections.deque(maxlen=CLEAN_MAX)
        self._clean.append((step + 1, step))
        self._commits: set[int] = set()

    def see(self, step: int, readings: Mapping[str, StepValue]) -> Sign | None:
        """Take what ``step`` has shown; the sign, where trouble begins with it."""
        found: Sign | None = None
        peak: Sign | None = None
        for what in WATCHED:  # the loss says more than what follows from it
            reading = readings.get(what)
            if reading is None:
                continue
            series = self._series[what]
            usual, limit = series.usual, series.limit
            kind = series.see(reading.value, step)
            if not kind or found is not None:
                continue
            sign = Sign(
                first=self._last_good + 1,
                step=step,
                what=what,
                kind=kind,
                value=reading.value,
                usual=usual,
                limit=limit,
                ranks=reading.worst,
            )
            if is_peak(sign):
                peak = sign
            else:
                found = sign
        if not readings:
            return None
        was_clean, self._is_clean = self._is_clean, found is None
        if found is not None:
            return found if was_clean else None
        had_peak, self._had_peak = self._had_peak, peak is not None
        since = self._clean.pop()[0] if was_clean else step
        self._clean.append((since, step))
        self._last_good = step
        return None if had_peak else peak

    def windows(self, step: int) -> dict[str, list[float]]:
        """The good values of up to ``step``, for the attempt that goes on from there."""
        found = {what: series.until(step) for what, series in self._series.items()}
        return {what: values for what, values in found.items() if values}

    def committed(self, step: int) -> None:
        """There is a checkpoint of ``step``."""
        self._commits.add(step)

    def healthy(self) -> list[int]:
        """Commits that have turned out to be healthy since this was asked last, oldest first."""
        settle = self._rules.settle
        found = sorted(
            step
            for step in self._commits
            if any(first <= step + 1 and last >= step + settle for first, last in self._clean)
        )
        self._commits.difference_update(found)
        return found


def decide(
    rules: LossRules,
    sign: Sign,
    *,
    commits: Collection[int],
    healthy: Collection[int],
    rollbacks: Sequence[Rollback],
    there: Collection[int] | None = None,
) -> Decision:
    """What is done about ``sign``.

    Args:
        rules: the owner's.
        sign: what was seen.
        commits: steps that are committed and stand.
        healthy: those of them that were seen to be healthy.
        rollbacks: of before, oldest first.
        there: steps that lie somewhere and stand; None where that is not known.
    """
    if rules.action == "report" or is_peak(sign):
        return Decision(action="report")
    step = _target(sign, commits, healthy, rollbacks, there)
    if rules.action == "stop":
        return Decision(action="stop", step=step)
    recent = [
        one
        for one in rollbacks
        if one.batches is not None and abs(sign.first - one.first) < rules.stretch
    ]
    if len(recent) >= rules.rollbacks:
        times = f"{len(recent)} rollback{'s'[: len(recent) != 1]}"
        why = f"{times} within {rules.stretch} steps did not help" if recent else _NONE
        return Decision(action="stop", step=step, why=why)
    doubled = rules.skip * 2 ** min(len(recent), DOUBLINGS_MAX)
    return Decision(
        action="rollback", step=step, num_batches=max(doubled, sign.step - sign.first + 1)
    )


def is_peak(sign: Sign) -> bool:
    """Whether it is said and no more: a norm of gradients that is large, and a number."""
    return sign.what != WATCHED[0] and sign.kind == "spike"


def _target(
    sign: Sign,
    commits: Collection[int],
    healthy: Collection[int],
    rollbacks: Sequence[Rollback],
    there: Collection[int] | None,
) -> int:
    """The step to go back to."""
    last = rollbacks[-1].step if rollbacks else None
    suspect = last if last is not None and sign.first == last + 1 else None
    places = [*([there] if there is not None else []), {*commits, *healthy}]
    for known in places:  # where nothing is there that counts, the ledger's word has to do
        for among in (healthy, set(commits) - {suspect}, commits):
            found = [step for step in among if step < sign.first and step in known]
            if found:
                return max(found)
    return 0
