"""Each row of the table of failures, produced for real, and what `outlast run` makes of it.

What only a GPU or NCCL can do is raised with the texts that they use (see docs/failures.md).
"""

import signal

import pytest
from failure_limits import MemoryGroup, mounted
from floor import SCRIPTS, STAMP, Job, until

FAILS = SCRIPTS / "fails.py"
GROUP_BYTES = 1 << 30
WAITS = {"back off, then restart", "leave the machine out"}


def start(floor, job, case, *arguments, ranks=1, enter=None, **env):
    return floor.outlast(
        *("run", "--nproc-per-node", ranks, FAILS, job.records, case, *arguments),
        env={**job.env, "OUTLAST_RESTART_BACK_OFF": "1 s", **env},
        enter=enter,
    )


def check_once(agent, job, kind, action):
    """It failed once, in this way, and finished after that."""
    assert agent.wait() == 0, agent.text
    assert {event["kind"] for event in job.events("worker_lost")} == {kind}, agent.err
    (restart,) = job.events("restart")
    assert (restart["kind"], restart["action"]) == (kind, action)
    assert (restart["wait_s"] > 0) == (action in WAITS)
    said = [line for line in agent.err.splitlines() if line.startswith("outlast: ")]
    (line,) = [line for line in said if "was lost" in line]
    assert f": {action}]" in line
    assert said[said.index(line) + 1].startswith("outlast: attempt 2: ")  # and no word in between
    assert len(STAMP.findall(agent.dated_err)) == len(said)
    return restart


RESTARTED = {
    "kill": ("killed", "restart"),
    "term": ("killed", "restart"),
    "segv": ("crash", "restart"),
    "bus": ("crash", "restart"),
    "ill": ("crash", "restart"),
    "abort": ("abort", "restart"),
    "exit": ("unknown", "restart"),
    "memory-error": ("memory", "restart elsewhere"),
    "torch-memory": ("memory", "restart elsewhere"),
    "eio": ("storage", "back off, then restart"),
    "refused": ("network", "back off, then restart"),
    "loader-killed": ("killed", "restart"),
    "gpu-memory": ("gpu memory", "restart"),
    "cuda": ("cuda", "restart"),
    "device-assert": ("script", "restart"),
    "ecc": ("gpu", "leave the machine out"),
    "lost-gpu": ("gpu", "leave the machine out"),
    "nccl": ("nccl", "restart"),
    "watchdog": ("network", "back off, then restart"),
}


@pytest.mark.parametrize("case", RESTARTED)
def test_a_failure_has_its_kind_and_the_job_goes_on(floor, tmp_path, case):
    job = Job(tmp_path / "job")
    agent = start(floor, job, case, "--at", tmp_path / "file")
    check_once(agent, job, *RESTARTED[case])
    if RESTARTED[case][1] == "leave the machine out":
        assert "there is no other machine that could go on: this one is tried again" in agent.err


def test_the_oom_killer_is_told_from_any_other_kill(floor, tmp_path):
    group = MemoryGroup(GROUP_BYTES)
    if group.why_not:
        pytest.skip(group.why_not)
    job = Job(tmp_path / "job")
    try:
        agent = start(floor, job, "oom-killer", enter=group.enter)
        check_once(agent, job, "memory", "restart elsewhere")
        (lost,) = job.events("worker_lost")
        assert lost["signal"] == "SIGKILL"
    finally:
        floor.close()
        group.close()


@pytest.mark.parametrize("read_only", [False, True], ids=["full", "read-only"])
def test_a_file_system_that_fails(floor, tmp_path, read_only):
    job = Job(tmp_path / "job")
    try:
        with mounted(tmp_path / "place", read_only=read_only) as place:
            agent = start(floor, job, "write", "--at", place)
            restart = check_once(agent, job, "storage", "back off, then restart")
    except PermissionError as error:
        pytest.skip(f"nothing can be mounted here: {error}")
    said = "Read-only file system" if read_only else "No space left on device"
    assert said in restart["reason"]


def test_a_collective_that_times_out(floor, tmp_path):
    job = Job(tmp_path / "job", 2)
    agent = start(floor, job, "gloo", ranks=2)
    check_once(agent, job, "network", "back off, then restart")


def test_a_killed_worker_and_the_echo_in_its_peer(floor, tmp_path):
    job = Job(tmp_path / "job", 2)
    agent = start(floor, job, "peer", ranks=2)
    assert check_once(agent, job, "killed", "restart")["reason"].startswith("rank 1 failed")


def test_an_assertion_at_the_same_step_twice_is_a_bug(floor, tmp_path):
    job = Job(tmp_path / "job")
    agent = start(floor, job, "assert", "--times", 9)
    assert agent.wait() == 76, agent.text
    assert len(job.events("restart")) == 1
    (finished,) = job.events("job_finished")
    assert (finished["kind"], finished["exit_code"]) == ("script", 76)
    assert "a bug in the script" in finished["reason"]


def test_a_server_that_is_away_is_waited_for_longer_each_time_and_not_for_ever(floor, tmp_path):
    job = Job(tmp_path / "job")
    limits = {"OUTLAST_RESTART_WITHOUT_PROGRESS": "3", "OUTLAST_RESTART_FAILURES": "0"}
    agent = start(floor, job, "refused", "--times", 9, **limits)
    assert agent.wait() == 76, agent.text
    assert [event["without_progress"] for event in job.events("restart")] == [1, 2]
    (finished,) = job.events("job_finished")
    assert "3 attempts in a row without progress; the last one: rank 0" in finished["reason"]
    assert finished["kind"] == "network"


def test_a_notice_ends_a_wait(floor, tmp_path):
    job = Job(tmp_path / "job")
    limits = {"OUTLAST_RESTART_BACK_OFF": "10 min", "OUTLAST_RESTART_WITHOUT_PROGRESS": "99"}
    agent = start(floor, job, "refused", "--times", 99, **limits)
    until(lambda: any(e["wait_s"] > 3 for e in job.events("restart")), "a wait", running=agent)
    agent.signal(signal.SIGTERM)
    assert agent.wait() == 75, agent.text
    waited_s = job.events("job_finished")[0].t - job.events("notice")[0].t
    assert waited_s < job.events("restart")[-1]["wait_s"]


def test_a_machine_remembers_its_failures_beyond_its_agent(floor, tmp_path):
    job = Job(tmp_path / "job")
    limits = {"OUTLAST_RESTART_FAILURES": "2"}
    first = start(floor, job, "kill", **limits)
    assert first.wait() == 0, first.text
    again = start(floor, job, "kill", "--times", 3, **limits)
    assert again.wait() == 0, again.text
    actions = [event["action"] for event in job.events("restart")]
    assert actions == ["restart", "leave the machine out"]
    mended = start(floor, job, "kill", "--times", 5, OUTLAST_RESTART_LET_IN="true", **limits)
    assert mended.wait() == 0, mended.text
    assert job.events("restart")[2]["action"] == "restart"
