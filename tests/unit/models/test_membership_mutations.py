"""Each protection of the membership switched off in turn: its model notices."""

import pytest
from membership_machine import Memberships
from switched_off import is_noticed

from outlast.launch.membership.coordinator import Coordinator
from outlast.launch.membership.node import Node
from outlast.launch.membership.search import Search
from outlast.peer.claims import Claims
from outlast.policy.membership import Roster


def a_minority_needs_a_claim(monkeypatch):
    monkeypatch.setattr(Roster, "_has_majority", lambda *_: True)


def of_two_who_claim_one_has_it(monkeypatch):
    put = Claims._put

    def put_anyway(self, claim):
        put(self, claim)
        return True

    monkeypatch.setattr(Claims, "_put", put_anyway)


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


def a_number_is_larger_than_any_that_was_heard_of(monkeypatch):
    joined = Roster.joined
    monkeypatch.setattr(
        Roster, "joined", lambda self, *a, **more: joined(self, *a, **{**more, "attempt": 0})
    )


def who_joins_anew_has_no_workers(monkeypatch):
    monkeypatch.setattr(Roster, "_must_wait", lambda *_: False)


def one_that_is_not_reached_is_left_out(monkeypatch):
    monkeypatch.setattr(Roster, "apart", lambda *_: [])


def who_reaches_nobody_asks_storage(monkeypatch):
    monkeypatch.setattr(Search, "begin", lambda _: None)


PROTECTIONS = [
    a_minority_needs_a_claim,
    of_two_who_claim_one_has_it,
    who_is_overtaken_ends,
    a_coordinator_looks_for_a_newer_claim,
    workers_end_with_their_coordinator,
    a_number_is_larger_than_any_that_was_heard_of,
    who_joins_anew_has_no_workers,
    one_that_is_not_reached_is_left_out,
    who_reaches_nobody_asks_storage,
]


@pytest.mark.parametrize("protection", PROTECTIONS, ids=lambda one: one.__name__)
def test_without_it_the_model_fails(protection, monkeypatch):
    protection(monkeypatch)
    assert is_noticed(Memberships)
