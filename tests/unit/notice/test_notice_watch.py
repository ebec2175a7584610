"""What is passed on, without the thread: each check is one poll."""

import logging

import msgspec
import pytest

from outlast.notice import Notice
from outlast.notice.source import WatchThread


class Script:
    """A watcher that plays what it was given; an exception is raised."""

    name = "script"

    def __init__(self, *said):
        self.said = list(said)

    def poll(self):
        said = self.said.pop(0) if self.said else None
        if isinstance(said, Exception):
            raise said
        return said


def notice(action="terminate", deadline_t=120.0, heard_t=0.0, **more):
    return Notice(
        source="script",
        action=action,
        deadline_t=deadline_t,
        heard_t=heard_t,
        detail="at 120",
        **more,
    )


@pytest.fixture
def heard():
    return []


def checked(watch, times):
    for _ in range(times):
        watch.check()


def test_the_same_notice_is_passed_on_once(heard):
    again = [notice(heard_t=float(t)) for t in range(10)]
    checked(WatchThread(Script(None, *again, None, *again), heard.append), 25)
    assert heard == [notice()]


def test_another_action_or_deadline_or_event_or_a_harder_word_is_another_notice(heard):
    said = [
        notice(early=True),
        notice(),
        notice("stop"),
        notice(deadline_t=60.0),
        notice(deadline_t=None),
        notice(event="7"),
    ]
    checked(WatchThread(Script(*said, *said), heard.append), 12)
    assert heard == said


def test_an_early_notice_does_not_hide_the_hard_one(heard):
    early = msgspec.structs.replace(notice(), early=True)
    checked(WatchThread(Script(early, early, notice(), notice()), heard.append), 4)
    assert heard == [early, notice()]


def test_a_failing_receiver_is_logged_and_does_not_end_the_watching(heard, caplog):
    def receive(found):
        heard.append(found)
        if len(heard) == 1:
            raise OSError("no space left")

    checked(WatchThread(Script(notice(), notice(), notice("stop")), receive), 3)
    assert heard == [notice(), notice("stop")]
    (record,) = caplog.records
    assert record.getMessage() == "a notice was heard, its receiver failed: at 120"
    assert record.exc_info[0] is OSError


def test_a_watcher_with_a_bug_is_logged_once_and_asked_again(heard, caplog):
    bugs = [ZeroDivisionError() for _ in range(20)]
    checked(WatchThread(Script(*bugs, notice(), *bugs), heard.append), 41)
    assert heard == [notice()]
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.getMessage() == "the script watcher raised: a bug; polling on"


def test_after_stop_nothing_is_passed_on(heard):
    watch = WatchThread(Script(notice()), heard.append)
    watch.stop()
    watch.check()
    assert heard == []


def test_what_is_remembered_is_bounded(heard):
    many = [notice(deadline_t=float(t)) for t in range(1000)]
    watch = WatchThread(Script(*many), heard.append)
    checked(watch, 1000)
    assert len(heard) == 1000
    assert len(watch._passed_on) == 100
