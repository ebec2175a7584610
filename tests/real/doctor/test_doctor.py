"""The doctor on one machine: each sickness made for real, and found."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import pytest
from floor import free_port, until

from outlast.drill.metadata_server import AnswerFault, AwsMetadataServer
from outlast.health.doctor.examination import container
from outlast.health.doctor.probes import Child
from outlast.policy.fitness import (
    ContainerFacts,
    PlaceFacts,
    PlatformFacts,
    judge_place,
    judge_platform,
)

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


def doctor(floor, *arguments, groups=(), first="", env=None, at=None):
    """The doctor's findings by name, and its exit code."""
    enter = first + "".join(f"echo $$ > '{one}'; " for one in groups)
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
    assert re.search("^[✔!]  storage local", process.out, re.MULTILINE)  # "!": in memory
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


# Any process may make itself the first to be killed, as the kubelet does with such a pod.
ASKS_FOR_NOTHING = "echo 1000 > /proc/self/oom_score_adj; "
IN_POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}


def test_doctor_finds_what_is_written_wrong_mixed_installations_and_a_pod_without_requests(
    floor, tmp_path
):
    (tmp_path / "outlast.toml").write_text("[checkpoint]\nkep = 3\n")
    findings, code, _ = doctor(floor, at=tmp_path)
    assert code == 1
    assert "did you mean checkpoint.keep?" in findings["settings"]["seen"]
    (tmp_path / "outlast.toml").unlink()
    info = tmp_path / "path" / "torch-2.12.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.12.0\n")
    path = os.pathsep.join([str(info.parent), os.environ.get("PYTHONPATH", "")])
    findings, code, _ = doctor(
        floor, at=tmp_path, env={"PYTHONPATH": path} | IN_POD, first=ASKS_FOR_NOTHING
    )
    assert code == 1
    assert failed(findings) == {"versions"}
    assert findings["pod"]["status"] == "warning"
    assert "BestEffort" in findings["pod"]["seen"]
    assert "outlast init k8s --memory" in findings["pod"]["todo"]
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
    assert "hop" not in deaf.seen + deaf.todo
    with AwsMetadataServer() as service:
        heard = asked(service.url)
        # Only the answer with the token does not come: it is one hop too far.
        service.inject(AnswerFault(delay_s=30), method="PUT")
        lost = asked(service.url)
        service.inject(AnswerFault(status=500), method="PUT")
        ill = asked(service.url)
    assert lost.status == "failed"
    assert "without a token, so the hop limit of the answers is 1" in lost.seen
    assert "--http-put-response-hop-limit 2" in lost.todo
    assert "hop" not in ill.seen + ill.todo
    assert heard.status == "ok"
    assert heard.figures == {"notice_s": 120.0}


PLACE = """
import os, sys
import msgspec
from outlast.health.doctor.probes import probe_place
if user := int(sys.argv[2]):
    os.setgroups([]), os.setgid(user), os.setuid(user)
print(msgspec.json.encode(probe_place(sys.argv[1], writes=False, locks=True)).decode())
"""


def place(directory, *, env=None, user=0):
    """The doctor's finding of a directory, asked as this user of the machine's."""
    command = [sys.executable, "-c", PLACE, directory, str(user)]
    done = subprocess.run(
        command, env={**os.environ, **(env or {})}, capture_output=True, check=True
    )
    return judge_place("job", str(directory), msgspec.json.decode(done.stdout, type=PlaceFacts))


def test_a_volume_of_somebody_else_s_is_found_with_whose_it_is():
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    volume = Path(tempfile.mkdtemp(prefix="outlast-volume-"))  # a directory that all may enter
    try:
        volume.chmod(0o755)
        found = place(volume, user=1000)
        assert found.status == "failed", found
        assert "permission denied" in found.seen
        assert f"{volume} belongs to 0:0, mode 755; this process is 1000:" in found.seen
        assert "fsGroup" in found.todo
        os.chown(volume, 1000, 1000)
        assert place(volume, user=1000).status == "ok"
    finally:
        shutil.rmtree(volume)


def test_a_directory_in_memory_or_in_a_pod_s_own_layer_is_found(mount):
    found = place(mount("size=2m"))
    assert found.status == "warning"
    assert "in this machine's memory (tmpfs), and is lost with it" in found.seen
    base = mount("size=2m")  # an overlay cannot lie on an overlay
    lower, upper, work = (base / name for name in ("lower", "upper", "work"))
    for directory in (lower, upper, work):
        directory.mkdir()
    layer = mount(f"lowerdir={lower},upperdir={upper},workdir={work}", "overlay", "overlay")
    assert place(layer).status == "ok"
    inside = place(layer, env=IN_POD)
    assert inside.status == "warning"
    assert "in the container's own layer" in inside.seen


def test_a_pod_is_known_by_what_the_kubelet_gave_it(tmp_path):
    """The files of one that asks for nothing, on a machine with a network that it was not given."""
    files = {
        "proc/self/oom_score_adj": "1000\n",
        "proc/self/cgroup": "0::/kubepods.slice/pod1\n",
        "sys/fs/cgroup/kubepods.slice/pod1/cpu.weight": "1\n",
        "sys/class/infiniband/mlx5_0/node_guid": "\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = container(tmp_path, IN_POD)
    assert found == ContainerFacts(in_pod=True, oom_score_adj=1000, cpu_weight=1, rdma=["mlx5_0"])
    (tmp_path / "dev/infiniband").mkdir(parents=True)
    (tmp_path / "dev/infiniband/uverbs0").touch()
    (tmp_path / "dev/infiniband/rdma_cm").touch()
    assert container(tmp_path, {}).rdma_given == ["uverbs0"]
    assert container(tmp_path / "none", {}) == ContainerFacts()


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


# --- those who are told of incidents --------------------------------------------------------------

SECRET = "s3cr3t"
HOOK = f"json://user:{SECRET}@127.0.0.1:1/{SECRET}"


def messages(floor, tmp_path, urls=None, *, file=None, first=""):
    """The finding, and that nothing of an address but its public part was printed."""
    env = {} if urls is None else {"OUTLAST_TELL_URLS": urls}
    env |= {"OUTLAST_TELL_FILE": file} if file else {}
    found, code, process = doctor(floor, "--dir", tmp_path / "job", env=env, first=first)
    assert code == 0  # without messages a job can train, too
    assert SECRET not in process.text
    return found["messages"]


def test_an_address_that_apprise_cannot_read(floor, tmp_path):
    found = messages(floor, tmp_path, f"{HOOK} what://{SECRET}")
    assert found["status"] == "warning"
    assert found["seen"].startswith("of 2 addresses no message can be sent to what://…: ")
    assert "outlast tell --test" in found["todo"]


def test_a_variable_for_addresses_that_nobody_has_filled(floor, tmp_path):
    found = messages(floor, tmp_path, "")
    assert found["status"] == "warning"
    assert "OUTLAST_TELL_URLS is set, to nothing" in found["seen"]


def test_a_file_of_addresses_that_others_may_read(floor, tmp_path):
    file = tmp_path / "addresses"
    file.write_text(HOOK)
    file.chmod(0o644)
    found = messages(floor, tmp_path, file=file)
    assert found["status"] == "warning"
    assert "chmod 600" in found["seen"]


def test_messages_without_apprise(floor, tmp_path):
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text(
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, *p: None if name == 'apprise' else find(name, *p)\n"
    )
    found = messages(floor, tmp_path, HOOK, first=f"export PYTHONPATH='{hidden}'; ")
    assert (found["status"], found["todo"]) == ("warning", "pip install apprise")
