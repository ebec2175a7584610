"""Losses that go wrong are seen at their first step, and healthy ones never."""

import math
import random

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from outlast.policy.retention import removable
from outlast.policy.rollbacks import (
    Batches,
    Decision,
    LossJudge,
    LossRules,
    Rollback,
    Series,
    Sign,
    StepValue,
    decide,
    is_left_out,
    is_undone,
)
from thorough import ALL

STEPS = 3000
SEEDS = range(20 if ALL else 4)


def see(judge, step, value, what="loss"):
    return judge.see(step, {what: StepValue(value=value, worst=(0,))})


def signs(losses, rules=LossRules(), what="loss"):  # noqa: B008 - frozen
    judge = LossJudge(rules, 0)
    found = [see(judge, step, loss, what) for step, loss in enumerate(losses, 1)]
    return [sign for sign in found if sign is not None]


def student(rng, freedom):
    """Noise with heavy tails: Student's t."""
    return rng.gauss(0, 1) / math.sqrt(rng.gammavariate(freedom / 2, 2) / freedom)


def curve(rng, step, noise):
    """A loss that falls as losses do: from 11, after a warm-up, as a power of the step."""
    level = 1.8 + 9.2 * (1 + step / 40) ** -0.45
    if step > 2000:  # the learning rate drops
        level -= 0.15
    return max(level * (1 + noise(rng)), 1e-3)


NOISES = {
    "normal, 2 %": lambda rng: 0.02 * rng.gauss(0, 1),
    "normal, 15 %": lambda rng: 0.15 * rng.gauss(0, 1),
    "heavy tails, 3 %": lambda rng: 0.03 * student(rng, 4),
    "heavy tails, 10 %": lambda rng: 0.10 * student(rng, 5),
    "skewed, 40 %": lambda rng: math.exp(0.4 * rng.gauss(0, 1)) - 1,
}


@pytest.mark.parametrize("noise", NOISES)
def test_no_false_alarm_on_healthy_curves(noise):
    alarms = {}
    for seed in SEEDS:
        rng = random.Random(seed)
        losses = [curve(rng, step, NOISES[noise]) for step in range(STEPS)]
        found = signs(losses)
        if found:
            alarms[seed] = found
    assert not alarms


def test_no_false_alarm_on_norms_of_gradients():
    for seed in SEEDS:
        rng = random.Random(seed)
        norms = [
            (0.3 + 5 * math.exp(-step / 60)) * math.exp(0.5 * rng.gauss(0, 1))
            for step in range(STEPS)
        ]
        assert not signs(norms, what="grad_norm"), seed


def test_losses_near_zero_and_below_it_may_move():
    rng = random.Random(1)
    assert not signs([rng.expovariate(1) * 1e-4 for _ in range(STEPS)])
    assert not signs([-3 + rng.gauss(0, 0.5) for _ in range(STEPS)])
    assert not signs([0.0] * 500 + [1e-9] * 500)


@pytest.mark.parametrize("noise", ["normal, 2 %", "heavy tails, 3 %"])
@pytest.mark.parametrize("at", [30, 400, 2500])
def test_a_spike_of_ten_is_seen_at_its_step(noise, at):
    for seed in SEEDS:
        rng = random.Random(seed)
        losses = [curve(rng, step, NOISES[noise]) for step in range(at)]
        (sign,) = signs([*losses, losses[-1] * 10, *losses[-20:]])
        assert (sign.first, sign.step, sign.kind) == (at + 1, at + 1, "spike")
        assert sign.limit < sign.value


@pytest.mark.parametrize(
    ("value", "kind"), [(math.nan, "nan"), (math.inf, "infinity"), (-math.inf, "infinity")]
)
@pytest.mark.parametrize("at", [0, 5, 200])
def test_no_number_is_wrong_from_the_first_step_on(value, kind, at):
    (sign,) = signs([2.0] * at + [value, value, value])
    assert (sign.first, sign.kind) == (at + 1, kind)


def test_what_stays_is_the_new_level_and_is_said_once():
    rules = LossRules(window=50)
    found = signs([2 + 0.01 * (i % 3) for i in range(200)] + [9.0] * 400 + [80.0], rules)
    assert [(sign.step, sign.kind) for sign in found] == [(201, "spike"), (601, "spike")]


def test_a_loss_that_is_logged_now_and_then_may_have_gone_wrong_since():
    judge = LossJudge(LossRules(), 100)
    for step in range(110, 400, 10):
        assert see(judge, step, 2.0) is None
        assert judge.see(step + 1, {}) is None
    sign = see(judge, 400, math.nan)
    assert (sign.first, sign.step) == (391, 400)
    decision = decide(
        LossRules(action="rollback"), sign, commits=[350, 395], healthy=[], rollbacks=[]
    )
    assert decision == Decision(action="rollback", step=350, num_batches=10)


def test_the_loss_is_named_before_what_follows_from_it():
    nan = StepValue(value=math.nan, worst=(1,))
    assert LossJudge(LossRules(), 0).see(1, {"grad_norm": nan, "loss": nan}).what == "loss"
    one = LossJudge(LossRules(), 0)
    one.see(1, {"loss": StepValue(value=1.0)})
    assert one.see(2, {"grad_norm": nan, "loss": StepValue(value=1.0)}).what == "grad_norm"


def test_healthy_once_so_many_steps_have_passed():
    judge = LossJudge(LossRules(settle=3), 0)
    judge.committed(4)
    found = {}
    for step in range(1, 12):
        see(judge, step, 1.0)
        for one in judge.healthy():
            found[one] = step
    assert found == {4: 7}
    see(judge, 12, math.nan)
    judge.committed(8)  # late
    judge.committed(9)
    assert judge.healthy() == [8], "the steps until 11 were all right"
    judge.committed(10)
    judge.committed(12)
    assert judge.healthy() == []
    for step in range(13, 17):
        see(judge, step, 1.0)
    assert judge.healthy() == [12], "after it there was no sign"
    for step in range(17, 30):
        see(judge, step, 1.0)
    assert judge.healthy() == [], "what went wrong behind 9 and 10 stays so"


def sign_at(first):
    return Sign(first=first, step=first, what="loss", kind="nan", value=math.nan)


def back(step, first, attempt=1, num=1):
    batches = Batches(loop=1, first=first, last=first + num - 1) if num else None
    return Rollback(attempt=attempt, step=step, first=first, batches=batches)


ROLLS = LossRules(action="rollback", rollbacks=2, stretch=100)


@pytest.mark.parametrize(
    ("commits", "healthy", "step"),
    [([10, 20, 30], [10, 20], 20), ([10, 20, 30], [], 20), ([30], [], 0), ([], [], 0)],
)
def test_where_it_goes_back_to(commits, healthy, step):
    found = decide(ROLLS, sign_at(25), commits=commits, healthy=healthy, rollbacks=[])
    assert found == Decision(action="rollback", step=step, num_batches=1)
    stop = LossRules(action="stop")
    found = decide(stop, sign_at(25), commits=commits, healthy=healthy, rollbacks=[])
    assert found == Decision(action="stop", step=step)


def test_no_rollback_is_allowed():
    none = msgspec.structs.replace(ROLLS, rollbacks=0)
    found = decide(none, sign_at(25), commits=[10], healthy=[10], rollbacks=[])
    assert (found.action, found.why) == ("stop", "health.rollbacks allows none")


def test_twice_as_many_each_time_and_then_it_gives_up():
    known = {"commits": [10], "healthy": [10]}
    rollbacks = [back(10, 25)]
    found = decide(ROLLS, sign_at(25), **known, rollbacks=rollbacks)
    assert (found.action, found.num_batches) == ("rollback", 2)
    rollbacks.append(back(10, 25, 2, 2))
    found = decide(ROLLS, sign_at(25), **known, rollbacks=rollbacks)
    assert (found.action, found.step) == ("stop", 10)
    assert found.why == "2 rollbacks within 100 steps did not help"
    assert decide(ROLLS, sign_at(125), **known, rollbacks=rollbacks).num_batches == 1


def test_a_healthy_checkpoint_stays_the_target_where_its_next_step_goes_wrong():
    """The state has good steps behind it: a GPU that gives NaN for ever is not its fault."""
    known = {"commits": [10, 20], "healthy": [10, 20]}
    rollbacks = [back(20, 25)]
    assert decide(ROLLS, sign_at(21), **known, rollbacks=rollbacks).step == 20
    rollbacks.append(back(20, 21, 2))
    found = decide(ROLLS, sign_at(21), **known, rollbacks=rollbacks)
    assert (found.action, found.step) == ("stop", 20)


def test_one_that_was_not_seen_to_be_healthy_is_passed_over_while_there_is_another():
    rollbacks = [back(20, 25)]
    found = decide(ROLLS, sign_at(21), commits=[10, 20], healthy=[], rollbacks=rollbacks)
    assert found.step == 10
    found = decide(ROLLS, sign_at(21), commits=[20], healthy=[], rollbacks=rollbacks)
    assert found.step == 20, "rather than anew from the start"


@pytest.mark.parametrize(
    ("there", "step"),
    [({20, 40}, 20), ({10, 20, 30}, 30), ({12, 40}, 12), ({13}, 30), (set(), 30), (None, 30)],
    ids=str,
)
def test_what_was_removed_is_not_gone_back_to(there, step):
    known = {"commits": [10, 12, 20, 30, 40], "healthy": [10, 20, 30]}
    assert decide(ROLLS, sign_at(35), **known, rollbacks=[], there=there).step == step


@pytest.mark.parametrize("keep", [1, 3, 5])
@pytest.mark.parametrize("every", [5, 20, 100])
def test_a_machine_that_gives_nan_from_some_moment_on_costs_no_checkpoint(keep, every):
    """Real decisions and retention: what stands at the end is there, and is a healthy one."""
    rules, broken_at = LossRules(action="rollback"), 905
    disk, commits, healthy, rollbacks, step = {}, [], [], [], 0
    for attempt in range(1, 9):
        judge = LossJudge(rules, step)
        for one in commits:
            judge.committed(one)
        sign = None
        while sign is None:
            step += 1
            is_broken = attempt > 1 or step >= broken_at
            sign = see(judge, step, math.nan if is_broken else 2.0)
            healthy += judge.healthy()
            if sign is None and step % every == 0:
                disk[step] = attempt
                commits.append(step)
                judge.committed(step)
                invalid = {at for at, by in disk.items() if is_undone(rollbacks, by, at)}
                for old in removable(list(disk), [], keep=keep, invalid=invalid, healthy=healthy):
                    del disk[old]
        there = {at for at, by in disk.items() if not is_undone(rollbacks, by, at)}
        found = decide(
            rules, sign, commits=commits, healthy=healthy, rollbacks=rollbacks, there=there
        )
        assert found.step in there
        if found.action == "stop":
            break
        rollbacks.append(back(found.step, sign.first, attempt))
        commits = [one for one in commits if one <= found.step]
        healthy = [one for one in healthy if one <= found.step]
        step = found.step
    assert found.action == "stop"
    assert found.step in healthy
    assert found.step >= broken_at - 1 - rules.settle - every


def test_the_window_outlives_an_attempt():
    """A bad batch just behind a rollback is seen, and does not become what is usual."""
    rng = random.Random(3)
    losses = [2 + 0.05 * rng.gauss(0, 1) for _ in range(900)]
    before = LossJudge(LossRules(), 0)
    for step, loss in enumerate(losses, 1):
        see(before, step, loss)
    windows = before.windows(890)
    assert windows["loss"] == pytest.approx(losses[790:890], rel=1e-6)
    after = LossJudge(LossRules(), 890, windows)
    assert see(after, 891, 20.0).kind == "spike", "with its first value"
    after = LossJudge(LossRules(), 890, windows)
    signs_of = [see(after, step, 20.0 if step in (906, 950) else 2.0) for step in range(891, 990)]
    assert [sign.step for sign in signs_of if sign] == [906, 950]


def test_what_is_handed_on_is_bounded_and_never_too_little():
    judge = LossJudge(LossRules(window=10_000), 0)
    for step in range(1, 500):
        see(judge, step, 2.0)
    assert len(judge.windows(499)["loss"]) == 100
    assert len(judge.windows(3)["loss"]) == 100, "good values, if later ones"


def test_a_large_norm_is_reported_and_no_more():
    judge = LossJudge(LossRules(settle=3), 0)

    def both(step, loss, norm):
        readings = {"loss": StepValue(value=loss), "grad_norm": StepValue(value=norm)}
        return judge.see(step, readings)

    for step in range(1, 41):
        assert both(step, 2.0, 1.0 + 0.1 * (step % 3)) is None
    judge.committed(40)
    peak = both(41, 2.0, 8.0)
    assert (peak.what, peak.kind) == ("grad_norm", "spike")
    known = {"commits": [30], "healthy": [30], "rollbacks": []}
    for action in ("stop", "rollback"):
        assert decide(LossRules(action=action), peak, **known) == Decision(action="report")
    assert both(42, 2.0, 8.0) is None, "said once"
    sign = both(43, math.nan, 8.0)
    assert (sign.what, sign.first) == ("loss", 43), "a peak does not hide what follows it"
    assert judge.healthy() == []
    judge.committed(39)
    assert judge.healthy() == [39]


def test_norms_with_harmless_peaks_never_stop_a_job():
    rng = random.Random(5)
    judge, acted = LossJudge(LossRules(), 0), []
    for step in range(1, 10_000):
        norm = math.exp(0.3 * rng.gauss(0, 1)) * (rng.uniform(4, 8) if rng.random() < 0.003 else 1)
        sign = see(judge, step, norm, "grad_norm")
        if sign is not None:
            known = {"commits": [], "healthy": [], "rollbacks": []}
            acted.append(decide(LossRules(action="rollback"), sign, **known).action)
    assert set(acted) <= {"report"}
    sign = see(judge, 10_000, math.inf, "grad_norm")
    assert (
        decide(LossRules(action="stop"), sign, commits=[], healthy=[], rollbacks=[]).action
        == "stop"
    )


@given(
    rollbacks=st.lists(
        st.builds(back, st.integers(0, 50), st.integers(1, 60), st.integers(1, 5)), max_size=4
    ),
    sign=st.integers(1, 60),
    commits=st.sets(st.integers(1, 60)),
    healthy=st.sets(st.integers(1, 60)),
)
def test_never_to_the_sign_or_behind_it(rollbacks, sign, commits, healthy):
    found = decide(ROLLS, sign_at(sign), commits=commits, healthy=healthy, rollbacks=rollbacks)
    assert 0 <= found.step < sign
    assert (found.action == "rollback") == (found.num_batches > 0)
    assert found.step == 0 or found.step in commits | healthy


@given(st.integers(1, 9), st.integers(0, 99), st.integers(1, 9), st.integers(0, 99))
def test_what_is_undone(attempt, step, rolled_back, to):
    undone = is_undone([back(to, to + 1, rolled_back)], attempt, step)
    assert undone == (attempt <= rolled_back and step > to)


def test_batches_are_left_out_in_their_loop_alone():
    ranges = [Batches(loop=2, first=3, last=4)]
    assert [n for n in range(9) if is_left_out(ranges, 2, n)] == [3, 4]
    assert not any(is_left_out(ranges, 1, n) for n in range(9))


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=80))
def test_whatever_is_logged_is_taken(values):
    series = Series(10, 20.0)
    for value in values:
        kind = series.see(value)
        assert (kind in ("nan", "infinity")) == (not math.isfinite(value))
