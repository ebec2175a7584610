"""Each tier's interval: from the failures that only it survives, and what a copy costs."""

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

from outlast.policy.hazard import Hazard
from outlast.policy.tier_cadence import (
    APART_H,
    COPY_ROOM,
    PRIOR,
    TIER_CHANGE,
    TIER_MAX_S,
    Beyond,
    Cost,
    Scope,
    TierCadence,
    TierStop,
)

MEMORY = TierStop(name="memory", survives=Scope.PROCESS)
DISK = TierStop(name="disk", survives=Scope.PROCESS)
CLOUD = TierStop(name="cloud", survives=Scope.ALL)
HOUR_S = 3600.0


def cadence(*stops, **given):
    return TierCadence(stops, 0, **{"hazard": Hazard(), "overhead": 0.9, **given})


def rate_per_h(scope):
    """Of failures that take more than ``scope``, before any was seen."""
    believed, of = PRIOR[scope]
    return believed / of * Hazard().calm_per_h


def run(one, seconds, every_s=30.0, start_s=0.0):
    """Checkpoints every so often; when each tier took one."""
    took = {}
    for turn in range(int(seconds / every_s)):
        now_s = start_s + turn * every_s
        names = one.due(turn, now_s)
        one.taken(now_s, every_s, names)
        for name in names:
            took.setdefault(name, []).append(now_s)
    return took


def test_a_tier_takes_each_until_its_cost_is_known():
    one = cadence(MEMORY, CLOUD)
    took = run(one, 3600.0)
    assert len(took["cloud"]) == len(took["memory"]) == 120
    assert not one.changed()


def test_the_interval_is_youngs_for_the_failures_that_only_it_survives():
    one = cadence(MEMORY, CLOUD)
    one.measured("cloud", Cost(copy_s=60.0, slowed=0.1))
    one.taken(0.0, 30.0, None)
    (change,) = one.changed()
    young_s = math.sqrt(2 * 6.0 / rate_per_h(Scope.PROCESS) * 3600)
    assert change.tier == "cloud"
    assert change.interval_s == pytest.approx(young_s)
    assert change.before_s == 30.0
    assert change.cost_s == pytest.approx(6.0)
    assert change.reason == "only losses of a machine need it, and a copy was measured"
    took = run(one, 3 * young_s, start_s=30.0)
    assert len(took["memory"]) == int(3 * young_s / 30)
    gaps = [b - a for a, b in zip([0.0, *took["cloud"]], took["cloud"], strict=False)]
    # The rate that is believed in falls while nothing happens.
    assert gaps == pytest.approx([young_s] * len(gaps), rel=0.15)
    assert not one.changed()


def test_where_others_hold_copies_only_losses_of_several_count():
    held = TierStop(name="memory", survives=Scope.MACHINE)
    alone, together = cadence(MEMORY, CLOUD), cadence(held, CLOUD)
    for one in (alone, together):
        one.measured("cloud", Cost(copy_s=60.0))
        one.taken(0.0, 30.0, None)
    assert together.interval_s("cloud") == pytest.approx(alone.interval_s("cloud") * math.sqrt(5))


def test_what_stands_apart_from_all_machines_fails_by_itself():
    bucket = TierStop(name="bucket", survives=Scope.ALL)
    one = cadence(bucket, CLOUD)
    one.measured("cloud", Cost(copy_s=60.0))
    one.taken(0.0, 30.0, None)
    assert one.changed()[0].failures_per_h == 1 / APART_H


def test_machines_that_are_lost_make_it_more_frequent_and_processes_do_not():
    def after(scope):
        one = cadence(MEMORY, CLOUD)
        one.measured("cloud", Cost(copy_s=60.0))
        for hour in range(1, 9):
            one.lost(HOUR_S * hour, scope)
            one.begun(HOUR_S * hour)
        one.taken(HOUR_S * 8, 30.0, None)
        return one.interval_s("cloud")

    assert after(Scope.MACHINE) < after(Scope.PROCESS) / 2
    assert after(Scope.ALL) == after(Scope.MACHINE)


def test_what_was_said_in_the_attempt_before_is_not_said_again():
    cost = Cost(copy_s=60.0, slowed=0.1)
    first = cadence(MEMORY, CLOUD)
    first.measured("cloud", cost)
    first.taken(0.0, 30.0, None)
    (change,) = first.changed()
    again = cadence(MEMORY, CLOUD, told={"cloud": change.interval_s})
    again.measured("cloud", cost)
    again.taken(0.0, 30.0, None)
    assert not again.changed()
    assert again.interval_s("cloud") == change.interval_s
    again.measured("cloud", Cost(copy_s=60.0, slowed=0.5))
    again.taken(0.0, 30.0, None)
    assert again.changed()[0].before_s == change.interval_s


def test_money_is_time():
    one = cadence(MEMORY, CLOUD)
    one.measured("cloud", Cost(copy_s=20.0))
    one.taken(0.0, 30.0, None)
    before_s = one.interval_s("cloud")
    one.measured("cloud", Cost(copy_s=20.0, money_s=399.0))
    one.taken(0.0, 30.0, None)
    assert one.interval_s("cloud") == pytest.approx(20 * before_s, rel=0.1)
    assert one.changed()[-1].reason == "copies cost more"


def test_in_a_burst_every_tier_is_needed_soon_and_afterwards_as_before():
    held = TierStop(name="memory", survives=Scope.MACHINE)
    one = cadence(held, CLOUD)
    one.measured("cloud", Cost(copy_s=1.0, slowed=0.1))
    one.taken(0.0, 30.0, None)
    calm_s = one.interval_s("cloud")
    now_s = HOUR_S
    for _ in range(8):  # one in ten seconds, each second one of several machines
        one.lost(now_s, Scope.ALL if _ % 2 else Scope.PROCESS)
        one.begun(now_s)
        now_s += 10.0
    one.taken(now_s, 1.0, None)
    stormy = run(one, 30.0, every_s=1.0, start_s=now_s + 1)["cloud"]
    assert len(stormy) >= 4
    assert one.interval_s("cloud") > calm_s / 5, "a storm of a minute says little of the weeks"
    later = run(one, 4 * HOUR_S, every_s=30.0, start_s=now_s + HOUR_S)["cloud"]
    assert len(later) < 4 * HOUR_S / (calm_s / 5)


def test_what_was_set_stays_and_the_others_fit_around_it():
    fixed = TierStop(name="shared", survives=Scope.ALL, every=12)
    one = cadence(MEMORY, DISK, fixed, CLOUD)
    for name in ("disk", "shared", "cloud"):
        one.measured(name, Cost(copy_s=60.0, slowed=0.1))
    took = run(one, 24 * HOUR_S, every_s=100.0)
    assert took["shared"] == [1200.0 * number for number in range(72)]
    assert set(took["shared"]) <= set(took["disk"]), "it is fed by the one before"
    assert len(took["disk"]) > len(took["shared"])
    assert set(took["cloud"]) <= set(took["shared"])
    set_all = cadence(MEMORY, fixed)
    assert set_all.is_fixed
    set_all.measured("shared", Cost(copy_s=60.0))
    set_all.taken(0.0, 100.0, None)
    assert not set_all.changed()


def test_weights_alone_are_no_reason_to_copy():
    one = cadence(MEMORY, CLOUD, full_every=4)
    one.measured("cloud", Cost(copy_s=60.0, slowed=0.1))
    took = run(one, 24 * HOUR_S, every_s=300.0)
    assert all(at_s % 1200.0 == 0 for at_s in took["cloud"])
    assert len(took["cloud"]) > 20


def test_a_copy_has_time_to_end_and_no_interval_is_endless():
    one = cadence(MEMORY, CLOUD)
    one.measured("cloud", Cost(copy_s=7200.0, slowed=0.0))
    one.taken(0.0, 30.0, None)
    assert one.interval_s("cloud") == pytest.approx(COPY_ROOM * 7200.0)
    one.measured("cloud", Cost(copy_s=1.0, money_s=1e9))
    one.taken(0.0, 30.0, None)
    assert one.interval_s("cloud") == pytest.approx(TIER_MAX_S)


def test_a_copy_that_came_to_nothing_is_made_up_for_by_the_next():
    one = cadence(MEMORY, CLOUD)
    one.measured("cloud", Cost(copy_s=60.0))
    one.taken(0.0, 30.0, None)
    assert one.due(1, 30.0) == ["memory"]
    one.failed(["memory"])
    assert one.due(1, 30.0) == ["memory"]
    one.failed(None)
    assert one.due(1, 30.0) == ["memory", "cloud"]


def test_while_nothing_is_known_copies_take_a_hundredth_of_the_time():
    took = {}
    for overhead in (0.01, 0.9):
        one = cadence(MEMORY, CLOUD, overhead=overhead)
        one.measured("cloud", Cost(copy_s=100.0, slowed=0.5))
        one.taken(0.0, 30.0, None)
        took[overhead] = [run(one, HOUR_S, start_s=30.0), run(one, 24 * HOUR_S, start_s=HOUR_S)]
    assert "cloud" not in took[0.01][0], "50 s in an hour are more"
    assert len(took[0.9][0]["cloud"]) == 1
    assert len(took[0.01][1]["cloud"]) > 0.8 * len(took[0.9][1]["cloud"])


# --- snapshots apart ------------------------------------------------------------------------------


def apart(*stops, **given):
    one = cadence(*stops, **given)
    one.apart = Scope.PROCESS
    return one


def test_a_snapshot_is_enough_until_a_tiers_own_time_has_come():
    one = apart(DISK)
    assert one.due(0, 0.0) == ["disk"], "what a save there costs is not known"
    one.measured("disk", Cost(copy_s=4.0, slowed=0.25))
    took = run(one, 4 * HOUR_S)
    young_s = math.sqrt(2 * 1.0 / rate_per_h(Scope.PROCESS) * 3600)
    assert young_s <= one.interval_s("disk") < 1.5 * young_s
    assert 4 * HOUR_S / 1.7 < len(took["disk"]) * young_s < 4 * HOUR_S
    one.apart = None
    assert one.due(1, 30.0) == ["disk"]


def test_a_slower_tier_that_is_due_takes_it_from_the_faster_ones():
    one = apart(DISK, CLOUD)
    one.measured("disk", Cost(copy_s=40.0, slowed=0.25))
    one.measured("cloud", Cost(copy_s=60.0, slowed=0.25))
    took = run(one, 24 * HOUR_S)
    assert set(took["cloud"]) <= set(took["disk"])
    assert len(took["cloud"]) > 5


def test_a_tier_that_counts_counts_what_the_first_one_gets():
    one = apart(DISK, TierStop(name="third", survives=Scope.ALL, every=3))
    one.measured("disk", Cost(copy_s=4.0, slowed=0.25))
    took = run(one, 24 * HOUR_S)
    assert took["third"] == took["disk"][::3]


@given(
    cost_s=st.lists(st.floats(0.5, 2.0), min_size=2, max_size=30),
    interval_s=st.floats(30.0, 3600.0),
)
def test_what_wavers_within_the_hysteresis_changes_nothing(cost_s, interval_s):
    """Costs that waver by a factor of two move Young's interval by less than ``TIER_CHANGE``."""
    one = cadence(MEMORY, CLOUD)
    one.measured("cloud", Cost(copy_s=200.0, slowed=0.2))
    one.taken(0.0, interval_s, None)
    first, _ = one.interval_s("cloud") or interval_s, one.changed()
    wanted_s = math.sqrt(2 * 40.0 / rate_per_h(Scope.PROCESS) * 3600)
    for times in cost_s:
        one.measured("cloud", Cost(copy_s=200.0, slowed=0.2 * times))
        one.taken(0.0, interval_s, None)
        now_s = max(wanted_s * math.sqrt(times), COPY_ROOM * 200.0, interval_s)
        if 1 / TIER_CHANGE < now_s / first < TIER_CHANGE:
            assert not one.changed()
        else:
            first, _ = one.interval_s("cloud"), one.changed()
            assert first == pytest.approx(now_s)


@given(
    everys=st.lists(st.sampled_from([None, None, 6, 12]), max_size=4).filter(
        lambda found: [e for e in found if e] == sorted(e for e in found if e)
    ),
    costs=st.lists(st.lists(st.floats(0, 1e4), min_size=4, max_size=4), min_size=1, max_size=5),
    interval_s=st.floats(0.1, 4e4),
    full_every=st.integers(1, 5),
    is_apart=st.booleans(),
)
def test_a_tier_is_always_fed_by_the_one_before(everys, costs, interval_s, full_every, is_apart):
    names = ["a", "b", "c", "d"]
    stops = [
        TierStop(name=name, survives=Scope.ALL if name == "c" else Scope.PROCESS, every=every)
        for name, every in zip(names, everys, strict=False)
    ]
    one = cadence(MEMORY, *stops, full_every=full_every)
    one.apart = Scope.PROCESS if is_apart and full_every == 1 else None
    now_s, turn = 0.0, 0
    for found in costs:
        for stop, cost_s in zip(stops, found, strict=False):
            if cost_s > 100.0:  # those of others are not known
                one.measured(stop.name, Cost(copy_s=cost_s))
        if costs[0][0] > 5e3:
            one.measured("memory", Cost(copy_s=1.0))
        for _ in range(7):
            due = one.due(turn, now_s)
            chain = [stop.name for stop in (MEMORY, *stops)]
            open_ones = ["memory", *(stop.name for stop in stops if stop.every is None)]
            if due:
                last = max(chain.index(name) for name in due)
                assert set(open_ones) & set(chain[:last]) <= set(due)
                assert due[0] == "memory"
            for stop in stops:
                if stop.every and one.apart is None:
                    assert (stop.name in due) == (turn % stop.every == 0)
            assert one.apart is not None or "memory" in due
            one.taken(now_s, interval_s, due)
            now_s, turn = now_s + interval_s, turn + 1


# --- what failures take --------------------------------------------------------------------------


def test_failures_are_forgotten_and_a_worse_one_counts_once():
    known = Beyond().after(1.0, Scope.MACHINE)
    assert (known.num, known.num_machine, known.num_all) == (1, 1, 0)
    known = known.worse(Scope.MACHINE, Scope.ALL)
    assert (known.num, known.num_machine, known.num_all) == (1, 1, 1)
    assert known.worse(Scope.ALL, Scope.ALL) == known
    assert known.after(5000.0).num_all < 1e-4
    assert Beyond().share(Scope.PROCESS) == 0.5
    found = known.share(Scope.MACHINE)
    believed, of = PRIOR[Scope.MACHINE]
    assert found == pytest.approx((believed + 1) / (of + 1))


def test_the_belief_yields_to_a_handful_of_failures():
    known = Beyond()
    for _ in range(5):
        known = known.after(1e-3, Scope.PROCESS)
    assert known.share(Scope.PROCESS) < 0.15
    for _ in range(5):
        known = known.after(1e-3, Scope.ALL)
    assert 0.3 < known.share(Scope.MACHINE) < 0.6


def test_where_a_tier_is_read_more_often_than_believed_that_counts():
    held = TierStop(name="memory", survives=Scope.MACHINE)
    cloud = TierStop(name="cloud", survives=Scope.ALL)
    chosen = []
    for name in ("memory", "cloud"):
        one = cadence(held, cloud)
        one.measured("cloud", Cost(copy_s=60.0))
        for hour in range(1, 9):
            one.lost(HOUR_S * hour, Scope.MACHINE)
            one.back_from([name])
            one.begun(HOUR_S * hour)
        one.taken(HOUR_S * 8, 30.0, None)
        chosen.append(one.interval_s("cloud"))
    assert chosen[1] < chosen[0] / 2.5
    assert Beyond().back_from(["a"]).after(5000.0).read["a"] < 1e-4
    once = Beyond().after(1.0, Scope.PROCESS).back_from(["a"])
    assert once.share(Scope.ALL, ["a"]) > once.share(Scope.ALL, ["b"])
