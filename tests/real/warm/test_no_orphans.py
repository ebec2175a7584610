"""The server's end is its workers' end, and the agent's end is everybody's."""

import os
import signal

import psutil
from floor import TRAIN, Job, until

from outlast.launch.warm import client
from thorough import ALL

RANKS = 2
STEPS = 60


def start(floor, job, *options):
    return floor.outlast(
        *("run", "--nproc-per-node", RANKS, TRAIN, job.records, STEPS, "--light"),
        *("--pause", "0.03", *options),
        env=job.env,
    )


def servers(floor):
    """The server's process, and not its forks."""
    found = []
    for process in floor.offspring():
        try:
            if "outlast.launch.warm" in process.cmdline():
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def test_an_agent_killed_alone_takes_all_with_it(floor, tmp_path):
    job = Job(tmp_path / "job", RANKS)
    run = start(floor, job)
    until(lambda: job.begun() >= 5, "steps", running=run)
    workers = floor.workers()
    (server,) = servers(floor)
    assert len(workers) == RANKS
    assert {psutil.Process(pid).ppid() for pid in workers} == {server}
    run.kill()
    for pid in (server, *workers):
        until(lambda pid=pid: not _runs(pid), f"the end of {pid}")


def test_an_agent_killed_alone_takes_programs_that_are_not_python_with_it(floor, tmp_path):
    job, sleep = Job(tmp_path / "job", RANKS), ["sleep", "600"]
    run = floor.outlast("run", "--nproc-per-node", RANKS, "--no-python", *sleep, env=job.env)

    def sleeping():
        found = [process.pid for process in floor.offspring() if process.cmdline() == sleep]
        return found if len(found) == RANKS else None

    workers = until(sleeping, "the programs", running=run)
    run.kill()
    for pid in workers:
        until(lambda pid=pid: not _runs(pid), f"the end of {pid}")


def test_an_agent_killed_while_the_server_imports(afresh, tmp_path):
    job = Job(tmp_path / "job", RANKS)
    run = start(afresh, job)
    (server,) = until(lambda: servers(afresh), "a server", running=run)
    run.kill()
    until(lambda: not _runs(server), "the server's end")


def test_a_server_killed_is_replaced(floor, tmp_path):
    job, calm = (Job(tmp_path / name, RANKS) for name in ("job", "calm"))
    run = start(floor, job)
    until(lambda: job.begun() >= 5, "steps", running=run)
    workers = floor.workers()
    (server,) = servers(floor)
    os.kill(server, signal.SIGKILL)
    for pid in workers:
        until(lambda pid=pid: not _runs(pid), f"the end of {pid}")
    assert run.wait() == 0, run.text
    lost = job.events("worker_lost")
    assert {event["signal"] for event in lost} == {"SIGKILL"}
    assert [event.attempt for event in job.events("attempt_formed")] == [1, 2]
    assert "start cold" not in run.err
    ranks = floor.ranks(RANKS, TRAIN, calm.records, STEPS, "--light", env=calm.env)
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].text
    assert [final["hash"] for final in job.finals()] == [final["hash"] for final in calm.finals()]


def impatient():
    """An agent that waits for its server for seconds, and not for a minute."""
    client.START_TIMEOUT_S = 10.0


def test_a_server_that_does_not_move_is_replaced(floor, tmp_path):
    script = tmp_path / "stops.py"
    script.write_text(
        "import os, signal, torch\n"
        "if os.environ['OUTLAST_ATTEMPT'] == '1':\n"
        "    if os.environ['RANK'] == '0':\n        signal.pause()\n"
        "    os.kill(os.getppid(), signal.SIGSTOP)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    job = Job(tmp_path / "job", RANKS)
    enter = None if ALL else impatient
    run = floor.outlast("run", "--nproc-per-node", RANKS, script, env=job.env, enter=enter)
    assert run.wait() == 0, run.text
    (lost,) = job.events("worker_lost")
    assert (lost.rank, lost["signal"]) == (1, "SIGKILL")
    assert [event.attempt for event in job.events("attempt_formed")] == [1, 2]
    assert not floor.workers()


def test_every_death_is_told_with_its_code(floor, tmp_path):
    script = tmp_path / "codes.py"
    script.write_text(
        "import os, signal, sys, torch\n"
        "attempt = int(os.environ['OUTLAST_ATTEMPT'])\n"
        "if os.environ['RANK'] == '1' and attempt == 1:\n    sys.exit(41)\n"
        "if os.environ['RANK'] == '1' and attempt == 2:\n    os.kill(os.getpid(), signal.SIGUSR1)\n"
        "if attempt < 3:\n    signal.pause()\n"
    )
    job = Job(tmp_path / "job", RANKS)
    run = floor.outlast("run", "--nproc-per-node", RANKS, script, env=job.env)
    assert run.wait() == 0, run.text
    lost = [(one.rank, one["exit_code"], one["signal"]) for one in job.events("worker_lost")]
    assert lost == [(1, 41, None), (1, 0, "SIGUSR1")]


def _runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
