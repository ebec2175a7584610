"""Draws docs/report-*.png and docs/compare.png: the report's pages as a browser has them.

    python tools/page_pictures.py

The jobs are made up (tests/report_story.py), so that each part of a page has something to show and
the pictures change with the pages alone. Wants Chromium; each stays below ``MOST_BYTES``.
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
from outlast import units  # noqa: E402
from outlast.ledger.file import read_events  # noqa: E402
from outlast.ledger.job import read_job  # noqa: E402
from outlast.prices import Prices, parse_prices  # noqa: E402
from outlast.report.compare import compared, furthest_step, names_of  # noqa: E402
from outlast.report.compare_page import compare_page  # noqa: E402
from outlast.report.page import page  # noqa: E402
from report_story import PRICES, START_T, story, write_stories, write_story  # noqa: E402

MOST_BYTES: Final = 150_000
SOLD: Final = ("spot", "on_demand")
SHOWN: Final = {
    "report-light": (1100, 1500, "light"),
    "report-dark": (1100, 1500, "dark"),
    "report-phone": (390, 1500, "light"),
    "compare": (1100, 1500, "light"),
}


def _comparison(root: Path) -> str:
    """Three made-up jobs; the last one's newest event is two minutes old."""
    places = write_stories(root)
    ledgers = [list(read_events(place)) for place in places]
    same_step = min(map(furthest_step, ledgers))
    jobs = []
    for name, place, events in zip(names_of(places), places, ledgers, strict=True):
        job = read_job(place)
        prices = [parse_prices(job.settings.get(f"price.{one}", "")) for one in SOLD]
        is_over = events[-1].event == "job_finished"
        jobs.append(
            compared(
                *(name, place, job, events),
                same_step=same_step,
                age_s=None if is_over else 120.0,
                prices=Prices(spot=prices[0], on_demand=prices[1]),
            )
        )
    return compare_page(jobs, {}, written=units.when(START_T + 86_400))


def main() -> None:
    """Draw each."""
    with tempfile.TemporaryDirectory() as place, BrowserPage() as browser:
        job = Path(place) / "job"
        write_story(job)
        path = job / "report.html"
        path.write_text(page(story(), job, prices=PRICES), encoding="utf-8")
        beside = Path(place) / "compare.html"
        beside.write_text(_comparison(Path(place)), encoding="utf-8")
        for name, (width, height, scheme) in SHOWN.items():
            browser.show(width=width, height=height, scheme=scheme)
            browser.open((beside if name == "compare" else path).as_uri())
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
