"""Machines are lost and come, and the workers of the others go on in their processes."""

import json
import os
import signal
import time

import pytest
from elastic_job import ElasticJob
from floor import SCRIPTS, until

from machine_network import KillMachine
from thorough import some

pytest.importorskip("outlast.launch.membership.node")

ENV = {"OUTLAST_WORKERS_IN_PROCESS": "true"}
SCRIPT = SCRIPTS / "elastic_same_bits.py"
GATED = SCRIPTS / "elastic_gated.py"


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
        lines = sorted(job.on(host), key=lambda line: (line["attempt"], line["step"]))
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


def start_gated(job, host, gate):
    """Start the agent of ``host``, whose worker's beginning ends once ``gate`` is there."""
    job.start(host, env={**ENV, "GATE": str(gate)})
    return until(lambda: pids_at(gate), "its worker has begun", running=job.agents[host.name])


def pids_at(gate):
    pids = gate.with_suffix(".pids")
    return [int(line) for line in pids.read_text().splitlines()] if pids.exists() else []


def finish(job, one, *hosts):
    """Let the job end where ``hosts`` train; under DDP results depend on how many there were."""
    if one == "elastic_same_bits":
        job.finish(*hosts)
        return
    job.end()
    assert [job.agents[host.name].wait() for host in hosts] == [0] * len(hosts)


@pytest.mark.parametrize("one", some(["elastic_same_bits", "elastic_ddp"], 2))
def test_nobody_waits_for_the_beginning_of_the_script_on_a_machine_that_comes(
    machines, tmp_path, one
):
    job = ElasticJob(machines(3), tmp_path, ENV, GATED, ("--one", one))
    late, others = job.hosts[2], job.hosts[:2]
    job.start(*others)
    job.until_trained(*others)
    before = {host.name: job.on(host)[-1] for host in others}
    gate = tmp_path / "gate"
    begun = start_gated(job, late, gate)
    job.until_trained(*others, steps=20)  # in the attempt that ran when it came
    attempt = before[others[0].name]["attempt"]
    assert {line["attempt"] for line in job.lines()} == {attempt}
    gate.touch()
    job.until_trained(*job.hosts)
    went_on(job, before, *others)
    assert {line["pid"] for line in job.on(late)} == set(begun), job.agents[late.name].text
    assert pids_at(gate) == begun
    finish(job, one, *job.hosts)
    each_sample_once(job, [2, 3])


def test_of_two_machines_that_come_together_each_has_a_place_of_its_own(machines, tmp_path):
    """The later one knows of the earlier one; that one begins anew if both are taken in at once."""
    job = ElasticJob(machines(4), tmp_path, ENV, GATED, ("--one", "elastic_same_bits"))
    others, late = job.hosts[:2], job.hosts[2:]
    job.start(*others)
    job.until_trained(*others)
    before = {host.name: job.on(host)[-1] for host in others}
    gates = [tmp_path / f"gate-{host.name}" for host in late]
    begun = [start_gated(job, host, gate) for host, gate in zip(late, gates, strict=True)]
    for gate in gates:
        gate.touch()
    job.until_trained(*job.hosts)
    went_on(job, before, *others)
    assert {line["pid"] for line in job.on(late[1])} == set(begun[1]), job.agents[late[1].name].text
    assert {line["pid"] for line in job.on(late[0])} == {pids_at(gates[0])[-1]}
    job.finish(*job.hosts)


def test_a_worker_that_began_for_another_place_is_started_anew(machines, tmp_path):
    """While it was in its script's beginning the others have become fewer: it has another rank."""
    one = "elastic_same_bits"
    job = ElasticJob(machines(3), tmp_path, ENV, GATED, ("--one", one))
    late, others = job.hosts[2], job.hosts[:2]
    job.start(*others)
    job.until_trained(*others)
    gate = tmp_path / "gate"
    begun = start_gated(job, late, gate)
    victim, left_over = job.roles()[1], job.roles()[0]
    before = {left_over.name: job.on(left_over)[-1]}
    KillMachine(victim.machine).inject()
    job.until_trained(left_over)
    gate.touch()
    job.until_trained(left_over, late)
    went_on(job, before, left_over)
    trained = {line["pid"] for line in job.on(late)}
    assert trained == set(pids_at(gate)) - set(begun), job.agents[late.name].text
    job.finish(left_over, late)


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


def leave(job, *hosts):
    for host in hosts:
        os.kill(job.agents[host.name].pid, signal.SIGTERM)


def left(job, *hosts):
    """They have left the job, which goes on: exit code 75, and nothing is called lost."""
    for host in hosts:
        assert job.agents[host.name].wait() == 75, job.agents[host.name].text
    assert job.lost() == set()
    assert job.job.events("worker_lost") == []
    assert job.job.events("drained") == []


def went_on(job, before, *hosts):
    """In the same processes, and no step was made twice."""
    attempt = before[hosts[0].name]["attempt"]
    for host in hosts:
        pids = {line["pid"] for line in job.on(host, after_attempt=attempt)}
        assert pids == {before[host.name]["pid"]}, job.agents[host.name].text
    for number, _ in job.attempts()[1:]:
        assert job.replayed(number) == []


@pytest.mark.parametrize("which", some([(1,), (0,), (0, 1)], 2), ids=str)
def test_machines_that_leave_cost_the_others_no_process_and_no_step(machines, tmp_path, which):
    job = ElasticJob(machines(3), tmp_path, ENV, SCRIPT)
    job.start(*job.hosts)
    job.until_trained(*job.hosts)
    roles = job.roles()
    leavers = [roles[rank] for rank in which]
    others = [host for host in job.hosts if host not in leavers]
    before = {host.name: job.on(host)[-1] for host in others}
    leave(job, *leavers)
    job.until_trained(*others)
    left(job, *leavers)
    went_on(job, before, *others)
    job.finish(*others)
    each_sample_once(job, [len(roles), len(others)])


def each_sample_once(job, sizes):
    """As the job's last checkpoint has it, by these numbers of workers in turn."""
    shown = job.hosts[0].outlast("checkpoints", "show", "--samples", "--json", job.job.directory)
    assert shown.wait() == 0, shown.text
    found = json.loads(shown.out)
    assert (found["proved"], found["faults"]) == (True, []), found
    assert [one["world_size"] for one in found["stretches"]] == sizes, found


def test_a_machine_leaves_a_job_under_ddp(machines, tmp_path):
    job = ElasticJob(machines(3), tmp_path, ENV, SCRIPTS / "elastic_ddp.py")
    job.start(*job.hosts)
    job.until_trained(*job.hosts)
    leaver, *others = job.roles()
    before = {host.name: job.on(host)[-1] for host in others}
    leave(job, leaver)
    job.until_trained(*others)
    left(job, leaver)
    went_on(job, before, *others)
    finish(job, "elastic_ddp", *others)
    each_sample_once(job, [3, 2])


@pytest.mark.parametrize("gap_s", some([0.0, 0.04, 0.08, 0.12], 1), ids=lambda gap_s: f"{gap_s}s")
def test_when_all_leave_the_last_ones_save_and_nothing_is_lost(machines, tmp_path, gap_s):
    """At once, and so soon after each other that one has notice while the others change over."""
    job = ElasticJob(machines(3), tmp_path, ENV, SCRIPT)
    job.start(*job.hosts)
    job.until_trained(*job.hosts)
    for host in job.roles():
        leave(job, host)
        time.sleep(gap_s)
    assert [job.agents[host.name].wait() for host in job.hosts] == [75, 75, 75]
    assert job.lost() == set()
    last = max(line["step"] for line in job.lines())
    drained = job.job.events("drained")  # twice where one was too late for the others' attempt
    assert drained[-1]["step"] == last, job.agents[host.name].text
    assert {event["committed"] for event in drained} == {True}
    job.start(*job.hosts)
    job.until_trained(*job.hosts)
    job.finish(*job.hosts)
    for number, _ in job.attempts()[1:]:
        assert job.replayed(number) == []
