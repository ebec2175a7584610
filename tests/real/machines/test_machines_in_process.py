"""A machine is lost, and the workers of the others go on in their processes."""

import pytest
from elastic_job import ElasticJob
from floor import SCRIPTS

from outlast.drill.network_faults import KillMachine

pytest.importorskip("outlast.launch.membership.node")


def test_a_lost_machine_costs_the_others_no_process(machines, tmp_path):
    env = {"OUTLAST_WORKERS_IN_PROCESS": "true"}
    script = SCRIPTS / "elastic_same_bits.py"
    job = ElasticJob(machines(3), tmp_path, env, script)
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
    job.finish(*others)
