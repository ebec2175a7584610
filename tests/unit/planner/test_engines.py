"""The simulator against the exact model, against SimPy, and its two engines against each other."""

import math
import random

import numpy as np
import pytest
import simpy

from outlast.planner.draws import Exponential
from outlast.planner.job import MODES, JobRun, JobSetup, Level, MachineLoss
from outlast.planner.many import Automatic, FixedIntervals, JobCase, Renewed, Replayed, simulate
from outlast.planner.study import Scenario, compare, tell
from outlast.policy.cadence import Auto, EverySeconds
from outlast.policy.hazard import of_a_new_job
from outlast.policy.interval import Costs, exact_best_h, exact_wall, linear_wall
from thorough import ALL

HOUR_S = 3600.0

# M, C, R, D in hours and T as a multiple of the best: checkpoints that take as long as it takes to
# fail, restores that fail again and again.
GRID = [
    (mtbf, cost, restore, detect, times)
    for mtbf in (0.5, 1.5, 5.0, 15.0, 50.0)
    for cost in (0.02, 0.1, 0.25, 0.5, 1.0)
    for restore, detect, times in ((0.05, 0.02, 0.5), (0.4, 0.2, 1.7))
]


def of_hours(cost, restore, detect, **more):
    return JobCase(
        cost_s=cost * HOUR_S, restore_s=restore * HOUR_S, detect_s=detect * HOUR_S, **more
    )


def test_the_exact_model_and_the_simulator_agree_on_a_grid_of_50_settings(capsys):
    segments, count = 20, 4000 if ALL else 1500
    deviations, lines = [], []
    for number, (mtbf, cost, restore, detect, times) in enumerate(GRID):
        costs = Costs(checkpoint_h=cost, restore_h=restore, detect_h=detect)
        interval = times * exact_best_h(costs, 1 / mtbf)
        work_s = segments * interval * HOUR_S
        case = of_hours(cost, restore, detect, work_s=work_s)
        failures = Renewed(Exponential(mtbf * HOUR_S), number)
        wall = simulate(case, failures, FixedIntervals(interval * HOUR_S), count).wall / work_s
        error = wall.std(ddof=1) / math.sqrt(count)
        exact = exact_wall(costs, 1 / mtbf, interval)
        deviations.append((wall.mean() - exact) / error)
        linear = linear_wall(costs, 1 / mtbf, interval)
        if (interval + cost) / mtbf > 0.3:
            off = "no progress" if math.isinf(linear) else f"{100 * (linear / exact - 1):+.1f} %"
            lines.append(
                f"M {mtbf:g} h, C {cost:g} h, T {interval:.2f} h: "
                f"simulated {wall.mean():.3f}, exact {exact:.3f}, linear off by {off}"
            )
    with capsys.disabled():
        print("\n" + "\n".join(lines))
    assert len(deviations) == 50
    assert max(map(abs, deviations)) < 3
    # As a whole they are no further apart than chance has them, and no closer: 3 sigma of χ²(50).
    assert 20 < sum(one**2 for one in deviations) < 80
    assert any("no progress" in line for line in lines)


@pytest.mark.parametrize("lag", [0.5, 2.0])
def test_a_lag_costs_what_the_exact_model_says(lag):
    costs = Costs(checkpoint_h=0.3, restore_h=0.5, detect_h=0.2, lag_h=lag)
    case = of_hours(0.3, 0.5, 0.2, lag_s=lag * HOUR_S, horizon_s=2000 * HOUR_S)
    failures = Renewed(Exponential(10 * HOUR_S), 1)
    ledger = simulate(case, failures, FixedIntervals(2.5 * HOUR_S), 2000)
    # In the long run; what is in flight at the horizon makes the last 0.3 %.
    assert ledger.wall.sum() / ledger.useful.sum() == pytest.approx(
        exact_wall(costs, 0.1, 2.5), rel=3e-3
    )


@pytest.mark.parametrize(("probability", "most"), [(0.5, 0.015), (0.9, 0.02)])
def test_with_notices_the_exact_model_is_an_upper_bound_that_is_nearly_reached(probability, most):
    # It does not count that a flush is a checkpoint, too: what follows it need not be redone.
    costs = Costs(checkpoint_h=0.3, restore_h=0.5, flush_probability=probability, flush_h=0.3)
    setup = JobSetup(
        levels=(Level(cost_s=0.3 * HOUR_S, restore_s=0.5 * HOUR_S),),
        horizon_s=2000 * HOUR_S,
        notice_s=0.31 * HOUR_S,
        flush_probability=probability,
    )
    case = Scenario(setup=setup, failures_per_h=0.1, notice_share=1.0)
    assert not case.is_simple
    (found,) = compare(case, ["2.5 h"], 50)
    exact = exact_wall(costs, 0.1, 2.5)
    assert exact * (1 - most) < 1 / found.mean < exact


def by_simpy(moments_s, case, interval_s):
    """The same job by another engine's processes and interrupts: wall and useful seconds."""
    environment = simpy.Environment()
    done = {"useful": 0.0, "failures": 0, "down": False}

    def job():
        first = True
        while done["useful"] < case.work_s * (1 - 1e-12):
            try:
                done["down"] = False
                if not first:
                    yield environment.timeout(case.restore_s)
                first = False
                while done["useful"] < case.work_s * (1 - 1e-12):
                    part_s = min(interval_s, case.work_s - done["useful"])
                    yield environment.timeout(part_s)
                    yield environment.timeout(case.cost_s)
                    done["useful"] += part_s
            except simpy.Interrupt:
                first = False
                done["down"] = True
                done["failures"] += 1
                yield environment.timeout(case.detect_s)

    process = environment.process(job())

    def strike():
        for at_s in moments_s:
            yield environment.timeout(at_s - environment.now)
            if not process.is_alive:
                return
            if not done["down"]:
                process.interrupt()

    environment.process(strike())
    environment.run(until=process)
    return environment.now, done["failures"]


@pytest.mark.parametrize("seed", range(8))
def test_simpy_tells_the_same_story(seed):
    chance = np.random.default_rng(seed)
    moments_s = np.cumsum(chance.exponential(2 * HOUR_S, 5000))
    case = of_hours(0.05, 0.3, 0.1, work_s=60 * HOUR_S + 123)
    interval_s = chance.uniform(0.2, 1.0) * HOUR_S
    wall_s, failures = by_simpy(moments_s, case, interval_s)
    ledger = simulate(case, from_zero(moments_s), FixedIntervals(interval_s), 1)
    assert ledger.wall[0] == pytest.approx(wall_s, abs=1e-3)
    assert ledger.failures[0] == failures
    outcome = run(case, moments_s, EverySeconds(interval_s, 0.0))
    assert outcome.wall_s == pytest.approx(wall_s, abs=1e-3)
    assert outcome.failures == failures


def from_zero(moments_s):
    return Replayed(list(moments_s), float(moments_s[-1]) + 1e9, np.zeros(1))


def run(case, moments_s, cadence):
    level = Level(cost_s=case.cost_s, restore_s=case.restore_s, lag_s=case.lag_s)
    setup = JobSetup(
        levels=(level,),
        detect_s=case.detect_s,
        work_s=case.work_s,
        horizon_s=case.horizon_s,
    )
    losses = [MachineLoss(float(at_s), (), "reset") for at_s in moments_s]
    return JobRun(setup, cadence, losses, random.Random(0)).run()


@pytest.mark.parametrize("lag", [0.0, 0.15, 0.7])
@pytest.mark.parametrize("end", ["work", "horizon"])
@pytest.mark.parametrize("seed", range(3))
def test_both_engines_tell_the_same_story(seed, end, lag):
    moments_s = np.cumsum(np.random.default_rng(seed).exponential(2 * HOUR_S, 3000))
    ends = {"work_s": 80 * HOUR_S + 100} if end == "work" else {"horizon_s": 300 * HOUR_S + 33}
    case = of_hours(0.05, 0.3, 0.1, lag_s=lag * HOUR_S, **ends)
    ledger = simulate(case, from_zero(moments_s), FixedIntervals(0.4 * HOUR_S), 1)
    outcome = run(case, moments_s, EverySeconds(0.4 * HOUR_S, 0.0))
    assert outcome.wall_s == pytest.approx(ledger.wall[0], abs=1e-2)
    assert outcome.useful_s == pytest.approx(ledger.useful[0], abs=1e-2)
    assert outcome.failures == ledger.failures[0]
    assert outcome.finished == (end == "work")


def test_auto_side_by_side_is_nearly_the_runtimes_own():
    moments_s = np.cumsum(np.random.default_rng(3).exponential(5 * HOUR_S, 3000))
    case = of_hours(0.05, 0.2, 0.0, horizon_s=4000 * HOUR_S)
    ledger = simulate(case, from_zero(moments_s), Automatic(case.cost_s, 1), 1)
    outcome = run(case, moments_s, Auto(0.0))
    assert outcome.failures == ledger.failures[0]
    # The runtime's also changes its mind between failures.
    assert outcome.useful_s == pytest.approx(ledger.useful[0], rel=5e-3)


def stormy(seed, end_s):
    """One failure in two hours, and storms of ten minutes."""
    chance = np.random.default_rng(seed)
    moments_s = list(np.cumsum(chance.exponential(2 * HOUR_S, int(end_s / HOUR_S))))
    for begin_s in np.cumsum(chance.exponential(6 * HOUR_S, int(end_s / HOUR_S / 6))):
        every_s = float(chance.choice([2.0, 8.0, 40.0, 200.0]))
        moments_s += list(begin_s + np.cumsum(chance.exponential(every_s, int(600 / every_s))))
    return sorted(one for one in moments_s if one < end_s)


class Seen(Auto):
    """The runtime's own, that keeps its waits."""

    def __init__(self):
        self.waits_s = []
        super().__init__(0.0)

    def due_s(self, step, now_s, step_s):
        self.waits_s.append(super().due_s(step, now_s, step_s) - now_s)
        return now_s + self.waits_s[-1]


class SeenSideBySide(Automatic):
    """Of many jobs, that keeps each one's waits."""

    def __init__(self, cost_s, count):
        super().__init__(cost_s, count, is_whole=True)
        self.waits_s = [[] for _ in range(count)]

    def wait(self, jobs, since_s):
        wait_s, is_same = super().wait(jobs, since_s)
        for job, one in zip(np.arange(len(self.waits_s))[jobs], wait_s, strict=True):
            self.waits_s[job].append(float(one))
        return wait_s, is_same


@pytest.mark.parametrize(("cost_s", "restore_s", "detect_s"), [(0.1, 0.3, 0.0), (0.5, 2.0, 0.2)])
def test_in_storms_auto_side_by_side_is_the_runtimes_own_save_by_save(cost_s, restore_s, detect_s):
    end_s = 20 * HOUR_S
    stories = [stormy(seed, end_s) for seed in range(3)]
    case = JobCase(cost_s=cost_s, restore_s=restore_s, detect_s=detect_s, horizon_s=end_s)
    auto = SeenSideBySide(cost_s, len(stories))
    ledger = simulate(case, Beside([from_zero(one) for one in stories]), auto, len(stories))
    for number, story in enumerate(stories):
        own = Seen()
        outcome = run(case, story, own)
        assert outcome.failures == ledger.failures[number] > 20
        assert len(own.waits_s) == len(auto.waits_s[number]) > 300
        assert auto.waits_s[number] == pytest.approx(own.waits_s, rel=1e-3)
        assert outcome.useful_s == pytest.approx(ledger.useful[number], abs=1.0)
    assert min(map(min, auto.waits_s)) < 4.9  # in calm they are minutes


class Beside:
    """Each job with its own failures."""

    def __init__(self, each):
        self._each = each

    def gap(self, now_s):
        pairs = zip(self._each, now_s, strict=True)
        return np.array([float(one.gap(np.array([at_s]))[0]) for one, at_s in pairs])


def test_in_storms_the_short_way_is_nearly_the_whole_one():
    end_s = 40 * HOUR_S
    for cost_s, restore_s in ((0.1, 0.3), (0.5, 2.0)):
        case = JobCase(cost_s=cost_s, restore_s=restore_s, horizon_s=end_s)
        story = from_zero(stormy(0, end_s))
        whole, short = (
            simulate(case, story, Automatic(cost_s, 1, is_whole=is_whole), 1)
            for is_whole in (True, False)
        )
        assert short.useful[0] == pytest.approx(whole.useful[0], rel=3e-3)


def test_automatic_learns_as_the_hazard_does():
    many, known = Automatic(60.0, 2), of_a_new_job()
    for hours in (5.0, 700.0, 0.3, 0.01, 0.01, 12.0):
        many.failed(np.array([hours * HOUR_S, HOUR_S]))
        known = known.after(hours, failed=True)
        assert many.calm_per_h[0] == pytest.approx(known.calm_per_h, rel=1e-12)


def test_parts_add_up_to_the_wall_and_the_horizon_is_kept():
    case = of_hours(0.1, 0.5, 0.2, lag_s=600.0, horizon_s=500 * HOUR_S)
    failures = Renewed(Exponential(2 * HOUR_S), 5)
    ledger = simulate(case, failures, FixedIntervals(HOUR_S), 500)
    assert ledger.wall == pytest.approx(500 * HOUR_S, rel=1e-12)
    assert all((part >= -1e-6).all() for part in ledger.parts().values())


def test_a_moment_that_was_reached_does_not_come_for_ever():
    # Rotated by an offset, a moment may be a rounding error ahead of the job that stands on it.
    moments_s = list(np.cumsum(np.random.default_rng(0).exponential(7 * HOUR_S, 500)))
    offsets_s = np.random.default_rng(1).random(50) * moments_s[-1]
    case = of_hours(0.05, 0.1, 0.0, horizon_s=moments_s[-1])
    ledger = simulate(
        case, Replayed(moments_s, moments_s[-1], offsets_s), FixedIntervals(HOUR_S), len(offsets_s)
    )
    assert np.all(ledger.failures <= 501)


def test_a_loss_is_of_a_machine_wherever_survivors_may_go_on():
    for mode in MODES:
        setup = JobSetup(machines=4, mode=mode, horizon_s=36_000)
        told = tell(Scenario(setup=setup, failures_per_h=2), 0).losses
        assert {len(one.machines) for one in told} == {0 if mode == "rigid" else 1}
