"""What people are told of a made-up job, as its ledger grows, and what nobody is told twice."""

import msgspec
import pytest
from unit_prices import priced

from outlast.config import SEVERITIES
from outlast.health.exporter import CadenceSetting
from outlast.ledger.incidents import incidents
from outlast.metrics.folded import JobFold
from outlast.metrics.news import STANDS_S, NewsFold, NewsMarks, letter
from report_story import START_T, story

INFO, WARNING, CRITICAL = SEVERITIES
END_T = START_T + 10**6


class Told:
    """An exporter's two folds, fed as it does it."""

    def __init__(self, price=""):
        self.fold = JobFold(CadenceSetting())
        self.news = NewsFold(self.fold, priced(price))

    def take(self, events, now=END_T):
        self.news.take(self.fold.take(events, now))
        return self

    def beyond(self, marks=None, now=END_T):
        return self.news.beyond(marks or NewsMarks(), now)


def until(name, number=0):
    """The story up to the nth event of this name, that one included."""
    events = story()
    places = [place for place, event in enumerate(events) if event.event == name]
    return events[: places[number] + 1]


def test_the_whole_story_is_told_once():
    told = Told(price=12.0).take(story())
    news = told.beyond()
    assert [(one.kind, one.number) for one in news if one.kind == "over"] == [
        ("over", 0),
        ("over", 1),
        ("over", 2),
    ]
    killed, hang, drain = [one for one in news if one.kind == "over"]
    assert "rank 19 failed (torch.OutOfMemoryError" in killed.what
    assert killed.more[0].startswith("on node-3; back after ")
    assert "resumed from step 2400, 37 steps done again" in killed.more[0]
    assert hang.more[0].startswith("on node-4; back after ")
    assert drain.what.startswith("aws says terminate in 120 s")
    assert drain.more[0].startswith("back after ")  # nobody was lost
    assert " of 4 machines, " in killed.more[1]
    assert killed.more[1].endswith(" at 12 per machine and hour")
    words = [one.what for one in news if one.kind == "other"]
    assert "rank 11 on node-2 computes 1.62 times as long as the others" in words[0]
    assert "as quick as the others again" in words[1]
    assert words[2:] == [
        "the job has stopped after a notice; start it again",
        "the job has finished",
    ]
    assert news[-1].is_end
    assert told.news.has_ended
    everything = NewsMarks().with_told(news)
    assert everything == msgspec.structs.replace(told.news.marks(END_T), stands=0)
    assert told.beyond(everything) == []


def test_what_an_incident_costs_is_what_the_metrics_say():
    told = Told(price=3600.0).take(story())
    counted = told.fold.tally(END_T).values["outlast_lost_seconds"]
    for number, one in enumerate(incidents(story())):
        (news,) = [two for two in told.beyond() if (two.kind, two.number) == ("over", number)]
        money = float(news.more[1].partition("machines, ")[2].split(" ")[0].replace(",", ""))
        paid_s = counted[one.kind,] - one.away_s  # nobody pays while nobody has started the job
        assert money == pytest.approx(4 * paid_s, abs=0.01)


def test_an_incident_is_news_when_it_begins_when_it_stands_and_when_it_is_over():
    events = until("worker_lost")
    lost_t = events[-1].t
    told = Told().take(events)
    (began,) = told.beyond(now=lost_t + 1)
    assert (began.kind, began.severity, began.more) == (
        "began",
        WARNING,
        ("on node-3; not back yet",),
    )
    marks = NewsMarks().with_told([began])
    assert told.beyond(marks, now=lost_t + 1) == []
    (stands,) = told.beyond(marks, now=lost_t + STANDS_S + 1)
    assert (stands.kind, stands.severity) == ("stands", CRITICAL)
    assert "training has stood still for 10 min 01 s: rank 19" in stands.what
    marks = marks.with_told([stands])
    assert told.beyond(marks, now=lost_t + 2 * STANDS_S) == []
    told.take(story()[len(events) :])
    assert [one.number for one in told.beyond(marks) if one.kind == "over"] == [0, 1, 2]


def test_how_the_ledger_is_cut_makes_no_difference():
    whole, bit_by_bit, events = Told().take(story()), Told(), story()
    for at in range(0, len(events), 7):
        bit_by_bit.take(events[at : at + 7], events[min(at + 6, len(events) - 1)].t)
    bit_by_bit.take([])
    assert bit_by_bit.beyond() == whole.beyond()


@pytest.mark.parametrize(("name", "number"), [("hang", 0), ("drained", 0), ("job_finished", 0)])
def test_what_is_past_is_what_a_reader_of_that_moment_knew(name, number):
    """As far as incidents go that are over by now: those are not told any more."""
    before = until(name, number)
    then, now = Told().take(before), Told().take(story())
    past = now.news.marks(before[-1].t + 1e-3)
    known = then.news.marks(END_T)
    assert (past.began, past.stands, past.other) == (known.began, known.stands, known.other)
    assert past.over == past.began  # one was open then
    assert now.news.marks(START_T) == NewsMarks()


def test_a_job_that_is_started_again_has_not_ended():
    told = Told().take(until("job_finished"))
    assert told.news.has_ended
    told = Told().take(until("job_started", 1))
    assert not told.news.has_ended


def test_a_letter_has_the_worst_first_and_each_in_its_place():
    news = Told().take(story()).beyond()
    found = letter(news, job="j", node="n", directory="/d")
    assert found.severity == WARNING
    assert found.title.endswith(f"(and {len(news) - 1} more)")
    assert found.body.index("rank 19") < found.body.index("rank 26")
    assert "Next: outlast report /d" in found.body
