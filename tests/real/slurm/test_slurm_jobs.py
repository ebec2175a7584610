"""Jobs of a real Slurm that it ends in its several ways finish as if nothing had happened."""

import shlex
import shutil
import sys

import pytest
from floor import TRAIN, Job, until
from slurm_floor import SCRIPT

from thorough import ALL

STEPS = 600
PLAIN = (STEPS, "--light", "--every", "25 steps")
RUN = (sys.executable, "-m", "outlast", "run")
REQUEUE = {"OUTLAST_NOTICE_REQUEUE": "true"}


def training(job, pause=0.1):
    """The command line of a training that goes on for a minute when nothing ends it."""
    return ("--dir", job.directory, TRAIN, job.records, *PLAIN, "--pause", pause)


def undisturbed(floor, directory, num_ranks=1):
    calm = Job(directory / "calm", num_ranks)
    ranks = floor.ranks(num_ranks, TRAIN, calm.records, *PLAIN, env=calm.env)
    assert {rank.wait() for rank in ranks} == {0}, ranks[0].text
    return calm


def assert_undisturbed(job, calm):
    assert [final["hash"] for final in job.finals()] == [final["hash"] for final in calm.finals()]
    assert all(job.consumed(rank) == calm.consumed(rank) for rank in range(job.num_ranks))


def assert_left_in_order(job, out, *, source):
    """The first run drained at one step on all ranks, and the second went on from there."""
    assert "the keeper has died" not in out.read_text()  # Slurm signals every process of a step
    assert job.events("notice")[0]["source"] == source
    (drained,) = job.events("drained")
    assert [resumed["step"] for resumed in job.events("resumed")][1:] == [drained["step"]]
    assert not job.events("worker_lost")


def test_requeued_by_an_operator(slurm, floor, tmp_path):
    job, out = Job(tmp_path / "job"), tmp_path / "out"
    # Slurm requeues it itself: that the job would ask for it too changes nothing.
    number = slurm.sbatch("-N1", "-o", out, SCRIPT, *RUN, *training(job), env=REQUEUE)
    until(lambda: job.begun() >= 20, "steps")
    slurm.tell("scontrol", "requeue", number)
    slurm.again(number, out)
    shown = slurm.wait(number, "COMPLETED", out)
    assert shown["Restarts"] == "1"
    assert_left_in_order(job, out, source="SIGTERM")
    assert_undisturbed(job, undisturbed(floor, tmp_path, job.num_ranks))


@pytest.mark.skipif(not ALL, reason="takes a minute and a half")
def test_a_time_limit_of_which_nobody_warns(slurm, floor, tmp_path):
    """Slurm ends it, with SIGTERM, within 30 s of the limit."""
    job, out = Job(tmp_path / "job"), tmp_path / "out"
    number = slurm.sbatch(
        *("-n1", "--time=1", "-o", out, SCRIPT, *RUN, *training(job, pause=0.2)), env=REQUEUE
    )
    until(lambda: job.events("drained"), "the drain")
    shown = slurm.again(number, out)
    assert shown["Restarts"] == "1"
    assert f"Slurm runs job {number} again" in out.read_text()
    slurm.wait(number, "COMPLETED", out)
    assert_left_in_order(job, out, source="SIGTERM")
    assert_undisturbed(job, undisturbed(floor, tmp_path))


def test_one_task_of_an_array_is_requeued_and_a_cancelled_one_is_not(slurm, tmp_path):
    jobs = [Job(tmp_path / f"job-{task}") for task in range(2)]
    outs = [tmp_path / f"out-{task}" for task in range(2)]
    script = tmp_path / "array.sbatch"
    commands = [shlex.join(map(str, (*RUN, *training(job)))) for job in jobs]
    script.write_text(
        "#!/bin/bash\n#SBATCH --requeue\n"
        f"case $SLURM_ARRAY_TASK_ID in 0) srun {commands[0]};; 1) srun {commands[1]};; esac\n"
    )
    # A controller that is slow to answer: Slurm's SIGTERM comes while the command still runs.
    slow = tmp_path / "slow"
    slow.mkdir()
    real = shutil.which("scontrol", path=slurm.environ["PATH"])
    (slow / "scontrol").write_text(f'#!/bin/bash\n{real} "$@" && sleep 1\n')
    (slow / "scontrol").chmod(0o755)
    env = {**REQUEUE, "PATH": f"{slow}:{slurm.environ['PATH']}"}
    array = slurm.sbatch("-n1", "--array=0-1", "-o", tmp_path / "out-%a", script, env=env)
    until(lambda: min(job.begun() for job in jobs) >= 5, "steps")
    # The last task has the id of the whole array.
    slurm.tell("scancel", "--signal=USR1", f"{array}_1")
    assert slurm.wait(f"{array}_1", "PENDING", outs[1])["Restarts"] == "1"
    shown = slurm.show(f"{array}_0")
    assert (shown["JobState"], shown["Restarts"]) == ("RUNNING", "0")
    assert f"Slurm runs job {array}_1 again" in outs[1].read_text()
    slurm.tell("scancel", f"{array}_0")
    assert slurm.wait(f"{array}_0", "CANCELLED", outs[0])["Restarts"] == "0"
    assert len(jobs[0].events("drained")) == 1
    assert f"job {array}_0 is not requeued: Slurm is ending it" in outs[0].read_text()


def test_a_job_that_may_not_be_requeued_says_so(slurm, tmp_path):
    job, out = Job(tmp_path / "job"), tmp_path / "out"
    number = slurm.sbatch(
        *("-N1", "--no-requeue", "-o", out, SCRIPT, *RUN, *training(job)), env=REQUEUE
    )
    until(lambda: job.begun() >= 5, "steps")
    slurm.tell("scancel", "--signal=USR1", number)
    assert slurm.wait(number, "FAILED", out)["ExitCode"] == "75:0"
    text = out.read_text()
    assert f"job {number} is not requeued: " in text
    assert f"To run it again: scontrol requeue {number}" in text
