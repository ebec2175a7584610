"""A rank that hangs is named with place and stack, and the job ends as if it had not hung."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from floor import Job

from outlast.health.processes import look_at, tracer_of
from thorough import some

SCRIPT = Path(__file__).with_name("hanging.py")
STEPS, AT = 60, 40
KINDS = {  # how → (what is said of it, where it is)
    "stop": ("it is stopped", "stop() at hanging.py:"),
    "loop": ("it is in", "loop() at hanging.py:"),
    "hold": ("it holds the interpreter's lock", "hold() at hanging.py:"),
    "regex": ("it holds the interpreter's lock", "regex() at hanging.py:"),
    "lock": ("it waits for a lock", "lock() at hanging.py:"),
    "read": ("it is blocked in a read", "read() at hanging.py:"),
    "vfork": ("the kernel does not let it go (state D)", "vfork() at hanging.py:"),
    "skip": ("step 40's barrier()", "step() at hanging.py:"),
}


def run(floor, directory, kind, *, ranks=2, culprit=1, plain=False, env=None):
    job = Job(directory / "job", ranks)
    agent = floor.outlast(
        *("run", "--nproc-per-node", ranks, "--dir", job.directory, SCRIPT),
        *(job.records, STEPS, kind, culprit, AT, *["--plain"] * plain),
        env={"OUTLAST_HEALTH_HANG": "auto", **(env or {})},
    )
    assert agent.wait() == 0, agent.text
    return job, agent


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """Number of ranks → what the script ends with when nothing happens to it."""
    import floor as real

    found = {}

    def of(ranks):
        if ranks not in found:
            directory = tmp_path_factory.mktemp("calm")
            floor = real.Floor(directory)
            job, _ = run(floor, directory, "calm", ranks=ranks)
            floor.close()
            assert not job.events("hang")
            found[ranks] = job.final()
        return found[ranks]

    return of


def check(job, kind, *, ranks, culprit, step):
    (event,) = job.events("hang")
    does, place = KINDS[kind]
    assert event["ranks"] == [culprit] == [event.rank]
    assert does in event["sentence"]
    assert f"rank {culprit} has" in event["sentence"]
    assert event["place"].startswith(place)
    assert event["step"] == step
    folder = job.directory / event["stacks"]
    stacks = [(folder / f"rank-{rank:05d}.txt").read_text() for rank in range(ranks)]
    assert place.partition("(")[0] in stacks[culprit]
    assert all("hanging.py" in text for text in stacks)
    return event


# The others are named in a job of several machines too, without py-spy, or in each attempt.
@pytest.mark.parametrize(
    "kind", ["stop", "loop", "vfork", "skip", *some(["hold", "lock", "read"], 1)]
)
def test_named_and_gone_on(floor, tmp_path, calm, kind):
    ranks, culprit = (4, 2) if kind == "stop" else (2, 1)
    job, agent = run(floor, tmp_path, kind, ranks=ranks, culprit=culprit)
    check(job, kind, ranks=ranks, culprit=culprit, step=AT if kind == "skip" else AT - 1)
    assert [event["world_size"] for event in job.events("attempt_formed")] == [ranks] * 2
    assert job.finals() == [calm(ranks)] * ranks  # bit for bit
    assert f"rank {culprit} has" in agent.err
    assert not [event for event in job.events("worker_lost") if event.rank == culprit]


@pytest.mark.parametrize("kind", some(["lock", "hold"], 1))
def test_a_script_that_knows_nothing_of_it(floor, tmp_path, calm, kind):
    job, _ = run(floor, tmp_path, kind, plain=True)
    check(job, kind, ranks=2, culprit=1, step=None)
    assert job.finals() == [calm(2)] * 2


@pytest.mark.parametrize("kind", some(["regex", "read"], 1))
def test_without_py_spy(floor, tmp_path, kind):
    job, _ = run(floor, tmp_path, kind, env={"OUTLAST_NO_SPY": "1"})
    check(job, kind, ranks=2, culprit=1, step=AT - 1)


def test_the_same_hang_in_each_attempt_is_a_bug_of_the_script(floor, tmp_path):
    job = Job(tmp_path / "job", 1)
    agent = floor.outlast(
        *("run", "--nproc-per-node", 1, "--dir", job.directory, SCRIPT),
        *(job.records, STEPS, "hold", 0, AT, "--again"),
        env={"OUTLAST_HEALTH_HANG": "auto"},
    )
    assert agent.wait() == 76, agent.text
    assert "the same hang at the same step three times: a bug in the script" in agent.err
    assert [event["proven"] for event in job.events("hang")] == [True] * 3


def test_a_tracer_is_known_by_name(tmp_path):
    sleeper = subprocess.Popen(["/bin/sleep", "60"])
    log = tmp_path / "log"
    strace = subprocess.Popen(["strace", "-o", log, "-p", str(sleeper.pid)], stderr=-1, text=True)
    try:
        assert tracer_of(os.getpid()) == ""
        with strace.stderr:
            assert "attached" in strace.stderr.readline()
        assert tracer_of(sleeper.pid) == look_at(sleeper.pid).tracer == f"strace (pid {strace.pid})"
    finally:
        for one in (strace, sleeper):
            one.kill()
            one.wait()


def test_nobody_is_watched_where_the_owner_says_so(floor, tmp_path):
    job, _ = run(floor, tmp_path, "calm", env={"OUTLAST_HEALTH_HANG": "off"})
    assert job.final()["hash"] == json.loads((job.records / "final-1.json").read_text())["hash"]
    assert not job.events("hang")
