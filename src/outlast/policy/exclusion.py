"""Machines that are left out of the next attempts: for how long, and when they are needed anyway.

A machine that fails again and again costs every other one a restart each time; whether that is
more than it adds is weighed in :mod:`outlast.policy.weighing`. It is left out by
the name of its host, so that a new agent on the same machine is left out as well, and comes back
after a while: most causes pass, or are mended.

It is left out for minutes the first time, and for twice as long each time that its failures come
again, up to what the owner has set: what was bad luck in a storm costs little, and what is broken
is soon out for good.

A job is never ended for it. Where too few others are there, it takes part all the same: it is then
only to be replaced (``spare_only``), and takes part unless another machine waits for a place. So
nobody who was left out before comes in for one that was told to stay.

Rejected: leaving a machine out for good. Whoever is wrong about it once has lost it for the job.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

FIRST_S: Final = 120.0  # the first time
JITTER_S: Final = 1.0  # the same time, as two machines have counted it


class Exclusion(msgspec.Struct, frozen=True, kw_only=True):
    """One machine that is to be left out.

    Attributes:
        host: its name.
        reason: in words that go on from "left out: ".
        for_s: how long, in seconds from when it is said.
        spare_only: only if another machine waits for a place; otherwise it stays.
        asker: the node whose agent asks for it.
    """

    host: str
    reason: str
    for_s: float
    spare_only: bool = False
    asker: str = ""


def lasts_s(
    most_s: float, last: tuple[float, float] | None, now_t: float, window_s: float
) -> float:
    """For how long to leave a machine out, in seconds.

    Args:
        most_s: at most.
        last: until when it was left out the last time, and for how long; None if it never was.
        now_t: now, by the same clock.
        window_s: after which the last time is forgotten.
    """
    if last is None or now_t > last[0] + window_s:
        return min(most_s, FIRST_S)
    return min(most_s, 2 * max(last[1], FIRST_S))


class Exclusions:
    """Those of one job."""

    def __init__(self) -> None:
        self._out: dict[str, tuple[Exclusion, float]] = {}  # host → which, until when

    def __bool__(self) -> bool:
        return bool(self._out)

    def put(self, out: Exclusion, now_s: float) -> bool:
        """Leave a machine out; whether that is news: it was not, or not so strictly or so long."""
        until_s = now_s + out.for_s
        if self.holds(out.host, now_s):
            before, before_s = self._out[out.host]
            if out.spare_only and not before.spare_only:
                return False
            if out.spare_only == before.spare_only and until_s <= before_s + JITTER_S:
                return False
        self._out[out.host] = (out, until_s)
        return True

    def stays(self, host: str) -> None:
        """A machine that was put here is needed: it is only to be replaced."""
        out, until_s = self._out[host]
        self._out[host] = (msgspec.structs.replace(out, spare_only=True), until_s)

    def hear(self, out: Exclusion, now_s: float, *, goes: bool) -> None:
        """What came of asking for a machine to be left out, as the coordinator says."""
        self.put(out, now_s)
        if not goes and self.holds(out.host, now_s):
            self.stays(out.host)

    def bring_back(self, host: str) -> None:
        """It may take part again."""
        self._out.pop(host, None)

    def left(self, now_s: float) -> tuple[Exclusion, ...]:
        """Those in force, each for as long as is left of its time."""
        hosts = [host for host in list(self._out) if self.holds(host, now_s)]
        return tuple(
            msgspec.structs.replace(out, for_s=until_s - now_s)
            for out, until_s in (self._out[host] for host in hosts)
        )

    def holds(self, host: str, now_s: float) -> bool:
        """Whether a machine is left out now."""
        known = self._out.get(host)
        if known is not None and now_s >= known[1]:
            self.bring_back(host)
            return False
        return known is not None

    def words(self, host: str, now_s: float) -> str:
        """What a machine that is left out waits for; "" for another."""
        if not self.bars(host, now_s):
            return ""
        out, until_s = self._out[host]
        left_min = (until_s - now_s) / 60
        return f"its time to be over: left out for another {left_min:.0f} min ({out.reason})"

    def bars(self, host: str, now_s: float) -> bool:
        """Whether it is left out even where there is room for it."""
        return self.holds(host, now_s) and not self._out[host][0].spare_only

    def can_do_without(
        self, host: str, others: Iterable[str], *, members: int, least: int, now_s: float
    ) -> bool:
        """Whether the job goes on without a machine that was put here.

        Args:
            host: it.
            others: hosts of the machines that could be in the next attempt, itself not counted.
            members: machines of the last attempt.
            least: the fewest of an attempt.
            now_s: now.
        """
        if self._out[host][0].spare_only:
            free = sum(not self.holds(one, now_s) for one in others)
            return free >= max(least, members)
        return sum(not self.bars(one, now_s) for one in others) >= least

    def pick(
        self, ready: Sequence[tuple[str, str]], *, least: int, most: int, now_s: float
    ) -> tuple[str, ...]:
        """Who is in the next attempt, in the order of ``ready``: those left out only if needed.

        Args:
            ready: node and host of each machine that could be, best first.
            least: machines in an attempt, at the fewest.
            most: the same, at the most.
            now_s: now.
        """
        if not self._out:
            return tuple(node for node, _ in ready[:most])
        grades: list[list[str]] = [[], [], []]
        for node, host in ready:
            grades[self.holds(host, now_s) + self.bars(host, now_s)].append(node)
        chosen = (grades[0] + grades[1])[:most]
        chosen += grades[2][: max(least - len(chosen), 0)]
        return tuple(node for node, _ in ready if node in set(chosen))
