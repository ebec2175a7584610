"""Fixtures of the real floor."""

import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import floor as real
import psutil
import pytest

import thorough

PY_SPY = Path(sys.executable).with_name("py-spy")
STDERR = pytest.StashKey()  # pytest's own, past what it captures


def pytest_configure(config):
    config.stash[STDERR] = os.dup(sys.__stderr__.fileno())


def pytest_ignore_collect(collection_path, config):
    """Of the few tests that run alone, one after the other, only their files are imported."""
    if config.option.markexpr == "alone" and collection_path.match("test_*.py"):
        return "mark.alone" not in collection_path.read_text() or None
    return None


@pytest.fixture(autouse=True)
def _stacks_of_what_hangs(request):
    """Shortly before a test is given up, what each process that it has started is doing."""
    seconds = float(request.config.getini("faulthandler_timeout"))
    told = request.node.nodeid, request.config.stash[STDERR]
    watch = threading.Timer(seconds - 10, _show_stacks, told)
    watch.daemon = True
    watch.start()
    yield
    watch.cancel()


def _show_stacks(name, fd):
    os.write(fd, f"\n{name} hangs; its processes:\n".encode())
    for child in psutil.Process().children(recursive=True):
        command = [PY_SPY, "dump", "--nonblocking", "--pid", str(child.pid)]
        subprocess.run(command, stdout=fd, stderr=fd, timeout=20, check=False)


@pytest.fixture(name="floor")
def _floor(tmp_path):
    """Starts real processes; at the end none of them runs any more."""
    started = real.Floor(tmp_path)
    yield started
    started.close()


@pytest.fixture
def job(tmp_path, monkeypatch):
    """The directory of a job in this very process, which no launcher has started."""
    real.alone(monkeypatch)
    return tmp_path / "job"


@pytest.fixture
def rng():
    """Random numbers that a failing run prints the seed of: set OUTLAST_TEST_SEED to replay."""
    return random.Random(thorough.seed())
