"""The coordinator's mind: one thing after the other (all at once: see the machine)."""

import pytest
from rosters import all_ready, formed, formed_any, roster_of, stops

from outlast.policy.membership import (
    EndJob,
    Form,
    Leaves,
    MembershipRules,
    Roster,
    RosterPhase,
    StopWorkers,
)

# --- who takes part ------------------------------------------------------------------------------


def test_a_lost_machine_is_acted_upon_at_once():
    roster = roster_of("abc")
    (stop,) = roster.lost("b", 110.0, "was lost", certain=False)
    assert stop == StopWorkers(reason="b was lost")
    form = formed(all_ready(roster, "ac", 110.1))
    assert form == Form(attempt=2, members=("a", "c"), required=False)


@pytest.mark.parametrize("certain", [True, False])
@pytest.mark.parametrize("names", ["ab", "abcd"])
def test_half_of_the_members_need_the_claim_and_do_not_wait_for_the_other_half(names, certain):
    here, gone = names[: len(names) // 2], names[len(names) // 2 :]
    roster = roster_of(names)
    for name in gone:
        roster.lost(name, 110.0, "was lost", certain=certain)
    assert formed(all_ready(roster, here, 110.1)).required


def test_fewer_than_half_leave_their_turn_to_most_that_are_silent():
    roster = roster_of("abc")
    roster.lost("b", 109.0, "was lost", certain=False)
    roster.lost("c", 110.0, "was lost", certain=False)
    assert not roster.ready("a", 110.1)
    assert roster.lacks_majority
    assert not roster.tick(115.9)
    assert formed(roster.tick(116.0)).required


@pytest.mark.parametrize("order", ["bc", "cb"])
def test_one_that_is_silent_has_no_majority_where_another_has_ended(order):
    roster = roster_of("abc")
    for name in order:
        roster.lost(name, 110.0, "was lost", certain=name == "b")
    assert formed(roster.ready("a", 110.1)).required


def test_an_heir_does_not_wait_for_members_that_have_ended():
    successor = Roster(
        MembershipRules(min_nodes=1, max_nodes=3),
        100.0,
        first="b",
        attempt=1,
        members="abc",
        ended="a",
        awaited="bc",
    )
    successor.joined("b", 100.0)
    assert not successor.ready("b", 100.0)
    assert formed(successor.has_ended("c", 100.1)).required


def test_what_is_heard_of_the_end_of_one_that_is_here_is_not_believed():
    roster = roster_of("abc")
    assert not roster.has_ended("b", 110.0)
    assert roster.phase is RosterPhase.RUNNING


def test_most_of_those_who_have_not_left_may_go_on_elsewhere():
    roster = roster_of("abcd")
    roster.leaving("d", 109.0)
    roster.lost("d", 109.1, "left", certain=True, left=True)
    for name in "bc":
        roster.lost(name, 110.0, "was lost", certain=False)
    assert not roster.ready("a", 110.1)
    assert formed(roster.tick(116.0)).required


def test_a_majority_is_lacked_only_while_nothing_forms_or_runs():
    roster = roster_of("abc")
    assert not roster.lacks_majority
    for name in "bc":
        roster.lost(name, 110.0, "was lost", certain=False)
    roster.ready("a", 110.1)
    assert roster.lacks_majority
    roster.joined("b", 111.0)
    assert not roster.lacks_majority
    assert roster.claimed(formed(roster.ready("b", 111.1)), 111.2)
    assert not roster.lacks_majority


def test_a_majority_lacks_machines_only_while_nothing_forms_or_runs():
    roster = roster_of("abc", min_nodes=3)
    assert not roster.lacks_machines
    roster.lost("c", 110.0, "was lost", certain=False)
    all_ready(roster, "ab", 110.1)
    assert roster.lacks_machines
    assert not roster.lacks_majority
    roster.joined("c", 111.0)
    assert not roster.lacks_machines
    assert not roster.ready("c", 111.1)  # it waits a little: there may be more
    assert roster.claimed(formed(roster.tick(115.0)), 115.1)
    roster.lost("c", 116.0, "was lost", certain=False)
    assert roster.lacks_machines


def test_whoever_said_that_it_leaves_does_not_count():
    roster = roster_of("ab")
    roster.leaving("b", 110.0)
    roster.lost("b", 110.0, "left", certain=True, left=True)
    assert not formed(roster.ready("a", 110.1)).required


@pytest.mark.parametrize("what", ["lost", "leaving", "joined", "apart"])
def test_a_newcomer_that_goes_before_the_attempt_starts_makes_it_void(what):
    roster = Roster(MembershipRules(min_nodes=2, max_nodes=3), 0.0, first="a")
    for name in "abc":
        roster.joined(name, 0.0)
    form = formed(all_ready(roster, "abc", 0.0))
    orders = {
        "lost": lambda: roster.lost("c", 0.1, "went", certain=True),
        "leaving": lambda: roster.leaving("c", 0.1),
        "joined": lambda: roster.joined("c", 0.1),
        "apart": lambda: roster.apart("b", "c", 0.1),
    }[what]()
    assert not roster.claimed(form, 0.2)
    assert roster.phase is not RosterPhase.RUNNING
    orders += roster.tick(20.0)
    assert formed(orders).members == ("a", "b")
    assert formed(orders).attempt == form.attempt + 1


def test_a_crashed_machine_is_not_one_that_has_finished():
    roster = roster_of("ab")
    assert roster.done("a", 110.0) == []
    orders = roster.lost("b", 110.1, "was lost", certain=True)
    assert stops(orders)
    assert not any(isinstance(order, EndJob) for order in orders)


def test_the_job_ends_when_all_have_finished_even_if_some_are_gone_by_then():
    roster = roster_of("ab")
    roster.done("b", 110.0)
    assert not stops(roster.lost("b", 110.1, "has ended", certain=True))
    assert roster.done("a", 110.2) == [EndJob(exit_code=0, reason="")]


def test_a_word_that_was_on_its_way_when_the_attempt_began_stops_nothing():
    roster = roster_of("abc")
    roster.ready("b", 110.0, attempt=1)
    form = formed(all_ready(roster, "ac", 110.1))
    assert roster.claimed(form, 110.2)
    assert roster.ready("b", 110.3, attempt=1) == []
    assert stops(roster.ready("b", 110.4, attempt=2))


def test_an_old_word_does_not_make_a_machine_ready_whose_workers_run():
    roster = roster_of("abc")
    roster.ready("a", 110.0, attempt=1)
    roster.ready("b", 110.0, attempt=0)
    assert roster.phase is RosterPhase.STOPPING
    assert not roster.ready("c", 110.1, attempt=1)
    assert formed(roster.ready("b", 110.2, attempt=1)).members == ("a", "b", "c")


def test_a_member_that_connects_anew_has_ended_its_workers():
    roster = roster_of("abc")
    assert stops(roster.joined("b", 110.0))


def test_workers_that_stop_gently_are_ended_when_one_is_lost():
    roster = roster_of("abc")
    roster.joined("d", 110.0)
    roster.ready("d", 110.0)
    assert stops(roster.tick(200.0)) == [
        StopWorkers(reason="new machines are taken in", gentle=True)
    ]
    roster.ready("a", 200.1)
    assert stops(roster.lost("b", 200.2, "was lost", certain=False)) == [
        StopWorkers(reason="b was lost")
    ]
    form = formed(roster.tick(205.3))
    assert form.members == ("a", "d")  # c did not end its workers in time


def test_workers_that_do_not_stop_gently_are_ended_before_others_begin():
    roster = roster_of("ab")
    roster.joined("c", 110.0)
    roster.ready("c", 110.0)
    roster.tick(120.0)
    roster.ready("a", 120.1)
    assert roster.tick(719.0) == []
    (stop,) = roster.tick(720.0)
    assert not stop.gentle
    assert formed(roster.ready("b", 720.1)).members == ("a", "b", "c")


def test_one_that_leaves_does_not_hurry_the_others():
    roster = roster_of("abc")
    (leaves,) = roster.leaving("c", 110.0)
    assert leaves == Leaves(node="c", goes_on=True)
    (stop,) = roster.ready("a", 115.0)
    assert stop.gentle
    assert roster.lost("c", 115.1, "left", certain=True, left=True) == []
    assert formed(roster.ready("b", 116.0)).members == ("a", "b")


def test_one_that_leaves_in_the_midst_of_a_step_leaves_the_others_waiting():
    roster = roster_of("abc")
    roster.leaving("c", 110.0)
    (stop,) = roster.lost("c", 111.0, "left", certain=True, left=True, broke=True)
    assert not stop.gentle


def test_one_that_leaves_later_is_waited_for_and_takes_part():
    roster = roster_of("abc")
    roster.leaving("b", 110.0)
    roster.leaving("c", 110.0)
    assert stops(roster.ready("a", 110.1))  # it has nobody to wait for but b
    other = roster_of("abc")
    other.leaving("b", 110.0)
    other.leaving("c", 110.0)
    assert other.remains("b", 110.1) == []
    (stop,) = other.ready("a", 110.2)
    assert stop.gentle
    assert formed(other.ready("b", 110.3)).members == ("a", "b")
    late = roster_of("abcd")
    late.leaving("b", 110.0)
    late.ready("a", 110.1)
    late.ready("c", 110.2)
    assert late.remains("b", 110.3) == []  # in time: the last one is not ready yet
    assert late.ready("d", 110.4) == []
    assert formed(late.ready("b", 110.5)).members == ("a", "b", "c", "d")


def test_a_coordinator_that_leaves_later_forms_the_next_attempt():
    roster = roster_of("abc")
    roster.leaving("a", 110.0)
    roster.remains("a", 110.1)
    assert formed(all_ready(roster, "bca", 110.2)).members == ("a", "b", "c")


def test_a_crash_while_another_leaves_is_no_gentle_matter():
    roster = roster_of("abc")
    roster.leaving("c", 110.0)
    (stop,) = roster.lost("b", 111.0, "was lost", certain=False)
    assert not stop.gentle


def test_those_who_never_came_to_a_new_coordinator_are_waited_for_once():
    roster = Roster(
        MembershipRules(min_nodes=1, max_nodes=4),
        0.0,
        first="b",
        attempt=5,
        members="abc",
        awaited="bc",
    )
    roster.joined("b", 0.0, attempt=5)
    assert roster.ready("b", 0.0, attempt=5) == []
    form = formed(roster.tick(9.1))
    assert form.attempt == 6
    assert form.required
    roster.claimed(form, 9.2)
    assert formed(roster.ready("b", 20.0, attempt=6)).attempt == 7  # at once


def test_pairs_that_are_cut_lose_one_machine_and_get_it_back():
    roster = roster_of("abcd")
    roster.apart("b", "d", 110.0)
    roster.apart("c", "d", 110.1)
    assert roster.tick(110.9) == []
    (stop,) = stops(roster.tick(111.0))
    assert stop.reason == "d cannot reach every other machine"
    form = formed(all_ready(roster, "dabc", 111.1))
    assert form.members == ("a", "b", "c")
    roster.claimed(form, 111.2)
    assert roster.tick(1000.0) == []
    roster.together("b", "d", 1000.0)
    assert roster.tick(1010.0) == []
    assert stops(roster.together("c", "d", 1010.0))
    assert formed(all_ready(roster, "abc", 1021.0)).members == ("a", "b", "c", "d")


def test_machines_that_come_all_the_time_do_not_keep_the_others_from_beginning():
    roster = Roster(MembershipRules(min_nodes=1, max_nodes=8), 0.0, first="a")
    roster.joined("a", 0.0)
    orders = roster.ready("a", 0.0)
    for second in range(1, 40):
        orders += roster.lost("z", second, "went", certain=True)
        orders += roster.joined("z", second)
        if orders:
            break
    assert formed(orders).members == ("a",)
    assert second < 30


def test_the_coordinators_machine_is_first_and_others_keep_their_order():
    roster = Roster(
        MembershipRules(min_nodes=1, max_nodes=3),
        0.0,
        first="c",
        attempt=5,
        members="abcd",
        ended="a",
        awaited="cd",
    )
    for name in "cxdb":
        roster.joined(name, 0.0)
    orders = all_ready(roster, "cxdb", 0.1)
    assert formed(orders).members == ("c", "b", "d")


def test_a_leaving_coordinator_forms_nothing():
    roster = roster_of("abc")
    roster.leaving("a", 110.0)
    assert not [o for o in all_ready(roster, "bc", 110.1) if isinstance(o, Form)]
    assert roster.waits_for == "another coordinator"


def test_words_name_a_few_of_many():
    names = [f"n{number}" for number in range(50)]
    roster = Roster(MembershipRules(min_nodes=1, max_nodes=50), 0.0, first="n0")
    for name in names:
        roster.joined(name, 0.0)
    roster.claimed(formed(all_ready(roster, names, 0.0)), 0.0)
    roster.lost("n7", 10.0, "was lost", certain=True)
    assert roster.waits_for == "the workers of n0, n1, n2 and 46 others to end"


def test_numbers_that_others_have_heard_of_are_not_used_again():
    roster = Roster(MembershipRules(min_nodes=2, max_nodes=2), 0.0, first="a", held=3)
    roster.joined("a", 0.0)
    roster.joined("b", 0.0, attempt=9)
    assert formed(all_ready(roster, "ab", 0.1)).attempt == 10


def test_machines_that_were_waited_for_do_not_make_newcomers_expensive():
    roster = roster_of("abcdefgh", min_nodes=8, max_nodes=9)
    roster.lost("h", 110.0, "was lost", certain=True)
    assert not formed_any(all_ready(roster, "abcdefg", 110.1))
    roster.joined("i", 7200.0)
    form = formed([*roster.ready("i", 7200.0), *roster.tick(7300.0)])
    assert roster.claimed(form, 7300.1)
    roster.joined("j", 7400.0)
    roster.ready("j", 7400.0)
    assert stops(roster.tick(7402.0)) == [
        StopWorkers(reason="new machines are taken in", gentle=True)
    ]


def test_a_machine_whose_places_can_be_taken_again_has_all_stop_gently():
    roster = roster_of("abc")
    (stop,) = stops(roster.fill("b", 110.0))
    assert stop.gentle
    assert stop.reason == "all workers of b are back"
    assert formed(all_ready(roster, "abc", 110.1)).members == ("a", "b", "c")


def test_one_that_is_in_no_attempt_has_no_places():
    roster = roster_of("abc")
    roster.joined("d", 110.0)
    assert not stops(roster.fill("d", 110.0))
    roster.lost("b", 120.0, "was lost", certain=True)
    assert not stops(roster.fill("c", 120.1))  # all stop already


# --- data that are tied to the number of machines ------------------------------------------------


def test_a_lost_machine_is_waited_for_where_the_data_are_tied():
    roster = roster_of("abc")
    roster.fix(3)
    assert stops(roster.lost("b", 110.0, "was lost", certain=False))
    assert not formed_any(all_ready(roster, "ac", 110.1))
    assert not roster.tick(1000.0)
    assert roster.waits_for == "machines: 2 of 3 are here, and the job's loader is tied to 3"
    roster.joined("new", 1000.0)
    assert formed(roster.ready("new", 1000.5)).members == ("a", "c", "new")


def test_nobody_is_taken_in_and_whoever_waits_takes_the_place_of_a_lost_one():
    roster = roster_of("abc")
    roster.fix(3)
    roster.joined("d", 110.0)
    roster.ready("d", 110.0)
    assert roster.tick(10_000.0) == []
    roster.lost("b", 10_001.0, "was lost", certain=True)
    assert formed(all_ready(roster, "ac", 10_001.1)).members == ("a", "c", "d")


def test_a_tie_that_is_over_lets_others_in():
    roster = roster_of("abc")
    roster.fix(3)
    roster.joined("d", 110.0)
    roster.ready("d", 110.0)
    roster.fix(0)
    assert stops(roster.tick(200.0))
    assert roster.rules == roster.asked


def test_whoever_leaves_a_job_that_is_tied_ends_it_unless_somebody_waits():
    roster = roster_of("abc")
    roster.fix(3)
    assert not roster.leaving("b", 110.0)[0].goes_on
    other = roster_of("abc")
    other.fix(3)
    other.joined("d", 110.0)
    other.ready("d", 110.0)
    assert other.leaving("b", 120.0)[0].goes_on


def test_a_new_coordinator_that_was_told_waits_as_well():
    roster = Roster(
        MembershipRules(min_nodes=1, max_nodes=4),
        0.0,
        first="b",
        attempt=5,
        members="abc",
        awaited="bc",
    )
    roster.fix(3)
    roster.joined("b", 0.0, attempt=5)
    roster.joined("c", 0.0, attempt=5)
    all_ready(roster, "bc", 0.1)
    assert not formed_any(roster.tick(100.0))
    assert roster.phase is RosterPhase.GATHERING
    roster.joined("d", 101.0)
    assert isinstance(formed(roster.ready("d", 101.0)), Form)


@pytest.mark.parametrize(
    ("needs_s", "limit_s"),
    [(0.1, 10.0), (7.0, 35.0), (1e9, 600.0)],
    ids=["short steps", "long steps", "bounded"],
)
def test_a_gentle_stop_is_waited_for_as_long_as_the_jobs_own_steps_suggest(needs_s, limit_s):
    roster = roster_of("ab")
    roster.joined("c", 110.0)
    roster.ready("c", 110.0)
    assert stops(roster.tick(120.0))[0].gentle
    roster.needs(needs_s, 120.1)
    roster.ready("a", 120.2)
    assert roster.tick(120.0 + limit_s - 0.1) == []
    (stop,) = roster.tick(120.0 + limit_s)
    assert stop.reason == "workers did not stop by themselves"
    assert not stop.gentle
    assert formed(roster.ready("b", 120.1 + limit_s)).members == ("a", "b", "c")


def test_a_word_about_steps_changes_nothing_else():
    roster = roster_of("ab")
    assert roster.needs(1.0, 110.0) == []
    roster.lost("b", 120.0, "was lost", certain=True)
    assert roster.needs(1.0, 120.1) == []
    assert roster.waits_for == "the workers of a to end"


# --- agents that hang while their kernels answer -------------------------------------------------


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
