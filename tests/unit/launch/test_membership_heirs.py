"""A successor without a majority calls those before it in line, while nothing has begun."""

from dataclasses import dataclass

from outlast.launch.membership.hub import REFUSED
from outlast.launch.membership.messages import Go, Member
from outlast.launch.membership.search import BACK_S, Inheritance, WayBack, Ways

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
    """Machines that answer or not, and calls at them."""

    def __init__(self, answers):
        self.answers = answers
        self.called, self.waits = [], []
        self.role = self.awaited = self.before = None
        self.ways = Ways(
            dial=self._dial,
            later=lambda delay_s, function: self.waits.append((delay_s, function)),
            is_settled=lambda: False,
            coordinate=self._coordinate,
            seek=lambda: None,
        )

    def _dial(self, member, failed):
        self.called.append(member.node)
        if why := self.answers.get(member.node):
            failed(why, False)

    def _coordinate(self, awaited, before):
        self.awaited, self.before = awaited, [member.node for member in before]

    def later(self):
        """What waits is due."""
        due, self.waits, self.called = self.waits, [], []
        for _, function in due:
            function()


def machines(names):
    return tuple(Member(node=name, host=name, address=f"{name}:1") for name in names)


def way_back(world, names):
    world.role = Role()
    WayBack(world.ways, world.role, list(machines(names))).look()


def test_they_are_called_in_line_again_and_again():
    world = World({"a": SILENT, "b": SILENT})
    way_back(world, "ab")
    assert world.called == ["a", "b"]
    assert [delay_s for delay_s, _ in world.waits] == [BACK_S]
    world.later()
    assert world.called == ["a", "b"]
    world.answers = {"a": SILENT}  # b coordinates: that call is the last
    world.later()
    assert (world.called, world.waits) == (["a", "b"], [])


def test_nobody_is_called_while_most_are_here():
    world = World({"a": SILENT})
    way_back(world, "a")
    world.role.lacks_majority = False
    world.later()
    assert world.called == []
    world.role.lacks_majority = True  # some are lost again
    world.later()
    assert world.called == ["a"]


def test_nobody_is_called_once_a_claim_was_asked_for():
    world = World({"a": SILENT})
    way_back(world, "a")
    world.role.is_untried = False
    world.later()
    assert (world.called, world.waits) == ([], [])


def test_before_an_heir_stand_the_lost_one_and_heirs_that_are_not_known_to_have_ended():
    world = World({"b": REFUSED, "c": SILENT})
    go = Go(attempt=1, members=machines("abcde"), store="a:2")
    Inheritance(world.ways, "d", go, ended=set(), patience_s=2.0).begin("a", ())
    assert world.called == ["b", "c"]
    assert world.awaited == {"d", "e"}
    assert world.before == ["a", "c"]
    Inheritance(world.ways, "b", go, ended={"a"}, patience_s=2.0).begin("a", ())
    assert world.before == []
