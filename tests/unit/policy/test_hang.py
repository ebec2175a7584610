"""How long a worker is given, and how long its steps take, as that is learned."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.policy.hang import (
    STEPS_KEPT,
    Activity,
    HangLimits,
    HangSettings,
    StepTimes,
    collective_timeout_s,
)

# --- limits --------------------------------------------------------------------------------------


CHOSEN = HangSettings(floor_s=1.5, ceiling_s=600.0)


def limits(*gaps, kind=Activity.STEP, chosen=CHOSEN, state=None):
    found = HangLimits(chosen, state)
    for gap in gaps:
        found.saw(kind, gap)
    return found


def test_what_is_not_known_is_given_the_ceiling():
    assert {limits().limit_s(kind) for kind in Activity} == {600.0}
    assert limits(*[0.1] * 4).limit_s(Activity.STEP) == 600.0


def test_a_step_is_given_twice_the_longest_and_what_leaves_time_for_evidence_within_3_s():
    assert limits(*[1.0] * 5).limit_s(Activity.STEP) == pytest.approx(3.4)
    assert limits(*[0.001] * 5).limit_s(Activity.STEP) == 1.5  # the floor


def test_slow_phases_have_limits_of_their_own():
    known = limits(*[4.0] * 3, kind=Activity.EVALUATE)
    assert known.limit_s(Activity.EVALUATE) == pytest.approx(42.0)
    assert known.limit_s(Activity.STEP) == known.limit_s(Activity.SAVE) == 600.0


def test_before_and_after_loops_the_ceiling_stays_and_grows_with_what_was_seen():
    assert limits(*[1.0] * 50, kind=Activity.OUTSIDE).limit_s(Activity.OUTSIDE) == 600.0
    assert limits(400.0, kind=Activity.START).limit_s(Activity.START) == 800.0


def test_the_longest_is_forgotten_slowly():
    known = limits(*[0.1] * 10, 5.0)
    assert known.limit_s(Activity.STEP) == pytest.approx(11.4)
    for _ in range(2000):
        known.saw(Activity.STEP, 0.1)
    assert known.longest_s(Activity.STEP) == pytest.approx(0.1 + 4.9 / 2, rel=0.01)


def test_a_false_alarm_cannot_repeat_with_the_same_limit():
    known = limits(*[0.1] * 10)
    known.too_soon(Activity.STEP, 1.6)
    assert known.limit_s(Activity.STEP) == 3.2
    again = limits(state=known.state())  # another attempt's
    again.too_soon(Activity.STEP, again.limit_s(Activity.STEP))
    assert again.limit_s(Activity.STEP) == 6.4


def test_one_that_comes_again_in_the_same_step_goes_to_the_ceiling():
    known = limits(*[0.1] * 10)
    known.too_soon(Activity.STEP, 1.6, again=True)
    assert known.limit_s(Activity.STEP) == 600.0
    assert known.limit_s(Activity.SAVE) == 600.0


def test_what_was_set_takes_the_place_of_what_is_learned_but_not_of_starting():
    known = limits(*[100.0] * 9, chosen=HangSettings(fixed_s=30.0))
    assert known.limit_s(Activity.STEP) == known.limit_s(Activity.SAVE) == 30.0
    assert known.limit_s(Activity.START) == 600.0


@given(st.lists(st.floats(0, 1e4), min_size=5, max_size=60))
def test_a_gap_like_one_that_was_just_seen_is_never_a_hang(gaps):
    known = limits(*gaps)
    assert known.limit_s(Activity.STEP) > gaps[-1]
    assert known.longest_s(Activity.STEP) <= max(gaps)
    assert collective_timeout_s(known) > max(known.limit_s(kind) for kind in Activity)


@given(st.dictionaries(st.sampled_from([kind.value for kind in Activity]), st.floats(0, 1e4)))
def test_what_was_learned_survives_as_numbers(found):
    known = HangLimits(CHOSEN)
    for name, gap in found.items():
        for _ in range(9):
            known.saw(Activity(name), gap)
    again = HangLimits(CHOSEN, known.state())
    assert [again.limit_s(kind) for kind in Activity] == [known.limit_s(kind) for kind in Activity]
    assert (
        HangLimits(CHOSEN, {"step": [1.0], "nonsense": [1.0, 2.0, 3.0]}).limit_s(Activity.STEP)
        == 600
    )


# --- steps ---------------------------------------------------------------------------------------


def seen(*pairs):
    steps = StepTimes()
    for step, now_s in pairs:
        steps.seen(step, now_s)
    return steps


def test_nothing_is_known_before_a_step_is_complete():
    assert StepTimes().longest_s(0.0) is None
    assert seen((5, 0.0), (5, 100.0)).longest_s(100.0) is None


def test_the_longest_counts_and_so_does_the_one_in_progress():
    steps = seen((0, 0.0), (1, 1.0), (2, 9.0), (3, 10.0))
    assert steps.longest_s(10.5) == 8.0
    assert steps.longest_s(30.0) == 10.0


def test_steps_that_went_by_unseen_took_no_longer():
    assert seen((0, 0.0), (50, 0.2), (100, 0.4)).longest_s(0.4) == 0.2


def test_a_long_step_is_forgotten_at_last():
    steps = seen((0, 0.0), (1, 60.0), *((step, 60.0 + step) for step in range(2, STEPS_KEPT + 1)))
    assert steps.longest_s(60.0 + STEPS_KEPT) == 60.0
    steps.seen(STEPS_KEPT + 1, 61.0 + STEPS_KEPT)
    assert steps.longest_s(61.0 + STEPS_KEPT) == 2.0


def test_another_attempt_makes_some_steps_again_and_remembers_the_rest():
    steps = seen((0, 0.0), (1, 30.0), (2, 31.0), (3, 90.0))
    steps.begin()
    steps.seen(1, 200.0)
    assert steps.longest_s(200.0) is None
    steps.seen(2, 201.0)
    assert steps.longest_s(201.0) == 59.0
