"""What the page draws, as plain numbers: attempts, losses, step times, saves, failures by machine.

Pure functions of the ledger's events, in the order of their times. A series is thinned to as many
points as a picture shows: of each stretch its lowest and its highest value stay, so that a spike of
one sample is still seen. Of a step that was made again the last making counts.

``rank_times`` says which worker the others wait for, and since when: by its work in a step, waits
for its batches included, beside the middle one of those that do the same work in the same time. A
worker goes by its machine and its place there: ranks may be dealt out anew in each attempt. It is
slow from ``SLOW`` times the others' on, where that comes to ``SLOW_STEP`` of a step. ``straggler``
events say it to the step, and sooner; this says it of all workers, by ``COLUMNS`` of the job.

Guarantees: damaged fields are left out, never an error.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from outlast.ledger.events import Event
from outlast.ledger.goodput import number, whole
from outlast.ledger.measured import SampledSteps

POINTS: Final = 400  # of one curve
SCALARS: Final = 6  # curves of what the script logs
COLUMNS: Final = 96  # of the job's time, for what is said of each rank
RANK_LINES: Final = 100  # by which it is told how many workers a machine has
RANK_SAMPLES: Final = 100_000  # that are looked at; of more, each machine's every second, third …
SLOW: Final = 1.2
SLOW_STEP: Final = 0.05
_TROUBLE: Final = {
    "worker_lost": "worker lost",
    "node_lost": "machine lost",
    "hang": "hang",
    "straggler": "slow",
    "notice": "notice",
    "storage_error": "storage error",
}
Points = list[tuple[float, float]]


class AttemptSpan(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt.

    Attributes:
        number: its number.
        begin_t, end_t: wall-clock times, from its forming to the last that is known of it.
        workers, machines: how many.
        from_step: that it went on from, if it came so far.
        step: the last one that is known to be complete.
        source: where its state came from, as "from memory".
        end: how it ended, in words; "" where nothing is said.
    """

    number: int
    begin_t: float
    end_t: float
    workers: int
    machines: int
    from_step: int | None = None
    step: int | None = None
    source: str = ""
    end: str = ""


class SavePoint(NamedTuple):
    """A checkpoint that came to a tier, ``seconds`` after its snapshot or its copy's beginning."""

    t: float
    tier: str
    seconds: float
    num_bytes: int
    step: int


def attempts(ordered: Sequence[Event]) -> list[AttemptSpan]:
    """Each attempt, oldest first."""
    found: dict[int, AttemptSpan] = {}
    for event in ordered:
        number = event.attempt
        if event.event == "attempt_formed":
            workers, nodes = whole(event, "world_size") or 0, event.get("nodes")
            machines = len(nodes) if isinstance(nodes, list) else whole(event, "nodes") or 0
            known = found.get(number)
            begin_t = event.t if known is None else known.begin_t
            found[number] = AttemptSpan(
                number=number, begin_t=begin_t, end_t=event.t, workers=workers, machines=machines
            )
            continue
        one = found.get(number)
        if one is None:
            continue
        changes: dict[str, object] = {"end_t": max(one.end_t, event.t)}
        if event.event == "resumed" and event.rank == 0:
            changes |= {"from_step": whole(event), "source": str(event.get("source") or "")}
        elif event.event == "step":
            changes["step"] = max(one.step or 0, whole(event) or 0)
        elif event.event == "restart":
            changes["end"] = str(event.get("reason") or "")
        elif event.event in ("drained", "job_finished") and not one.end:
            changes["end"] = str(event.get("reason") or event.event)
        found[number] = msgspec.structs.replace(one, **changes)
    return [found[number] for number in sorted(found)]


def scalars(ordered: Iterable[Event]) -> dict[str, Points]:
    """Name → (step, value), of what the script logs; the first names where there are many."""
    found: dict[str, dict[int, float]] = {}
    for event in ordered:
        values, step = event.get("scalars"), whole(event)
        if event.event != "step" or step is None or not isinstance(values, dict):
            continue
        for name, value in values.items():
            if _is_number(value) and (name in found or len(found) < SCALARS):
                found.setdefault(str(name), {})[step] = float(value)
    return {name: thinned(sorted(values.items())) for name, values in found.items()}


def step_times(ordered: Iterable[Event]) -> Points:
    """(wall-clock time, seconds of a step in the mean since the sample before), of rank 0."""
    steps = SampledSteps()
    taken = ((event.t, steps.take(event)) for event in ordered)
    return thinned([(t, found[0]) for t, found in taken if found is not None])


def saves(ordered: Iterable[Event]) -> list[SavePoint]:
    """Each checkpoint that came to a tier."""
    found = []
    for event in ordered:
        if event.event not in ("commit", "tier_copied"):
            continue
        seconds = number(event, "durable_s" if event.event == "commit" else "seconds")
        size, step, tier = whole(event, "bytes"), whole(event), event.get("tier")
        if seconds is not None and size is not None and step is not None:
            found.append(SavePoint(event.t, str(tier or ""), seconds, size, step))
    return found


def failures_by_machine(ordered: Iterable[Event]) -> dict[str, dict[str, int]]:
    """Machine → what happened there → how often; the one with most first."""
    found: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for event in ordered:
        what = _TROUBLE.get(event.event)
        if what is None or (event.event == "straggler" and event.get("over")):
            continue
        named = event.get("nodes") if event.event == "hang" else [event.node]
        for machine in named if isinstance(named, list) else [event.node]:
            counts = found[str(machine)]
            counts[what] = counts.get(what, 0) + 1
    return dict(sorted(found.items(), key=lambda one: (-sum(one[1].values()), one[0])))


class RankSample(NamedTuple):
    """What a line of the ledger says of one worker's steps, each figure a median but the last.

    Attributes:
        kind: the number of its kind of work.
        num: steps in this time.
        own_s, wait_s, data_s: its own work, and its waits for other ranks and for batches.
    """

    rank: int
    kind: int
    num: int
    step_s: float
    own_s: float
    wait_s: float
    data_s: float
    longest_s: float

    @property
    def busy_s(self) -> float:
        """What the others wait for."""
        return self.own_s + self.data_s


class _RankLine(msgspec.Struct):
    seconds: float
    ranks: list[int]
    kinds: list[int]
    num: list[int]
    step_s: list[float]
    own_s: list[float]
    wait_s: list[float]
    data_s: list[float]
    longest_s: list[float]


def rank_samples(event: Event) -> list[RankSample]:
    """Of each worker that a ``rank_steps`` event tells of; none of another or a damaged one."""
    if event.event != "rank_steps":
        return []
    try:
        line = msgspec.convert(event.fields, _RankLine)
    except msgspec.ValidationError:
        return []
    ranks = line.ranks
    kinds = line.kinds * len(ranks) if len(line.kinds) == 1 else line.kinds
    figures = (line.step_s, line.own_s, line.wait_s, line.data_s, line.longest_s)
    told = (ranks, kinds, line.num, *figures)
    is_whole = {len(one) for one in told} == {len(ranks)} and line.seconds >= 0
    if not is_whole or not all(0 <= x < math.inf for one in figures for x in one):
        return []
    return [RankSample(*said) for said in zip(*told, strict=True)]


class RankTimes(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's steps, over the job's life.

    Attributes:
        node, place: its machine, and its place there, from 0.
        rank: its newest rank.
        num_steps: steps that are told of.
        step_s: of one of them, from boundary to boundary: the mean of what lines say, by steps.
        own_s, wait_s, data_s: the same of its own work, its waits for other ranks and for batches.
        longest_s: the longest of them.
        slow_factor: times the others' work, at the most while it was slow; null where it was not.
        slow_from_t, slow_until_t: the stretch in which it was slow, or null; of several the one
            that has cost most.
        lost_s: by how much longer it worked than the others while it was slow, in all stretches.
        factors: of each of the columns of the job's time its highest; 0 where nothing is told.
        lost: ``lost_s`` by the columns.
    """

    node: str
    place: int
    rank: int
    num_steps: int
    step_s: float
    own_s: float
    wait_s: float
    data_s: float
    longest_s: float
    slow_factor: float | None = None
    slow_from_t: float | None = None
    slow_until_t: float | None = None
    lost_s: float = 0.0
    factors: tuple[float, ...] = ()
    lost: tuple[float, ...] = ()


class _RankStretch(msgspec.Struct):
    """Lines in a row that call a worker slow."""

    from_t: float
    until_t: float
    factor: float
    lost_s: float


class _RankPlace:
    """One worker while its lines are folded."""

    def __init__(self) -> None:
        self.newest: RankSample | None = None
        self.num_steps = 0
        self.sums = [0.0] * 4  # of step, own, wait and data
        self.longest_s = 0.0
        self.busy_s = [0.0] * COLUMNS  # the sum of its lines' figures
        self.lines = [0] * COLUMNS
        self.factors = [0.0] * COLUMNS
        self.lost = [0.0] * COLUMNS
        self.slow: list[_RankStretch] = []
        self.is_slow = False

    def add(self, one: RankSample, columns: range) -> None:
        self.newest = one
        self.num_steps += one.num
        for i, seconds in enumerate((one.step_s, one.own_s, one.wait_s, one.data_s)):
            self.sums[i] += seconds * one.num
        self.longest_s = max(self.longest_s, one.longest_s)
        for column in columns:
            self.busy_s[column] += one.busy_s
            self.lines[column] += 1

    def judge(
        self, one: RankSample, others_s: float, columns: range, from_t: float, t: float
    ) -> None:
        excess_s = one.busy_s - others_s
        factor = one.busy_s / others_s if others_s > 0 else 1.0
        if excess_s < SLOW_STEP * one.step_s:
            factor = min(factor, 1.0)
        for column in columns:
            self.factors[column] = max(self.factors[column], factor)
        was_slow, self.is_slow = self.is_slow, factor >= SLOW
        if not self.is_slow:
            return
        if not was_slow:
            self.slow.append(_RankStretch(from_t, t, factor, 0.0))
        stretch = self.slow[-1]
        stretch.until_t, stretch.factor = t, max(stretch.factor, factor)
        stretch.lost_s += excess_s * one.num
        for column in columns:
            self.lost[column] += excess_s * one.num / len(columns)

    def told(self, node: str, place: int) -> RankTimes:
        assert self.newest is not None  # noqa: S101 - made with its first line
        worst = max(self.slow, key=lambda one: one.lost_s, default=None)
        step_s, own_s, wait_s, data_s = (one / max(self.num_steps, 1) for one in self.sums)
        return RankTimes(
            node=node,
            place=place,
            rank=self.newest.rank,
            num_steps=self.num_steps,
            step_s=step_s,
            own_s=own_s,
            wait_s=wait_s,
            data_s=data_s,
            longest_s=self.longest_s,
            slow_factor=None if worst is None else worst.factor,
            slow_from_t=None if worst is None else worst.from_t,
            slow_until_t=None if worst is None else worst.until_t,
            lost_s=math.fsum(one.lost_s for one in self.slow),
            factors=tuple(self.factors),
            lost=tuple(self.lost),
        )


def rank_times(ordered: Sequence[Event]) -> list[RankTimes]:
    """Of each worker that the ledger tells of: by machine, as their ranks go, and place."""
    lines = [event for event in ordered if event.event == "rank_steps"]
    if not lines:
        return []
    workers = max(len(rank_samples(event)) for event in lines[:RANK_LINES])
    every = math.ceil(max(len(lines) * workers, 1) / RANK_SAMPLES)
    lines = _each_nth(lines, every)
    low_t, wide_s = ordered[0].t, max(ordered[-1].t - ordered[0].t, 1e-9)

    def column(t: float) -> int:
        return min(max(int((t - low_t) / wide_s * COLUMNS), 0), COLUMNS - 1)

    def each() -> Iterator[tuple[tuple[str, int], RankSample, range, float, float]]:
        for event in lines:
            from_t = event.t - every * (number(event, "seconds") or 0.0)
            columns = range(column(from_t), column(event.t) + 1)
            for said in rank_samples(event):
                one = said._replace(num=said.num * every) if every > 1 else said
                key = event.node, where[event.node, event.attempt][one.rank]
                yield key, one, columns, from_t, event.t

    where = _places(lines)
    places: dict[tuple[str, int], _RankPlace] = {}
    groups: list[dict[int, set[tuple[str, int]]]] = [{} for _ in range(COLUMNS)]
    for key, one, columns, _, _ in each():
        places.setdefault(key, _RankPlace()).add(one, columns)
        for at in columns:
            groups[at].setdefault(one.kind, set()).add(key)
    others_s = [
        {
            kind: statistics.median_low(
                places[key].busy_s[at] / places[key].lines[at] for key in of
            )
            for kind, of in found.items()
            if len(of) > 1  # a worker is not slower than itself
        }
        for at, found in enumerate(groups)
    ]
    for key, one, columns, from_t, t in each():
        usual_s = others_s[columns[len(columns) // 2]].get(one.kind)
        if usual_s is not None:
            places[key].judge(one, usual_s, columns, from_t, t)
    told = [one.told(*key) for key, one in places.items()]
    first = {one.node: one.rank for one in sorted(told, key=_rank_of, reverse=True)}
    return sorted(told, key=lambda one: (first[one.node], one.node, one.place))


def _places(lines: Iterable[Event]) -> dict[tuple[str, int], dict[int, int]]:
    """Machine and attempt → rank → its place there; several agents may run on one machine."""
    ranks: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
    for event in lines:
        ranks[event.node, event.attempt].update(one.rank for one in rank_samples(event))
    return {key: {rank: at for at, rank in enumerate(sorted(of))} for key, of in ranks.items()}


def _each_nth(lines: list[Event], every: int) -> list[Event]:
    """Of each agent: its workers stay the same for an attempt."""
    if every == 1:
        return lines
    num: defaultdict[tuple[str, int, str], int] = defaultdict(int)
    kept = []
    for event in lines:
        agent = event.node, event.attempt, str(event.get("ranks"))
        if num[agent] % every == 0:
            kept.append(event)
        num[agent] += 1
    return kept


def thinned(points: Points, most: int = POINTS) -> Points:
    """At most about ``most`` of them: of each stretch the lowest and the highest."""
    if len(points) <= most:
        return points
    size = math.ceil(2 * len(points) / most)
    kept: Points = [points[0]]
    for at in range(1, len(points) - 1, size):
        stretch = points[at : min(at + size, len(points) - 1)]
        chosen = {min(stretch, key=_value), max(stretch, key=_value)}
        kept += sorted(chosen)
    return [*kept, points[-1]]


def _rank_of(one: RankTimes) -> int:
    return one.rank


def _value(point: tuple[float, float]) -> float:
    return point[1]


def _is_number(value: object) -> bool:
    is_one = isinstance(value, int | float) and not isinstance(value, bool)
    return is_one and math.isfinite(value)  # type: ignore[arg-type]
