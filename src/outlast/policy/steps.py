"""The longest of a worker's recent steps, seen from outside by whoever looks now and then.

What is measured is the time between two looks that saw another step: the steps that went by in
between took no longer. A step in progress counts with half of the time that it has taken so far: it
may be an evaluation that was not seen yet, or stuck.
"""

from __future__ import annotations

from collections import deque
from typing import Final

KEPT: Final = 1000  # steps back


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
        while longest[0][0] <= self._count - KEPT:
            longest.popleft()
