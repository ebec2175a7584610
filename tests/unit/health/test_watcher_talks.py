"""A watcher's messages, whatever their size, and what becomes of a symptom that fails."""

import contextlib
from types import SimpleNamespace

import pytest

from outlast.health import watcher as rooms
from outlast.health.watched import Begin, Gap, Suspicion, Voice, WatchedWorker, pair
from outlast.health.watcher import HealthWatcher
from outlast.policy.hang import Activity, Frame, RankLook

BEGIN = Begin(attempt=1, node="a", beats="/nowhere", world_size=1, workers=())


@pytest.fixture
def ends():
    ours, theirs = pair()
    with ours, theirs:
        yield ours, theirs


def test_what_many_ranks_look_like_fits(ends):
    ours, theirs = ends
    place = "/a/long/path/of/an/environment/lib/python3.11/site-packages/torch/nn/modules"
    frames = tuple(Frame(f"function_{n}", f"{place}/file_{n}.py", n) for n in range(40))
    seen = tuple(
        RankLook(
            rank=rank, node="a", kind=Activity.STEP, frames=frames, recorded=(f"sum #{rank}" * 20,)
        )
        for rank in range(96)
    )
    message = Suspicion(attempt=1, seen=seen)
    assert Voice(theirs).send(message)
    assert Voice(ours).receive() == message


def test_what_cannot_be_understood_ends_the_line_and_raises_nothing(ends):
    ours, theirs = ends
    theirs.send(b"z nonsense")
    assert Voice(ours).receive() is None


class Failing:
    def __init__(self):
        self.begun = self.looked = 0
        self.fails = True

    def begin(self, watched):
        self.begun += 1
        return ()

    def look(self, now_s):
        self.looked += 1
        if self.fails:
            raise RuntimeError("can't start new thread")
        return ()

    def hear(self, message):
        return ()


def test_a_symptom_that_fails_begins_anew_and_the_agent_is_told(ends, monkeypatch):
    ours, theirs = ends
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(rooms.time, "monotonic", lambda: now.s)
    one, other = Failing(), Failing()
    other.fails = False
    watcher = HealthWatcher(theirs, [one, other])
    watcher._heard(BEGIN)
    watcher._look()
    one.fails = False
    now.s += 29.0
    watcher._look()
    assert (one.looked, other.looked) == (1, 2)
    now.s += 2.0
    watcher._look()
    assert (one.begun, one.looked) == (2, 2)
    assert (other.begun, other.looked) == (1, 3)
    heard = Voice(ours).receive()
    assert heard == Gap(
        symptom="Failing", reason="RuntimeError: can't start new thread", seconds=31.0
    )


def test_evidence_that_cannot_be_taken_is_tried_again(tmp_path, monkeypatch):
    from outlast.health import hang

    def fails(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(hang, "take", fails)
    monkeypatch.setattr(hang, "BETWEEN_S", 0.0)
    worker = WatchedWorker(local_rank=0, rank=0, pid=1)
    begin = Begin(attempt=1, node="a", beats=str(tmp_path), world_size=1, workers=(worker,))
    gathering = hang.Gathering(begin, None)
    gathering._thread.join(10)
    assert gathering.is_done
    assert gathering.found == {}
    watch = hang.HangWatch()
    with contextlib.closing(hang.Watched(begin)) as watched:
        watch.begin(watched)
        watch._watched, watch._gathering = watched, gathering
        assert list(watch._gathered(1e9)) == []
