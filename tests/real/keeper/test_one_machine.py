"""A replaced pod beside its predecessor: one directory, locks that do not reach, one is paused.

The second one runs in namespaces of its own (processes, mounts, host name), where the job's lock
lies on another inode: it is as free there as on a file system without locks.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys

import psutil
import pytest
from floor import until
from keeper_floor import SCRIPT, KeeperJob

from outlast.checkpoint.manifest import MANIFEST
from outlast.keeper.process import RUNTIME_VARIABLE
from outlast.ledger.file import FILE_NAME, read_events
from thorough import some

STEPS = 8
AT = 6
ENDS = "of this job was begun on elsewhere meanwhile: this one, attempt 1, ends"
ISOLATED = ("unshare", "--pid", "--fork", "--kill-child", "--mount", "--uts", "--mount-proc")


def may_isolate():
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*ISOLATED, "true"], capture_output=True, check=False).returncode == 0


needs_namespaces = pytest.mark.skipif(not may_isolate(), reason="namespaces of one's own: as root")

WAYS = {
    "outlast run": ("-m", "outlast", "run", "--nproc-per-node", 1, "--dir"),
    "python": (),
    "torchrun": ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"),
}
CODES = {"outlast run": 77, "python": 77, "torchrun": 1}  # torchrun turns every code into 1


def command(way, job):
    place = (job.directory,) if way == "outlast run" else ()
    return (*WAYS[way], *place, SCRIPT, job.records, STEPS, "--light")


def elsewhere(floor, job, arguments, env):
    """The same command in another pod."""
    lock = job.directory / "job.json"
    other = job.directory.with_name("other.json")
    shutil.copy(lock, other)
    run = job.directory.with_name("other-run")
    run.mkdir(mode=0o700)
    words = shlex.join([sys.executable, *map(str, arguments)])
    script = f"hostname elsewhere; mount --bind {other} {lock} && exec {words}"
    return floor.cold(
        *(*ISOLATED[1:], "sh", "-c", script),
        env={**env, RUNTIME_VARIABLE: run},
        program=ISOLATED[0],
    )


def stop_all(floor):
    """Everything that runs, at one moment, as a paused virtual machine does."""
    stopped = floor.offspring()
    for process in stopped:
        os.kill(process.pid, signal.SIGSTOP)
    for process in stopped:
        until(lambda one=process: one.status() == psutil.STATUS_STOPPED, "it is stopped")
    return stopped


def commits(job):
    """Attempts of the checkpoints that are committed, by step."""
    found = [json.loads(path.read_bytes()) for path in job.checkpoints.glob(f"*/{MANIFEST}")]
    return {one["step"]: one["attempt"] for one in found}


@needs_namespaces
@pytest.mark.parametrize("way", some(WAYS, 1))
def test_a_predecessor_that_was_paused_in_a_save_harms_nothing_and_ends(floor, tmp_path, way):
    job = KeeperJob(tmp_path / "job", free=-9)
    first = floor.cold(*command(way, job), env={**job.env, "HOLD_AT": AT})
    until(job.held, "the middle of a copy", running=first)
    stopped = stop_all(floor)
    second = elsewhere(floor, job, command(way, job), job.env)
    assert second.wait() == 0, second.text
    before = commits(job)
    assert before[AT] == before[STEPS] == 2
    ledger = (job.directory / FILE_NAME).read_bytes()
    for process in stopped:
        os.kill(process.pid, signal.SIGCONT)
    job.hold.touch()
    assert first.wait() == CODES[way], first.text
    assert ENDS in first.text, first.text
    assert "Traceback" not in first.text or way == "torchrun"
    assert commits(job) == before
    job.verified()
    # What it still wrote down stands behind the other's lines, under its own number.
    after = (job.directory / FILE_NAME).read_bytes()
    assert after.startswith(ledger)
    late = list(read_events(job.directory))[len(ledger.splitlines()) :]
    assert {event.attempt for event in late} <= {0, 1}
    assert len(late) == len(after.splitlines()) - len(ledger.splitlines())
    assert not [event for event in late if event.event in ("commit", "job_finished")]


def test_one_that_lives_on_this_machine_is_not_passed_whatever_its_lock_says(floor, tmp_path):
    job = KeeperJob(tmp_path / "job", pause=AT)
    first = floor.outlast(*command("outlast run", job)[2:], env=job.env)
    until(job.paused, "a step", running=first)
    lock = job.directory / "job.json"
    (tmp_path / "copy").write_bytes(lock.read_bytes())
    (tmp_path / "copy").rename(lock)  # another inode: nobody has locked it
    for way in ("outlast run", "python"):
        second = floor.cold(*command(way, job), env=job.env)
        assert second.wait() == 2, second.text
        (line,) = [line for line in second.err.splitlines() if "running already" in line]
        assert f"(process {first.pid})" in line
    job.go()
    assert first.wait() == 0, first.text
    assert set(commits(job).values()) == {1}
    assert job.newest() == STEPS
