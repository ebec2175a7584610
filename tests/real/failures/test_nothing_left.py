"""Nothing of an attempt lives when the next one begins, whatever it has started."""

import os
import signal
from pathlib import Path

import psutil
import pytest
from floor import SCRIPTS, Job, until

import thorough

PARTS, ENDS = (10, 50) if thorough.ALL else (1, 5)  # of cold workers, and as many of warm ones
PATIENT = {"OUTLAST_RESTART_FAILURES": "0"}
WARM = f"""import sys

import torch  # which is what makes it start warm

sys.path.insert(0, {str(SCRIPTS)!r})
import leaves_behind

leaves_behind.main()
"""


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("start", ["cold", "warm"])
def test_nothing_of_an_attempt_lives_when_the_next_begins(floor, tmp_path, start, part):
    script = SCRIPTS / "leaves_behind.py"
    if start == "warm":
        script = tmp_path / "warm.py"
        script.write_text(WARM)
    job = Job(tmp_path / "job", 2)
    run = floor.outlast(
        *("run", "--nproc-per-node", 2, "--max-restarts", ENDS + 10),
        *(script, job.records, ENDS, thorough.seed() + part),
        env={**job.env, **PATIENT},
    )
    assert run.wait(270) == 0, run.text
    found = job.records / "alive"
    assert not found.exists(), found.read_text()
    assert len(job.events("attempt_formed")) == ENDS + 1
    left = sum(len((one / "pids").read_text().splitlines()) for one in _recorded(job))
    assert left > ENDS / 2, "too little was started to say anything"
    print(f"{ENDS} ends with {left} processes that wrote themselves down")


def _recorded(job):
    return [one for one in job.records.glob("attempt-*") if (one / "pids").exists()]


def _runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("start", ["cold", "warm"])
def test_an_agent_killed_alone_takes_what_its_workers_have_started(floor, tmp_path, start):
    script = tmp_path / "script.py"
    script.write_text(
        ("import torch\n" if start == "warm" else "") + "import os, signal, subprocess, sys\n"
        "from pathlib import Path\n"
        "for number in range(3):\n"
        "    one = subprocess.Popen(['sleep', '1000'], start_new_session=number > 0)\n"
        "    if number == 2:\n        os.kill(one.pid, signal.SIGSTOP)\n"
        "    Path(sys.argv[1], f'child-{number}').write_text(str(one.pid))\n"
        "Path(sys.argv[1], 'ready').touch()\n"
        "signal.pause()\n"
    )
    job = Job(tmp_path / "job")
    run = floor.outlast("run", script, job.records, env=job.env)
    until((job.records / "ready").exists, "children", running=run)
    children = [int((job.records / f"child-{number}").read_text()) for number in range(3)]
    assert all(map(_runs, children))
    (watcher,) = [one for one in floor.offspring() if "outlast.health.watcher" in one.cmdline()]
    # A warm script may be there before the watcher is.
    where = Path(f"/proc/{watcher.pid}/wchan")
    until(lambda: "poll" in where.read_text(), "a watcher that looks", running=run)
    watcher.send_signal(signal.SIGSTOP)  # whatever it was doing
    os.kill(run.pid, signal.SIGKILL)
    for pid in children:
        until(lambda pid=pid: not _runs(pid), f"the end of {pid}")


def test_what_a_worker_that_finished_has_started_goes_on(floor, tmp_path):
    """As with torchrun: an upload that goes on behind a script's end is its owner's business."""
    script = tmp_path / "script.py"
    script.write_text(
        "import subprocess, sys\n"
        "from pathlib import Path\n"
        "one = subprocess.Popen(['sleep', '1000'])\n"
        "Path(sys.argv[1], 'child').write_text(str(one.pid))\n"
    )
    job = Job(tmp_path / "job")
    run = floor.outlast("run", script, job.records, env=job.env)
    assert run.wait() == 0, run.text
    child = int((job.records / "child").read_text())
    assert _runs(child)
    os.kill(child, signal.SIGKILL)
