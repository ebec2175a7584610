"""Keepers hear of each attempt and of who has formed it, whether they talk to others or not."""

import types

import pytest

from outlast import config
from outlast.errors import StorageError
from outlast.keeper.wire import Lost
from outlast.launch.membership.messages import Go, Member
from outlast.launch.run import introduce, lost_ranks


class Keeper:
    """What ``introduce`` needs of a supervisor."""

    def __init__(self, problem):
        self.problem, self.told = problem, []

    def serve(self, host, key, *, node, tls):
        if self.problem:
            raise StorageError(self.problem)
        return host, 7

    def tell_members(self, attempt, members, *, term, lost):
        self.told.append((attempt, [one.node for one in members], term))
        self.lost = lost
        return True


@pytest.mark.parametrize(
    ("problem", "members"), [("", ["a", "b"]), ("no such address", [])], ids=["talks", "alone"]
)
def test_a_keeper_is_told_of_attempts(problem, members, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keepers = []
    member = types.SimpleNamespace(
        host="10.0.0.1",
        key=b"k",
        me=types.SimpleNamespace(node="a"),
        announce_keeper=lambda host, port: keepers.append((host, port)),
    )
    keeper = Keeper(problem)
    introduce(member, keeper, config.load(environ={}))
    both = tuple(Member(node=n, host=n, address="", keeper=("10.0.0.1", 7)) for n in "ab")
    member.on_attempt(Go(attempt=3, members=both, store="", term="r"))
    assert keeper.told == [(3, members, "r")]
    assert keepers == ([] if problem else [("10.0.0.1", 7)])


def test_a_keeper_is_told_which_ranks_are_lost_but_not_of_those_that_left_or_wait():
    def go(attempt, nodes, aside=()):
        members = tuple(
            Member(node=n, host=n, address="", workers=1 + "abcd".index(n)) for n in nodes
        )
        return Go(attempt=attempt, members=members, store="", aside=aside)

    last, now = go(3, "abcd"), go(4, "a", aside=("b",))
    assert lost_ranks(last, now, lambda node: node == "c") == (Lost(attempt=3, first=6, count=4),)
    assert lost_ranks(last, now, lambda _: False) == (
        Lost(attempt=3, first=3, count=3),
        Lost(attempt=3, first=6, count=4),
    )
    assert lost_ranks(last, last, lambda _: False) == ()
