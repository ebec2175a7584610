"""The watching thread: with real time, a real server, and watchers that misbehave."""

import queue
import threading
import time

import pytest

from outlast.drill.metadata_server import AnswerFault, AwsMetadataServer
from outlast.notice import Notice
from outlast.notice.aws import AwsWatcher
from outlast.notice.source import WatchThread

WITHIN_S = 60.0


class Counting:
    """A watcher that counts its polls and does what it is told."""

    name = "counting"

    def __init__(self, act=lambda: None):
        self.act = act
        self.polls = 0
        self.polled = threading.Condition()

    def poll(self):
        with self.polled:
            self.polls += 1
            self.polled.notify_all()
        return self.act()

    def wait_for(self, num_polls):
        with self.polled:
            assert self.polled.wait_for(lambda: self.polls >= num_polls, WITHIN_S)


def notice():
    return Notice(source="counting", action="stop", deadline_t=1.0, heard_t=0.0, detail="")


@pytest.fixture
def started():
    threads = []

    def start(*args, **kwargs):
        thread = WatchThread(*args, **kwargs)
        threads.append(thread)
        thread.start()
        return thread

    yield start
    for thread in threads:
        thread.stop()


def named(name):
    return [thread for thread in threading.enumerate() if thread.name == name]


def test_a_notice_reaches_the_receiver_once_through_faults(started):
    heard = queue.Queue()
    with AwsMetadataServer() as server:
        watcher = AwsWatcher(server.url, timeout_s=2.0)
        thread = started(watcher, heard.put, interval_s=0.01)
        (running,) = named("outlast-notice-aws")
        assert running.daemon
        server.inject(AnswerFault(status=503))
        wait_until(lambda: watcher.errors >= 10)
        assert heard.empty()
        server.inject(AnswerFault())
        deadline_t = server.preempt()
        assert heard.get(timeout=WITHIN_S).deadline_t == deadline_t
        polls = watcher.polls
        wait_until(lambda: watcher.polls >= polls + 20)
        assert heard.empty()
        thread.stop()
        assert not named("outlast-notice-aws")


def wait_until(true):
    give_up = time.monotonic() + WITHIN_S
    while not true():
        assert time.monotonic() < give_up
        time.sleep(0.005)


def test_polls_go_on_at_the_same_pace_when_the_watcher_raises(started, caplog):
    def fail():
        raise ZeroDivisionError

    watcher = Counting(fail)
    started(watcher, print, interval_s=0.001)
    watcher.wait_for(200)
    assert len(caplog.records) == 1


def test_the_interval_is_kept(started):
    watcher = Counting()
    began = time.monotonic()
    started(watcher, print, interval_s=0.05)
    watcher.wait_for(11)
    assert time.monotonic() - began >= 0.5 - 0.01  # never faster; how much slower is the machine's


def test_polls_missed_during_a_slow_one_are_not_made_up_for(started):
    starts = []

    def slow_at_first():
        starts.append(time.monotonic())
        if len(starts) == 1:
            time.sleep(0.5)

    watcher = Counting(slow_at_first)
    started(watcher, print, interval_s=0.05)
    watcher.wait_for(8)
    assert starts[6] - starts[1] >= 5 * 0.05 - 0.01


def test_stop_does_not_wait_for_the_interval(started):
    watcher = Counting()
    thread = started(watcher, print, interval_s=3600.0)
    watcher.wait_for(1)
    thread.stop()
    assert not named("outlast-notice-counting")
    assert watcher.polls == 1


def test_stop_leaves_a_slow_poll_behind_and_drops_what_it_hears(started):
    release = threading.Event()
    heard = []

    def slow():
        release.wait(WITHIN_S)
        return notice()

    watcher = Counting(slow)
    thread = started(watcher, heard.append)
    watcher.wait_for(1)
    thread.stop()
    (running,) = named("outlast-notice-counting")
    release.set()
    running.join(WITHIN_S)
    assert not running.is_alive()
    assert heard == []


def test_the_receiver_may_stop_the_watching(started, caplog):
    stopped = threading.Event()

    def receive(_):
        thread.stop()
        stopped.set()

    watcher = Counting()
    thread = started(watcher, receive, interval_s=0.001)
    watcher.act = notice
    assert stopped.wait(WITHIN_S)
    wait_until(lambda: not named("outlast-notice-counting"))
    assert not caplog.records
    thread.stop()
