"""When the coordinator is gone: from one heir to the next, until one is reached; perhaps it is us.

An heir that has not noticed yet refers to the one that is gone: it is called again for a while.
Who reaches nobody seeks anew, which needs storage.

An heir without a majority waits for the others' turn. Those that stand before it in line are called
meanwhile: the network may have healed, and each of them may wait as it does. All go back to the one
that stands first, and none of them goes on alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Final

import msgspec

from outlast.launch.membership.coordinator import Coordinator
from outlast.launch.membership.hub import REFUSED
from outlast.launch.membership.messages import Go, Member
from outlast.policy.succession import heirs

AGAIN_S: Final = 0.1  # between two calls at an heir that has not noticed yet
BACK_S: Final = 0.3  # between two rounds of calls at those that stand before an heir

Failed = Callable[[str, bool], None]


class Ways(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine can do about it; all of it in the hub's thread.

    Attributes:
        dial: call a member; told why when it does not coordinate.
        later: run something after some seconds.
        is_settled: whether somebody coordinates by now.
        coordinate: take the role, with those who are expected to come; told who stands before us.
        seek: ask storage.
    """

    dial: Callable[[Member, Failed], None]
    later: Callable[[float, Callable[[], None]], None]
    is_settled: Callable[[], bool]
    coordinate: Callable[[set[str], list[Member]], None]
    seek: Callable[[], None]


class Inheritance:
    """One machine's way to the next coordinator.

    Args:
        ways: see there.
        me: this machine.
        go: the attempt that has lost its coordinator.
        ended: of its machines, those whose processes are known to have ended; added to.
        patience_s: how long an heir may still refer to the one that is gone.
    """

    def __init__(self, ways: Ways, me: str, go: Go, *, ended: set[str], patience_s: float) -> None:
        self._ways = ways
        self._me = me
        self._go = go
        self._ended = ended
        self._patience_s = patience_s
        self._before: list[Member] = []  # of us in line: the one that is lost, and heirs

    def begin(self, lost: str, departing: Collection[str]) -> None:
        """Go to the first heir of ``lost`` that can be reached."""
        members = {member.node: member for member in self._go.members}
        order = heirs(
            list(members),
            {node: member.labels for node, member in members.items()},
            lost=lost,
            ended=self._ended,
            departing=departing,
        )
        if lost in members:
            self._before = [members[lost]]
        self._go_to([members[node] for node in order], self._patient_until_s())

    def _patient_until_s(self) -> float:
        return time.monotonic() + self._patience_s

    def _go_to(self, left: list[Member], until_s: float) -> None:
        ways = self._ways
        if ways.is_settled():
            return
        if not left:
            ways.seek()
            return
        heir = left[0]
        if heir.node == self._me:
            before = [member for member in self._before if member.node not in self._ended]
            ways.coordinate({member.node for member in left}, before)
            return

        def failed(why: str, certain: bool) -> None:
            if why.startswith("refers") and time.monotonic() < until_s:
                # It has not noticed yet that the coordinator is gone; or only we have lost it.
                ways.later(AGAIN_S, lambda: self._go_to(left, until_s))
            elif why.startswith("refers"):
                ways.seek()
            else:
                if certain or why == REFUSED:
                    self._ended.add(heir.node)
                self._before.append(heir)
                self._go_to(left[1:], self._patient_until_s())

        ways.dial(heir, failed)


class WayBack:
    """From a role in which nothing can begin to one that stands before us and answers again.

    Args:
        ways: see there; whoever ``dial`` finds coordinating is followed.
        role: ours.
        before: who stands before us in line, the first one first.
    """

    def __init__(self, ways: Ways, role: Coordinator, before: list[Member]) -> None:
        self._ways = ways
        self._role = role
        self._before = before

    def look(self) -> None:
        """Call them now and then, until we have asked for a claim or given the role up."""
        if self._role.is_untried and self._before:
            self._call(list(self._before))

    def _call(self, left: list[Member]) -> None:
        if not (left and self._role.can_give_way):
            self._ways.later(BACK_S, self.look)
            return
        self._ways.dial(left[0], lambda why, certain: self._call(left[1:]))
