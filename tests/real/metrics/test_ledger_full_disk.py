"""The disk under the ledger is full: training goes on, and the ledger says what is missing."""

import contextlib
import subprocess

import pytest
from floor import TRAIN, Job, free_port, until
from metrics_floor import scrape, value


@pytest.fixture(name="small")
def _small(tmp_path):
    """A file system of one megabyte."""
    place = tmp_path / "small"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(place)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place):
    """Take all that is free."""
    with contextlib.suppress(OSError), (place / "fill").open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)
    with contextlib.suppress(OSError), (place / "fill").open("ab", buffering=0) as file:
        while True:
            file.write(b"x")


def pad(job):
    """Have the ledger end with its block: a disk that is full takes the rest of that, too."""
    ledger = job.directory / "ledger.jsonl"
    left = -ledger.stat().st_size % 4096
    with ledger.open("ab", buffering=0) as file:
        file.write(b" " * (left - 1) + b"\n" if left else b"")


def test_training_goes_on_and_the_gap_is_written_down(floor, tmp_path, small):
    """Checkpoints go elsewhere; what is asked of the port meanwhile is answered."""
    job, port = Job(small / "job", 2), free_port()
    (tmp_path / "outlast.toml").write_text(
        f'[[tier]]\nname = "local"\nurl = "{tmp_path / "checkpoints"}"\n'
    )
    process = floor.outlast(
        *("run", "--nproc-per-node", 2, "--dir", job.directory, TRAIN, job.records, 400),
        *("--light", "--every", "20 steps", "--pause", "0.05"),
        env={"OUTLAST_METRICS_PORT": port},
    )
    until(lambda: value(scrape(port), "outlast_commits_total"), "a commit", running=process)
    for _ in range(3):  # a line may come between the two
        fill(small)
        pad(job)
    fill(small)
    until(lambda: "cannot be written" in process.err, "a lost line", running=process)
    begun = job.begun()
    until(lambda: job.begun() > begun + 20, "further steps", running=process)
    assert value(scrape(port), "outlast_job_running") == 1
    assert not job.events("watch_gap")
    (small / "fill").unlink()
    (gap, *_) = until(lambda: job.events("watch_gap"), "the gap", running=process)
    assert (gap["what"], gap["reason"]) == ("ledger", "No space left on device")
    assert gap["lost"] >= 1
    assert gap["from_t"] + gap["seconds"] <= gap.t + 1e-3
    assert process.wait() == 0, process.text
    assert [final["step"] for final in job.finals()] == [400, 400]
    assert "Traceback" not in process.text
