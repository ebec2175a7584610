"""What is said of copies: by whom each step is held, and nothing before that is known."""

import threading
from types import SimpleNamespace

import pytest
from keeper_fakes import JOB
from unit_names import save_of

from outlast.keeper.memory import Holdings
from outlast.keeper.peers import Peers
from outlast.keeper.wire import CopyMade


@pytest.fixture(name="told")
def _told():
    return []


def peers_of(told, replicas=None):
    setup = SimpleNamespace(job=JOB, replicas=replicas, each_step=True, rate_bytes=None)
    return Peers(
        setup,
        Holdings({}, lambda *_: None),
        threading.RLock(),
        wait_for_earlier=lambda _: None,
        record=lambda *_, **__: None,
        on_copied=lambda attempt, word: told.append((attempt, word)),
    )


def test_before_it_is_known_who_is_to_hold_copies_nothing_counts_as_held(told):
    """A keeper that is started again has not heard of the other machines yet."""
    peers = peers_of(told)
    peers.committed(save_of(3, serial=48))
    assert not told
    assert peers.copied(1) == 0


@pytest.mark.parametrize(("replicas", "is_all"), [(None, True), (0, False)])
def test_where_nobody_is_to_hold_copies_it_is_held_at_once(told, replicas, is_all):
    peers = peers_of(told, replicas)
    peers.committed(save_of(3, serial=48), is_all=is_all)
    assert told == [(1, CopyMade(step=3, serial=48, num=0))]
    assert peers.copied(1) == 48
    assert peers.copied(2) == 0
