"""Agents that hang while their kernels answer: workers train on, and nobody is held up by them."""

import pytest
from rosters import all_ready, formed, formed_any, roster_of, stops

from outlast.policy.membership import EndJob, MembershipRules, Roster, RosterPhase, StopWorkers

HEARD_S = 150.0  # long after the attempt has begun


def test_a_running_attempt_goes_on_with_an_agent_that_hangs():
    roster = roster_of("abc")
    assert roster.hung("c", 180.0, heard_s=HEARD_S) == []
    assert roster.tick(10_000.0) == []
    assert roster.moves("c", 10_001.0) == []
    assert roster.phase is RosterPhase.RUNNING


def test_the_next_attempt_does_not_wait_for_it():
    roster = roster_of("abc")
    roster.hung("c", 180.0, heard_s=HEARD_S)
    assert stops(roster.ready("b", 190.0))
    form = formed(roster.ready("a", 190.1))
    assert form.members == ("a", "b")
    assert not form.required


def test_one_that_hangs_while_it_is_waited_for_is_waited_for_no_longer():
    roster = roster_of("abc")
    roster.joined("d", 110.0)
    roster.ready("d", 110.0)
    (stop,) = stops(roster.tick(200.0))
    assert stop.gentle
    assert not formed_any(all_ready(roster, "ab", 201.0))
    assert formed(roster.hung("c", 230.0, heard_s=200.0)).members == ("a", "b", "d")


def test_it_gives_nobody_a_majority():
    roster = roster_of("abcd")
    roster.hung("d", 180.0, heard_s=HEARD_S)
    roster.lost("c", 190.0, "has ended", certain=True)
    assert formed([*all_ready(roster, "ab", 190.1), *roster.tick(200.0)]).required


@pytest.mark.parametrize("how", ["waits", "was about to take part"])
def test_it_takes_part_in_nothing_new_until_it_moves(how):
    roster = Roster(MembershipRules(min_nodes=2, max_nodes=3), 0.0, first="a")
    for name in "abc":
        roster.joined(name, 0.0)
    if how == "waits":
        assert not formed_any(all_ready(roster, "ac", 0.0))
        roster.hung("c", 0.5, heard_s=0.0)
        form = formed([*roster.ready("b", 1.0), *roster.tick(10.0)])
    else:
        stale = formed(all_ready(roster, "abc", 0.0))
        orders = roster.hung("c", 0.5, heard_s=0.0)
        assert not roster.claimed(stale, 0.6)
        form = formed([*orders, *roster.tick(10.0)])
    assert form.members == ("a", "b")
    assert roster.claimed(form, 10.1)
    orders = [*roster.moves("c", 20.0), *roster.tick(40.0)]
    assert stops(orders) == [StopWorkers(reason="new machines are taken in", gentle=True)]


def test_one_that_may_never_have_started_its_workers_ends_the_attempt():
    roster = roster_of("abc")
    (stop,) = stops(roster.hung("c", 131.0, heard_s=101.0))
    assert stop == StopWorkers(reason="the agent of c does not move")
    assert formed(all_ready(roster, "ab", 131.1)).members == ("a", "b")


def test_the_job_ends_when_all_others_have_finished():
    roster = roster_of("abc")
    roster.hung("c", 180.0, heard_s=HEARD_S)
    assert roster.done("a", 190.0) == []
    assert roster.done("b", 190.0) == [EndJob(exit_code=0, reason="")]


def test_one_that_moves_again_has_ended_its_workers_and_comes_back():
    roster = roster_of("abc")
    roster.hung("c", 180.0, heard_s=HEARD_S)
    roster.ready("b", 190.0)
    roster.claimed(formed(roster.ready("a", 190.1)), 190.2)
    assert roster.moves("c", 300.0) == []
    roster.ready("c", 300.1, attempt=1)
    assert stops(roster.tick(320.0)) == [
        StopWorkers(reason="new machines are taken in", gentle=True)
    ]


def test_one_that_hung_and_is_lost_is_lost():
    roster = roster_of("abc")
    roster.hung("c", 180.0, heard_s=HEARD_S)
    assert stops(roster.lost("c", 190.0, "was lost", certain=False))
    assert formed(all_ready(roster, "ab", 190.1)).members == ("a", "b")


def test_one_that_has_left_others_to_go_on_counts_no_hanging_machine():
    roster = roster_of("abc", min_nodes=2)
    roster.hung("c", 180.0, heard_s=HEARD_S)
    (leaves,) = roster.leaving("b", 190.0)
    assert not leaves.goes_on


def test_after_a_hang_of_its_own_nothing_forms_before_all_losses_are_heard():
    roster = roster_of("abc")
    assert stops(roster.ready("a", 101.0, attempt=roster.attempt))
    late_s = 101.0 + roster.rules.stop_s + 1.0  # meanwhile the others have turned away
    assert roster.lost("b", late_s, "has ended", certain=True) == []
    form = formed(roster.lost("c", late_s, "has ended", certain=True) + roster.tick(late_s))
    assert form.members == ("a",)
    assert form.required  # by itself it is no majority
