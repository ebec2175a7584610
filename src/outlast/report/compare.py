"""Several jobs side by side: what ``outlast report JOBS… --compare`` says, as data and in rows.

Each job is folded by itself, as its own report is, and then only figures are kept: so of several
large ledgers one is in memory at a time. The rows are what text and page show; a row that no job
has anything for is left out, a part of one that a job does not have is empty.

Jobs of different lengths are compared at the same step: the highest that all of them have sampled
(of those that have any), each as of the moment at which it had first come there. A step of one job
is not the work of a step of another where their batches differ; nobody knows that here.

Rates are per day that machines were held: waiting and pauses do not count. A job that has run for
less than ``RATES_FROM_S`` has counts in the rows, and no rates.

Settings are those with which a job was begun (``job.json``), and only those that differ are shown.
A job whose record is lost has none, and is not taken for one that differs in all of them.

The verdict names the best job in goodput and in money for a step, and by how much the next one is
behind. Where jobs are unlike (machines, workers, how these are paid), it says so: then a difference
is not the work of outlast, or of a setting, alone.

A job that is not over is counted up to its newest event, where its own report counts up to now: it
may have died weeks ago without a word, and what nobody ran would be all that is seen of it here.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from outlast import units
from outlast.ledger.events import Event
from outlast.ledger.goodput import PARTS, Goodput, OrderedEvents, in_order, split, whole
from outlast.ledger.incidents import Incident
from outlast.ledger.job import Job
from outlast.ledger.measured import TierTime
from outlast.prices import Prices
from outlast.report import series
from outlast.report.facts import Facts, facts
from outlast.report.findings import SILENT_S
from outlast.report.money import Money, kinds_of, money
from outlast.report.text import PART_WORDS

MOST_JOBS: Final = 24
RATES_FROM_S: Final = 3600.0
DAY_S: Final = 86_400.0
_HERE: Final = ("dir",)  # settings that are the job's place, and so always differ
_OTHER: Final = "other"


class ReachedStep(msgspec.Struct, frozen=True, kw_only=True):
    """A job as of the moment at which it had first come to a step.

    Attributes:
        step: which.
        wall_s: since its start.
        machine_s: machine-seconds that were held until then.
        cost: of them, or None.
        attempts: that had formed.
    """

    step: int
    wall_s: float
    machine_s: float
    cost: float | None
    attempts: int


class WentWrong(msgspec.Struct, frozen=True, kw_only=True):
    """The incidents of one kind.

    Attributes:
        num: how many.
        per_day: of the days that machines were held.
        lost_steps: completed steps that had to be made again.
        lost_s: seconds that they have cost each worker, steps made again included.
    """

    num: int
    per_day: float
    lost_steps: int
    lost_s: float


class ComparedJob(msgspec.Struct, frozen=True, kw_only=True):
    """What is compared of one job.

    Attributes:
        name: that tells it from the others.
        directory: where it is.
        job, state, reason: as of its own report.
        notes: what has to be known of its figures, in words.
        command, versions: of its newest start.
        workers, machines: of its newest attempt.
        kinds: kinds of machines, as far as they are known.
        wall_s: from its start to its end, or to its newest event.
        held_s: of that, the time in which machines were held.
        fraction_productive: 0 to 1.
        parts_s: part of the time → worker-seconds.
        steps_done, steps_replayed: as of its own report.
        step_s: a step, the median of the samples; None before there are two.
        same_step: how it came to the step that all have come to, or None.
        money: what it cost, or None.
        incidents: kind → what they were.
        restarts: kind of failure → how often the job was started again for it.
        restarts_per_day: of all kinds.
        recovery_s, recovery_slowest_s: from the first sign to the first new step: median, longest.
        checkpoints: how many were committed.
        blocked_s: that training waited for a snapshot, the mean.
        stalled_s: that the job stood still for each checkpoint, the mean.
        tiers: tier → what bringing checkpoints there took.
        settings: setting → value, as the job was begun.
        progress: (seconds since its start, highest step).
        scalars: what the script logged: name → (step, value).
    """

    name: str
    directory: str
    job: str
    state: str
    reason: str
    notes: list[str]
    command: str
    versions: dict[str, str]
    workers: int
    machines: int
    kinds: list[str]
    wall_s: float
    held_s: float
    fraction_productive: float
    parts_s: dict[str, float]
    steps_done: int
    steps_replayed: int
    step_s: float | None
    same_step: ReachedStep | None
    money: Money | None
    incidents: dict[str, WentWrong]
    restarts: dict[str, int]
    restarts_per_day: float
    recovery_s: float | None
    recovery_slowest_s: float | None
    checkpoints: int
    blocked_s: float | None
    stalled_s: float | None
    tiers: dict[str, TierTime]
    settings: dict[str, str]
    progress: series.Points
    scalars: dict[str, series.Points]

    @property
    def currency(self) -> str:
        """Of its money; "" where nobody has named it."""
        return "" if self.money is None else self.money.currency

    @property
    def cost_per_step(self) -> float | None:
        """Of the steps that stand; None without a price, or before there are any."""
        cost = None if self.money is None else self.money.cost
        return None if cost is None or not self.steps_done else cost / self.steps_done


def names_of(directories: Sequence[Path]) -> list[str]:
    """A short name for each: as many of the last parts of its path as tell it from the others."""
    parts = [directory.absolute().parts for directory in directories]
    found = []
    for own in parts:
        others = [other for other in parts if other != own]
        length = 1
        while length < len(own) and any(other[-length:] == own[-length:] for other in others):
            length += 1
        found.append("/".join(own[-length:]))
    return found


def furthest_step(events: Iterable[Event]) -> int:
    """The highest step that rank 0 has sampled; 0 for none. It keeps no event."""
    return max((whole(one) or 0 for one in events if _is_sample(one)), default=0)


def _is_sample(event: Event) -> bool:
    return event.event == "step" and event.rank == 0


def compared(
    name: str,
    directory: Path,
    record: Job,
    events: Iterable[Event],
    *,
    same_step: int,
    age_s: float | None = None,
    prices: Prices,
    num_unread: int = 0,
) -> ComparedJob:
    """Work out what is compared of one job.

    Args:
        name: that tells it from the others.
        directory: where it is.
        record: who it is.
        events: its ledger, in any order.
        same_step: the step that all jobs have come to; 0 for none.
        age_s: of a job that is not over: seconds since its newest event, up to which it is counted.
        prices: of its machines.
        num_unread: lines of its ledger that could not be read.
    """
    ordered = in_order(events)
    job = facts(ordered, prices=prices, simulates=False)
    done = job.workers
    held_s = _of_the_job(done, done.held)
    steps = [seconds for _, seconds in series.step_times(ordered)]
    backs_s = [one.back_t - one.began_t for one in job.incidents if one.back_t is not None]
    restarts = _restarts(ordered)
    blocked_s = [s for one in ordered if (s := _blocked_s(one)) is not None]
    started = [one for one in ordered if one.event == "job_started"]
    formed = [one for one in ordered if one.event == "attempt_formed"]
    newest = series.attempts(formed[-1:])
    return ComparedJob(
        name=name,
        directory=str(directory),
        job=record.id,
        state="silent" if job.state == "running" and (age_s or 0.0) > SILENT_S else job.state,
        reason=job.reason,
        notes=_notes(job, record, age_s, num_unread),
        command=str(started[-1].get("command") or "") if started else "",
        versions=_versions(started, record),
        workers=newest[0].workers if newest else 0,
        machines=newest[0].machines if newest else 0,
        kinds=sorted(set(job.kinds.values())),
        wall_s=done.wall_s,
        held_s=held_s,
        fraction_productive=done.fraction_productive,
        parts_s={str(part): seconds for part, seconds in done.parts().items()},
        steps_done=done.steps_done,
        steps_replayed=done.steps_replayed,
        step_s=statistics.median(steps) if steps else None,
        same_step=_reached(ordered, same_step, prices) if same_step else None,
        money=job.money,
        incidents=_went_wrong(job, held_s),
        restarts=restarts,
        restarts_per_day=_per_day(sum(restarts.values()), held_s),
        recovery_s=statistics.median(backs_s) if backs_s else None,
        recovery_slowest_s=max(backs_s, default=None),
        checkpoints=done.commits,
        blocked_s=statistics.fmean(blocked_s) if blocked_s else None,
        stalled_s=_of_the_job(done, done.stalled) / done.commits if done.commits else None,
        tiers=job.by_tier,
        settings=record.settings,
        progress=_progress(ordered, done.wall_s),
        scalars=series.scalars(ordered),
    )


def _of_the_job(done: Goodput, worker_seconds: float) -> float:
    """Seconds of the job: worker-seconds over the workers that it had in the mean."""
    return worker_seconds / done.total * done.wall_s if done.total else 0.0


def _blocked_s(event: Event) -> float | None:
    value = event.get("blocked_s") if event.event == "snapshot" else None
    return float(value) if isinstance(value, int | float) and value >= 0 else None


def _notes(job: Facts, record: Job, age_s: float | None, num_unread: int) -> list[str]:
    if job.last_event_t is None:
        return ["has not been started: its ledger is empty"]
    notes = []
    if age_s is not None:
        age = units.seconds(max(age_s, 0.0))
        notes.append(f"is not over: its figures are as of its newest event, {age} ago")
    if not job.workers.steps_done:
        notes.append("has completed no step")
    if num_unread and job.state != "running":  # what is being written just now is not whole yet
        lines = units.count(num_unread, "line")
        notes.append(
            f"has {lines} in its ledger that cannot be read: what was said there is missing"
        )
    if not record.settings:
        notes.append("has lost its record: the settings that it was begun with are not known")
    return notes


def _versions(started: Sequence[Event], record: Job) -> dict[str, str]:
    told = started[-1].get("versions") if started else None
    found = told if isinstance(told, dict) else record.versions
    return {str(name): str(version) for name, version in found.items()}


def _reached(ordered: Sequence[Event], step: int, prices: Prices) -> ReachedStep | None:
    reached_t = _reached_t(ordered, step)
    if reached_t is None:
        return None
    until = bisect.bisect_right(ordered, reached_t, key=lambda event: event.t)
    spent = split(OrderedEvents(ordered[:until]), reached_t)
    paid = money(spent, kinds_of(ordered), prices)
    return ReachedStep(
        step=step,
        wall_s=spent.workers.wall_s,
        machine_s=spent.machines.held,
        cost=None if paid is None else paid.cost,
        attempts=spent.workers.attempts,
    )


def _reached_t(ordered: Sequence[Event], step: int) -> float | None:
    """When the step was first completed: between two samples, in proportion to their steps."""
    before: Event | None = None  # of rank 0, in the same attempt
    for event in ordered:
        if event.rank != 0 or event.event not in ("step", "resumed"):
            continue
        at = whole(event) or 0
        if event.event == "step" and at >= step:
            since = None if before is None else whole(before)
            if before is None or since is None or since >= step or before.attempt != event.attempt:
                return event.t
            return before.t + (event.t - before.t) * (step - since) / (at - since)
        before = event
    return None


def _went_wrong(job: Facts, held_s: float) -> dict[str, WentWrong]:
    by_kind: dict[str, list[Incident]] = {}
    costs_s: dict[str, list[float]] = {}
    for one in job.incidents:
        by_kind.setdefault(one.kind, []).append(one)
        cost = job.cost_of_incident(one)
        costs_s.setdefault(one.kind, []).append(0.0 if cost is None else cost.total_s)
    return {
        kind: WentWrong(
            num=len(found),
            per_day=_per_day(len(found), held_s),
            lost_steps=sum(one.lost_steps or 0 for one in found),
            lost_s=math.fsum(costs_s[kind]),
        )
        for kind, found in sorted(by_kind.items())
    }


def _restarts(ordered: Iterable[Event]) -> dict[str, int]:
    """Kind → how often; each machine of an attempt writes one down."""
    kinds: dict[int, str] = {}
    for event in ordered:
        if event.event == "restart":
            kinds.setdefault(event.attempt, str(event.get("kind") or _OTHER))
    return dict(sorted(Counter(kinds.values()).items()))


def _per_day(num: int, held_s: float) -> float:
    return num / held_s * DAY_S if held_s > 0 else 0.0


def _progress(ordered: Sequence[Event], wall_s: float) -> series.Points:
    """(seconds since the start, highest step sampled), to the job's end."""
    if not ordered:
        return []
    points, highest, start_t = [(0.0, 0.0)], 0, ordered[0].t
    for event in ordered:
        step = whole(event) if _is_sample(event) else None
        if step is not None and step > highest:
            highest = step
            points.append((max(event.t - start_t, 0.0), float(step)))
    return series.thinned([*points, (max(wall_s, points[-1][0]), float(highest))])


# --- which is better ------------------------------------------------------------------------------


def verdict(jobs: Sequence[ComparedJob]) -> list[str]:
    """Which job is the best, and by how much: in goodput, and in money for a step."""
    goodput = [one.fraction_productive if one.steps_done else None for one in jobs]
    words = [
        _best_words(
            "goodput",
            [one.name for one in jobs],
            goodput,
            lambda value: f"{100 * value:.1f} %",
            lambda best, next_: f"{100 * (best - next_):.1f} points more",
            best=max,
        )
    ]
    if len({one.currency for one in jobs if one.cost_per_step is not None}) == 1:
        currency = next(one.currency for one in jobs if one.cost_per_step is not None)
        words.append(
            _best_words(
                "money for a step",
                [one.name for one in jobs],
                [one.cost_per_step for one in jobs],
                lambda value: f"{value:,.4g} {currency}".strip(),
                lambda best, next_: f"{100 * (1 - best / next_):.1f} % less" if next_ else "alike",
                best=min,
            )
        )
    return [one for one in words if one]


def _best_words(
    what: str,
    names: Sequence[str],
    values: Sequence[float | None],
    say: Callable[[float], str],
    gap: Callable[[float, float], str],
    *,
    best: Callable[[Iterable[float]], float],
) -> str:
    known = [(value, name) for value, name in zip(values, names, strict=True) if value is not None]
    if len(known) < 2:
        return ""
    first, second, *_ = sorted(known, key=lambda one: one[0], reverse=best is max)
    if say(first[0]) == say(second[0]):
        return f"{what}: {first[1]} and {second[1]} are alike, {say(first[0])}"
    is_best, next_ = ("is best", ", the next") if len(known) > 2 else ("is better", "")
    return (
        f"{what}: {first[1]} {is_best}, {say(first[0])} against {say(second[0])} of "
        f"{second[1]}{next_} ({gap(first[0], second[0])})"
    )


def unlike(jobs: Sequence[ComparedJob]) -> list[str]:
    """In what the jobs differ that a comparison should know of: what, and of which job what."""
    asked: list[tuple[str, list[str]]] = [
        ("workers", [f"{one.workers:,}" if one.workers else "" for one in jobs]),
        ("machines", [f"{one.machines:,}" if one.machines else "" for one in jobs]),
        ("kinds of machines", [", ".join(one.kinds) for one in jobs]),
        ("paid", [one.money.priced_as if one.money else "" for one in jobs]),
        ("currency", [one.currency for one in jobs]),
    ]
    found = []
    for what, cells in asked:
        if len(set(filter(None, cells))) > 1:
            told = [
                f"{cell or 'not known'} ({one.name})" for one, cell in zip(jobs, cells, strict=True)
            ]
            found.append(f"{what}: {', '.join(told)}")
    return found


# --- rows -----------------------------------------------------------------------------------------


class CompareRow(NamedTuple):
    """One line: its name, a cell for each job, and the places of the best where there is one."""

    name: str
    cells: list[str]
    best: frozenset[int] = frozenset()


class CompareSection(NamedTuple):
    """Rows that belong together."""

    name: str
    rows: list[CompareRow]


def sections(jobs: Sequence[ComparedJob]) -> list[CompareSection]:
    """What is said of them, in rows; sections and rows with nothing in them are left out."""
    step = next((one.same_step.step for one in jobs if one.same_step is not None), 0)
    found = [
        CompareSection("jobs", _about(jobs)),
        CompareSection("where the time went", _time(jobs)),
        CompareSection(f"to step {step:,}", _same_step(jobs)),
        CompareSection("money", _money(jobs)),
        CompareSection("what went wrong", _wrong(jobs)),
        CompareSection("checkpoints", _checkpoints(jobs)),
        CompareSection("settings that differ", _settings(jobs)),
    ]
    kept = [CompareSection(one.name, [row for row in one.rows if any(row.cells)]) for one in found]
    return [one for one in kept if one.rows]


def _told(name: str, cells: Iterable[str]) -> CompareRow:
    return CompareRow(name, list(cells))


def _row(
    name: str,
    values: Sequence[float | None],
    say: Callable[[float], str],
    best: Callable[[Iterable[float]], float] | None = min,
) -> CompareRow:
    """Numbers in words; the best ones are those that read like the best, if not all do.

    Sums are not better or worse (``best`` is None): a job that has done less has lost less.
    """
    cells = ["" if value is None else say(value) for value in values]
    known = [value for value in values if value is not None]
    if best is None or len(known) < 2:
        return CompareRow(name, cells)
    wanted = say(best(known))
    places = frozenset(place for place, cell in enumerate(cells) if cell == wanted)
    return CompareRow(name, cells, places if len(places) < len(known) else frozenset())


def _about(jobs: Sequence[ComparedJob]) -> list[CompareRow]:
    machines = [
        f"{one.workers:,} on {units.count(one.machines, 'machine')}" if one.workers else ""
        for one in jobs
    ]
    versions = sorted({name for one in jobs for name in one.versions})
    return [
        _told("id", (one.job for one in jobs)),
        _told("state", (one.state for one in jobs)),
        _told("workers", machines),
        _told("kinds of machines", (", ".join(one.kinds) for one in jobs)),
        *(_told(name, (one.versions.get(name, "") for one in jobs)) for name in versions),
        *_different("command", [one.command for one in jobs]),
    ]


def _time(jobs: Sequence[ComparedJob]) -> list[CompareRow]:
    rows = [
        _row("running for", [one.wall_s for one in jobs], units.seconds, None),
        _row("steps", [float(one.steps_done) for one in jobs], _count, None),
        _row("one step", [one.step_s for one in jobs], units.seconds),
    ]
    percents = []
    for one in jobs:
        shares = units.percents([one.parts_s[part] for part in PARTS])
        percents.append(dict(zip(PARTS, shares, strict=True)))
    for part in PARTS:
        values = [
            found[part] if sum(one.parts_s.values()) else None
            for one, found in zip(jobs, percents, strict=True)
        ]
        if any(values):
            best = max if part == "productive" else None if part == "paused" else min
            rows.append(_row(PART_WORDS[part][0], values, _percent, best))
    return rows


def _same_step(jobs: Sequence[ComparedJob]) -> list[CompareRow]:
    reached = [one.same_step for one in jobs]
    if sum(one is not None for one in reached) < 2:
        return []
    return [
        _row("time", [one.wall_s if one else None for one in reached], units.seconds),
        _row("machine time", [one.machine_s if one else None for one in reached], units.seconds),
        _row("cost", [one.cost if one else None for one in reached], _amount),
        _row("attempts", [one.attempts if one else None for one in reached], _count),
    ]


def _money(jobs: Sequence[ComparedJob]) -> list[CompareRow]:
    paid = [one.money or Money() for one in jobs]
    thousand = [one.cost_per_step and 1000 * one.cost_per_step for one in jobs]
    shares = [
        None if one.lost is None or not one.cost else 100 * one.lost / one.cost for one in paid
    ]
    unpriced = [units.seconds(one.unpriced_s) if one.unpriced_s else "" for one in paid]
    return [
        _row("a machine for an hour", [one.price for one in paid], lambda x: f"{x:,.4g}", None),
        _told("priced as", (one.priced_as if one.price is not None else "" for one in paid)),
        _told(
            "currency",
            (one.currency or "not named" if one.price is not None else "" for one in paid),
        ),
        _row("spent", [one.cost for one in paid], _amount, None),
        _row("useful", [one.useful for one in paid], _amount, None),
        _row("lost", [one.lost for one in paid], _amount, None),
        _row("lost, of what was spent", shares, _percent),
        _row("saved", [one.saved for one in paid], _amount, None),
        _row("for a thousand steps", thousand, _amount),
        _row("for a step", [one.cost_per_step for one in jobs], lambda x: f"{x:,.4g}"),
        _told("without a price", unpriced),
    ]


def _wrong(jobs: Sequence[ComparedJob]) -> list[CompareRow]:
    kinds = sorted({kind for one in jobs for kind in one.incidents})
    restarts = sorted({kind for one in jobs for kind in one.restarts})
    none = WentWrong(num=0, per_day=0.0, lost_steps=0, lost_s=0.0)
    counts = [sum(kind.num for kind in one.incidents.values()) for one in jobs]
    rows = [_counted("incidents", jobs, counts)]
    for kind in kinds:
        found = [one.incidents.get(kind, none) for one in jobs]
        rows.append(_counted(kind, jobs, [one.num for one in found]))
        lost = [float(one.lost_steps) for one in found]
        if any(lost):
            rows.append(_row(f"{kind}: steps lost", lost, _count, None))
        lost = [one.lost_s for one in found]
        rows.append(_row(f"{kind}: time lost", lost, units.seconds, None))
    rows.append(_row("back after, median", [one.recovery_s for one in jobs], units.seconds))
    slowest = [one.recovery_slowest_s for one in jobs]
    rows.append(_row("back after, slowest", slowest, units.seconds))
    if restarts:
        rows.append(_counted("restarts", jobs, [sum(one.restarts.values()) for one in jobs]))
    rows += [
        _counted(f"restarts: {kind}", jobs, [one.restarts.get(kind, 0) for one in jobs])
        for kind in restarts
    ]
    return rows if kinds or restarts else []


def _counted(name: str, jobs: Sequence[ComparedJob], counts: Sequence[int]) -> CompareRow:
    """How often; and how often a day, where a job has run for long enough."""
    rates = [_per_day(num, one.held_s) for one, num in zip(jobs, counts, strict=True)]
    cells = [
        f"{num:,}" + (f" ({rate:,.3g} a day)" if num and one.held_s >= RATES_FROM_S else "")
        for one, num, rate in zip(jobs, counts, rates, strict=True)
    ]
    are_long = all(one.held_s >= RATES_FROM_S for one in jobs)
    best = _row(name, rates if are_long else [], lambda x: f"{x:.9g}").best
    return CompareRow(name, cells, best)


def _checkpoints(jobs: Sequence[ComparedJob]) -> list[CompareRow]:
    rows = [
        _row("checkpoints", [float(one.checkpoints) for one in jobs], _count, None),
        _row("waited for a snapshot", [one.blocked_s for one in jobs], units.seconds),
        _row("stalled, for each", [one.stalled_s for one in jobs], units.seconds),
    ]
    for tier in dict.fromkeys(tier for one in jobs for tier in one.tiers):
        found = [one.tiers.get(tier) for one in jobs]
        means = [one.seconds / one.num if one and one.num else None for one in found]
        sizes = [one.bytes / one.num if one and one.num else None for one in found]
        slowest = [one.slowest_s if one and one.num else None for one in found]
        rows.append(_row(f"{tier}: written in", means, units.seconds))
        rows.append(_row(f"{tier}: slowest", slowest, units.seconds))
        rows.append(_row(f"{tier}: size", sizes, units.size, None))
    return rows if any(one.checkpoints or one.tiers for one in jobs) else []


def _settings(jobs: Sequence[ComparedJob]) -> list[CompareRow]:
    known = [one for one in jobs if one.settings]
    keys = dict.fromkeys(key for one in known for key in one.settings if key not in _HERE)
    rows = []
    for key in keys:
        cells = [_setting(one, key) if one.settings else "" for one in jobs]
        if len(set(filter(None, cells))) > 1:
            rows.append(_told(key, cells))
    return rows


def _setting(job: ComparedJob, key: str) -> str:
    """Its value, in which the job's own place is no difference."""
    if key not in job.settings:  # another version
        return "not there"
    place = job.settings.get("dir")
    value = job.settings[key]
    return (value.replace(place, "JOB") if place else value) or "none"


def _different(name: str, cells: list[str]) -> list[CompareRow]:
    return [_told(name, cells)] if len(set(filter(None, cells))) > 1 else []


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _amount(value: float) -> str:
    return f"{value:,.2f}" if abs(value) >= 0.1 or not value else f"{value:.2g}"


def _percent(value: float) -> str:
    return f"{value:.1f} %"


# --- as data --------------------------------------------------------------------------------------


def compare_json(jobs: Sequence[ComparedJob], left_out: dict[str, str]) -> dict[str, Any]:
    """What ``outlast report --compare --json`` prints: plain data, the unit last in each name.

    Args:
        jobs: those that are compared.
        left_out: directory → why it is not.
    """
    differing = _settings(jobs)
    step = next((one.same_step.step for one in jobs if one.same_step is not None), None)
    return {
        "verdict": verdict(jobs),
        "unlike": unlike(jobs),
        "same_step": step,
        "jobs": [{**msgspec.to_builtins(one), "cost_per_step": one.cost_per_step} for one in jobs],
        "settings_that_differ": {
            row.name: {one.name: one.settings.get(row.name) for one in jobs} for row in differing
        },
        "left_out": left_out,
    }
