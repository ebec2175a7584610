"""How a save of several machines ends when workers or keepers are gone, stopped, or strangers.

Three machines, a rank each; their workers only say what workers say (see ``lean``).
"""

import os
import signal
import time

import pytest
from floor import until
from peer_floor import Fleet

from outlast.checkpoint.manifest import state_file
from whole_reads import verify

NODES = ("n0", "n1", "n2")


@pytest.fixture(name="job")
def _job(floor, tmp_path):
    fleet = Fleet(floor, tmp_path, NODES, replicas=0)
    yield fleet
    fleet.close()


def is_committed(job, step):
    return step in {event["step"] for event in job.machines["n0"].events("commit")}


def are_written(job, step, workers):
    """Whether the files of these ranks are there; what their keepers do next takes no time."""
    storage = job.machines["n0"].storage
    directory = next((one for one in storage.children() if f"{step:012d}" in one), "")
    names = storage.children(directory) if directory else []
    return all(state_file(worker.hello.rank) in names for worker in workers)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_a_save_outlives_all_its_workers(job, order):
    job.start(*NODES)
    assert job.save(1) == ["", "", ""]
    for rank in order:
        worker = job.workers[rank]
        worker.begin(2)
        worker.client.leave()  # as one that is killed: right after its copy, before the commit
    until(lambda: is_committed(job, 2), "the commit")
    verify(job.machines["n0"].storage, 2)
    job.start(*NODES)  # what each machine has in memory is whole
    for node in NODES:
        with job.machines[node].client(job.attempt) as client:
            assert any(one.startswith("step-000000000002") for one in client.recall().children())
    assert job.save(3) == ["", "", ""]


@pytest.mark.parametrize("rank", [0, 2])
def test_a_worker_lost_in_its_copy_fails_the_save_of_all_at_once(job, rank):
    job.start(*NODES)
    serials = [worker.begin(1, whole=worker.hello.rank != rank) for worker in job.workers]
    since_s = time.monotonic()
    job.workers[rank].client.leave()
    for worker, serial in zip(job.workers, serials, strict=True):
        if worker.hello.rank != rank:
            assert worker.wait(serial) == f"rank {rank}: rank {rank} was lost during its copy"
    assert time.monotonic() - since_s < 10
    assert not is_committed(job, 1)


@pytest.mark.parametrize("victim", ["n0", "n1"])
def test_a_killed_keeper_costs_that_save_alone(job, victim):
    job.start(*NODES)
    assert job.save(1) == ["", "", ""]
    others = [worker for worker in job.workers if NODES[worker.hello.rank] != victim]
    serials = [worker.begin(2) for worker in others]
    until(lambda: are_written(job, 2, others), "whole parts of all others")
    since_s = time.monotonic()
    os.kill(job.machines[victim].supervisor.pid, signal.SIGKILL)
    errors = {worker.wait(serial) for worker, serial in zip(others, serials, strict=True)}
    expected = {
        "n0": "the keeper of rank 0 cannot be reached",
        "n1": "rank 1: its machine's keeper died before the commit; the older checkpoint stands",
    }
    assert errors == {expected[victim]}
    assert time.monotonic() - since_s < 15
    job.start(*NODES)
    assert job.save(3) == ["", "", ""]
    assert not is_committed(job, 2)


@pytest.mark.parametrize("victim", ["n0", "n1"])
def test_a_stopped_keeper_holds_nobody_for_longer_than_the_bound(job, victim):
    job.start(*NODES)
    assert job.save(1) == ["", "", ""]
    pid = job.machines[victim].supervisor.pid
    others = [worker for worker in job.workers if NODES[worker.hello.rank] != victim]
    os.kill(pid, signal.SIGSTOP)
    since_s = time.monotonic()
    serials = [worker.begin(2) for worker in others]
    errors = {worker.wait(serial) for worker, serial in zip(others, serials, strict=True)}
    assert time.monotonic() - since_s < 35
    expected = {
        "n0": "the keeper of rank 0 has said nothing for 20 s",
        "n1": "rank 1: its machine's keeper has not answered for 20 s",
    }
    assert errors == {expected[victim]}
    os.kill(pid, signal.SIGCONT)
    late = next(worker for worker in job.workers if worker not in others)
    late.wait(late.begin(2))
    until(lambda: job.save(3) == ["", "", ""], "a save of all")


def test_who_has_another_key_is_refused_and_the_save_fails_in_words(job):
    job.start(*NODES)
    assert job.save(1) == ["", "", ""]
    job.introduce(keys={1: b"x" * 32})
    since_s = time.monotonic()
    words = "rank 1: its machine's keeper has not come to that of rank 0"
    errors = job.save(2)
    assert errors[0].startswith(words)
    assert errors[2].startswith(words)
    assert errors[1] == "the keeper of rank 0 cannot be reached"
    assert time.monotonic() - since_s < 35
    (refused,) = job.machines["n0"].events("replica_refused")
    assert "the job's key" in refused["reason"]
