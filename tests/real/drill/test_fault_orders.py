"""What a worker does to itself: each order acts, as the ledger and the records show, and ends."""

import itertools
import math

import pytest
from drilled_job import HANGS
from floor import until
from test_fault_processes import COSTLY, ends_well

from outlast.drill import at, orders
from outlast.drill.faults.fault import Missed
from outlast.drill.target import ORDERS, Order


def test_a_collective_left_out_is_a_hang(make, calm):
    planned = at(step=12).on(rank=1).skip_collective()
    job = make(planned, env=HANGS)
    struck = planned.strike(job)
    planned.finish(job, lambda: bool(job.has("hang", struck.t)))
    ends_well(job, calm, planned, struck)
    hang = job.has("hang", struck.t)[0]
    assert hang["step"] in (struck.last_step, struck.last_step + 1)
    assert "barrier" in stack(job, hang, rank=1)
    assert "barrier" not in stack(job, hang, rank=0).replace("outlast", "")


def stack(job, hang, rank):
    return (job.directory / hang["stacks"] / f"rank-{rank:05d}.txt").read_text()


@COSTLY
@pytest.mark.parametrize("options", [(), ("--ids",)])
def test_a_nan_in_a_batch(make, options):
    planned = at(step=12).on(rank=1).nan()
    job = make(planned, *options, steps=30)
    struck = planned.strike(job)
    assert job.wait() == [0], job.text
    (anomaly, *_) = job.has("anomaly", struck.t - 1)
    assert (anomaly["kind"], anomaly["ranks"]) == ("nan", [1])
    losses = job.losses(1)
    first = min(step for step, loss in losses.items() if math.isnan(loss))
    assert first in (struck.last_step, struck.last_step + 1)
    assert not any(math.isnan(loss) for step, loss in losses.items() if step < first)
    assert not math.isnan(job.losses(0)[first])  # the other's batch was good


@COSTLY
def test_a_nan_is_undone_by_a_rollback(make):
    planned = at(step=12).on(rank=1).nan()
    env = {"OUTLAST_HEALTH_ANOMALY": "rollback", "OUTLAST_HEALTH_SETTLE": "3"}
    job = make(planned, env=env, steps=40)
    struck = planned.strike(job)
    assert job.wait() == [0], job.text
    assert job.has("rollback", struck.t - 1)
    assert not math.isnan(job.losses(1)[40])


@COSTLY
def test_the_lock_held(make, calm):
    planned = at(step=12).on(rank=1).hold_gil(600)
    job = make(planned, env=HANGS)
    struck = planned.strike(job)
    until(lambda: job.has("hang", struck.t), "a hang", running=job.machines[0].started)
    ends_well(job, calm, planned, struck)
    hang = job.has("hang", struck.t)[0]
    assert hang["ranks"] == [1]
    assert "usleep" in hang["sentence"] or "_hold_gil" in stack(job, hang, 1)


@COSTLY
def test_slowness_begins_and_ends(make, calm):
    planned = at(step=12).on(rank=1).slow(0.4, for_s=3.0)
    job = make(planned)
    struck = planned.strike(job)
    planned.finish(job)
    ended = job.completed()
    until(lambda: not list((job.run / ORDERS).iterdir()), "the end is heard")
    ends_well(job, calm, planned, struck)
    times = [line["t"] for line in job.lines(1)]
    took = {step: later - t for step, (t, later) in enumerate(itertools.pairwise(times), start=2)}
    slow = [step for step, seconds in took.items() if seconds >= 0.4]
    assert set(range(struck.last_step + 2, ended)) <= set(slow)
    assert len(slow) < 30  # of about 60; the others are as before


@COSTLY
def test_memory_that_is_refused(make, calm):
    planned = at(step=12).on(rank=1).limit_memory()
    job = make(planned)
    struck = planned.strike(job)
    ends_well(job, calm, planned, struck)
    (lost,) = job.has("worker_lost", struck.t)
    assert (lost.rank, lost["kind"]) == (1, "memory")
    assert "MemoryError" in lost["error"]


@COSTLY
def test_the_oom_killer(make, calm):
    planned = at(step=12).on(rank=1).oom_kill()
    job = make(planned)
    struck = planned.strike(job)
    until(lambda: job.has("worker_lost", struck.t), "a loss", running=job.machines[0].started)
    (group,) = planned.fault.groups
    assert group.is_dir()
    planned.finish(job, lambda: True)
    assert not group.exists()
    ends_well(job, calm, planned, struck)
    (lost,) = job.has("worker_lost", struck.t)
    assert (lost.rank, lost["signal"]) == (1, "SIGKILL")


@COSTLY
def test_an_order_that_nobody_takes_is_withdrawn(make):
    planned = at(step=12).on(rank=7).nan()
    job = make(planned, steps=8)
    with pytest.raises(Missed, match="rank 7 has no worker"):
        planned.fault.inject(job)
    assert job.wait() == [0]
    assert not list((job.run / ORDERS).glob("*"))


def test_an_order_that_is_none():
    with pytest.raises(ValueError, match="'rest'; there are nan, hold_gil"):
        orders.obey(Order(rank=0, step=1, kind="rest"))
