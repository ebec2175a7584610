"""A worker's newest step in memory, and the agent's directory for it."""

import fcntl

import pytest

from outlast.attempt import beat as module
from outlast.attempt.beat import (
    BEATS_VARIABLE,
    NUM_TIMINGS,
    Beat,
    BeatReader,
    BeatsDirectory,
    Phase,
    Timing,
    beat_path,
    read_beat,
)


def test_what_a_worker_says_is_read(tmp_path, monkeypatch):
    monkeypatch.setenv(BEATS_VARIABLE, str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", "3")
    beat = Beat()
    beat.beat(41)
    beat.beat(42)
    seen = read_beat(tmp_path, 3)
    assert seen is not None
    assert seen.step == 42
    assert read_beat(tmp_path, 0) is None


def test_without_an_agent_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.delenv(BEATS_VARIABLE, raising=False)
    Beat().beat(1)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written_does_not_stop_a_worker(tmp_path, monkeypatch):
    monkeypatch.setenv(BEATS_VARIABLE, str(tmp_path / "gone"))
    Beat().beat(1)


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 17])
def test_a_torn_beat_is_none(tmp_path, content):
    beat_path(tmp_path, 0).write_bytes(content)
    assert read_beat(tmp_path, 0) is None


def test_the_directory_is_private_and_goes(monkeypatch):
    directory = BeatsDirectory()
    assert directory.path.stat().st_mode & 0o777 == 0o700
    beat_path(directory.path, 0).write_bytes(b"x")
    directory.clear()
    assert not beat_path(directory.path, 0).exists()
    directory.close()
    assert not directory.path.exists()


def test_what_dead_agents_left_is_reclaimed_and_a_living_one_s_is_not(tmp_path):
    dead, living = tmp_path / f"{module.BEATS_PREFIX}dead", BeatsDirectory()
    dead.mkdir()
    (dead / module._LOCK).touch()
    unready = tmp_path / f"{module.BEATS_PREFIX}unready"  # made in this moment: no lock yet
    unready.mkdir()
    module._reclaim(tmp_path)
    module._reclaim(living.path.parent)
    assert not dead.exists()
    assert unready.exists()
    assert living.path.exists()
    living.close()


@pytest.fixture
def spoken(tmp_path, monkeypatch):
    monkeypatch.setenv(BEATS_VARIABLE, str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", "0")
    return Beat(), BeatReader(tmp_path, 0)


def test_each_part_says_its_own(spoken):
    beat, heard = spoken
    assert (heard.beat, heard.phase, heard.updates, heard.pulse) == (None, None, None, None)
    beat.phase(Phase.LOADING)
    beat.updates(7)
    beat.pulse(12, 11)
    assert heard.beat is None
    assert heard.phase.phase is Phase.LOADING
    assert heard.updates.updates == 7
    assert heard.pulse[1:] == (12, 11, False)
    beat.pulse(12, is_evaluating=True)
    assert heard.pulse[1:] == (12, -1, True)
    assert heard.phase.since_s <= heard.updates.last_s <= heard.pulse.last_s


def test_the_most_updates_of_any_worker_are_found(tmp_path, monkeypatch):
    monkeypatch.setenv(module.BEATS_VARIABLE, str(tmp_path))
    assert module.most_updates(tmp_path, range(3)) == 0
    for rank, number in enumerate([4, 0, 9]):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        said = Beat()
        if number:
            said.updates(number)
    assert module.most_updates(tmp_path, range(4)) == 9
    assert module.most_updates(tmp_path, [0, 1]) == 4


def test_of_timings_the_newest_are_there_in_order(spoken):
    beat, heard = spoken
    for step in range(1, NUM_TIMINGS + 51):
        beat.timing(*Timing(step, float(step), 0.5, 0.25, 0.125, 0.0625, 0.0))
    assert [one.step for one in heard.timings(0)] == list(range(51, NUM_TIMINGS + 51))
    assert heard.timings(NUM_TIMINGS + 49) == [
        Timing(NUM_TIMINGS + 50, NUM_TIMINGS + 50.0, 0.5, 0.25, 0.125, 0.0625, 0.0)
    ]


def test_a_timing_in_the_making_is_passed_by(spoken):
    beat, heard = spoken
    beat.timing(*Timing(1, 1.0, 0.5, 0.5, 0.0, 0.0, 0.0))
    at = module._TIMINGS_AT + module._TIMING.size
    beat._memory[at : at + 8] = (1 + NUM_TIMINGS).to_bytes(8, "little")
    assert heard.timings(0) == []


def test_a_phase_that_nobody_knows_is_none(spoken):
    beat, heard = spoken
    beat.phase(99)
    assert heard.phase is None


def test_another_agent_that_starts_now_does_not_take_it_for_an_orphan(monkeypatch):
    lock = fcntl.flock

    def meanwhile(fd, how):
        if how == fcntl.LOCK_EX:
            monkeypatch.setattr(fcntl, "flock", lock)
            BeatsDirectory().close()
        lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", meanwhile)
    directory = BeatsDirectory()
    BeatsDirectory().close()
    assert directory.path.is_dir()
    directory.close()


def test_where_an_attempt_began_is_said_once(spoken):
    beat, heard = spoken
    assert (heard.began_step, heard.began_updates) == (None, None)
    beat.beat(0)
    beat.beat(1)
    beat.updates(8)
    beat.updates(9)
    other = Beat()  # another session of the same attempt
    other.beat(4)
    assert (heard.began_step, heard.began_updates) == (0, 8)
