"""Whether machines that wait are worth the pause that taking them in costs everybody.

A machine that stays for an hour pays for a pause of a second many times over; one that comes and
goes every minute does not. How long machines stay is learned from losses (a Gamma prior, as for any
unknown rate: one loss in ten machine-hours to begin with), for the job as a whole, and for a host
that was lost several times by letting it wait longer each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

PRIOR_LOSSES: Final = 1.0
PRIOR_S: Final = 10 * 3600.0
FIRST_PAUSE_S: Final = 5.0  # until one was measured
BATCH_S: Final = 1.0
WARMING_S: Final = 10.0  # for others that will be ready soon
PENALTY_S: Final = 5.0
PENALTY_MAX_S: Final = 600.0
HOSTS: Final = 1024  # remembered before those are forgotten that were lost long ago
MEMORY_S: Final = 3600.0  # losses of a host are forgotten after this time


class Intake:
    """Learns how long machines stay, and judges those that wait."""

    def __init__(self) -> None:
        self._machine_s = 0.0
        self._losses = 0
        self._members = 0
        self._formed_s: float | None = None
        self._pause_s = FIRST_PAUSE_S
        self._lost: dict[str, list[float]] = {}
        self._hosts_max = HOSTS

    @property
    def stay_s(self) -> float:
        """How long a machine is expected to stay, in seconds: the posterior mean's inverse."""
        return (PRIOR_S + self._machine_s) / (PRIOR_LOSSES + self._losses)

    def formed(self, members: int, now_s: float, *, paused_s: float | None) -> None:
        """An attempt has started with so many machines, ``paused_s`` after the last one ended.

        None where machines were waited for: taking one in does not cost that.
        """
        self._count_time(now_s)
        if self._formed_s is not None and paused_s is not None:
            self._pause_s = paused_s
        self._members = members
        self._formed_s = now_s

    def lost(self, host: str, now_s: float) -> None:
        """A member was lost without a word."""
        self._count_time(now_s)
        self._losses += 1
        recent = [t for t in self._lost.get(host, ()) if now_s - t < MEMORY_S]
        self._lost[host] = [*recent, now_s]
        if len(self._lost) > self._hosts_max:  # hosts get new names in some places
            self._lost = {h: ts for h, ts in self._lost.items() if now_s - ts[-1] < MEMORY_S}
            self._hosts_max = max(HOSTS, 2 * len(self._lost))

    def is_worth_it(
        self, waiting: Sequence[tuple[str, float]], *, members: int, warming: int, now_s: float
    ) -> bool:
        """Whether to pause for those who wait now.

        Args:
            waiting: of each machine its host, and since when it is ready (seconds of the clock of
                ``now_s``).
            members: machines that would pause.
            warming: machines that will be ready soon, and should cost no pause of their own.
            now_s: now.
        """
        ripe = [since_s for host, since_s in waiting if now_s >= self._welcome_s(host)]
        if not ripe:
            return False
        waited_s = now_s - min(ripe)
        if waited_s < (WARMING_S if warming else BATCH_S):
            return False
        return len(ripe) * self.stay_s > members * self._pause_s

    def _welcome_s(self, host: str) -> float:
        """When a host that was lost may come back: at once the first time, later each time."""
        losses = self._lost.get(host, [])
        if len(losses) < 2:
            return float("-inf")
        return losses[-1] + min(PENALTY_S * 2.0 ** (len(losses) - 2), PENALTY_MAX_S)

    def _count_time(self, now_s: float) -> None:
        if self._formed_s is not None:
            self._machine_s += self._members * (now_s - self._formed_s)
            self._formed_s = now_s
