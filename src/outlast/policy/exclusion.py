"""Which machines are kept out of the next attempt: left out, cut off, or not worth a pause.

:class:`Exclusions`: a machine that fails again and again costs every other one a restart each time;
whether that is more than it adds is weighed in :mod:`outlast.policy.attribution`. It is left out by
the name of its host, so that a new agent on the same machine is left out as well, and comes back
after a while: most causes pass, or are mended. It is left out for minutes the first time, and for
twice as long each time that its failures come again, up to what the owner has set: what was bad
luck in a storm costs little, and what is broken is soon out for good.

A job is never ended for it. Where too few others are there, it takes part all the same: it is then
only to be replaced (``spare_only``), and takes part unless another machine waits for a place. So
nobody who was left out before comes in for one that was told to stay.

:class:`Reach`: of two machines that cannot reach each other one leaves.

:class:`Intake`: a machine that waits is taken in where that is worth the pause that it costs
everybody. One that stays for an hour pays for a pause of a second many times over; one that comes
and goes every minute does not. How long machines stay is learned from losses (a Gamma prior, as for
any unknown rate: one loss in ten machine-hours to begin with), for the job as a whole, and for a
host that was lost several times, which waits longer each time.

Rejected: leaving a machine out for good (one wrong decision would lose it for the job);
re-forming whenever two machines cannot reach each other (for ever, when only that pair is cut).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final

import msgspec

FIRST_OUT_S: Final = 120.0  # that a machine is left out the first time
JITTER_S: Final = 1.0  # the same time, as two machines have counted it
PRIOR_LOSSES: Final = 1.0  # of machines, believed before any was seen
PRIOR_S: Final = 10 * 3600.0  # in which they come
FIRST_PAUSE_S: Final = 5.0  # that taking in costs, until it was measured
BATCH_S: Final = 1.0  # that a machine waits for another one to come with it
WARMING_S: Final = 10.0  # for others that will be ready soon
PENALTY_S: Final = 5.0  # that a host waits which was lost twice
PENALTY_MAX_S: Final = 600.0
HOSTS_KEPT: Final = 1024  # remembered before those are forgotten that were lost long ago
LOSS_MEMORY_S: Final = 3600.0  # losses of a host are forgotten after this time


# --- left out ------------------------------------------------------------------------------------


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
        return min(most_s, FIRST_OUT_S)
    return min(most_s, 2 * max(last[1], FIRST_OUT_S))


class Exclusions:
    """The machines of one job that are left out."""

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


# --- cut off -------------------------------------------------------------------------------------


class Reach:
    """The pairs that are known to be cut, each since when."""

    def __init__(self) -> None:
        self._pairs: dict[frozenset[str], float] = {}

    def __bool__(self) -> bool:
        return bool(self._pairs)

    def apart(self, one: str, other: str, now_s: float) -> None:
        """Two machines cannot reach each other."""
        self._pairs.setdefault(frozenset((one, other)), now_s)

    def together(self, one: str, other: str) -> None:
        """They reach each other again."""
        self._pairs.pop(frozenset((one, other)), None)

    def forget(self, node: str) -> None:
        """A machine is gone."""
        if self._pairs:
            self._pairs = {pair: t for pair, t in self._pairs.items() if node not in pair}

    def touching(self, nodes: Collection[str]) -> set[str]:
        """All of a pair that one of ``nodes`` belongs to."""
        found = [pair for pair in self._pairs if any(node in nodes for node in pair)]
        return {node for pair in found for node in pair}

    def cut_off(
        self,
        nodes: Collection[str],
        *,
        first: str,
        rank: Callable[[str], Any],
        until_s: float = float("inf"),
    ) -> set[str]:
        """Who has to leave so that the others all reach each other: the fewest, or nearly so.

        Whoever is cut off from most goes first; of equals the one of the higher rank.

        Args:
            nodes: among these.
            first: the one that stays in any case.
            rank: orders them.
            until_s: pairs that were cut later do not count yet.
        """
        if not self._pairs:
            return set()
        left = [
            pair
            for pair, since_s in self._pairs.items()
            if since_s <= until_s and all(node in nodes for node in pair)
        ]
        return fewest_out(left, rank, first=first)


def fewest_out(
    pairs: Iterable[frozenset[str]], rank: Callable[[str], Any], *, first: str = ""
) -> set[str]:
    """The machines without which no pair is left that is cut: the fewest, or nearly so.

    Args:
        pairs: those that are cut.
        rank: of machines that are cut off from as many, the one of the highest rank goes.
        first: the one that stays in any case.
    """
    left, out = list(pairs), set[str]()
    while left:
        count = Counter(node for pair in left for node in pair if node != first)
        worst = max(count, key=lambda node: (count[node], rank(node)))
        out.add(worst)
        left = [pair for pair in left if worst not in pair]
    return out


# --- worth a pause -------------------------------------------------------------------------------


class Intake:
    """Learns how long machines stay, and judges those that wait."""

    def __init__(self) -> None:
        self._machine_s = 0.0
        self._losses = 0
        self._members = 0
        self._formed_s: float | None = None
        self._pause_s = FIRST_PAUSE_S
        self._lost: dict[str, list[float]] = {}
        self._hosts_max = HOSTS_KEPT

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
        recent = [t for t in self._lost.get(host, ()) if now_s - t < LOSS_MEMORY_S]
        self._lost[host] = [*recent, now_s]
        if len(self._lost) > self._hosts_max:  # hosts get new names in some places
            self._lost = {h: ts for h, ts in self._lost.items() if now_s - ts[-1] < LOSS_MEMORY_S}
            self._hosts_max = max(HOSTS_KEPT, 2 * len(self._lost))

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
