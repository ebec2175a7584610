"""How fast copies go: the rate, and what is left of it while no core is spare."""

import math
import threading

import pytest

from outlast.keeper import background

MB = 1_000_000


class Clock:
    """Seconds that pass by waiting, and by work that takes a core."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        self.had = self.waited = 0.0
        self.counts = True
        monkeypatch.setattr(background.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(background.time, "thread_time", lambda: self.had)
        monkeypatch.setattr(background, "_SCHEDSTAT", self)

    def wait(self, seconds):
        self.now += seconds
        return False

    def is_set(self):
        return False

    def read_bytes(self):
        if not self.counts:
            raise FileNotFoundError
        return b"%d %d 7\n" % (self.had * 1e9, self.waited * 1e9)

    def work(self, seconds, waiting=0.0):
        """A core for so long, after so long a wait for it."""
        self.had += seconds
        self.waited += waiting
        self.now += seconds + waiting


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def seconds_for(clock, wait, *, pieces, cost_s, waiting_s=0.0):
    """How long it takes to send so many pieces of a megabyte."""
    before = clock.now
    for _ in range(pieces):
        wait(MB)
        clock.work(cost_s, waiting_s)
    return clock.now - before


def test_no_more_than_the_rate_goes_in_a_second(clock):
    wait = background.TrafficPace(1e6, clock)
    for _ in range(100):
        wait(50_000)
    assert 4.8 <= clock.now - 100.0 <= 5.0
    clock.now += 60.0  # idle: nothing is saved up but a moment's worth
    before = clock.now
    for _ in range(20):
        wait(50_000)
    assert 0.8 <= clock.now - before <= 1.0


def test_a_wait_ends_when_it_is_stopped():
    stop = threading.Event()
    wait = background.TrafficPace(1.0, stop)
    wait(1000)
    stop.set()
    with pytest.raises(ConnectionAbortedError):
        wait(1000)


def test_the_rate_follows_the_cores_unless_it_is_set(monkeypatch):
    monkeypatch.setattr(background.os, "sched_getaffinity", lambda _: set(range(4)))
    assert background.rate_of(None) == 4 * background.RATE_PER_CORE_BYTES
    assert background.rate_of(5e6) == 5e6
    monkeypatch.setattr(background.os, "sched_getaffinity", lambda _: set(range(512)))
    assert background.rate_of(None) == background.RATE_MAX_BYTES


@pytest.mark.parametrize("rate", [50e6, math.inf])
def test_it_has_a_small_share_of_a_core_while_none_is_spare(clock, rate):
    wait = background.TrafficPace(rate, clock, background.Cores())
    took_s = seconds_for(clock, wait, pieces=500, cost_s=0.001, waiting_s=0.002)
    assert clock.had / took_s == pytest.approx(background.BUSY_SHARE, rel=0.02)


def test_it_goes_at_the_full_rate_while_a_core_is_spare(clock):
    wait = background.TrafficPace(50e6, clock, background.Cores())
    seconds_for(clock, wait, pieces=50, cost_s=0.001)  # until that is known
    assert seconds_for(clock, wait, pieces=500, cost_s=0.001) == pytest.approx(10.0, rel=0.02)


def test_it_follows_what_changes(clock):
    wait = background.TrafficPace(50e6, clock, background.Cores())
    found = []
    for waiting_s in (0.0, 0.003, 0.0):
        seconds_for(clock, wait, pieces=250, cost_s=0.001, waiting_s=waiting_s)
        took_s = seconds_for(clock, wait, pieces=100, cost_s=0.001, waiting_s=waiting_s)
        found.append(100 / took_s)
    assert found == pytest.approx([50.0, 20.0, 50.0], rel=0.05)


def test_a_copy_ends_however_much_it_costs(clock):
    wait = background.TrafficPace(50e6, clock, background.Cores())
    took_s = seconds_for(clock, wait, pieces=400, cost_s=0.1, waiting_s=0.1)
    assert took_s == pytest.approx(400 * MB / background.FLOOR_BYTES, rel=0.02)


def test_a_rate_that_was_set_is_kept_to(clock):
    wait = background.TrafficPace(50e6, clock)
    took_s = seconds_for(clock, wait, pieces=500, cost_s=0.001, waiting_s=0.002)
    assert took_s == pytest.approx(10.0, rel=0.02)


def test_where_the_kernel_does_not_count_no_core_is_spare(clock):
    clock.counts = False
    wait = background.TrafficPace(50e6, clock, background.Cores())
    took_s = seconds_for(clock, wait, pieces=500, cost_s=0.001)
    assert clock.had / took_s == pytest.approx(background.BUSY_SHARE, rel=0.02)


def test_the_kernel_counts_here():
    """What it counts is read in the form it has: a time that does not shrink."""
    first = background._waited_s()
    assert first is not None
    assert background._waited_s() >= first
