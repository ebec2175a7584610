"""A hang on one of two machines: named with its machine, by what both agents have seen.

And none where machines were only frozen for a while: the job goes on where it was.
"""

import time
from pathlib import Path

import pytest
from elastic_job import ElasticJob
from floor import Job

from machine_network import FreezeMachine
from thorough import some

SCRIPT = Path(__file__).parents[1] / "hangs" / "hanging.py"
STEPS, AT = 60, 40


@pytest.mark.parametrize(("kind", "culprit"), some([("lock", 1), ("hold", 0), ("stop", 1)], 2))
def test_named_with_its_machine(machines, tmp_path, kind, culprit):
    hosts = machines(2)
    job = Job(tmp_path / "job", 2)
    agents = [
        host.outlast(
            *("run", "--nnodes", "2", "--nproc-per-node", 1, "--rdzv-backend", "outlast"),
            *("--local-addr", host.address, "--dir", job.directory, SCRIPT),
            *(job.records, STEPS, kind, culprit, AT),
            env={"OUTLAST_HEALTH_HANG": "auto"},
        )
        for host in hosts
    ]
    assert [agent.wait() for agent in agents] == [0, 0], agents[0].text + agents[1].text
    (event,) = job.events("hang")
    assert event["ranks"] == [culprit]
    (node,) = event["nodes"]
    assert node in {host.name for host in hosts}
    # Rank 0's agent writes it down, and has its own machine's name in the head.
    assert (node == event.node) == (culprit == 0)
    assert event["sentence"].startswith(f"rank {culprit} on {node} has not entered step {AT}'s")
    assert f"{kind}() at hanging.py:" in event["place"]
    assert event["step"] == AT - 1
    folder = job.directory / event["stacks"]
    assert f"{kind} (" in (folder / f"rank-{culprit:05d}.txt").read_text()
    assert (folder / f"rank-{1 - culprit:05d}.txt").is_file()
    assert [one["nodes"] for one in job.events("attempt_formed")] == [2, 2]
    assert job.final(0) == job.final(1)
    assert job.events("worker_lost") == job.events("node_lost") == []
    assert any("waits for it" in agent.err for agent in agents)


FREEZES = {"the other two": (1, 2), "the first two": (0, 1)}
FROZEN_S = 4.0
KNOWN_STEPS = 60  # until a step's limit is known


@pytest.mark.parametrize("which", some(FREEZES, 1))
def test_two_machines_that_were_frozen_are_no_hang(machines, tmp_path, which):
    job = ElasticJob(machines(3), tmp_path, {"OUTLAST_HEALTH_HANG": "auto"})
    job.start(*job.hosts)
    job.until_trained(*job.hosts, steps=KNOWN_STEPS)
    before = job.attempts()[-1]
    roles = job.roles()
    faults = [FreezeMachine(roles[rank].machine) for rank in FREEZES[which]]
    for fault in faults:
        fault.inject()
    time.sleep(FROZEN_S)
    for fault in faults:
        fault.heal()
    job.until_trained(*job.hosts, steps=KNOWN_STEPS)
    assert job.job.events("hang") == []
    assert job.job.events("restart") == []
    assert job.attempts()[-1] == before
    job.finish(*job.hosts)
