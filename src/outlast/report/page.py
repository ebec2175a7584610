"""The report as one page: ``outlast report -o report.html``, and what a machine serves live.

The page is a single file without a script, a font or a picture from elsewhere: it opens from a disk
and in a mail, in a year, too. The live page alone has a script: it replaces the content, where a
reload would shut tables, lose the reader's place, and leave no way to hold it still. Light or dark
is the reader's choice; it prints; every picture has its table behind it; all of it is reached by
the keyboard.

Guarantees: everything from the ledger is escaped. The page stays below 300 KB, whatever the job has
been through: the newest incidents are told with their evidence, of the others there is a line that
says how many. Stacks are read from below the job's own directory only.
"""

from __future__ import annotations

import bisect
import math
import operator
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from outlast import units
from outlast.ledger.events import Event
from outlast.ledger.goodput import in_order
from outlast.ledger.incidents import Incident
from outlast.prices import NO_PRICES, Prices
from outlast.report import plot, series, text
from outlast.report.chart import render
from outlast.report.facts import GOING_ON, Facts, facts
from outlast.report.money import Money
from outlast.report.plot import Plot, Span, Strips
from outlast.report.series import RankTimes

TOLD: Final = 60  # incidents with their evidence
EVIDENCE_BYTES: Final = 60_000  # of all of them
EVENTS_EACH: Final = 12  # of the evidence of one
STACK_BYTES: Final = 3_000  # of one rank
MARK_LETTERS: Final = 120  # of what a mark says when it is pointed at
ROWS: Final = 40  # of a table behind a picture
LANES: Final = 200  # attempts that are drawn
MARKS: Final = 80  # incidents that are drawn on a curve
RANKS: Final = 64  # rows of workers; of more there are rows of machines, so many at most
_QUIET: Final = frozenset(
    {
        "step",
        "rank_steps",
        "snapshot",
        "commit",
        "healthy",
        "replicated",
        "cadence",
        "tier_copied",
        "preflight",
    }
)
_HEAD: Final = ("t", "mono", "job", "attempt", "node", "rank", "event", "versions", "timings")


class Tile(NamedTuple):
    """A figure at the top: what, how much, and a clause below it."""

    name: str
    value: str
    note: str = ""


class PartRow(NamedTuple):
    """A part of the job's time: its name, share in percent, time and price in words, and key."""

    name: str
    percent: float
    time: str
    money: str
    key: str


class ToldIncident(NamedTuple):
    """An incident: its lines, and the ledger's lines and stacks that it rests on."""

    number: int
    when: str
    kind: str
    what: str
    lines: list[str]
    evidence: list[str]
    stacks: list[tuple[str, str]]


class AttemptLane(NamedTuple):
    """An attempt on the timeline: left and width in percent."""

    number: int
    left: float
    width: float
    words: str


class PageTable(NamedTuple):
    """A table: its heads, rows of words, and where it was cut: how many rows there were."""

    heads: list[str]
    rows: list[list[str]]
    num_rows: int = 0


def page(
    events: Iterable[Event],
    directory: Path | None = None,
    *,
    now: float | None = None,
    prices: Prices = NO_PRICES,
    every: str = "",
    refresh_s: int = 0,
) -> str:
    """Write the page.

    Args:
        events: the ledger, in any order.
        directory: the job's, for the stacks of its hangs; None leaves them out.
        now: wall-clock time up to which a job that has not finished is counted.
        prices: of machines.
        every: the setting ``checkpoint.every``.
        refresh_s: the live page: its content is renewed after so many seconds; 0 for never.
    """
    ordered = in_order(events)
    job = facts(ordered, now=now, prices=prices, every=every)
    spans = series.attempts(ordered)
    times = Span.over(event.t for event in ordered) if ordered else Span(0.0, 1.0)
    marks = [
        (one.began_t, _short(f"{one.kind}: {one.what}", MARK_LETTERS), "bad")
        for one in job.incidents
    ]
    saved, steps = series.saves(ordered), series.step_times(ordered)
    return render(
        "report.html.j2",
        job=job,
        headline=text.summary_lines(job, now=now)[0].plain.strip().removeprefix(f"job {job.job}: "),
        tiles=_tiles(job, now),
        lanes=_lanes(spans, times),
        moments=[(round(100 * times.part(t), 2), words) for t, words, _ in marks][-LANES:],
        hours=[(round(100 * times.part(t), 2), words) for t, words in plot.time_ticks(times)],
        day=units.day(times.low) if ordered else "",
        parts=_parts(job),
        priced=_priced(job),
        attempts=_attempt_table(spans),
        losses=_loss_plots(ordered, job),
        step_plot=_over_time(
            [("one step", steps)], times, marks, "how long a step took, over time"
        ),
        steps=_step_table(steps),
        rank_plot=_rank_plot(job.ranks, times, marks),
        ranks=_rank_table(job.ranks),
        save_plot=_over_time(
            *(_by_tier(saved), times, marks),
            "how long after its snapshot each checkpoint was durable, by tier",
            as_dots=True,
        ),
        saves=_save_table(saved),
        tiers=_tier_table(job),
        machines=_machine_table(job),
        verdict="" if job.verdict is None else job.verdict.words,
        incident_terms=text.INCIDENT_TERMS,
        every=[text.every_words(name, one) for name, one in job.tiers.items()],
        saved="" if job.money is None or job.money.saved is None else text.saved_words(job.money),
        untold=text.untold_words(job.untold) if job.untold is not None else "",
        slow=[line.plain for line in text.slow_lines(job)],
        storms=[[line.plain.strip() for line in text.storm_lines(one)] for one in job.storms],
        forecast=[_split(line.plain) for line in text.forecast_lines(job)],
        told=_told(job, ordered, directory),
        num_earlier=max(0, len(job.incidents) - TOLD),
        refresh_s=refresh_s,
        written=units.when(now) if now is not None else "",
    )


# --- the figures at the top -----------------------------------------------------------------------


def _tiles(job: Facts, now: float | None) -> list[Tile]:
    done = job.workers
    lost = sum(one.lost_steps or 0 for one in job.incidents)
    tiles = [
        Tile(
            "goodput",
            f"{done.fraction_productive * 100:.1f} %",
            "of all workers' time went into new steps",
        ),
        Tile(
            "steps",
            f"{done.steps_done:,}",
            f"{done.steps_replayed:,} made again" if done.steps_replayed else "none made again",
        ),
        Tile(
            "incidents",
            f"{len(job.incidents):,}",
            f"{units.count(lost, 'step')} lost: done, and to be made again",
        ),
        Tile(
            "running for" if job.state == "running" else "ran for",
            units.seconds(done.wall_s),
            units.count(done.attempts, "attempt"),
        ),
    ]
    if job.committed_step is not None:
        tiles.append(
            Tile("newest checkpoint", f"step {job.committed_step:,}", f"{done.commits:,} in all")
        )
    paid = job.money or Money()
    if paid.cost is not None and paid.lost is not None:
        cost, lost_part = paid.amount(paid.cost), paid.amount(paid.lost)
        currency = "" if paid.currency else ", in the currency of [price]"
        tiles.append(Tile("cost", cost, f"{lost_part} of it not for new steps{currency}"))
    if paid.saved is not None:
        name = "saved" if paid.saved >= 0 else "paid more"
        tiles.append(Tile(name, paid.amount(abs(paid.saved)), f"beside {text.SAVED_TERM}"))
    if job.state in GOING_ON and now is not None and job.last_event_t is not None:
        age_s = max(0.0, now - job.last_event_t)
        tiles.append(Tile("last heard of", f"{units.seconds(age_s)} ago", "the newest event"))
    return tiles


def _parts(job: Facts) -> list[PartRow]:
    parts, paid = job.workers.parts(), job.money or Money()
    percents = units.percents(list(parts.values()))
    rows = []
    for (part, seconds), percent in zip(parts.items(), percents, strict=True):
        if not seconds:
            continue
        money = paid.parts.get(part)
        rows.append(
            PartRow(
                text.PART_WORDS[part][0],
                percent,
                units.seconds(seconds),
                "" if money is None else paid.amount(money),
                part,
            )
        )
    return rows


def _priced(job: Facts) -> str:
    """At which prices, as a sentence; "" where nothing has one."""
    if job.money is None or job.money.cost is None:
        return ""
    return f"Prices: {text.price_words(job.money)}"


# --- what happened --------------------------------------------------------------------------------


def _lanes(spans: Sequence[series.AttemptSpan], times: Span) -> list[AttemptLane]:
    lanes = []
    for one in spans[-LANES:]:
        left = 100 * times.part(one.begin_t)
        width = max(0.15, 100 * times.part(one.end_t) - left)
        workers = units.count(one.workers, "worker")
        lasted = units.seconds(max(0.0, one.end_t - one.begin_t))
        words = f"attempt {one.number}: {workers}, {lasted}"
        lanes.append(AttemptLane(one.number, round(left, 2), round(width, 2), words))
    return lanes


def _attempt_table(spans: Sequence[series.AttemptSpan]) -> PageTable:
    rows = [
        [
            str(one.number),
            units.when(one.begin_t),
            units.seconds(max(0.0, one.end_t - one.begin_t)),
            f"{one.workers:,} on {units.count(one.machines, 'machine')}",
            "" if one.from_step is None else f"{one.from_step:,} {one.source}",
            "" if one.step is None else f"{one.step:,}",
            _short(one.end, MARK_LETTERS),
        ]
        for one in spans[-ROWS:]
    ]
    heads = ["attempt", "from", "for", "workers", "went on at step", "came to step", "ended"]
    return PageTable(heads, rows, len(spans))


def _told(job: Facts, ordered: Sequence[Event], directory: Path | None) -> list[ToldIncident]:
    """The newest incidents, in the order of their times; the newest have the room for evidence."""
    room = EVIDENCE_BYTES
    told = []
    newest = list(enumerate(job.incidents, 1))[-TOLD:]
    for number, one in reversed(newest):
        lines = [line.plain.strip() for line in text.incident_lines(one, job)][1:]
        evidence, stacks = [], []
        for event in _within(ordered, one):
            words = _event_words(event)
            if len(words) <= room:
                evidence.append(words)
                room -= len(words)
            if event.event == "hang" and directory is not None:
                for name, stack in _stacks(directory, event.get("stacks")):
                    if len(stack) <= room:
                        stacks.append((name, stack))
                        room -= len(stack)
        when = units.when(one.began_t)
        told.append(
            ToldIncident(number, when, one.kind, _short(one.what, 600), lines, evidence, stacks)
        )
    return told[::-1]


def _within(ordered: Sequence[Event], incident: Incident) -> list[Event]:
    ends_t = incident.back_t or incident.resumed_t or incident.detected_t
    first = bisect.bisect_left(ordered, incident.began_t, key=_time_of)
    last = bisect.bisect_right(ordered, ends_t + 1e-3, first, key=_time_of)
    return [one for one in ordered[first:last] if one.event not in _QUIET][:EVENTS_EACH]


_time_of: Final = operator.attrgetter("t")


def _event_words(event: Event) -> str:
    where = f"{event.node}" + ("" if event.rank is None else f", rank {event.rank}")
    known = {
        name: value
        for name, value in event.fields.items()
        if name not in _HEAD and value not in (None, "", [], {})
    }
    said = ", ".join(f"{name}={_short(value)}" for name, value in known.items())
    return f"{units.clock(event.t)}  {event.event} ({where}): {said}"


def _short(value: object, most: int = 300) -> str:
    words = f"{value:.6g}" if isinstance(value, float) else str(value)
    return words if len(words) <= most else f"{words[: most - 1]}…"


def _stacks(directory: Path, place: object) -> list[tuple[str, str]]:
    """The stacks that a hang has left: name and text; none from outside of the job's directory."""
    if not isinstance(place, str) or not place:
        return []
    root = directory.resolve()
    try:
        folder = (root / place).resolve()
        if not folder.is_relative_to(root) or not folder.is_dir():
            return []
        found = []
        for path in sorted(folder.iterdir())[:4]:
            if path.is_file() and not path.is_symlink():
                with path.open("rb") as file:
                    found.append((path.stem, file.read(STACK_BYTES).decode(errors="replace")))
        return found
    except OSError:
        return []


# --- curves ---------------------------------------------------------------------------------------


def _loss_plots(ordered: Sequence[Event], job: Facts) -> list[tuple[str, Plot, PageTable]]:
    found = []
    marks = [
        (float(one.resumed_step), f"{one.kind}: went on from step {one.resumed_step}", "bad")
        for one in job.incidents
        if one.resumed_step is not None
    ]
    for name, points in series.scalars(ordered).items():
        picture = plot.plot(
            [(name, points)],
            label=f"{name} over the steps, with the incidents",
            x_label="step",
            x_ticks=plot.step_ticks,
            y_words=_number,
            marks=marks[-MARKS:],
            from_zero=False,
        )
        if picture is not None:
            rows = [[f"{step:,.0f}", _number(value)] for step, value in _evenly(points)]
            found.append((name, picture, PageTable(["step", name], rows)))
    return found


def _over_time(
    curves: list[tuple[str, series.Points]],
    times: Span,
    marks: Sequence[tuple[float, str, str]],
    label: str,
    *,
    as_dots: bool = False,
) -> Plot | None:
    return plot.plot(
        curves,
        label=label,
        x_label="time (UTC)",
        x=times,
        x_ticks=plot.time_ticks,
        y_words=units.seconds,
        marks=marks[-MARKS:],
        as_dots=as_dots,
    )


def _rank_plot(
    ranks: Sequence[RankTimes], times: Span, marks: Sequence[tuple[float, str, str]]
) -> Strips | None:
    """A row for each worker, or for each machine: as slow as its slowest one."""
    of: dict[str, list[RankTimes]] = {}
    for one in ranks:
        of.setdefault(one.node, []).append(one)
    what = "each rank"
    rows = [(one.node, f"rank {one.rank}", _rank_words(one), one.factors) for one in ranks]
    if len(ranks) > RANKS:
        what = "each machine's slowest rank"
        worst = sorted(of, key=lambda node: -max(one.lost_s for one in of[node]))[:RANKS]
        rows = [
            (node, node, node, tuple(map(max, zip(*(one.factors for one in found), strict=True))))
            for node, found in of.items()
            if node in set(worst)
        ]
        if len(of) > RANKS:
            what += f", of the {RANKS} machines with the slowest ones"
    if len(ranks) < 2:  # there is nobody to be compared with
        return None
    return plot.strips(
        rows,
        label=f"how long {what} worked in a step, beside the others, over time",
        x_label="time (UTC)",
        x=times,
        marks=marks[-MARKS:],
    )


def _rank_words(one: RankTimes) -> str:
    words = f"rank {one.rank} on {one.node}"
    slow = text.slow_words(one)
    return f"{words}: {slow}" if slow else words


def _by_tier(saved: Sequence[series.SavePoint]) -> list[tuple[str, series.Points]]:
    tiers = sorted({one.tier for one in saved})
    return [
        (tier or "checkpoints", series.thinned([(s.t, s.seconds) for s in saved if s.tier == tier]))
        for tier in tiers
    ]


def _number(value: float) -> str:
    return f"{value:,.4g}" if math.isfinite(value) else str(value)


# --- tables behind them ---------------------------------------------------------------------------


def _evenly(points: series.Points) -> series.Points:
    if len(points) <= ROWS:
        return points
    return [points[round(i * (len(points) - 1) / (ROWS - 1))] for i in range(ROWS)]


def _step_table(steps: series.Points) -> PageTable:
    rows = [[units.when(t), units.seconds(seconds)] for t, seconds in _evenly(steps)]
    return PageTable(["time", "one step"], rows)


def _rank_table(ranks: Sequence[RankTimes]) -> PageTable:
    """The ones that have cost most, and then the busiest."""
    worst = sorted(ranks, key=lambda one: (-one.lost_s, -(one.own_s + one.data_s)))
    rows = [
        [
            f"{one.rank}",
            one.node,
            *map(units.seconds, (one.step_s, one.longest_s, one.own_s, one.wait_s, one.data_s)),
            text.slow_words(one),
        ]
        for one in worst[:ROWS]
    ]
    heads = ["rank", "machine", "a step", "longest", "own work", "waits", "for data", "slow"]
    return PageTable(heads, rows, len(worst))


def _save_table(saved: Sequence[series.SavePoint]) -> PageTable:
    rows = [
        [units.when(s.t), f"{s.step:,}", s.tier, units.seconds(s.seconds), units.size(s.num_bytes)]
        for s in saved[-ROWS:]
    ]
    return PageTable(["time", "step", "tier", "durable after", "size"], rows, len(saved))


def _tier_table(job: Facts) -> PageTable:
    rows = [
        [
            name,
            f"{one.num:,}",
            units.seconds(one.seconds / one.num) if one.num else "",
            units.seconds(one.slowest_s),
            units.size(one.bytes / one.num) if one.num else "",
            units.seconds(one.blocked_s),
            f"{one.newest_step:,}",
            f"{one.num_skipped:,}",
        ]
        for name, one in job.by_tier.items()
    ]
    heads = ["tier", "checkpoints", "mean", "slowest", "size", "training stood still"]
    heads += ["newest step", "skipped"]
    return PageTable(heads, rows)


def _machine_table(job: Facts) -> PageTable:
    """Each machine: what went wrong there, and where its time went; those alike in one row."""
    paid = job.money
    names = [*job.failures, *(name for name in job.by_machine if name not in job.failures)]
    said = []
    for name in names:
        counts = ", ".join(
            f"{count} × {what}" for what, count in job.failures.get(name, {}).items()
        )
        spent = text.parts_of(job.by_machine[name]) if name in job.by_machine else ""
        cost = None if paid is None else paid.by_machine.get(name)
        price = [] if paid is None else ["" if cost is None else paid.amount(cost)]
        said.append((name, [counts or "nothing", spent, *price]))
    found = text.alike(job, said)
    rows = [[words, *own] for words, own in found[:ROWS]]
    heads = [
        "machine",
        "what went wrong",
        "its workers' time",
        *(["price of each"] if paid else []),
    ]
    return PageTable(heads, rows, len(found))


def _split(line: str) -> list[str]:
    name, _, words = line.strip().partition(" ")
    return [name, words.strip()]
