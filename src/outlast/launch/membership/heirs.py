"""When the coordinator is gone: from one heir to the next, until one is reached; perhaps it is us.

An heir that has not noticed yet refers to the one that is gone: it is called again for a while.
Who reaches nobody seeks anew, which needs storage.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Final

import msgspec

from outlast.launch.membership.hub import REFUSED
from outlast.launch.membership.messages import Go, Member
from outlast.policy.succession import heirs

AGAIN_S: Final = 0.1  # between two calls at an heir that has not noticed yet

Failed = Callable[[str, bool], None]


class Ways(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine can do about it; all of it in the hub's thread.

    Attributes:
        dial: call a member; told why when it does not coordinate.
        later: run something after some seconds.
        is_settled: whether somebody coordinates by now.
        coordinate: take the role, with those who are expected to come.
        seek: ask storage.
    """

    dial: Callable[[Member, Failed], None]
    later: Callable[[float, Callable[[], None]], None]
    is_settled: Callable[[], bool]
    coordinate: Callable[[set[str]], None]
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
            ways.coordinate({member.node for member in left})
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
                self._go_to(left[1:], self._patient_until_s())

        ways.dial(heir, failed)
