"""What a watcher tells of its workers' steps."""

import types
from array import array

import msgspec
import pytest

from outlast.attempt.beat import BEATS_VARIABLE, Beat, BeatReader, Timing
from outlast.health.watched import (
    EVERY_S,
    KEPT,
    LEAST,
    LINE_S,
    OVERLAP,
    Begin,
    Pace,
    RankSteps,
    WatchedWorker,
    interval_s,
    stride,
    telling_s,
    told,
)
from outlast.launch.health import Health
from outlast.ledger.file import Ledger, read_events
from outlast.report.series import rank_samples


class Watched(types.SimpleNamespace):
    @property
    def workers(self):
        return self.begin.workers


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    """Two workers' beats, and what a watcher sees of them."""
    monkeypatch.setenv(BEATS_VARIABLE, str(tmp_path))
    beats = []
    for rank in range(2):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        beats.append(Beat())
        beats[-1].kind(40 + rank)
    workers = tuple(WatchedWorker(local_rank=rank, rank=8 + rank, pid=1) for rank in range(2))
    begin = Begin(attempt=3, node="b", beats=str(tmp_path), world_size=10, workers=workers)
    heard = {8 + rank: BeatReader(tmp_path, rank) for rank in range(2)}
    return beats, Watched(begin=begin, heard=heard)


QUICK_S = OVERLAP * EVERY_S / KEPT


def timing(step, step_s=QUICK_S):
    return Timing(step, float(step), step_s, step_s / 2, step_s / 4, 0.0, 0.0)


def test_the_newest_steps_are_told_and_told_again(ranks):
    beats, watched = ranks
    pace = Pace()
    assert list(pace.begin(watched)) == []
    assert list(pace.look(1.0)) == []
    for step in range(1, 101):
        beats[0].timing(*timing(step))
    beats[1].timing(*timing(100))
    (word,) = pace.look(1.0 + EVERY_S)
    assert (word.attempt, word.node) == (3, "b")
    assert [(one.ranks, one.kinds) for one in word.ranks] == [((8,), (40,)), ((9,), (41,))]
    assert array("q", word.ranks[0].steps).tolist() == list(range(101 - KEPT, 101))
    seconds = [QUICK_S / 2, QUICK_S / 4, 0, 0]
    assert array("f", word.ranks[1].seconds).tolist() == pytest.approx(seconds)
    assert list(pace.look(1.1 + EVERY_S)) == []  # not time yet
    assert list(pace.look(2.0)) == []  # no news
    beats[0].timing(*timing(101))
    (word,) = pace.look(3.0)
    assert array("q", word.ranks[0].steps).tolist() == list(range(102 - KEPT, 102))
    assert array("q", word.ranks[1].steps).tolist() == [100]


def test_ranks_that_tell_the_same_steps_do_so_together(ranks):
    beats, watched = ranks
    pace = Pace()
    pace.begin(watched)
    for step in (1, 2):
        for place, beat in enumerate(beats):
            beat.timing(*timing(step, step_s=0.5 + place))
    (word,) = pace.look(1.0)
    (both,) = word.ranks
    assert (both.ranks, both.kinds) == ((8, 9), (40, 41))
    assert array("q", both.steps).tolist() == [1, 2]
    rows = [0.25, 0.125, 0, 0, 0.25, 0.125, 0, 0, 0.75, 0.375, 0, 0, 0.75, 0.375, 0, 0]
    assert array("f", both.seconds).tolist() == rows


@pytest.mark.parametrize(
    ("step_s", "word_s", "count"), [(1.0, 5.0, LEAST), (0.5, 10.0, 60), (0.001, 5.0, 59)], ids=str
)
def test_a_word_is_no_longer_than_three_words_time_needs(step_s, word_s, count):
    read = [timing(step, step_s) for step in range(1, 20001)]
    assert len(told(read, word_s)) == count


def test_of_another_attempt_nothing_is_remembered(ranks):
    beats, watched = ranks
    pace = Pace()
    pace.begin(watched)
    beats[0].timing(*timing(1))
    assert list(pace.look(1.0))
    pace.begin(Watched(begin=watched.begin, heard={}))
    assert list(pace.look(2.0)) == []


def test_many_machines_speak_less_often():
    assert interval_s(1) == interval_s(50) == EVERY_S
    assert interval_s(1000) == 5.0


@pytest.mark.parametrize(
    ("step_s", "word_s", "each"),
    [(0.02, 0.25, 1), (0.5, 5.0, 1), (0.005, 0.25, 4), (0.02, 5.0, 16)],
    ids=str,
)
def test_short_steps_are_told_of_with_gaps_that_nest(step_s, word_s, each):
    assert stride(step_s, word_s) == each


def lines(pace, now_s):
    return [one for one in pace.look(now_s) if isinstance(one, RankSteps)]


def test_what_all_steps_were_spent_on_is_told_for_the_ledger(ranks):
    beats, watched = ranks
    pace = Pace()
    pace.begin(watched)
    assert lines(pace, 100.0) == []
    for step in range(1, 8):
        spent = (0.1, 0.2, 0.3, 0.0) if step != 5 else (9.0, 0.0, 0.0, 0.0)
        beats[1].timing(step, float(step), sum(spent), *spent)
    assert lines(pace, 101.0) == []  # not yet
    (line,) = lines(pace, 105.0)
    assert (line.attempt, line.seconds) == (3, 5.0)
    assert (line.ranks, line.kinds, line.num) == ((9,), (41,), (7,))
    found = (line.step_s, line.own_s, line.wait_s, line.data_s, line.longest_s)
    assert [one for (one,) in found] == pytest.approx([0.6, 0.1, 0.2, 0.3, 9.0])
    assert lines(pace, 300.0) == []  # nobody has made a step since
    for beat in beats:
        beat.timing(*timing(8, 0.5))
    (line,) = lines(pace, 301.0)
    assert (line.seconds, line.ranks, line.num) == (196.0, (8, 9), (1, 1))
    assert line.longest_s == pytest.approx((0.5, 0.5))


def test_of_a_worker_alone_the_ledger_hears_and_nobody_compares(ranks):
    beats, watched = ranks
    watched.begin = msgspec.structs.replace(watched.begin, world_size=1)
    watched.heard.pop(9)
    pace = Pace()
    pace.begin(watched)
    said = []
    for look in range(4 * 6):
        beats[0].timing(*timing(look + 1, 0.5))
        said += pace.look(look * EVERY_S)
    (line,) = said
    assert isinstance(line, RankSteps)
    assert (line.ranks, line.num, line.step_s) == ((8,), (21,), (0.5,))


def test_steps_that_are_not_remembered_any_more_are_counted(ranks):
    beats, watched = ranks
    pace = Pace()
    pace.begin(watched)
    beats[0].timing(*timing(1, 7.0))
    assert lines(pace, 0.0) == []
    for look in range(20):
        for step in range(2 + look * 250, 252 + look * 250):
            beats[0].timing(*timing(step))
        assert lines(pace, 1.0 + look / 10) == [] or look == 19
    beats[0].timing(*timing(6000))
    (line,) = lines(pace, 9.0)
    assert line.num[0] > 1000
    assert line.step_s == pytest.approx((QUICK_S,))
    assert line.longest_s == pytest.approx((7.0,))


@pytest.mark.parametrize(
    ("machines", "each", "attempt_h", "most"),
    [(1, 8, 720, 3000), (8, 8, 720, 25_000), (128, 8, 720, 160_000), (512, 8, 3, 700_000)],
    ids=str,
)
def test_a_month_gives_no_ledger_of_a_million_lines(machines, each, attempt_h, most):
    num, now_s, began_s, line_s = 0, 0.0, 0.0, 0.0
    month_s, world_size = 30 * 24 * 3600.0, machines * each
    while now_s < month_s:
        now_s = line_s + telling_s(world_size, line_s - began_s)
        if now_s - began_s > attempt_h * 3600:
            began_s = line_s = began_s + attempt_h * 3600
            continue
        num, line_s = num + 1, now_s
    assert num > 100  # and it does tell
    assert num * machines < most


def test_the_first_lines_come_sooner(ranks):
    beats, watched = ranks
    pace = Pace()
    pace.begin(watched)
    told_s = []
    for look in range(4 * 200):
        beats[0].timing(*timing(look + 1))
        told_s += [look * EVERY_S for _ in lines(pace, look * EVERY_S)]
    assert told_s == [5, 10, 20, 40, 80, 80 + LINE_S]


def test_a_line_of_another_attempt_is_not_written_down(tmp_path):
    ledger = Ledger(tmp_path, job="j", attempt=3)
    health = Health(ledger, tmp_path / "log", "stem")
    figures = dict.fromkeys(("step_s", "own_s", "wait_s", "data_s"), (0.123456, 1.0))
    told = {"seconds": 5.0001234, "ranks": (8, 9), "num": (2, 2), "longest_s": (2.0, 3.0)}
    line = RankSteps(attempt=3, kinds=(7, 7), **told, **figures)
    health._pass_on(line)  # nobody is watched
    health.begin(Begin(attempt=3, node="b", beats="", world_size=2, workers=()))
    health._pass_on(msgspec.structs.replace(line, attempt=2))
    health._pass_on(line)
    health._pass_on(msgspec.structs.replace(line, kinds=(7, 8)))
    health.end()
    health._pass_on(line)
    ledger.close()
    first, second = read_events(tmp_path)
    assert first.event == "rank_steps"
    assert first.fields == {
        "seconds": 5.0,
        "ranks": [8, 9],
        "kinds": [7],
        "num": [2, 2],
        **{key: [0.123, 1.0] for key in ("step_s", "own_s", "wait_s", "data_s")},
        "longest_s": [2.0, 3.0],
    }
    assert second["kinds"] == [7, 8]
    assert [one.own_s for one in rank_samples(first)] == [0.123, 1.0]
