"""What a watcher makes of what workers say: kinds of things, gaps, and when to suspect."""

from types import SimpleNamespace

import pytest

from outlast.attempt.beat import Beat, BeatSeen, Phase, PhaseSeen, PulseSeen, UpdatesSeen
from outlast.health.hang import HangWatch, Track
from outlast.health.watched import Ask, Begin, Learned, Watched, WatchedWorker
from outlast.policy.hang import Activity, HangSettings

WORKER = WatchedWorker(local_rank=0, rank=5, pid=1)


def said(step=None, phase=None, since=1.0, updates=None, begun=-1, evaluates=False, began=10):
    return SimpleNamespace(
        began_step=None if step is None else began,
        began_updates=None if updates is None else began,
        beat=None if step is None else BeatSeen(step, 1.0),
        phase=None if phase is None else PhaseSeen(phase, since),
        updates=None if updates is None else UpdatesSeen(updates, 1.0),
        pulse=PulseSeen(1.0, begun, -1, evaluates),
    )


@pytest.mark.parametrize(
    ("what", "kind"),
    [
        (said(), Activity.START),
        (said(step=12, phase=Phase.STEPPING), Activity.START),  # the third of an attempt
        (said(step=13, phase=Phase.STEPPING), Activity.STEP),  # those before went by unseen
        (said(updates=12), Activity.START),
        (said(updates=13), Activity.STEP),
        (said(step=12, phase=Phase.OUTSIDE), Activity.OUTSIDE),
    ],
    ids=["silent", "fresh", "late", "plain", "plain-late", "outside"],
)
def test_the_first_look(what, kind):
    track = Track(WORKER, 0.0)
    track.look(what, 1.0)
    assert track.kind is kind


@pytest.mark.parametrize(
    ("what", "kind"),
    [
        (said(step=13, phase=Phase.STEPPING), Activity.STEP),
        (said(step=13, phase=Phase.LOADING), Activity.STEP),
        (said(step=13, phase=Phase.SAVING), Activity.SAVE),
        (said(step=13, phase=Phase.STEPPING, evaluates=True), Activity.EVALUATE),
        (said(step=13, phase=Phase.LOADING, evaluates=True), Activity.EVALUATE),
        (said(step=12, phase=Phase.STEPPING), Activity.START),
        (said(updates=13), Activity.STEP),
    ],
    ids=["step", "load", "save", "evaluate", "evaluate-late", "fresh", "plain"],
)
def test_kinds_once_three_steps_are_done(what, kind):
    track = Track(WORKER, 0.0)
    track.look(said(step=10, phase=Phase.STARTING) if what.phase else said(updates=10), 1.0)
    track.look(what, 2.0)
    assert track.kind is kind


def test_a_gap_is_between_two_signs_and_of_what_was_done_meanwhile():
    track = Track(WORKER, 0.0)
    assert track.look(said(step=10, phase=Phase.STEPPING), 1.0) is None  # where it began is unknown
    assert track.look(said(step=10, phase=Phase.STEPPING), 2.0) is None
    assert track.look(said(step=20, phase=Phase.LOADING, since=2.5), 3.5) == (Activity.START, 2.5)
    assert track.look(said(step=20, phase=Phase.STEPPING, since=4.0), 4.0) == (Activity.STEP, 0.5)
    assert track.changed_s == 4.0


@pytest.mark.parametrize(
    "later",
    [
        said(step=20, phase=Phase.STEPPING, begun=4),
        said(step=20, phase=Phase.STEPPING, since=2.0, begun=3),
        said(step=20, phase=Phase.STEPPING, begun=3, updates=1),
        said(step=20, phase=Phase.STEPPING, begun=3, evaluates=True),
    ],
    ids=["collective", "phase", "update", "evaluates"],
)
def test_what_is_a_sign_of_progress(later):
    track = Track(WORKER, 0.0)
    track.look(said(step=20, phase=Phase.STEPPING, begun=3), 1.0)
    assert track.look(later, 2.0) is not None


class Clock:
    """A watch over one worker whose time is the test's."""

    def __init__(self, directory, monkeypatch, pid):
        monkeypatch.setenv("OUTLAST_BEATS", str(directory))
        monkeypatch.setenv("LOCAL_RANK", "0")
        self.now_s = 1000.0
        monkeypatch.setattr("outlast.health.hang.time.monotonic", lambda: self.now_s)
        self.beat = Beat()
        worker = WatchedWorker(local_rank=0, rank=0, pid=pid)
        self.watched = Watched(
            Begin(
                attempt=1,
                node="a",
                beats=str(directory),
                world_size=1,
                workers=(worker,),
                hang=HangSettings(),
            )
        )
        self.watch = HangWatch()
        self.gathered = []
        monkeypatch.setattr("outlast.health.hang.Gathering", self.gather)
        list(self.watch.begin(self.watched))
        self.step = 0

    def gather(self, begin, number):
        self.gathered.append(self.now_s)
        return SimpleNamespace(is_done=False, number=number, found={})

    def pass_s(self, seconds, *, steps=False):
        said_of = []
        for _ in range(round(seconds / 0.1)):
            self.now_s += 0.1
            if steps:
                self.step += 1
                self.beat.beat(self.step)
                self.beat.phase(Phase.STEPPING)
            self.watched.look()
            said_of += self.watch.look(self.now_s)
        return said_of


@pytest.fixture
def clock(tmp_path, monkeypatch):
    found = Clock(tmp_path, monkeypatch, pid=1)
    yield found
    found.watched.close()


def test_suspicion_comes_once_the_limit_is_over(clock):
    clock.pass_s(10, steps=True)
    last_s = clock.now_s
    clock.pass_s(5)
    assert len(clock.gathered) == 1
    assert 1.5 <= clock.gathered[0] - last_s < 2.0


def test_boundaries_that_save_nothing_do_not_make_a_save_short(clock):
    for _ in range(20):
        clock.beat.phase(Phase.SAVING)
        clock.pass_s(0.2, steps=True)
    assert clock.watch._limits.limit_s(Activity.SAVE) == 600.0
    for _ in range(3):
        clock.beat.phase(Phase.SAVING)
        clock.pass_s(2)
        clock.pass_s(0.2, steps=True)
    assert clock.watch._limits.limit_s(Activity.SAVE) == pytest.approx(36, abs=1)


def test_starting_takes_its_time(clock):
    clock.pass_s(300)
    assert clock.gathered == []


def test_time_that_the_watcher_itself_has_not_seen_is_not_counted(clock):
    clock.pass_s(10, steps=True)
    clock.now_s += 3600  # the machine was suspended
    clock.pass_s(1)
    assert clock.gathered == []


def test_what_was_learned_is_said_now_and_then(clock):
    found = [one for one in clock.pass_s(12, steps=True) if isinstance(one, Learned)]
    assert len(found) == 2
    assert found[-1].state["step"][0] == pytest.approx(0.1, rel=0.1)


def test_nothing_is_looked_for_where_nobody_wants_to_know(clock):
    begin = clock.watched.begin
    clock.watched.begin = Begin(
        **{name: getattr(begin, name) for name in Begin.__struct_fields__ if name != "hang"}
    )
    list(clock.watch.begin(clock.watched))
    clock.pass_s(10, steps=True)
    clock.pass_s(30)
    assert clock.gathered == []


def test_two_looks_that_a_freeze_of_the_watcher_lies_between_are_taken_anew(clock):
    list(clock.watch.hear(Ask(number=3)))
    clock.pass_s(0.5, steps=True)
    assert len(clock.gathered) == 1
    clock.now_s += 4.0
    clock.pass_s(0.5, steps=True)
    assert len(clock.gathered) == 2
    assert clock.watch._gathering.number == 3
