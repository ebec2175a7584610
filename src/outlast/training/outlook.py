"""What rank 0 expects of the next seconds: how long the step and a save still take."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from typing import Any, Final

from outlast.config import Settings
from outlast.ledger.events import Event
from outlast.ledger.file import Follower
from outlast.ledger.measured import Measured
from outlast.notice.foresight import lanes
from outlast.policy.drain import DrainPlan, plan

logger = logging.getLogger(__name__)

LOOK_S: Final = 0.5
TAIL_BYTES: Final = 2 << 20  # some thousand events: only the newest say how fast things are


class Outlook:
    """Reads the ledger when it is asked; nothing is read on the step's path.

    A disk that hangs delays an answer by ``LOOK_S`` at most: it is then given from what was read
    before.

    Args:
        settings: the job's.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._follower = Follower(settings.dir, tail_bytes=TAIL_BYTES)
        self._measured = Measured()
        self._new: queue.SimpleQueue[list[Event]] = queue.SimpleQueue()
        self._reader: threading.Thread | None = None

    def plan(self, left_s: float | None, *, in_step_s: float | None, saving: bool) -> DrainPlan:
        """What to do about a notice.

        Args:
            left_s: seconds until the machine goes; None when nobody said.
            in_step_s: how long the step in progress has taken so far; None between steps.
            saving: whether a save is in flight, behind which the last one must queue.
        """
        self._look()
        found = lanes(self._settings.tiers, self._measured)
        slow_s = fast_s = 0.0
        if in_step_s is not None:
            step = self._measured.step
            usual_s = step.slow_s if step else 0.0
            # A step that is longer than they usually are (an evaluation in it, say) may go on for
            # as long again, or be over in this moment.
            slow_s = usual_s - in_step_s if in_step_s < usual_s else in_step_s
            fast_s = max((step.fast_s if step else 0.0) - in_step_s, 0.0)
        if saving:
            slow_s = max([slow_s, *(lane.slow_s for lane in found[:1] if lane.slow_s)])
        return plan(left_s, found, step_slow_s=slow_s, step_fast_s=fast_s)

    def seconds_of(self, steps: int) -> float | None:
        """How long so many steps take, when it goes well; None before the first."""
        self._look()
        step = self._measured.step
        return None if step is None else steps * step.fast_s

    def _look(self) -> None:
        if self._reader is None or not self._reader.is_alive():
            self._reader = threading.Thread(target=self._read, name="outlast-outlook", daemon=True)
            self._reader.start()
        self._reader.join(LOOK_S)
        with contextlib.suppress(queue.Empty):
            while True:
                for event in self._new.get_nowait():
                    self._measured.take(event)

    def _read(self) -> None:
        try:
            self._new.put(self._follower.poll())
        except OSError as error:
            logger.warning("the ledger cannot be read: %s", error)


def info_of(found: DrainPlan) -> dict[str, Any]:
    """What the ranks, and the ledger, are told of a plan."""
    return {
        "choice": found.choice,
        "tiers": found.tiers,
        "needs_s": None if found.needs_s is None else round(found.needs_s, 3),
        "why": found.words,
    }
