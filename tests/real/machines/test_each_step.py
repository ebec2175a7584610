"""A model that is divided over three machines, of which any one may go: no completed step is lost.

Each step is kept in two machines' memory. A step is completed where the next one has begun on all
machines; none of these is made again, whatever is killed and whenever, and no storage is read. In
the end all is, bit for bit, what an undisturbed run has.
"""

import os
import signal
import time

from elastic_job import ElasticJob
from floor import SCRIPTS, Job

import thorough
from machine_network import KillMachine

SCRIPT = SCRIPTS / "each_step.py"
ENV = {"OUTLAST_CHECKPOINT_EACH_STEP": "true", "OUTLAST_MEMBERSHIP_SILENCE": "1 s"}
NUM = int(__import__("os").environ.get("EACH_NUM", 0)) or (
    50 if thorough.ALL else 2
)  # machines, and as many workers
LATEST_S = 0.1  # within a step
MEMORY = {"memory", "peer"}


class DividedJob(ElasticJob):
    """A job that needs all of its three machines."""

    def __init__(self, hosts, directory, options=(), env=()):
        self.env, self._may_lose = {**ENV, **dict(env)}, False
        more = {"env": self.env, "options": ("--every", "1000 steps", *options)}
        super().__init__(hosts, directory, script=SCRIPT, pause_s=0.01, num_least=3, **more)

    def finish(self, *hosts, lost_some=False):
        """End it, and compare all; with ``lost_some`` steps may have been made again."""
        self._may_lose = lost_some
        super().finish(*hosts)

    def compare(self, num_finished, last):
        """Nothing was lost but the step in the making, and all is that of an undisturbed run."""
        if not self._may_lose:
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
        groups, completed = self.groups(), 0
        for attempt in sorted(resumed):
            if completed:
                assert resumed[attempt]["step"] >= completed, (attempt, completed)
                source = resumed[attempt]["source"].removeprefix("from ").split(", ")
                assert set(source) <= MEMORY, (attempt, source)
            begun = [
                step
                for (number, step), group in groups.items()
                if number == attempt and len({line["rank"] for line in group}) == 3
            ]
            completed = max([completed, *(step - 1 for step in begun)])


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


def test_machines_and_workers_are_killed_and_no_completed_step_is_made_again(
    machines, tmp_path, rng
):
    job = DividedJob(machines(3), tmp_path)
    job.start(*job.hosts)
    kinds = ["machine", "worker"] * NUM
    rng.shuffle(kinds)
    for kind in kinds:
        strike(job, rng, kind)
    assert len(job.attempts()) > len(kinds)
    job.until_trained(*job.hosts, steps=25)
    job.finish(*job.hosts)
    why = [event["reason"] for event in job.job.events("not_kept")]
    assert all("died" in one or "lost" in one for one in why), why  # in the midst of a step's end
    (told,) = {event["copies"] for event in job.job.events("each_step")}
    assert told == 1


def test_copies_that_are_late_are_waited_for_said_and_never_for_ever(machines, tmp_path):
    """One machine sends slowly: its steps have no copy, and what all hold is written over by none.

    It is that machine's keeper that says so, not that of rank 0, and of each step anew.
    """
    job = DividedJob(machines(3), tmp_path, ("--width", 24_000), {"LATE_S": "0.6"})
    *quick, slow = job.hosts
    job.start(*quick)
    job.start(slow, env={**job.env, "OUTLAST_PEER_RATE": "1 MB/s"})
    job.until_trained(*job.hosts, steps=6)
    late = [event for event in job.job.events("not_kept") if event.node == slow.name]
    assert len({event["step"] for event in late}) > 1, late
    assert all("has not arrived" in event["reason"] for event in late)
    assert {event.node for event in job.job.events("not_kept")} == {slow.name}
    assert "is not kept" in job.agents[slow.name].text
    # Another one is lost: of that there is a copy of each step, and the slow one has its own.
    KillMachine(quick[0].machine).inject()
    job.start(quick[0])
    job.until_trained(*job.hosts, steps=1)
    job.compare_lost()
    # The slow one itself: what was copied of it last is what all others still hold.
    job.until_trained(*job.hosts, steps=3)
    KillMachine(slow.machine).inject()
    job.start(slow)
    job.until_trained(*job.hosts, steps=3)
    (*_, resumed) = job.job.events("resumed")
    assert resumed["step"] > 0
    assert set(resumed["source"].removeprefix("from ").split(", ")) <= MEMORY, resumed["source"]
    job.finish(*job.hosts, lost_some=True)
