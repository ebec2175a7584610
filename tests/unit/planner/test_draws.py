"""Laws: drawn as they say, and found again from times of which some were cut off (lifelines)."""

import numpy as np
import pytest

from outlast.errors import ConfigError
from outlast.planner.draws import (
    HOUR_S,
    Exponential,
    HazardByAge,
    Recorded,
    Weibull,
    bathtub,
    fitted_weibull,
    fleet,
    zone_reclaims,
)


def chance(seed=1):
    return np.random.default_rng(seed)


@pytest.mark.parametrize("law", [Exponential(500.0), Weibull(500.0, 0.7), Weibull(500.0, 3.0)])
def test_the_mean_is_what_was_asked_for(law):
    drawn = law.draw(chance(), 200_000)
    assert drawn.mean() == pytest.approx(500.0, abs=4 * drawn.std() / 200_000**0.5)


def test_a_hazard_in_pieces():
    law = HazardByAge([0.0, 10.0, 20.0], [0.1, 0.0, 1.0])
    drawn = law.draw(chance(), 100_000)
    assert (drawn < 10).mean() == pytest.approx(1 - np.exp(-1), abs=0.005)
    assert not ((drawn >= 10) & (drawn < 20)).any()
    assert (drawn[drawn >= 20] - 20).mean() == pytest.approx(1.0, abs=0.02)


def test_the_bathtub_is_that_of_the_recorded_lifetimes():
    hours = bathtub().draw(chance(), 200_000) / HOUR_S
    # shared/traces: mean 8.406 h, median 1.858 h, 24.8 % above 23 h.
    assert hours.mean() == pytest.approx(8.4, abs=0.3)
    assert np.median(hours) == pytest.approx(1.86, abs=0.1)
    assert (hours > 23).mean() == pytest.approx(0.248, abs=0.015)
    assert hours.max() < 27


@pytest.mark.parametrize(
    "law",
    [
        Weibull(500.0, 0.7),
        Weibull(500.0, 3.0),
        bathtub(),
        bathtub(500.0),
        Recorded([3.0, 7.0, 50.0]),
        HazardByAge([0.0, 10.0, 20.0], [0.1, 0.0, 1.0]),
    ],
    ids=["weibull-0.7", "weibull-3", "bathtub", "bathtub-scaled", "recorded", "pieces"],
)
def test_a_fleet_of_any_age_fails_at_the_laws_mean_rate_from_the_start(law):
    drawn = law.draw(chance(), 300_000)
    mean_s = drawn.mean()
    assert getattr(law, "mean_s", mean_s) == pytest.approx(mean_s, rel=0.02)
    # What is left of a lifetime that a moment falls into: E[x²] / 2E[x].
    left = law.rest(chance(2), 300_000)
    assert left.mean() == pytest.approx((drawn**2).mean() / 2 / mean_s, rel=0.02)
    for lasts in (0.2, 1.0):
        at_s, _ = fleet(law, 20_000, lasts * mean_s, chance(3))
        assert len(at_s) == pytest.approx(20_000 * lasts, rel=0.05)


def test_a_bathtub_of_another_mean():
    assert bathtub().mean_s == pytest.approx(8.4 * HOUR_S, rel=0.01)
    assert bathtub(500.0).mean_s == pytest.approx(500.0, rel=1e-9)


def test_recorded_lifetimes_come_again():
    assert set(Recorded([3.0, 7.0]).draw(chance(), 100)) == {3.0, 7.0}


def test_a_fleet_is_the_superposition_of_its_machines():
    at_s, who = fleet(Exponential(1000.0), 50, 10_000.0, chance())
    assert len(at_s) == pytest.approx(500, abs=4 * 500**0.5)
    assert (np.diff(at_s) >= 0).all()
    assert set(who) == set(range(50))
    assert at_s.max() < 10_000


def test_zones_are_reclaimed_each_by_itself():
    found = zone_reclaims(4, 0.05, 1000 * HOUR_S, chance())
    assert len(found) == pytest.approx(200, abs=4 * 200**0.5)
    assert {zone for _, zone in found} == set(range(4))
    assert found == sorted(found)


@pytest.fixture(name="lifelines")
def _lifelines():
    """Imported where it is wanted: all of SciPy comes with it, which takes seconds of a core."""
    import lifelines

    return lifelines


@pytest.mark.parametrize("shape", [0.6, 1.0, 2.5])
def test_lifelines_fits_the_same_weibull_to_censored_times(shape, lifelines):
    times = Weibull(100.0, shape).draw(chance(7), 800)
    limits = chance(8).uniform(20.0, 250.0, 800)
    seen, failed = np.minimum(times, limits), times <= limits
    ours = fitted_weibull(seen, failed)
    theirs = lifelines.WeibullFitter().fit(seen, failed)
    assert ours.shape == pytest.approx(theirs.rho_, rel=1e-4)
    assert ours.scale_s == pytest.approx(theirs.lambda_, rel=1e-4)
    assert ours.failures + ours.censored == 800
    assert ours.censored == int((~failed).sum())
    assert ours.shape == pytest.approx(shape, rel=0.15)


def test_leaving_out_what_was_cut_off_makes_machines_look_worse(lifelines):
    times = Exponential(100.0).draw(chance(9), 500)
    failed = times < 120
    seen = np.minimum(times, 120.0)
    theirs = lifelines.ExponentialFitter().fit(seen, failed)
    ours = fitted_weibull(seen, failed)
    assert ours.shape == pytest.approx(1, abs=0.1)
    assert ours.mean_s == pytest.approx(theirs.lambda_, rel=0.1)
    assert seen[failed].mean() < 0.7 * ours.mean_s


def test_times_that_tell_nothing():
    with pytest.raises(ConfigError, match="nothing failed"):
        fitted_weibull([1.0, 2.0], [False, False])
    with pytest.raises(ConfigError, match="0 s or less"):
        fitted_weibull([0.0, 2.0], [True, True])
