"""When a connection that says nothing is lost.

What counts is the other machine's kernel: it acknowledges what we send however busy its processes
are, so a loaded machine is not taken for a lost one. The time runs from the first question that was
not acknowledged, not from the last sign of life, and begins anew where *we* did not look for long
(a virtual machine that stands still takes its kernel with it): nobody is to blame for that.
The limit adapts: where acknowledgements were seen to take long, silence must last longer.
"""

from __future__ import annotations

from collections import deque
from typing import Final

FACTOR: Final = 4.0  # times the longest delay seen lately
GROWTH_MAX: Final = 10.0  # times the limit asked for, at most
RECENT: Final = 256
FORGIVEN: Final = 2  # times in a row that we may have been held up


class Silence:
    """The judgement of one connection; times in seconds of any one clock.

    Args:
        limit_s: how long silence may last on a network that answers at once.
        recent: how many delays are remembered.
    """

    def __init__(self, limit_s: float, *, recent: int = RECENT) -> None:
        self._least_s = limit_s
        self._asked_s: float | None = None
        self._looked_s: float | None = None
        self._forgiven = 0
        self._delays: deque[float] = deque(maxlen=recent)

    @property
    def limit_s(self) -> float:
        """How long silence may last now."""
        wanted_s = FACTOR * max(self._delays, default=0.0)
        return min(max(self._least_s, wanted_s), GROWTH_MAX * self._least_s)

    def excuse(self) -> None:
        """We could not hear anything: what was asked before teaches nothing."""
        self._asked_s = None

    def asked(self, now_s: float) -> None:
        """Something was sent that is to be acknowledged."""
        if self._asked_s is None:
            self._asked_s = now_s

    def seen(self, at_s: float) -> None:
        """The newest sign of life is of this time."""
        if self._asked_s is not None and at_s >= self._asked_s:
            self._delays.append(at_s - self._asked_s)
            self._asked_s = None
            self._forgiven = 0

    def is_lost(self, now_s: float) -> bool:
        """Whether silence has lasted too long; to be asked several times within the limit."""
        looked_s, self._looked_s = self._looked_s, now_s
        if self._asked_s is None:
            return False
        was_held_up = looked_s is not None and now_s - looked_s > self._least_s / 2
        if was_held_up and self._forgiven < FORGIVEN:
            self._forgiven += 1
            self._asked_s = now_s
        return now_s - self._asked_s > self.limit_s
