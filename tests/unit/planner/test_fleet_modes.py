"""The modes of a fleet: closed forms beside the simulator, and when local updates pay."""

import math
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.planner.fleet_modes import (
    FLEET_MODES,
    FleetJob,
    compared,
    kept,
    pays_above,
    pays_below,
    replayed,
    row,
)
from outlast.planner.job import JobSetup
from outlast.planner.links import LinkJob, ring_crossing
from outlast.planner.study import Scenario
from outlast.planner.traces import read
from outlast.policy.interval import Costs
from thorough import ALL, examples

COSTS = Costs(checkpoint_h=20 / 3600, restore_h=120 / 3600, detect_h=30 / 3600)
TRACES = Path(__file__).parents[3] / "shared" / "traces"


def fleet_job(replicas=8, gbit_per_s=100.0, **more):
    link = LinkJob(parameters=1e9, layers=8, step_s=1.0, crossing=ring_crossing(replicas))
    return FleetJob(link=link, replicas=replicas, bits_per_s=gbit_per_s * 1e9, costs=COSTS, **more)


def by_mode(rows):
    return {one.mode: one for one in rows}


@pytest.mark.parametrize(
    ("replicas", "per_h", "replace_h"),
    [(8, 1.0, 1.0), (16, 2.0, 0.0), *([(8, 0.05, 0.0), (24, 1.0, 0.5)] if ALL else [])],
)
def test_the_closed_forms_are_what_the_simulator_finds(replicas, per_h, replace_h):
    job = fleet_job(replicas, replace_h=replace_h)
    setup = JobSetup(machines=replicas, horizon_s=3600 * 60 / per_h)
    drawn = Scenario(setup=setup, failures_per_h=per_h, replace_s=replace_h * 3600, seed=3)
    formulas, found = compared(job, per_h), replayed(job, drawn, 6)
    for one, other in zip(formulas, found, strict=True):
        assert one.kept_share == pytest.approx(other.kept_share, abs=0.02), one.mode
        assert one.goodput == pytest.approx(other.goodput, abs=0.02), one.mode


@examples(40)
@given(
    replicas=st.integers(2, 64),
    gbit_per_s=st.floats(0.01, 1e4),
    per_h=st.floats(1e-6, 20),
    replace_h=st.floats(0, 2),
    tail=st.floats(0, 1),
)
def test_shares_are_shares_and_failures_never_help(replicas, gbit_per_s, per_h, replace_h, tail):
    job = fleet_job(replicas, gbit_per_s, replace_h=replace_h, tail=tail)
    for one in compared(job, per_h):
        assert 0 <= one.kept_share <= 1
        assert 0 <= one.goodput <= 1 + 1e-9
        again = kept(job, one.mode, 2 * per_h, one.step_s)
        assert again <= one.kept_share + 1e-9


def test_on_a_link_without_limits_and_without_failures_only_the_mode_costs():
    rows = by_mode(compared(fleet_job(gbit_per_s=1e6, worth=1.0), 1e-9))
    assert rows["synchronous"].goodput == pytest.approx(1, abs=1e-3)
    assert rows["local"].goodput == pytest.approx(1, abs=6e-3)  # it saves once an hour
    assert rows["backup"].goodput == pytest.approx(7 / 8, abs=6e-3)
    assert rows["redundant"].goodput == pytest.approx(1 / 1.65, abs=6e-3)


def test_bytes_and_cost():
    rows = by_mode(compared(fleet_job(price_per_h=9.0), 0.1))
    assert rows["synchronous"].bytes_per_step == pytest.approx(2e9 * 1.75)
    assert rows["local"].bytes_per_step == pytest.approx(2e9 * 1.75 / 100)
    assert rows["streaming"].bytes_per_step == pytest.approx(2e9 * 1.75 / 400)
    for one in rows.values():
        assert one.cost_per_step == pytest.approx(72 / one.steps_per_h)
    assert compared(fleet_job(), 0.1)[0].cost_per_step is None


def test_local_updates_pay_below_a_bandwidth_and_above_a_rate():
    for other in ("synchronous", "templates"):
        job = fleet_job(gbit_per_s=300.0)
        below, above = pays_below(job, "local", other, 0.02), pays_above(job, "local", other)
        assert 1e9 < below < 300e9
        assert 0.02 < above < 1e3
        for bits_per_s, pays in ((0.99 * below, True), (1.01 * below, False)):
            here = msgspec.structs.replace(job, bits_per_s=bits_per_s)
            local, synchronous = (row(here, mode, 0.02).goodput for mode in ("local", other))
            assert (local > synchronous) == pays
        for per_h, pays in ((1.01 * above, True), (0.99 * above, False)):
            local, synchronous = (row(job, mode, per_h).goodput for mode in ("local", other))
            assert (local > synchronous) == pays


def test_they_may_pay_always_or_never():
    assert math.isinf(pays_below(fleet_job(worth=1.0), "local", "synchronous", 1.0))
    assert pays_below(fleet_job(worth=0.01), "local", "templates", 0.02) < 1e9
    assert pays_above(fleet_job(gbit_per_s=1.0), "local", "synchronous") == 0
    assert math.isinf(pays_above(fleet_job(worth=1e-6), "local", "templates"))


def test_more_replicas_lose_less_of_a_round():
    few, many = (kept(fleet_job(count), "local", 1.0, 1.0) for count in (4, 64))
    assert few < many


@pytest.mark.skipif(not TRACES.is_dir(), reason="Bamboo's recordings are not here")
def test_on_a_recorded_fleet_nobody_is_better_than_who_is_there():
    trace = read(TRACES / "bamboo" / "g4dn-trace.csv")
    scenario = Scenario(
        setup=JobSetup(machines=trace.machines, horizon_s=trace.length_s), law="trace", trace=trace
    )
    rows = by_mode(replayed(fleet_job(trace.machines), scenario, 1))
    here = before_s = held_s = 0
    for change in trace.changes:
        held_s += here * (change.at_s - before_s)
        here += len(change.came) - len(change.went)
        before_s = change.at_s
    there = held_s / trace.length_s / trace.machines
    assert list(rows) == list(FLEET_MODES)
    for mode in ("synchronous", "local", "redundant", "templates"):
        assert rows[mode].kept_share <= there + 1e-6
    assert rows["local"].kept_share > 0.95 * there
    assert rows["synchronous"].kept_share < rows["templates"].kept_share < rows["local"].kept_share
