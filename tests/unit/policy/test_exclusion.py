"""Which machines are kept out of an attempt, and when those who wait are worth a pause."""

import hypothesis.strategies as st
import pytest
from hypothesis import given
from rosters import all_ready, formed, formed_any, roster_of, stops

from outlast.policy import exclusion
from outlast.policy.exclusion import FIRST_OUT_S, Exclusion, Exclusions, Intake, lasts_s
from outlast.policy.membership import Excludes, RosterPhase

# --- left out ------------------------------------------------------------------------------------


def out(host="b", *, for_s=600.0, spare_only=False):
    return Exclusion(host=host, reason="it failed", for_s=for_s, spare_only=spare_only)


def said(orders):
    return [order.goes for order in orders if isinstance(order, Excludes)]


def waits(roster, name, now_s=110.0):
    return roster.joined(name, now_s) + roster.ready(name, now_s)


@pytest.mark.parametrize("gentle", [False, True])
def test_a_machine_is_left_out_while_the_others_go_on(gentle):
    roster = roster_of("abc")
    orders = roster.left_out(out(), 110.0, gentle=gentle)
    assert said(orders) == [True]
    (stop,) = stops(orders)
    assert (stop.reason, stop.gentle) == ("b is left out: it failed", gentle)
    form = formed(all_ready(roster, "abc", 110.1))
    assert form.members == ("a", "c")
    assert roster.claimed(form, 110.2)
    assert not roster.tick(700.0)


@pytest.mark.parametrize("when", ["its time is over", "its owner says so"])
def test_it_is_taken_in_again(when):
    roster = roster_of("abc")
    roster.left_out(out(), 110.0)
    assert roster.claimed(formed(all_ready(roster, "abc", 110.1)), 110.2)
    orders = roster.readmit("b", 300.0) if when == "its owner says so" else roster.tick(710.0)
    (stop,) = stops(orders)
    assert stop.gentle
    assert set(formed(all_ready(roster, "ac", 711.0)).members) == set("abc")


def test_a_new_agent_on_the_same_machine_is_left_out_as_well():
    roster = roster_of("abc")
    roster.left_out(out(), 110.0)
    roster.lost("b", 110.1, "has ended", certain=True)
    form = formed(all_ready(roster, "ac", 110.1))
    assert roster.claimed(form, 110.2)
    roster.joined("new", 111.0, host="b")
    assert not roster.ready("new", 112.0)
    assert not roster.tick(200.0)


def test_it_stays_where_too_few_others_are_there():
    roster = roster_of("ab", min_nodes=2)
    orders = roster.left_out(out(), 110.0)
    assert said(orders) == [False]
    assert not stops(orders)
    roster.ready("b", 110.1)
    assert formed(roster.ready("a", 110.2)).members == ("a", "b")


def test_whoever_comes_later_takes_the_place_of_one_that_stayed():
    roster = roster_of("ab", min_nodes=2, max_nodes=2)
    roster.left_out(out(), 110.0)
    waits(roster, "c", 120.0)
    (stop,) = stops(roster.tick(130.0))
    assert stop.gentle
    assert formed(all_ready(roster, "ab", 131.0)).members == ("a", "c")


def test_who_is_told_that_it_stays_trains_and_who_is_left_out_does_not():
    """All machines ask in one attempt; half of them are needed."""
    hosts = "abcdefgh"
    roster = roster_of(hosts, min_nodes=4, max_nodes=8)
    told = {host: said(roster.left_out(out(host), 110.0)) for host in hosts}
    stay = [host for host in hosts if told[host] == [False]]
    assert [host for host in hosts if told[host] == [True]] == list("abcd")
    assert formed_late(roster, hosts).members == tuple(stay)


def formed_late(roster, hosts):
    return formed([*all_ready(roster, hosts, 111.0), *roster.tick(200.0)])


def test_what_an_agent_hears_holds_as_it_was_decided():
    """So a new coordinator has the same machines left out, and the same ones stay."""
    heard = Exclusions()
    heard.hear(out("a"), 0.0, goes=True)
    heard.hear(out("b"), 0.0, goes=False)
    heard.hear(out("c"), 0.0, goes=True)
    heard.hear(out("c"), 1.0, goes=False)  # it asks again, and is needed by now
    assert [heard.bars(host, 2.0) for host in "abc"] == [True, False, False]
    assert all(heard.holds(host, 2.0) for host in "abc")


def test_a_machine_that_is_left_out_is_told_for_how_long_and_why():
    known = Exclusions()
    known.put(out("a", for_s=600.0), 0.0)
    known.put(out("b", spare_only=True), 0.0)
    words = "its time to be over: left out for another 8 min (it failed)"
    assert [known.words(host, 120.0) for host in "abc"] == [words, "", ""]
    assert known.words("a", 601.0) == ""


def test_one_that_is_to_be_replaced_stays_unless_another_waits():
    roster = roster_of("abc", max_nodes=3)
    orders = roster.left_out(out(spare_only=True), 110.0)
    assert said(orders) == [False]
    assert not stops(orders)
    other = roster_of("abc", max_nodes=3)
    waits(other, "d")
    orders = other.left_out(out(spare_only=True), 120.0)
    assert said(orders) == [True]
    assert stops(orders)
    assert formed(all_ready(other, "abc", 120.1)).members == ("a", "c", "d")


def test_one_that_was_replaced_comes_back_where_there_is_room():
    roster = roster_of("abc", max_nodes=3)
    waits(roster, "d")
    roster.left_out(out(spare_only=True), 120.0)
    assert roster.claimed(formed(all_ready(roster, "abc", 120.1)), 120.2)
    roster.lost("c", 130.0, "was lost", certain=True)
    assert set(formed(all_ready(roster, "ad", 130.1)).members) == set("abd")


def test_the_coordinators_own_machine_can_be_left_out():
    roster = roster_of("abc")
    assert stops(roster.left_out(out("a"), 110.0))
    form = formed(all_ready(roster, "abc", 110.1))
    assert form.members == ("b", "c")
    assert roster.claimed(form, 110.2)
    assert roster.phase is RosterPhase.RUNNING


def test_said_twice_it_stops_the_others_once():
    roster = roster_of("abc")
    assert stops(roster.left_out(out(), 110.0))
    assert roster.left_out(out(), 110.1) == []
    assert roster.left_out(out(spare_only=True), 110.2) == []


def test_what_forms_with_it_does_not_start():
    roster = roster_of("abc")
    roster.lost("c", 110.0, "was lost", certain=True)
    form = formed(all_ready(roster, "ab", 110.1))
    orders = roster.left_out(out(), 110.2)
    assert not roster.claimed(form, 110.3)
    assert formed(orders).members == ("a",)


def test_one_whose_workers_have_ended_is_waited_for_a_while():
    roster = roster_of("abc")
    (stop,) = stops(roster.ended("b", 110.0, attempt=roster.number))
    assert stop.reason == "the workers of b ended"
    assert not formed_any(all_ready(roster, "ac", 110.1))
    assert formed(roster.tick(110.0 + roster.rules.stop_s)).members == ("a", "c")
    roster = roster_of("abc")
    roster.ended("b", 110.0, attempt=roster.number)
    all_ready(roster, "ac", 110.1)
    assert formed(roster.ready("b", 112.0)).members == ("a", "b", "c")


def test_an_old_word_that_workers_have_ended_is_no_trouble():
    roster = roster_of("abc")
    assert roster.ended("b", 110.0, attempt=roster.number - 1) == []


hosts = st.sampled_from("abcdef")


@given(
    outs=st.lists(st.tuples(hosts, st.floats(0, 100), st.booleans())),
    ready=st.lists(hosts, unique=True),
    least=st.integers(1, 4),
    more=st.integers(0, 3),
    now_s=st.floats(0, 120),
)
def test_nobody_is_left_out_at_the_price_of_the_job(outs, ready, least, more, now_s):
    exclusions = Exclusions()
    for host, for_s, spare_only in outs:
        exclusions.put(out(host, for_s=for_s, spare_only=spare_only), 0.0)
    most = least + more
    picked = exclusions.pick([(h, h) for h in ready], least=least, most=most, now_s=now_s)
    assert min(len(ready), least) <= len(picked) <= most
    assert [host for host in ready if host in picked] == list(picked)
    free = [host for host in ready if not exclusions.holds(host, now_s)]
    assert set(free[:most]) <= set(picked)
    if len(free) >= most:
        assert set(picked) == set(free[:most])
    barred = [host for host in picked if exclusions.bars(host, now_s)]
    assert not barred or len(picked) <= least
    assert {one.host for one in exclusions.left(now_s)} == {
        host for host in "abcdef" if exclusions.holds(host, now_s)
    }


@given(st.lists(st.tuples(hosts, st.floats(1, 100), st.floats(0, 50))))
def test_what_is_handed_on_to_the_next_coordinator_holds_as_long(outs):
    exclusions = Exclusions()
    for host, for_s, now_s in sorted(outs, key=lambda one: one[2]):
        exclusions.put(out(host, for_s=for_s), now_s)
    successor = Exclusions()
    for one in exclusions.left(50.0):
        successor.put(one, 50.0)
    for t in range(50, 160):
        assert all(
            exclusions.holds(host, t + 1e-6) == successor.holds(host, t + 1e-6)
            or exclusions.holds(host, t - 1e-6) != exclusions.holds(host, t + 2e-6)
            for host in "abcdef"
        )


def test_it_lasts_minutes_at_first_and_twice_as_long_each_time_that_it_comes_again():
    last, now_t, found = None, 0.0, []
    for _ in range(8):
        for_s = lasts_s(3600.0, last, now_t, 3600.0)
        found.append(for_s)
        last, now_t = (now_t + for_s, for_s), now_t + for_s + 600.0
    assert found == [120, 240, 480, 960, 1920, 3600, 3600, 3600]
    assert (
        lasts_s(3600.0, last, last[0] + 3601.0, 3600.0) == FIRST_OUT_S
    )  # the last time is forgotten
    assert lasts_s(15.0, None, 0.0, 3600.0) == lasts_s(15.0, (0.0, 15.0), 1.0, 3600.0) == 15.0


# --- worth a pause -------------------------------------------------------------------------------


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
