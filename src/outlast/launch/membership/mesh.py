"""Whether the machines of an attempt reach each other, not only the coordinator.

Each machine keeps a connection to some others (all of them in a small job; at distances 1, 2, 4, …
along the ranks in a large one) that carries nothing. One that breaks or cannot be made is reported,
and tried again until it can. One that its kernel closed without a word, or refuses, was a process
that has ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from outlast.launch.membership.hub import REFUSED, Hub, Peer
from outlast.launch.membership.messages import Go, Member, Watch, encode

ALL_UP_TO: Final = 16
AGAIN_S: Final = 0.5
AGAIN_MAX_S: Final = 30.0
FORGET_S: Final = 24 * 3600.0  # after which one that is not in the attempt is not tried any more


class Mesh:
    """One machine's connections to others; runs in the hub's thread.

    Args:
        hub: makes them.
        node: this machine.
        report: told of another node, and whether it is reached (again).

    Attributes:
        on_ended: told of another node whose process has ended.
    """

    def __init__(self, hub: Hub, node: str, report: Callable[[str, bool], None]) -> None:
        self._hub = hub
        self._node = node
        self._report = report
        self.on_ended: Callable[[str], None] = lambda _: None
        self._watched: dict[str, Member] = {}
        self._apart: dict[str, float] = {}  # node → since when
        self._peers: dict[str, Peer] = {}

    def watch(self, go: Go) -> None:
        """The machines of a new attempt."""
        nodes = [member.node for member in go.members]
        mine = nodes.index(self._node)
        members = list(go.members)
        self._watched = {
            members[place].node: members[place] for place in neighbours(mine, len(members))
        }
        # One that is out of reach is tried on: it comes back only if somebody says that it can.
        kept = self._watched.keys() | self._apart.keys()
        for node in [node for node in self._peers if node not in kept]:
            self._peers.pop(node).part()  # it sees that we live
        for node, member in self._watched.items():
            if node not in self._peers and node not in self._apart:
                self._dial(member)

    def close(self) -> None:
        """Watch nobody."""
        self._watched, self._apart = {}, {}
        for peer in self._peers.values():
            peer.part()
        self._peers = {}

    def report_again(self) -> None:
        """There is a new coordinator, which knows of nothing."""
        for node in self._apart:
            self._report(node, False)

    def _dial(self, member: Member) -> None:
        node = member.node
        if node not in self._watched:
            since_s = self._apart.get(node)
            if since_s is None:
                return
            if time.monotonic() - since_s > FORGET_S:
                del self._apart[node]
                self._report(node, True)  # nobody knows; it must not be left out for ever
                return
        peer = self._hub.dial(member.address)
        self._peers[node] = peer

        def reached(peer: Peer) -> None:
            peer.send(encode(Watch(node=self._node)))
            if self._apart.pop(node, None) is not None:
                self._report(node, True)

        def broken(why: str, certain: bool) -> None:
            if self._peers.get(node) is not peer:
                return
            del self._peers[node]
            if certain or why == REFUSED:
                self.on_ended(node)
            # Of a process that has ended the coordinator knows without us.
            if not certain and node not in self._apart and node in self._watched:
                self._apart[node] = time.monotonic()
                self._report(node, False)
            age_s = time.monotonic() - self._apart.get(node, time.monotonic())
            again_s = min(max(AGAIN_S, age_s / 10), AGAIN_MAX_S)
            self._hub.later(again_s, lambda: self._again(member))

        peer.on_open, peer.on_closed = reached, broken

    def _again(self, member: Member) -> None:
        if member.node not in self._peers:
            self._dial(member)


def neighbours(mine: int, count: int) -> list[int]:
    """Places that the machine at place ``mine`` of ``count`` watches.

    Of each two machines that watch each other one connects. The graph is connected whatever single
    machine is taken out, and of a small job complete.
    """
    if count <= ALL_UP_TO:
        return list(range(mine + 1, count))
    distances = [1 << power for power in range((count - 1).bit_length())]
    places = {(mine + distance) % count for distance in distances}
    return sorted(places - {mine})
