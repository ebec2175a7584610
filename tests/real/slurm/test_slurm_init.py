"""The batch script of ``outlast init slurm`` on a real Slurm that ends its job in several ways."""

import os
import sys
from pathlib import Path

import pytest
from floor import SCRIPTS, TRAIN, Job, until
from slurm_floor import ASK_S

from outlast.cli.init import Slurm, Training
from outlast.errors import Exit
from thorough import ALL

STEPS = 150
FOR_LONG = 5000
LIGHT = (TRAIN, "--light")
ELASTIC = (SCRIPTS / "elastic.py",)  # whose data are not tied to the number of workers
# A warm server imports for two seconds what these scripts do not need; test_slurm_jobs.py has it.
STARTS = {} if ALL else {"OUTLAST_WORKERS_WARM": "false"}


@pytest.fixture(name="submit")
def _submit(slurm, tmp_path):
    """Submits the script for a training of ``nodes`` workers; gives the job's number."""

    def submit(job, out, *arguments, what=LIGHT, steps=STEPS, nodes=1, fewest=None, **settings):
        script, *flags = map(str, what)
        training = Training(
            name="job",
            script=script,
            arguments=(str(job.records), str(steps), *flags, "--pause", "0.1", *arguments),
            nodes=nodes,
            fewest=fewest,
            cpus=1,
        )
        recipe = Slurm(training=training, directory=str(job.directory), **settings)
        script = tmp_path / "job.sbatch"
        script.write_text(recipe.render())
        path = os.pathsep.join([str(Path(sys.executable).parent), slurm.environ["PATH"]])
        return slurm.sbatch("-o", out, script, env={"PATH": path, **STARTS})

    return submit


def assert_undisturbed(floor, job, steps=STEPS, what=LIGHT):
    calm = Job(job.directory.with_name("calm"), job.num_ranks)
    script, *flags = what
    ranks = floor.ranks(job.num_ranks, script, calm.records, steps, *flags, env=calm.env)
    assert {rank.wait() for rank in ranks} == {0}, ranks[0].text
    assert [final["hash"] for final in job.finals()] == [final["hash"] for final in calm.finals()]
    # Who got which samples is another matter where the number of ranks has changed.
    assert what is ELASTIC or all(
        job.consumed(rank) == calm.consumed(rank) for rank in range(job.num_ranks)
    )


@pytest.mark.parametrize(("mem", "told"), [("", None), ("1M", "1M"), ("0", "0")])
def test_slurm_takes_what_is_asked_of_memory(slurm, tmp_path, mem, told):
    """The test's machines have as much as slurm.conf gives them, a megabyte."""
    script = tmp_path / "job.sbatch"
    script.write_text(Slurm(training=Training(name="job", script="t", cpus=1), mem=mem).render())
    slurm.tell("sbatch", "--test-only", script)
    shown = slurm.show(slurm.sbatch("--hold", "-o", tmp_path / "out", script))
    assert told is None or shown["MinMemoryNode"] == told


def test_two_machines_preempted_come_back_and_finish(slurm, submit, floor, tmp_path):
    job, out = Job(tmp_path / "job", num_ranks=2), tmp_path / "out"
    number = submit(job, out, nodes=2, grace_s=30)
    until(lambda: job.begun() >= 20, "steps")
    urgent = slurm.sbatch("-p", "urgent", "-N2", "--exclusive", "--wrap", "true")
    slurm.wait(urgent, "COMPLETED", out)
    assert slurm.again(number, out)["Restarts"] == "1"
    slurm.wait(number, "COMPLETED", out)
    (drained,) = job.events("drained")
    assert [resumed["step"] for resumed in job.events("resumed")][1:] == [drained["step"]]
    assert f"Slurm runs job {number} again" in out.read_text()
    assert not job.events("worker_lost")
    assert_undisturbed(floor, job)


def test_each_start_takes_the_machines_that_there_are(slurm, submit, floor, tmp_path):
    job, out = Job(tmp_path / "job", num_ranks=2), tmp_path / "out"
    taken = slurm.sbatch("-p", "urgent", "-N1", "--exclusive", "--wrap", "sleep 600")
    slurm.wait(taken, "RUNNING", out)
    number = submit(job, out, what=ELASTIC, nodes=2, fewest=1)
    until(lambda: job.begun() >= 10, "steps")
    slurm.tell("scancel", taken)
    slurm.wait(taken, "CANCELLED", out)
    slurm.tell("scontrol", "requeue", number)
    slurm.again(number, out)
    slurm.wait(number, "COMPLETED", out)
    formed = [(event["nodes"], event["world_size"]) for event in job.events("attempt_formed")]
    assert formed[0] == (1, 1)
    assert formed[-1] == (2, 2)
    assert len(job.events("drained")) == 1
    assert_undisturbed(floor, job, what=ELASTIC)


def test_the_time_limit_is_heard_before_it_comes(slurm, submit, floor, tmp_path):
    steps = 400  # 40 s; the notice comes within 30 of a limit that is near
    job, out = Job(tmp_path / "job"), tmp_path / "out"
    number = submit(job, out, steps=steps, time="10", grace_s=30)
    until(lambda: job.begun() >= 5, "steps")
    slurm.tell("scontrol", "update", f"JobId={number}", "TimeLimit=1")
    until(lambda: slurm.show(number)["Restarts"] == "1", "the requeue", every_s=ASK_S)
    (drained,) = job.events("drained")
    assert drained["committed"]
    assert job.events("notice")[0]["source"] == "SIGTERM"
    slurm.wait(number, "PENDING", out)
    slurm.tell("scontrol", "update", f"JobId={number}", "TimeLimit=10")
    slurm.again(number, out)
    slurm.wait(number, "COMPLETED", out)
    assert [resumed["step"] for resumed in job.events("resumed")] == [0, drained["step"]]
    assert_undisturbed(floor, job, steps)


def test_a_cancelled_job_drains_and_stays_away(slurm, submit, tmp_path):
    job, out = Job(tmp_path / "job"), tmp_path / "out"
    number = submit(job, out, steps=FOR_LONG)
    until(lambda: job.begun() >= 5, "steps")
    slurm.tell("scancel", number)
    assert slurm.wait(number, "CANCELLED", out)["Restarts"] == "0"
    assert len(job.events("drained")) == 1


def test_a_wrong_call_is_not_started_again(slurm, submit, tmp_path):
    job, out = Job(tmp_path / "job"), tmp_path / "out"
    number = submit(job, out, "--no-such-flag")
    shown = slurm.wait(number, "FAILED", out)
    assert (shown["ExitCode"], shown["Restarts"]) == (f"{int(Exit.USAGE)}:0", "0")
