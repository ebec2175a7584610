"""The seconds that are left: slow storage and enough time, slow storage and too little.

Storage is slowed for real: strace delays each write of the keeper, from before the first save on.
"""

import contextlib
import shutil
import signal
import subprocess

import psutil
import pytest
from floor import TRAIN, Job, until

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")

# 68 MB of weights and momentum: five blocks, by two writers.
# A step takes a tenth of a core's second: there are few of them between two saves.
BIG = ("--light", "--width", 500_000, "--size", 8, "--every", "6 s", "--pause", "0.3")
DELAY_S = 0.9
STEPS = 100_000


@contextlib.contextmanager
def slowed(floor, tmp_path, process):
    """Every write of the job's keeper takes this much longer."""

    def keeper():
        for one in floor.offspring():
            with contextlib.suppress(psutil.Error):
                if "outlast.keeper" in one.cmdline():
                    return one.pid
        return None

    pid = until(keeper, "a keeper", running=process)
    said = tmp_path / "strace.err"
    delay = f"inject=pwrite64:delay_enter={int(DELAY_S * 1e6)}"
    with said.open("wb") as err:
        tracer = subprocess.Popen(
            [
                "strace",
                "-f",
                "-p",
                str(pid),
                "-e",
                "trace=pwrite64",
                "-e",
                delay,
                "-o",
                "/dev/null",
            ],
            stderr=err,
        )
    try:
        until(lambda: "attached" in said.read_text(), "strace is attached", running=process)
        yield
    finally:
        # It ends with the keeper, and is not waited for by one that hangs in it.
        with contextlib.suppress(subprocess.TimeoutExpired):
            tracer.wait(30)
        tracer.kill()
        tracer.wait(30)


def start(floor, job, grace):
    return floor.warm(
        *(TRAIN, job.records, STEPS, *BIG), env={**job.env, "OUTLAST_NOTICE_GRACE": grace}
    )


def slow_commit(job, process):
    """A save that was slow, once it is committed; the next one is some seconds away."""
    until(lambda: job.events("commit"), "a slow save", running=process)
    heard = job.begun() + 2  # the keeper writes it down before it tells the worker
    until(lambda: job.begun() >= heard, "a whole step behind it", running=process)
    commit = job.events("commit")[-1]
    assert commit["durable_s"] > 2 * DELAY_S, commit
    return commit


def test_slow_storage_and_time_enough(floor, tmp_path):
    job = Job(tmp_path / "job")
    process = start(floor, job, "30 s")
    with slowed(floor, tmp_path, process):
        needs_s = slow_commit(job, process)["durable_s"]
        process.signal(signal.SIGTERM)
        assert process.wait() == 75, process.text
    (agreed,), (drained,), (notice,) = map(job.events, ("drain_agreed", "drained", "notice"))
    assert agreed["choice"] == "flush"
    assert agreed["tiers"] == ["local"]
    assert needs_s <= agreed["needs_s"] < 30
    assert (drained["step"], drained["committed"]) == (job.newest(), True)
    assert drained.t < notice["deadline_t"]
    assert f"grace 30 s, save needs {needs_s + 3:.0f}"[:-1] in process.err  # its seconds vary
    assert "✔" in process.err


def test_slow_storage_and_too_little_time(floor, tmp_path):
    job = Job(tmp_path / "job")
    process = start(floor, job, "3 s")
    with slowed(floor, tmp_path, process):
        stands = slow_commit(job, process)["step"]
        begun = job.begun()
        process.signal(signal.SIGTERM)
        assert process.wait() == 75, process.text
    (drained,), (notice,) = job.events("drained"), job.events("notice")
    assert not job.events("drain_agreed")  # nobody has waited for the end of a step
    assert drained["committed"] is False
    assert drained["step"] >= begun - 1 > stands
    assert drained.t < notice["deadline_t"]
    assert job.newest() == stands
    assert not job.unfinished()
    (line,) = [line for line in process.err.splitlines() if "could not be committed" in line]
    lost = drained["step"] - stands
    assert line.startswith(f"outlast: step {drained['step']} could not be committed (it needs ")
    assert f"the newest commit, step {stands}, stands: {lost} steps lost, about " in line
    (warned,) = [line for line in process.err.splitlines() if "✘" in line]
    assert "It would fit at " in warned

    again = floor.warm(TRAIN, job.records, drained["step"] + 5, *BIG, env=job.env)
    assert again.wait() == 0, again.text
    assert job.events("resumed")[-1]["step"] == stands
