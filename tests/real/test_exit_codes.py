"""``outlast run`` from outside: what it leaves with, and that the same command is always right."""

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from floor import SCRIPTS, TRAIN, Job, until

PLAIN = SCRIPTS / "plain.py"


def run(floor, job, *arguments, ranks=1, script=TRAIN, **options):
    env = {**job.env, **options.pop("env", {})}
    return floor.outlast("run", "--nproc-per-node", ranks, script, *arguments, env=env, **options)


def notes(job, suffix=""):
    """What the workers of plain.py noted."""
    return {path.name: path.read_text() for path in job.records.glob(f"worker-?{suffix}")}


def hashes(job):
    return [final["hash"] for final in job.finals()]


def undisturbed(floor, job, *arguments):
    """The hashes of a run of the same training that nothing happened to."""
    calm = Job(job.directory.with_name("calm"), job.num_ranks)
    ranks = floor.ranks(job.num_ranks, TRAIN, calm.records, *arguments, env=calm.env)
    assert [rank.wait() for rank in ranks] == [0] * job.num_ranks, ranks[0].text
    return hashes(calm)


# --- finished ------------------------------------------------------------------------------------


def test_finished_and_the_same_command_again_does_nothing(floor, tmp_path):
    job = Job(tmp_path / "job", 2)
    arguments = (job.records, 7, "--light")
    first = run(floor, job, *arguments, ranks=2, cold=True)
    assert first.wait() == 0, first.text
    assert "finished" in first.err
    before = [job.lines(rank) for rank in range(2)], hashes(job), job.newest()
    assert before[2] == 7
    again = run(floor, job, *arguments, ranks=2)
    assert again.wait() == 0, again.text
    assert ([job.lines(rank) for rank in range(2)], hashes(job), job.newest()) == before
    assert [event["exit_code"] for event in job.events("job_finished")] == [0, 0]


def has_handler(pid, number):
    (caught,) = re.findall(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.M)
    return int(caught, 16) >> (number - 1) & 1


def test_a_signal_that_comes_while_it_imports_is_kept(floor, tmp_path):
    job = Job(tmp_path / "job")
    started = run(floor, job, job.records, 7, cold=True)
    until(lambda: has_handler(started.pid, signal.SIGTERM), "a handler", running=started)
    started.signal(signal.SIGTERM)
    assert started.wait() == 75, started.text
    assert started.err == (
        "outlast: SIGTERM came before anything had begun; start me again (exit 75)\n"
    )
    assert not job.directory.exists()


def test_an_unchanged_script(floor, tmp_path):
    job = Job(tmp_path / "job")
    started = run(floor, job, job.records, "finish", ranks=2, script=PLAIN, cold=True)
    assert started.wait() == 0, started.text
    assert len(notes(job)) == 2


def test_a_module_and_another_program_and_torchruns_variables(floor, tmp_path):
    job = Job(tmp_path / "job")
    env = {**job.env, "PET_NPROC_PER_NODE": 3}
    # By the console script: it does not have the working directory on its path, python -m has.
    outlast = Path(sys.executable).with_name("outlast")
    arguments = ("run", "-m", "plain", job.records, "finish")
    started = floor.cold(*arguments, program=outlast, env=env, cwd=SCRIPTS)
    assert started.wait() == 0, started.text
    assert set(notes(job)) == {"worker-0", "worker-1", "worker-2"}
    assert all(note.split()[1:] == ["__main__", "finish"] for note in notes(job).values())
    shell = f'echo "$1" > {job.records}/shell-$RANK; exit $RANK'
    arguments = ("--nproc-per-node", 1, "--no-python", "/bin/sh", "-c", shell, "sh", "--said")
    started = floor.outlast("run", *arguments, env=job.env)
    assert started.wait() == 0, started.text
    assert (job.records / "shell-0").read_text() == "--said\n"


# --- failures ------------------------------------------------------------------------------------


def test_a_worker_killed_three_times(floor, rng, tmp_path):
    job = Job(tmp_path / "job", 4)
    arguments = (job.records, 40, "--light", "--pause", "0.02")
    agent = run(floor, job, *arguments, ranks=4)
    for kill in range(3):
        rank, later = rng.randrange(4), rng.randrange(1, 8)
        pids = until(lambda: len(found := floor.workers()) == 4 and found, "workers", running=agent)
        begun = until(
            lambda pids=pids, rank=rank: job.begun(pids[rank]), "a first step", running=agent
        )
        until(lambda begun=begun, later=later: job.begun() >= begun + later, "steps", running=agent)
        os.kill(pids[rank], signal.SIGKILL)
        lost = until(
            lambda kill=kill: len(found := job.events("restart")) > kill and found,
            "a restart",
            running=agent,
        )
        assert f"rank {rank} failed (ended by SIGKILL)" in lost[-1]["reason"], lost[-1]
    assert agent.wait() == 0, agent.text
    assert len(job.events("attempt_formed")) == 4
    # The other workers may have died of it, of a connection closed by their peer.
    killed = [event for event in job.events("worker_lost") if event["signal"]]
    assert [event["signal"] for event in killed] == ["SIGKILL"] * 3
    assert hashes(job) == undisturbed(floor, job, *arguments[1:])


def test_a_bug_is_shown_and_not_restarted_for_ever(floor, tmp_path):
    job = Job(tmp_path / "job")
    agent = run(floor, job, job.records, 9, "--light", "--raise-in", 5)
    assert agent.wait() == 76, agent.text
    assert len(job.events("restart")) == 1
    assert [event["step"] for event in job.events("resumed")][1] == 3
    assert [event["step"] for event in job.events("worker_lost")] == [4, 4]
    assert "Traceback (most recent call last)" in agent.err
    assert "ZeroDivisionError: there is no step 5" in agent.err
    assert "a bug in the script (exit 76)" in agent.err
    assert "outlast/launch/worker.py" not in agent.err  # the traceback is the script's alone


def test_a_bug_before_any_session(floor, tmp_path):
    job = Job(tmp_path / "job")
    agent = run(floor, job, job.records, "bug", ranks=2, script=PLAIN)
    assert agent.wait() == 76, agent.text
    assert len(job.events("restart")) <= 1
    assert "LookupError: what everybody has typed once" in agent.err


def test_a_script_called_wrongly_is_not_restarted(floor, tmp_path):
    job = Job(tmp_path / "job")
    agent = run(floor, job, job.records, "dance", ranks=2, script=PLAIN)
    assert agent.wait() == 2, agent.text
    assert not job.events("restart")
    assert "invalid choice: 'dance'" in agent.err


# --- notices -------------------------------------------------------------------------------------


def test_every_signal_drains_and_the_same_command_goes_on(floor, rng, tmp_path):
    job = Job(tmp_path / "job", 2)
    arguments = (job.records, 120, "--light", "--pause", "0.02")
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGKILL):
        since, later = job.begun(), rng.randrange(1, 15)
        agent = run(floor, job, *arguments, ranks=2)
        until(lambda since=since, later=later: job.begun() >= since + later, "steps", running=agent)
        if number == signal.SIGKILL:
            agent.kill()
            until(lambda: not floor.trainers(), "the end of the killed agent's workers")
            continue
        agent.signal(number)
        assert agent.wait() == 75, agent.text
        stopped = [job.lines(rank)[-1]["step"] for rank in range(2)]
        assert stopped == [job.newest()] * 2
        assert (job.events("drained")[-1]["step"], job.events("drained")[-1]["committed"]) == (
            job.newest(),
            True,
        )
        assert job.events("notice")[-1]["source"] == number.name
        assert "outlast run" in agent.err.splitlines()[-1]  # the command that goes on
    last = run(floor, job, *arguments, ranks=2)
    assert last.wait() == 0, last.text
    assert len(job.events("resumed")) == 5
    assert not job.events("worker_lost")
    assert hashes(job) == undisturbed(floor, job, *arguments[1:])


@pytest.mark.parametrize("code", [0, 1, 75])
def test_an_unchanged_script_hears_the_notice(floor, tmp_path, code):
    job = Job(tmp_path / "job")
    agent = run(floor, job, job.records, "obey", code, ranks=2, script=PLAIN)
    until(lambda: len(notes(job)) == 2, "both workers", running=agent)
    agent.signal(signal.SIGTERM)
    # Whatever the script leaves with: it did not finish, it was told to go.
    assert agent.wait() == 75, agent.text
    assert set(notes(job, ".heard").values()) == {"SIGTERM"}
    assert not job.events("restart")


@pytest.mark.parametrize("behaviour", ["ignore", "deaf"])
def test_a_script_that_does_not_listen_is_ended_at_the_deadline(floor, tmp_path, behaviour):
    job = Job(tmp_path / "job")
    env = {"OUTLAST_NOTICE_GRACE": "3 s"}
    agent = run(floor, job, job.records, behaviour, ranks=2, script=PLAIN, env=env)
    until(lambda: len(notes(job)) == 2, "both workers", running=agent)
    agent.signal(signal.SIGTERM)
    assert agent.wait() == 75, agent.text
    (finished,) = job.events("job_finished")
    assert finished["exit_code"] == 75
    # It had its time, all but the margin: a fact of the ledger, not of this machine's pace.
    assert finished.t > job.events("notice")[0]["deadline_t"] - 1.5


def test_a_second_interrupt_ends_at_once(floor, tmp_path):
    job = Job(tmp_path / "job")
    agent = run(floor, job, job.records, "ignore", ranks=2, script=PLAIN)
    until(lambda: len(notes(job)) == 2, "both workers", running=agent)
    agent.signal(signal.SIGINT)
    until(lambda: job.events("notice"), "the first one's notice", running=agent)
    time.sleep(1)  # real time for the workers to be told, and to ignore it
    assert agent.poll() is None
    agent.signal(signal.SIGINT)
    assert agent.wait() == 75, agent.text
    assert not floor.offspring()


# --- storage that fails --------------------------------------------------------------------------


def failed_saves(job):
    return [event for event in job.events("storage_error") if event["operation"] == "save"]


@pytest.mark.alone
def test_a_save_that_fails_does_not_stop_training(floor, tmp_path):
    job = Job(tmp_path / "job", 2)
    aside = job.directory / "aside"
    ranks = floor.ranks(2, TRAIN, job.records, 60, "--pause", "0.06", env=job.env)
    until(job.newest, "a commit")
    job.checkpoints.rename(aside)
    job.checkpoints.write_text("in the way")
    until(lambda: failed_saves(job), "a save has failed")
    job.checkpoints.unlink()
    aside.rename(job.checkpoints)
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].text
    assert {event.rank for event in failed_saves(job)} == {0}  # said once, by the keeper
    assert hashes(job) == undisturbed(floor, job, 60)
    # Those that came due while it was tried again were skipped; the rest is there.
    assert job.newest() == 60


def test_a_last_save_that_fails_is_said(floor, tmp_path):
    job = Job(tmp_path / "job")
    aside = job.directory / "aside"
    arguments = (job.records, 8, "--light", "--pause", "0.3")
    agent = run(floor, job, *arguments)
    until(job.newest, "a commit")
    job.checkpoints.rename(aside)
    job.checkpoints.write_text("in the way")
    assert agent.wait() == 77, agent.text
    (line,) = [line for line in agent.err.splitlines() if "(exit 77)" in line]
    assert "step 8, is not committed" in line
    assert not job.events("restart")
    job.checkpoints.unlink()
    aside.rename(job.checkpoints)
    before = job.newest()
    again = run(floor, job, *arguments)
    assert again.wait() == 0, again.text
    assert job.newest() == 8
    assert job.events("resumed")[-1]["step"] == before > 0


@pytest.mark.parametrize("code", [76, 77, 78])
def test_a_scripts_own_exit_is_its_failure_whatever_the_number(floor, tmp_path, code):
    """Ours say that storage, a checkpoint or too many losses ended the job; this is none of it."""
    job = Job(tmp_path / "job", 1)
    script = tmp_path / "leaves.py"
    script.write_text(f"import sys\nsys.exit({code})\n")
    running = run(floor, job, script=script, env={"OUTLAST_RESTART_MAX": "0"})
    assert running.wait() == 76, running.text
    assert f"the script left with exit code {code}, which outlast keeps for itself" in running.err
