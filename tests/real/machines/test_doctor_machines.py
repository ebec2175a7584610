"""Several machines examine themselves and each other, on a network of their own."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from floor import until

import outlast
from machine_network import Partition
from outlast.ledger.file import read_events

# What libfaketime does; Debian's makes sleeping by an absolute time fail, as Python 3.11 does.
AHEAD = """
#define _GNU_SOURCE
#include <time.h>
#include <unistd.h>
#include <sys/syscall.h>
int clock_gettime(clockid_t id, struct timespec *now) {
    int result = syscall(SYS_clock_gettime, id, now);
    if (id == CLOCK_REALTIME) now->tv_sec += 30;
    return result;
}
"""
SCRIPT = """
import os, pathlib, sys
pathlib.Path(sys.argv[1], "rank-" + os.environ["RANK"] + "-of-" + os.environ["WORLD_SIZE"]).touch()
"""


def findings_of(process):
    answer = json.loads(process.out)
    return answer, {one["name"]: one for one in answer["findings"]}


def another_clock(place):
    """A library that sets a process's clock ahead."""
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler: apt install gcc")
    (place / "ahead.c").write_text(AHEAD)
    library = place / "ahead.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, place / "ahead.c"], check=True)
    return {"LD_PRELOAD": library}


def another_version(place):
    """A copy of outlast that says that it is another version."""
    home = Path(outlast.__file__).parent
    shutil.copytree(home, place / "outlast", ignore=shutil.ignore_patterns("__pycache__"))
    version = place / "outlast" / "_version.py"
    version.write_text(version.read_text().replace('"0.', '"9.'))
    return {"PYTHONPATH": place}


def test_doctor_finds_a_skewed_clock_and_another_version(machines, tmp_path):
    sound, skewed, other = hosts = machines(3)
    environs = {skewed: another_clock(tmp_path), other: another_version(tmp_path / "other")}
    arguments = ["doctor", "--dir", tmp_path / "job", "--nnodes", "1:3", "--json", "--wait", "90s"]
    started = {
        host: host.outlast(
            *arguments,
            *("--local-addr", host.address),
            cold=True,
            env=environs.get(host),
        )
        for host in hosts
    }
    found = {}
    for host, process in started.items():
        code = process.wait()
        answer, found[host] = findings_of(process)
        assert code == (0 if host is sound else 1), process.text
        assert found[host]["machines"]["figures"] == {"met": 3, "fit": 1}, process.text
        assert found[host]["peers"]["status"] == "ok"
        assert (host.name in answer["others_sick"]) is False
        assert sound.name not in answer["others_sick"]
    clocks = {host: one["clock"] for host, one in found.items()}
    assert [clocks[host]["status"] for host in hosts] == ["ok", "failed", "ok"]
    assert clocks[skewed]["figures"]["offset_s"] == pytest.approx(30, abs=1)
    assert "ahead of those of 2 others" in clocks[skewed]["seen"]
    versions = [found[host]["versions alike"] for host in hosts]
    assert [one["status"] for one in versions] == ["ok", "ok", "failed"]
    assert "outlast 9." in versions[2]["seen"]


def test_preflight_leaves_out_a_machine_that_is_not_reached(machines, tmp_path):
    one, other, apart = hosts = machines(3)
    faults = [Partition(apart.machine, host.machine) for host in (one, other)]
    for fault in faults:
        fault.inject()
    script, seen, job = tmp_path / "train.py", tmp_path / "seen", tmp_path / "job"
    script.write_text(SCRIPT)
    seen.mkdir()
    started = [
        host.outlast(
            *("run", "--preflight", "--nnodes", "2:3", "--local-addr", host.address),
            *("--dir", job, script, seen),
        )
        for host in hosts
    ]
    assert started[2].wait() == 1, started[2].text
    assert f"{apart.name} should not start this job: peers" in started[2].err
    assert "does not reach" in started[2].err
    assert "Traceback" not in started[2].err
    for process in started[:2]:
        assert process.wait() == 0, process.text
        assert f"preflight: {apart.name} is left out: does not reach" in process.err
    assert sorted(path.name for path in seen.iterdir()) == ["rank-0-of-2", "rank-1-of-2"]
    recorded = [event for event in read_events(job) if event.event == "preflight"]
    fit = {event["machine"] for event in recorded if event["fit"]}
    assert fit == {one.name, other.name}
    assert all(list(event["unfit"]) == [apart.name] for event in recorded if event["fit"])


def test_preflight_stops_a_job_of_which_too_few_are_fit(machines, tmp_path):
    one, apart = hosts = machines(2)
    fault = Partition(apart.machine, one.machine)
    fault.inject()
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    started = [
        host.outlast(
            *("run", "--preflight", "--nnodes", "2", "--local-addr", host.address),
            *("--dir", tmp_path / "job", script, tmp_path),
        )
        for host in hosts
    ]
    for process in started:
        until(lambda process=process: process.poll() is not None, "its end")
        assert process.wait() == 1, process.text
        assert "machines are fit, and the job needs 2" in process.err
    assert not (tmp_path / "job" / "job.json").exists()
