"""A file is a notice by being there; what is in it may say more."""

import json
import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.notice.manual import EndWatcher, FileWatcher, _meant
from thorough import examples

NOW = 1_505_722_800.0


@pytest.fixture
def path(tmp_path):
    return tmp_path / "leave"


@pytest.fixture
def watcher(path):
    return FileWatcher(path, clock=lambda: NOW)


def put(path, content=b"", age_s=10.0):
    path.write_bytes(content)
    os.utime(path, (NOW - age_s, NOW - age_s))


def test_no_file_is_no_notice_and_no_error(watcher):
    assert watcher.poll() is None
    assert (watcher.polls, watcher.errors) == (1, 0)


def test_its_being_there_is_a_notice_given_when_it_was_modified(watcher, path):
    put(path)
    notice = watcher.poll()
    assert (notice.source, notice.action, notice.early) == ("file", "terminate", False)
    assert (notice.deadline_t, notice.heard_t) == (None, NOW - 10)
    assert notice.detail == f"the file {path} is there"
    assert watcher.poll() == notice
    path.unlink()
    assert watcher.poll() is None


def test_a_file_of_the_future_was_given_now(watcher, path):
    put(path, b'{"in_s": 30}', age_s=-500.0)
    assert (watcher.poll().heard_t, watcher.poll().deadline_t) == (NOW, NOW + 30)


@pytest.mark.parametrize(
    ("said", "action", "deadline_t"),
    [
        ({}, "terminate", None),
        ({"action": "stop"}, "stop", None),
        ({"in_s": 90}, "terminate", NOW + 80),
        ({"action": "stop", "in_s": 0.5}, "stop", NOW - 9.5),
        ({"deadline_t": NOW + 60}, "terminate", NOW + 60),
        ({"deadline_t": NOW + 60, "who": "the site"}, "terminate", NOW + 60),
    ],
)
def test_what_it_may_say(watcher, path, said, action, deadline_t):
    put(path, json.dumps(said).encode())
    notice = watcher.poll()
    assert (notice.action, notice.deadline_t) == (action, deadline_t)


@pytest.mark.parametrize(
    "content",
    [
        b"please leave",
        b'{"in_s": 90',
        b"[90]",
        b'{"in_s": "90"}',
        b'{"in_s": -1}',
        b'{"in_s": 1e999}',
        b'{"in_s": 1, "deadline_t": 2}',
        b'{"action": 3}',
        b'{"action": ""}',
        b'{"action": "a\\nb"}',
        b'{"action": "' + b"a" * 101 + b'"}',
        b"\xff\xfe",
        b" " * 20_000 + b'{"in_s": 90}',
    ],
)
def test_anything_else_is_a_notice_without_a_deadline(watcher, path, content):
    put(path, content)
    notice = watcher.poll()
    assert (notice.action, notice.deadline_t) == ("terminate", None)
    assert watcher.errors == 0


def test_what_is_written_later_is_another_notice(watcher, path):
    put(path)
    assert watcher.poll().deadline_t is None
    put(path, b'{"in_s": 30}', age_s=5.0)
    assert watcher.poll().deadline_t == NOW + 25


def test_a_directory_is_there_too(watcher, path):
    path.mkdir()
    assert watcher.poll().deadline_t is None


def test_a_named_pipe_is_there_and_holds_nobody(watcher, path):
    os.mkfifo(path)
    poll = threading.Thread(target=watcher.poll, daemon=True)
    poll.start()
    poll.join(60.0)
    assert not poll.is_alive()
    assert watcher.poll().deadline_t is None


def test_a_place_that_cannot_be_looked_at_is_an_error_and_no_notice(tmp_path):
    (tmp_path / "file").touch()
    watcher = FileWatcher(tmp_path / "file" / "leave", clock=lambda: NOW)
    assert watcher.poll() is None
    assert watcher.errors == 1


@examples(300)
@given(st.binary())
def test_no_content_raises(content):
    assert _meant(content, NOW) is None or content.strip()[:1] == b"{"


def test_an_end_that_is_known_is_early_at_first_and_a_notice_in_time():
    now = [NOW]
    watcher = EndWatcher(NOW + 3600, clock=lambda: now[0])
    assert watcher.poll() is None
    heard = []
    for left_s in (600.5, 600, 121, 120, 1, -5):
        now[0] = NOW + 3600 - left_s
        heard.append(watcher.poll())
    assert [notice and notice.early for notice in heard] == [None, True, True, False, False, False]
    assert {notice.deadline_t for notice in heard[1:]} == {NOW + 3600}
    assert heard[4] is heard[3]
    assert watcher.errors == 0
