"""The report and the live page as a browser has them: for a mouse, a keyboard, a phone, paper."""

import http.client
import shutil

import pytest
from click.testing import CliRunner
from floor import TRAIN, Job, free_port, until

from browser import BrowserPage, axe_path, chromium
from outlast.cli.report import command
from outlast.report.page import page
from report_story import PRICES, START_T, large_job, story, write_stories, write_story

SEEN = [(1100, "light"), (1100, "dark"), (390, "light"), (390, "dark")]
MOST_BYTES = 300_000
MOST_SHEETS = 15  # with every table and all evidence open
# A path of a job that is somewhere else, at the end of whatever is written below one another.
LONG_PATH = """for (const one of document.querySelectorAll('p, dd, summary, main li'))
  one.append(' ' + '/x'.repeat(60))"""
pytestmark = pytest.mark.skipif(
    chromium() is None or axe_path() is None,
    reason="Chromium (apt install chromium) or axe-core (make test installs it) is not here",
)


@pytest.fixture(name="browser", scope="module")
def _browser():
    with BrowserPage() as found:
        yield found


@pytest.fixture(name="report", scope="module")
def _report(tmp_path_factory):
    """The page of a job with every kind of trouble, in a file; and the same job still running."""
    job = tmp_path_factory.mktemp("story") / "job"
    write_story(job)
    path = job / "report.html"
    path.write_text(page(story(), job, prices=PRICES), encoding="utf-8")
    assert path.stat().st_size < MOST_BYTES
    return path.as_uri()


def look(browser, url, *, host=""):
    """Open a page as each reader has it, and check all that can be checked of any page."""
    browser.errors.clear()
    browser.requested.clear()
    for width, scheme in SEEN:
        browser.show(width=width, scheme=scheme)
        browser.open(url)
        browser.run("for (const one of document.querySelectorAll('details')) one.open = true")
        wide = browser.run("document.documentElement.scrollWidth")
        assert wide <= width, f"it is {wide} px wide in {width} px"
        bad = [one for one in browser.violations() if one.impact in ("serious", "critical")]
        assert not bad, (width, scheme)
        browser.run(LONG_PATH)
        wide = browser.run("document.documentElement.scrollWidth")
        assert wide <= width, f"with a long path it is {wide} px wide in {width} px"
    browser.open(url)
    assert not browser.unreached_by_keyboard()
    assert not browser.errors
    foreign = [one for one in browser.requested if not one.startswith(host or url)]
    assert not foreign


def test_the_report_of_a_job_with_every_trouble(browser, report):
    look(browser, report)
    words = browser.run("document.body.innerText")
    slow = "rank 11 on node-2: slow, its steps 62 % longer than the others'"
    for expected in ("memory", "hang", "node-3", "Predicted and measured", slow):
        assert expected in words
    colours = browser.run(
        "[...new Set([...document.querySelectorAll('#speed path')]"
        ".map(one => getComputedStyle(one).stroke))].length"
    )
    assert colours == 2  # the slow rank's, and all others'
    assert 1 < browser.printed_pages() <= MOST_SHEETS


# Words of a picture that begin before it does, or end behind it.
CUT_OFF = """[...document.querySelectorAll("svg text")].filter(one => {
  const words = one.getBoundingClientRect(), all = one.closest("svg").getBoundingClientRect();
  return words.left < all.left - 0.5 || words.right > all.right + 0.5
}).map(one => one.textContent)"""


# Tables in sight that are wider than the page shows of them.
WIDE = """[...document.querySelectorAll("main table")].filter(one => !one.closest("details"))
  .filter(one => one.scrollWidth > one.parentElement.clientWidth + 1)
  .map(one => one.textContent.slice(0, 40))"""


def test_no_words_of_a_picture_nor_a_table_in_sight_are_cut_off(browser, report, tmp_path):
    jobs = map(str, write_stories(tmp_path))
    path = tmp_path / "compare.html"
    result = CliRunner().invoke(command, [*jobs, "--compare", "-o", str(path)])
    assert result.exit_code == 0, result.output
    for url in (report, path.as_uri()):
        for width in (1100, 390):
            browser.show(width=width, scheme="light")
            browser.open(url)
            assert browser.run("document.querySelectorAll('svg text').length") > 10
            assert browser.run(CUT_OFF) == []
            assert browser.run("document.querySelectorAll('main .narrow').length") > 0
            assert browser.run(WIDE) == []


def test_three_jobs_and_twenty_four_compared(browser, tmp_path):
    jobs = write_stories(tmp_path)
    more = [tmp_path / f"copy-{n}" / "llama-sft" for n in range(21)]
    for place in more:
        shutil.copytree(jobs[0], place)
    for given in (jobs, [*jobs, *more]):
        path = tmp_path / f"compare-{len(given)}.html"
        result = CliRunner().invoke(command, [*map(str, given), "--compare", "-o", str(path)])
        assert result.exit_code == 0, result.output
        assert path.stat().st_size < MOST_BYTES
        look(browser, path.as_uri())
        words = browser.run("document.body.innerText")
        for expected in (f"{len(given)} jobs compared", "on-demand/llama-sft", "checkpoint.every"):
            assert expected in words
        assert 1 < browser.printed_pages() <= MOST_SHEETS


def test_a_job_of_hundreds_of_ranks(browser, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(page(large_job(64)), encoding="utf-8")
    assert path.stat().st_size < MOST_BYTES
    look(browser, path.as_uri())
    browser.open(path.as_uri())
    browser.run("document.querySelectorAll('#speed summary')[1].focus()")
    browser.press("Enter")
    assert "ip-10-0-3-4.compute.internal" in browser.run("document.body.innerText")


def test_a_job_that_has_hardly_begun(browser, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(page(story()[:2], now=START_T + 60), encoding="utf-8")
    look(browser, path.as_uri())


def test_the_live_page_of_a_running_job_renews_itself_and_keeps_the_readers_place(
    browser, floor, tmp_path
):
    port, job = free_port(), Job(tmp_path / "job", 2)
    process = floor.outlast(
        *("run", "--nproc-per-node", 2, "--dir", job.directory, TRAIN, job.records, 100_000),
        *("--light", "--every", "20 steps", "--pause", "0.02"),
        env={"OUTLAST_METRICS_PORT": port},
    )
    until(lambda: "checkpoint" in live(port), "the live page with a checkpoint", running=process)
    url = f"http://127.0.0.1:{port}/"
    look(browser, url)
    opened = "document.querySelector('#checkpoints details').open"
    assert browser.run(opened)  # by the keyboard, just now
    browser.run("document.querySelector('#checkpoints summary').focus()")
    steps = "document.querySelectorAll('.tiles dd')[2].textContent"
    first = browser.run(steps)
    until(lambda: browser.run(steps) != first, "newer numbers", running=process, every_s=0.2)
    assert browser.run(opened)
    assert browser.run("document.activeElement.closest('#checkpoints') !== null")
    browser.run("document.getElementById('hold').click()")
    assert browser.run("document.getElementById('hold').getAttribute('aria-pressed')") == "true"
    process.kill()
    browser.run("document.getElementById('hold').click()")
    fresh = "document.getElementById('fresh').textContent"
    until(lambda: "the job has ended" in browser.run(fresh), "word of the end", every_s=0.2)


def live(port):
    """The live page's text; "" while nobody answers."""
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        line.request("GET", "/")
        return line.getresponse().read().decode()
    except OSError:
        return ""
    finally:
        line.close()
