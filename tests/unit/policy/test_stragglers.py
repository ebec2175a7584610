"""Who holds the others up: simulated jobs, with seeds, and what no job may lead to."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.policy.stragglers import (
    CLUMPED,
    StepReports,
    Straggler,
    Stragglers,
    _medians_of_others,
)
from thorough import ALL, examples

ONSET = 70
SEEDS = range(200 if ALL else 20)
HEALTHY_SEEDS = range(20 if ALL else 1)


class Job:
    """A synchronous job on a virtual clock, with heavy tails and pauses.

    Args:
        seed: of its noise.
        ranks: how many.
        noise: of one rank's step, in parts of it.
        pauses: how often a rank, or all of them, pause for a while.
    """

    step_s = 0.02

    def __init__(self, seed, ranks=4, noise=0.05, pauses=0.01, kinds=None):
        self.random = np.random.default_rng(seed)
        self.ranks, self.noise, self.pauses = ranks, noise, pauses
        self.judge = Stragglers(kinds or [7] * ranks)
        self.step = 0
        self.found: list[Straggler] = []

    def _noisy(self, seconds):
        tails = 1 + 0.6 * self.noise * self.random.standard_t(2.5, self.ranks)
        pauses = self.random.random(self.ranks) < self.pauses
        return seconds * np.clip(tails, 0.5, None) + pauses * self._pause(self.ranks)

    def _pause(self, count=None):
        return self.step_s * self.random.pareto(1.5, count)

    def run(self, steps, slow=None, of="compute", factor=1.0, saving=False):
        """So many steps, in which rank ``slow`` is slow; what was found in them."""
        before = len(self.found)
        for _ in range(steps):
            self.step += 1
            compute, data = self._noisy(0.8 * self.step_s), self._noisy(0.05 * self.step_s)
            if self.random.random() < self.pauses:
                compute = compute + self._pause()
            if slow is not None:
                ({"compute": compute, "loader": data}[of])[slow] += (factor - 1) * 0.8 * self.step_s
            stall = np.full(self.ranks, 1e-6 if saving else 0.0)
            own = compute + data
            self.found += self.judge.see(self.step, compute, own.max() - own, data, stall)
        return self.found[before:]


def named(found):
    return [(one.rank, one.cause) for one in found if not one.over or one.cause == "burst"]


@pytest.mark.parametrize("ranks", [2, 4, 16] if ALL else [4])
@pytest.mark.parametrize("factor", [1.2, 1.5, 4.0], ids=str)
@pytest.mark.parametrize("of", ["compute", "loader"])
def test_a_slow_rank_is_named_within_thirty_steps_and_nobody_else(of, factor, ranks):
    for seed in SEEDS:
        job = Job(seed, ranks)
        slow = seed % ranks
        assert job.run(ONSET) == []
        found = job.run(60, slow, of, factor)
        assert {one.rank for one in found} == {slow}, seed
        lasting = [one for one in found if one.cause == of]
        assert lasting, seed
        assert abs(lasting[0].since_step - ONSET) <= 8, seed
        assert found[0].step - ONSET <= 30, seed


@pytest.mark.parametrize("factor", [1.5, 4.0], ids=str)
@pytest.mark.parametrize("of", ["compute", "loader"])
def test_a_burst_is_named_as_a_burst_and_once(of, factor):
    for seed in SEEDS:
        job = Job(seed)
        slow = seed % job.ranks
        job.run(ONSET)
        found = job.run(12, slow, of, factor) + job.run(120)
        assert named(found) == [(slow, "burst")], seed
        (burst,) = found
        assert burst.step - ONSET <= 30
        assert burst.of == of


def test_a_weak_burst_is_named_where_the_noise_is_weak():
    for seed in SEEDS:
        job = Job(seed, noise=0.03)
        job.run(ONSET)
        found = job.run(12, 1, "compute", 1.2) + job.run(60)
        assert named(found) == [(1, "burst")], seed


@pytest.mark.parametrize("noise", [0.05, 0.2], ids=str)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_healthy_job_blames_nobody_in_two_thousand_steps(ranks, noise):
    for seed in HEALTHY_SEEDS:
        job = Job(seed, ranks, noise)
        for _ in range(20):
            assert job.run(95) == [], seed
            job.run(5, saving=True)


def test_one_long_pause_is_nobodys_fault():
    job = Job(0, pauses=0.0)
    job.run(ONSET)
    assert job.run(1, 2, "compute", 5000.0) + job.run(60) == []


def test_recovery_is_said_once_and_later_slowness_again():
    job = Job(3)
    job.run(ONSET)
    assert named(job.run(60, 1, "compute", 1.5)) == [(1, "compute")]
    assert set(job.judge.named) == {1}
    (over,) = job.run(60)
    assert (over.rank, over.over, over.cause) == (1, True, "compute")
    assert not job.judge.named
    assert named(job.run(60, 1, "loader", 1.5)) == [(1, "loader")]


def test_two_slow_ranks_are_both_named():
    job = Job(5, ranks=8)
    job.run(ONSET)
    job.run(1)
    for _ in range(60):
        job.step += 1
        own = np.full(8, 0.02) * (1 + 0.02 * job.random.standard_normal(8))
        own[[2, 5]] *= 1.5
        zero = np.zeros(8)
        job.found += job.judge.see(job.step, own, own.max() - own, zero, zero)
    assert {rank for rank, _ in named(job.found)} == {2, 5}


def test_a_slow_machine_is_half_of_the_ranks():
    job = Job(6, ranks=16)
    for _ in range(100):
        job.step += 1
        own = np.full(16, 0.02) * (1 + 0.02 * job.random.standard_normal(16))
        own[8:] *= 1.5
        zero = np.zeros(16)
        job.found += job.judge.see(job.step, own, own.max() - own, zero, zero)
    assert {rank for rank, _ in named(job.found)} == set(range(8, 16))


def test_a_loader_that_delivers_in_clumps_is_found_within_its_window():
    job = Job(7, pauses=0.0)
    job.run(ONSET)
    found = []
    for _ in range(2 * CLUMPED // 4):
        found += job.run(3) + job.run(1, 3, "loader", 3.0)
    assert named(found) == [(3, "loader")]


def test_whoever_takes_long_and_is_not_waited_for_is_not_named():
    judge = Stragglers([0] * 4)
    own = np.array([0.02, 0.02, 0.03, 0.02])
    zero = np.zeros(4)
    assert [judge.see(step, own, zero, zero, zero) for step in range(200)] == [[]] * 200


def test_steps_with_saves_are_left_aside_unless_all_are_such():
    job = Job(8)
    job.run(ONSET)
    assert job.run(5, 1, "compute", 4.0, saving=True) + job.run(40) == []
    found = job.run(80, 1, "compute", 1.5, saving=True)
    assert named(found) == [(1, "compute")]
    assert found[0].saving


def test_stages_of_a_pipeline_are_compared_with_their_own_kind():
    judge = Stragglers([1, 1, 1, 2, 2, 2, 3])
    compute = np.array([0.02, 0.02, 0.02, 0.04, 0.04, 0.06, 0.09])
    zero = np.zeros(7)
    found = []
    for step in range(100):
        noisy = compute * (1 + 0.01 * np.sin(step + np.arange(7)))
        found += judge.see(step, noisy, 0.1 - noisy, zero, zero)
    assert named(found) == [(5, "compute")]
    assert found[0].factor == pytest.approx(1.5, rel=0.05)


def test_figures_are_those_of_the_slow_steps():
    judge = Stragglers([0] * 4)
    found = []
    zero = np.zeros(4)
    for step in range(100):
        own = np.full(4, 0.02) * (1 + 0.01 * np.sin(step * np.arange(1, 5)))
        own[2] *= 1.5 if step >= 60 else 1.0
        found += judge.see(step, own, own.max() - own, zero, zero)
    (one,) = found
    assert (one.rank, one.since_step) == (2, 60)
    assert one.factor == pytest.approx(1.5, rel=0.02)
    assert one.own_s == pytest.approx(0.03, rel=0.02)
    assert one.lost_s == pytest.approx(0.01, rel=0.05)


@examples(60)
@given(
    st.integers(2, 9).flatmap(
        lambda ranks: st.lists(
            st.lists(st.tuples(*[st.floats(0, 1e6, width=32)] * 4), min_size=ranks, max_size=ranks),
            min_size=1,
            max_size=80,
        )
    )
)
def test_whatever_ranks_say_nothing_breaks_and_nobody_is_named_twice(rows):
    judge = Stragglers([0] * len(rows[0]))
    slow = set()
    for step, row in enumerate(rows * 3):
        compute, wait, data, stall = np.array(row).T
        for one in judge.see(step, compute, wait, data, stall):
            assert 0 <= one.rank < len(row)
            assert one.since_step <= one.step == step
            assert np.isfinite([one.factor, one.own_s, one.others_s, one.lost_s]).all()
            if one.cause != "burst":
                assert (one.rank in slow) == one.over
                slow ^= {one.rank}
    assert set(judge.named) == slow


@given(st.lists(st.floats(0, 1e3), min_size=2, max_size=12))
def test_the_median_of_the_others(values):
    found = _medians_of_others(np.array([values, values[::-1]]))
    for place in range(len(values)):
        others = values[:place] + values[place + 1 :]
        assert found[0, place] == pytest.approx(np.median(others))
        assert found[1, len(values) - 1 - place] == pytest.approx(np.median(others))


def _told(steps, value):
    seconds = np.full((len(steps), 4), value, dtype=np.float32)
    return np.array(steps, dtype=np.int64).tobytes(), seconds.tobytes()


def test_steps_are_given_once_all_ranks_have_told_them():
    steps = StepReports(2)
    steps.add([0], [5], *_told([1, 2, 3], 0.5))
    assert steps.complete() == []
    steps.add([1], [6], *_told([2, 3, 4], 0.25))
    (two, three) = steps.complete()
    assert (two[0], three[0]) == (2, 3)
    assert two[1].tolist() == [[0.5, 0.25]] * 4
    assert steps.kinds == [5, 6]
    steps.add([0], [5], *_told([2, 3, 4], 0.5))
    assert [step for step, _ in steps.complete()] == [4]


def test_ranks_of_a_machine_tell_together_and_others_a_step_later():
    steps = StepReports(4)
    numbers, seconds = _told([1, 2], 0.5)
    steps.add([2, 0], [8, 9], numbers, seconds + _told([1, 2], 0.25)[1])
    steps.add([1], [7], *_told([2], 0.125))
    steps.add([3], [7], *_told([1, 2, 3], np.nan))
    ((step, times),) = steps.complete()
    assert step == 2
    assert times[0].tolist() == [0.25, 0.125, 0.5, 0.0]
    assert steps.kinds == [9, 7, 8, 7]


def test_a_rank_that_is_silent_does_not_fill_the_memory():
    steps = StepReports(2)
    steps.add([0], [0], *_told(list(range(5000)), 1.0))
    assert steps.complete() == []
    assert len(steps._open) <= 1024
    steps.add([7], [0], *_told([1], 1.0))  # of another attempt, or wrong
    with pytest.raises(ValueError, match="do not fit"):
        steps.add([1], [0], b"12345678", b"1234")
