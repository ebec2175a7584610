"""What this job's own saves and steps have shown: seconds to each tier, seconds a step.

A fold over the ledger, so the agent, a worker and a report see the same numbers. Only the newest
are looked at: storage that has become slow is slow. "Slow" is the ninth decile, which for few
numbers is the largest; "fast" is the smallest.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import Final, NamedTuple

from outlast.ledger.events import Event

NEWEST_SAVES: Final = 20
NEWEST_STEPS: Final = 50
SLOW: Final = 0.9


class Range(NamedTuple):
    """Seconds, when it goes slowly and when it goes well."""

    slow_s: float
    fast_s: float


class Measured:
    """Take events in the order they were written; ask at any time.

    Attributes:
        newest: tier → the newest step that can be resumed from there.
        sizes: tier → bytes of the newest whole checkpoint.
        missed: the newest step since the last resume that a tier did not get, and why.
    """

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.newest: dict[str, int] = {}
        self.sizes: dict[str, int] = {}
        self.missed: tuple[int, str] | None = None
        self._saves: dict[str, collections.deque[float]] = {}
        self._steps: collections.deque[float] = collections.deque(maxlen=NEWEST_STEPS)
        self._step: tuple[int, int] | None = None  # attempt and step of the newest sample
        for event in events:
            self.take(event)

    def take(self, event: Event) -> None:
        """Learn from one event; one that does not say what it should teaches nothing."""
        if event.event == "commit" and event.get("kind", "full") == "full":
            self._saved(event, event.get("durable_s"))
        elif event.event == "tier_copied":
            self._saved(event, event.get("seconds"))
        elif event.event == "step":
            self._stepped(event)
        elif event.event == "save_skipped" and event.get("tier"):
            self._missed(event)
        elif event.event == "resumed":
            step = event.get("step")
            self.missed = None  # what was lost before is known, and made again
            self._step = (event.attempt, step if isinstance(step, int) else 0)

    def save(self, tier: str) -> Range | None:
        """Seconds until a save is in ``tier``; None when there was none yet."""
        return _range(self._saves.get(tier, ()))

    @property
    def step(self) -> Range | None:
        """Seconds that a step takes; None before the first."""
        return _range(self._steps)

    def _saved(self, event: Event, seconds: object) -> None:
        tier, step, size = event.get("tier"), event.get("step"), event.get("bytes")
        if not isinstance(tier, str) or not tier or not isinstance(step, int):
            return
        self.newest[tier] = max(step, self.newest.get(tier, 0))
        if isinstance(size, int):
            self.sizes[tier] = size
        if isinstance(seconds, int | float):
            known = self._saves.setdefault(tier, collections.deque(maxlen=NEWEST_SAVES))
            known.append(float(seconds))

    def _missed(self, event: Event) -> None:
        step, reason = event.get("step"), event.get("reason")
        if isinstance(step, int) and isinstance(reason, str):
            self.missed = max((step, reason), self.missed or (0, ""))

    def _stepped(self, event: Event) -> None:
        step, seconds = event.get("step"), event.get("seconds")
        if not isinstance(step, int) or not isinstance(seconds, int | float):
            return
        if self._step is not None and self._step[0] == event.attempt and step > self._step[1]:
            # What a checkpoint held up is not the step's own time.
            stalled_s = event.get("stalled_s")
            own_s = max(seconds - (stalled_s if isinstance(stalled_s, int | float) else 0.0), 0.0)
            self._steps.append(own_s / (step - self._step[1]))
        self._step = (event.attempt, step)


def _range(values: Iterable[float]) -> Range | None:
    ordered = sorted(values)
    if not ordered:
        return None
    return Range(ordered[min(int(SLOW * len(ordered)), len(ordered) - 1)], ordered[0])
