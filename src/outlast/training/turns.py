"""Decide on rank 0 when the next checkpoint is asked for, which tiers take it, and of what kind.

A save that comes while no snapshot can be taken is skipped and counted, never queued. After an
early notice checkpoints come closer together; where the machine will go, the next one is a drain.

Which tiers take it follows from what the ledger tells of copies.

Guarantees: the loop reads nothing. The ledger is looked at in a thread of its own after each
checkpoint, and what it found is used for the one after: a disk that hangs delays a change, no step.
Where no tier's interval is open, no thread is started.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from outlast.checkpoint.manifest import FULL, WEIGHTS
from outlast.config import Settings
from outlast.ledger.file import Follower
from outlast.ledger.measured import Interference, Measured
from outlast.ledger.narrator import say
from outlast.policy.cadence import BURDEN, HOUR_S, Auto, Cadence, Change, Hurried, cadence, cost_of
from outlast.policy.hazard import Hazard
from outlast.policy.retention import num_replicas
from outlast.policy.tier_cadence import Beyond, Cost, Scope, TierCadence, TierStop
from outlast.storage.trust import is_network
from outlast.tiers import Tier
from outlast.training.engine import NOT_KEPT, Engine
from outlast.training.sharing import snapshots_stay

logger = logging.getLogger(__name__)

TAIL_BYTES: Final = 2 << 20  # some thousand events: only the newest say how fast things are


NEWEST: Final = 16  # saves of which it is known who is to get them


class TierTurns:
    """Which tiers take which checkpoint of one attempt.

    Args:
        settings: the job's.
        now_s: when training begins.
        on_change: told of each other interval.
        known: what the job's past says of how much failures take.
        hazard: and of how often there is one.
        told: the intervals of tiers that were last said.
    """

    def __init__(
        self,
        settings: Settings,
        now_s: float,
        on_change: Callable[[Change], None],
        known: Beyond | None,
        hazard: Hazard | None = None,
        *,
        told: Mapping[str, float] | None = None,
    ) -> None:
        self._tiers = settings.tiers
        self._prices, self._kind = settings.prices, settings.price_kind
        self._on_change = on_change
        machines = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
        copies = bool(num_replicas(settings.peer_replicas, machines))
        self._cadence = TierCadence(
            [
                TierStop(name=tier.name, survives=survives(tier, copies=copies), every=tier.every)
                for tier in settings.tiers
            ],
            now_s,
            known,
            hazard,
            told=told,
            full_every=settings.checkpoint_optimizer_every,
            overhead=settings.checkpoint_overhead / 2,
        )
        survived = Scope.MACHINE if copies else Scope.PROCESS
        # Where each step is in memory anyway, what is due by the cadence is always a commit.
        is_apart = snapshots_stay(settings) and not settings.checkpoint_each_step
        self._apart = survived if is_apart else None
        self._follower = Follower(settings.dir, tail_bytes=TAIL_BYTES)
        self._measured, self._interference = Measured(), Interference()
        self._found: dict[str, Cost] = {}
        self._lock = threading.Lock()
        self._begun: dict[int, Sequence[str] | None] = {}  # step → the tiers that are to get it
        self._failed: int | None = None
        self._reader: threading.Thread | None = None

    def due(
        self, turn: int, now_s: float, *, all_of_them: bool, stays: bool = False
    ) -> list[str] | None:
        """The tiers that take the checkpoint of this number; None for all.

        Args:
            turn: number of the checkpoint, from 0.
            now_s: when it is asked for.
            all_of_them: the machine will soon be gone, and tiers that are open take each.
            stays: a snapshot stays in memory until a newer one is whole.
        """
        self._cadence.apart = self._apart if stays else None
        due = self._cadence.due(turn, now_s)
        if all_of_them:
            open_too = {tier.name for tier in self._tiers if tier.every is None}
            open_too.add(self._tiers[0].name)
            due = [tier.name for tier in self._tiers if tier.name in {*due, *open_too}]
        return None if len(due) == len(self._tiers) else due

    def taken(
        self, step: int, now_s: float, interval_s: float, names: Sequence[str] | None
    ) -> None:
        """That of ``step`` was taken for these tiers; the next one is due after ``interval_s``."""
        with self._lock:
            self._begun[step] = names
            while len(self._begun) > NEWEST:
                del self._begun[next(iter(self._begun))]
            has_failed = self._failed == step
        if self._cadence.is_fixed:
            return
        for name, cost in self._found.items():
            self._cadence.measured(name, cost)
        self._cadence.taken(now_s, interval_s, names)
        if has_failed:
            self._cadence.failed(names)
        for change in self._cadence.changed():
            self._on_change(change)
        if self._reader is None or not self._reader.is_alive():
            self._reader = threading.Thread(target=self._read, name="outlast-tiers", daemon=True)
            self._reader.start()

    def failed(self, step: int, *, is_kept: bool = True) -> None:
        """That of ``step`` has come to nothing; in some thread, perhaps before it is ``taken``.

        Args:
            step: its step.
            is_kept: False where some machine has no room to keep snapshots: from now on each goes
                to the first tier.
        """
        with self._lock:
            self._failed = step
            names = self._begun.pop(step, ())
        self._cadence.failed(names)
        if not is_kept:
            self._apart = None

    def settle(self, timeout_s: float) -> None:
        """Wait until what is being read has been."""
        if self._reader is not None:
            self._reader.join(timeout_s)

    def _read(self) -> None:
        try:
            for event in self._follower.poll():
                self._measured.take(event)
                self._interference.take(event)
            costs = {tier.name: self._cost(tier) for tier in self._tiers}
            self._found = {name: cost for name, cost in costs.items() if cost is not None}
        except Exception as error:  # noqa: BLE001 - nothing that observes may stop training
            logger.warning("what copies cost could not be read: %s", error)

    def _cost(self, tier: Tier) -> Cost | None:
        seen = self._measured.save(tier.name)
        if seen is None:
            return None
        money = tier.gb_price * self._measured.sizes.get(tier.name, 0) / 1e9
        kinds = self._measured.kinds.values() or [self._kind or ""]
        hour_price = self._prices.mean(kinds)
        # The first tier is written while the snapshot is taken, not from an earlier copy of it.
        is_first = tier is self._tiers[0]
        return Cost(
            copy_s=seen.slow_s,
            slowed=BURDEN if is_first else self._interference.slowed(tier.name),
            money_s=money / hour_price * HOUR_S if hour_price else 0.0,
        )


def survives(tier: Tier, *, copies: bool) -> Scope:
    """The most that may fail and leave what this tier, or the copies of it, hold.

    Args:
        tier: the tier.
        copies: whether other machines' memory holds copies of the newest snapshots.
    """
    if tier.kind == "object" or (tier.kind == "directory" and is_network(tier.url)):
        return Scope.ALL
    return Scope.MACHINE if copies else Scope.PROCESS


STUCK_S: Final = 120.0  # no save takes that long, unless it waits for storage that does not answer
END_AFTER_S: Final = 1.0  # of training that would be lost with the end of a loop
END_SHARE: Final = 50.0  # a save of it may hold up a script for a fiftieth of its time


class Turns:
    """Rank 0's decisions when a checkpoint is due; asked between steps, told by other threads.

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
