"""This machine's metrics, from what its workers leave in memory (``attempt/beat.py``).

The agent says which workers there are (``health.watched.Begin``). Twice a second their memory is
looked at: a ring has 256 steps, and what passes between two looks is not missed while a step takes
2 ms or more. A reader never waits, and what it meets half-written it reads again at the next look.

What can go wrong: without an agent of ours nobody leaves anything there. Then step seconds are
those of the ledger's samples, and there is no heartbeat: ``outlast_progress_age_seconds`` is what
is left.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

from outlast.attempt.beat import BeatReader
from outlast.health.watched import Begin, Watched
from outlast.ledger.events import Event
from outlast.ledger.measured import SampledSteps
from outlast.metrics.folded import Tally
from outlast.metrics.table import QUANTILES

NEWEST_STEPS: Final = 1024


class _RankPace:
    """The steps of one worker."""

    def __init__(self) -> None:
        self.newest: deque[float] = deque(maxlen=NEWEST_STEPS)
        self.count = 0
        self.seconds = 0.0
        self.read_to = -1  # the newest step that was read
        self.parts: dict[str, float] = {}

    def add(self, seconds: float, count: int = 1) -> None:
        """``count`` steps that took ``seconds`` each."""
        if not 0 <= seconds < math.inf:
            return
        self.newest.append(seconds)
        self.count += count
        self.seconds += seconds * count


class MachineFold:
    """What this machine's workers say.

    Args:
        node: the machine's name.
    """

    def __init__(self, node: str) -> None:
        self._node = node
        self._watched: Watched | None = None
        self._began_s = 0.0
        self._steps: dict[int, _RankPace] = {}
        self._sampled = _RankPace()  # by the ledger, rank 0's
        self._between = SampledSteps()

    def begin(self, begin: Begin) -> None:
        """An attempt has begun here."""
        self.end()
        self._watched = Watched(begin)
        self._began_s = time.monotonic()
        for steps in self._steps.values():
            steps.read_to = -1

    def end(self) -> None:
        """Its workers are gone."""
        if self._watched is not None:
            self._watched.close()
        self._watched = None

    def look(self) -> None:
        """Read what the workers have said since the last look."""
        if self._watched is None:
            return
        self._watched.look()
        for rank, heard in self._watched.heard.items():
            steps = self._steps.setdefault(rank, _RankPace())
            for one in heard.timings(steps.read_to):
                steps.read_to = max(steps.read_to, one.step)
                steps.add(one.whole_s)
                spent = (one.compute_s, one.wait_s, one.data_s, one.stall_s)
                for part, seconds in zip(
                    ("compute", "wait", "data", "checkpoint"), spent, strict=True
                ):
                    if 0 <= seconds < math.inf:
                        steps.parts[part] = steps.parts.get(part, 0.0) + seconds

    def sample(self, events: Sequence[Event]) -> None:
        """Samples of the ledger, for where nobody measures the steps."""
        for event in events:
            if (found := self._between.take(event)) is not None:
                self._sampled.add(*found)

    def fill(self, tally: Tally) -> None:
        """Add what is known to ``tally``."""
        now, now_s, node = time.time(), time.monotonic(), self._node
        tally.values["outlast_heartbeat_age_seconds"] = {}
        watched = self._watched
        for worker in watched.workers if watched is not None else ():
            heard = watched.heard.get(worker.rank) if watched is not None else None
            age_s = now_s - self._began_s if heard is None else self._age_s(heard, now, now_s)
            tally.put("outlast_heartbeat_age_seconds", max(age_s, 0.0), node, str(worker.rank))
        steps = {str(rank): one for rank, one in self._steps.items() if one.count}
        if not steps and self._sampled.count:
            steps = {"0": self._sampled}
        tally.values["outlast_step_gap_seconds"] = {}
        for rank, one in steps.items():
            ordered = sorted(one.newest)
            found = {each: _quantile(ordered, each) for each in QUANTILES}
            for each, seconds in found.items():
                tally.put("outlast_step_seconds", seconds, node, rank, str(each))
            tally.put("outlast_step_seconds_sum", one.seconds, node, rank)
            tally.put("outlast_step_seconds_count", one.count, node, rank)
            tally.put("outlast_step_gap_seconds", found[0.99] - found[0.5], node, rank)
            for part, seconds in one.parts.items():
                tally.put("outlast_step_part_seconds", seconds, node, rank, part)

    def _age_s(self, heard: BeatReader, now: float, now_s: float) -> float:
        ages = [now_s - self._began_s]
        if (beat := heard.beat) is not None:
            ages.append(now - beat.t)
        if (updates := heard.updates) is not None:
            ages.append(now_s - updates.last_s)
        return min(ages)


def _quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that so large a share of them does not exceed."""
    return ordered[min(max(math.ceil(share * len(ordered)) - 1, 0), len(ordered) - 1)]
