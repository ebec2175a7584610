"""Warm or cold: what the end of an attempt leads to, and which server is asked."""

import signal
import sys
from types import SimpleNamespace
from typing import ClassVar

import pytest

from outlast.errors import Exit
from outlast.launch.ending import Crew
from outlast.launch.membership import JobOver
from outlast.launch.warm import client, starts
from outlast.launch.warm.client import NotWaitedFor, ServerLost, StartRefused
from outlast.launch.warm.imports import is_per_worker, lasting
from outlast.launch.warm.starts import COLD_FIRST_S, FIRST_S, MAX_SERVERS, Starts


class FakeServer:
    """A server that does what it is told to."""

    made: ClassVar = []
    outcomes: ClassVar = []

    def __init__(self, environ):
        self.environ = dict(environ)
        self.is_lost = False
        self.asked = []
        FakeServer.made.append(self)

    def wait_until_ready(self, leaves):
        if leaves():
            raise NotWaitedFor
        outcome = FakeServer.outcomes.pop(0) if FakeServer.outcomes else None
        if outcome is not None:
            self.is_lost = isinstance(outcome, ServerLost)
            raise outcome

    def preload(self, arguments):
        self.asked.append(list(arguments))

    def close(self):
        self.is_lost = True


class FakeContext:
    def __init__(self, server, script, marks, kept, **asked):
        self.server, self.script, self.kept, self.asked = server, script, kept, asked

    def start(self):
        pass

    def close(self):
        pass


@pytest.fixture
def clock(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import torch\n")
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(starts.time, "monotonic", lambda: now.s)
    monkeypatch.setattr(starts, "WarmServer", FakeServer)
    monkeypatch.setattr(starts, "WarmContext", FakeContext)
    monkeypatch.setattr(starts, "ColdContext", FakeCold)
    FakeServer.made, FakeServer.outcomes = [], []
    return now


def launch(**changes):
    given = {
        "worker_options": ["-u", "-m", "outlast.launch.worker"],
        "entrypoint": sys.executable,
        "args": ["-u", "-m", "outlast.launch.worker", "train.py", "--lr", "1"],
        "config": SimpleNamespace(numa_options=None),
    }
    return SimpleNamespace(**(given | changes))


class FakeCold(FakeContext):
    def __init__(self, marks, kept, **asked):
        super().__init__("cold", 0, marks, kept, **asked)


def start(one, environ=None, kept=()):
    with one.in_charge(Crew(dict(kept))):
        return starts.torchs.start_processes(
            envs={0: {"RANK": "0", **(environ or {})}}, start_method="spawn", name="x"
        )


def started(one, environ=None):
    """ "cold", or the server that was asked."""
    return start(one, environ).server


@pytest.fixture(autouse=True)
def _say(monkeypatch):
    monkeypatch.setattr(starts, "say", None)  # make() puts another one there


def make(said, **changes):
    starts.say = said.append
    one = Starts(launch(**changes), True)
    one.open()
    return one


def test_one_server_for_all_attempts_and_torchs_own_function_comes_back(clock):
    said = []
    original = starts.torchs.start_processes
    one = make(said)
    servers = {id(started(one, {"RANK": str(rank), "MASTER_PORT": str(rank)})) for rank in range(3)}
    assert len(servers) == len(FakeServer.made) == 1
    assert FakeServer.made[0].asked == [["train.py", "--lr", "1"]]  # once
    assert starts.torchs.start_processes is original
    assert not said


@pytest.mark.parametrize("act", [Starts.warm_up, started], ids=["warming up", "at the start"])
def test_a_notice_is_not_kept_waiting_by_a_server_that_imports(clock, act):
    one = make([])
    one.has_notice = lambda: True
    with pytest.raises(JobOver) as over:
        act(one)
    assert over.value.exit_code == Exit.DRAINED


def test_another_environment_asks_for_another_server(clock):
    one = make([])
    first = started(one)
    second = started(one, {"OMP_NUM_THREADS": "7"})
    assert second is not first
    assert first.is_lost


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"worker_options": []}, "--no-python"),
        ({"entrypoint": "/bin/python"}, "PYTHON_EXEC"),
        ({"config": SimpleNamespace(numa_options=object())}, "NUMA"),
    ],
)
def test_what_cannot_start_warm(clock, changes, reason):
    said = []
    one = make(said, **changes)
    assert started(one) == "cold"
    assert not FakeServer.made
    (line,) = said
    assert reason in line


def test_a_light_script_starts_cold_without_a_word(clock, tmp_path):
    said = []
    (tmp_path / "train.py").write_text("import os\n")
    one = make(said)
    assert [started(one) for _ in range(2)] == ["cold"] * 2
    assert FakeServer.made[0].is_lost
    assert not said


def test_a_refusal_is_for_good_and_said_once(clock):
    said = []
    FakeServer.outcomes = [StartRefused("an import has started 2 threads")]
    one = make(said)
    assert [started(one) for _ in range(3)] == ["cold"] * 3
    assert said == ["workers start cold, because an import has started 2 threads"]
    assert not FakeServer.made[0].is_lost  # workers that are kept would die with it
    one.close()
    assert FakeServer.made[0].is_lost


def test_a_server_that_dies_is_replaced_a_few_times(clock):
    said = []
    FakeServer.outcomes = [ServerLost("their server was ended by SIGKILL")] * MAX_SERVERS
    one = make(said)
    assert started(one) == "cold"
    assert len(FakeServer.made) == MAX_SERVERS
    (line,) = said
    assert line.endswith("because their server was ended by SIGKILL")


def test_a_death_at_once_leads_to_one_cold_start(clock):
    said = []
    one = make(said)
    assert started(one) != "cold"
    clock.s += FIRST_S / 2
    one.ended([-signal.SIGSEGV])
    assert started(one) == "cold"
    clock.s += COLD_FIRST_S / 2
    one.ended([1])  # cold it dies too: it was not for being warm
    assert started(one) != "cold"
    clock.s += FIRST_S / 2
    one.ended([1])
    assert started(one) == "cold"
    clock.s += COLD_FIRST_S * 2
    one.ended([1])
    assert [started(one) for _ in range(2)] == ["cold"] * 2
    assert said[-1].startswith("workers start cold, because a warm worker died")


def test_a_trial_that_did_not_fail_proves_nothing(clock):
    one = make([])
    started(one)
    one.ended([1])
    assert started(one) == "cold"
    clock.s += COLD_FIRST_S * 2
    assert started(one) != "cold"  # another machine has come
    clock.s += COLD_FIRST_S * 2
    one.ended([1])
    assert started(one) != "cold"


@pytest.mark.parametrize(
    ("lasted_s", "codes"),
    [
        (FIRST_S * 2, [-signal.SIGSEGV]),
        (FIRST_S / 2, [-signal.SIGKILL]),
        (FIRST_S / 2, [1, -signal.SIGTERM]),
        (FIRST_S / 2, []),
    ],
)
def test_deaths_that_prove_nothing(clock, lasted_s, codes):
    one = make([])
    started(one)
    clock.s += lasted_s
    one.ended(codes)
    assert started(one) != "cold"


def test_variables_of_a_worker_and_of_the_job():
    assert all(map(is_per_worker, ("RANK", "OUTLAST_STORE", "TORCHELASTIC_RUN_ID", "MASTER_PORT")))
    assert lasting({"RANK": "0", "PATH": "x", "OMP_NUM_THREADS": "1"}) == {
        "PATH": "x",
        "OMP_NUM_THREADS": "1",
    }


def test_a_server_has_the_threads_of_its_workers_and_none_is_there_for_another_python(monkeypatch):
    monkeypatch.setattr(client, "WarmServer", FakeServer)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert client.begin("2").environ["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in client.begin("1").environ
    monkeypatch.setenv("PYTHON_EXEC", "/opt/python")
    assert client.begin("2") is None


@pytest.mark.parametrize("cold", [False, True], ids=["warm", "cold"])
def test_those_that_are_kept_are_handed_on_however_others_start(clock, cold):
    one = make([])
    if cold:
        FakeServer.outcomes.append(StartRefused("so it is"))
    found = start(one, kept={2: "a worker"})
    assert found.kept == Crew({2: "a worker"})
    assert (found.server == "cold") == cold
    assert "start_method" not in found.asked
