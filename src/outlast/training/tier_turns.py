"""On rank 0: which tiers take the next checkpoint, from what the ledger tells of copies.

Guarantees: the loop reads nothing. The ledger is looked at in a thread of its own after each
checkpoint, and what it found is used for the one after: a disk that hangs delays a change, no step.
Where no tier's interval is open, no thread is started.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from outlast.config import Settings
from outlast.ledger.file import Follower
from outlast.ledger.interference import Interference
from outlast.ledger.measured import Measured
from outlast.policy.cadence import BURDEN, HOUR_S, Change
from outlast.policy.hazard import Hazard
from outlast.policy.retention import num_replicas
from outlast.policy.tier_cadence import Beyond, Cost, Scope, TierCadence, TierStop
from outlast.storage.mounts import is_network
from outlast.tiers import Tier
from outlast.training.room import snapshots_stay

logger = logging.getLogger(__name__)

NEWEST: Final = 16  # saves of which it is known who is to get them
TAIL_BYTES: Final = 2 << 20


class TierTurns:
    """Of one attempt.

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
        self._hour_price = settings.price_spot or settings.price_on_demand
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
        self._apart = survived if snapshots_stay(settings) else None
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
        # The first tier is written while the snapshot is taken, not from an earlier copy of it.
        is_first = tier is self._tiers[0]
        return Cost(
            copy_s=seen.slow_s,
            slowed=BURDEN if is_first else self._interference.slowed(tier.name),
            money_s=money / self._hour_price * HOUR_S if self._hour_price else 0.0,
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
