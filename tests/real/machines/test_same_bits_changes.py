"""``outlast.SameBits`` while machines come and go: the run is the undisturbed one, bit for bit.

One to four machines; at each change one is killed, leaves after a notice, or comes (back). Compared
are every loss and every sample of every attempt with those of one undisturbed worker, and the hash
over weights, buffers, optimizer and schedule at the end. ``test_same_bits.py`` shows that one, two,
three and four undisturbed workers are the same.
"""

import os
import signal

import pytest
from elastic_job import ElasticJob
from floor import SCRIPTS

from machine_network import KillMachine
from thorough import ALL

pytest.importorskip("outlast.launch.membership.node")

CHANGES = int(os.environ.get("OUTLAST_TEST_CHANGES") or 0) or (100 if ALL else 4)
KINDS = ["convolutions", "transformer"] if CHANGES > 4 else ["convolutions"]
DRAINED = 75


def change(job, there, rng):
    """One change of the machines that are ``there``; what it was."""
    absent = [host for host in job.hosts if host not in there]
    kinds = ["come"] * bool(absent) + ["kill", "leave"] * (len(there) > 1)
    kind = rng.choice(kinds)
    host = rng.choice(absent if kind == "come" else there)
    if kind == "come":
        job.start(host)
        there.append(host)
        return f"{host.name} comes"
    there.remove(host)
    if kind == "kill":
        KillMachine(host.machine).inject()
        return f"{host.name} is killed"
    job.agents[host.name].signal(signal.SIGTERM)
    assert job.agents[host.name].wait() == DRAINED, job.agents[host.name].text
    return f"{host.name} leaves"


@pytest.mark.timeout(60 + 60 * CHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_are_the_same_through_many_changes(machines, tmp_path, rng, kind):
    script, options = SCRIPTS / "same_bits.py", ("--kind", kind)
    job = ElasticJob(machines(4), tmp_path, script=script, options=options, pause_s=0.1)
    there = list(job.hosts[: rng.randint(1, 4)])
    job.start(*there)
    job.until_trained(*there, steps=2)
    sizes = [len(there)]
    for number in range(CHANGES):
        what = change(job, there, rng)
        job.until_trained(*there, steps=2)
        sizes.append(len(there))
        print(f"change {number + 1} of {CHANGES}: {what}; {len(there)} train", flush=True)
    job.finish(*there)
    assert len(sizes) == CHANGES + 1
    assert len(set(sizes)) > 1
