"""Two machines, played by two agents on one: each has its keeper, and rank 0's commits.

The other keeper reports to it directly: see ``test_save_ends`` for what becomes of a save whose
workers, or keepers, are gone.
"""

import os
import signal

import pytest
from floor import TRAIN, Job, free_port, until
from keeper_floor import SCRIPT, KeeperJob, keepers

from outlast.keeper.process import RUNTIME_VARIABLE
from thorough import some

RANKS = 2
STEPS = 18
AT = 6


def agents(floor, job, extra):
    port = free_port()
    return [
        floor.outlast(
            *("run", "--nnodes", 2, "--nproc-per-node", 1, "--rdzv-backend", "c10d"),
            *("--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "two"),
            *("--local-addr", "127.0.0.1", "--dir", job.directory),
            *(SCRIPT, job.records, STEPS, "--light"),
            env={**job.env, **more},
        )
        for more in extra
    ]


@pytest.fixture(scope="module", name="calm")
def _calm(tmp_path_factory):
    from floor import Floor

    place = tmp_path_factory.mktemp("calm")
    floor, job = Floor(place), Job(place / "calm", RANKS)
    ranks = floor.ranks(RANKS, TRAIN, job.records, STEPS, "--light", env=job.env)
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].text
    floor.close()
    return [final["hash"] for final in job.finals()]


def finish(job, both, calm):
    assert [agent.wait() for agent in both] == [0, 0], both[0].text + both[1].text
    assert [final["hash"] for final in job.finals()] == calm
    job.verified()
    assert job.newest() == STEPS


def test_the_parts_of_two_keepers_become_one_commit(floor, tmp_path, calm):
    job = KeeperJob(tmp_path / "job", RANKS, free=-9, pause=AT + 1)
    both = agents(floor, job, [{}, {}])
    until(job.paused, "a commit", running=both[0])
    assert len(keepers(floor)) == 2
    newest = job.newest()
    os.kill(job.lines(1)[-1]["pid"], signal.SIGKILL)
    job.go()
    finish(job, both, calm)
    resumed = job.events("resumed")[-1]
    assert resumed["step"] == newest > 0
    assert newest in [event["step"] for event in job.events("commit")]
    assert not job.events("storage_error")


@pytest.mark.parametrize("rank", some(range(RANKS), 1))
def test_a_worker_killed_in_its_copy_voids_the_save_of_both(floor, tmp_path, calm, rank):
    job = KeeperJob(tmp_path / "job", RANKS, free=-9)
    both = agents(floor, job, [{"HOLD_AT": AT, "HOLD_RANK": rank}] * 2)
    until(lambda: job.held(rank), "the middle of a copy", running=both[0])
    newest = job.newest()
    os.kill(job.lines(rank)[-1]["pid"], signal.SIGKILL)
    job.hold.touch()  # nobody is held in the next attempt
    finish(job, both, calm)
    assert [event["step"] for event in job.events("resumed")] == [0, newest]
    assert newest > 0


def test_a_keeper_killed_on_one_machine_costs_that_save_alone(floor, tmp_path, calm, rng):
    job = KeeperJob(tmp_path / "job", RANKS, pause=AT - 1)
    both = agents(floor, job, [{}, {}])
    until(job.paused, "the step before", running=both[0])
    victim = rng.choice(keepers(floor))
    os.kill(victim.pid, signal.SIGSTOP)
    job.go()
    step = until(lambda: job.whole(AT), "whole copies", running=both[0])
    victim.kill()
    finish(job, both, calm)
    assert len(job.events("resumed")) == 1
    commits = [event["step"] for event in job.events("commit")]
    assert step not in commits
    assert commits[-1] == STEPS
    assert len([one for one in commits if one > step]) >= 2
    assert not job.events("storage_error")
    (skipped,) = [event for event in job.events("save_skipped") if event["step"] == step]
    assert "keeper died before the commit" in skipped["reason"]


def test_under_torchs_launcher_the_workers_bring_the_keepers_together(floor, tmp_path, calm):
    """Two machines, as far as keepers can see: each has a directory for sockets of its own."""
    job = KeeperJob(tmp_path / "job", RANKS, free=-9, pause=AT + 1)
    port = free_port()
    both = []
    for number in range(RANKS):
        runtime = tmp_path / f"run-{number}"
        runtime.mkdir(mode=0o700)
        both.append(
            floor.torchrun(
                *("--nnodes", 2, "--nproc-per-node", 1, "--rdzv-backend", "c10d"),
                *("--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "plain"),
                *("--local-addr", "127.0.0.1"),
                *(SCRIPT, job.records, STEPS, "--light"),
                env={**job.env, RUNTIME_VARIABLE: runtime},
            )
        )
    until(job.paused, "a commit", running=both[0])
    assert len(keepers(floor)) == 2
    job.go()
    finish(job, both, calm)
    assert not job.events("storage_error")
