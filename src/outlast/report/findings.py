"""What of a job somebody should look at: slow ranks, a machine that stands out, silences, warnings.

**Slow ranks.** A rank is in the list once for each time that it was found slow. Where the watch
named it while the job ran (the event ``straggler``), its figures are the watch's. A machine that
the watch did not name then, and whose ``rank_steps`` lines call it slow, is in the list once, if
that cost ``WORTH`` of the time that machines were held and ``WORTH_S`` at least. What it cost is in
both cases the time by which its work in a step was longer than that of the others, over the steps
in which it was slow: so long did they wait. The watch judges it once, when it names the rank; the
lines have it for each minute.

**A machine stands out** where it had more than half of the incidents in which machines are named,
two at least, or more than half of what slow ranks have cost, if that is ``WORTH`` of the time held.
Where slowness went from machine to machine, none is bad: then the cause is in what all of them
share (batches of different lengths, the network, storage).

**A silence** is an hour or more in which a job that trains wrote nothing, and of which no incident
tells.

Rejected: the sums of ``rank_steps`` lines beside the watch's figures. They are of other steps, so
two figures for one rank never agreed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from outlast import units
from outlast.ledger.events import Event
from outlast.ledger.incidents import Incident, Slow, lost_to_waiting_s
from outlast.ledger.measured import TierTime
from outlast.report.series import RankTimes

SILENT_S: Final = 3600.0
SILENCE: Final = "silence"  # the kind of an incident
WORTH: Final = 0.01
WORTH_S: Final = 10.0
UNNAMED: Final = "not named"
_MOST_NAMED: Final = 3
_MOVED_LEAST: Final = 3  # machines


class LateWork(msgspec.Struct, frozen=True, kw_only=True):
    """What was done about late workers, by ``workers.late``.

    Attributes:
        moves: how often shards were shared out anew.
        late: the ranks that others made shards for.
        dropped: rank → samples of it that are in no sum. Of a step that was made again after a loss
            they count each time; the checkpoint's record has those of the run that stands.
        steps: in which something was dropped, likewise.
    """

    moves: int = 0
    late: tuple[int, ...] = ()
    dropped: dict[str, int] = {}
    steps: int = 0

    @property
    def words(self) -> str:
        """For a person."""
        said = []
        if self.moves:
            who = f" of rank{'s'[: len(self.late) > 1]} {', '.join(map(str, self.late))}"
            times = units.count(self.moves, "time")
            said.append(f"shards{who} were made by others, shared out anew {times}")
        if self.dropped:
            by_rank = ", ".join(f"rank {rank}: {num:,}" for rank, num in self.dropped.items())
            num = units.count(sum(self.dropped.values()), "sample")
            steps = units.count(self.steps, "step")
            said.append(f"{num} of {steps} are in no sum ({by_rank})")
        return "; ".join(said)


def late_work(events: Iterable[Event]) -> LateWork | None:
    """What the ledger says of it; None where nothing was done."""
    moves, steps, late, dropped = 0, 0, set[int](), Counter[int]()
    for event in events:
        if event.event == "late_moved" and not event.get("probes"):
            moves += 1
            ranks = event.get("late")  # a damaged line may hold anything
            ranks = ranks if isinstance(ranks, list) else []
            late.update(one for one in ranks if isinstance(one, int))
        elif event.event == "late_dropped" and isinstance(event.get("samples"), dict):
            num_steps = event.get("steps")
            steps += num_steps if isinstance(num_steps, int) else 0
            for rank, num in event["samples"].items():
                if str(rank).isdigit() and isinstance(num, int):
                    dropped[int(rank)] += num
    if not moves and not dropped:
        return None
    by_rank = {str(rank): num for rank, num in sorted(dropped.items())}
    return LateWork(moves=moves, late=tuple(sorted(late)), dropped=by_rank, steps=steps)


class SlowRank(msgspec.Struct, frozen=True, kw_only=True):
    """A rank, or several of one machine, while it was slow.

    Attributes:
        node, ranks: who.
        cause: "compute", "loader" or "burst", as the watch named it, or "not named".
        factor: times the others' work in a step; of a machine that was not named, at the most.
        from_t, until_t: when, on the wall clock; where it was not named, of several stretches the
            costliest.
        since_step, until_step: in which steps; null where it was not named.
        lost_s: seconds that each worker has waited for it, estimated.
        over: whether it has recovered.
        action: what was done.
    """

    node: str
    ranks: tuple[int, ...]
    cause: str
    factor: float
    from_t: float
    until_t: float
    since_step: int | None
    until_step: int | None
    lost_s: float
    over: bool
    action: str


class JobWarning(msgspec.Struct, frozen=True, kw_only=True):
    """Something to be done about a job: what is wrong, and the command that goes on from there."""

    what: str
    command: str


class MachineVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a machine is bad.

    Attributes:
        machines: those that stand out; none where nobody does.
        words: why, or why not, as a sentence without its full stop.
    """

    machines: list[str]
    words: str


def slow_list(
    named: Iterable[Slow], ranks: Sequence[RankTimes], held_s: float
) -> tuple[list[SlowRank], float]:
    """The slow ranks in the order of their times, and what all of them have cost, in seconds.

    Args:
        named: by the watch.
        ranks: what lines tell of all of them.
        held_s: of the job, in which machines were held.
    """
    told = list(named)
    found = [
        SlowRank(**{name: getattr(one, name) for name in SlowRank.__struct_fields__})
        for one in told
    ]
    by_node: dict[str, list[RankTimes]] = {}
    for one in ranks:
        if one.slow_factor is not None:
            by_node.setdefault(one.node, []).append(one)
    unnamed = []
    for node, of in by_node.items():
        worst = max(of, key=lambda one: one.lost_s)
        from_t, until_t = worst.slow_from_t or 0.0, worst.slow_until_t or 0.0
        is_named = any(
            one.node == node and one.from_t <= until_t and from_t <= one.until_t for one in told
        )
        if is_named or worst.lost_s < max(WORTH * held_s, WORTH_S):
            continue
        unnamed.append(worst)
        found.append(
            SlowRank(
                node=node,
                ranks=tuple(sorted(one.rank for one in of)),
                cause=UNNAMED,
                factor=worst.slow_factor or 1.0,
                from_t=from_t,
                until_t=until_t,
                since_step=None,
                until_step=None,
                lost_s=worst.lost_s,
                over=True,
                action="report",
            )
        )
    # Of those that are slow at the same time the others wait for the slowest one alone.
    columns = zip(*(one.lost for one in unnamed), strict=True)
    total_s = lost_to_waiting_s(told) + math.fsum(map(max, columns))
    return sorted(found, key=lambda one: one.from_t), total_s


def silences(gaps: Iterable[tuple[float, float]], incidents: Sequence[Incident]) -> list[Incident]:
    """Stretches without an event, as incidents; none of those that an incident tells of.

    Args:
        gaps: from one event to the next, or to the newest look at a job that still runs.
        incidents: of the job.
    """
    found = []
    for from_t, until_t in gaps:
        if any(
            one.began_t < until_t and (one.back_t or math.inf) > from_t + 1 and one.kind != SILENCE
            for one in incidents
            if one.back_t is not None or not one.closed
        ):
            continue
        lasted = units.seconds(until_t - from_t)
        what = f"nothing was written for {lasted}; the next word came at {units.when(until_t)}"
        found.append(
            Incident(
                kind=SILENCE,
                attempt=0,
                began_t=from_t,
                detected_t=from_t,
                what=what,
                closed=True,
            )
        )
    return found


def machine_verdict(
    num_machines: int, incidents: Iterable[Incident], slow: Sequence[SlowRank], held_s: float
) -> MachineVerdict | None:
    """Which machine is bad, if any; None for a job of one machine.

    Args:
        num_machines: that it has had.
        incidents: of the job.
        slow: its slow ranks.
        held_s: of the job, in which machines were held.
    """
    if num_machines < 2:
        return None
    named = [one.nodes for one in incidents if one.nodes]
    had = Counter(node for nodes in named for node in nodes)
    lost: Counter[str] = Counter()
    for one in slow:
        lost[one.node] += one.lost_s  # type: ignore[assignment]
    lost_s = math.fsum(lost.values())
    bad: dict[str, list[str]] = {}
    for node, num in had.items():
        if num > 1 and 2 * num > len(named):
            words = f"had {num} of the {len(named)} incidents in which machines are named"
            bad.setdefault(node, []).append(words)
    if lost_s >= WORTH * held_s:
        for node, own_s in lost.items():
            if 2 * own_s > lost_s:
                share = f"{100 * own_s / lost_s:.0f} % of what slow ranks have cost"
                until_t = max(one.until_t for one in slow if one.node == node)
                is_over = all(one.over for one in slow if one.node == node)
                when = f"until {units.when(until_t)}" if is_over else "so far"
                bad.setdefault(node, []).append(
                    f"{share} ({units.seconds(own_s)}) was waiting for it, {when}"
                )
    if bad:
        words = "; ".join(f"{node} stands out: {', '.join(why)}" for node, why in bad.items())
        return MachineVerdict(machines=list(bad), words=words)
    return MachineVerdict(machines=[], words=_nobody(len(named), had, lost, lost_s, held_s))


def _nobody(
    num_named: int, had: Mapping[str, int], lost: Mapping[str, float], lost_s: float, held_s: float
) -> str:
    why = []
    if num_named:
        incidents = units.count(num_named, "incident")
        why.append(f"{incidents} on {units.count(len(had), 'machine')}")
    if lost_s and lost_s < WORTH * held_s:
        why.append(f"slow ranks have cost {units.seconds(lost_s)} in all")
    elif len(lost) >= _MOVED_LEAST:
        most = max(lost, key=lambda node: lost[node])
        why.append(
            f"slowness went from machine to machine, over {len(lost)} of them, at most "
            f"{100 * lost[most] / lost_s:.0f} % of it on one ({most}): look at what all share, "
            "batches, network, storage"
        )
    elif lost:
        why.append(f"slowness was shared by {' and '.join(sorted(lost))}")
    return f"no machine is bad: {'; '.join(why) or 'nothing went wrong on any'}"


def warnings(
    *,
    is_over: bool,
    silent_s: float | None,
    has_session: bool,
    newest_step: int | None,
    tiers: Mapping[str, TierTime],
) -> list[JobWarning]:
    """What has to be done about a job.

    Args:
        is_over: nobody trains any more.
        silent_s: seconds since the newest event of a job that nobody has ended; None below an hour.
        has_session: a session of it has begun.
        newest_step: of its newest checkpoint.
        tiers: what has come to each.
    """
    found = []
    if silent_s is not None:
        why = "it hangs, or its machines are gone"
        if not has_session:
            why = "a script without a session writes nothing while it trains"
        words = f"nothing was written for {units.seconds(silent_s)}: {why}"
        found.append(JobWarning(what=words, command="outlast top --once"))
    holders = [name for name, one in tiers.items() if one.num and one.newest_step == newest_step]
    others = {name: one for name, one in tiers.items() if one.num and name not in holders}
    if is_over and newest_step and len(holders) == 1 and holders[0] == next(iter(tiers)) and others:
        name, best = max(others.items(), key=lambda one: one[1].newest_step)
        words = (
            f"the newest checkpoint (step {newest_step:,}) is on the first tier, {holders[0]}, "
            f"alone; {name} has step {best.newest_step:,}: what goes with {holders[0]} is lost"
        )
        command = f"outlast checkpoints export --step {newest_step} --out ELSEWHERE"
        found.append(JobWarning(what=words, command=command))
    return found
