"""Pictures of the page: curves, dots and bars in a box, as numbers that a template draws as SVG.

Colours are the page's (CSS classes), so that a picture is light or dark as the page is. The charts
of ``outlast plan`` stand alone in files and have their own (``chart.py``).
"""

from __future__ import annotations

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
