"""How often a job fails just now: against the model simulated, and what bursts do to it."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.policy.hazard import (
    BEGINS,
    CHANGES,
    FASTER,
    KINDS,
    RATES,
    STORM_ENDS,
    Hazard,
    Posterior,
    storms,
)

KNOWN = Posterior(num_seen=20.0, seen_h=400.0)  # one in 20 h
SECOND_H = 1 / 3600


def after(*gaps_h, known=KNOWN):
    hazard = Hazard(calm=known)
    for gap_h in gaps_h:
        hazard = hazard.after(gap_h, failed=True)
    return hazard


def chance_of_calm(hazard):
    return 1 - sum(hazard.bursts)


def filtered(gaps_h, left_h, rate, step_h):
    """The same filter, in small steps of Euler's: states are calm and each rate."""
    weights = [1.0] + [0.0] * len(RATES)
    quick = [rate, *RATES]
    possible = [one > FASTER * rate for one in RATES]
    for number, gap_h in enumerate([*gaps_h, left_h]):
        for _ in range(round(gap_h / step_h)):
            ended = [ends * r * w * step_h for (r, ends), w in zip(KINDS, weights[1:], strict=True)]
            weights = [w * (1 - r * step_h) for w, r in zip(weights, quick, strict=True)]
            weights[0] += sum(ended)
            weights[1:] = [w - one for w, one in zip(weights[1:], ended, strict=True)]
        weights = [w / sum(weights) for w in weights]
        if number < len(gaps_h):
            weights = [w * r for w, r in zip(weights, quick, strict=True)]
            weights = [w / sum(weights) for w in weights]
            own, bursts = weights[0], weights[1:]
            share = (CHANGES * sum(bursts) + BEGINS * own) / sum(possible)
            bursts = [
                (1 - CHANGES) * w + share * one for w, one in zip(bursts, possible, strict=True)
            ]
            weights = [1 - sum(bursts), *bursts]
    return weights


@pytest.mark.parametrize("gaps_s", [[30.0], [30.0, 8.0], [60.0, 20.0, 5.0], [5.0] * 4])
def test_it_is_the_filter_of_the_model(gaps_s):
    hazard = Hazard(calm=Posterior(num_seen=1e9, seen_h=1e9 / 2.0))  # a rate that is known: 2/h
    for gap_s in gaps_s:
        hazard = hazard.after(gap_s * SECOND_H, failed=True)
    hazard = hazard.after(4 * SECOND_H)
    gaps_h = [gap_s * SECOND_H for gap_s in gaps_s]
    calm, *bursts = filtered(gaps_h, 4 * SECOND_H, 2.0, 1e-3 * SECOND_H)
    assert chance_of_calm(hazard) == pytest.approx(calm, rel=0.02, abs=1e-4)
    assert hazard.bursts == pytest.approx(bursts, rel=0.02, abs=1e-4)


@given(
    st.lists(st.tuples(st.floats(1e-5, 50.0), st.booleans()), min_size=1, max_size=12),
    st.floats(0, 100.0),
)
def test_chances_stay_chances_and_time_alone_calms(past, later_h):
    hazard = Hazard()
    for hours, failed in past:
        hazard = hazard.after(hours, failed=failed)
    assert all(one >= 0 for one in hazard.bursts)
    assert -1e-9 <= chance_of_calm(hazard) <= 1 + 1e-9
    later = hazard.after(later_h)
    # But for bursts of before that are slower than calm has become.
    assert later.burst_per_h() <= hazard.burst_per_h() * (1 + 1e-9) + 0.1 * hazard.calm_per_h
    assert later.burst_per_h() == pytest.approx(hazard.burst_per_h(later_h), rel=1e-6, abs=1e-9)
    failures = sum(failed for _, failed in past)
    assert later.calm.num_seen <= failures * (1 + 1e-9)


@given(st.floats(1e-4, 5.0), st.integers(2, 9))
def test_how_often_it_is_asked_changes_next_to_nothing(hours, times):
    whole = parts = after(0.5, 0.01, 0.01)
    whole = whole.after(hours)
    for _ in range(times):
        parts = parts.after(hours / times)
    assert parts.burst_per_h() == pytest.approx(whole.burst_per_h(), rel=0.01, abs=1e-9)
    assert parts.calm_per_h == pytest.approx(whole.calm_per_h, rel=0.01)


def test_a_burst_is_believed_after_two_failures_and_forgotten_in_a_minute():
    one, two = after(30.0), after(30.0, 8 * SECOND_H)
    assert chance_of_calm(one) == pytest.approx(1 - BEGINS, abs=0.01)
    assert chance_of_calm(two) < 0.05
    storm = after(30.0, *[8 * SECOND_H] * 49)
    # Each may be the last one.
    assert 450 / (1 + STORM_ENDS) * 0.7 < storm.burst_per_h() < 450 * 1.3
    quiet = storm.after(90 * SECOND_H)
    assert quiet.burst_per_h() < storm.burst_per_h() / 50  # of slower ones
    assert chance_of_calm(storm.after(3.0)) > 0.9
    assert after(30.0, 8 * SECOND_H).after(24.0).burst_per_h() < 0.01


def test_a_storm_says_next_to_nothing_of_the_weeks_after_it():
    storm = after(30.0, *[8 * SECOND_H] * 49)
    assert storm.calm.num_seen == pytest.approx(after(30.0).calm.num_seen, abs=0.1)
    assert storm.calm_per_h == pytest.approx(after(30.0).calm_per_h, rel=0.02)


def test_failures_that_come_evenly_are_calms():
    chance = random.Random(1)
    hazard = Hazard()
    for _ in range(200):
        hazard = hazard.after(chance.expovariate(1 / 5.0), failed=True)
    kept = hazard.calm.num_seen * 5.0 / hazard.calm.seen_h
    assert 0.75 < kept < 1.1  # of the true rate; what came quickly may have been a burst's
    assert math.isfinite(hazard.burst_per_h())


def test_a_job_that_fails_all_the_time_is_no_burst():
    hazard = Hazard(calm=Posterior(num_seen=1e5, seen_h=10.0))  # quicker than any burst
    for _ in range(5):
        hazard = hazard.after(1e-4, failed=True)
    assert hazard.burst_per_h() == 0.0
    assert chance_of_calm(hazard) == 1.0


def test_days_without_a_failure_after_many_are_no_division_by_zero():
    often = Hazard(calm=Posterior(num_seen=5000.0, seen_h=490.0))  # ten an hour
    later = often.after(400.0)
    assert 0 < later.calm_per_h < often.calm_per_h
    assert later.burst_per_h() == 0.0
    storm = after(0.1, *[8 * SECOND_H] * 9).after(1e5)
    assert 0 < storm.calm_per_h < 1
    assert storm.after(1e5, failed=True).burst_per_h() > 0


def test_storms_are_found_in_a_list_of_gaps():
    calm, quick = [30.0, 12.0], [8 * SECOND_H] * 4
    assert storms([*calm, *quick, 20.0, 25.0, *quick[:2], 30.0]) == [(1, 5), (7, 9)]
    assert storms([*calm, 8 * SECOND_H, 20.0]) == []  # two may be chance
    assert storms(quick) == [(0, 3)]
    assert storms([]) == []
