"""A worker's newest step in memory, and the agent's directory for it."""

import pytest

from outlast.attempt import beat as module
from outlast.attempt.beat import VARIABLE, Beat, BeatsDirectory, beat_path, read_beat


def test_what_a_worker_says_is_read(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", "3")
    beat = Beat()
    beat.beat(41)
    beat.beat(42)
    seen = read_beat(tmp_path, 3)
    assert seen is not None
    assert seen.step == 42
    assert read_beat(tmp_path, 0) is None


def test_without_an_agent_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    Beat().beat(1)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written_does_not_stop_a_worker(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "gone"))
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
    dead, living = tmp_path / f"{module._PREFIX}dead", BeatsDirectory()
    dead.mkdir()
    (dead / module._LOCK).touch()
    unready = tmp_path / f"{module._PREFIX}unready"  # made in this moment: no lock yet
    unready.mkdir()
    module._reclaim(tmp_path)
    module._reclaim(living.path.parent)
    assert not dead.exists()
    assert unready.exists()
    assert living.path.exists()
    living.close()
