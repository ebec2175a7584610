"""How long a worker may show no sign of progress before that is called a hang.

The limits are learned from the job itself, one for each kind of thing that a worker does:

===========  ==========================================  =====================================
kind         what it is                                  limit, once it is known
===========  ==========================================  =====================================
step         loading a batch, and the loop's body        2 × the longest + 1.4 s
save         at a step's boundary                        3 × the longest + 30 s
evaluate     the loop's body, model in evaluation mode   3 × the longest + 30 s
start        until three steps of an attempt are done    the ceiling, or 2 × the longest
outside      before, between and after loops             the ceiling, or 2 × the longest
===========  ==========================================  =====================================

The longest is that of the gaps between two signs of progress, slowly forgotten: after 2,000 shorter
ones half of what it exceeds them by. Until a kind has been seen a few times its limit is the
ceiling: compiling, and the first evaluation, are slow by right. No limit is below the floor. A
setting of so many seconds takes the place of what is learned for step, save and evaluate.

A rank that was called hung without proof may have been about to go on: the limit of that kind is
then at least twice what it was given, for the rest of the job, and the ceiling where it comes again
in the same step.

:class:`StepTimes` tells how long steps take to whoever looks from outside now and then. It measures
the time between two looks that saw another step: the steps in between took no longer. A step in
progress counts with half of the time that it has taken so far: it may be an evaluation that was not
seen yet, or stuck.

Rejected: a mean and its spread (one step in a hundred that takes ten times as long is no outlier to
be restarted for), and one limit for everything (it would be that of the slowest).
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping
from typing import Final

import msgspec

SLACK_S: Final = 1.4  # with taking and collecting evidence it comes to 3 s
SLOW_SLACK_S: Final = 30.0
FRESH_STEPS: Final = 3  # of an attempt, which may compile and build
KNOWN_AFTER: Final = 5
SLOW_KNOWN_AFTER: Final = 3
HALF_AFTER: Final = 2000.0  # gaps
BACKSTOP: Final = 1.5  # torch's own time-outs come after ours
BACKSTOP_S: Final = 60.0
STEPS_KEPT: Final = 1000  # steps back


class Activity(enum.StrEnum):
    """What a worker does, as far as limits differ."""

    STEP = "step"
    SAVE = "save"
    EVALUATE = "evaluate"
    START = "start"
    OUTSIDE = "outside"


class HangSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the owner has set.

    Attributes:
        fixed_s: a limit in place of what is learned, or None.
        floor_s: no limit is shorter.
        ceiling_s: the limit of what is not known.
    """

    fixed_s: float | None = None
    floor_s: float = 1.5
    ceiling_s: float = 600.0


class _Gaps(msgspec.Struct):
    longest_s: float = 0.0
    seen: float = 0.0
    least_s: float = 0.0  # after a false alarm


class HangLimits:
    """What was learned of one job, on one machine.

    Args:
        chosen: what the owner has set.
        state: what ``state`` of an earlier one has returned.
    """

    def __init__(
        self, chosen: HangSettings, state: Mapping[str, list[float]] | None = None
    ) -> None:
        self._set = chosen
        self._known = {kind: _Gaps() for kind in Activity}
        for name, numbers in (state or {}).items():
            if name in self._known and len(numbers) == 3:
                self._known[Activity(name)] = _Gaps(*numbers)

    def state(self) -> dict[str, list[float]]:
        """All of it, as numbers."""
        return {
            kind.value: [known.longest_s, known.seen, known.least_s]
            for kind, known in self._known.items()
        }

    def saw(self, kind: Activity, gap_s: float) -> None:
        """A worker showed progress after ``gap_s`` seconds without."""
        known = self._known[kind]
        known.seen += 1
        if gap_s >= known.longest_s:
            known.longest_s = gap_s
        else:
            known.longest_s -= (known.longest_s - gap_s) * (1 - 0.5 ** (1 / HALF_AFTER))

    def too_soon(self, kind: Activity, given_s: float, *, again: bool = False) -> None:
        """A worker was called hung after ``given_s`` seconds, and there is no proof of it.

        Args:
            kind: what it did.
            given_s: what it was given.
            again: whether it was in the step in which the last such one was.
        """
        known = self._known[kind]
        least_s = max(2 * given_s, self._set.ceiling_s if again else 0.0)
        known.least_s = max(known.least_s, least_s)

    def longest_s(self, kind: Activity) -> float:
        """The longest gap that is remembered; 0 before the first."""
        return self._known[kind].longest_s

    def limit_s(self, kind: Activity) -> float:
        """Seconds without progress that a worker is given."""
        known, chosen = self._known[kind], self._set
        if kind in (Activity.START, Activity.OUTSIDE):
            limit_s = max(chosen.ceiling_s, 2 * known.longest_s)
        elif chosen.fixed_s is not None:
            limit_s = chosen.fixed_s
        elif kind is Activity.STEP:
            limit_s = 2 * known.longest_s + SLACK_S
            if known.seen < KNOWN_AFTER:
                limit_s = max(limit_s, chosen.ceiling_s)
        elif known.seen < SLOW_KNOWN_AFTER:
            limit_s = max(chosen.ceiling_s, 2 * known.longest_s)
        else:
            limit_s = 3 * known.longest_s + SLOW_SLACK_S
        return max(limit_s, known.least_s, chosen.floor_s)


def collective_timeout_s(limits: HangLimits) -> float:
    """What torch's own time-out of a collective is set to: behind every limit of ours."""
    return BACKSTOP * max(limits.limit_s(kind) for kind in Activity) + BACKSTOP_S


class StepTimes:
    """What was seen; times in seconds of any one clock."""

    def __init__(self) -> None:
        self._longest: deque[tuple[int, float]] = deque()  # (count, seconds), the longest first
        self._count = 0  # of steps that were made, those made again included
        self._step: int | None = None
        self._since_s = 0.0
        self._has_moved = False

    def begin(self) -> None:
        """Other workers, of a new attempt: what their first step takes says nothing yet."""
        self._step, self._has_moved = None, False

    def seen(self, step: int, now_s: float) -> None:
        """So many steps are complete now."""
        if step == self._step:
            return
        if self._step is not None:
            self._count += max(step - self._step, 1)
            self._keep(now_s - self._since_s)
            self._has_moved = True
        self._step, self._since_s = step, now_s

    def longest_s(self, now_s: float) -> float | None:
        """The longest of the last steps; None before one of this attempt is complete."""
        if not self._has_moved:
            return None
        return max(self._longest[0][1], (now_s - self._since_s) / 2)

    def _keep(self, seconds: float) -> None:
        longest = self._longest
        while longest and longest[-1][1] <= seconds:
            longest.pop()  # shorter, and older
        longest.append((self._count, seconds))
        while longest[0][0] <= self._count - STEPS_KEPT:
            longest.popleft()
