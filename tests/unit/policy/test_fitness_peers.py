"""Machines compared: the odd one is named, nobody else, and the same by all of them."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.policy.fitness_peers import Company, MachineReport, PeerLink, compare, judge_clock

SAME = {"torch": "2.13.0", "python": "3.11.7", "outlast": "0.1.0"}


def reports(number, *, clocks=None, broken=(), versions=None, speeds=None, has_gpu=True):
    """Machines a, b, c…; ``clocks``: how far each is ahead; ``broken``: pairs out of reach."""
    names = "abcdefghijklmnop"[:number]
    clocks, versions, speeds = clocks or {}, versions or {}, speeds or {}
    found = []
    for one in names:
        links = {}
        for other in names:
            if other == one:
                continue
            if (one, other) in broken or (other, one) in broken:
                links[other] = PeerLink(error="no answer within 5 s")
            else:
                offset_s = clocks.get(other, 0.0) - clocks.get(one, 0.0)
                links[other] = PeerLink(offset_s=offset_s, bound_s=0.001)
        found.append(
            MachineReport(
                node=one,
                machine=one,
                versions={**SAME, **versions.get(one, {})},
                device="H100",
                has_gpu=has_gpu,
                matmul_gflops=speeds.get(one, 1000.0),
                links=links,
            )
        )
    return found


def statuses(compared, name):
    return {
        node: one.status
        for node, findings in compared.findings.items()
        for one in findings
        if one.name == name
    }


def odd(compared, name):
    return {node for node, status in statuses(compared, name).items() if status != "ok"}


def test_machines_that_fit_each_other_are_all_fit():
    compared = compare(reports(4))
    assert not compared.sick
    assert {one.status for findings in compared.findings.values() for one in findings} == {"ok"}


@pytest.mark.parametrize("number", [3, 4, 5, 8])
@pytest.mark.parametrize("ahead_s", [30.0, -30.0])
def test_one_odd_clock_is_alone(number, ahead_s):
    compared = compare(reports(number, clocks={"b": ahead_s}))
    assert odd(compared, "clock") == set(compared.sick) == {"b"}


def test_of_two_clocks_nobody_knows_which_is_right():
    assert set(compare(reports(2, clocks={"b": 30.0})).sick) == {"a", "b"}


def test_a_clock_is_judged_by_what_is_certain():
    assert judge_clock(30.0, 0.001, "that of b").status == "failed"
    assert judge_clock(30.0, 29.5, "that of b").status == "ok"
    assert judge_clock(-2.0, 0.1, "that of b").status == "warning"
    assert judge_clock(-2.0, 0.1, "that of b").seen.endswith("behind that of b")


def test_the_machine_that_others_do_not_reach_is_left_out():
    compared = compare(reports(3, broken=[("a", "c"), ("b", "c")]))
    assert set(compared.sick) == {"c"}
    assert statuses(compared, "peers") == {"a": "warning", "b": "warning", "c": "failed"}


def test_of_two_that_do_not_reach_each_other_one_can_stay():
    compared = compare(reports(4, broken=[("a", "b")]))
    assert len(compared.sick) == 1
    assert set(compared.sick) < {"a", "b"}


@given(st.integers(2, 8), st.randoms(use_true_random=False))
def test_those_who_are_fit_reach_each_other(number, rng):
    pairs = list(itertools.combinations("abcdefgh"[:number], 2))
    broken = [pair for pair in pairs if rng.random() < 0.3]
    found = reports(number, broken=broken)
    fit = {one.node for one in found} - set(compare(found).sick)
    assert fit
    assert not any(one in fit and other in fit for one, other in broken)


def test_the_odd_version_is_named_and_of_two_both():
    compared = compare(reports(3, versions={"c": {"torch": "2.12.0"}}))
    assert set(compared.sick) == {"c"}
    assert compared.sick["c"] == "torch 2.12.0 here, 2.13.0 on 2 of 3 machines"
    assert set(compare(reports(2, versions={"b": {"torch": "2.12.0"}})).sick) == {"a", "b"}
    assert set(compare(reports(3, versions={"b": {"cuda": "13.0"}})).sick) == {"b"}


def test_a_slow_gpu_is_sick_a_slow_processor_only_told():
    slow = {"b": 500.0}
    assert set(compare(reports(5, speeds=slow)).sick) == {"b"}
    compared = compare(reports(5, speeds=slow, has_gpu=False))
    assert not compared.sick
    assert odd(compared, "speed alike") == {"b"}
    assert not compare(reports(2, speeds=slow)).sick
    assert odd(compare(reports(2, speeds={"b": 300.0})), "speed alike") == {"b"}


def test_nobody_is_slow_among_machines_that_scatter():
    for seed in range(200):
        rng = random.Random(seed)
        speeds = {name: rng.gauss(1000, 60) for name in "abcdefgh"}
        assert not compare(reports(8, speeds=speeds)).sick, seed


def test_who_did_not_report_and_who_said_it_itself_are_left_out():
    found = reports(3)
    own = [MachineReport(node="d", machine="d", versions=SAME, device="H100", failed=["gpu: ECC"])]
    compared = compare([*found, *own], {"e": "e"})
    assert compared.sick == {"d": "gpu: ECC", "e": "it came and did not report"}


# --- who takes part ------------------------------------------------------------------------------


def seen(company, at_s, **counts):
    company.seen(counts, at_s)


def test_only_those_whose_number_goes_on_are_present():
    company = Company("b", 2, 3)
    seen(company, 0.0, a=7, b=1)
    assert company.present(0.0) == ["b"]
    seen(company, 1.0, a=7, b=2)
    assert company.present(1.0) == ["b"]
    seen(company, 2.0, a=8, b=3)
    assert company.present(2.0) == ["a", "b"]
    assert company.present(30.0) == ["b"]
    assert company.is_gone("a", 30.0)


def test_the_first_by_name_proposes_once_all_are_there_or_enough_and_nobody_comes():
    for me, proposes in (("a", True), ("b", False)):
        company = Company(me, 2, 3, settle_s=5.0)
        seen(company, 0.0, a=1, b=1)
        assert company.proposal(0.0) == []
        seen(company, 1.0, a=2, b=2)
        assert company.proposal(1.0) == []
        seen(company, 7.0, a=3, b=3)
        assert bool(company.proposal(7.0)) is proposes
        seen(company, 8.0, a=4, b=4, c=1)
        seen(company, 9.0, a=5, b=5, c=2)
        assert (company.proposal(9.0) == ["a", "b", "c"]) is proposes


def test_those_in_a_round_and_those_who_have_gone_are_not_asked_again():
    company = Company("b", 1, 4)
    seen(company, 0.0, a=1, c=1)
    seen(company, 1.0, a=2, c=2)
    company.taken(["a"])
    assert company.present(1.0) == ["b", "c"]
    seen(company, 2.0, a=3)
    assert company.present(2.0) == ["b"]
