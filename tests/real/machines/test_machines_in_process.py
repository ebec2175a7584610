"""Machines are lost and come, and the workers of the others go on in their processes."""

import pytest
from elastic_job import ElasticJob
from floor import SCRIPTS

from outlast.drill.network_faults import KillMachine

pytest.importorskip("outlast.launch.membership.node")

ENV = {"OUTLAST_WORKERS_IN_PROCESS": "true"}
SCRIPT = SCRIPTS / "elastic_same_bits.py"


def test_a_lost_machine_costs_the_others_no_process(machines, tmp_path):
    job = ElasticJob(machines(3), tmp_path, ENV, SCRIPT)
    job.start(*job.hosts)
    job.until_trained(*job.hosts)
    victim = job.roles()[0]  # with rank 0, the coordinator and the attempt's store
    others = [host for host in job.hosts if host is not victim]
    before = {host.name: job.on(host)[-1] for host in others}
    KillMachine(victim.machine).inject()
    job.until_trained(*others)
    attempt = before[others[0].name]["attempt"]
    for host in others:
        after = job.on(host, after_attempt=attempt)
        assert {line["pid"] for line in after} == {before[host.name]["pid"]}
        lines = sorted(job.on(host), key=lambda line: line["attempt"])
        steps = [line["step"] for line in lines]
        assert steps == sorted(set(steps)), job.agents[host.name].text  # none was made again
    job.finish(*others)
    audit = job.job.audit()
    assert audit["proved"], audit["faults"]


def test_a_machine_that_comes_costs_the_others_no_process_and_no_step(machines, tmp_path):
    job = ElasticJob(machines(3), tmp_path, ENV, SCRIPT)
    late, others = job.hosts[2], job.hosts[:2]
    job.start(*others)
    job.until_trained(*others)
    before = {host.name: job.on(host)[-1] for host in others}
    job.start(late)
    job.until_trained(*job.hosts)
    attempt = before[others[0].name]["attempt"]
    for host in others:
        after = job.on(host, after_attempt=attempt)
        assert {line["pid"] for line in after} == {before[host.name]["pid"]}
    moves = [event["moves"] for event in job.job.events("survived")]
    assert moves == [True, True], job.agents[late.name].text  # each machine says it of its own
    last = {event.attempt: event["step"] for event in job.job.events("resumed")}[attempt + 1]
    assert last >= max(line["step"] for line in job.lines() if line["attempt"] == attempt)
    job.finish(*job.hosts)


def test_who_cannot_go_on_in_its_process_saves_for_a_machine_that_comes(machines, tmp_path):
    """Its only worker has had nobody to speak to, and no process group that could be made again."""
    job = ElasticJob(machines(2), tmp_path, ENV)
    first, late = job.hosts
    job.start(first)
    job.until_trained(first)
    job.start(late)
    job.until_trained(first, late)
    assert [event["committed"] for event in job.job.events("drained")] == [True]
    assert job.replayed(2) == []
    job.finish(first, late)
