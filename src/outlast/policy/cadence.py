"""When the next checkpoint is due.

A cadence in steps is exact: every multiple of it. A cadence in seconds counts from the last
checkpoint. ``auto`` is Young's interval, T = √(2CM) (J. W. Young, CACM 17(9), 1974), from the
measured time C that a checkpoint blocks the loop and an assumed mean time between failures M,
within bounds; until C is known it saves once after ``first_s``.

Once an early notice was heard (``Hurried``), a machine is thought to last ten minutes more.
"""

from __future__ import annotations

import math
from typing import Final, Protocol

ASSUMED_MTBF_S: Final = 10 * 3600.0  # one failure in ten hours; FACTS: the prior Γ(1, 10 h)
AUTO_MIN_S: Final = 30.0
AUTO_MAX_S: Final = 1800.0
AUTO_FIRST_S: Final = 20.0
HURRIED_MTBF_S: Final = 600.0
HURRIED_MIN_S: Final = 5.0
HURRIED_MAX_S: Final = 60.0


class Cadence(Protocol):
    """Asked at each step boundary by one rank; the answer is for the boundary after it."""

    def due(self, next_step: int, now_s: float) -> bool:
        """Whether a checkpoint should be taken once ``next_step`` is complete."""

    def taken(self, step: int, now_s: float, blocked_s: float) -> None:
        """A checkpoint was taken at ``step`` and blocked the loop for ``blocked_s``."""


class EverySteps:
    """At every multiple of ``steps``."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def due(self, next_step: int, now_s: float) -> bool:
        """Whether ``next_step`` is a multiple."""
        return next_step % self.steps == 0

    def taken(self, step: int, now_s: float, blocked_s: float) -> None:
        """Nothing to learn."""


class EverySeconds:
    """When ``seconds`` have passed since the last one, or since ``start_s``."""

    def __init__(self, seconds: float, start_s: float) -> None:
        self.seconds = seconds
        self._last_s = start_s

    def due(self, next_step: int, now_s: float) -> bool:
        """Whether the time has come."""
        return now_s - self._last_s >= self.seconds

    def taken(self, step: int, now_s: float, blocked_s: float) -> None:
        """Count from here."""
        self._last_s = now_s


class Auto:
    """Young's interval from the measured cost, within bounds."""

    def __init__(self, start_s: float, mtbf_s: float = ASSUMED_MTBF_S) -> None:
        self._last_s = start_s
        self._mtbf_s = mtbf_s
        self._cost_s: float | None = None

    @property
    def interval_s(self) -> float:
        """Seconds from one checkpoint to the next."""
        if self._cost_s is None:
            return AUTO_FIRST_S
        young = math.sqrt(2 * self._cost_s * self._mtbf_s)
        return min(max(young, AUTO_MIN_S), AUTO_MAX_S)

    def due(self, next_step: int, now_s: float) -> bool:
        """Whether the interval has passed."""
        return now_s - self._last_s >= self.interval_s

    def taken(self, step: int, now_s: float, blocked_s: float) -> None:
        """Learn the cost: the dearest seen, so that a lucky first save does not shorten it."""
        self._last_s = now_s
        self._cost_s = max(blocked_s, self._cost_s or 0.0)


class Hurried:
    """Another cadence, and besides it Young's interval for a machine that will soon be gone."""

    def __init__(self, inner: Cadence) -> None:
        self.inner = inner
        self._last_s: float | None = None  # the first one is due at once
        self._interval_s = HURRIED_MIN_S

    def due(self, next_step: int, now_s: float) -> bool:
        """Whether either says so."""
        if self._last_s is None or now_s - self._last_s >= self._interval_s:
            return True
        return self.inner.due(next_step, now_s)

    def taken(self, step: int, now_s: float, blocked_s: float) -> None:
        """Count from here."""
        self._last_s = now_s
        young = math.sqrt(2 * blocked_s * HURRIED_MTBF_S)
        self._interval_s = min(max(young, HURRIED_MIN_S), HURRIED_MAX_S)
        self.inner.taken(step, now_s, blocked_s)


def cadence(steps: int | None, seconds: float | None, now_s: float) -> Cadence:
    """The cadence that the settings ask for: by steps, by seconds, or (both None) automatic."""
    if steps is not None:
        return EverySteps(steps)
    if seconds is not None:
        return EverySeconds(seconds, now_s)
    return Auto(now_s)
