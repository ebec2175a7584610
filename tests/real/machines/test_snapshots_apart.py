"""Between two commits all there is lies in machines' memory: losses of some, and of the job."""

import os
import signal

import pytest
from elastic_job import STEPS, ElasticJob
from floor import SCRIPTS, until

from machine_network import KillMachine
from outlast.errors import Exit

OPTIONS = ("--every", "auto")


@pytest.fixture
def elastic(machines, tmp_path):
    """A job on three machines that commits once an attempt."""
    job = ElasticJob(machines(3), tmp_path, script=SCRIPTS / "snapshots.py", options=OPTIONS)
    job.start(*job.hosts)
    job.until_trained(*job.hosts)
    return job


def alone(elastic):
    return [one["step"] for one in elastic.job.events("snapshot") if one.get("tiers") == []]


def stored(elastic):
    """The newest step that is in storage."""
    names = ("commit", "tier_copied")
    return max(one["step"] for name in names for one in elastic.job.events(name))


def until_apart(elastic):
    until(
        lambda: alone(elastic) and max(alone(elastic)) > stored(elastic) + 20,
        "snapshots that no storage has",
        running=elastic.agents[elastic.hosts[0].name],
    )


def test_a_worker_or_a_machine_is_lost_and_no_step_that_was_a_snapshot(elastic):
    until_apart(elastic)
    snapshot = max(alone(elastic))
    victim = elastic.roles()[-1]
    os.kill(elastic.on(victim)[-1]["pid"], signal.SIGKILL)
    until(lambda: len(elastic.job.events("resumed")) >= 2, "another attempt")
    elastic.until_trained(*elastic.hosts)
    resumed = elastic.job.events("resumed")[-1]
    assert resumed["step"] >= snapshot
    until_apart(elastic)
    until(lambda: len(alone(elastic)) > 1, "two snapshots")
    snapshot = max(alone(elastic)[:-1])  # of the newest the copies may be on their way
    KillMachine(victim.machine).inject()
    left = [host for host in elastic.hosts if host is not victim]
    elastic.until_trained(*left)
    resumed = elastic.job.events("resumed")[-1]
    assert resumed["step"] >= snapshot
    elastic.start(victim)
    elastic.until_trained(*elastic.hosts)
    elastic.finish(*elastic.hosts)


def test_where_all_have_failed_for_good_their_memory_is_brought_to_storage(machines, tmp_path):
    job = ElasticJob(machines(3), tmp_path, script=SCRIPTS / "snapshots.py", options=OPTIONS)
    job.start(*job.hosts, env={"BUG_AT": 150})
    codes = [job.agents[host.name].wait() for host in job.hosts]
    assert set(codes) == {Exit.GAVE_UP}, job.agents[job.hosts[0].name].text
    # The last one may have been in the making.
    newest = max(sorted(set(alone(job)))[:-1], default=1)
    assert stored(job) >= newest
    before = len(job.job.events("resumed"))
    job.start(*job.hosts)
    until(lambda: len(job.job.events("resumed")) > before, "the next run")
    assert job.job.events("resumed")[before]["step"] >= newest
    job.until_trained(*job.hosts)
    assert job.job.begun() < STEPS
    job.finish(*job.hosts)
