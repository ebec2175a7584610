"""Three machines, no special one: each can be killed, cut off, sent away, and come back.

What is looked at is who trains on, what the ledger says, and that every step is the one of a run
that nothing happened to; never how long it took.
"""

import itertools
import signal

import pytest
from elastic_job import ElasticJob
from floor import SCRIPTS, until

from machine_network import BlackHole, Cut, KillMachine, Partition, Reset
from thorough import some

pytest.importorskip("outlast.launch.membership.node")

ROLES = {"a member": -1, "the coordinator": 0}
DRAINED = 75


@pytest.fixture
def elastic(machines, tmp_path):
    """A job that trains on three machines."""
    job = ElasticJob(machines(3), tmp_path)
    job.start(*job.hosts)
    job.until_trained(*job.hosts)
    return job


def pick(job, role):
    """(the machine in this role, the others)."""
    hosts = job.roles()
    one = hosts[ROLES[role]]
    return one, [host for host in hosts if host is not one]


def sizes(job, since):
    """How many machines the attempts had that were formed after the first ``since``."""
    return [machines for _, machines in job.attempts()[since:]]


@pytest.mark.parametrize("role", some(ROLES, 1))
def test_a_killed_machine_is_done_without_and_taken_in_again(elastic, role):
    victim, others = pick(elastic, role)
    before = len(elastic.attempts())
    KillMachine(victim.machine).inject()
    elastic.until_trained(*others)
    assert elastic.lost() == {victim.name}
    elastic.start(victim)
    elastic.until_trained(*elastic.hosts)
    assert sizes(elastic, before) == [2, 3]
    elastic.finish(*elastic.hosts)


@pytest.mark.parametrize("role", some(ROLES, 1))
def test_a_machine_with_a_notice_leaves_and_no_step_is_lost(elastic, role):
    leaver, others = pick(elastic, role)
    before = len(elastic.attempts())
    elastic.agents[leaver.name].signal(signal.SIGTERM)
    elastic.until_trained(*others)
    assert elastic.agents[leaver.name].wait() == DRAINED, elastic.agents[leaver.name].text
    assert sizes(elastic, before) == [2]
    assert elastic.replayed(elastic.attempts()[-1][0]) == []
    assert elastic.lost() == set()
    assert not elastic.job.events("worker_lost")
    elastic.finish(*others)


@pytest.mark.parametrize(("role", "fault"), some(itertools.product(ROLES, [Cut, BlackHole]), 1))
def test_a_machine_that_is_cut_off_stops_and_joins_again_when_healed(elastic, role, fault):
    lonely, others = pick(elastic, role)
    before = elastic.attempts()
    cut = fault(lonely.machine)
    cut.inject()
    elastic.until_trained(*others)
    elastic.until_stopped(lonely)
    committed = elastic.commits(lonely)
    elastic.until_trained(*others, steps=10)
    # It has made no step on its own and committed nothing, though it sees the job's directory.
    assert elastic.on(lonely, after_attempt=before[-1][0]) == []
    assert elastic.commits(lonely) == committed
    assert lonely.name in elastic.lost()
    assert sizes(elastic, len(before)) == [2]
    assert elastic.agents[lonely.name].poll() is None
    cut.heal()
    elastic.until_trained(*elastic.hosts)
    assert sizes(elastic, len(before)) == [2, 3]
    elastic.finish(*elastic.hosts)


@pytest.mark.parametrize("with_coordinator", some([False, True], 1))
def test_machines_that_all_took_the_role_are_together_again_before_one_goes_on_alone(
    machines, tmp_path, with_coordinator
):
    elastic = ElasticJob(machines(3), tmp_path, env={"OUTLAST_MEMBERSHIP_SILENCE": "1 s"})
    elastic.start(*elastic.hosts)
    elastic.until_trained(*elastic.hosts)
    hosts = elastic.roles()
    before, said = len(elastic.attempts()), {}
    cuts = [Cut(host.machine) for host in (hosts[:2] if with_coordinator else hosts[1:])]
    for cut in cuts:
        cut.inject()
    for name, agent in elastic.agents.items():
        said[name] = len(agent.err)
    for name, agent in elastic.agents.items():
        until(lambda a=agent, n=name: "waiting for m" in a.err[said[n] :], "it waits for others")
    for cut in cuts:
        cut.heal()
    elastic.until_trained(*hosts)
    assert 1 not in sizes(elastic, before)
    elastic.finish(*hosts)


@pytest.mark.parametrize("with_coordinator", some([False, True], 1))
def test_two_machines_that_do_not_see_each_other_settle(elastic, with_coordinator):
    hosts = elastic.roles()
    pair = hosts[:2] if with_coordinator else hosts[1:]
    before = len(elastic.attempts())
    fault = Partition(*(host.machine for host in pair))
    fault.inject()
    until(lambda: sizes(elastic, before)[-1:] == [2], "an attempt without one of them")
    stays = [host for host in elastic.hosts if host in settled(elastic)]
    assert len(set(stays) & set(pair)) == 1
    settled_at = len(elastic.attempts())
    elastic.until_trained(*stays, steps=40)
    assert len(elastic.attempts()) == settled_at, "it forms attempts for ever"
    fault.heal()
    elastic.until_trained(*elastic.hosts)
    elastic.finish(*elastic.hosts)


def settled(job):
    """The hosts of the newest attempt, once all of them have made a step."""
    number, machines = job.attempts()[-1]

    def nodes():
        found = {line["node"] for line in job.lines() if line["attempt"] == number}
        return found if len(found) == machines else None

    names = until(nodes, f"a step of attempt {number}")
    return [host for host in job.hosts if host.name in names]


def test_connections_that_are_reset_cost_nobody_the_job(elastic):
    victim, _ = pick(elastic, "a member")
    fault = Reset(victim.machine)
    before = len(elastic.attempts())
    fault.inject()
    until(lambda: len(elastic.attempts()) > before, "another attempt")
    fault.heal()
    elastic.until_trained(*elastic.hosts)
    elastic.finish(*elastic.hosts)


def test_an_agent_that_dies_takes_its_worker_with_it(elastic):
    victim, others = pick(elastic, "a member")
    elastic.agents[victim.name].signal(signal.SIGKILL)
    elastic.until_stopped(victim)
    elastic.until_trained(*others)
    assert elastic.lost() == {victim.name}
    elastic.start(victim)
    elastic.until_trained(*elastic.hosts)
    elastic.finish(*elastic.hosts)


def test_an_unchanged_script_goes_on_without_a_lost_machine(machines, tmp_path):
    job = ElasticJob(machines(3), tmp_path)
    job.start(*job.hosts, script=SCRIPTS / "ddp_plain.py", arguments=("--steps", 100_000))

    def steps(world, after=0):
        ranks = range(world)
        found = [
            [one["step"] for one in job.job.lines(rank) if one["world"] == world] for rank in ranks
        ]
        return all(numbers and numbers[-1] >= after + 5 for numbers in found)

    until(lambda: steps(3), "steps of three", running=job.agents["machine0"])
    by_rank = {job.job.lines(rank)[-1]["node"]: rank for rank in range(3)}
    last = job.job.begun()
    victim = next(host for host in job.hosts if by_rank[host.name] == 2)
    KillMachine(victim.machine).inject()
    survivor = next(host for host in job.hosts if host is not victim)
    until(lambda: steps(2, after=last), "steps of two", running=job.agents[survivor.name])
    assert job.lost() == {victim.name}
    # It went on from its own checkpoint: from a multiple of its five steps, not from the start.
    first = next(one["step"] for one in job.job.lines(0) if one["world"] == 2)
    assert first % 5 == 1
    assert first > last - 10
