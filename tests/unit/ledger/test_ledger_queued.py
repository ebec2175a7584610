"""Appending without waiting for the disk."""

import threading
from pathlib import Path

import pytest

from outlast.ledger.file import FILE_NAME, Ledger, QueuedLedger, read_events


@pytest.fixture(name="ledger")
def _ledger(tmp_path):
    ledger = QueuedLedger(tmp_path, job="j", attempt=3)
    yield ledger
    ledger.close()


def test_events_keep_their_order(ledger, tmp_path):
    for number in range(500):
        ledger.append("restart", reason=str(number), restarts=number)
    assert ledger.flush()
    found = list(read_events(tmp_path))
    assert [event.fields["restarts"] for event in found] == list(range(500))
    assert {event.attempt for event in found} == {3}


def test_the_attempt_is_that_of_the_call(ledger, tmp_path):
    ledger.append("restart", reason="", restarts=1)
    ledger.attempt = 4
    ledger.append("restart", reason="", restarts=2)
    ledger.close()
    assert [event.attempt for event in read_events(tmp_path)] == [3, 4]


def test_a_disk_that_hangs_holds_nobody(ledger, tmp_path, monkeypatch):
    hangs, let_go = threading.Event(), threading.Event()

    def fsync(_):
        hangs.set()
        let_go.wait(60)

    monkeypatch.setattr("os.fsync", fsync)
    ledger.append("restart", reason="", restarts=1)
    assert hangs.wait(60)
    ledger.append("restart", reason="", restarts=2)  # comes back at once
    assert not ledger.flush(0.01)
    let_go.set()
    assert ledger.flush()
    assert len(list(read_events(tmp_path))) == 2


def test_what_is_promised_is_waited_for_and_a_disk_that_hangs_only_once(tmp_path, monkeypatch):
    hangs, let_go = threading.Event(), threading.Event()
    ledger = QueuedLedger(tmp_path, job="j", patience_s=60)
    ledger.append("restart", reason="", restarts=1)
    assert len(list(read_events(tmp_path))) == 1

    def fsync(_):
        hangs.set()
        let_go.wait(60)

    monkeypatch.setattr("os.fsync", fsync)
    ledger._patience_s = 0.01
    ledger.append("restart", reason="", restarts=2)
    assert hangs.is_set()
    ledger._patience_s = 60  # it is known to hang: nobody waits again
    for number in (3, 4):
        ledger.append("restart", reason="", restarts=number)
    let_go.set()
    assert ledger.flush()
    ledger.append("restart", reason="", restarts=5)  # it has caught up, and is waited for
    assert [event["restarts"] for event in read_events(tmp_path)] == [1, 2, 3, 4, 5]
    ledger.close()
    ledger.append("restart", reason="", restarts=6)
    assert len(list(read_events(tmp_path))) == 6


def test_a_full_queue_counts_what_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr("outlast.ledger.file.WAITING_MAX", 1)
    hangs, let_go = threading.Event(), threading.Event()

    def fsync(_):
        hangs.set()
        let_go.wait(60)

    monkeypatch.setattr("os.fsync", fsync)
    ledger = QueuedLedger(tmp_path, job="j")
    ledger.append("restart", reason="", restarts=1)
    assert hangs.wait(60)
    for number in (2, 3, 4):
        ledger.append("restart", reason="", restarts=number)
    assert ledger.lost_events == 2
    let_go.set()
    ledger.close()
    found = list(read_events(tmp_path))
    assert [event.get("restarts") for event in found] == [1, None, 2]
    assert (found[1].event, found[1]["what"], found[1]["lost"]) == ("watch_gap", "ledger", 2)


def test_a_disk_that_fails_is_counted(ledger, tmp_path):
    (tmp_path / FILE_NAME).mkdir()
    ledger.append("restart", reason="", restarts=1)
    assert ledger.flush()
    assert ledger.lost_events == 1


def test_what_others_rely_on_is_on_disk_or_said_not_to_be(ledger, tmp_path, monkeypatch):
    assert ledger.record("rollback", step=5, first=6, batches=None)
    assert [event.event for event in read_events(tmp_path)] == ["rollback"]
    let_go = threading.Event()
    monkeypatch.setattr("outlast.ledger.file.CLOSE_S", 0.05)
    monkeypatch.setattr("os.fsync", lambda _: let_go.wait(60))
    ledger._patience_s = 0.01
    assert not ledger.record("rollback", step=5, first=7, batches=None), "the disk hangs"
    let_go.set()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full device")
@pytest.mark.parametrize("kind", [Ledger, QueuedLedger])
def test_on_a_full_disk_it_is_said_not_to_be(tmp_path, kind):
    for name in (FILE_NAME, "rollbacks"):
        (tmp_path / name).symlink_to("/dev/full")
    ledger = kind(tmp_path, job="j")
    assert not ledger.record("rollback", step=5, first=6, batches=None)
    ledger.close()
