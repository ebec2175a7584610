"""The storage is slow, fails, is full, is read-only; and is as before when that is healed."""

import errno
import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from floor import until
from test_fault_processes import COSTLY, ends_well

from outlast.drill import at
from outlast.drill.faults.storage import cannot_mount, unmount
from outlast.drill.workplace import MARK, empty_place

needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not here")
needs_mount = pytest.mark.skipif(cannot_mount() != "", reason=cannot_mount())


def tracer_of(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    return int(
        next(line for line in status.splitlines() if line.startswith("TracerPid")).split()[1]
    )


def fails(job, planned, struck, number):
    """Saves fail with this error, and succeed again when it is healed."""
    running = job.machines[0].started
    until(lambda: "was not saved" in running.err, "a save that fails", running=running)
    assert os.strerror(number) in running.err.partition("was not saved")[2]
    if planned.fault.promise.must_notice:
        assert os.strerror(number) in str(job.has("storage_error", struck.t)[0]["error"])
    planned.finish(job, lambda: True)
    healed = job.completed()
    until(lambda: job.newest() > healed, "a save that does not fail", running=running)
    assert running.poll() is None


@needs_strace
@COSTLY
def test_writes_that_fail(make, calm):
    planned = at(step=12).break_storage(for_s=60)
    job = make(planned, "--pause", 0.1)
    struck = planned.strike(job)
    assert tracer_of(job.machines[0].keeper)
    fails(job, planned, struck, errno.EIO)
    assert not tracer_of(job.machines[0].keeper)
    ends_well(job, calm, planned, struck)


@needs_strace
@COSTLY
def test_writes_that_take_long(make, calm):
    planned = at(step=12).slow_storage(0.3, for_s=2.5)
    job = make(planned, "--pause", 0.1)
    struck = planned.strike(job)
    tracer = tracer_of(job.machines[0].keeper)
    assert "delay_enter=300000" in " ".join(psutil.Process(tracer).cmdline())
    planned.finish(job)
    assert not psutil.pid_exists(tracer)
    ends_well(job, calm, planned, struck)
    slow = [event["durable_s"] for event in job.has("commit") if event["step"] > struck.last_step]
    before = [event["durable_s"] for event in job.has("commit") if event.t < struck.t]
    assert max(slow) > max(before)  # of several calls, each 0.3 s longer


@needs_mount
def test_a_file_system_without_room(make, calm):
    planned = at(step=12).fill_storage(for_s=60)
    job = make(planned, "--pause", 0.1)
    assert job.directory.is_mount()
    assert planned.fault.why_not(job) == ""
    struck = planned.strike(job)
    assert not os.statvfs(job.directory).f_bavail
    fails(job, planned, struck, errno.ENOSPC)
    ends_well(job, calm, planned, struck)
    planned.fault.release(job)
    assert not job.directory.is_mount()


@needs_mount
@COSTLY
def test_checkpoints_that_can_only_be_read(make, calm):
    planned = at(step=12).read_only_storage(for_s=60)
    job = make(planned, "--pause", 0.1)
    struck = planned.strike(job)
    with pytest.raises(OSError, match="Read-only"):
        (job.checkpoints / "new").touch()
    fails(job, planned, struck, errno.EROFS)
    assert not job.checkpoints.is_mount()
    ends_well(job, calm, planned, struck)


@needs_mount
@pytest.mark.parametrize("name", ["job", "my job"])
def test_two_faults_of_a_soak_share_one_file_system(tmp_path, name):
    job = SimpleNamespace(directory=tmp_path / name, completed=lambda: 3)
    faults = [at(step=1).fill_storage().fault for _ in range(2)]
    for fault in faults:
        assert fault.why_not(job) == ""
        fault.prepare(job)
    (job.directory / "kept").write_text("kept")
    faults[1].inject(job)
    with pytest.raises(OSError, match="No space left"):
        (job.directory / "large").write_bytes(bytes(1 << 20))
    for fault in faults:
        fault.heal(job)
    for fault in faults:
        fault.release(job)
    assert not job.directory.is_mount()
    assert (job.directory / "kept").read_text() == "kept"


@needs_mount
def test_what_a_drill_that_was_killed_has_left_mounted_is_taken_away(tmp_path):
    root = tmp_path / "a drill of mine"  # mountinfo writes the spaces in another way
    job = SimpleNamespace(
        directory=root / "job",
        machines=[],
        completed=lambda: 3,
        tiers={"local": root / "job" / "checkpoints"},
    )
    full, read_only = at(step=1).fill_storage().fault, at(step=1).read_only_storage().fault
    try:
        with empty_place(root):
            full.prepare(job)
            (root / "job" / "checkpoints").mkdir()
            read_only.inject(job)
            assert str(tmp_path) in Path("/proc/self/mountinfo").read_text()
        with empty_place(root):
            assert [path.name for path in root.iterdir()] == [MARK]
            assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()
    finally:
        read_only.heal(job)
        unmount(root / "job")


def test_a_directory_in_use_is_not_mounted_over(make, tmp_path):
    planned = at(step=1).kill()
    job = make(planned, steps=2)
    assert job.wait() == [0]
    why_not = at(step=1).fill_storage().fault.why_not(job)
    assert why_not == f"{job.directory} is not empty: no file system can be mounted there"


def test_why_it_cannot_be_done(make, monkeypatch, tmp_path):
    fault = at(step=1).break_storage().fault
    monkeypatch.setenv("PATH", str(tmp_path))
    assert fault.why_not(None) == "strace is not here: apt install strace"
    assert cannot_mount() == "mount is not here: apt install util-linux"


@needs_strace
def test_a_tracer_that_cannot_attach_is_gone():
    from outlast.drill.faults.fault import Missed
    from outlast.drill.faults.storage import attached

    child = subprocess.Popen(["true"])
    child.wait()
    before = {process.pid for process in psutil.Process().children()}
    with pytest.raises(Missed, match="strace is not attached"):
        attached(child.pid, ("-e", "trace=fsync"))
    assert {process.pid for process in psutil.Process().children()} <= before
