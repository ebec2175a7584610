"""Signals that come before anybody listens are kept for whoever listens first."""

import queue
import signal

import pytest

from outlast.notice.signals import SIGNALS, EarlySignals, SignalNotice

LIMIT_S = 60


@pytest.fixture(name="told")
def _told():
    return queue.Queue()


def test_the_first_is_kept_and_none_ends_the_process():
    early = EarlySignals()
    assert early.heard == ""
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP):
        signal.raise_signal(number)
    assert early.heard == "SIGUSR1"


def test_it_is_told_as_soon_as_somebody_listens(told):
    EarlySignals()
    signal.raise_signal(signal.SIGUSR1)
    notice = SignalNotice(told.put)
    notice.install()
    assert told.get(timeout=LIMIT_S) == "SIGUSR1"
    signal.raise_signal(signal.SIGTERM)
    assert told.get(timeout=LIMIT_S) == "SIGTERM"
    notice.remove()
    assert told.empty()


def test_nothing_is_told_of_where_nothing_came(told):
    EarlySignals()
    notice = SignalNotice(told.put)
    notice.install()
    notice.remove()
    assert told.empty()


def test_what_was_there_before_comes_back():
    before = {number: signal.getsignal(number) for number in SIGNALS}
    early = EarlySignals()
    assert all(signal.getsignal(number) is early for number in SIGNALS)
    notice = SignalNotice(lambda _: None)
    notice.install()
    notice.remove()
    assert {number: signal.getsignal(number) for number in SIGNALS} == before


def test_a_signal_that_is_ignored_stays_so():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    early = EarlySignals()
    signal.raise_signal(signal.SIGHUP)
    assert early.heard == ""
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
