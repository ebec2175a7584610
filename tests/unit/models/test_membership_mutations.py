"""Each protection of the membership switched off in turn: its model notices.

Not noticed here, and looked at elsewhere: that of two who claim a number at once one has it
(``test_claims_interleaved``: here storage does a whole claim in one act), that an attempt's number
is larger than any that a member has heard of, and that no two machines are in one that do not reach
each other (``test_membership_machine``).
"""

import pytest
from membership_machine import Memberships
from switched_off import is_noticed

from outlast.launch.membership.coordinator import Coordinator
from outlast.launch.membership.node import Node
from outlast.launch.membership.search import Search
from outlast.policy.membership import Roster
from thorough import some


def a_minority_needs_a_claim(monkeypatch):
    monkeypatch.setattr(Roster, "_has_majority", lambda *_: True)


def who_is_overtaken_ends(monkeypatch):
    monkeypatch.setattr(Coordinator, "_overtaken", lambda _: None)


def a_coordinator_looks_for_a_newer_claim(monkeypatch):
    monkeypatch.setattr(Coordinator, "_looked", lambda *_: None)


def workers_end_with_their_coordinator(monkeypatch):
    lost = Node._coordinator_lost

    def silently(self, why, certain):
        tell, self.tell = self.tell, lambda _: None
        try:
            lost(self, why, certain)
        finally:
            self.tell = tell

    monkeypatch.setattr(Node, "_coordinator_lost", silently)


def workers_are_waited_for(monkeypatch):
    monkeypatch.setattr(Roster, "_must_wait", lambda *_: False)


def who_reaches_nobody_asks_storage(monkeypatch):
    monkeypatch.setattr(Search, "begin", lambda _: None)


PROTECTIONS = [
    a_minority_needs_a_claim,
    who_is_overtaken_ends,
    a_coordinator_looks_for_a_newer_claim,
    workers_end_with_their_coordinator,
    workers_are_waited_for,
    who_reaches_nobody_asks_storage,
]


def test_with_all_of_them_the_model_holds():
    """On the draws that the others begin with."""
    assert not is_noticed(Memberships, most=100)


@pytest.mark.parametrize("protection", some(PROTECTIONS, 4), ids=lambda one: one.__name__)
def test_without_it_the_model_fails(protection, monkeypatch):
    protection(monkeypatch)
    assert is_noticed(Memberships)
