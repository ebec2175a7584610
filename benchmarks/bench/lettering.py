"""Text in pictures as outlines: it looks the same where no font is installed, and in any reader.

The outlines are those of DejaVu, which matplotlib brings along. Each glyph is drawn once, under
``<defs>``, and used where it is wanted. A picture follows the reader's scheme: its colours are
classes, for light and dark.
"""

from __future__ import annotations

import html
from functools import cached_property
from pathlib import Path
from typing import Any, Final

SANS: Final = "DejaVuSans.ttf"
MONO: Final = "DejaVuSansMono.ttf"
BOLD_MONO: Final = "DejaVuSansMono-Bold.ttf"


class Lettering:
    """One font at one size.

    Args:
        file: of the font, as matplotlib names it.
        size: of the letters, in the picture's units.
        key: what tells its glyphs from another font's in the same picture.
    """

    def __init__(self, file: str, size: float, key: str = "g") -> None:
        self.size, self._key = size, key
        self._file = file
        self._used: dict[str, str] = {}

    @cached_property
    def _font(self) -> Any:
        from fontTools.ttLib import TTFont
        from matplotlib import get_data_path

        return TTFont(Path(get_data_path()) / "fonts/ttf" / self._file)

    @cached_property
    def _glyphs(self) -> Any:
        return self._font.getGlyphSet()

    def width(self, text: str) -> float:
        """Of a text, in the picture's units."""
        return self._scale * sum(int(self._glyphs[self._name(one)].width) for one in text)

    def draw(self, x: float, y: float, text: str, look: str = "", anchor: str = "start") -> str:
        """A text whose baseline is at ``y``, from ``x`` on, around it ("middle") or up to it."""
        at = {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor]
        left, pieces = x - at * self.width(text), []
        place = 0
        for one in text:
            name = self._name(one)
            if self._outline(name):
                pieces.append(f'<use href="#{self._used[name]}" x="{place}"/>')
            place += self._glyphs[name].width
        look = f' class="{look}"' if look else ""
        move = f"translate({left:.1f} {y:.1f}) scale({self._scale:.5f} {-self._scale:.5f})"
        return f'<g{look} transform="{move}">{"".join(pieces)}</g>'

    def defs(self) -> str:
        """The outlines of all glyphs that were used so far."""
        return "".join(
            f'<path id="{key}" d="{self._outline(name)}"/>' for name, key in self._used.items()
        )

    @property
    def _scale(self) -> float:
        return self.size / float(self._font["head"].unitsPerEm)

    def _name(self, letter: str) -> str:
        name = self._font.getBestCmap().get(ord(letter))
        if name is None:
            raise SystemExit(f"{self._file} has no {letter!r}")
        return str(name)

    def _outline(self, name: str) -> str:
        from fontTools.pens.svgPathPen import SVGPathPen

        pen = SVGPathPen(self._glyphs)
        self._glyphs[name].draw(pen)
        path = str(pen.getCommands())
        if path:
            self._used.setdefault(name, f"{self._key}{len(self._used)}")
        return path


def picture(
    width: float,
    height: float,
    title: str,
    light: dict[str, str],
    dark: dict[str, str],
    content: str,
    *fonts: Lettering,
) -> str:
    """The whole file.

    Args:
        width: of the picture.
        height: of the picture.
        title: what it shows, for those who do not see it.
        light: class → declarations, in a light scheme.
        dark: the same in a dark one.
        content: what is drawn.
        fonts: those that it was lettered with.
    """
    rules = "".join(f".{name}{{{look}}}" for name, look in light.items())
    night = "".join(f".{name}{{{look}}}" for name, look in dark.items())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'role="img"><title>{html.escape(title)}</title>\n'
        f"<style>{rules}@media (prefers-color-scheme: dark){{{night}}}</style>\n"
        f"<defs>{''.join(font.defs() for font in fonts)}</defs>\n{content}\n</svg>\n"
    )
