"""Pipelines whose machines hold their successors' stages."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.planner.redundancy import (
    FleetEvent,
    RedundantJob,
    hourly_fleet,
    simulate_redundant,
)
from thorough import examples

JOB = RedundantJob(
    machines=8, stages=4, step_s={1: 4.0, 2: 2.0}, samples_per_step=10, steps=100, price_per_h=2.0
)


def story(*events):
    """Eight machines at the start, and what is told."""
    here = [FleetEvent(0.0, "add", machine) for machine in range(8)]
    return itertools.chain(here, events)


def test_undisturbed_it_is_steps_and_nothing_else():
    out = simulate_redundant(JOB, story())
    assert out.samples_per_s == pytest.approx(5.0)
    assert (out.losses, out.restarts) == (0, 0)
    assert out.machines == pytest.approx(8)
    assert out.cost_per_h == pytest.approx(16)
    assert out.samples_per_cost == pytest.approx(5 / 16)
    assert out.hours * 3600 == pytest.approx(45 + 30 + 200)


def test_one_loss_slows_the_group_until_it_is_formed_anew():
    # Ready at 75 s. At 76 s one of eight goes: what is left of the step, 1 s, takes 1.5 s; then
    # 2 of 7 are beyond a neighbour's help, so seven form one pipeline within 20 s.
    out = simulate_redundant(JOB, story(FleetEvent(76.0, "remove", 2)))
    assert (out.losses, out.restarts) == (1, 0)
    assert out.hours * 3600 == pytest.approx(77.5 + 20 + 99 * 4)


def test_two_neighbours_lose_a_stage():
    gone = (FleetEvent(76.0, "remove", 2), FleetEvent(76.2, "remove", 1))
    out = simulate_redundant(JOB, story(*gone))
    assert (out.losses, out.restarts) == (2, 1)
    # Nor can one that does two stages take a third.
    third = (FleetEvent(76.0, "remove", 2), FleetEvent(76.2, "remove", 3))
    assert simulate_redundant(JOB, story(*third)).restarts == 1
    apart = (FleetEvent(76.0, "remove", 2), FleetEvent(76.2, "remove", 6))
    assert simulate_redundant(JOB, story(*apart)).restarts == 0


def test_who_stands_by_makes_another_pipeline():
    few = (FleetEvent(0.0, "add", machine) for machine in range(4))
    more = (FleetEvent(100.0, "add", 10 + machine) for machine in range(4))
    out = simulate_redundant(JOB, itertools.chain(few, more))
    # One pipeline from 75 s; the others are ready at 145 s, in the 18th step, which ends at 147 s.
    assert out.hours * 3600 == pytest.approx(147 + 20 + 82 * 2)


@examples(25)
@given(seed=st.integers(0, 10**6), taken=st.floats(0, 1), machines=st.integers(1, 30))
def test_a_fleet_is_in_order_and_never_larger_than_asked_for(seed, taken, machines):
    here, before_s = set(), 0.0
    for at_s, what, machine in hourly_fleet(random.Random(seed), machines, taken, hours=48):
        assert at_s >= before_s
        before_s = at_s
        assert (machine in here) == (what == "remove")
        (here.add if what == "add" else here.remove)(machine)
        assert len(here) <= machines


@examples(25)
@given(seed=st.integers(0, 10**6), taken=st.floats(0, 0.6))
def test_losses_never_help(seed, taken):
    fleet = hourly_fleet(random.Random(seed), JOB.machines, taken)
    out = simulate_redundant(JOB, fleet, horizon_h=20)
    assert 0 <= out.samples_per_s <= 5 + 1e-9
    assert out.restarts <= out.losses
