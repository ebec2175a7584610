"""The output of ``outlast demo``, run just now, as a picture.

    python benchmarks/demo_picture.py [--picture docs/demo.svg]

The demo is told that it writes to a terminal; what it shows for a moment only is left out.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.text import Text

from bench.lettering import BOLD_MONO, MONO, Lettering, picture

COLUMNS, SIZE, LINE, EDGE = 100, 13.0, 19.0, 18.0
ERASED: Final = re.compile(r"^.*(?:\x1b\[2K|\r)", re.DOTALL)
GONE: Final = re.compile(r"[^\n]*\n(?=(?:\r|\x1b\[\?25[hl])*\x1b\[1A\x1b\[2K)")  # erased from below
CONTROL: Final = re.compile(r"\x1b\[(?![\d;]*m)[?\d;]*[A-Za-z]")
COLOURS: Final = {"1": "red", "2": "green", "3": "yellow", "4": "cyan", "5": "magenta", "6": "cyan"}
LIGHT: Final = {
    "page": "fill:#f6f8fa;stroke:#d0d7de",
    "plain": "fill:#1f2328",
    "dim": "fill:#656d76",
    "red": "fill:#cf222e",
    "green": "fill:#1a7f37",
    "yellow": "fill:#9a6700",
    "cyan": "fill:#0969da",
    "magenta": "fill:#8250df",
}
DARK: Final = {
    "page": "fill:#161b22;stroke:#30363d",
    "plain": "fill:#e6edf3",
    "dim": "fill:#9198a1",
    "red": "fill:#ff7b72",
    "green": "fill:#3fb950",
    "yellow": "fill:#d29922",
    "cyan": "fill:#79c0ff",
    "magenta": "fill:#d2a8ff",
}


def main() -> None:
    """Run it, and draw it."""
    parser = argparse.ArgumentParser(description="Draw the output of outlast demo.")
    parser.add_argument("--picture", type=Path, default=Path("docs/demo.svg"))
    path = parser.parse_args().picture
    with tempfile.TemporaryDirectory() as place:
        done = subprocess.run(
            [sys.executable, "-m", "outlast", "demo", "--dir", "outlast-demo"],
            cwd=place,
            env={**os.environ, "FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": str(COLUMNS)},
            stdout=subprocess.PIPE,
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"the demo failed with {done.returncode}")
    path.write_text(drawn(list(lines(done.stdout.decode()))))


def lines(output: str) -> Iterator[Text]:
    """What stays on a terminal, in lines that fit."""
    console = Console(width=COLUMNS)
    for line in GONE.sub("", output).split("\n"):
        text = Text.from_ansi(CONTROL.sub("", ERASED.sub("", line)))
        text.rstrip()
        if text.plain:
            yield from text.wrap(console, COLUMNS)


def drawn(text: list[Text]) -> str:
    """The lines as a picture."""
    plain, bold = Lettering(MONO, SIZE, "m"), Lettering(BOLD_MONO, SIZE, "b")
    step, content = plain.width("M"), []
    width = 2 * EDGE + step * COLUMNS
    height = 2 * EDGE + LINE * len(text) - (LINE - SIZE)
    content.append(f'<rect class="page" x=".5" y=".5" width="{width - 1:.1f}" ')
    content[0] += f'height="{height - 1:.1f}" rx="8"/>'
    for row, line in enumerate(text):
        y, column = EDGE + SIZE * 0.8 + LINE * row, 0
        for piece in line.divide(sorted({0, len(line), *edges(line)})):
            if piece.plain.strip():
                style = piece.spans[0].style if piece.spans else ""
                font = bold if "bold" in str(style) else plain
                content.append(font.draw(EDGE + step * column, y, piece.plain, look(str(style))))
            column += len(piece.plain)
    title = "The output of outlast demo: " + " / ".join(line.plain.strip() for line in text)
    return picture(width, height, title, LIGHT, DARK, "\n".join(content), plain, bold)


def edges(line: Text) -> Iterator[int]:
    """Where a line's look may change."""
    for span in line.spans:
        yield from (span.start, span.end)


def look(style: str) -> str:
    """The class of a rich style."""
    found = re.search(r"color\((\d)\)", style)
    if "dim" in style or (found and found[1] in "78"):
        return "dim"
    return COLOURS.get(found[1], "plain") if found else "plain"


if __name__ == "__main__":
    main()
