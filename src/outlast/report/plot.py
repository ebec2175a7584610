"""Pictures of the page: curves, dots and strips in a box, as numbers that a template draws as SVG.

Colours are the page's (CSS classes), so that a picture is light or dark as the page is. The charts
of ``outlast plan`` stand alone in files and have their own (``chart.py``).
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import msgspec

from outlast import units
from outlast.report.chart import Tick, round_step

WIDTH: Final = 720
LETTER: Final = 11  # pixels of width, where letters are largest: on a phone
RIGHT: Final = 12
TOP: Final = 10
BOTTOM: Final = 40
HEIGHT: Final = 212
STRIPS_LEFT: Final = 132  # a machine's name stands there
STRIPS_HIGH: Final = 480  # all rows together
THICKEST: Final = 22
THINNEST: Final = 6
APART: Final = 6  # between two machines
WORDS_HIGH: Final = 22  # of a tick on a phone, in the picture's pixels
BANDS: Final = (1.1, 1.2, 1.5, 2.0)  # times the others'
_TICKS: Final = 5
_STEPS_S: Final = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600)
DAY_S: Final = 86_400


class PlotMark(NamedTuple):
    """A vertical line, in pixels, and what it says when it is pointed at."""

    at: float
    words: str
    style: str


class PlotLine(NamedTuple):
    """A curve, or dots: points in pixels, "x,y x,y …"; ``style`` is its place."""

    name: str
    points: str
    dots: list[tuple[float, float]]
    style: int


class Plot(msgspec.Struct, frozen=True, kw_only=True):
    """A picture in pixels.

    Attributes:
        label: what it shows, for those who do not see it.
        lines: curves and dots.
        marks: moments.
        x_ticks, y_ticks: of the axes.
        x_label: words below.
    """

    label: str
    lines: list[PlotLine]
    marks: list[PlotMark]
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    x_label: str
    width: int = WIDTH
    height: int = HEIGHT
    left: int
    right: int = WIDTH - RIGHT
    top: int = TOP
    bottom: int = HEIGHT - BOTTOM


class StripRow(NamedTuple):
    """A row of strips: its middle in pixels, what it says, and (band, SVG path) of what is drawn.

    Paths have the columns' numbers across.
    """

    at: float
    label: str
    words: str
    paths: list[tuple[int, str]]


class Strips(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of cells, each in the colour of its band, over one axis of time; in pixels.

    Attributes:
        label: what it shows, for those who do not see it.
        rows: from above.
        thick: of a row.
        scale: pixels of a column.
        legend: (band, words).
        marks, x_ticks, x_label: as of a :class:`Plot`.
    """

    label: str
    rows: list[StripRow]
    thick: float
    scale: float
    legend: list[tuple[int, str]]
    marks: list[PlotMark]
    x_ticks: list[Tick]
    x_label: str
    height: float
    bottom: float
    width: int = WIDTH
    left: int = STRIPS_LEFT
    right: int = WIDTH - RIGHT
    top: int = TOP


class Span(NamedTuple):
    """A range of an axis, never empty."""

    low: float
    high: float

    @classmethod
    def over(cls, values: Iterable[float], *, from_zero: bool = False) -> Span:
        """From the lowest to the highest."""
        known = [value for value in values if math.isfinite(value)]
        low, high = min(known, default=0.0), max(known, default=1.0)
        low = min(low, 0.0) if from_zero else low
        return cls(low, high if high > low else low + max(abs(low), 1.0) * 0.1)

    def part(self, value: float) -> float:
        """Where a value lies: 0 at the low end, 1 at the high one."""
        return (value - self.low) / (self.high - self.low)


def plot(
    curves: Sequence[tuple[str, Sequence[tuple[float, float]]]],
    *,
    label: str,
    x_label: str,
    x_ticks: Callable[[Span], list[tuple[float, str]]],
    y_words: Callable[[float], str],
    x: Span | None = None,
    marks: Iterable[tuple[float, str, str]] = (),
    as_dots: bool = False,
    from_zero: bool = True,
) -> Plot | None:
    """Draw; None where there is no point to be drawn.

    Args:
        curves: (name, points in ascending x); what is not finite is left out.
        label: what it shows.
        x_label: below.
        x_ticks: of a range: places and words.
        y_words: says a value.
        x: what is shown of the other axis; None for all.
        marks: (x, words, style), each a vertical line; those outside are left out.
        as_dots: points, not lines.
        from_zero: whether the vertical axis begins there.
    """
    # A curve has its colour by its place, so that it is the same in several pictures.
    finite = [[one for one in points if math.isfinite(one[1])] for _, points in curves]
    shown = [(n, curves[n][0], points) for n, points in enumerate(finite) if points]
    if not shown:
        return None
    across = x or Span.over(one[0] for *_, points in shown for one in points)
    up = Span.over((one[1] for *_, points in shown for one in points), from_zero=from_zero)

    heights = [(value, y_words(value)) for value in rounds(up)]
    left = 12 + LETTER * max((len(words) for _, words in heights), default=0)

    def at_x(value: float) -> float:
        return round(left + across.part(value) * (WIDTH - left - RIGHT), 1)

    def at_y(value: float) -> float:
        return round(HEIGHT - BOTTOM - up.part(value) * (HEIGHT - TOP - BOTTOM), 1)

    lines = []
    for number, name, points in shown:
        placed = [(at_x(a), at_y(b)) for a, b in points]
        alone = as_dots or len(placed) == 1
        path = "" if alone else " ".join(f"{a:g},{b:g}" for a, b in placed)
        lines.append(PlotLine(name, path, placed if alone else [], number))
    return Plot(
        label=label,
        lines=lines,
        marks=[
            PlotMark(at_x(value), words, style)
            for value, words, style in marks
            if 0 <= across.part(value) <= 1
        ],
        x_ticks=[Tick(at_x(value), words) for value, words in x_ticks(across)],
        y_ticks=[Tick(at_y(value), words) for value, words in heights],
        x_label=x_label,
        left=left,
    )


def strips(
    rows: Sequence[tuple[str, str, str, Sequence[float]]],
    *,
    label: str,
    x_label: str,
    x: Span,
    marks: Iterable[tuple[float, str, str]] = (),
) -> Strips | None:
    """Draw rows of cells; None where there is none.

    Args:
        rows: (group, label, words, factors in columns of equal width), of a group one by one;
            0 is nothing. Where there is no room for each label, groups alone have theirs.
        label: what it shows.
        x_label: below.
        x: the range of times that the columns share.
        marks: (x, words, style), each a vertical line.
    """
    if not rows:
        return None
    groups = dict.fromkeys(group for group, *_ in rows)
    apart = APART if len(groups) < len(rows) else 0
    hosts = {group: group.partition(".")[0] for group in groups}  # their domain is the same
    names = hosts if len(set(hosts.values())) == len(groups) else {group: group for group in groups}
    room = STRIPS_HIGH - apart * (len(groups) - 1)
    thick = round(min(max(room / len(rows), THINNEST), THICKEST), 1)
    placed: list[StripRow] = []
    y, labelled, before = float(TOP), -math.inf, rows[0][0]
    for number, (group, name, words, factors) in enumerate(rows):
        is_first = number == 0 or group != before
        y += apart * (group != before)
        said = name if thick >= THICKEST else names[group] if is_first else ""
        if said and y - labelled < WORDS_HIGH:
            said = ""
        labelled, before = y if said else labelled, group
        placed.append(StripRow(round(y + thick / 2, 1), _middle_out(said), words, _paths(factors)))
        y += thick
    scale = (WIDTH - RIGHT - STRIPS_LEFT) / max(len(rows[0][3]), 1)
    across = WIDTH - RIGHT - STRIPS_LEFT

    def at_x(value: float) -> float:
        return round(STRIPS_LEFT + x.part(value) * across, 1)

    legend = [(0, "as the others")]
    legend += [(band, f"{low:g} times and more") for band, low in enumerate(BANDS, 1)]
    return Strips(
        label=label,
        rows=placed,
        thick=thick - 1,
        scale=round(scale, 3),
        legend=legend,
        marks=[PlotMark(at_x(at), words, style) for at, words, style in marks],
        x_ticks=[Tick(at_x(value), words) for value, words in time_ticks(x)],
        x_label=x_label,
        height=round(y + BOTTOM, 1),
        bottom=round(y, 1),
    )


def _paths(factors: Sequence[float]) -> list[tuple[int, str]]:
    """Of each band that a row has: a path along y = 0, cells side by side in one stroke."""
    drawn: dict[int, list[str]] = {}
    bands = [bisect.bisect_right(BANDS, one) if one > 0 else -1 for one in factors]
    at = 0
    for band, cells in itertools.groupby(bands):
        num = len(list(cells))
        if band >= 0:
            drawn.setdefault(band, []).append(f"M{at} 0h{num}")
        at += num
    return [(band, "".join(runs)) for band, runs in sorted(drawn.items())]


def _middle_out(name: str, most: int = 11) -> str:
    """A name that has room: machines differ at its beginning or at its end."""
    half = (most - 1) // 2
    return name if len(name) <= most else f"{name[:half]}…{name[-half:]}"


def rounds(span: Span) -> list[float]:
    """Round numbers in a range: about five."""
    step = round_step(span.low, span.high)
    first, last = math.ceil(span.low / step - 1e-9), math.floor(span.high / step + 1e-9)
    return [n * step for n in range(first, last + 1)]


def step_ticks(span: Span) -> list[tuple[float, str]]:
    """Of an axis of steps."""
    return [(value, f"{value:,.0f}") for value in rounds(span) if value == int(value)]


def duration_ticks(span: Span) -> list[tuple[float, str]]:
    """Of an axis of seconds since something began."""
    _, places = _round_times(span)
    return [(place, units.seconds(place) if place else "0") for place in places]


def _round_times(span: Span) -> tuple[int, list[float]]:
    """Seconds between two ticks, and where these are."""
    wide = span.high - span.low
    step = next((one for one in _STEPS_S if wide / one <= _TICKS + 1), None)
    if step is None:
        step = DAY_S * max(1, math.ceil(wide / DAY_S / _TICKS))
    first, last = math.ceil(span.low / step), math.floor(span.high / step)
    return step, [float(n * step) for n in range(first, last + 1)]


def time_ticks(span: Span) -> list[tuple[float, str]]:
    """Of an axis of wall-clock times: round times of the day, in UTC."""
    step, places = _round_times(span)
    say = units.day if step >= DAY_S else units.clock
    words = [say(place).removesuffix(" UTC") for place in places]
    if 60 <= step < DAY_S:  # whole minutes: on a phone there is no room for their seconds
        words = [one.removesuffix(":00") for one in words]
    return list(zip(places, words, strict=True))
