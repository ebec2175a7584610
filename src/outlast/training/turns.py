"""Whose turn it is: on rank 0, when the next checkpoint is to be asked for, and of what kind.

A save that comes while no snapshot can be taken is skipped and counted, never queued. After an
early notice checkpoints come closer together; where the machine will go, the next one is a drain.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from outlast.checkpoint.manifest import FULL, WEIGHTS
from outlast.config import Settings
from outlast.ledger.narrator import say
from outlast.policy.cadence import Auto, Cadence, Change, Hurried, cadence, cost_of
from outlast.policy.hazard import Hazard
from outlast.policy.tier_cadence import Beyond
from outlast.training.engine import NOT_KEPT, Engine
from outlast.training.tier_turns import TierTurns

STUCK_S: Final = 120.0  # no save takes that long, unless it waits for storage that does not answer
END_AFTER_S: Final = 1.0  # of training that would be lost with the end of a loop
END_SHARE: Final = 50.0  # a save of it may hold up a script for a fiftieth of its time


class Turns:
    """Rank 0's decisions; asked between two steps, and told by other threads.

    Args:
        settings: the job's.
        engine: whether a snapshot could be taken.
        on_skipped: told (step, reason) of each save that was due and is not taken.
        on_change: told of each other interval that was found better.
        known: what the job's past says of its failures.
        costs_s: and of what its newest checkpoints cost.
        storms: whether it has said last that failures come in a burst.
        beyond: what it says of the failures that took machines.
        told: and which intervals of tiers it has said last.
        leads: this is rank 0; the other ranks decide nothing, and tell of no change.

    Attributes:
        tier_turns: which tiers take the next checkpoint; None on other ranks.
    """

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        on_skipped: Callable[[int, str], None],
        *,
        on_change: Callable[[Change], None],
        known: Hazard | None,
        costs_s: Sequence[float] = (),
        storms: bool = False,
        beyond: Beyond | None = None,
        told: Mapping[str, float] | None = None,
        leads: bool = True,
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._on_skipped = on_skipped
        every = settings.checkpoint_every
        now_s = time.monotonic()
        self._cadence: Cadence = cadence(
            *(every.steps, every.seconds, now_s, known, costs_s),
            storms=storms,
            overhead=settings.checkpoint_overhead / 2,  # the tiers have the other half
        )
        self._auto = self._cadence if leads and isinstance(self._cadence, Auto) else None
        self._on_change = on_change
        self.tier_turns = (
            TierTurns(settings, now_s, on_change, beyond, known, told=told) if leads else None
        )
        self._saves = 0  # that came due by the cadence
        self._asking = False
        self._again = ""
        self._leaves_next = False
        self._end_s: float | None = None  # monotonic time at which the machine goes
        self._taken_s = time.monotonic()
        self._end_cost_s = self._took_s = 0.0
        self._knows_took = bool(costs_s)
        self._knows_alone = False  # how long one takes that no tier gets
        self._skip_told = False
        self._stuck_told = 0

    def due(self, step: int) -> dict[str, Any] | None:
        """What to ask for at the boundary after the next step, if anything."""
        if self._asking:
            return None
        if self._again and self._engine.idle:
            reason, self._again, self._asking = self._again, "", True
            return {"kind": "save", "reason": reason}
        if not self._cadence.due(step + 1, time.monotonic()):
            return None
        if not self._engine.idle_soon:
            self._tell_if_stuck()
            # In a storm the next is due as soon as it can be: that is no save that was left out.
            if not self._skip_told and not (self._auto is not None and self._auto.storms):
                self._skip_told = True
                self._on_skipped(step + 1, self._engine.why_not())
            return None
        self._asking, self._skip_told = True, False
        if self._leaves_next:
            left_s = None if self._end_s is None else max(self._end_s - time.monotonic(), 0.0)
            return {"kind": "drain", "reason": "an early notice", "left_s": left_s}
        return {"kind": "save", "reason": "due", **self._content()}

    def taken(
        self, step: int, now_s: float, blocked_s: float, tiers: Sequence[str] | None = None
    ) -> float | None:
        """A snapshot was begun for these tiers (None: all), and blocked the loop for so long.

        Returns:
            What it costs training, in seconds; None where it is not known how long one takes. Of
            what a tier takes besides, see ``tier_turns``.
        """
        since_s = now_s - self._taken_s
        if self._auto is not None and self._took_s and not self._knows_took:
            self._auto.forget_costs()  # before the first save had ended
            self._knows_took = True
        cost_s = cost_of(blocked_s, self._took_s)
        self._cadence.taken(step, now_s, cost_s)
        self._taken_s = now_s
        change = self._auto.changed() if self._auto is not None else None
        if change is not None:
            self._on_change(change)
        if self.tier_turns is not None:
            next_s = since_s if self._auto is None else self._auto.due_s(step, now_s, 0.0) - now_s
            self.tier_turns.taken(step, now_s, next_s, tiers)
        return cost_s if self._took_s else None

    def written(self, step: int, took_s: float, *, alone: bool = False, error: str = "") -> None:
        """The save of ``step`` has ended after so long; in some thread.

        Args:
            step: its step.
            took_s: 0 where it has failed.
            alone: it stays in memory, and no tier gets it.
            error: why it has failed, "" if it has not.
        """
        if error:
            if self.tier_turns is not None:
                self.tier_turns.failed(step, is_kept=NOT_KEPT not in error)
        elif alone or not self._knows_alone:
            self._knows_alone = alone
            self._took_s = took_s or self._took_s

    def pays(self) -> bool:
        """Whether the end of a loop is worth a save of its own: not where loops are short."""
        since_s = time.monotonic() - self._taken_s
        return self._engine.idle_soon and since_s >= max(END_AFTER_S, END_SHARE * self._end_cost_s)

    def end_taken(self, blocked_s: float) -> None:
        """The end of a loop was saved, and that held up the script for so long."""
        self._end_cost_s = blocked_s

    def answered(self) -> None:
        """What was asked for has come, or will not."""
        self._asking = False

    def repeat(self, reason: str) -> None:
        """Take another one soon, for all tiers, whatever was due."""
        self._again = reason

    def hurry(self, info: dict[str, Any]) -> None:
        """An early notice was heard somewhere; its answer is what the settings say to it."""
        answer, left_s = info.get("answer"), info.get("left_s")
        if left_s is not None:
            self._end_s = time.monotonic() + left_s
        if answer in ("save", "leave") and not isinstance(self._cadence, Hurried):
            self._cadence = Hurried(self._cadence)
        self._leaves_next = self._leaves_next or answer == "leave"

    def _content(self) -> dict[str, Any]:
        turn, self._saves = self._saves, self._saves + 1
        tiers, hurried = self.tier_turns, isinstance(self._cadence, Hurried)
        whole = turn % self._settings.checkpoint_optimizer_every == 0
        return {
            "tiers": None
            if tiers is None
            else tiers.due(turn, time.monotonic(), all_of_them=hurried, stays=self._engine.keeps),
            "content": FULL if whole else WEIGHTS,
        }

    def _tell_if_stuck(self) -> None:
        """Once for each save: skipping the next ones must not go on in silence."""
        step = self._engine.stuck(STUCK_S)
        if step and step != self._stuck_told:
            self._stuck_told = step
            safe = self._engine.committed_step
            say(
                f"the save of step {step} does not end, and none can begin before it does: "
                f"{f'step {safe}' if safe else 'nothing'} is committed. Does the storage answer? "
                f"The keeper's log is {Path(self._engine.line.socket).with_suffix('.log')}"
            )
