"""Whether a failure is a machine's own, and whether that machine costs more than it adds.

**Where was the same failure seen** (:func:`recurrence_of`): a failure that one machine has and
others do not is that machine's (a GPU gone, no driver, a card that another process fills, a network
card that hangs collectives); one that follows the work to other machines is the script's. So
nothing is called a bug before it was tried on another machine, if there is one. Two failures are
the same if their kinds are, and their words without numbers: ranks, ports, process ids and
gigabytes differ from one machine and one attempt to the next.

**What does the machine cost** (:func:`weigh`): both sides are parts of the job's time. Of M
machines with equal work one adds 1/M. Each of its failures stops all of them: for the restart, and
for the steps that are done again. Without it the others lose its share instead, and stop once when
it comes back. It is left out where

    failures' weight * seconds lost by each / seconds in which they came
        > share + pause when it comes back / seconds that it is left out.

Where a spare machine waits to take its place, nothing but that is lost by leaving it out.

How often it fails is counted over its last failures, of which there must be a few: three in the
last minute are three in a minute, also after ten good hours. The costliest stretch counts.

A SIGKILL of unknown sender counts little. One that a storm or a person sends hits any machine; the
twelfth that hits the same machine and no other is no chance any more. So each counts a twelfth
for each of them: a quarter where there are three, whole from twelve on.

What can go wrong: a bug that only rank 0 can have looks like its machine's until another machine
has rank 0. It costs one more attempt and one machine for as long, which is let in again then. Two
failures in a row that the next hours do not repeat look like many. The first time that a machine is
left out is short for that reason (:mod:`outlast.policy.exclusion`).

Rejected: a count alone (three in an hour are nothing on three machines, and much on a thousand).
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Collection, Iterable
from fractions import Fraction
from statistics import mean
from typing import Final

import msgspec

from outlast.policy.failures import Kind

GAP_MAX: Final = 2  # from one attempt to the next: a number may be claimed and never used
REMEMBERED: Final = 200
_VARYING: Final = re.compile(r"0x[0-9a-f]+|\d+")
KILLS_SURE: Final = 12  # on one machine, and on no other
ESTIMATE_S: Final = 60.0  # that a failure costs, until one was measured
COSTS_KEPT: Final = 20


# --- where it was seen ---------------------------------------------------------------------------


class Sighting(msgspec.Struct, frozen=True, kw_only=True):
    """A failure, and where it was.

    Attributes:
        attempt: number of the attempt.
        hosts: the machines that had it; of a hang, those of the ranks that hung.
        kind: its name.
        cause: of the same failure the same (``cause_of``).
        step: the last step completed before, or None.
        t: when, on a clock that all machines have.
    """

    attempt: int
    hosts: tuple[str, ...]
    kind: str
    cause: str
    step: int | None = None
    t: float = 0.0


class AgentView(msgspec.Struct, frozen=True, kw_only=True):
    """Where an agent is, and what is known of all machines.

    Attributes:
        host: this machine.
        attempt: number of the attempt that has failed.
        seen: what was seen on any machine, oldest first.
    """

    host: str
    attempt: int
    seen: tuple[Sighting, ...] = ()


class Recurrence(msgspec.Struct, frozen=True, kw_only=True):
    """The same failure in attempts that follow each other, the last one included.

    Attributes:
        attempts: how many.
        hosts: the machines that had it.
        same_step: in how many of them it was after the same step.
    """

    attempts: int
    hosts: frozenset[str]
    same_step: int


def cause_of(kind: str, words: str) -> str:
    """What is the same for failures of a kind that say the same."""
    return f"{kind} {zlib.crc32(_VARYING.sub('#', words).encode(errors='replace')):08x}"


def recurrence_of(sighting: Sighting, seen: Iterable[Sighting], since: int) -> Recurrence:
    """How often, and where, the same was seen in a row up to now.

    Args:
        sighting: the newest one.
        seen: others, in any order.
        since: the first attempt that counts: what was before some progress does not.
    """
    alike = [one for one in seen if one.cause == sighting.cause and one.attempt >= since]
    found = [sighting]
    for one in sorted(alike, key=lambda one: -one.attempt):
        if found[-1].attempt - one.attempt > GAP_MAX:
            break
        found.append(one)
    return Recurrence(
        attempts=len({one.attempt for one in found}),
        hosts=frozenset(host for one in found for host in one.hosts),
        same_step=len({one.attempt for one in found if one.step == sighting.step}),
    )


def is_overshadowed(sighting: Sighting, seen: Iterable[Sighting], graver: Collection[str]) -> bool:
    """Whether another machine had a failure just then that this one can be the consequence of.

    Args:
        sighting: this one.
        seen: what other machines had.
        graver: names of the kinds that it can be the consequence of.
    """
    return any(
        one.kind in graver
        and 0 <= sighting.attempt - one.attempt <= GAP_MAX
        and not set(one.hosts) & set(sighting.hosts)
        for one in seen
    )


# --- what it costs -------------------------------------------------------------------------------


class Stakes(msgspec.Struct, frozen=True, kw_only=True):
    """What there is to win and to lose; times in seconds.

    Attributes:
        workers: of the machine.
        all_workers: of the job's attempt.
        machines: of the attempt.
        cost_s: what each failure costs the job: the restart and the steps that are done again.
        pause_s: of that the restart: what the machine costs when it comes back.
        out_s: for how long it would be left out.
        since_t: since when it has taken part.
        away: until when it was left out the last time, and for how long.
        has_spare: whether another machine waits for a place.
    """

    workers: int
    all_workers: int
    machines: int
    cost_s: float = ESTIMATE_S
    pause_s: float = 0.0
    out_s: float = 120.0
    since_t: float = 0.0
    away: tuple[float, float] = (0.0, 0.0)
    has_spare: bool = False


class Weighed(msgspec.Struct, frozen=True, kw_only=True):
    """Both sides, as parts of the job's time.

    Attributes:
        costs: what its failures cost.
        adds: the work that it does and no other would do.
        pause: what coming back costs.
        words: the two, for people.
    """

    costs: float
    adds: float
    pause: float
    words: str

    @property
    def goes(self) -> bool:
        """Whether the job is better off without it."""
        return self.costs > self.adds + self.pause


def weigh(
    failures: Iterable[tuple[float, str]],
    stakes: Stakes,
    *,
    now_t: float,
    window_s: float,
    least: int,
) -> Weighed:
    """A machine's failures against its work.

    Args:
        failures: when each was, and its kind.
        stakes: see there.
        now_t: now, by the same clock.
        window_s: how long failures count.
        least: of how many a rate is told, at the fewest; two or more.
    """
    known = sorted(one for one in failures if now_t - one[0] < window_s)
    since_t = max(stakes.since_t, now_t - window_s)
    kills = sum(kind == Kind.KILLED.value for _, kind in known)
    costs = 0.0
    # From when it began, or from one of its failures on: that one is not counted then.
    starts = [since_t, *(t for t, _ in known)]
    for first in range(len(known) - least + 2 if len(known) >= least else 0):
        weight = sum(_weight(kind, kills) for _, kind in known[first:])
        took_s = now_t - starts[first] - _away_s(stakes.away, starts[first], now_t)
        lost_s = weight * stakes.cost_s
        costs = max(costs, lost_s / max(took_s, lost_s, 1e-9))
    share = Fraction(stakes.workers, max(stakes.all_workers, 1))
    pause = min(stakes.pause_s / stakes.out_s, 1.0) if stakes.out_s > 0 else 1.0
    return Weighed(
        costs=costs,
        adds=0.0 if stakes.has_spare else float(share),
        pause=pause,
        words=_words(costs, share, stakes),
    )


def _weight(kind: str, kills: int) -> float:
    return min(kills / KILLS_SURE, 1.0) if kind == Kind.KILLED.value else 1.0


def _away_s(away: tuple[float, float], since_t: float, now_t: float) -> float:
    until_t, for_s = away
    return max(min(until_t, now_t) - max(until_t - for_s, since_t), 0.0)


def _words(costs: float, share: Fraction, stakes: Stakes) -> str:
    """Machine-hours an hour on both sides: those of all machines."""
    cost_h, adds_h = costs * stakes.machines, float(share) * stakes.machines
    part = "all" if share == 1 else f"{share}"
    words = f"its failures cost the job {cost_h:.2g} machine-hours an hour, "
    if stakes.has_spare:
        return words + "and a machine that waits can take its place"
    return words + f"and it adds {adds_h:.2g} ({part} of the work)"


class Tolls:
    """What each failure of a job has cost it: a fold over its ledger.

    A restart lasts from the word of it to the ``resumed`` that follows; an unchanged script says
    nothing, and the attempt's beginning stands for it. Which steps are done again is told by the
    step resumed from; their time is that part of the attempt that was lost.

    Attributes:
        since_t: when the first attempt was formed; 0 for none.
    """

    def __init__(self) -> None:
        self.since_t = 0.0
        self._costs: list[tuple[float, float]] = []  # in all, and the pause
        self._pending: tuple[float, int | None] | None = None  # a restart: when, after which step
        self._formed_t = 0.0
        self._began: tuple[float, int | None] = (0.0, None)  # the attempt: when, from which step

    def see(self, event: str, t: float, step: int | None = None) -> None:
        """The next line: ``job_started``, ``attempt_formed``, ``resumed``, ``restart`` (a failure).

        What is between two runs of a job, a night perhaps, is no failure's cost.
        """
        if event == "job_started":
            self._pending, self._formed_t, self._began = None, 0.0, (0.0, None)
        elif event == "restart":
            if self._pending is not None and not self._formed_t:
                # Another machine's word of the same failure, which may know the step.
                first_t, known = self._pending
                self._pending = first_t, step if known is None else known
                return
            self._settle(self._formed_t, None)
            self._pending = t, step
        elif event == "attempt_formed":
            self.since_t = self.since_t or t
            self._formed_t = t
            if self._pending is None:
                self._began = t, None
        elif event == "resumed":
            self._settle(t, step)
            self._began = t, step

    def _settle(self, t: float, step: int | None) -> None:
        pending, self._pending = self._pending, None
        self._formed_t = 0.0
        if pending is None or t <= pending[0]:
            return
        pause_s = t - pending[0]
        began_t, first = self._began
        again_s = _again_s(pending[0] - began_t, first, pending[1], step) if began_t else 0.0
        self._costs = [*self._costs[1 - COSTS_KEPT :], (pause_s + again_s, pause_s)]
        self._began = t, step

    @property
    def cost_s(self) -> float:
        """Of each failure, restart and repeated steps."""
        return mean(cost_s for cost_s, _ in self._costs) if self._costs else ESTIMATE_S

    @property
    def pause_s(self) -> float:
        """Of each restart."""
        return mean(pause_s for _, pause_s in self._costs) if self._costs else 0.0


def _again_s(ran_s: float, first: int | None, last: int | None, back: int | None) -> float:
    """Of an attempt from step ``first`` to ``last`` what is done again from step ``back``."""
    if last is None or back is None or ran_s <= 0:
        return 0.0
    first = first or 0
    if last <= first:
        return ran_s  # not one new step
    return ran_s * min(max(last - back, 0) / (last - first), 1.0)
