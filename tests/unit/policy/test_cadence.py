"""When the next checkpoint is due, on a clock made of numbers."""

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

from outlast.policy.cadence import (
    ASSUMED_MTBF_S,
    AUTO_FIRST_S,
    AUTO_MAX_S,
    AUTO_MIN_S,
    Auto,
    EverySeconds,
    EverySteps,
    Hurried,
    cadence,
)


def test_steps_are_every_multiple_whatever_the_time():
    every = EverySteps(5)
    assert [step for step in range(1, 16) if every.due(step, 1e9)] == [5, 10, 15]
    every.taken(7, 0.0, 100.0)
    assert every.due(10, 0.0)
    assert all(EverySteps(1).due(step, 0.0) for step in range(10))


def test_seconds_count_from_the_start_and_then_from_the_last():
    every = EverySeconds(10.0, start_s=100.0)
    assert not every.due(1, 109.9)
    assert every.due(1, 110.0)
    assert every.due(2, 115.0)  # it stays due until it is taken
    every.taken(2, 116.0, 3.0)
    assert not every.due(3, 125.9)
    assert every.due(3, 126.0)


def test_auto_saves_once_early_and_then_by_youngs_formula():
    auto = Auto(start_s=0.0, mtbf_s=36000.0)
    assert auto.interval_s == AUTO_FIRST_S
    assert not auto.due(1, AUTO_FIRST_S - 0.1)
    assert auto.due(1, AUTO_FIRST_S)
    auto.taken(1, AUTO_FIRST_S, blocked_s=0.5)
    assert auto.interval_s == pytest.approx(math.sqrt(2 * 0.5 * 36000.0))
    assert not auto.due(2, AUTO_FIRST_S + auto.interval_s - 0.1)
    assert auto.due(2, AUTO_FIRST_S + auto.interval_s)


def test_auto_learns_the_dearest_cost():
    auto = Auto(start_s=0.0)
    auto.taken(1, 0.0, 2.0)
    dear = auto.interval_s
    auto.taken(2, 0.0, 0.001)
    assert auto.interval_s == dear
    auto.taken(3, 0.0, 4.0)
    assert auto.interval_s == pytest.approx(dear * math.sqrt(2))


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=5))
def test_auto_stays_within_its_bounds(costs):
    auto = Auto(start_s=0.0)
    for step, cost in enumerate(costs):
        auto.taken(step, float(step), cost)
        assert AUTO_MIN_S <= auto.interval_s <= AUTO_MAX_S


def test_a_free_checkpoint_is_not_taken_at_every_step():
    auto = Auto(start_s=0.0)
    auto.taken(1, 0.0, 0.0)
    assert auto.interval_s == AUTO_MIN_S


def test_which_one_the_settings_ask_for():
    by_steps = cadence(200, None, 5.0)
    assert isinstance(by_steps, EverySteps)
    assert by_steps.steps == 200
    by_time = cadence(None, 300.0, 5.0)
    assert isinstance(by_time, EverySeconds)
    assert (by_time.due(1, 304.9), by_time.due(1, 305.0)) == (False, True)
    auto = cadence(None, None, 5.0)
    assert isinstance(auto, Auto)
    assert (auto.due(1, 24.9), auto.due(1, 25.0)) == (False, True)
    assert ASSUMED_MTBF_S == 36000.0


def test_hurried_saves_at_once_and_then_as_young_has_it_for_ten_minutes():
    hurried = Hurried(EverySteps(1000))
    assert hurried.due(1, 0.0)
    hurried.taken(1, 0.0, blocked_s=0.002)  # √(2 · 0.002 · 600) = 1.5 s: at least 5
    assert not hurried.due(2, 4.9)
    assert hurried.due(2, 5.0)
    hurried.taken(2, 5.0, blocked_s=0.75)  # 30 s
    assert not hurried.due(3, 34.9)
    assert hurried.due(3, 35.0)
    hurried.taken(3, 35.0, blocked_s=60.0)
    assert not hurried.due(4, 94.9)
    assert hurried.due(4, 95.0)


def test_hurried_takes_what_the_other_cadence_takes_too():
    hurried = Hurried(EverySteps(3))
    hurried.taken(2, 0.0, blocked_s=10.0)
    assert hurried.due(3, 0.1)
    assert not hurried.due(4, 0.1)
