"""A model that is divided over three machines, of which any one may go: no completed step is lost.

Each step is kept in two machines' memory. A step is completed where the next one has begun on all
machines; none of these is made again, whatever is killed and whenever, and no storage is read. In
the end all is, bit for bit, what an undisturbed run has.
"""

import os
import re
import signal
import time

import pytest
from elastic_job import ElasticJob
from floor import SCRIPTS, Job

import thorough
from machine_network import KillMachine

SCRIPT = SCRIPTS / "each_step.py"
ENV = {"OUTLAST_CHECKPOINT_EACH_STEP": "true", "OUTLAST_MEMBERSHIP_SILENCE": "1 s"}
NUM = 50 if thorough.ALL else 2  # machines, and as many workers
LONGEST_S = 3600 if thorough.ALL else 280
LATEST_S = 0.1  # within a step
MEMORY = {"memory", "peer"}


class DividedJob(ElasticJob):
    """A job that needs all of its machines."""

    def __init__(self, hosts, directory, options=(), env=()):
        self.env, self._exact_from = {**ENV, **dict(env)}, 1
        more = {"env": self.env, "options": ("--every", "1000 steps", *options)}
        super().__init__(
            hosts, directory, script=SCRIPT, pause_s=0.01, num_least=len(hosts), **more
        )

    def finish(self, *hosts, exact_from=1):
        """End it, and compare all; before attempt ``exact_from`` copies were not made in time."""
        self._exact_from = exact_from
        super().finish(*hosts)

    def compare(self, num_finished, last):
        """Nothing was lost but the step in the making, and all is that of an undisturbed run."""
        self.compare_lost()
        calm = Job(self.job.directory.with_name("calm"), num_finished)
        asked = (calm.records, last, *self.options)
        for rank in self._floor.ranks(num_finished, self.script, *asked, env=calm.env):
            assert rank.wait() == 0, rank.text
        counts = {}
        for line in self.lines():
            key = line["step"], line["rank"]
            counts[key] = newest([counts.get(key, line), line])
        for rank in range(num_finished):
            samples = [counts[step, rank]["ids"] for step in range(1, last + 1)]
            assert samples == [line["ids"] for line in calm.lines(rank)]
            assert self.job.final(rank)["hash"] == calm.final(rank)["hash"]

    def compare_lost(self):
        """Each attempt went on from the newest step that was completed, out of memory."""
        resumed = {event.attempt: event for event in self.job.events("resumed")}
        begun, completed = self.begun_by_all(), 0
        for attempt in sorted(resumed):
            if attempt <= self._exact_from:
                completed = 0
            if completed:
                assert resumed[attempt]["step"] >= completed, (attempt, completed)
                assert sources(resumed[attempt]) <= MEMORY, attempt
            completed = max(completed, begun.get(attempt, 0) - 1)

    def begun_by_all(self):
        """Attempt → the last step that all ranks have begun in it."""
        found = {}
        for (attempt, step), group in self.groups().items():
            if len({line["rank"] for line in group}) == len(self.hosts):
                found[attempt] = max(found.get(attempt, 0), step)
        return found


def sources(resumed):
    """Where an attempt's state came from."""
    return set(re.findall(r"\w+", resumed["source"])) - {"from", "and"}


def newest(lines):
    """That of the last attempt."""
    return max(lines, key=lambda line: line["attempt"])


def strike(job, rng, kind):
    """Kill one of the machines, or a worker, at some moment of some step; until all train again."""
    victim = rng.choice(job.hosts)
    job.until_trained(*job.hosts, steps=rng.randint(1, 6))
    time.sleep(rng.uniform(0, LATEST_S))  # any moment will do
    if kind == "machine":
        KillMachine(victim.machine).inject()
        job.start(victim)
    else:
        os.kill(newest(job.on(victim))["pid"], signal.SIGKILL)
    job.until_trained(*job.hosts, steps=1)


def go_through(job, rng, num):
    """So many machines and so many workers are killed, in a drawn order; then the job ends."""
    job.start(*job.hosts)
    kinds = ["machine", "worker"] * num
    rng.shuffle(kinds)
    for kind in kinds:
        strike(job, rng, kind)
    assert len(job.attempts()) > len(kinds)
    job.until_trained(*job.hosts, steps=25)
    job.finish(*job.hosts)
    begun = job.begun_by_all()
    for event in job.job.events("not_kept"):  # the one in whose end something was killed
        assert event["step"] >= begun.get(event.attempt, 0), event
    assert {event["copies"] for event in job.job.events("each_step")} == {1}


@pytest.mark.timeout(LONGEST_S)
def test_machines_and_workers_are_killed_and_no_completed_step_is_made_again(
    machines, tmp_path, rng
):
    go_through(DividedJob(machines(3), tmp_path), rng, NUM)


@pytest.mark.skipif(not thorough.ALL, reason="four machines, and as FSDP2: OUTLAST_TEST_ALL=1")
@pytest.mark.timeout(LONGEST_S)
def test_a_model_in_two_replica_groups_of_two_loses_none_either(machines, tmp_path, rng):
    go_through(DividedJob(machines(4), tmp_path, ("--replicas", 2)), rng, NUM)


def test_copies_that_are_late_are_waited_for_said_and_never_for_ever(machines, tmp_path):
    """One machine sends slowly: most of its steps have no copy when the next one begins.

    It is that machine that says so, not that of rank 0, and of each step anew. The newest step that
    was copied of it stays in the others' memory until there is a newer one: it is what is left.
    """
    job = DividedJob(machines(3), tmp_path, ("--width", 24_000), {"LATE_S": "1"})
    *quick, slow = job.hosts
    job.start(*quick)
    job.start(slow, env={**job.env, "OUTLAST_PEER_RATE": "1 MB/s"})
    job.until_trained(*job.hosts, steps=6)
    # On a machine without a core to spare others may be late as well, and then they say so too.
    late = [one for one in job.job.events("not_kept") if one.node == slow.name]
    assert len({event["step"] for event in late}) > 1, late
    assert any("has not arrived" in event["reason"] for event in late)
    assert "is not kept" in job.agents[slow.name].text
    KillMachine(slow.machine).inject()
    job.start(slow)
    job.until_trained(*job.hosts, steps=3)
    resumed = job.job.events("resumed")[1]
    assert resumed["step"] > 0
    assert sources(resumed) <= MEMORY
    # From here on its copies are in time.
    KillMachine(quick[1].machine).inject()
    job.start(quick[1])
    job.until_trained(*job.hosts, steps=1)
    job.finish(*job.hosts, exact_from=2)
