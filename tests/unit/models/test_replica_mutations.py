"""Each protection of copies in other machines' memory switched off in turn: the model notices."""

import pytest
from replica_machine import Replicas
from switched_off import is_noticed

from outlast.checkpoint import transfer
from outlast.keeper import replicas
from outlast.keeper.replicas import IncomingReplica, ReplicaStore
from outlast.peer.seal import Bulk, Unsealer
from thorough import ALL, some


def an_older_copy_is_refused(monkeypatch):
    monkeypatch.setattr(replicas, "when", lambda save: (0, 0, 0))


def each_block_is_compared(monkeypatch):
    def believe(self, file, index):
        self._missing.discard((file, index))

    monkeypatch.setattr(IncomingReplica, "arrived", believe)


def every_message_is_sealed(monkeypatch):
    monkeypatch.setattr(Unsealer, "_check", lambda *_: None)
    monkeypatch.setattr(Bulk, "check", lambda *_: None)


def the_copy_stays_until_the_next_is_whole(monkeypatch):
    receive = ReplicaStore.receive

    def at_once(self, offer, small):
        incoming = receive(self, offer, small)
        if incoming is not None:
            self._holdings.books.copies.pop(offer.node, None)
        return incoming

    monkeypatch.setattr(ReplicaStore, "receive", at_once)


def the_copy_before_stays_until_the_next_comes(monkeypatch):
    adopt = ReplicaStore.adopt

    def alone(self, incoming):
        adopt(self, incoming)
        self._holdings.books.before.clear()

    monkeypatch.setattr(ReplicaStore, "adopt", alone)


def another_copy_is_asked_for(monkeypatch):
    monkeypatch.setattr(transfer, "CopiesReader", ())


PROTECTIONS = [
    an_older_copy_is_refused,
    each_block_is_compared,
    every_message_is_sealed,
    the_copy_stays_until_the_next_is_whole,
    the_copy_before_stays_until_the_next_comes,
    another_copy_is_asked_for,
]


def test_with_all_of_them_the_model_holds():
    """On the draws that the others begin with."""
    assert not is_noticed(Replicas, most=100 if ALL else 40)


@pytest.mark.parametrize("protection", some(PROTECTIONS, 2), ids=lambda one: one.__name__)
def test_without_it_the_model_fails(protection, monkeypatch):
    protection(monkeypatch)
    assert is_noticed(Replicas, most=1500)
