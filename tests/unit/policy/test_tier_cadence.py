"""Each slower tier's interval: from the failures that only it survives, and what a copy costs."""

import itertools
import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

from outlast.policy.tier_cadence import (
    COPY_ROOM,
    PRIOR_H,
    TIER_CHANGE,
    TIER_MAX_S,
    Beyond,
    Cost,
    Scope,
    Stop,
    TierCadence,
)

MEMORY = Stop(name="memory", survives=Scope.PROCESS)
DISK = Stop(name="disk", survives=Scope.PROCESS)
CLOUD = Stop(name="cloud", survives=Scope.ALL)


def cadence(*stops, **given):
    first, *others = stops
    return TierCadence(
        [Stop(name=first.name, survives=first.survives, every=1), *others], 0, **given
    )


def test_a_tier_takes_each_until_its_cost_is_known():
    one = cadence(MEMORY, CLOUD)
    one.taken(30.0, 30.0)
    assert [one.due(turn) for turn in range(3)] == [["memory", "cloud"]] * 3
    assert not one.changed()


def test_the_interval_is_youngs_for_the_failures_that_only_it_survives():
    one = cadence(MEMORY, CLOUD)
    one.measured("cloud", Cost(copy_s=60.0, slowed=0.1))
    one.taken(0.0, 30.0)
    (change,) = one.changed()
    young_s = math.sqrt(2 * 6.0 * PRIOR_H[Scope.PROCESS] * 3600)
    assert change.tier == "cloud"
    assert change.interval_s == pytest.approx(young_s, abs=15.0)
    assert change.every == round(young_s / 30)
    assert change.before_s == 30.0
    assert change.cost_s == pytest.approx(6.0)
    assert change.reason == "only losses of a machine need it, and a copy was measured"
    assert one.due(0) == ["memory", "cloud"]
    assert one.due(1) == ["memory"]
    assert one.due(change.every) == ["memory", "cloud"]
    assert not one.changed()


def test_where_others_hold_copies_only_losses_of_several_count():
    held = Stop(name="memory", survives=Scope.MACHINE)
    alone, together = cadence(MEMORY, CLOUD), cadence(held, CLOUD)
    for one in (alone, together):
        one.measured("cloud", Cost(copy_s=60.0))
        one.taken(0.0, 30.0)
    assert together.every("cloud") == pytest.approx(alone.every("cloud") * math.sqrt(5), rel=0.02)


def test_machines_that_are_lost_make_it_more_frequent_and_processes_do_not():
    def after(scope):
        one = cadence(MEMORY, CLOUD)
        one.measured("cloud", Cost(copy_s=60.0))
        for hour in range(1, 9):
            one.lost(3600.0 * hour, scope)
            one.begun(3600.0 * hour)
        one.taken(3600.0 * 8, 30.0)
        return one.every("cloud")

    assert after(Scope.MACHINE) < after(Scope.PROCESS) / 2
    assert after(Scope.ALL) == after(Scope.MACHINE)


def test_money_is_time():
    one = cadence(MEMORY, CLOUD)
    one.measured("cloud", Cost(copy_s=20.0))
    one.taken(0.0, 30.0)
    before = one.every("cloud")
    one.measured("cloud", Cost(copy_s=20.0, money_s=399.0))
    one.taken(0.0, 30.0)
    assert one.every("cloud") == pytest.approx(20 * before, rel=0.1)
    assert one.changed()[-1].reason == "copies cost more"


def test_what_was_set_stays_and_the_others_fit_around_it():
    fixed = Stop(name="shared", survives=Scope.ALL, every=12)
    one = cadence(MEMORY, DISK, fixed, CLOUD)
    for name in ("disk", "shared", "cloud"):
        one.measured(name, Cost(copy_s=60.0, slowed=0.1))
    one.taken(0.0, 100.0)  # the disk would like about every ninth
    assert one.every("shared") == 12
    assert one.every("disk") == 12
    assert one.every("cloud") % 12 == 0
    set_all = cadence(MEMORY, fixed)
    assert set_all.is_fixed
    set_all.measured("shared", Cost(copy_s=60.0))
    set_all.taken(0.0, 100.0)
    assert not set_all.changed()


def test_weights_alone_are_no_reason_to_copy():
    one = cadence(MEMORY, CLOUD, full_every=4)
    one.measured("cloud", Cost(copy_s=60.0, slowed=0.1))
    one.taken(0.0, 300.0)
    assert one.every("cloud") == 4


def test_a_copy_has_time_to_end_and_no_interval_is_endless():
    one = cadence(MEMORY, CLOUD)
    one.measured("cloud", Cost(copy_s=7200.0, slowed=0.0))
    one.taken(0.0, 30.0)
    assert one.every("cloud") * 30.0 == pytest.approx(COPY_ROOM * 7200.0, rel=0.01)
    one.measured("cloud", Cost(copy_s=1.0, money_s=1e9))
    one.taken(0.0, 30.0)
    assert one.every("cloud") * 30.0 == pytest.approx(TIER_MAX_S)


@given(
    cost_s=st.lists(st.floats(0.5, 2.0), min_size=2, max_size=30),
    interval_s=st.floats(30.0, 3600.0),
)
def test_what_wavers_within_the_hysteresis_changes_nothing(cost_s, interval_s):
    """Costs that waver by a factor of two move Young's interval by less than ``TIER_CHANGE``."""
    one = cadence(MEMORY, CLOUD)
    one.measured("cloud", Cost(copy_s=200.0, slowed=0.2))
    one.taken(0.0, interval_s)
    first, _ = one.every("cloud"), one.changed()
    wanted_s = math.sqrt(2 * 40.0 * PRIOR_H[Scope.PROCESS] * 3600)
    for times in cost_s:
        one.measured("cloud", Cost(copy_s=200.0, slowed=0.2 * times))
        one.taken(0.0, interval_s)
        now_s = max(wanted_s * math.sqrt(times), COPY_ROOM * 200.0, interval_s)
        if 1 / TIER_CHANGE < now_s / (first * interval_s) < TIER_CHANGE:
            assert not one.changed()
            assert one.every("cloud") == first
        else:
            first, _ = one.every("cloud"), one.changed()


@given(
    everys=st.lists(st.sampled_from([None, None, 6, 12]), max_size=4).filter(
        lambda found: [e for e in found if e] == sorted(e for e in found if e)
    ),
    costs=st.lists(st.lists(st.floats(0, 1e4), min_size=4, max_size=4), min_size=1, max_size=5),
    interval_s=st.floats(0.1, 4e4),
    full_every=st.integers(1, 5),
)
def test_a_tier_is_always_fed_by_the_one_before(everys, costs, interval_s, full_every):
    names = ["a", "b", "c", "d"]
    stops = [
        Stop(name=name, survives=Scope.ALL if name == "c" else Scope.PROCESS, every=every)
        for name, every in zip(names, everys, strict=False)
    ]
    one = cadence(MEMORY, *stops, full_every=full_every)
    for found in costs:
        for stop, cost_s in zip(stops, found, strict=False):
            if cost_s > 100.0:  # those of others are not known
                one.measured(stop.name, Cost(copy_s=cost_s))
        one.taken(0.0, interval_s)
        chain = [one.every(stop.name) for stop in (MEMORY, *stops)]
        assert chain[0] == 1
        assert all(slower % faster == 0 for faster, slower in itertools.pairwise(chain))
        assert all(s.every in (None, n) for s, n in zip(stops, chain[1:], strict=True))


def test_failures_are_forgotten_and_a_worse_one_counts_once():
    known = Beyond().after(1.0, Scope.MACHINE)
    assert (known.num_machine, known.num_all) == (1, 0)
    known = known.worse(Scope.MACHINE, Scope.ALL)
    assert (known.num_machine, known.num_all) == (1, 1)
    assert known.worse(Scope.ALL, Scope.ALL) == known
    assert known.after(5000.0).num_all < 1e-4
    assert known.rate(Scope.ALL).mean_per_h == pytest.approx(1 / 1000)
    assert known.rate(Scope.PROCESS).mean_per_h == pytest.approx(2 / 21, rel=0.01)


def test_where_a_tier_is_read_more_often_than_believed_that_counts():
    held = Stop(name="memory", survives=Scope.MACHINE)
    cloud = Stop(name="cloud", survives=Scope.ALL)
    chosen = []
    for name in ("memory", "cloud"):
        one = cadence(held, cloud)
        one.measured("cloud", Cost(copy_s=60.0))
        for hour in range(1, 9):
            one.lost(3600.0 * hour, Scope.MACHINE)
            one.back_from([name])
            one.begun(3600.0 * hour)
        one.taken(3600.0 * 8, 30.0)
        chosen.append(one.every("cloud"))
    assert chosen[1] < chosen[0] / 2.5
    assert Beyond().back_from(["a"]).after(5000.0).read["a"] < 1e-4
    assert Beyond().back_from(["a"]).rate(Scope.ALL, ["a"]).num_seen == 1
