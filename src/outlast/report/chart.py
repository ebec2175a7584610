"""Line charts and timelines as SVG, alone, in a page, or as PNG.

SVG is drawn from a template with nothing but shapes and text, so that it is small, can be read,
and looks the same in a browser, in a document and in a diff. PNG is that SVG through resvg, which
is imported only then (the extra ``plot``). matplotlib was rejected: 0.6 s to import, and a second
drawing of everything.

What can go wrong: a machine without any font would give pictures without words; that is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from outlast.errors import ConfigError, StorageError

WIDTH: Final = 720
HEIGHT: Final = 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 64, 52
_LETTER: Final = 7  # pixels of width
_LEAST_TICKS: Final = 3
_ZOOM: Final = 2  # pixels of a PNG for each of the SVG
_FONTS: Final = ("/usr/share/fonts", "/usr/local/share/fonts", "~/.fonts", "~/.local/share/fonts")


class Curve(NamedTuple):
    """Points in ascending x; what is not finite is left out. Style: solid, dashed or other."""

    name: str
    points: list[tuple[float, float]]
    style: str


class Mark(NamedTuple):
    """A point with words, emphasised or not."""

    x: float
    y: float
    words: str
    strong: bool


class Piece(NamedTuple):
    """A stretch of a timeline. Style: wait, work, write or margin."""

    name: str
    seconds: float
    style: str


_WORDS_DOWN: Final = (20, -12, 34, -26, 48, -40, 62, -54)  # from the point, the nearest first
_ANCHORS: Final = ("start", "end", "middle")


class Tick(NamedTuple):
    """A place on an axis, in pixels, and what stands there."""

    at: float
    words: str


class ChartLine(NamedTuple):
    """A curve in pixels."""

    name: str
    path: str
    style: str


class Spot(NamedTuple):
    """A mark in pixels; its words end at the point when it is far right."""

    x: float
    y: float
    words: str
    strong: bool
    anchor: str
    words_y: float


def _box(spot: Spot) -> tuple[float, float, float, float]:
    """About where its words are: left, top, right, bottom."""
    wide = _LETTER * len(spot.words)
    left = spot.x - {"start": 0.0, "middle": wide / 2, "end": wide}[spot.anchor]
    return left, spot.words_y - 13, left + wide, spot.words_y + 5


def _crossed(spot: Spot, taken: list[tuple[float, float]]) -> int:
    """How many of the points that are taken its words would hide; more than all outside."""
    left, top, right, bottom = _box(spot)
    if left < _LEFT or right > WIDTH - _RIGHT / 2 or top < _TOP or bottom > HEIGHT - _BOTTOM:
        return len(taken) + 1
    return sum(left <= x <= right and top <= y <= bottom for x, y in taken)


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """Curves over a logarithmic x, or a linear one.

    Attributes:
        title, x_label, y_label: words.
        x_words: says an x that stands on the axis.
        x_rounds: round numbers between two, for the axis.
        curves: the lines.
        marks: points on them.
        y_low, y_high: what is shown.
        is_linear: whether x is.
    """

    title: str
    x_label: str
    y_label: str
    x_words: Callable[[float], str]
    x_rounds: Callable[[float, float], list[float]]
    curves: list[Curve]
    marks: list[Mark]
    y_low: float
    y_high: float
    is_linear: bool = False

    template = "chart.svg.j2"

    @property
    def _range(self) -> tuple[float, float]:
        xs = [x for curve in self.curves for x, _ in curve.points]
        return min(xs), max(xs)

    def x(self, value: float) -> float:
        """Pixels from the left."""
        low, high = self._range
        share = (value - low) / (high - low)
        if not self.is_linear:
            share = math.log(value / low) / math.log(high / low)
        return _LEFT + share * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        """Pixels from the top."""
        share = (value - self.y_low) / (self.y_high - self.y_low)
        return HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM)

    def lines(self) -> list[ChartLine]:
        """Each curve as far as it is in the picture."""
        return [ChartLine(curve.name, self._path(curve), curve.style) for curve in self.curves]

    def _path(self, curve: Curve) -> str:
        shown = [
            f"{self.x(x):.1f},{self.y(y):.1f}"
            for x, y in curve.points
            if math.isfinite(y) and self.y_low <= y <= self.y_high
        ]
        return " ".join(shown)

    def spots(self) -> list[Spot]:
        """The marks that are in the picture, their words where they cross no curve."""
        low, high = self._range
        inside = [
            mark
            for mark in self.marks
            if low <= mark.x <= high and self.y_low <= mark.y <= self.y_high
        ]
        taken = [
            (self.x(x), self.y(y)) for curve in self.curves for x, y in curve.points if y < math.inf
        ]
        taken += [(self.x(mark.x), self.y(mark.y)) for mark in inside]
        found = []
        for mark in sorted(inside):
            x, y = self.x(mark.x), self.y(mark.y)
            places = [
                Spot(x, y, mark.words, mark.strong, anchor, y + down)
                for down in _WORDS_DOWN
                for anchor in _ANCHORS
            ]
            spot = min(places, key=lambda place: _crossed(place, taken))
            left, top, right, bottom = _box(spot)
            taken += [(at, (top + bottom) / 2) for at in range(int(left), int(right), 4)]
            found.append(spot)
        return sorted(found, key=lambda spot: spot.strong)  # the strong one above the others

    def x_ticks(self) -> list[Tick]:
        """Round numbers, as many as have room; where there are too few of them, equal parts."""
        low, high = self._range
        ticks = self._apart(self.x_rounds(low, high))
        if len(ticks) < _LEAST_TICKS:
            ticks = self._apart([low * (high / low) ** (i / 5) for i in range(6)])
        return ticks

    def _apart(self, places: list[float]) -> list[Tick]:
        found: list[Tick] = []
        room = -math.inf  # where the words before end
        for place in places:
            words, x = self.x_words(place), self.x(place)
            half = (_LETTER * len(words) + _LETTER) / 2
            if x - half >= room and x + half <= WIDTH:
                found.append(Tick(x, words))
                room = x + half
        return found

    def y_ticks(self) -> list[Tick]:
        """Round numbers."""
        step = round_step(self.y_low, self.y_high)
        first = math.ceil(self.y_low / step - 1e-9)
        last = math.floor(self.y_high / step + 1e-9)
        digits = max(0, -math.floor(math.log10(step)))
        return [Tick(self.y(n * step), f"{n * step:.{digits}f}") for n in range(first, last + 1)]


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """Stretches one after another, against a limit.

    Attributes:
        title: words.
        pieces: in their order.
        limit_s: what must not be passed.
        limit_words: what stands there.
        fits: whether it is not.
    """

    title: str
    pieces: list[Piece]
    limit_s: float
    limit_words: str
    fits: bool

    template = "timeline.svg.j2"

    @property
    def whole_s(self) -> float:
        """What the width stands for."""
        return 1.05 * max(self.limit_s, sum(piece.seconds for piece in self.pieces))

    def x(self, seconds: float) -> float:
        """Pixels from the left."""
        return _RIGHT + seconds / self.whole_s * (WIDTH - 2 * _RIGHT)

    def bars(self) -> list[dict[str, float | str]]:
        """Each stretch in pixels, its words where there is room."""
        found: list[dict[str, float | str]] = []
        at_s = 0.0
        for piece in self.pieces:
            x = self.x(at_s)
            at_s += piece.seconds
            width = self.x(at_s) - x
            words = f"{piece.name} {piece.seconds:,.3g} s"
            found.append(
                {
                    "x": round(x, 1),
                    "width": round(width, 1),
                    "words": words,
                    "inside": "yes" if width > 7 * len(words) else "",
                    "style": piece.style,
                }
            )
        return found


Picture = Chart | Timeline


def round_step(low: float, high: float) -> float:
    """1, 2 or 5 times a power of ten: from one number of an axis to the next, about five in all."""
    raw = (high - low) / 5
    size = 10.0 ** math.floor(math.log10(raw))
    return next(size * n for n in (1, 2, 5, 10) if size * n >= raw)


def decades(low: float, high: float) -> list[float]:
    """1, 2 and 5 times each power of ten between two positive numbers."""
    if not 0 < low < high < math.inf:
        return []
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    sizes = [n * 10.0**power for power in range(first, last + 1) for n in (1, 2, 5)]
    return [size for size in sizes if low <= size <= high]


def write(charts: list[Picture], path: Path, *, title: str) -> None:
    """Draw into a file; its ending says how.

    Raises:
        ConfigError: the ending is none of these, or what PNG needs is not installed.
        StorageError: the file cannot be written.
    """
    ending = path.suffix.lower()
    if ending not in (".svg", ".html", ".png"):
        raise ConfigError(f"{path.name} is no picture; end it in .svg, .html or .png")
    if ending == ".html":
        content = _page(charts, title).encode()
    else:
        content = svg(charts, title=title).encode()
        if ending == ".png":
            content = _png(content.decode())
    try:
        path.write_bytes(content)
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error.strerror}; give another file"
        ) from None


def svg(charts: list[Picture], *, title: str) -> str:
    """All pictures, one below the other."""
    return render("picture.svg.j2", charts=charts, title=title)


def _page(charts: list[Picture], title: str) -> str:
    return render("picture.html.j2", picture=svg(charts, title=title), title=title)


def render(template: str, **values: object) -> str:
    """A template of this room, everything in it escaped."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("outlast.report"),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(width=WIDTH, height=HEIGHT, **values)


def _png(picture: str) -> bytes:
    try:
        import resvg_py
    except ImportError:
        raise ConfigError(
            "a PNG needs resvg-py; pip install resvg-py, or write .svg or .html"
        ) from None
    folders = [Path(folder).expanduser() for folder in _FONTS]
    fonts = (font for folder in folders for font in folder.rglob("*.[ot]tf"))
    if next(fonts, None) is None:
        raise ConfigError(
            "this machine has no font, and a PNG would have no words; write .svg or .html, or "
            "install one (apt install fonts-dejavu-core)"
        )
    return bytes(resvg_py.svg_to_bytes(svg_string=picture, zoom=_ZOOM, background="#ffffff"))
