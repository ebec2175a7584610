"""Processes are killed and stopped: by the table of processes, the ledger and the end."""

import psutil
import pytest
from drilled_job import HANGS
from floor import until

from outlast.drill import at, during
from thorough import ALL

COSTLY = pytest.mark.skipif(not ALL, reason="OUTLAST_TEST_ALL")


def ends_well(job, calm, planned, struck, codes=(0,)):
    """The job comes to its end, and shows what the fault promises."""
    assert job.wait() == list(codes), job.text
    assert (job.hashes(), job.losses()) == calm(), "it ends with other bits"
    if planned.fault.promise.must_notice:
        assert job.has(struck.event, struck.t - 0.1), struck
    assert len(job.has("restart", struck.t)) <= planned.fault.promise.restarts


def test_kill_a_worker(make, calm):
    planned = at(step=12).on(rank=1).kill()
    job = make(planned)
    before = until(lambda: len(job.workers()) == 2 and job.workers(), "workers")
    struck = planned.strike(job)
    assert struck.what == f"SIGKILL of rank 1 in step {struck.last_step + 1}"
    until(lambda: not psutil.pid_exists(before[1]), "its end")
    planned.finish(job, lambda: True)
    ends_well(job, calm, planned, struck)
    (lost,) = job.has("worker_lost", struck.t)
    assert (lost.rank, lost["signal"]) == (1, "SIGKILL")


@COSTLY
def test_kill_all_workers_in_a_save(make, calm):
    planned = during("save", after=12).kill("workers")
    job = make(planned)
    struck = planned.strike(job)
    assert "all 2 workers" in struck.what
    ends_well(job, calm, planned, struck)


@COSTLY
def test_kill_a_keeper(make, calm):
    planned = at(step=12).on(machine=0).kill("keeper")
    job = make(planned)
    until(lambda: job.completed() > 5, "steps")
    before = job.machines[0].keeper
    struck = planned.strike(job)
    until(lambda: job.machines[0].keeper not in (None, before), "another keeper")
    ends_well(job, calm, planned, struck)


@COSTLY
@pytest.mark.parametrize("victim", ["agent", "machine", "leader"])
def test_kill_an_agent_or_all_there_is(make, calm, victim):
    planned = at(step=12).on(machine=0).kill(victim if victim != "machine" else "")
    assert planned.fault.name == f"kill-{victim}"
    job = make(planned)
    first = job.machines[0]
    struck = planned.strike(job)
    assert first.started.wait() in planned.fault.promise.exit_codes
    if victim != "agent":
        assert not first.processes()
    assert not job.is_over()
    planned.finish(job, lambda: True)  # as a scheduler would, it starts the job again
    ends_well(job, calm, planned, struck)


@COSTLY
def test_a_worker_stopped_for_good_is_named(make, calm):
    planned = at(step=12).on(rank=1).stop()
    job = make(planned, env=HANGS)
    struck = planned.strike(job)
    (pid,) = (pid for pid, _ in planned.fault._stopped)
    assert psutil.Process(pid).status() == psutil.STATUS_STOPPED
    planned.finish(job, lambda: bool(job.has("hang", struck.t)))
    ends_well(job, calm, planned, struck)
    assert job.has("hang", struck.t)[0]["ranks"] == [1]


@COSTLY
@pytest.mark.parametrize("victim", ["worker", "agent", "keeper"])
def test_what_is_stopped_goes_on(make, calm, victim):
    aim = at(step=12).on(rank=1) if victim == "worker" else at(step=12).on(machine=0)
    planned = aim.stop(victim, for_s=0.7)
    job = make(planned, "--pause", 0.1)
    struck = planned.strike(job)
    ((pid, _),) = planned.fault._stopped
    until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, "it stops")
    planned.finish(job)
    until(lambda: psutil.Process(pid).status() != psutil.STATUS_STOPPED, "it goes on")
    ends_well(job, calm, planned, struck)
    assert not job.has("restart")


@COSTLY
def test_a_plan_that_comes_too_late(make):
    planned = at(step=10_000).on(rank=1).kill()
    job = make(planned, steps=8)
    assert planned.strike(job) is None
    assert job.wait() == [0]
