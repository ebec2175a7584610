"""A machine that fails again and again is left out, replaced, remembered, and comes back.

As in the other tests of this room: every step is the one of a run that nothing happened to.
"""

import os
import signal

import pytest
from elastic_job import ElasticJob
from floor import until

from thorough import some

pytest.importorskip("outlast.launch.membership.node")
ROLES = {"a member": -1, "the coordinator": 0}
OUT_S, PATIENT_S = 12, 0.1  # nobody needs many steps while a machine is left out


def kill_worker(job, host):
    """SIGKILL of the worker that a host has now."""
    pid = max((line["attempt"], line["pid"]) for line in job.on(host))[1]
    os.kill(pid, signal.SIGKILL)


def left_out(job):
    return [(event.node, event["goes"]) for event in job.job.events("left_out")]


@pytest.mark.parametrize("role", some(ROLES, 1))
def test_a_machine_that_fails_twice_is_left_out_for_a_while(machines, tmp_path, role):
    env = {"OUTLAST_RESTART_FAILURES": "2", "OUTLAST_RESTART_LEAVE_OUT": f"{OUT_S} s"}
    job = ElasticJob(machines(3), tmp_path, env, pause_s=PATIENT_S)
    job.start(*job.hosts)
    job.until_trained(*job.hosts)
    sick = job.roles()[ROLES[role]]
    others = [host for host in job.hosts if host is not sick]
    kill_worker(job, sick)
    job.until_trained(*job.hosts)
    assert not left_out(job)
    kill_worker(job, sick)
    job.until_trained(*others)
    assert left_out(job) == [(sick.name, True)]
    restarts = [one for one in job.job.events("restart") if one["own"]]
    assert [one["action"] for one in restarts] == ["restart", "leave the machine out"]
    assert {one.node for one in restarts} == {sick.name}
    # Its agent waits; when the time is over all go on together, at a step's end.
    job.until_trained(*job.hosts)
    out, back = job.job.events("left_out")[0], job.job.events("attempt_formed")[-1]
    assert back.t > out["until_t"] - 1.0
    assert job.lost() == set()
    job.finish(*job.hosts)


def test_a_spare_takes_the_place_of_a_machine_and_its_owner_brings_it_back(machines, tmp_path):
    env = {"OUTLAST_RESTART_FAILURES": "1"}
    hosts = machines(3)
    job = ElasticJob(hosts[:2], tmp_path, env, pause_s=PATIENT_S)  # two at most
    job.start(*hosts[:2])
    job.until_trained(*hosts[:2])
    job.hosts = hosts
    sick = job.roles()[1]
    stays = job.roles()[0]
    spare = hosts[2]
    job.start(spare, num_most=2)
    until(lambda: "waiting for a place" in job.agents[spare.name].err, "a spare")
    kill_worker(job, sick)
    job.until_trained(stays, spare)
    assert left_out(job) == [(sick.name, True)]
    # New agents everywhere, and room for it: what the ledger says still holds.
    for agent in job.agents.values():
        agent.kill()
    before = job.attempts()[-1][0]
    job.start(sick, stays, num_most=2)
    until(lambda: "left out for another" in job.agents[sick.name].err, "a machine left out")
    job.until_trained(stays, steps=10)
    assert job.on(sick, after_attempt=before) == []
    job.agents[sick.name].kill()
    job.start(sick, num_most=2, env={**env, "OUTLAST_RESTART_LET_IN": "true"})
    job.until_trained(stays, sick)
    assert [event.node for event in job.job.events("let_in")] == [sick.name]
    job.finish(stays, sick)


def test_a_machine_that_is_needed_takes_part_with_a_wait(machines, tmp_path):
    env = {"OUTLAST_RESTART_FAILURES": "1", "OUTLAST_RESTART_BACK_OFF": "1 s"}
    job = ElasticJob(machines(2), tmp_path, env, num_least=2)
    job.start(*job.hosts)
    job.until_trained(*job.hosts)
    sick = job.roles()[1]
    kill_worker(job, sick)
    job.until_trained(*job.hosts)
    assert left_out(job) == [(sick.name, False)]
    (restart,) = [one for one in job.job.events("restart") if one["own"]]
    assert restart["wait_s"] > 0
    words = f"machine {sick.name} takes part on, because too few others are there"
    assert words in job.agents[sick.name].err
    job.finish(*job.hosts)


def test_kills_that_cost_less_than_a_machine_adds_do_not_leave_it_out(machines, tmp_path):
    """Three SIGKILLs of unknown sender count less than one failure: a third of the work is more."""
    job = ElasticJob(machines(3), tmp_path)
    job.start(*job.hosts)
    job.until_trained(*job.hosts)
    hit = job.roles()[1]
    for _ in range(3):
        kill_worker(job, hit)
        job.until_trained(*job.hosts)
    assert left_out(job) == []
    weighed = [one["weighed"] for one in job.job.events("restart") if one["own"]]
    assert weighed[:2] == ["", ""]
    assert "machine-hours an hour, and it adds 1 (1/3 of the work)" in weighed[2]
    assert f"takes part on: {weighed[2]}" in job.agents[hit.name].err
    job.finish(*job.hosts)
