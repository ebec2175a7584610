"""The machines themselves: they see each other, and each fault does what its name says."""

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from floor import until

import machine_network as network
from machine_network import (
    BlackHole,
    Cut,
    FreezeMachine,
    KillMachine,
    PacketLoss,
    Partition,
    Reset,
)

TALK = Path(__file__).with_name("talk.py")
TESTS = Path(__file__).parents[2]
SILENCE_S = 1  # a packet that is not lost takes microseconds
PATIENCE_S = 60
GONE = {"ConnectionAbortedError", "ConnectionResetError", "BrokenPipeError"}
WHO = (
    "import socket, os; print(socket.gethostname(), os.getpid(), os.environ['GLOO_SOCKET_IFNAME'])"
)
ABANDON = """
import subprocess, sys, time
sys.path.append(sys.argv[1])
from machine_network import Network
made = Network(2)
inside = subprocess.Popen(made.machines[0].command("sleep", "1000"), start_new_session=True)
while not made.machines[0].processes():
    time.sleep(0.01)
print(inside.pid, *(machine.namespace for machine in made.machines), flush=True)
time.sleep(1000)
"""


def listen(host):
    server = host.cold(TALK, "listen", host.address)
    until(lambda: "ready" in server.out, "a listener", running=server)
    return server


def said(host, to, limit_s):
    """What a line from ``host`` to ``to`` came to: "hello", or the error."""
    talk = host.cold(TALK, "say", to.address, limit_s)
    talk.wait()
    return talk.out.strip()


def namespaces():
    return {entry.name for entry in Path("/run/netns").iterdir()}


def are_parted(one, other):
    return said(one, other, SILENCE_S) == said(other, one, SILENCE_S) == "TimeoutError"


def see_each_other(one, other):
    # After a cable was plugged in, the first packet may go by before the switch has noticed.
    until(lambda: said(one, other, PATIENCE_S) == "hello", "an answer")
    return said(other, one, PATIENCE_S) == "hello"


def test_machines_have_names_and_addresses_and_see_each_other(machines, floor):
    hosts = machines(3)
    outside = socket.gethostname()
    for host in hosts:
        listen(host)
    assert all(said(a, b, PATIENCE_S) == "hello" for a in hosts for b in hosts)
    for number, host in enumerate(hosts):
        script = floor.directory / "who.py"
        script.write_text(WHO)
        for started in (host.cold(script), host.warm(script)):
            assert started.wait() == 0, started.text
            assert started.out.split() == [f"machine{number}", str(started.pid), "eth0"]
    assert socket.gethostname() == outside


def test_networks_with_the_same_addresses_are_strangers(machines):
    (here, also_here), (there, _) = machines(2), machines(2)
    assert also_here.address == "10.77.0.11"
    assert here.address == there.address
    listen(also_here)
    assert said(here, also_here, PATIENCE_S) == "hello"
    assert said(there, also_here, SILENCE_S) == "ConnectionRefusedError"


@pytest.mark.parametrize("kind", [Cut, BlackHole])
def test_a_machine_that_is_cut_off_sees_itself_alone(machines, kind):
    one, other, third = hosts = machines(3)
    for host in hosts:
        listen(host)
    fault = kind(one.machine)
    fault.inject()
    assert are_parted(one, other)
    assert said(other, third, PATIENCE_S) == "hello"
    assert said(one, one, PATIENCE_S) == "hello"
    fault.heal()
    assert see_each_other(one, other)


def test_connections_outlive_a_cut_and_no_reset(machines):
    one, other = machines(2)
    listen(other)
    kept = [host.cold(TALK, "keep", other.address) for host in (one, one)]
    for connection in kept:
        until(lambda connection=connection: "answered" in connection.out, "lines")
    cut, reset = Cut(one.machine), Reset(one.machine)
    cut.inject()
    assert said(one, other, SILENCE_S) in ("TimeoutError", "OSError")
    cut.heal()
    until(lambda: said(one, other, PATIENCE_S) == "hello", "an answer")
    assert [connection.poll() for connection in kept] == [None, None]
    reset.inject()
    for connection in kept:
        assert connection.wait() == 0
        assert connection.out.split() == ["answered", "ConnectionResetError"]
    assert said(one, other, PATIENCE_S) == "ConnectionRefusedError"
    reset.heal()
    assert said(one, other, PATIENCE_S) == "hello"


def test_two_machines_are_parted_and_both_see_the_third(machines):
    one, other, third = hosts = machines(3)
    for host in hosts:
        listen(host)
    fault = Partition(one.machine, other.machine)
    fault.inject()
    fault.inject()  # once is enough
    assert are_parted(one, other)
    assert all(said(host, third, PATIENCE_S) == "hello" for host in (one, other))
    assert all(said(third, host, PATIENCE_S) == "hello" for host in (one, other))
    fault.heal()
    fault.heal()
    assert see_each_other(one, other)


def test_a_share_of_packets_is_lost(machines):
    one, other = machines(2)
    listen(other)

    def answered():
        spray = one.cold(TALK, "spray", other.address, 100)
        assert spray.wait() == 0, spray.text
        return int(spray.out)

    assert said(one, other, PATIENCE_S) == "hello"  # and they know each other's hardware address
    fault = PacketLoss(one.machine, 30)
    fault.inject()
    assert 1 < answered() < 100  # half of them: 0.7 squared
    assert said(one, other, PATIENCE_S) == "hello"  # TCP sends again
    fault.heal()
    until(lambda: answered() == 100, "no loss")
    with pytest.raises(ValueError, match="percent 0"):
        PacketLoss(one.machine, 0)


def test_faults_of_one_machine_are_healed_one_by_one(machines):
    one, other = machines(2)
    for host in (one, other):
        listen(host)
    hole, parted = BlackHole(one.machine), Partition(one.machine, other.machine)
    for fault in (hole, parted):
        fault.inject()
    hole.heal()
    assert are_parted(one, other)
    parted.heal()
    assert see_each_other(one, other)


def test_a_killed_machine_has_no_process_left_and_the_others_live(machines):
    one, other = machines(2)
    servers = [listen(host) for host in (one, other)]
    child = "import subprocess; subprocess.run(['sleep', '1000'], start_new_session=True)"
    parent = one.cold("-c", child)
    until(lambda: len(one.machine.processes()) == 3, "a child of its own", running=parent)
    kept = other.cold(TALK, "keep", one.address)
    until(lambda: "answered" in kept.out, "lines", running=kept)
    KillMachine(one.machine).inject()
    assert one.machine.processes() == []
    assert [servers[0].wait(), parent.wait()] == [-signal.SIGKILL] * 2
    # Its kernel closes what it had: the other end hears of it.
    assert kept.wait() == 0, kept.text
    assert kept.out.split()[1] in GONE
    assert servers[1].poll() is None
    listen(one)
    assert said(other, one, PATIENCE_S) == "hello"


def test_a_frozen_machine_goes_on_where_it_was(machines):
    one, other = machines(2)
    listen(other)
    kept = one.cold(TALK, "keep", other.address)
    until(lambda: "answered" in kept.out, "lines", running=kept)
    fault = FreezeMachine(other.machine)
    fault.inject()
    (pid,) = other.machine.processes()
    until(lambda: "State:\tT" in Path(f"/proc/{pid}/status").read_text(), "stopped")
    fault.heal()
    assert said(one, other, PATIENCE_S) == "hello"
    assert kept.poll() is None


@pytest.mark.alone
def test_what_a_dead_run_left_is_removed_and_nothing_else(machines, floor):
    (mine,) = machines(1)
    listen(mine)
    run = floor.cold("-c", ABANDON, TESTS)
    until(lambda: len(run.out.split()) == 3, "a network", running=run)
    pid, *abandoned = run.out.split()
    run.signal(signal.SIGKILL)
    run.wait()
    made = namespaces()
    assert set(abandoned) <= made
    machines(1)
    left = namespaces()
    assert not left & set(abandoned)
    assert not Path(f"/proc/{pid}/ns/net").exists()
    assert mine.machine.namespace in left
    assert said(mine, mine, PATIENCE_S) == "hello"


@pytest.mark.alone
def test_a_closed_network_leaves_nothing(machines, floor):
    before = namespaces()
    with network.Network(2) as made:
        command = made.machines[1].command(sys.executable, "-c", "import time; time.sleep(1000)")
        inside = subprocess.Popen(command, env=floor.environ, start_new_session=True)
        until(made.machines[1].processes, "a process inside")
        assert namespaces() > before
    assert inside.wait() == -signal.SIGKILL
    assert namespaces() == before
    made.close()
    with pytest.raises(ValueError, match="num_machines 0"):
        network.Network(0)


def test_what_cannot_be_done_is_said(machines):
    (host,) = machines(1)
    with pytest.raises(network.NetworkError, match=r"^ip netns exec .* nft -f -: .*syntax error"):
        network.nft(host.machine.namespace, "rubbish")
    with pytest.raises(network.NetworkError, match="no-such-tool is not here"):
        network.run("no-such-tool")
