"""Machines meet on storage: processes of their own, without anything to measure before."""

import itertools
import json
import signal

import msgspec
import pytest
from floor import until

from outlast.health.doctor.meeting import DEAD_S, Here, Met
from outlast.health.doctor.probes import Child
from outlast.policy.fitness_peers import MachineReport

VERSIONS = {"torch": "2.13.0"}


@pytest.fixture
def machine(tmp_path):
    """``machine("a", (2, 3))``: one that comes to the meeting."""
    children = []

    def come(node, nodes, wait_s=30.0):
        request = {
            "place": str(tmp_path),
            "node": node,
            "machine": node.upper(),
            "host": "127.0.0.1",
            "nodes": nodes,
            "wait_s": wait_s,
            "tls": None,
        }
        children.append(Child("meeting", request, 90.0))
        return children[-1]

    yield come
    for child in children:
        child.close()


def reports(child, node, **more):
    report = MachineReport(node=node, machine=node.upper(), versions=VERSIONS, **more)
    child.tell(msgspec.to_builtins(report))


def met(child):
    until(child.is_over, "the end of a meeting")
    found = child.answer(Met)
    assert found is not None, child.problem()
    return found


def test_machines_meet_and_all_have_all_reports(machine, tmp_path):
    children = {node: machine(node, (2, 3)) for node in "abc"}
    for node, child in children.items():
        reports(child, node)
    for node, child in children.items():
        found = met(child)
        assert found.outcome == "met"
        assert {one.node for one in found.reports} == {"a", "b", "c"}
        assert not found.missing
        mine = next(one for one in found.reports if one.node == node)
        assert set(mine.links) == {"a", "b", "c"} - {node}
        assert all(link.error == "" for link in mine.links.values())
        assert all(abs(link.offset_s) <= link.bound_s + 1e-3 for link in mine.links.values())
        assert sum(link.rate_bytes is not None for link in mine.links.values()) == 1
    assert not list((tmp_path / "preflight" / "here").iterdir())


def test_enough_go_on_without_those_who_do_not_come(machine):
    children = {node: machine(node, (2, 3)) for node in "ab"}
    for node, child in children.items():
        reports(child, node)
    assert {len(met(child).reports) for child in children.values()} == {2}


def test_one_alone_says_so_and_removes_what_a_killed_one_has_left(machine, tmp_path):
    here = tmp_path / "preflight" / "here"
    here.mkdir(parents=True)
    old = Here(node="old", machine="OLD", address=("127.0.0.1", 1), count=9)
    (here / "old.json").write_bytes(msgspec.json.encode(old))
    child = machine("a", (2, 2), wait_s=DEAD_S)
    reports(child, "a")
    assert met(child).outcome == "alone"
    assert not list(here.iterdir())


def test_a_round_whose_list_comes_after_its_folder_is_waited_for(machine, tmp_path):
    child, folder = machine("b", (2, 2)), tmp_path / "preflight"
    here = folder / "here" / "b.json"

    def looks(times):
        """Wait until it has looked so often."""
        seen = json.loads(here.read_text())["count"]
        until(lambda: json.loads(here.read_text())["count"] > seen + times, "a look")

    until(here.exists, "a machine", running=None)
    looks(1)
    (folder / "round-000001").mkdir()
    looks(2)
    members = {"members": [json.loads(here.read_text())]}
    part = folder / "members.json"
    part.write_text(json.dumps(members))
    part.rename(folder / "round-000001" / "members.json")
    reports(child, "b")
    assert met(child).outcome == "met"


def test_one_that_dies_before_it_reports_is_missed(machine):
    children = {node: machine(node, (3, 3)) for node in "abc"}
    reports(children["a"], "a")
    until(lambda: any(b"report of" in line for line in children["a"].lines()), "a round")
    children["c"]._process.send_signal(signal.SIGKILL)
    reports(children["b"], "b")
    for node in "ab":
        found = met(children[node])
        assert found.missing == {"c": "C"}
        assert {one.node for one in found.reports} == {"a", "b"}


def test_one_that_comes_while_the_job_runs_is_compared_with_the_last_round(machine, tmp_path):
    children = {node: machine(node, (2, 2)) for node in "ab"}
    reports(children["a"], "a", matmul_gflops=7.0)
    reports(children["b"], "b", failed=["gpu: ECC"])
    for child in children.values():
        met(child)
    alive = tmp_path / "membership" / "alive.json"
    count = itertools.count()

    def goes_on():
        part = tmp_path / "part"
        part.write_text(json.dumps({"attempt": 1, "node": "a", "count": next(count)}))
        part.rename(alive)
        return late.is_over()

    late = machine("d", (2, 2))
    reports(late, "d")
    until(goes_on, "the end of a meeting")
    found = late.answer(Met)
    assert found.outcome == "joins"
    assert {one.node: one.matmul_gflops for one in found.reports} == {"a": 7.0, "d": None}


def test_an_old_jobs_sign_of_life_does_not_mean_that_it_runs(machine, tmp_path):
    (tmp_path / "membership").mkdir(mode=0o700)
    (tmp_path / "membership" / "alive.json").write_text('{"attempt": 3, "node": "x", "count": 9}')
    child = machine("a", (1, 1))
    reports(child, "a")
    assert met(child).outcome == "met"


def test_a_place_that_nobody_can_write_is_said(machine, mount):
    locked = mount("ro")
    request = {**machine("a", (1, 2)).request, "place": str(locked)}
    child = Child("meeting", request, 30.0)
    try:
        found = met(child)
    finally:
        child.close()
    assert found.outcome == "failed"
    assert "ead-only file system" in found.words
