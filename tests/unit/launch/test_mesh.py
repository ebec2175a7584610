"""Who watches whom, and that what is out of reach is tried until it is back; without sockets."""

import pytest

from outlast.launch.membership.hub import REFUSED
from outlast.launch.membership.messages import Go, Member
from outlast.launch.membership.node import Mesh, neighbours

NAMES = ("first", "second", "third")


class FakePeer:
    """A connection that is not there yet."""

    def __init__(self, address):
        self.address = address
        self.is_closed = self.has_parted = False
        self.sent = []

    def send(self, message):
        self.sent.append(message)

    def close(self):
        self.is_closed = True

    def part(self):
        self.has_parted = True
        self.close()

    def opens(self):
        assert not self.is_closed
        self.on_open(self)

    def fails(self, why="does not answer", *, certain=False):
        """What is closed by us has no callback."""
        if not self.is_closed:
            self.on_closed(why, certain)


class FakeHub:
    """A hub whose timers run when the test says so."""

    def __init__(self):
        self.dialled = []
        self.timers = []

    def dial(self, address):
        self.dialled.append(FakePeer(address))
        return self.dialled[-1]

    def later(self, delay_s, function):
        assert delay_s > 0
        self.timers.append(function)

    def pass_time(self):
        due, self.timers = self.timers, []
        for function in due:
            function()


def go(*names):
    members = tuple(
        Member(node=name, host=name, address=f"{name}:1", workers=1, labels={}) for name in names
    )
    return Go(attempt=1, members=members, store="first:2")


@pytest.fixture
def mesh():
    hub, words = FakeHub(), []
    made = Mesh(hub, "second", lambda node, reached: words.append((node, reached)))
    made.watch(go(*NAMES))
    return hub, words, made


def test_of_each_pair_the_earlier_one_connects(mesh):
    hub, words, _ = mesh
    assert [peer.address for peer in hub.dialled] == ["third:1"]
    hub.dialled[0].opens()
    assert hub.dialled[0].sent
    assert words == []


def test_a_machine_out_of_reach_is_reported_once_and_tried_until_it_is_back(mesh):
    hub, words, _ = mesh
    for _ in range(3):
        hub.dialled[-1].fails()
        hub.pass_time()
    assert words == [("third", False)]
    hub.dialled[-1].opens()
    assert words == [("third", False), ("third", True)]


def test_it_is_tried_on_when_an_attempt_forms_without_it(mesh):
    hub, words, made = mesh
    hub.dialled[-1].fails()
    hub.pass_time()
    made.watch(go("first", "second"))  # while a connection is under way
    hub.dialled[-1].fails()
    hub.pass_time()
    hub.dialled[-1].opens()
    assert words == [("third", False), ("third", True)]
    made.watch(go("first", "second"))
    assert hub.dialled[-1].is_closed


def test_a_process_that_has_ended_is_no_cut(mesh):
    hub, words, made = mesh
    made.on_ended = words.append
    hub.dialled[-1].fails("ended", certain=True)
    assert words == ["third"]


@pytest.mark.parametrize("how", ["an attempt without it", "the end"])
def test_one_that_is_watched_no_more_is_told_that_we_are_not_dead(mesh, how):
    hub, _, made = mesh
    hub.dialled[-1].opens()
    made.watch(go("first", "second")) if how != "the end" else made.close()
    assert hub.dialled[-1].has_parted


@pytest.mark.parametrize(("why", "ended"), [(REFUSED, ["third"]), ("does not answer", [])])
def test_where_nobody_listens_any_more_a_process_has_ended(mesh, why, ended):
    hub, _, made = mesh
    words = []
    made.on_ended = words.append
    hub.dialled[-1].fails(why)
    assert words == ended


@pytest.mark.parametrize("count", [2, 3, 16, 17, 100])
def test_whoever_is_taken_out_the_others_are_connected(count):
    edges = {frozenset((mine, other)) for mine in range(count) for other in neighbours(mine, count)}
    for out in range(count):
        left = set(range(count)) - {out}
        reached, new = set(), {min(left)}
        while new:
            reached |= new
            new = {
                other for edge in edges for other in edge if edge & new and other in left - reached
            }
        assert reached == left
