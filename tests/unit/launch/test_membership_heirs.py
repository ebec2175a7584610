"""A successor without a majority calls those before it in line, while nothing has begun."""

from dataclasses import dataclass

from outlast.launch.membership.hub import REFUSED
from outlast.launch.membership.messages import Go, Member
from outlast.launch.membership.search import BACK_S, Inheritance, WayBack

SILENT = "does not answer"


@dataclass
class Role:
    """As much of a coordinator as is looked at."""

    is_untried: bool = True
    lacks_majority: bool = True

    @property
    def can_give_way(self):
        return self.is_untried and self.lacks_majority


class World:
    """Machines that answer or not, and calls at them by one of them."""

    is_settled = False

    def __init__(self, answers, me="z", ended=()):
        self.answers = answers
        (self.me,) = machines(me)
        self.ended = set(ended)
        self.called, self.waits = [], []
        self.role = self.awaited = self.before = None

    def dial(self, node, address, failed):
        self.called.append(node)
        if why := self.answers.get(node):
            failed(why, False)

    def later(self, delay_s, function):
        self.waits.append((delay_s, function))

    def take_over(self, awaited, before):
        self.awaited, self.before = awaited, [member.node for member in before]

    def wait(self):
        """What waits is due."""
        due, self.waits, self.called = self.waits, [], []
        for _, function in due:
            function()


def machines(names):
    return tuple(Member(node=name, host=name, address=f"{name}:1") for name in names)


def way_back(world, names):
    world.role = Role()
    WayBack(world, world.role, list(machines(names))).look()


def test_they_are_called_in_line_again_and_again():
    world = World({"a": SILENT, "b": SILENT})
    way_back(world, "ab")
    assert world.called == ["a", "b"]
    assert [delay_s for delay_s, _ in world.waits] == [BACK_S]
    world.wait()
    assert world.called == ["a", "b"]
    world.answers = {"a": SILENT}  # b coordinates: that call is the last
    world.wait()
    assert (world.called, world.waits) == (["a", "b"], [])


def test_nobody_is_called_while_most_are_here():
    world = World({"a": SILENT})
    way_back(world, "a")
    world.role.lacks_majority = False
    world.wait()
    assert world.called == []
    world.role.lacks_majority = True  # some are lost again
    world.wait()
    assert world.called == ["a"]


def test_nobody_is_called_once_a_claim_was_asked_for():
    world = World({"a": SILENT})
    way_back(world, "a")
    world.role.is_untried = False
    world.wait()
    assert (world.called, world.waits) == ([], [])


def test_before_an_heir_stand_the_lost_one_and_all_heirs_that_did_not_answer():
    # Also those that seem to have ended: a router that resets connections speaks for the living.
    world = World({"b": REFUSED, "c": SILENT}, me="d")
    go = Go(attempt=1, members=machines("abcde"), store="a:2")
    Inheritance(world, go, patience_s=2.0).begin("a", ())
    assert world.called == ["b", "c"]
    assert world.awaited == {"d", "e"}
    assert world.before == ["a", "b", "c"]
    world = World({}, me="b", ended="a")
    Inheritance(world, go, patience_s=2.0).begin("a", ())
    assert world.before == ["a"]
