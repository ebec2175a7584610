"""Schedulers signal every process of a job at once: the server must not go before its workers."""

import contextlib
import signal

import psutil
import pytest
from floor import TRAIN, Job, until

RANKS = 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=["SIGTERM", "SIGUSR1"])
def test_a_signal_to_every_process_drains(floor, tmp_path, number):
    job = Job(tmp_path / "job", RANKS)
    started = floor.outlast(
        *("run", "--nproc-per-node", RANKS, TRAIN, job.records, 100_000, "--pause", "0.02"),
        env=job.env,
    )
    until(lambda: job.begun() >= 20, "steps", running=started)
    everybody = [started.pid, *(one.pid for one in psutil.Process(started.pid).children(True))]
    assert any("launch.warm" in " ".join(psutil.Process(pid).cmdline()) for pid in everybody)
    for pid in reversed(everybody):  # the server before its agent
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).send_signal(number)
    assert started.wait() == 75, started.text
    (drained,) = job.events("drained")
    assert drained["committed"]
