"""Time that costs nothing: things happen in order, each at its moment."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable


class Clock:
    """A virtual clock; ``now_s`` begins at 0."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def after(self, delay_s: float, what: Callable[[], None]) -> None:
        """Do ``what`` in ``delay_s`` from now; of two at one moment the first asked for."""
        heapq.heappush(self._due, (self.now_s + max(delay_s, 0.0), next(self._numbers), what))

    def step(self, until_s: float) -> bool:
        """Let the next thing happen if it is due until then; whether there was one."""
        if not self._due or self._due[0][0] > until_s or self._due[0][0] == math.inf:
            return False
        self.now_s, _, what = heapq.heappop(self._due)
        what()
        return True

    def run(self, until_s: float) -> None:
        """Let everything happen that is due until then."""
        while self.step(until_s):
            pass
        self.now_s = until_s


class Server:
    """Something that does one thing after the other, such as a thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._free_s = 0.0
        self.busy_s = 0.0

    def spend(self, cost_s: float) -> float:
        """Be busy for so long, after what was asked before: how long from now until it is done."""
        self._free_s = max(self._free_s, self._clock.now_s) + cost_s
        self.busy_s += cost_s
        return self._free_s - self._clock.now_s
