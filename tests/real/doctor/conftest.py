"""Machines that are sick on purpose: small disks, read-only mounts, limits of control groups."""

import itertools
import os
import subprocess
from pathlib import Path

import pytest

GROUPS = Path("/sys/fs/cgroup")
_numbers = itertools.count()


@pytest.fixture
def mount(tmp_path):
    """``mount("size=2m")``: a tmpfs of its own, gone at the end."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    made = []

    def make(options, kind="tmpfs", device="none"):
        place = tmp_path / f"mount-{len(made)}"
        place.mkdir()
        command = ["mount", "-t", kind, "-o", options, device, place]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
        made.append(place)
        return place

    yield make
    for place in made:
        subprocess.run(["umount", "-l", place], check=True)


@pytest.fixture
def group():
    """``group("memory", "limit_in_bytes", 1 << 30)``: a control group; its file of processes."""
    made = []

    def make(controller, name, value):
        place = GROUPS / controller / f"outlast-test-{os.getpid()}-{next(_numbers)}"
        try:
            place.mkdir()
            made.append(place)
            (place / f"{controller}.{name}").write_text(str(value))
        except OSError as error:
            pytest.skip(f"no control group can be made here: {error}")
        return place / "cgroup.procs"

    yield make
    for place in made:
        for pid in (place / "cgroup.procs").read_text().split():
            (place.parent / "cgroup.procs").write_text(pid)
        place.rmdir()
