"""What rank 0 expects of the next seconds: how long the step and a save still take."""

from __future__ import annotations

import logging
from typing import Any

from outlast.config import Settings
from outlast.ledger.file import Follower
from outlast.ledger.measured import Measured
from outlast.notice.foresight import lanes
from outlast.policy.drain import Plan, plan

logger = logging.getLogger(__name__)


class Outlook:
    """Reads the ledger when it is asked; nothing is read on the step's path.

    Args:
        settings: the job's.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._follower = Follower(settings.dir)
        self._measured = Measured()

    def plan(self, left_s: float | None, *, in_step_s: float | None, saving: bool) -> Plan:
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
        try:
            for event in self._follower.poll():
                self._measured.take(event)
        except OSError as error:
            logger.warning("the ledger cannot be read: %s", error)


def info_of(found: Plan) -> dict[str, Any]:
    """What the ranks, and the ledger, are told of a plan."""
    return {
        "choice": found.choice,
        "tiers": found.tiers,
        "needs_s": None if found.needs_s is None else round(found.needs_s, 3),
        "why": found.words,
    }
