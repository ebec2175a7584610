"""Draws the pictures of the report's page, docs/report-*.png, as a browser has it.

    python tools/page_pictures.py

The job is made up (tests/report_story.py), so that each part of the page has something to show and
the pictures change with the page alone. Wants Chromium; each picture stays below ``MOST_BYTES``.
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path
from typing import Final

from PIL import Image

ROOT: Final = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from browser import BrowserPage  # noqa: E402
from outlast.report.page import page  # noqa: E402
from report_story import PRICES, story, write_story  # noqa: E402

MOST_BYTES: Final = 150_000
SHOWN: Final = {
    "report-light": (1100, 1500, "light"),
    "report-dark": (1100, 1500, "dark"),
    "report-phone": (390, 1500, "light"),
}


def main() -> None:
    """Draw each."""
    with tempfile.TemporaryDirectory() as place, BrowserPage() as browser:
        job = Path(place) / "job"
        write_story(job)
        path = job / "report.html"
        path.write_text(page(story(), job, prices=PRICES), encoding="utf-8")
        for name, (width, height, scheme) in SHOWN.items():
            browser.show(width=width, height=height, scheme=scheme)
            browser.open(path.as_uri())
            few = Image.open(io.BytesIO(browser.picture())).convert("RGB")
            few = few.quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
            data = io.BytesIO()
            few.save(data, "PNG", optimize=True)
            size = data.tell()
            if size > MOST_BYTES:
                raise SystemExit(f"{name}: {size:,} bytes are more than {MOST_BYTES:,}")
            (ROOT / "docs" / f"{name}.png").write_bytes(data.getvalue())
            sys.stdout.write(f"docs/{name}.png: {size:,} bytes\n")


if __name__ == "__main__":
    main()
