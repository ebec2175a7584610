"""What the agent's main thread finds in its mailbox."""

from outlast.launch.membership.handler import Mailbox
from outlast.launch.membership.messages import (
    Departs,
    Go,
    Halt,
    Member,
    Refused,
    Remains,
    Waits,
    Welcome,
)
from outlast.policy.membership import MembershipRules


def go(attempt, names):
    members = tuple(Member(node=name, host=name, address="a:1") for name in names)
    return Go(attempt=attempt, members=members, store="a:2")


def test_who_has_left_is_known_until_the_attempt_after_that():
    mail = Mailbox()
    mail.tell(go(1, "abc"))
    mail.tell(Departs(node="c", host="c", goes_on=True))
    mail.tell(go(2, "ab"))
    assert set(mail.departs) == {"c"}  # it left, and was not lost
    mail.tell(go(3, "ab"))
    assert not mail.departs


def test_one_that_leaves_later_has_not_left():
    mail = Mailbox()
    mail.tell(go(1, "abc"))
    mail.tell(Departs(node="b", host="b", goes_on=True))
    mail.tell(Departs(node="c", host="c", goes_on=True))
    mail.tell(Remains(node="c"))
    assert set(mail.departs) == {"b"}
    mail.tell(go(2, "abc"))  # its word was late, and says the same
    assert not mail.departs


def test_an_attempt_that_begins_ends_the_word_to_stop():
    mail = Mailbox()
    mail.tell(Halt(reason="x"))
    mail.tell(go(1, "a"))
    assert mail.halt is None
    assert mail.go.attempt == 1


def test_what_the_job_was_started_with_elsewhere_is_known():
    mail = Mailbox()
    mail.tell(MembershipRules(min_nodes=2, max_nodes=3))
    mail.tell(Refused(reason="another script"))
    assert mail.rules.max_nodes == 3
    assert mail.refused == "another script"


def test_where_others_train_is_known_once_it_is_said_how_many():
    mail = Mailbox()
    mail.tell(Welcome(node="a", min_nodes=1, max_nodes=3, runs=True))
    assert not mail.knows
    mail.tell(Waits(words="a place", runs=True, workers=(2, 2)))
    assert mail.knows
    assert mail.workers == (2, 2)
    mail.tell(go(2, "abc"))
    assert mail.workers == ()


def test_where_nobody_trains_is_known_at_once():
    mail = Mailbox()
    mail.tell(Welcome(node="a", min_nodes=1, max_nodes=3))
    assert mail.knows
    assert mail.workers == ()
