"""The runtime's own ``auto`` on years of real failures, against the best interval in hindsight."""

import random
from pathlib import Path

import pytest

from outlast.errors import ConfigError
from outlast.planner.job import JobRun, JobSetup, Level
from outlast.planner.study import Scenario, chosen, compare, difference, tell
from outlast.planner.traces import read
from outlast.policy.cadence import Auto, EverySeconds
from thorough import ALL

LANL = Path("shared/traces/lanl")
COSTS = [(60.0, 120.0), (180.0, 360.0), (900.0, 900.0), (1800.0, 1800.0)]


def scenario(trace, cost_s, restore_s, **how):
    levels = (Level(cost_s=cost_s, restore_s=restore_s),)
    setup = JobSetup(levels=levels, horizon_s=trace.length_s, **how)
    return Scenario(setup=setup, law="trace", trace=trace)


@pytest.mark.skipif(not LANL.is_dir(), reason="LANL's failures are not here")
@pytest.mark.parametrize(("cost_s", "restore_s"), COSTS if ALL else COSTS[3:])
@pytest.mark.parametrize("system", [18, 19])
def test_auto_is_within_2_percent_of_the_best_and_not_worse_than_young(system, cost_s, restore_s):
    case = scenario(read(LANL / f"failures_sys{system}.csv"), cost_s, restore_s)
    auto, young, best = compare(case, ["auto", "young20", "best"], 1)
    assert auto.failures > 3000
    assert auto.mean > 0.99 * best.mean
    # On system 19 the first 20 failures tell the rate of all of them.
    assert auto.mean > young.mean + (0.01 if system == 18 else 0.0)


def test_on_a_recording_auto_is_the_runtimes_own_on_the_failures_of_the_others(recorded):
    case = scenario(recorded, 60.0, 60.0)
    auto, beside = compare(case, ["auto", "25 min"], 3 if ALL else 2)
    for number, share in enumerate(auto.useful_share):
        outcome = JobRun(case.setup, Auto(0.0), tell(case, number).losses, random.Random(0)).run()
        assert share == outcome.useful_s / outcome.wall_s
        fixed = JobRun(
            case.setup, EverySeconds(1500.0, 0.0), tell(case, number).losses, random.Random(0)
        ).run()
        assert beside.useful_share[number] == pytest.approx(fixed.useful_s / fixed.wall_s, rel=1e-9)


@pytest.fixture
def recorded(tmp_path):
    """Failures that come more often half-way."""
    chance, hours = random.Random(1), [0.0]
    while hours[-1] < 1500:
        hours.append(hours[-1] + chance.expovariate(0.1 if hours[-1] < 1000 else 1.0))
    rows = "".join(f"{hour},{number % 7},30\n" for number, hour in enumerate(hours[1:]))
    path = tmp_path / "failures.csv"
    path.write_text("t_hours,node,downtime_min\n" + rows)
    return read(path)


def test_auto_learns_that_a_job_fails_more_often_than_it_did(recorded):
    auto, young, best = compare(scenario(recorded, 60.0, 60.0), ["auto", "young20", "best"], 1)
    assert auto.mean > young.mean
    assert auto.mean > 0.98 * best.mean
    assert sum(auto.parts.values()) == pytest.approx(1.0)


def test_what_a_policy_comes_to(recorded):
    case = scenario(recorded, 60.0, 60.0)
    assert chosen(case, "30 min")[1] == 1800.0
    assert chosen(case, "auto")[1] is None
    moments = recorded.losses
    assert chosen(case, "young")[1] == pytest.approx((120 * moments[-1] / len(moments)) ** 0.5)
    assert chosen(case, "young20")[1] == pytest.approx((120 * moments[19] / 20) ** 0.5)
    with pytest.raises(ConfigError, match="'often' is not a policy; known are auto"):
        chosen(case, "often")
    with pytest.raises(ConfigError, match="say how long one takes with --step"):
        chosen(case, "200 steps")
    with pytest.raises(ConfigError, match="young has no interval where a checkpoint costs 0 s"):
        chosen(scenario(recorded, 0.0, 0.0), "young")


def test_replications_are_paired(recorded):
    case = scenario(recorded, 60.0, 60.0)
    one, same, other = compare(case, ["20 min", "20 min", "25 min"], 30)
    assert difference(one, same) == (0.0, 0.0)
    mean, error = difference(one, other)
    assert mean == pytest.approx(one.mean - other.mean)
    assert error < 0.2 * (one.quantile(0.95) - one.quantile(0.05))


def test_failures_follow_from_the_seed_and_the_replication_however_many_there_are():
    case = Scenario(setup=JobSetup(levels=(Level(cost_s=60.0),), horizon_s=9e5), failures_per_h=0.5)
    (few,), (many,) = (compare(case, ["20 min"], count) for count in (3, 40))
    assert few.useful_share == many.useful_share[:3]
    # What was best on the first 20 is not beaten on them by an interval that was tried.
    best, *others = compare(case, ["best", "exact", "daly", "25 min"], 20)
    assert all(best.mean >= other.mean - 1e-3 for other in others)


def test_a_seed_tells_the_same_story_again():
    for law in ("constant", "weibull", "bathtub", "zones"):
        setup = JobSetup(machines=20, horizon_s=50 * 3600.0)
        case = Scenario(setup=setup, law=law, failures_per_h=0.5, shape=0.7, zones=4, seed=3)
        assert tell(case, 5) == tell(case, 5)
        assert tell(case, 5) != tell(case, 6)
        assert all(0 <= loss.at_s < setup.horizon_s for loss in tell(case, 5).losses)


def test_a_zone_takes_all_of_its_machines():
    setup = JobSetup(machines=8, horizon_s=1e6)
    case = Scenario(setup=setup, law="zones", failures_per_h=0.5, zones=4)
    assert {loss.machines for loss in tell(case, 0).losses} == {
        (zone, zone + 4) for zone in range(4)
    }


def test_a_fleet_is_replayed_from_any_moment_and_round_again(tmp_path):
    path = tmp_path / "spot.csv"
    path.write_text("0,add,a\n0,add,b\n60000,remove,a\n90000,add,c\n100000,remove,b\n")
    trace = read(path)
    setup = JobSetup(machines=trace.machines, horizon_s=trace.length_s)
    case = Scenario(setup=setup, law="trace", trace=trace)
    first = tell(case, 0)
    assert first.absent == []
    assert [(loss.at_s, loss.machines) for loss in first.losses] == [
        (60.0, (0,)),
        (100.0, (1,)),
    ]
    assert first.comes == [(90.0, (0,)), (100.0, (1,))]  # and round again
    for number in range(1, 20):
        story = tell(case, number)
        events = [(loss.at_s, -len(loss.machines)) for loss in story.losses]
        events += [(at_s, len(come)) for at_s, come in story.comes]
        here = 2 - len(story.absent)
        for at_s, change in sorted(events):
            here += change
            assert 0 <= here <= 2
            assert 0 <= at_s <= 100.0
