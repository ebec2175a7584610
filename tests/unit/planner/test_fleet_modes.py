"""The modes of a fleet: closed forms beside the simulator, and when local updates pay."""

import math
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.planner.breakeven import AheadSpan
from outlast.planner.fleet_modes import (
    FLEET_MODES,
    FleetJob,
    compared,
    even_worth,
    kept,
    pays_at_links,
    pays_at_rates,
    replayed,
    row,
    save_every_h,
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


THIN = {"parameters": 7e10, "layers": 80, "step_s": 10.0}  # at 1 Gbit/s a step takes 33 minutes
# job, replicas, Gbit/s, failures per hour, hours until a successor: those that the page names
SETTINGS = {
    "an hour until a successor": ({}, 8, 100.0, 1.0, 1.0),
    "a thin link and a long step": (THIN, 8, 1.0, 0.5, None),
    "rounds of 2,000 steps": ({"sync_steps": 2000}, 8, 50.0, 5.0, None),
}
MORE = {
    "at once": ({}, 16, 100.0, 2.0, 0.0),
    "rare": ({}, 8, 100.0, 0.05, 0.0),
    "many": ({}, 24, 100.0, 1.0, 0.5),
    "thin, and an hour": (THIN, 8, 1.0, 0.5, 1.0),
    "every three minutes": ({}, 8, 100.0, 20.0, None),
}


def set_up(name):
    link, replicas, gbit_per_s, per_h, replace_h = (SETTINGS | MORE)[name]
    job = fleet_job(replicas, gbit_per_s, replace_h=replace_h)
    return msgspec.structs.replace(job, link=msgspec.structs.replace(job.link, **link)), per_h


@pytest.mark.parametrize("name", [*SETTINGS, *(MORE if ALL else [])])
def test_the_closed_forms_are_what_the_simulator_finds(name):
    job, per_h = set_up(name)
    setup = JobSetup(machines=job.replicas, horizon_s=3600 * 100 / per_h)
    drawn = Scenario(setup=setup, failures_per_h=per_h, replace_s=job.away_h * 3600, seed=3)
    formulas, found = compared(job, per_h), replayed(job, drawn, 8)
    for one, other in zip(formulas, found, strict=True):
        assert one.kept_share == pytest.approx(other.kept_share, abs=0.02), one.mode
        assert one.goodput == pytest.approx(other.goodput, abs=0.02), one.mode


def test_saves_are_whole_steps_apart():
    job, per_h = set_up("a thin link and a long step")
    rows = by_mode(compared(job, per_h))
    for mode in FLEET_MODES:
        step_s = rows[mode].step_s
        steps = save_every_h(job, mode, per_h, step_s) * 3600 / step_s
        assert steps == pytest.approx(round(steps))
        assert steps > 0.99
    # Ten minutes would be the best, were there a moment to save at; a step takes 33.
    assert rows["synchronous"].kept_share < 0.86
    assert rows["backup"].kept_share > 0.99  # nothing is made again where nobody is waited for


def test_a_successor_does_not_come_for_nothing_unless_somebody_says_so():
    given = fleet_job()
    assert given.away_h * 3600 == pytest.approx(150)
    at_once = fleet_job(replace_h=0.0)
    for mode in ("local", "redundant", "templates"):
        assert kept(given, mode, 1.0, 1.0) < kept(at_once, mode, 1.0, 1.0)
    # A synchronous job stands still until then in any case, and does not stop again.
    assert kept(given, "synchronous", 1.0, 1.0) == kept(at_once, "synchronous", 1.0, 1.0)
    late = fleet_job(replace_h=151 / 3600)
    assert kept(late, "synchronous", 1.0, 1.0) < 0.98 * kept(given, "synchronous", 1.0, 1.0)


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
    rows = by_mode(compared(fleet_job(price_per_h=9.0, replace_h=0.0), 0.1))
    assert rows["synchronous"].bytes_per_step == pytest.approx(2e9 * 1.75)
    assert rows["local"].bytes_per_step == pytest.approx(2e9 * 1.75 / 100)
    assert rows["streaming"].bytes_per_step == pytest.approx(2e9 * 1.75 / 400)
    for one in rows.values():
        assert one.cost_per_step == pytest.approx(72 / one.steps_per_h)
    assert compared(fleet_job(), 0.1)[0].cost_per_step is None


def is_ahead(job, other, per_h):
    local, theirs = (row(job, mode, per_h).goodput for mode in ("local", other))
    return local > theirs


def test_local_updates_pay_below_a_bandwidth_and_above_a_rate():
    for other in ("synchronous", "templates"):
        job = fleet_job(gbit_per_s=300.0)
        (links,), (rates,) = (
            pays_at_links(job, "local", other, 0.02),
            pays_at_rates(job, "local", other, 0.02),
        )
        assert 1e9 < links.high < 300e9
        assert 0.02 < rates.low < 1e3
        assert (links.low, rates.high) == (0, math.inf)
        for bits_per_s, pays in ((0.999 * links.high, True), (1.001 * links.high, False)):
            here = msgspec.structs.replace(job, bits_per_s=bits_per_s)
            assert is_ahead(here, other, 0.02) == pays
        for per_h, pays in ((1.001 * rates.low, True), (0.999 * rates.low, False)):
            assert is_ahead(job, other, per_h) == pays


def test_with_long_rounds_they_pay_while_losses_are_rare():
    job, per_h = set_up("rounds of 2,000 steps")
    rare, many = pays_at_rates(job, "local", "templates", per_h)
    assert rare.low == 0
    assert is_ahead(job, "templates", 0.99 * rare.high)
    assert not is_ahead(job, "templates", 1.01 * rare.high)
    assert not is_ahead(job, "templates", per_h)
    assert many.low > 50 * per_h


@examples(30)
@given(
    sync_steps=st.integers(1, 3000),
    gbit_per_s=st.floats(0.001, 1e4),
    per_h=st.floats(1e-6, 1e3),
    replicas=st.integers(2, 64),
    replace_h=st.none() | st.floats(0, 2),
    latency_s=st.floats(0, 2),
    worth=st.floats(0.5, 1),
    other=st.sampled_from(["synchronous", "templates"]),
)
def test_where_they_pay_is_where_they_are_ahead(
    sync_steps, gbit_per_s, per_h, replicas, replace_h, latency_s, worth, other
):
    job = fleet_job(replicas, gbit_per_s, replace_h=replace_h, worth=worth)
    link = msgspec.structs.replace(job.link, sync_steps=sync_steps, latency_s=latency_s)
    job = msgspec.structs.replace(job, link=link)
    pays = is_ahead(job, other, per_h)
    for found, here in (
        (pays_at_links(job, "local", other, per_h), job.bits_per_s),
        (pays_at_rates(job, "local", other, per_h), per_h),
    ):
        assert any(one.low <= here <= one.high for one in found) == pays
    for one in pays_at_rates(job, "local", other, per_h):
        for edge, sign in ((one.low, 1), (one.high, -1)):
            if 0 < edge < math.inf:
                assert is_ahead(job, other, edge * (1 + 1e-4 * sign))
    assert pays == (even_worth(compared(job, per_h), worth, "local", other) < worth)


def test_they_may_pay_always_or_never():
    assert pays_at_links(fleet_job(worth=1.0), "local", "synchronous", 1.0) == [
        AheadSpan(0, math.inf)
    ]
    # Where nothing fails and steps are nothing but waiting a hundred local ones are as fast as one.
    for worth, pays in ((0.0099, []), (0.0101, [0.0])):
        found = pays_at_links(fleet_job(worth=worth), "local", "templates", 1e-9)
        assert [one.low for one in found] == pays
    thin = fleet_job(gbit_per_s=1.0)
    assert pays_at_rates(thin, "local", "synchronous", 1.0) == [AheadSpan(0, math.inf)]
    assert pays_at_rates(fleet_job(worth=1e-6), "local", "templates", 1.0) == []


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
