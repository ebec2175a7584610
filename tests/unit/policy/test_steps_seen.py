"""How long steps take, as somebody sees it who looks now and then."""

from outlast.policy.hang import STEPS_KEPT, StepTimes


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
