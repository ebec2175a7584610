"""Goodput and incidents of a ledger that is still being written, without reading it again.

``goodput`` and ``incidents`` fold a whole ledger. Whoever watches a job asks every few seconds, and
a ledger may have a million lines. Here each event is folded once.

Both folds take events in the order of their times, and a file has them nearly so: clocks of several
machines differ, and a line may come late. So the newest events wait: one is folded for good when
``SETTLES_S`` have gone by since, on the clock or to the newest event. An answer folds those that
wait into a copy.

Guarantees: for events that are at most ``SETTLES_S`` out of order the answers are those of the
whole folds. What can go wrong: an event that comes later than that is folded when it comes; until
the next start of the watcher the answer may differ by the seconds in question, and it still adds
up.

Rejected: to fold all again every minute (five seconds of a core for a million events).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Final

from outlast.ledger.clocks import SteadyClocks
from outlast.ledger.events import Event
from outlast.ledger.goodput import Goodput, OpenTimeline, Split, cut, in_order, timeline_of, whole
from outlast.ledger.incidents import Incident, IncidentTracker

SETTLES_S: Final = 2.0
HEAD_MOST: Final = 1000  # events that wait for the first attempt


class SoFar:
    """Take events as they are read; ask at any time.

    Attributes:
        newest_t: time of the newest event, or None before the first.
    """

    def __init__(self) -> None:
        self.newest_t: float | None = None
        self._clocks = SteadyClocks()
        self._waiting: list[Event] = []
        self._line: OpenTimeline | None = None
        self._head: list[Event] = []  # settled, before the first attempt: its width counts for them
        self._watch = IncidentTracker()
        self._last_t = 0.0  # of the newest event that is folded
        self._told = 0  # incidents that were told and are over

    def take(self, events: Iterable[Event], now: float = -math.inf) -> list[Event]:
        """Take what was read by wall-clock time ``now``.

        Returns:
            The events that are settled by it, in the order of their times: each comes once.
        """
        self._waiting += [self._clocks.take(event) for event in events]
        now = self.steady(now)
        if not self._waiting:
            return []
        ordered = in_order(self._waiting)
        if not ordered:
            self._waiting.clear()
            return []
        self.newest_t = max(ordered[-1].t, self.newest_t or ordered[-1].t)
        until_t = max(self.newest_t, now) - SETTLES_S
        settled = [event for event in ordered if event.t <= until_t]
        self._waiting = ordered[len(settled) :]
        for event in settled:
            self._watch.see(event)
        if settled:
            self._last_t = settled[-1].t
            self._head += settled
        if self._line is None and (_has_width(self._head) or len(self._head) > HEAD_MOST):
            self._line = timeline_of(self._head)
        if self._line is not None:
            cut(self._line, self._head)
            self._head = []
        return settled

    def goodput(self, now: float | None = None) -> Goodput:
        """What ``goodput`` says of all events so far."""
        return self.split(now).workers

    def split(self, now: float | None = None) -> Split:
        """What ``split`` says of all events so far."""
        due = [*self._head, *self._waiting]
        line = None if self._line is None else self._line.copied()
        if line is None and due:
            line = timeline_of(due)
        if line is None:
            return Split()
        cut(line, due)
        end_t = line.at_t if line.finished else due[-1].t if due else self._last_t
        if now is not None and not line.finished:
            end_t = max(end_t, self.steady(now))
        return line.close(end_t)

    def steady(self, now: float) -> float:
        """Wall-clock time ``now``, to be compared with the times of events that were settled."""
        return now + self._clocks.shift_s

    def over(self) -> list[Incident]:
        """The incidents that are over and were not told before, once they are settled."""
        opened = self._watch.incidents[self._told :]
        found = [one.told() for one in itertools.takewhile(lambda one: one.closed, opened)]
        self._told += len(found)  # at most one is open at a time, and it is the last
        return found

    def incidents(self, first: int = 0) -> list[Incident]:
        """Those from number ``first`` on, an open one included, as far as events are settled."""
        return [one.told() for one in self._watch.incidents[max(first, 0) :]]

    @property
    def num_incidents(self) -> int:
        """How many there were, as far as events are settled."""
        return len(self._watch.incidents)

    @property
    def is_in_incident(self) -> bool:
        """Whether something is wrong and there was no new step since."""
        return self._watch.open is not None


def _has_width(events: Iterable[Event]) -> bool:
    return any(one.event == "attempt_formed" and whole(one, "world_size") for one in events)
