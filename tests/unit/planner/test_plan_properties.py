"""What holds whatever the numbers are, and special functions against another implementation."""

import itertools
import math
import random

import mpmath
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from outlast.planner import deadline, formulas, intervals
from outlast.policy import hazard, interval
from outlast.policy.hazard import Posterior
from outlast.policy.interval import Costs

rates_per_h = st.floats(1e-5, 20)
short_h = st.floats(1e-5, 0.5)
shares = st.floats(0, 0.99)
CHECKED = {"linear at Young", "linear at its optimum", "exact"}


@st.composite
def all_costs(draw):
    return Costs(
        checkpoint_h=draw(short_h),
        restore_h=draw(short_h),
        detect_h=draw(short_h),
        lag_h=draw(short_h),
        flush_probability=draw(shares),
        flush_h=draw(st.floats(0, 0.1)),
    )


def break_evens(costs, spot_price):
    found = intervals.offers(costs, 1.0, spot_price=spot_price, on_demand_price=1.0)
    return {o.model: o.break_even_failures_per_h for o in found if o.model in CHECKED}


def never_lower(before, after):
    for model, per_h in before.items():
        assert after[model] >= per_h * (1 - 1e-9), model


@given(short_h, short_h, st.floats(0.01, 0.99), st.floats(0.01, 0.99))
def test_more_discount_never_lowers_the_break_even(checkpoint_h, restore_h, price, other):
    costs = Costs(checkpoint_h=checkpoint_h, restore_h=restore_h)
    low, high = sorted((price, other))
    never_lower(break_evens(costs, high), break_evens(costs, low))


@given(short_h, short_h, short_h, st.floats(0.01, 0.99))
def test_cheaper_checkpoints_never_lower_the_break_even(checkpoint_h, other_h, restore_h, price):
    low, high = sorted((checkpoint_h, other_h))
    dear = Costs(checkpoint_h=high, restore_h=restore_h)
    cheap = Costs(checkpoint_h=low, restore_h=restore_h)
    never_lower(break_evens(dear, price), break_evens(cheap, price))


@given(short_h, short_h, shares, shares, st.floats(0.01, 0.99), st.floats(0, 1))
def test_more_flushes_never_lower_the_break_even_while_one_is_shorter_than_what_it_saves(
    checkpoint_h, restore_h, q, other, price, times
):
    # A flush saves half an interval. It pays in all models while it takes a quarter of the interval
    # at the break-even, and in those that choose theirs for the best up to a half of it; a longer
    # one can lower the break-even: test_a_flush_that_costs_more_than_it_saves.
    low, high = sorted((q, other))
    base = {"checkpoint_h": checkpoint_h, "restore_h": restore_h}
    bare = break_evens(Costs(**base, flush_probability=low), price)
    for model in intervals.MODELS:
        if model.name not in CHECKED or not 0 < bare[model.name] < math.inf:
            continue
        # With some cost of a flush the break-even is lower, and the interval there longer.
        fewer = Costs(**base, flush_probability=low)
        interval_h = model.interval_h(fewer, bare[model.name])
        most_h = interval_h / (4 if model.name == "linear at Young" else 2)
        fewer, more = (
            Costs(**base, flush_h=times * most_h, flush_probability=share) for share in (low, high)
        )
        before, after = (break_evens(costs, price)[model.name] for costs in (fewer, more))
        assert after >= before * (1 - 1e-9), model.name


@given(all_costs(), rates_per_h, st.floats(1, 1e5), st.floats(1, 1e5))
def test_hours_in_all_do_not_change_the_price_of_one(costs, per_h, hours, other_h):
    wall = interval.linear_wall(costs, per_h, interval.young_h(costs, per_h))  # may be infinite
    one = intervals.price_of(hours, 0.7, wall) / hours
    assert one == pytest.approx(intervals.price_of(other_h, 0.7, wall) / other_h)


@given(all_costs(), st.floats(1e-5, 5), st.floats(1e-3, 5))
def test_parts_add_up_to_the_formula(costs, per_h, interval_h):
    parts = interval.exact_parts(costs, per_h, interval_h)
    assert parts.wall_h >= 1
    mean = 1 / per_h
    fatal = per_h * (1 - costs.flush_probability)
    begun = (mean + costs.detect_h) * math.exp(costs.restore_h / mean)
    written = per_h * (begun + costs.flush_probability * costs.flush_h)
    segment = math.expm1(fatal * (interval_h + costs.checkpoint_h)) / (fatal * interval_h)
    assert parts.wall_h == pytest.approx(written * math.exp(fatal * costs.lag_h) * segment)


@given(all_costs(), st.floats(1e-4, 5), st.floats(0.2, 5))
def test_no_interval_beats_the_exact_optimum(costs, per_h, times):
    best_h = interval.exact_best_h(costs, per_h)
    best = interval.exact_wall(costs, per_h, best_h)
    assume(math.isfinite(best))
    assert interval.exact_wall(costs, per_h, best_h * times) >= best * (1 - 1e-12)


@given(all_costs(), st.floats(1e-4, 2), st.floats(0.2, 5))
def test_no_interval_beats_the_linear_optimum(costs, per_h, times):
    best_h = interval.linear_best_h(costs, per_h)
    best = interval.linear_wall(costs, per_h, best_h)
    assume(math.isfinite(best))
    assert interval.linear_wall(costs, per_h, best_h * times) >= best * (1 - 1e-12)


@given(st.floats(1e-9, 100), st.floats(1e-6, 1e3))
@example(1e-12, 1.0)
@example(500.0, 1.0)
def test_the_optimum_is_lamberts(checkpoint_h, mtbf_h):
    found = interval.exact_best_h(Costs(checkpoint_h=checkpoint_h), 1 / mtbf_h)
    with mpmath.workdps(60):
        cost = mpmath.mpf(checkpoint_h) * mpmath.mpf(1 / mtbf_h)
        true = (1 + mpmath.lambertw(-mpmath.exp(-1 - cost))) / mpmath.mpf(1 / mtbf_h)
        assert found == pytest.approx(float(true.real), rel=1e-9)


@given(all_costs(), rates_per_h)
def test_models_agree_when_failures_are_rare(costs, per_h):
    rare = per_h * 1e-9
    linear, exact = (
        wall(costs, rare, interval.exact_best_h(costs, rare))
        for wall in (interval.linear_wall, interval.exact_wall)
    )
    assert linear == pytest.approx(exact, rel=1e-6)


@given(all_costs(), st.floats(1e-4, 5))
def test_as_good_as_the_best_within_a_percent(costs, per_h):
    best_h = interval.best_h(costs, per_h)
    low_h, high_h = intervals.nearly_best_h(costs, per_h)
    assert low_h <= best_h <= high_h
    best = interval.exact_wall(costs, per_h, best_h)
    for interval_h in (low_h, high_h):
        assert interval.exact_wall(costs, per_h, interval_h) <= best * 1.01 * (1 + 1e-9)


@given(st.floats(0, 0.999))
def test_probabilities_and_rates_are_inverse(probability):
    assert formulas.to_probability(formulas.from_probability(probability)) == pytest.approx(
        probability
    )


@given(st.floats(0.5, 3000), st.floats(1e-3, 4000))
def test_gamma_against_mpmath(shape, x):
    true = float(mpmath.gammainc(shape, 0, x, regularized=True))
    assert hazard.gamma_cdf(shape, x) == pytest.approx(true, rel=1e-8, abs=1e-11)


@given(st.floats(0.5, 1000), st.floats(0.01, 1e4), st.floats(1e-4, 0.9999))
def test_gamma_quantiles_invert(shape, rate, probability):
    value = hazard.gamma_quantile(shape, rate, probability)
    assert hazard.gamma_cdf(shape, value * rate) == pytest.approx(probability, abs=1e-9)


@given(st.floats(0.01, 2000), st.floats(0, 0.9999))
def test_poisson_quantiles_suffice_and_are_the_least(mean, probability):
    count = hazard.poisson_quantile(probability, mean)
    assert hazard.poisson_cdf(count, mean) >= probability
    assert count == 0 or hazard.poisson_cdf(count - 1, mean) < probability


@given(st.integers(0, 50), st.floats(0.01, 60))
def test_poisson_against_its_sum(count, mean):
    true = math.fsum(
        math.exp(-mean + k * math.log(mean) - math.lgamma(k + 1)) for k in range(count + 1)
    )
    assert hazard.poisson_cdf(count, mean) == pytest.approx(true, rel=1e-9)
    assert hazard.poisson_tail(count, mean) == pytest.approx(1 - true, abs=1e-9)


@given(st.lists(st.tuples(st.floats(0.1, 50), st.integers(0, 5)), max_size=8))
def test_what_was_seen_adds_up_and_fades(watched):
    whole, faded = Posterior(), Posterior()
    for hours, failures in watched:
        whole = whole.after(hours, failures)
        faded = faded.after(hours, failures, memory_h=20.0)
    assert whole.num_seen == sum(failures for _, failures in watched)
    assert whole.seen_h == pytest.approx(sum(hours for hours, _ in watched))
    assert faded.num_seen <= whole.num_seen
    assert faded.seen_h <= min(whole.seen_h, 20.0) * (1 + 1e-12)
    assert faded.after(1e6, 0, memory_h=20.0).shape == pytest.approx(faded.prior_shape)


@pytest.mark.parametrize("pairs", [1, 2, 3, 5])
def test_pairs_against_counting(pairs):
    for lost in range(2 * pairs + 1):
        ways = list(itertools.combinations(range(2 * pairs), lost))
        whole = sum(len({machine // 2 for machine in gone}) == lost for gone in ways)
        found = formulas.recovers_in_pairs(2 * pairs, lost)
        assert found == pytest.approx(whole / len(ways), rel=1e-12)


@given(st.lists(st.tuples(short_h, st.floats(1e-6, 0.1), short_h), min_size=1, max_size=4))
def test_several_tiers_add_up(many):
    costs = [
        interval.TierCosts(checkpoint_h=c, failures_per_h=rate, restore_h=r) for c, rate, r in many
    ]
    chosen = interval.intervals_h(costs)
    each = [intervals.waste([one], [t]) for one, t in zip(costs, chosen, strict=True)]
    assert intervals.waste(costs, chosen) == pytest.approx(sum(each))
    (alone,) = interval.intervals_h(costs[:1])
    single = Costs(checkpoint_h=many[0][0], restore_h=many[0][2])
    assert intervals.wall_per_useful(costs[:1], [alone]) == pytest.approx(
        interval.linear_wall(single, many[0][1], alone)
    )


@given(st.floats(0.01, 10), st.floats(0.1, 100), st.floats(0, 0.999))
def test_more_spares_leave_less_short(per_h, repair_h, sufficing):
    count = formulas.num_spares(per_h, repair_h, sufficing=sufficing)
    assert formulas.shortage(count, per_h, repair_h) <= 1 - sufficing + 1e-9
    assert formulas.restarts_needed(per_h, repair_h, sufficing=sufficing) == count


changeovers_h = st.sampled_from((0.0, 0.05, 0.1, 0.5))


@given(
    st.integers(0, 10_000), st.floats(0.2, 20), st.floats(0.2, 20), st.floats(1.0, 3), changeovers_h
)
@example(0, 1.0, 1.0, 1.5, 0.0)
@example(0, 1.0, 1.0, 1.0, 0.0)
def test_uniform_progress_meets_every_deadline(seed, up_h, down_h, slack, changeover_h):
    task = deadline.Task(
        work_h=20, deadline_h=20 * slack + 2 * changeover_h, changeover_h=changeover_h
    )
    spells = deadline.drawn_spells(up_h, down_h, random.Random(seed).random)
    outcome = deadline.play(task, spells)
    assert outcome.ended_h <= task.deadline_h + 1e-6
    assert outcome.spot_h + outcome.on_demand_h >= 20 - 1e-6


def test_on_demand_alone_when_spot_is_never_to_be_had():
    task = deadline.Task(work_h=10, deadline_h=15, changeover_h=0.1)
    outcome = deadline.play(task, [deadline.Spell(1000.0, False)])
    assert outcome.spot_h == 0
    assert outcome.num_switches >= 1
    assert outcome.ended_h <= 15


def test_spot_alone_takes_as_long_as_it_takes():
    task = deadline.Task(work_h=10, deadline_h=10.5, changeover_h=0.5)
    spells = [deadline.Spell(4.0, True), deadline.Spell(6.0, False), deadline.Spell(100.0, True)]
    outcome = deadline.play(task, spells, policy=deadline.choose_spot)
    assert outcome.ended_h == pytest.approx(4 + 6 + 0.5 + 6.5)
    assert (outcome.on_demand_h, outcome.num_switches) == (0, 2)
    assert deadline.play(task, spells[:2], policy=deadline.choose_spot).ended_h == math.inf


def test_uniform_progress_uses_more_of_the_market_than_greed():
    # Wu et al., table 3: 48 h of work in 60 h, changeover 0.2 h, eight markets: 22.9 h of work on
    # spot against 17.2 h. In theirs: test_deadline_markets; drawn ones have the same order.
    task = deadline.Task(work_h=48, deadline_h=60, changeover_h=0.2)
    worked_h = {deadline.choose: 0.0, deadline.choose_greedily: 0.0}
    for i, share in enumerate((0.05, 0.2, 0.35, 0.45, 0.55, 0.65, 0.75, 0.8)):
        for seed in range(10):
            for policy in worked_h:
                drawn = random.Random(100 * i + seed).random
                spells = deadline.drawn_spells(6 * share, 6 * (1 - share), drawn)
                outcome = deadline.play(task, spells, policy=policy)
                assert outcome.ended_h <= task.deadline_h + 1e-6
                worked_h[policy] += outcome.spot_work_h / 80
    assert worked_h[deadline.choose] > 1.1 * worked_h[deadline.choose_greedily]
