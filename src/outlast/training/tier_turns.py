"""On rank 0: which tiers take the next checkpoint, from what the ledger tells of copies.

Guarantees: the loop reads nothing. The ledger is looked at in a thread of its own after each
checkpoint, and what it found is used for the one after: a disk that hangs delays a change, no step.
Where no tier's interval is open, no thread is started.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Final

from outlast.config import Settings
from outlast.ledger.file import Follower
from outlast.ledger.interference import Interference
from outlast.ledger.measured import Measured
from outlast.policy.cadence import HOUR_S, Change
from outlast.policy.replicas import num_replicas
from outlast.policy.tier_cadence import Beyond, Cost, Scope, Stop, TierCadence
from outlast.storage.mounts import is_network
from outlast.tiers import Tier

logger = logging.getLogger(__name__)

TAIL_BYTES: Final = 2 << 20


class TierTurns:
    """Of one attempt.

    Args:
        settings: the job's.
        now_s: when training begins.
        on_change: told of each other interval.
        known: what the job's past says of failures that take machines.
    """

    def __init__(
        self,
        settings: Settings,
        now_s: float,
        on_change: Callable[[Change], None],
        known: Beyond | None,
    ) -> None:
        self._tiers = settings.tiers
        self._hour_price = settings.price_spot or settings.price_on_demand
        self._on_change = on_change
        machines = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
        copies = bool(num_replicas(settings.peer_replicas, machines))
        self._cadence = TierCadence(
            [
                Stop(name=tier.name, survives=survives(tier, copies=copies), every=tier.every)
                for tier in settings.tiers
            ],
            now_s,
            known,
            full_every=settings.checkpoint_optimizer_every,
        )
        self._follower = Follower(settings.dir, tail_bytes=TAIL_BYTES)
        self._measured, self._interference = Measured(), Interference()
        self._found: dict[str, Cost] = {}
        self._reader: threading.Thread | None = None

    def due(self, turn: int, *, all_of_them: bool) -> list[str] | None:
        """The tiers that take the checkpoint of this number; None for all.

        Args:
            turn: number of the checkpoint, from 0.
            all_of_them: the machine will soon be gone, and tiers that are open take each.
        """
        due = self._cadence.due(turn)
        if all_of_them:
            open_too = {tier.name for tier in self._tiers if tier.every is None}
            due = [tier.name for tier in self._tiers if tier.name in {*due, *open_too}]
        return None if len(due) == len(self._tiers) else due

    def taken(self, now_s: float, interval_s: float) -> None:
        """A checkpoint was taken; the next one is due after ``interval_s``."""
        if self._cadence.is_fixed:
            return
        for name, cost in self._found.items():
            self._cadence.measured(name, cost)
        self._cadence.taken(now_s, interval_s)
        for change in self._cadence.changed():
            self._on_change(change)
        if self._reader is None or not self._reader.is_alive():
            self._reader = threading.Thread(target=self._read, name="outlast-tiers", daemon=True)
            self._reader.start()

    def settle(self, timeout_s: float) -> None:
        """Wait until what is being read has been."""
        if self._reader is not None:
            self._reader.join(timeout_s)

    def _read(self) -> None:
        try:
            for event in self._follower.poll():
                self._measured.take(event)
                self._interference.take(event)
            costs = {tier.name: self._cost(tier) for tier in self._tiers[1:]}
            self._found = {name: cost for name, cost in costs.items() if cost is not None}
        except Exception as error:  # noqa: BLE001 - nothing that observes may stop training
            logger.warning("what copies cost could not be read: %s", error)

    def _cost(self, tier: Tier) -> Cost | None:
        seen = self._measured.save(tier.name)
        if seen is None:
            return None
        money = tier.gb_price * self._measured.sizes.get(tier.name, 0) / 1e9
        return Cost(
            copy_s=seen.slow_s,
            slowed=self._interference.slowed(tier.name),
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
