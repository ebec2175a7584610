"""What rank 0 expects of the next seconds, from what the ledger shows."""

import threading

import pytest

from outlast.config import load
from outlast.ledger.file import Ledger
from outlast.training import leaving
from outlast.training.leaving import Outlook


@pytest.fixture(name="job")
def _job(tmp_path):
    ledger = Ledger(tmp_path, job="j", attempt=1, rank=0)
    for step in range(0, 60, 10):
        ledger.append("step", durable=False, step=step, seconds=5.0)
    ledger.close()
    return load({"dir": tmp_path}, environ={})


def test_a_ledger_that_hangs_delays_no_answer(job, monkeypatch):
    monkeypatch.setattr(leaving, "READ_S", 0.01)
    outlook = Outlook(job)
    let_go, polled = threading.Event(), outlook._follower.poll

    def hang():
        let_go.wait(60)
        return polled()

    monkeypatch.setattr(outlook._follower, "poll", hang)
    found = outlook.plan(30.0, in_step_s=None, saving=False)
    assert found.choice  # from nothing, and at once
    readers = [t for t in threading.enumerate() if t.name == "outlast-outlook"]
    outlook.plan(30.0, in_step_s=None, saving=False)
    assert [t for t in threading.enumerate() if t.name == "outlast-outlook"] == readers  # one
    let_go.set()
    for reader in readers:
        reader.join(60)
    assert outlook.seconds_of(1) == 0.5  # what was read meanwhile counts now


def test_a_ledger_that_cannot_be_read_is_said(job, monkeypatch, caplog):
    outlook = Outlook(job)

    def fail():
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(outlook._follower, "poll", fail)
    assert outlook.plan(30.0, in_step_s=None, saving=False).choice
    assert "cannot be read" in caplog.text
