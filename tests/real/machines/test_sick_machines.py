"""A machine that fails where others do not is left out; what all have ends the job."""

import json
import os
import random
import signal

import pytest
from elastic_job import ElasticJob
from floor import SCRIPTS, until
from held import holding

import thorough
from sick_machines import SICK

pytest.importorskip("outlast.launch.membership.node")
NUM = 10
OUT_S, PATIENT_S = 12, 0.1  # nobody needs many steps while a machine is left out
HANG = "hang"  # in a collective, as with a network card that has died
WAYS = {**SICK, HANG: ("", 0)}


def drawn(number):
    """One of ten ways, and after how many steps: the hang is always among them."""
    rng = random.Random(thorough.seed())
    how = [HANG, *rng.sample(sorted(SICK), NUM - 1)][number]
    steps = random.Random(f"{thorough.seed()} {number}").choice([0, 4])
    steps = 4 if how == HANG else steps  # a watch over hangs has to see a few
    print(f"it fails by: {how}, after {steps} steps")
    return how, steps


def sick(job, where, how, steps):
    (job.job.records / "sick.json").write_text(json.dumps({where: [*WAYS[how], steps]}))


def job_of(hosts, tmp_path, how):
    env = {"OUTLAST_HEALTH_HANG": "8 s"} if how == HANG else {}
    # No checkpoint before the failure: what makes progress may fail more often.
    options = ("--every", "50 steps")
    return ElasticJob(hosts, tmp_path, env, script=SCRIPTS / "sick.py", options=options)


@pytest.mark.parametrize("number", thorough.some(range(NUM), 2))
def test_what_one_machine_has_leaves_it_out_within_three_attempts(machines, tmp_path, number):
    how, steps = drawn(number)
    hosts = machines(3)
    one, *others = random.Random(f"{thorough.seed()} {number}").sample(hosts, 3)
    job = job_of(hosts, tmp_path, how)
    sick(job, one.name, how, steps)
    job.start(*hosts)
    job.until_trained(*others)
    # Who asks for a spare alone is told that there is none: that is no machine left out.
    assert [event.node for event in job.job.events("left_out") if event["goes"]] == [one.name]
    assert job.attempts()[-1][1] == 2
    # Machines come one after the other: what was formed before all were there is not counted.
    tried = {event.attempt for event in job.job.events("restart") if event.get("cause")}
    assert len(tried) <= 2, "the third attempt is to be the one that trains"
    job.finish(*others)


@pytest.mark.parametrize("how", thorough.some(sorted(SICK), 1))
def test_what_all_have_ends_the_job_with_the_reason(machines, tmp_path, how):
    hosts = machines(3)
    job = job_of(hosts, tmp_path, how)
    sick(job, "*", how, 0)
    job.start(*hosts)
    codes = [agent.wait() for agent in job.agents.values()]
    assert codes == [76] * 3, [agent.text for agent in job.agents.values()]
    said = SICK[how][0].splitlines()[0][:20] if SICK[how][0] else "exit code 3"
    for end in {event["reason"] for event in job.job.events("job_finished")}:
        assert ("a bug in the script" in end) == (how == "a library"), end
        assert how == "a library" or said in end, end


def test_a_machine_that_cannot_end_its_worker_is_left_out_until_it_can(machines, tmp_path):
    env = {"OUTLAST_RESTART_LEAVE_OUT": f"{OUT_S} s"}
    job = ElasticJob(machines(3), tmp_path, env, pause_s=PATIENT_S)
    job.start(*job.hosts)
    job.until_trained(*job.hosts)
    _, hurt, bad = job.roles()
    held, lost = (
        max((one["attempt"], one["pid"]) for one in job.on(host))[1] for host in (bad, hurt)
    )
    with holding(held):
        os.kill(lost, signal.SIGKILL)  # the others' workers are ended for it
        agent = job.agents[bad.name]
        until(lambda: f"process {held}" in agent.err, "word of the one that does not end")
        job.until_trained(*(host for host in job.hosts if host is not bad))
        until(lambda: job.job.events("left_out"), "a machine left out", running=agent)
        ((event),) = job.job.events("left_out")
        assert (event.node, event["goes"]) == (bad.name, True)
        assert str(held) in event["reason"]
    job.until_trained(*job.hosts)
    job.finish(*job.hosts)
