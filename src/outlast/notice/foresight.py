"""Before any notice comes: whether the seconds that this platform gives are enough for this job.

Told once it is known (the platform is found out, and a save was seen, in this run or one before),
and again whenever the answer changes: ``grace 120 s, save needs 38 s ✔``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from outlast.config import Settings
from outlast.ledger.events import Event
from outlast.ledger.measured import Measured
from outlast.notice.platform import Chosen
from outlast.policy.drain import HTTP_S, DrainTier, check
from outlast.storage.mounts import is_network
from outlast.tiers import Tier


def lanes(tiers: tuple[Tier, ...], measured: Measured) -> list[DrainTier]:
    """The durable tiers as a drain sees them, with what they have shown."""
    found = []
    for tier in tiers:
        if tier.kind == "memory":
            continue
        seen = measured.save(tier.name)
        lane = DrainTier(
            name=tier.name,
            outlasts=tier.kind == "object" or is_network(tier.url),
            slow_s=seen.slow_s if seen else None,
            fast_s=seen.fast_s if seen else None,
            size=measured.sizes.get(tier.name, 0),
        )
        found.append(lane)
    return found


def standing(tiers: tuple[Tier, ...], measured: Measured) -> str:
    """Which tiers do not have the newest checkpoint, in words; "" when all have it."""
    durable = [tier.name for tier in tiers if tier.kind != "memory"]
    newest = max((measured.newest.get(name, 0) for name in durable), default=0)
    if measured.missed is not None and measured.missed[0] > newest:
        step, why = measured.missed
        return f"step {step} was in memory alone, and is lost: {why}; step {newest} stands"
    behind = [name for name in durable if measured.newest.get(name, 0) < newest]
    if not behind:
        return ""
    where = ", ".join(name for name in durable if name not in behind)
    older = ", ".join(
        f"{name} has {f'step {step}' if (step := measured.newest.get(name, 0)) else 'nothing'}"
        for name in behind
    )
    return f"step {newest} is in {where} alone: {older}"


class GraceCheck:
    """Follows the ledger and says whether a notice is long enough.

    Args:
        settings: the job's.
        say: tells people.
    """

    def __init__(self, settings: Settings, say: Callable[[str], None]) -> None:
        self._settings = settings
        self._say = say
        self._measured = Measured()
        self._chosen: Chosen | None = None
        self._told: bool | None = None
        self._is_leaving = False
        self._lock = threading.Lock()

    def found(self, chosen: Chosen) -> None:
        """The platform is known."""
        with self._lock:
            self._chosen = chosen
            self._tell()

    def saving_s(self) -> float | None:
        """Seconds until a save is in the fastest durable tier, slowly; None before the first."""
        with self._lock:
            found = [lane.slow_s for lane in lanes(self._settings.tiers, self._measured)]
        return min((seconds for seconds in found if seconds is not None), default=None)

    def take(self, event: Event) -> None:
        """One more event of the ledger."""
        with self._lock:
            self._measured.take(event)
            if event.event == "attempt_formed":
                self._is_leaving = False
            elif event.event == "notice" and not event.get("early"):
                self._is_leaving = True  # now it will be seen, not foreseen
            elif event.event in ("commit", "tier_copied"):
                self._tell()

    def _tell(self) -> None:
        chosen, settings = self._chosen, self._settings
        if chosen is None or self._is_leaving:
            return
        notice_s = settings.notice_grace_s or chosen.lead_s or chosen.grace_s
        if notice_s is None:
            return
        step = self._measured.step
        found = check(
            notice_s,
            lanes(settings.tiers, self._measured),
            heard_s=settings.notice_poll_s + HTTP_S if chosen.watchers else 0.0,
            step_s=step.slow_s if step else 0.0,
            leaves=bool(chosen.lead_s),
        )
        if found is not None and found.fits != self._told:
            self._told = found.fits
            self._say(found.words)
