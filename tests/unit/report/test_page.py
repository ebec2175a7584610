"""The page of a job: whole, small, no word to anybody else; nothing in it is believed."""

import html.parser
import re

import pytest
from click.testing import CliRunner
from unit_prices import priced

from outlast.cli.report import command
from outlast.ledger.events import Event
from outlast.report import plot, series
from outlast.report.page import EVIDENCE_BYTES, page
from outlast.report.plot import Span

VOID = {"meta", "link", "line", "circle", "polyline"}


class Reader(html.parser.HTMLParser):
    """What of a page is open, named and asked for elsewhere."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.asked, self.words = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.asked += [given[name] for name in ("src", "href", "action") if given.get(name)]
        self.ids += [given["id"]] if "id" in given else []
        assert not [name for name in given if name.startswith("on")], "a script"
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def told(t, name, attempt=1, rank=0, node="machine0", **fields):
    head = {"job": "abc", "attempt": attempt, "node": node, "rank": rank, "event": name}
    return Event(t=1e9 + t, mono=t, **head, fields=fields)


def a_job(error="MemoryError", num_losses=1):
    events = [
        told(0, "job_started", attempt=0, rank=None, age_s=0.0),
        told(1, "attempt_formed", world_size=2, nodes=1, rank=None),
        told(2, "resumed", step=0, source=""),
    ]
    t = 2.0
    for number in range(num_losses):
        for step in range(10 * number, 10 * number + 10):
            t += 1
            scalars = {"loss": 3.0 - step / 100}
            events.append(told(t, "step", number + 1, step=step + 1, seconds=1.0, scalars=scalars))
        fields = {"durable_s": 0.2, "bytes": 1000, "tier": "local"}
        events.append(told(t, "commit", number + 1, step=10 * number + 10, **fields))
        lost = {"step": 10 * number + 10, "beat_t": 1e9 + t, "error": error, "kind": "memory"}
        events.append(told(t + 0.5, "worker_lost", number + 1, 1, pid=1, exit_code=1, **lost))
        events.append(told(t + 0.6, "restart", number + 1, None, reason=f"rank 1: {error}"))
        formed = {"world_size": 2, "nodes": 1}
        events.append(told(t + 1, "attempt_formed", number + 2, None, **formed))
        events.append(
            told(t + 2, "resumed", number + 2, step=10 * number + 10, source="from local")
        )
        t += 2
    last = num_losses + 1
    events.append(told(t + 1, "step", last, step=10 * num_losses + 1, seconds=1.0, scalars={}))
    events.append(told(t + 2, "job_finished", last, None, exit_code=0, reason="done"))
    return events


def whole(text):
    """A page that is closed, asks nobody for anything, and whose links lead somewhere."""
    read = Reader(text)
    assert not read.open
    assert len(read.ids) == len(set(read.ids))
    assert {one for one in read.asked if not one.startswith("#")} == {"data:,"}
    assert {one[1:] for one in read.asked if one.startswith("#")} <= set(read.ids)
    assert "<script" not in text
    assert not re.search(r"url\(|@import|https?://", text)
    return read


def test_it_is_whole_and_asks_nobody():
    text = page(a_job(), now=None, prices=priced(2.0, 6.0))
    read = whole(text)
    words = " ".join(" ".join(read.words).split())
    for expected in ("finished", "worker lost", "goodput", "loss", "newest checkpoint", "step 10"):
        assert expected in words, expected
    assert text.count("<svg") == 3  # loss, checkpoints, steps: each with its table
    assert text.count("<details>") >= 4


def test_the_ledger_is_escaped():
    text = page(a_job(error="<script>alert('x')</script>\"><img src=http://x onerror=y>"))
    read = Reader(text)
    assert "<script" not in text
    assert {one for one in read.asked if not one.startswith("#")} == {"data:,"}


@pytest.mark.parametrize("events", [[], a_job()[:1], a_job()[:2], a_job()[:3], a_job()[5:9]])
def test_a_job_that_has_hardly_begun(events):
    assert not Reader(page(events, now=1e9 + 60)).open


def test_it_stays_small_whatever_happened():
    long = "x" * 5000
    text = page(a_job(error=long, num_losses=400))
    assert len(text.encode()) < 300_000
    assert "340 earlier ones" in text
    assert len(re.findall(r"<article", text)) == 60


def test_stacks_are_read_from_below_the_job_alone(tmp_path):
    job, outside = tmp_path / "job", tmp_path / "outside"
    for folder in (job / "hangs" / "one", outside):
        folder.mkdir(parents=True)
        (folder / "rank-1.txt").write_text(f"stack of {folder.name}\n" + "y" * EVIDENCE_BYTES)
    (job / "hangs" / "link").symlink_to(outside)
    for place, is_there in (("hangs/one", True), ("../outside", False), ("hangs/link", False)):
        hang = told(
            5, "hang", ranks=[1], nodes=["machine0"], sentence="s", stacks=place, beat_t=1e9
        )
        text = page([*a_job()[:4], hang], job, now=1e9 + 9)
        assert ("stack of" in text) is is_there, place


def test_it_refreshes_if_asked():
    live = page(a_job(error="</script><b>"), refresh_s=5)
    assert "setInterval(renew, 5 * 1000)" in live
    assert live.count("<script>") == live.count("</script>") == 1
    assert "http-equiv" not in page(a_job())


def test_of_a_step_that_was_made_again_the_last_counts():
    events = [told(n, "step", step=3, seconds=1.0, scalars={"loss": float(n)}) for n in range(3)]
    assert series.scalars(events) == {"loss": [(3, 2.0)]}


def test_a_spike_survives_thinning():
    points = [(float(n), 1.0 if n != 777 else 50.0) for n in range(5000)]
    kept = series.thinned(points)
    assert len(kept) <= series.POINTS + 2
    assert (777.0, 50.0) in kept
    assert kept == sorted(kept)


def test_failures_are_counted_where_they_were():
    hang = told(1, "hang", node="a", nodes=["b", "c"])
    lost = [told(n, "worker_lost", node="b") for n in (2, 3)]
    counts = series.failures_by_machine([hang, *lost])
    assert list(counts.items()) == [("b", {"hang": 1, "worker lost": 2}), ("c", {"hang": 1})]


def test_axes_have_round_numbers():
    assert plot.rounds(Span(0.0, 1.0)) == [0, 0.2, 0.4, 0.6000000000000001, 0.8, 1.0]
    assert [at for at, _ in plot.step_ticks(Span(0, 3))] == [0, 1, 2, 3]
    ticks = plot.time_ticks(Span(1e9, 1e9 + 3600))
    assert 3 <= len(ticks) <= 7
    assert all(at % 600 == 0 for at, _ in ticks)
    assert (
        plot.plot([("a", [])], label="", x_label="", x_ticks=plot.step_ticks, y_words=str) is None
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-o", "report.pdf"], "report.pdf is no page: outlast report -o report.html"),
        (["--json", "-o", "r.html"], "--json is for standard output"),
    ],
)
def test_the_command_says_what_is_wrong(words, said):
    result = CliRunner().invoke(command, words)
    assert result.exit_code != 0
    assert said in str(result.exception)
