"""The job's disk is read-only, fails or is full: at the start, in a save, at the end."""

import contextlib
import re
import shutil
import subprocess
import sys

import pytest
from floor import TRAIN, Job, until
from keeper_floor import keepers

EVERY = ("--light", "--every", "2 steps")
WAYS = pytest.mark.parametrize("way", ["run", "python"])


@contextlib.contextmanager
def mounted(path, *options):
    """A file system over ``path``, for as long as this is held."""
    path.mkdir(parents=True, exist_ok=True)
    command = ["mount", *options, str(path)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def read_only(path):
    """Whatever is made below ``path`` is refused with EROFS."""
    return mounted(path, "-t", "tmpfs", "-o", "ro", "none")


@contextlib.contextmanager
def bound_read_only(path):
    """``path`` as it is, to be read."""
    with mounted(path, "--bind", str(path)):
        subprocess.run(["mount", "-o", "remount,bind,ro", str(path)], check=True)
        yield


def job_in(place):
    """A job whose directory is in ``place``, and what its script writes is not."""
    job = Job(place / "job")
    job.records.rmdir()
    job.records = place.with_name("records")
    job.records.mkdir()
    return job


def start(floor, job, way, steps, *arguments, env=None):
    arguments = (TRAIN, job.records, steps, *EVERY, *arguments)
    if way == "run":
        return floor.outlast("run", "--dir", job.directory, *arguments, env=env)
    return floor.warm(*arguments, env={**job.env, **(env or {})})


def held_between_saves(floor, job, way, steps):
    """A job that waits in step 6 with all saved that it had begun to save: (process, gate).

    A mount in the midst of a save may come between a manifest and the keeper's look at it: the save
    then counts as removed, which is another story.
    """
    gate = job.records / "gate"
    held = ("--pause", "0.1", "--gate", gate, "--gate-in", 6)
    process = start(floor, job, way, steps, *held)

    def newest():
        return max((event["step"] for event in job.events("commit")), default=0)

    until(lambda: newest() >= 4, "a commit", running=process)
    return process, gate


def refused(process):
    """The one line with which a job ends that cannot begin, or cannot save its end."""
    assert process.wait() == 77, process.text
    assert "Traceback" not in process.err
    lines = [line for line in process.err.splitlines() if "cannot" in line or "not commit" in line]
    assert len(lines) == 1, process.text
    return lines[0]


def saying(process, words):
    return [line for line in process.err.splitlines() if words in line]


# --- at the start --------------------------------------------------------------------------------


@WAYS
@pytest.mark.parametrize("is_new", [True, False])
def test_a_start_on_a_read_only_disk(floor, tmp_path, way, is_new):
    place = tmp_path / "place"
    place.mkdir()
    job = job_in(place)
    if not is_new:
        first = start(floor, job, "python", 2)
        assert first.wait() == 0, first.text
    with bound_read_only(place):
        line = refused(start(floor, job, way, 4))
    what = "made" if is_new else "written"
    assert line.startswith(f"outlast: {job.directory} cannot be {what}: Read-only file system; ")
    assert "make it writable again" in line
    assert line.endswith("or give another directory with --dir")
    again = start(floor, job, way, 4)
    assert again.wait() == 0, again.text


def test_a_start_on_a_disk_that_fails(floor, tmp_path):
    job = Job(tmp_path / "job")
    inject = ("-e", "trace=fsync", "-e", "inject=fsync:error=EIO")
    process = floor.cold(
        *("-f", "-qq", "-o", tmp_path / "trace", *inject),
        *(sys.executable, TRAIN, job.records, 4, *EVERY),
        env=job.env,
        program=shutil.which("strace") or pytest.skip("strace is not here"),
    )
    line = refused(process)
    assert line.startswith(f"outlast: {job.directory} cannot be written: Input/output error; see ")
    assert line.endswith("or give another directory with --dir")


@WAYS
@pytest.mark.parametrize("is_there", [True, False])
def test_a_start_without_a_place_for_the_socket(floor, tmp_path, way, is_there):
    job = Job(tmp_path / "job")
    runtime = tmp_path / "place" / "run"
    runtime.parent.mkdir()
    if is_there:
        runtime.mkdir(mode=0o700)
    with bound_read_only(runtime.parent):
        line = refused(start(floor, job, way, 4, env={"OUTLAST_RUNTIME_DIR": runtime}))
    assert "Read-only file system" in line
    assert str(runtime) in line
    assert "set OUTLAST_RUNTIME_DIR to a" in line


# --- while it trains, and at its end -------------------------------------------------------------


@WAYS
def test_saves_that_fail_are_said_once_and_so_is_that_they_work_again(floor, tmp_path, way):
    job = Job(tmp_path / "job")
    process, gate = held_between_saves(floor, job, way, 60)
    with read_only(job.checkpoints):
        gate.touch()
        until(lambda: len(job.events("storage_error")) > 1, "two that fail", running=process)
    assert process.wait() == 0, process.text
    assert job.newest() == 60
    (line,) = saying(process, "was not saved")
    failed = job.events("storage_error")[0]["step"]
    assert line.startswith(f"outlast: step {failed} was not saved: OSError: [Errno 30] Read-only ")
    assert f"'{job.checkpoints}/step-" in line
    assert "; make it writable again" in line
    assert "; training goes on" in line
    (line,) = saying(process, "saving works again")
    assert line.endswith(f"(it had failed since step {failed})")
    assert not job.events("restart")


@WAYS
def test_an_end_that_is_not_saved_is_the_last_word(floor, tmp_path, way):
    job = Job(tmp_path / "job")
    process, gate = held_between_saves(floor, job, way, 30)
    with read_only(job.directory):  # the ledger's too
        gate.touch()
        line = refused(process)
    newest = job.newest()
    assert re.match(
        rf"outlast: the final state, step 30, is not committed \(OSError: \[Errno 30\] Read-only "
        rf"file system: '{job.checkpoints}.*'; make it writable again .*\); the newest commit is "
        rf"step {newest}\. Mend it and run the same command again",
        line,
    )
    assert len(saying(process, "was not saved")) <= 1
    again = start(floor, job, way, 30)
    assert again.wait() == 0, again.text
    assert job.newest() == 30


def test_a_disk_that_fails_in_the_midst_of_saves(floor, tmp_path):
    strace = shutil.which("strace") or pytest.skip("strace is not here")
    job = Job(tmp_path / "job")
    process = start(floor, job, "python", 30, "--pause", "0.1")
    until(job.newest, "a commit", running=process)
    (keeper,) = keepers(floor)
    tracer = floor.cold(
        *("-f", "-p", keeper.pid, "-o", tmp_path / "trace"),
        *("-e", "trace=fsync", "-e", "inject=fsync:error=EIO"),
        program=strace,
    )
    until(lambda: "attached" in tracer.err, "strace is attached", running=tracer)
    line = refused(process)
    tracer.wait()
    words = f"is not committed (OSError: [Errno 5] Input/output error in {job.checkpoints}; see the"
    assert words in line
    assert "run the same command again" in line
    assert len(saying(process, "was not saved")) <= 1
    again = start(floor, job, "python", 30)
    assert again.wait() == 0, again.text
    assert job.newest() == 30


# --- a full disk ---------------------------------------------------------------------------------


@WAYS
def test_a_full_disk_says_what_is_missing_where_and_what_to_do(floor, tmp_path, way):
    place = tmp_path / "place"
    with mounted(place, "-t", "tmpfs", "-o", "size=16m", "none"):
        job = job_in(place)
        arguments = ("--pause", "0.1", "--width", "5000")
        process = start(floor, job, way, 60, *arguments)
        until(job.newest, "a commit", running=process)
        (place / "fill").touch()
        with contextlib.suppress(OSError), (place / "fill").open("wb", buffering=0) as fill:
            while True:
                fill.write(b"x" * 4096)
        failure = until(lambda: saying(process, "was not saved"), "a failure", running=process)
        (place / "fill").unlink()
        assert process.wait() == 0, process.text
        assert job.newest() == 60
    (line,) = failure
    found = re.search(
        r"No space left on device: step (\d+) needs (.*) MiB in (\S+), and (.*)", line
    )
    assert found, line
    assert 1 < float(found[2]) < 1.1  # what a commit takes, and its directory
    assert found[3] == str(job.checkpoints)
    assert re.match(r"[0-9.]+ (bytes|KiB) are free; free space there, keep fewer chec", found[4])
    assert "(checkpoint.keep, " in line
    assert "save to another place (--dir, " in line
    assert len(saying(process, "was not saved")) == 1
    assert len(saying(process, "saving works again")) == 1


def test_a_start_without_room_is_said_once(floor, tmp_path):
    place = tmp_path / "place"
    with mounted(place, "-t", "tmpfs", "-o", "size=256k", "none"):
        job = job_in(place)
        with contextlib.suppress(OSError), (place / "fill").open("wb", buffering=0) as fill:
            while True:
                fill.write(b"x" * 4096)
        line = refused(start(floor, job, "python", 4))
        assert line.startswith(f"outlast: {job.directory} cannot be ")
        assert "No space left on device; free space there" in line
        (place / "fill").unlink()
        again = start(floor, job, "python", 4)
        assert again.wait() == 0, again.text
