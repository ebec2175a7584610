"""Watching itself dies: training goes on, the watcher comes back, and the ledger has the gap."""

import os
import signal
import time

import psutil
import pytest
from floor import TRAIN, Job, until

WATCHER = "outlast.health.watcher"
KEEPER = "outlast.keeper"


def processes(floor, module):
    """Ids of the processes of ours that run this module."""
    found = []
    for process in floor.offspring():
        try:
            if module in process.cmdline():
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


@pytest.fixture
def trained(floor, tmp_path):
    """Runs a job of one worker; at some step does something to it, and says how it went."""

    def run(happens, what):
        job = Job(tmp_path / "job")
        gate = tmp_path / "gate"
        agent = floor.outlast(
            *("run", "--nproc-per-node", 1, "--dir", job.directory, TRAIN, job.records, 10**6),
            *("--pause", 0.05, "--light", "--no-group", "--gate", gate),
        )
        until(floor.workers, "a worker", running=agent)
        gate.touch()
        until(job.lines, "a step", running=agent)
        happens()
        until(lambda: job.events("watch_gap"), "the gap is in the ledger", running=agent)
        begun = job.begun()
        until(lambda: job.begun() > begun + 5, "training goes on", running=agent)
        agent.signal(signal.SIGTERM)
        assert agent.wait() == 75, agent.text
        (gap,) = job.events("watch_gap")
        assert gap["what"] == what
        assert 0 < gap["seconds"] < 60
        assert abs(gap["from_t"] + gap["seconds"] - gap.t) < 5
        assert len(job.events("attempt_formed")) == 1  # training went on
        assert f"the {what} was away" in agent.err
        return gap

    return run


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_watcher(floor, trained, number):
    before = []

    def happens():
        before.extend(until(lambda: processes(floor, WATCHER), "a watcher"))
        os.kill(before[0], number)

    gap = trained(happens, "watcher")
    assert ("signal 9" if number == signal.SIGKILL else "said nothing") in gap["reason"]
    assert before[0] not in processes(floor, WATCHER)


def test_keeper(floor, trained):
    def happens():
        for pid in until(lambda: processes(floor, KEEPER), "a keeper"):
            os.kill(pid, signal.SIGKILL)

    assert "signal 9" in trained(happens, "keeper")["reason"]


def test_watcher_dies_with_its_agent(floor, tmp_path):
    job = Job(tmp_path / "job")
    agent = floor.outlast(
        *("run", "--nproc-per-node", 1, "--dir", job.directory, TRAIN, job.records, 10**6),
        *("--pause", 0.05, "--light", "--no-group"),
    )
    (watcher,) = until(lambda: processes(floor, WATCHER), "a watcher", running=agent)
    until(job.lines, "a step", running=agent)
    os.kill(watcher, signal.SIGSTOP)  # it could not see by itself that the agent goes
    agent.kill()
    until(lambda: not psutil.pid_exists(watcher) or time.sleep(0.01), "the watcher is gone")
