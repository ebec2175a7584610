"""Whether those who wait are worth a pause."""

import pytest

from outlast.policy import exclusion
from outlast.policy.exclusion import Intake


def running(members=8, pause_s=1.0):
    one = Intake()
    one.formed(members, 0.0, paused_s=0.0)
    one.formed(members, 10.0, paused_s=pause_s)
    return one


def is_worth_it(one, waiting, *, members=8, warming=0, now_s=100.0):
    return one.is_worth_it(waiting, members=members, warming=warming, now_s=now_s)


def test_a_new_machine_is_taken_in_after_a_moment_for_others():
    one = running()
    assert not is_worth_it(one, [("a", 99.5)])
    assert is_worth_it(one, [("a", 99.0)])
    assert not is_worth_it(one, [])


def test_those_that_warm_up_are_waited_for_but_not_for_ever():
    one = running()
    assert not is_worth_it(one, [("a", 95.0)], warming=1)
    assert is_worth_it(one, [("a", 90.0)], warming=1)


def test_a_pause_of_many_for_one_that_will_not_stay():
    one = running(members=10_000, pause_s=30.0)
    assert not is_worth_it(one, [("a", 0.0)], members=10_000)
    assert is_worth_it(one, [(f"h{n}", 0.0) for n in range(200)], members=10_000)


def test_losses_shorten_the_stay_that_is_expected():
    one = running()
    before_s = one.stay_s
    for number in range(10):
        one.lost(f"h{number}", 20.0)
    assert one.stay_s < before_s / 5
    one.formed(8, 1e6, paused_s=1.0)
    assert one.stay_s > 10 * 3600


def test_a_host_that_is_lost_again_and_again_waits_longer_each_time():
    one = running()
    waits_s = []
    for number in range(1, 12):
        at_s = 20.0 + number
        one.lost("a", at_s)
        wait_s = 0.0
        while not is_worth_it(one, [("a", 0.0)], members=1, now_s=at_s + wait_s):
            wait_s += 1.0
        waits_s.append(wait_s)
    assert waits_s[0] == 0.0
    assert waits_s[1:4] == [5.0, 10.0, 20.0]
    assert max(waits_s) == exclusion.PENALTY_MAX_S
    assert is_worth_it(one, [("b", 0.0)], members=1, now_s=40.0)


def test_an_hour_later_it_is_forgotten():
    one = running()
    for at_s in (20.0, 21.0, 22.0):
        one.lost("a", at_s)
    one.lost("a", 22.0 + exclusion.LOSS_MEMORY_S)
    assert is_worth_it(one, [("a", 0.0)], members=1, now_s=22.0 + exclusion.LOSS_MEMORY_S)


def test_hosts_that_never_come_back_are_not_remembered_for_ever():
    one = running()
    for number in range(10_000):
        one.lost(f"pod-{number}", 20.0 + 60.0 * number)
    assert len(one._lost) <= 2 * exclusion.HOSTS_KEPT


@pytest.mark.parametrize("members", [1, 100])
def test_two_agents_of_one_host_are_two_machines(members):
    one = running(members=members, pause_s=600.0)
    one.lost("x", 20.0)
    alone = is_worth_it(one, [("a", 0.0)] * 1, members=members)
    assert is_worth_it(one, [("a", 0.0)] * 100, members=members)
    assert alone == (members == 1)
