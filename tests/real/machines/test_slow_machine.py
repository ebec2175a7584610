"""A slow machine is replaced by one that waits for a place, or stays, with a word."""

from pathlib import Path

import pytest
from floor import Job, until

pytest.importorskip("outlast.launch.membership.node")
pytestmark = pytest.mark.alone  # cores that others use make machines slow
SCRIPT = Path(__file__).parent.parent / "stragglers" / "pace_script.py"


class SlowJob:
    """Two machines train, of which the second one is slow."""

    def __init__(self, hosts, directory):
        self.hosts, self.job = hosts, Job(directory / "job", 2)
        self.agents = []
        self._when = directory / "slow"

    def start(self, host):
        agent = host.outlast(
            *("run", "--nnodes", "1:2", "--nproc-per-node", 1, "--rdzv-backend", "outlast"),
            *("--local-addr", host.address, "--dir", self.job.directory),
            *(SCRIPT, self.job.records, 100_000, "--slow-node", self.hosts[1].name),
            *("--slow-when", self._when),
            env={"OUTLAST_HEALTH_STRAGGLER": "replace"},
        )
        self.agents.append(agent)

    def at(self):
        """The newest step of each rank, and its machine."""
        found = [(self.job.records / f"at-{rank}") for rank in range(2)]
        texts = [path.read_text().split() for path in found if path.exists()]
        return {text[1]: int(text[0]) for text in texts if len(text) == 2}

    def until_trained(self, *hosts, after=0):
        names = {host.name for host in hosts}
        until(
            lambda: set(self.at()) == names and min(self.at().values()) > after,
            f"steps of {', '.join(sorted(names))} after {after}",
            running=self.agents[0],
        )

    def left_out(self):
        self._when.touch()
        (event,) = until(lambda: self.job.events("left_out"), "a word on the slow machine")
        return event


@pytest.fixture
def slow(machines, tmp_path):
    def make(num_machines):
        job = SlowJob(machines(num_machines), tmp_path)
        job.start(job.hosts[0])
        job.start(job.hosts[1])
        job.until_trained(*job.hosts[:2])
        return job

    return make


def test_a_slow_machine_is_replaced_by_one_that_waits_and_no_step_is_lost(slow):
    job = slow(3)
    job.start(job.hosts[2])
    until(lambda: "waiting for a place" in job.agents[2].err, "a spare", running=job.agents[2])
    event = job.left_out()
    assert (event.node, event["goes"]) == (job.hosts[1].name, True)
    job.until_trained(job.hosts[0], job.hosts[2], after=max(job.at().values()))
    (found,) = [one for one in job.job.events("straggler") if one["cause"] == "compute"]
    assert (found.node, found["action"]) == (job.hosts[1].name, "replace")
    resumed = max(job.job.events("resumed"), key=lambda one: one.attempt)
    drained = [one["step"] for one in job.job.events("drained") if one["committed"]]
    assert resumed["step"] in drained, "steps were lost"
    assert not job.job.events("worker_lost")
    assert not job.job.events("node_lost")


def test_where_no_machine_waits_it_stays(slow):
    job = slow(2)
    event = job.left_out()
    assert (event.node, event["goes"]) == (job.hosts[1].name, False)
    job.until_trained(*job.hosts, after=max(job.at().values()) + 20)
    assert len(job.job.events("attempt_formed")) == 1
    text = "".join(agent.err for agent in job.agents)
    assert f"machine {job.hosts[1].name} takes part on, because no other machine waits" in text
