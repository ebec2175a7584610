"""Copies of each machine's snapshot in others' memory: a lost machine costs nothing."""

import itertools
import os
import signal
import socket

import pytest
from certificates import authority
from floor import until
from lean import shard
from peer_floor import HEAD_BYTES, MANIFEST, Fleet, Relay, whole
from saved import name_in

from outlast.checkpoint.manifest import BLOCK_BYTES, part_file, save_of
from outlast.errors import CheckpointInvalid
from outlast.keeper import protocol
from outlast.peer import connect
from thorough import some

NODES = ("n0", "n1", "n2")


@pytest.fixture(name="fleet")
def _fleet(floor, tmp_path):
    fleets = []

    def make(nodes=NODES, **options):
        fleets.append(Fleet(floor, tmp_path, nodes, **options))
        return fleets[-1]

    yield make
    for fleet in fleets:
        fleet.close()


@pytest.mark.parametrize("lost", some(range(3), 1))
def test_after_the_loss_of_any_one_of_three_all_of_it_is_in_memory(fleet, lost):
    size = BLOCK_BYTES + 30_000
    job = fleet(size=size)
    job.start(*NODES)
    for step in (10, 20):
        assert job.save(step) == ["", "", ""]
    job.has_copies(20, *NODES)
    job.machines[NODES[lost]].die()
    job.shared.rename(job.shared.with_name("unreachable"))
    left = [node for node in NODES if node != NODES[lost]]
    job.form(*left)
    for node in left:
        with job.machines[node].places(job.attempt) as places:
            assert whole(places, 20, 3, size)


def children(storage, step):
    """The files of a step, or none."""
    names = [name for name in storage.children() if save_of(name).step == step]
    return [file for name in names for file in storage.children(name)]


def test_a_keeper_that_is_stopped_is_done_without(fleet):
    job = fleet()
    job.start(*NODES)
    assert job.save(10) == ["", "", ""]
    job.has_copies(10, *NODES)
    job.form(*NODES)
    stopped = job.machines["n1"].supervisor.pid
    os.kill(stopped, signal.SIGSTOP)
    try:
        with job.machines["n0"].places(job.attempt) as places:
            assert whole(places, 10, 3, job.size)
    finally:
        os.kill(stopped, signal.SIGCONT)


@pytest.mark.parametrize("lost", some(itertools.combinations(range(3), 2), 1))
def test_with_two_replicas_two_of_three_can_be_lost(fleet, lost):
    job = fleet(replicas=2)
    job.start(*NODES)
    assert job.save(10) == ["", "", ""]
    until(lambda: all(len(job.machines[n].replicated(10)) == 2 for n in NODES), "two copies each")
    for number in lost:
        job.machines[NODES[number]].die()
    (left,) = [node for number, node in enumerate(NODES) if number not in lost]
    job.form(left)
    with job.machines[left].places(job.attempt) as places:
        assert [place.name for place in places] == ["memory"]
        assert whole(places, 10, 3, job.size)


@pytest.mark.alone
@pytest.mark.parametrize("lost", some(range(3), 1))
def test_a_machine_lost_while_copies_are_on_their_way_costs_at_most_that_step(fleet, lost):
    size = 2 * BLOCK_BYTES
    job = fleet(size=size, rate_bytes=4e7)
    job.start(*NODES)
    assert job.save(10) == ["", "", ""]
    job.has_copies(10, *NODES)
    assert job.save(20) == ["", "", ""]
    assert not all(job.machines[node].replicated(20) for node in NODES)
    job.machines[NODES[lost]].die()
    left = [node for node in NODES if node != NODES[lost]]
    job.form(*left)
    for node in left:
        with job.machines[node].places(job.attempt) as places:
            assert any(is_whole(places, step, size) for step in (20, 10))


def is_whole(places, step, size):
    try:
        return whole(places, step, 3, size)
    except CheckpointInvalid:
        return False


def test_a_newcomer_reads_what_the_others_have(fleet):
    job = fleet()
    job.start(*NODES)
    assert job.save(10) == ["", "", ""]
    job.has_copies(10, *NODES)
    job.machines["n1"].die()
    job.add("new")
    job.form("n0", "new", "n2")
    with job.machines["new"].places(job.attempt) as places:
        assert not is_whole(places[:1], 10, job.size)  # a copy or two may have come in meanwhile
        assert whole(places, 10, 3, job.size)


def test_without_replicas_a_lost_machine_leaves_a_gap(fleet):
    job = fleet(replicas=0)
    job.start(*NODES)
    assert job.save(10) == ["", "", ""]
    job.machines["n1"].die()
    job.form("n0", "n2")
    with (
        job.machines["n0"].places(job.attempt) as places,
        pytest.raises(CheckpointInvalid, match="rank-00001"),
    ):
        whole(places, 10, 3, job.size)


def test_a_keeper_that_is_started_again_has_the_copies_and_its_port(fleet):
    job = fleet()
    job.start(*NODES)
    assert job.save(10) == ["", "", ""]
    job.has_copies(10, *NODES)
    killed = job.machines["n0"].supervisor.pid
    os.kill(killed, signal.SIGKILL)
    until(lambda: job.machines["n0"].supervisor.pid not in (killed, None), "another keeper")
    job.machines["n1"].die()
    job.form("n0", "n2")
    for node in ("n0", "n2"):
        with job.machines[node].places(job.attempt) as places:
            assert whole(places, 10, 3, job.size)


def test_a_machine_that_has_left_is_forgotten_once_newer_copies_are_here(fleet):
    job = fleet()
    job.start(*NODES)
    assert job.save(10) == ["", "", ""]
    job.has_copies(10, *NODES)
    job.machines["n1"].die()
    job.start("n0", "n2")
    left = "rank-00001.safetensors"

    def files():
        found = []
        for node in ("n0", "n2"):
            with job.machines[node].places(job.attempt) as places:
                found += children(places[0].storage, 10)
        return found

    assert left in files()
    for step in (20, 30):
        assert job.save(step) == ["", ""]
        job.has_copies(step, "n0", "n2")
    until(lambda: left not in files(), "it is forgotten")
    with job.machines["n0"].places(job.attempt) as places:
        assert whole(places, 30, 2, job.size)


def test_another_key_is_refused_and_written_down(fleet):
    job = fleet(nodes=("n0", "n1"))
    job.start("n0", "n1")
    assert job.save(10) == ["", ""]
    other = job.machines["n1"]
    key = b"another key of thirty-two bytes!"
    other.host, other.port = other.supervisor.serve("127.0.0.1", key, node="n1")
    job.start("n0", "n1")
    machines = job.machines.values()
    words = "does not hold this job's key"
    for machine in machines:
        until(lambda m=machine: any(words in e["reason"] for e in m.events("replica_failed")), "it")
        until(lambda m=machine: m.events("replica_refused"), "a refusal")
        for event in machine.events("replica_refused"):
            assert "key" in event["reason"]
            assert event["peer"].startswith("127.0.0.1:")
    # Nor has it a part in saves.
    assert job.save(20)[1] == "the keeper of rank 0 cannot be reached"


def test_altered_traffic_is_refused_and_sent_again(fleet):
    job = fleet(nodes=("n0", "n1"))
    relay = Relay(job.machines["n1"].port, flip_at=10_000)
    job.start("n0", "n1", ports={"n1": relay.port})
    assert job.save(10) == ["", ""]
    (event,) = until(lambda: job.machines["n1"].events("replica_refused"), "a refusal")
    assert "altered" in event["reason"]
    relay.flip_at = None
    job.has_copies(10, "n0", "n1")
    relay.close()
    job.machines["n0"].die()
    job.form("n1")
    with job.machines["n1"].places(job.attempt) as places:
        assert whole(places, 10, 2, job.size)


def test_replayed_traffic_is_refused_and_written_down(fleet):
    job = fleet(nodes=("n0", "n1"))
    relay = Relay(job.machines["n1"].port)
    job.start("n0", "n1", ports={"n1": relay.port})
    assert job.save(10) == ["", ""]
    job.has_copies(10, "n0", "n1")
    relay.close()
    recorded = bytes(max(relay.sent, key=len))
    assert len(recorded) > job.size
    with socket.create_connection(("127.0.0.1", job.machines["n1"].port)) as sock:
        sock.sendall(recorded)
        assert until(lambda: job.machines["n1"].events("replica_refused"), "a refusal")
    (event,) = job.machines["n1"].events("replica_refused")
    assert "does not hold this job's key" in event["reason"]


def test_a_copy_that_is_not_what_the_manifest_says_is_not_kept(fleet):
    job = fleet(nodes=("n0", "n1"))
    job.start("n0", "n1")
    assert job.save(10) == ["", ""]
    job.has_copies(10, "n0", "n1")
    keeper = job.machines["n1"]
    storage = job.machines["n1"].storage
    save = name_in(storage, 10)
    manifest = storage.read(f"{save}/manifest.json")
    name, size = "rank-00000.safetensors", job.size + HEAD_BYTES
    part = storage.read(f"{save}/{part_file(0)}")
    small = {MANIFEST: len(manifest), part_file(0): len(part)}
    offer = protocol.ReplicaOffer(node="stranger", save=save, files={name: size}, small=small)
    channel = connect((keeper.host, keeper.port), job.key, protocol.PURPOSE, 20)
    answer = protocol.ask(channel, offer, protocol.ReplicaVerdict, bulk=[manifest, part])
    assert answer.verdict == "send"
    protocol.say(channel, protocol.ReplicaBlock(file=name, index=0), [bytes(size)])
    assert (
        protocol.ask(channel, protocol.ReplicaWhole(), protocol.ReplicaVerdict).verdict == "refused"
    )
    channel.close()
    (event,) = keeper.events("replica_refused")
    assert event["reason"] == f"block 0 of {name} does not match its checksum"
    channel = connect((keeper.host, keeper.port), job.key, protocol.PURPOSE, 20)
    offer.files = {name: size + 1}
    answer = protocol.ask(channel, offer, protocol.ReplicaVerdict, bulk=[manifest, part])
    assert answer.verdict == "refused"
    assert "not what the manifest says" in answer.reason
    channel.close()


def test_over_tls_nothing_of_it_can_be_read_on_the_way(fleet, tmp_path):
    (tmp_path / "tls").mkdir()
    job = fleet(nodes=("n0", "n1"), tls=authority(tmp_path / "tls"))
    relay = Relay(job.machines["n1"].port)
    job.start("n0", "n1", ports={"n1": relay.port})
    assert job.save(10) == ["", ""]
    job.has_copies(10, "n0", "n1")
    relay.close()
    sent = b"".join(map(bytes, relay.sent))
    assert len(sent) > job.size
    assert shard(10, 64)[-64:] not in sent
    job.machines["n0"].die()
    job.form("n1")
    with job.machines["n1"].places(job.attempt) as places:
        assert whole(places, 10, 2, job.size)


def test_members_without_ourselves_are_a_mistake(fleet):
    job = fleet(nodes=("n0", "n1"))
    members = [job.machines["n1"].member()]
    with pytest.raises(ValueError, match="not among the members"):
        job.machines["n0"].supervisor.tell_members(1, members)
