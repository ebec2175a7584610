"""What a watcher tells of its workers' steps."""

import types
from array import array

import pytest

from outlast.attempt.beat import VARIABLE, Beat, Heard, Timing
from outlast.health.messages import Begin, Worker
from outlast.health.pace import EVERY_S, KEPT, Pace, interval_s, stride


class Watched(types.SimpleNamespace):
    @property
    def workers(self):
        return self.begin.workers


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    """Two workers' beats, and what a watcher sees of them."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    beats = []
    for rank in range(2):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        beats.append(Beat())
        beats[-1].kind(40 + rank)
    workers = tuple(Worker(local_rank=rank, rank=8 + rank, pid=1) for rank in range(2))
    begin = Begin(attempt=3, node="b", beats=str(tmp_path), world_size=10, workers=workers)
    heard = {8 + rank: Heard(tmp_path, rank) for rank in range(2)}
    return beats, Watched(begin=begin, heard=heard)


def timing(step, step_s=0.02):
    return Timing(step, float(step), step_s, step_s / 2, step_s / 4, 0.0, 0.0)


def test_the_newest_steps_are_told_and_told_again(ranks):
    beats, watched = ranks
    pace = Pace()
    assert list(pace.begin(watched)) == []
    assert list(pace.look(1.0)) == []
    for step in range(1, 101):
        beats[0].timing(timing(step))
    beats[1].timing(timing(100))
    (told,) = pace.look(1.0 + EVERY_S)
    assert (told.attempt, told.node) == (3, "b")
    assert [(one.rank, one.kind) for one in told.ranks] == [(8, 40), (9, 41)]
    assert array("q", told.ranks[0].steps).tolist() == list(range(101 - KEPT, 101))
    assert array("f", told.ranks[1].seconds).tolist() == pytest.approx([0.01, 0.005, 0, 0])
    assert list(pace.look(1.1 + EVERY_S)) == []  # not time yet
    assert list(pace.look(9.0)) == []  # no news
    beats[0].timing(timing(101))
    (told,) = pace.look(10.0)
    assert array("q", told.ranks[0].steps).tolist() == list(range(102 - KEPT, 102))
    assert array("q", told.ranks[1].steps).tolist() == [100]


def test_of_another_attempt_nothing_is_remembered(ranks):
    beats, watched = ranks
    pace = Pace()
    pace.begin(watched)
    beats[0].timing(timing(1))
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
    read = [timing(step, step_s) for step in range(1, 50)]
    assert stride(read, word_s) == each
