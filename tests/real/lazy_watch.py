"""Looks on while snapshots are copied, and has the copiers be slow."""

import threading
import time

import pytest
from floor import alone

from outlast.checkpoint.capture import Capture, Copiers

PACES = ("as it comes", "slow", "idle")


class Watch:
    """What was left for later at each boundary, and still at the optimizer's hook.

    ``pace`` is how the copiers fare: "slow" ones are overtaken by the hook, "idle" ones leave it
    everything.
    """

    def __init__(self, monkeypatch, rng):
        self.rng = rng
        self.pace = PACES[0]
        self.left, self.left_at_hook, self.at_once = [], [], []
        submit, step, wait = Copiers.submit, Capture._step, Capture.wait

        def submitted(copiers, capture):
            whole = capture.plan.size - len(capture.plan.head)
            self.left.append(whole - capture.copied_at_once_bytes)
            self.at_once.append(capture.copied_at_once_bytes)
            submit(copiers, capture)

        def stepped(capture):
            if threading.current_thread().name.startswith("outlast-copy"):
                if self.pace == "idle" and not capture._confirmed.wait(0.5):
                    return step(capture)
                if self.pace == "slow":
                    time.sleep(self.rng.random() * 0.003)
            return step(capture)

        def waited(capture):
            self.left_at_hook.append(sum(size for _, _, size in capture._items))
            wait(capture)

        monkeypatch.setattr(Copiers, "submit", submitted)
        monkeypatch.setattr(Capture, "_step", stepped)
        monkeypatch.setattr(Capture, "wait", waited)


@pytest.fixture(name="job")
def _job(tmp_path, monkeypatch):
    """The directory of a job in this very process."""
    alone(monkeypatch)
    monkeypatch.setenv("OUTLAST_NOTICE_PLATFORM", "none")
    return tmp_path / "job"


@pytest.fixture(name="watch")
def _watch(monkeypatch, rng):
    return Watch(monkeypatch, rng)
