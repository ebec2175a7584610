"""When the next checkpoint is due, on a clock made of numbers."""

import math
from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given

from outlast.policy.cadence import (
    AUTO_FIRST_S,
    AUTO_LEAST,
    AUTO_MAX_S,
    AUTO_MIN_S,
    AUTO_SHAPE,
    Auto,
    EverySeconds,
    EverySteps,
    Hurried,
    bunched,
    cadence,
)
from outlast.policy.hazard import PRIOR, Hazard, Posterior
from outlast.policy.interval import Costs, exact_best_h


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


def test_auto_saves_once_early_and_then_by_the_exact_formula():
    hour = PRIOR.after(1.0, 0)  # without a failure: evidence
    auto = Auto(start_s=0.0, known=Hazard(hour))
    assert auto.interval_s == AUTO_FIRST_S
    assert not auto.due(1, AUTO_FIRST_S - 0.1)
    assert auto.due(1, AUTO_FIRST_S)
    assert auto.due_s(0, 5.0, 1.0) == AUTO_FIRST_S
    auto.taken(1, AUTO_FIRST_S, blocked_s=60.0)
    known = hour.after(AUTO_FIRST_S / 3600, 0)
    best_s = 3600 * exact_best_h(Costs(checkpoint_h=1 / 60), known.mean_per_h)
    assert auto.interval_s == pytest.approx(best_s)
    assert best_s == pytest.approx(math.sqrt(2 * 60 * 3600 / known.mean_per_h), rel=0.03)  # Young
    middle_h = (AUTO_FIRST_S + best_s / 2) / 3600
    wait_s = best_s * bunched(middle_h * known.mean_per_h)
    assert not auto.due(2, AUTO_FIRST_S + wait_s - 0.1)
    assert auto.due(2, AUTO_FIRST_S + wait_s + 0.1)
    assert auto.due_s(2, 0.0, 1.0) == pytest.approx(AUTO_FIRST_S + wait_s)


def test_failures_come_in_bunches_so_the_wait_grows_with_the_time_since_the_last():
    waits = [bunched(up) for up in (1e-3, 0.01, 0.1, 1.0, 10.0)]
    assert waits == sorted(waits)
    assert 0.5 < waits[0] < 0.7
    assert 1.2 < waits[-1] < 1.3
    # Where the hazard is the mean rate it is the interval itself: k g (up g)^(k-1) = 1.
    g = math.gamma(1 + 1 / AUTO_SHAPE)
    assert bunched((AUTO_SHAPE * g) ** (1 / (1 - AUTO_SHAPE)) / g) == pytest.approx(1)


def test_auto_waits_longer_the_longer_nothing_fails_and_begins_anew_after_a_failure():
    auto = Auto(0.0, Hazard(Posterior(num_seen=1000, seen_h=5000.0)))
    now_s, waits_s = 20.0, []
    for step in range(1, 40):
        auto.taken(step, now_s, 60.0)
        waits_s.append(auto.due_s(step, now_s, 1.0) - now_s)
        now_s += waits_s[-1]
    assert waits_s == sorted(waits_s)
    auto.lost(now_s)
    auto.begun(now_s + 100.0)
    # A burst may have begun with it.
    assert 0.5 * waits_s[0] < auto.due_s(40, now_s, 1.0) - (now_s + 100.0) < 1.02 * waits_s[0]


def test_auto_learns_the_mean_cost_and_lets_go_of_a_dear_first_one():
    auto = Auto(start_s=0.0)
    auto.taken(1, 0.0, 10.0)
    dear = auto.interval_s
    for step in range(2, 22):
        auto.taken(step, 0.0, 1.0)
    assert auto.interval_s == pytest.approx(dear / math.sqrt(10), rel=0.17)
    change = auto.changed()
    assert change is not None
    assert change.reason == "checkpoints cost training less"
    assert auto.changed() is None


def test_auto_saves_more_often_when_the_job_fails_and_less_often_when_it_does_not():
    auto = Auto(start_s=0.0)
    auto.taken(1, 20.0, 10.0)
    before = auto.interval_s
    now_s = 20.0
    for _ in range(5):
        now_s += 5400.0
        auto.lost(now_s)
        now_s += 3600.0  # down: no time in which it could fail
        auto.begun(now_s)
    often = auto.interval_s
    # 1 in 10 h has become 6 in 17.5 h, or as many as were no burst's.
    assert before / math.sqrt(6 * 10 / 17.5) * 0.86 < often < before * 0.86
    change = auto.changed()
    assert change is not None
    assert change.reason == "the job fails more often"
    assert 2 < change.num_seen <= 5
    assert change.seen_h <= 7.5
    for _ in range(400):  # three weeks without any
        now_s += 3600.0
        auto.taken(2, now_s, 10.0)
    assert auto.interval_s > before
    change = auto.changed()
    assert change is not None
    assert change.reason == "the job fails less often"


@pytest.mark.parametrize(("times", "changes"), [(1.3, False), (1 / 1.3, False), (1.5, True)])
def test_a_little_is_no_change(times, changes):
    auto = Auto(start_s=0.0)
    auto.taken(1, 0.0, 10.0)
    auto.changed()
    for step in range(2, 50):
        auto.taken(step, 0.0, 10.0 * times)  # the interval goes with the root
    assert (auto.changed() is not None) == changes


def test_what_is_known_from_before_counts():
    known = Hazard(Posterior(num_seen=20, seen_h=10.0))
    auto = Auto(0.0, known)
    auto.taken(1, 0.0, 1.0)
    assert auto.interval_s == pytest.approx(math.sqrt(2 * 1 * 20 * 3600 / 21), rel=0.03)


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


def storm(every_s, times, known=20.0):
    hazard = Hazard(Posterior(num_seen=known, seen_h=20 * known)).after(20.0, failed=True)
    for _ in range(times):
        hazard = hazard.after(every_s / 3600, failed=True)
    return hazard


def waits(auto, count, cost_s):
    now_s, found = 0.0, []
    for step in range(count):
        found.append(auto.due_s(step, now_s, 0.1) - now_s)
        now_s += found[-1]
        auto.taken(step, now_s, cost_s)
    return found


@pytest.mark.parametrize(("every_s", "cost_s"), [(8.0, 0.02), (8.0, 0.2), (60.0, 0.5), (300.0, 1)])
def test_in_a_storm_checkpoints_come_as_close_as_it_asks_for(every_s, cost_s):
    calm_s = Auto(0.0, Hazard(Posterior(num_seen=20.0, seen_h=400.0)), [cost_s]).interval_s
    auto = Auto(0.0, storm(every_s, 20), [cost_s])
    first, *more = waits(auto, 100, cost_s)
    best_s = math.sqrt(2 * cost_s * every_s)
    assert 0.6 * best_s < first < 2.0 * max(best_s, every_s * AUTO_LEAST)
    assert all(one <= other * 1.001 for one, other in pairwise([first, *more]))
    assert more[-1] > 0.7 * calm_s  # it was over, and is forgotten


def test_a_storm_is_told_of_when_it_begins_and_when_it_is_over():
    auto = Auto(0.0, storm(8.0, 20), [0.02])
    begun = auto.changed()
    assert begun is not None
    assert begun.reason == "failures come in a burst"
    assert begun.interval_s < 2.0
    assert begun.burst
    assert auto.storms
    again = Auto(0.0, storm(8.0, 21), [0.02], storms=True)  # the next attempt
    assert again.storms
    assert again.changed() is None
    waits(auto, 100, 0.02)
    over = auto.changed()
    assert over is not None
    assert over.reason == "the burst is over"
    assert over.interval_s >= AUTO_MIN_S
    assert not over.burst
    assert not auto.storms


def test_what_would_hold_in_calm_is_no_news_in_a_storm():
    auto = Auto(0.0, storm(8.0, 20), [0.02])
    calm_s = auto.interval_s
    auto.taken(1, 1.0, 0.2)  # before anybody has asked
    assert auto.interval_s > 1.5 * calm_s
    begun = auto.changed()
    assert begun is not None
    assert begun.reason == "failures come in a burst"
    assert begun.interval_s < 2.0


def test_what_a_checkpoint_cost_before_is_known_and_no_news():
    auto = Auto(0.0, None, [60.0] * 3)
    assert auto.interval_s == pytest.approx(math.sqrt(2 * 60 * 36000), rel=0.03)
    assert auto.changed() is None
    assert auto.due_s(0, 0.0, 1.0) > AUTO_FIRST_S


def test_before_a_checkpoint_was_measured_a_storm_does_not_wait_for_it():
    auto = Auto(0.0, storm(8.0, 3))
    assert auto.due_s(0, 0.0, 1.0) < 3.0


def test_which_one_the_settings_ask_for():
    by_steps = cadence(200, None, 5.0)
    assert isinstance(by_steps, EverySteps)
    assert by_steps.steps == 200
    by_time = cadence(None, 300.0, 5.0)
    assert isinstance(by_time, EverySeconds)
    assert (by_time.due(1, 304.9), by_time.due(1, 305.0)) == (False, True)
    auto = cadence(None, None, 5.0)
    assert isinstance(auto, Auto)
    assert (auto.due(1, 5.1), auto.due(1, 10.0)) == (False, True)
    known = cadence(None, None, 5.0, Hazard(Posterior(num_seen=5, seen_h=1.0)))
    auto.taken(1, 5.0, 1.0)
    known.taken(1, 5.0, 1.0)
    assert known.due_s(1, 5.0, 1.0) < auto.due_s(1, 5.0, 1.0)


def test_a_new_job_may_begin_in_a_burst_and_soon_is_calm():
    auto, now_s, moments = Auto(0.0, costs_s=[0.02]), 0.0, []
    while now_s < 600.0:
        now_s = auto.due_s(0, now_s, 0.1)
        auto.taken(0, now_s, 0.02)
        moments.append(now_s)
    assert moments[0] < 5.0
    gaps = [b - a for a, b in pairwise(moments)]
    assert gaps == sorted(gaps)
    assert gaps[0] < 5.0
    assert all(gap <= max(0.2 * at_s, 2.0) * 1.01 for at_s, gap in zip(moments, gaps, strict=False))
    assert gaps[-1] > 25.0
    assert not auto.storms, "nothing has failed"


@pytest.mark.parametrize("cost_s", [0.005, 0.1, 0.5, 5.0, 20.0])
def test_while_nothing_is_known_saving_takes_a_hundredth_of_the_time(cost_s):
    """But for the first one, whose cost nobody knows; then it is what loses least."""

    def spent_s(hours):
        auto, now_s, num = Auto(0.0, costs_s=[cost_s]), 0.0, 0
        while (now_s := auto.due_s(0, now_s, 0.1) + cost_s) < 3600 * hours:
            auto.taken(0, now_s, cost_s)
            num += 1
        return num * cost_s

    assert spent_s(1.0) <= 0.01 * 3600
    best_s = 3600 * exact_best_h(Costs(checkpoint_h=cost_s / 3600), 0.3 / 13)
    assert spent_s(24.0) > 0.6 * 24 * 3600 / max(best_s, AUTO_MIN_S) * cost_s


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


def test_when_each_will_be_due():
    assert EverySteps(5).due_s(7, 100.0, 2.0) == 106.0
    assert EverySteps(5).due_s(10, 100.0, 2.0) == 110.0
    every = EverySeconds(10.0, start_s=100.0)
    assert every.due_s(3, 104.0, 2.0) == 110.0
    every.begun(120.0)
    assert every.due_s(3, 121.0, 2.0) == 130.0
    hurried = Hurried(EverySeconds(10.0, start_s=0.0))
    assert hurried.due_s(1, 3.0, 1.0) == 3.0
    hurried.taken(1, 3.0, blocked_s=0.75)  # 30 s
    assert hurried.due_s(1, 3.0, 1.0) == 13.0
    hurried.lost(20.0)
    hurried.begun(21.0)
    assert hurried.due_s(1, 21.0, 1.0) == 21.0


def test_hurried_takes_what_the_other_cadence_takes_too():
    hurried = Hurried(EverySteps(3))
    hurried.taken(2, 0.0, blocked_s=10.0)
    assert hurried.due(3, 0.1)
    assert not hurried.due(4, 0.1)
