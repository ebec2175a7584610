"""Faults of several machines: their cables, the one that leads, what one of them is told."""

import subprocess

import machines_floor
import pytest
from floor import until

from outlast.drill import at, network
from thorough import ALL

pytestmark = pytest.mark.skipif(not ALL, reason="OUTLAST_TEST_ALL")


@pytest.fixture(name="hosts")
def _hosts(floor):
    if why_not := network.unusable():
        pytest.skip(why_not)
    made = network.Network(2)
    yield [machines_floor.Host(floor, machine) for machine in made.machines]
    try:
        floor.close()
    finally:
        made.close()


def ends_well(job, calm, codes=(0, 0)):
    assert job.wait() == list(codes), job.text
    assert (job.hashes(), job.losses()) == calm(), "it ends with other bits"


@pytest.mark.parametrize("name", ["cut-network", "black-hole", "reset-network"])
def test_a_machine_is_cut_off_and_comes_back(make, calm, hosts, name):
    planned = at(step=12).on(machine=1).cable(name, for_s=4)
    job = make(planned, "--pause", 0.1, hosts=hosts)
    struck = planned.strike(job)
    assert "machine1" in struck.what
    assert not reaches(hosts)
    planned.finish(job)
    assert reaches(hosts)
    ends_well(job, calm)


@pytest.mark.parametrize(("name", "value"), [("lose-packets", 3), ("throttle-network", 0.3)])
def test_a_bad_cable_is_borne(make, calm, hosts, name, value):
    planned = at(step=12).on(machine=1).cable(name, value, for_s=4)
    job = make(planned, hosts=hosts)
    before = rules(hosts[1].machine)
    struck = planned.strike(job)
    assert rules(hosts[1].machine) != before
    planned.finish(job)
    assert rules(hosts[1].machine) == before
    ends_well(job, calm)
    assert not job.has("restart", struck.t)


def test_what_this_kernel_cannot_do_is_said(make, calm, hosts):
    planned = at(step=12).on(machine=1).cable("cut-network")
    job = make(planned, steps=4, hosts=hosts)
    why_not = at(step=12).on(machine=1).cable("delay-network", 0.1).fault.why_not(job)
    assert why_not == network.cannot_delay()
    if why_not:
        assert "netem" in why_not
    assert "is for number 5" in at(step=12).on(machine=5).cable("cut-network").fault.why_not(job)
    assert job.wait() == [0, 0]


@pytest.mark.parametrize("victim", ["", "leader", "agent"])
def test_a_machine_is_lost_and_started_again(make, calm, hosts, victim):
    planned = at(step=12).on(machine=1).kill(victim)
    job = make(planned, hosts=hosts)
    struck = planned.strike(job)
    (down,) = until(lambda: [one for one in job.machines if one.agent is None], "it is down")
    assert (down.number == 1) or victim == "leader"
    planned.finish(job)
    assert all(one.agent for one in job.machines)
    ends_well(job, calm)
    assert [event.node for event in job.has("node_lost", struck.t)] == [down.name]


def test_a_machine_stands_still_for_a_while(make, calm, hosts):
    planned = at(step=12).on(machine=1).stop(for_s=2)
    job = make(planned, hosts=hosts)
    planned.strike(job)
    assert len(planned.fault._stopped) >= 3  # agent, worker, keeper
    planned.finish(job)
    ends_well(job, calm)


def test_one_machine_has_a_notice(make, calm, hosts):
    planned = at(step=12).on(machine=1).notice(lead_s=60)
    job = make(planned, hosts=hosts)
    assert len({server.port for server in planned.fault._servers}) == 1
    planned.strike(job)
    assert job.machines[1].started.wait() == 75, job.text
    planned.finish(job, lambda: True)
    assert {event.node for event in job.has("notice")} == {"machine1"}
    job.machines[1].start()
    if job.machines[0].started.poll() == 75:
        job.machines[0].start()
    ends_well(job, calm)


def test_one_machine_has_another_time(make, calm, hosts):
    planned = at(step=12).on(machine=1).jump_clock(5000.0, for_s=2)
    job = make(planned, "--pause", 0.1, hosts=hosts)
    planned.strike(job)
    planned.finish(job)
    ends_well(job, calm)
    jumped = [
        {rank for line in job.lines(rank) if line["t"] - line["now"] > 4000} for rank in (0, 1)
    ]
    assert sorted(map(len, jumped)) == [0, 1]


def test_storage_is_read_only_for_all_machines(make, calm, hosts):
    planned = at(step=12).read_only_storage(for_s=60)
    job = make(planned, "--pause", 0.1, hosts=hosts)
    struck = planned.strike(job)
    assert all("Read-only" in touch(one, job.checkpoints / "new") for one in job.machines)
    until(lambda: job.has("storage_error", struck.t), "a save that fails")
    planned.finish(job, lambda: True)
    assert not any(touch(one, job.run / "new") for one in job.machines if one.keeper)
    assert not any(touch(one, job.checkpoints / ".new") for one in job.machines if one.keeper)
    ends_well(job, calm)


def touch(machine, path):
    """What is said where a machine's keeper would make a file; "" if it can."""
    inside = ["nsenter", "--mount", "--target", str(machine.keeper), "touch", path]
    return subprocess.run(inside, check=False, capture_output=True, text=True).stderr


def reaches(hosts):
    """Whether the first machine's kernel has an answer from the second's."""
    one, other = hosts[0].machine, hosts[1].machine
    code = (
        "import socket, sys\n"
        "try: socket.create_connection((sys.argv[1], 9), 1)\n"
        "except ConnectionRefusedError: print('refused')\n"
        "except OSError: pass\n"
    )
    # A reset is what a closed port answers with as well: that fault is asked for its rules.
    ask = one.command("python3", "-c", code, other.address)
    said = subprocess.run(ask, check=False, capture_output=True, text=True)
    return "refused" in said.stdout and "reject" not in rules(other)


def rules(machine):
    """What is done to a machine's packets, at both ends of its cable."""
    return "".join(
        network.run("ip", "netns", "exec", namespace, *command)
        for namespace in (machine.namespace, machine.switch)
        for command in (("nft", "list", "ruleset"), ("tc", "qdisc", "show"))
    )
