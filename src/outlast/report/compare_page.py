"""The comparison as one page: ``outlast report JOBS… --compare -o compare.html``.

Of the same make as the page of one job (:mod:`outlast.report.page`): a single file without a
script, a font or a picture from elsewhere, light or dark, with a table behind each picture, all of
it within reach of the keyboard. Bars of all jobs have one scale: the longest job fills the line.

Guarantees: everything from ledgers and paths is escaped. The page stays below 300 KB, however many
jobs there are and whatever was logged and set: all curves together have ``POINTS`` points, all
tables behind them ``CELLS_BEHIND`` cells, and the table of figures ``CELLS``, with so many letters
together. Rows that there is no room for are counted, and ``--json`` has them.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from outlast import units
from outlast.report import plot, series
from outlast.report.chart import render
from outlast.report.compare import (
    ComparedJob,
    CompareRow,
    CompareSection,
    sections,
    unlike,
    verdict,
)
from outlast.report.page import PageTable
from outlast.report.plot import Plot
from outlast.report.text import PART_WORDS, SAVED_TERM

POINTS: Final = 5_000
CELLS: Final = 3_000
CELLS_BEHIND: Final = 2_000
LETTERS: Final = 60_000  # of all cells
LETTERS_MOST: Final = 300  # of one
LETTERS_LEAST: Final = 16
NAME_LETTERS: Final = 60
LABELLED: Final = 6  # on a phone each figure has its job's name; of more jobs their numbers
ROWS: Final = 20  # of a table behind a picture, at most


class BarPart(NamedTuple):
    """A piece of a bar: its width in percent of the line, its colour, and words."""

    width: float
    key: str
    words: str


class JobBar(NamedTuple):
    """A job's bar: its name, what it says behind it, and its pieces."""

    name: str
    words: str
    pieces: list[BarPart]


def compare_page(jobs: Sequence[ComparedJob], left_out: dict[str, str], *, written: str) -> str:
    """Write the page.

    Args:
        jobs: those that are compared, two or more.
        left_out: directory → why it is not.
        written: when, in words.
    """
    jobs = _named(jobs)
    num_curves = len(jobs) * (1 + len({name for one in jobs for name in one.scalars}))
    most = max(POINTS // num_curves, 20)
    num_rows = min(max(CELLS_BEHIND // num_curves, 4), ROWS)
    return render(
        "compare.html.j2",
        jobs=jobs,
        left_out=left_out,
        written=written,
        labels=[one.name if len(jobs) <= LABELLED else str(n) for n, one in enumerate(jobs, 1)],
        verdict=verdict(jobs),
        unlike=unlike(jobs),
        saved_term=SAVED_TERM,
        same_step=next((one.same_step.step for one in jobs if one.same_step is not None), 0),
        time_bars=_time_bars(jobs),
        legend=_legend(jobs),
        money_bars=_money_bars(jobs),
        progress=_progress(jobs, most),
        progress_table=_progress_table(jobs, num_rows),
        losses=_losses(jobs, most, num_rows),
        sections=_fitting(sections(jobs), len(jobs)),
    )


def _named(jobs: Sequence[ComparedJob]) -> list[ComparedJob]:
    """The same with names that are short, and still tell them apart."""
    short = [
        one.name if len(one.name) <= NAME_LETTERS else f"{one.name[:20]}…{one.name[-39:]}"
        for one in jobs
    ]
    return [
        msgspec.structs.replace(one, name=name if short.count(name) == 1 else f"{name} ({n})")
        for n, (one, name) in enumerate(zip(jobs, short, strict=True), 1)
    ]


def _fitting(found: Sequence[CompareSection], num_jobs: int) -> list[CompareSection]:
    """What there is room for: rows of each section, letters of each cell."""
    left = CELLS // num_jobs
    num_rows = min(left, sum(len(one.rows) for one in found))
    letters = min(max(LETTERS // (num_rows * num_jobs), LETTERS_LEAST), LETTERS_MOST)
    fitting = []
    for section in found:
        rows = [
            row._replace(
                name=_short(row.name, LETTERS_MOST), cells=[_short(c, letters) for c in row.cells]
            )
            for row in section.rows[:left]
        ]
        left -= len(rows)
        if missing := len(section.rows) - len(rows):
            rows.append(CompareRow(f"{missing} more are in --json", [""] * num_jobs))
        fitting.append(CompareSection(section.name, rows))
    return fitting


def _short(words: str, letters: int) -> str:
    return words if len(words) <= letters else f"{words[: letters - 1]}…"


def _legend(jobs: Sequence[ComparedJob]) -> list[tuple[str, str]]:
    """Key and name of each part that any job has."""
    return [
        (part, words) for part, (words, _) in PART_WORDS.items()
        if any(one.parts_s.get(part) for one in jobs)
    ]  # fmt: skip


def _time_bars(jobs: Sequence[ComparedJob]) -> list[JobBar]:
    longest_s = max(one.wall_s for one in jobs)
    bars = []
    for one in jobs:
        total = sum(one.parts_s.values())
        if not total or not longest_s:
            bars.append(JobBar(one.name, "no time has passed yet", []))
            continue
        shares = {part: one.parts_s[part] / total for part in PART_WORDS}
        scale = 100 * one.wall_s / longest_s
        pieces = [
            BarPart(round(scale * share, 3), part, f"{PART_WORDS[part][0]}: {100 * share:.1f} %")
            for part, share in shares.items()
            if share
        ]
        words = f"{100 * one.fraction_productive:.1f} % productive of {units.seconds(one.wall_s)}"
        bars.append(JobBar(one.name, words, pieces))
    return bars


def _money_bars(jobs: Sequence[ComparedJob]) -> list[JobBar]:
    """What was spent, useful and lost, on one scale; none where nobody has a price."""
    costs = [0.0 if one.money is None else one.money.cost or 0.0 for one in jobs]
    most = max(costs)
    if not most:
        return []
    bars = []
    for one, cost in zip(jobs, costs, strict=True):
        if one.money is None or one.money.cost is None:
            bars.append(JobBar(one.name, "no price is set", []))
            continue
        useful, lost = one.money.useful or 0.0, one.money.lost or 0.0
        pieces = [
            BarPart(
                round(100 * useful / most, 3), "productive", f"useful: {one.money.amount(useful)}"
            ),
            BarPart(round(100 * lost / most, 3), "detecting", f"lost: {one.money.amount(lost)}"),
        ]
        words = f"{one.money.amount(cost)}, of which {one.money.amount(lost)} lost"
        bars.append(JobBar(one.name, words, [piece for piece in pieces if piece.width]))
    return bars


def _progress(jobs: Sequence[ComparedJob], most: int) -> Plot | None:
    return plot.plot(
        [(one.name, series.thinned(one.progress, most)) for one in jobs],
        label="the highest step of each job, over the time since its start",
        x_label="since the start",
        x_ticks=plot.duration_ticks,
        y_words=lambda value: f"{value:,.0f}",
    )


def _progress_table(jobs: Sequence[ComparedJob], num_rows: int) -> PageTable:
    """After so long each job was at this step; "" once it was over."""
    longest_s = max(one.wall_s for one in jobs)
    rows = []
    for n in range(num_rows + 1):
        at_s = longest_s * n / num_rows
        cells = [
            _at(one.progress, at_s, "{:,.0f}") if at_s <= one.wall_s + 1e-6 else "" for one in jobs
        ]
        rows.append([units.seconds(at_s), *cells])
    return PageTable(["after", *(one.name for one in jobs)], rows if longest_s else [])


def _losses(
    jobs: Sequence[ComparedJob], most: int, num_rows: int
) -> list[tuple[str, Plot, PageTable]]:
    """What the scripts logged, by name: a curve for each job that has it, over the steps."""
    found = []
    for name in dict.fromkeys(name for one in jobs for name in one.scalars):
        curves = [(one.name, one.scalars.get(name, [])) for one in jobs]
        picture = plot.plot(
            [(own, series.thinned(points, most)) for own, points in curves],
            label=f"{name} of each job, over the steps",
            x_label="step",
            x_ticks=plot.step_ticks,
            y_words=_number,
            from_zero=False,
        )
        if picture is None:
            continue
        last = max(points[-1][0] for _, points in curves if points)
        steps = sorted({round(last * n / num_rows) for n in range(1, num_rows + 1)})
        rows = [
            [
                f"{step:,}",
                *(
                    _at(points, step, "{:,.4g}") if points and step <= points[-1][0] else ""
                    for _, points in curves
                ),
            ]
            for step in steps
        ]
        found.append((name, picture, PageTable(["step", *(one.name for one in jobs)], rows)))
    return found


def _at(points: series.Points, x: float, form: str) -> str:
    """The value of the newest point up to there; "" before the first."""
    place = bisect.bisect_right(points, x, key=lambda one: one[0])
    return form.format(points[place - 1][1]) if place else ""


def _number(value: float) -> str:
    return f"{value:,.4g}"
