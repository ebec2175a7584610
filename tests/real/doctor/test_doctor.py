"""The doctor on one machine: each sickness made for real, and found."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from floor import free_port, until

from outlast.drill.metadata_server import AwsMetadataServer
from outlast.health.doctor.probes import Child
from outlast.policy.fitness import PlatformFacts, judge_platform

TIERS = """
[notice]
platform = "none"
grace = "20 s"
[[tier]]
name = "full"
url = "{full}"
[[tier]]
name = "locked"
url = "{locked}"
[[tier]]
name = "slow"
url = "{slow}"
"""
BLOCKED = "{major}:{minor} 2000000"  # bytes a second


def doctor(floor, *arguments, groups=(), env=None, at=None):
    """The doctor's findings by name, and its exit code."""
    enter = "".join(f"echo $$ > '{one}'; " for one in groups)

    command = f'{enter}exec "{sys.executable}" -m outlast doctor --json "$@"'
    process = floor.cold("-c", command, "sh", *arguments, program="/bin/sh", env=env, cwd=at)
    code = process.wait()
    answer = json.loads(process.out)
    assert answer["exit_code"] == code, process.text
    return {one["name"]: one for one in answer["findings"]}, code, process


def failed(findings):
    return {name for name, one in findings.items() if one["status"] == "failed"}


def test_doctor_is_content_and_leaves_nothing(floor, tmp_path):
    job = tmp_path / "job"
    process = floor.outlast(
        *("doctor", "--dir", job, "--state", "64MB"),
        cold=True,
        env={"OUTLAST_NOTICE_GRACE": "120 s", "COLUMNS": 100},
    )
    assert process.wait() == 0, process.text
    *_, last, after = process.out.splitlines()
    assert "is fit" in last
    assert after == f"Next: outlast run --dir {job} train.py"
    assert "✔  storage local" in process.out
    assert "GFLOP/s" in process.out
    assert "64 MB to local at" in process.out
    assert "\x1b" not in process.out
    assert not job.exists()


def test_doctor_finds_full_disk_read_only_slow_storage_and_little_memory(
    floor, tmp_path, mount, group
):
    full, locked, slow = mount("size=2m"), mount("ro"), tmp_path / "slow"
    fill = ["dd", "if=/dev/zero", f"of={full / 'filler'}", "bs=4k"]
    assert subprocess.run(fill, capture_output=True, check=False).returncode
    slow.mkdir()
    device = slow.stat().st_dev
    if os.major(device) == 0:
        pytest.skip("the temporary directory is on no disk whose speed can be limited")
    throttled = BLOCKED.format(major=os.major(device), minor=os.minor(device))
    groups = [
        group("memory", "limit_in_bytes", 1 << 30),
        group("blkio", "throttle.write_bps_device", throttled),
    ]
    (tmp_path / "outlast.toml").write_text(TIERS.format(full=full, locked=locked, slow=slow))
    findings, code, process = doctor(floor, "--state", "4GB", groups=groups, at=tmp_path)
    assert code == 1
    assert {"storage full", "storage locked", "notice", "memory"} <= failed(findings), process.text
    assert "no space left" in findings["storage full"]["seen"]
    assert "prune" in findings["storage full"]["todo"]
    assert "read-only file system" in findings["storage locked"]["seen"]
    assert findings["storage slow"]["status"] == "ok"
    assert findings["storage slow"]["figures"]["write_bytes_per_s"] < 4e6
    assert findings["notice"]["figures"]["needs_s"] > 1000
    assert "of the 20 s between a notice and the end" in findings["notice"]["seen"]
    assert "faster [[tier]]" in findings["notice"]["todo"]
    assert findings["memory"]["figures"]["available_bytes"] < 1 << 30
    assert not list(slow.iterdir())
    assert [path.name for path in full.iterdir()] == ["filler"]


def test_doctor_finds_what_is_written_wrong_and_mixed_installations(floor, tmp_path):
    (tmp_path / "outlast.toml").write_text("[checkpoint]\nkep = 3\n")
    findings, code, _ = doctor(floor, at=tmp_path)
    assert code == 1
    assert "did you mean checkpoint.keep?" in findings["settings"]["seen"]
    (tmp_path / "outlast.toml").unlink()
    info = tmp_path / "path" / "torch-2.12.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.12.0\n")
    path = os.pathsep.join([str(info.parent), os.environ.get("PYTHONPATH", "")])
    findings, code, _ = doctor(floor, at=tmp_path, env={"PYTHONPATH": path})
    assert code == 1
    assert failed(findings) == {"versions"}
    assert "torch 2.12.0 is installed" in findings["versions"]["seen"]


def test_a_metadata_service_is_asked_for_real():
    def asked(url):
        wanted = {"platform": "aws", "base_url": url, "file": "", "command": [], "grace_s": None}
        child = Child("platform", wanted, 60.0)
        try:
            until(child.is_over, "its end")
            return judge_platform(child.answer(PlatformFacts))
        finally:
            child.close()

    deaf = asked(f"http://127.0.0.1:{free_port()}")
    assert deaf.status == "failed"
    assert "no notice would be heard" in deaf.seen
    with AwsMetadataServer() as service:
        heard = asked(service.url)
    assert heard.status == "ok"
    assert heard.figures == {"notice_s": 120.0}


def test_doctor_refuses_what_cannot_be_meant(floor):
    for arguments in (["--state", "much"], ["--nnodes", "4:2"], ["--nnodes", "x"], ["--no-flag"]):
        process = floor.outlast("doctor", *arguments, cold=True)
        assert process.wait() == 2
        assert len(process.err.strip().splitlines()) == 1, process.err


def test_a_doctor_that_is_stopped_leaves_nothing(floor, tmp_path):
    job = tmp_path / "job"
    process = floor.outlast("doctor", "--dir", job, cold=True)
    until(lambda: list(tmp_path.glob("job/**/doctor-*")), "something written", running=process)
    process.signal(signal.SIGTERM)
    assert process.wait() == 143, process.text
    assert not job.exists()


@pytest.fixture
def frozen(tmp_path, mount):
    """A file system that takes nothing: whoever writes there waits in the kernel."""
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(16 << 20)
    try:
        subprocess.run(["mkfs.ext4", "-q", image], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system can be made: {error}")
    place = mount("loop", "ext4", image)
    (place / "job").mkdir()
    subprocess.run(["fsfreeze", "--freeze", place], check=True)
    yield place / "job"
    subprocess.run(["fsfreeze", "--unfreeze", place], check=True)


def test_a_probe_that_hangs_in_the_kernel_is_left_behind(frozen):
    child = Child("place", {"url": str(frozen), "writes": True, "locks": True}, 1.0)
    until(child.is_over, "the deadline")
    assert child.timed_out
    assert child.problem() == "it did not end within 1 s"
    child.close()


def test_a_probe_ends_with_the_doctor(floor, frozen):
    process = floor.outlast("doctor", "--dir", frozen, cold=True)
    until(lambda: len(floor.offspring()) > 2, "probes", running=process)
    time.sleep(0.1)
    process.signal(signal.SIGKILL)
    process.wait()
    # All but the one that the frozen disk holds: that one ends when the disk moves again.
    until(lambda: len(floor.offspring()) <= 1, "no probe")
