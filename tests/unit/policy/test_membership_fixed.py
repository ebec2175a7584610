"""Data that are tied to the number of machines, and how long a gentle stop is waited for."""

import pytest
from rosters import all_ready, formed, formed_any, roster_of, stops

from outlast.policy.membership import Form, MembershipRules, Roster, RosterPhase


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
