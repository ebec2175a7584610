"""Two agents that meet over torch's own rendezvous: a lost worker restarts both; both finish."""

import os
import signal

from floor import TRAIN, Job, free_port, until

RANKS = 2
STEPS = 80


def agents(floor, job):
    port = free_port()
    return [
        floor.outlast(
            *("run", "--nnodes", 2, "--nproc-per-node", 1, "--rdzv-backend", "c10d"),
            *("--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "two"),
            *("--local-addr", "127.0.0.1", "--dir", job.directory),
            *(TRAIN, job.records, STEPS, "--light", "--pause", "0.03"),
        )
        for _ in range(2)
    ]


def test_a_killed_worker_restarts_both(floor, rng, tmp_path):
    job, calm = (Job(tmp_path / name, RANKS) for name in ("job", "calm"))
    both = agents(floor, job)
    for kill in range(2):
        since, later = job.begun(), rng.randrange(4, 15)
        until(
            lambda since=since, later=later: job.begun() >= since + later, "steps", running=both[0]
        )
        os.kill(job.lines(rng.randrange(2))[-1]["pid"], signal.SIGKILL)
        until(
            lambda kill=kill: len(job.events("attempt_formed")) == kill + 2,
            "another attempt",
            running=both[0],
        )
    assert [agent.wait() for agent in both] == [0, 0], both[0].text + both[1].text
    formed = job.events("attempt_formed")
    assert [event.attempt for event in formed] == [1, 2, 3]
    assert {(event["world_size"], event["nodes"]) for event in formed} == {(2, 2)}
    resumed = [event["step"] for event in job.events("resumed")]
    assert resumed == sorted(resumed)
    assert len(resumed) == 3
    ranks = floor.ranks(RANKS, TRAIN, calm.records, STEPS, "--light", env=calm.env)
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].text
    assert [final["hash"] for final in job.finals()] == [final["hash"] for final in calm.finals()]


def test_a_notice_to_one_agent_drains_both(floor, tmp_path):
    job = Job(tmp_path / "job", RANKS)
    both = agents(floor, job)
    until(lambda: job.begun() >= 5, "steps", running=both[0])
    both[1].signal(signal.SIGTERM)
    assert [agent.wait() for agent in both] == [75, 75], both[0].text + both[1].text
    assert [max(job.consumed(rank)) for rank in range(RANKS)] == [job.newest()] * RANKS
    assert not job.events("restart")
