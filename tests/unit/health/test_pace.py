"""What a watcher tells of its workers' steps."""

import types
from array import array

import pytest

from outlast.attempt.beat import BEATS_VARIABLE, Beat, BeatReader, Timing
from outlast.health.watched import (
    EVERY_S,
    KEPT,
    LEAST,
    OVERLAP,
    Begin,
    Pace,
    WatchedWorker,
    interval_s,
    stride,
    told,
)


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
    assert list(pace.look(9.0)) == []  # no news
    beats[0].timing(*timing(101))
    (word,) = pace.look(10.0)
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
