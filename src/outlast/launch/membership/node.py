"""One machine's place in the job: it seeks the coordinator, follows it, or becomes it.

All of it runs in the hub's thread; what the agent's main thread needs to know is put into its
mailbox.

======================  ===================================================================
when                    what happens
======================  ===================================================================
nobody is known         the newest claim on storage says who coordinates; if nobody lives
                        there any more, the next number is claimed
the coordinator goes,   workers stop; the member next in rank takes over, the others come
or its process hangs    to it; who reaches nobody seeks anew, which needs storage
somebody else claimed   workers stop, and the one who did is looked for
======================  ===================================================================

``Mesh`` sees whether the machines of an attempt reach each other, not only the coordinator. Each
machine keeps a connection to some others (all of them in a small job; at distances 1, 2, 4, … along
the ranks in a large one) that carries nothing. One that breaks or cannot be made is reported, and
tried again until it can. One that its kernel closed without a word, or refuses, was a process that
has ended.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from outlast.launch.membership.coordinator import Coordinator
from outlast.launch.membership.hub import REFUSED, Hub, Peer
from outlast.launch.membership.messages import (
    OF_WORKERS,
    Apart,
    Departs,
    Exclude,
    Excluded,
    Finish,
    Fixed,
    Go,
    GoOn,
    Halt,
    JobEnded,
    Join,
    Leaving,
    Member,
    Readmit,
    Ready,
    Referral,
    Refused,
    Remains,
    Superseded,
    Together,
    Waits,
    Watch,
    Welcome,
    changed,
    decode,
    encode,
    fingerprint,
)
from outlast.launch.membership.search import Failed, Inheritance, Search, WayBack
from outlast.peer.claims import Claim, Claims, Clerk, new_term
from outlast.policy.exclusion import Exclusions
from outlast.policy.membership import MembershipRules, Roster

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


logger = logging.getLogger(__name__)

_LASTING: Final = (Leaving, Finish)  # of what was said: true for every coordinator to come


class Node:
    """One machine's part in the membership; its methods are called in the hub's thread.

    Args:
        hub: its connections.
        clerk, claims: the job's storage.
        rules: of the owner.
        me: itself.
        store_host: address that a worker store would be served at.
        attempt: the largest number of an attempt that it knows of.
        tell: the agent's mailbox; ``handler.Mailbox.tell`` has what comes there.
        script: what this machine runs, "" where that is not known.
    """

    def __init__(
        self,
        hub: Hub,
        clerk: Clerk,
        claims: Claims,
        rules: MembershipRules,
        me: Member,
        *,
        store_host: str,
        attempt: int,
        tell: Callable[[Any], None],
        script: str = "",
    ) -> None:
        self.me = me
        self._script = script
        self.attempt = attempt
        self._hub = hub
        self._clerk = clerk
        self._claims = claims
        self.rules = rules
        self.out = Exclusions()  # as far as known here, for the next coordinator
        self._store_host = store_host
        self.tell = tell
        self._mesh = Mesh(hub, me.node, self._reached)
        self._mesh.on_ended = self._has_ended
        self._peer: Peer | None = None  # to the coordinator
        self._follows: tuple[str, str] | None = None  # its node and address
        self._coordinator: Coordinator | None = None
        self._knows = ""  # fingerprint of the next
        self.go: Go | None = None  # the attempt that we are in, or were in last
        self.ended: set[str] = set()  # of its members, those known to have ended
        self.hung: set[str] = set()  # coordinators that were given up because they hang
        self._fixed = 0  # the number of machines that the job's data are tied to
        self._departing: set[str] = set()
        self._said: list[Any] = []  # what a new coordinator has to know, too
        self._warming = self._is_over = False
        self._over: JobEnded | None = None
        self._search = Search(self, clerk, claims, hung_s=hub.hung_s)
        hub.on_accepted = self._accepted

    def later(self, delay_s: float, act: Callable[[], None]) -> None:
        """Run something after some seconds, in the hub's thread."""
        self._hub.later(delay_s, act)

    # --- what the agent says ---------------------------------------------------------------------

    def start(self, *, warming: bool) -> None:
        """Begin to look for the others."""
        self._warming = warming
        self.seek()

    def ready(self, attempt: int, workers: int) -> None:
        """Its workers up to those of ``attempt`` have ended; so many begin in the next one."""
        self._warming = False
        self._said = [one for one in self._said if not isinstance(one, OF_WORKERS)]
        self.say(Ready(attempt=attempt, workers=workers))

    def say(self, message: Any) -> None:
        """Tell the coordinator; each new one, too, until another attempt begins (see _LASTING)."""
        self._said.append(message)
        self.pass_on(message)

    def remains(self) -> None:
        """It has said that it leaves, and does so later."""
        self._said = [one for one in self._said if not isinstance(one, Leaving)]
        self.pass_on(Remains())

    def pass_on(self, message: Any) -> None:
        """Say something to the coordinator that only the present one has to know."""
        if self._coordinator is not None:
            self._coordinator.hear(self.me.node, message)
        elif self._peer is not None:
            self._peer.send(encode(message))

    def stop(self) -> None:
        """Leave."""
        self._is_over = True
        self._mesh.close()
        if self._coordinator is not None:
            self._coordinator.close()
        if self._peer is not None:
            self._peer.close()

    def _reached(self, node: str, is_reached: bool) -> None:
        self.pass_on(Together(other=node) if is_reached else Apart(other=node))

    def _has_ended(self, node: str) -> None:
        """A machine's process has ended, as its kernel says on another connection than its own."""
        if self.go is not None and node in {member.node for member in self.go.members}:
            self.ended.add(node)
            if self._coordinator is not None:
                self._coordinator.has_ended(node)

    # --- nobody is known -------------------------------------------------------------------------

    @property
    def is_settled(self) -> bool:
        """Whether somebody coordinates by now, or nobody need."""
        return self._is_over or self._peer is not None or self._coordinator is not None

    def seek(self) -> None:
        """Begin to look for a coordinator, or begin anew."""
        if not self.is_settled:
            self._search.begin()

    def coordinate_claimed(self, claim: Claim) -> None:
        """Take the role with a claim."""
        members = self.go.members if self.go is not None else ()
        self._coordinate(claim.attempt, [one.node for one in members], set(), claim.term)

    # --- following -------------------------------------------------------------------------------

    def dial(self, node: str, address: str, failed: Failed, *, hops: int = 0) -> None:
        """Call a machine and follow it; told why when it does not coordinate."""
        peer = self._hub.dial(address, rush=len(self.go.members) if self.go is not None else 0)
        join = self._join()
        peer.on_open = lambda peer: peer.send(encode(join))
        peer.on_closed = failed
        peer.on_message = lambda data: self._answered(peer, node, address, failed, data, hops=hops)

    def _join(self) -> Join:
        return Join(
            node=self.me.node,
            host=self.me.host,
            address=self._hub.address,
            attempt=self.attempt,
            knows=self._knows,
            fixed=self._fixed,
            script=self._script,
            workers=self.me.workers,
            keeper=self.me.keeper,
            warming=self._warming,
            labels=self.me.labels,
            out=self.out.left(time.monotonic()),
        )

    def _answered(
        self,
        peer: Peer,
        node: str,
        address: str,
        failed: Failed,
        data: bytes,
        *,
        hops: int,
    ) -> None:
        """The first word of one that we hope coordinates."""
        message = self._understand(peer, data)
        match message:
            case Welcome():
                self._adopt(message)
                self._follow(peer, node, address)
                self.tell(message)
            case Refused():
                peer.close()
                self._is_over = True
                self.tell(message)
            case JobEnded(exit_code=code, reason=reason):
                peer.close()
                if self._coordinator is None:
                    self.end(message)
                elif self._coordinator.is_untried:
                    self._coordinator.hear(self.me.node, Finish(exit_code=code, reason=reason))
            case Referral():
                peer.close()
                if hops and message.address:
                    self.dial(message.node, message.address, failed, hops=hops - 1)
                else:
                    failed(f"refers to {message.node or 'nobody yet'}", False)
            case _:
                peer.close()
                failed("does not coordinate", False)

    def _adopt(self, message: Welcome) -> None:
        """All machines of a job go by the same numbers, whoever coordinates next."""
        theirs = (message.min_nodes, message.max_nodes)
        if theirs != (self.rules.min_nodes, self.rules.max_nodes):
            low, high = theirs
            self.rules = msgspec.structs.replace(self.rules, min_nodes=low, max_nodes=high)
            self.tell(self.rules)

    def _follow(self, peer: Peer, node: str, address: str) -> None:
        self._give_way()
        if self.is_settled:
            peer.part()
            return
        self._peer = peer
        self._follows = (node, address)
        self._search.forget()
        peer.on_message = lambda data: self._hear_from(peer, data)
        peer.on_closed = self._coordinator_lost
        peer.on_hung = self._coordinator_hung
        for message in self._said:
            peer.send(encode(message))
        self._mesh.report_again()

    def _give_way(self) -> None:
        """Give up a role in which nothing could begin."""
        if not self._is_over and self._coordinator is not None and self._coordinator.can_give_way:
            self._coordinator.give_way()
            self._coordinator = None

    def _hear_from(self, peer: Peer, data: bytes) -> None:
        message = self._understand(peer, data)
        if message is not None:
            self._hear(message)

    def _understand(self, peer: Peer, data: bytes) -> Any:
        try:
            return decode(data)
        except ValueError as error:
            logger.warning("%s says what is not understood: %s", peer.address, error)
            peer.part()
            peer.on_closed("says what is not understood", False)
            return None

    def _hear(self, message: Any) -> None:
        """From the coordinator, wherever it is."""
        match message:
            case Go():
                self.go, self._knows = message, fingerprint(message)
                self.attempt, self._fixed = message.attempt, message.fixed
                self.ended, self.hung = set(), set()
                self._said = [one for one in self._said if isinstance(one, _LASTING)]
                self._departing = set()
                self._mesh.watch(message)
                self.tell(message)
            case GoOn() if self.go is not None and self._knows == message.before:
                self._hear(changed(self.go, message))
            case GoOn():
                logger.warning("attempt %d goes on from one not heard of here", message.attempt)
                # To come to the coordinator anew, which tells all of it then.
                self._seek_anew("the coordinator speaks of an attempt not heard of here")
            case Departs():
                self._departing.add(message.node)
                self.tell(message)
            case Remains():
                self._departing.discard(message.node)
                self.tell(message)
            case Fixed(machines=machines):
                self._fixed = machines
            case JobEnded():
                self.end(message)
            case Superseded():
                self._superseded()
            case Excluded(out=out, goes=goes):
                self.out.hear(out, time.monotonic(), goes=goes)
                self._said = [one for one in self._said if not isinstance(one, Exclude)]
                self.tell(message)
            case Readmit(host=host):
                self.out.bring_back(host)
            case Halt() | Waits() | Welcome():
                self.tell(message)
            case _:
                logger.warning("a coordinator says %s", message.__struct_config__.tag)

    def end(self, over: JobEnded) -> None:
        """The job is over."""
        self._is_over, self._over = True, over
        self._mesh.close()
        self.tell(over)

    def _superseded(self) -> None:
        """Somebody else coordinates: storage knows who."""
        self._seek_anew("another machine coordinates the job by now")

    def _seek_anew(self, reason: str) -> None:
        if self._peer is not None:
            self._peer.part()
        self._peer, self._follows, self._coordinator = None, None, None
        self.tell(Halt(reason=reason))
        self.seek()

    # --- the coordinator goes --------------------------------------------------------------------

    def _coordinator_hung(self, is_hung: bool) -> None:
        """When it moves again it finds that the others have gone on, and ends its workers."""
        if is_hung and self._peer is not None and self._follows is not None:
            self.hung.add(self._follows[0])
            self._peer.part()
            self._coordinator_lost("does not move, though its kernel answers", False)

    def _coordinator_lost(self, why: str, certain: bool) -> None:
        if self._is_over or self._follows is None:
            return
        lost = self._follows[0]
        self._peer, self._follows = None, None
        go = self.go
        members = {member.node: member for member in go.members} if go is not None else {}
        host = members[lost].host if lost in members else "the coordinator"
        self.tell(Halt(reason=f"{host} {why}"))
        if go is None or self.me.node not in members:
            self.seek()
            return
        if certain:
            self.ended.add(lost)
        patience_s = 2 * self._hub.silence_s
        way = Inheritance(self, go, patience_s=patience_s)
        way.begin(lost, self._departing)

    def take_over(self, awaited: set[str], before: list[Member]) -> None:
        """As the successor of the one that coordinated the attempt that we are in."""
        assert self.go is not None  # noqa: S101 - successors are its members
        members = [member.node for member in self.go.members]
        self._coordinate(None, members, awaited, new_term())
        if self._coordinator is not None:
            WayBack(self, self._coordinator, before).look()

    def _coordinate(
        self, held: int | None, members: list[str], awaited: set[str], term: str
    ) -> None:
        """Take the role."""
        roster = Roster(
            self.rules,
            time.monotonic(),
            first=self.me.node,
            attempt=self.attempt,
            held=held,
            members=members,
            ended=self.ended,
            awaited=awaited,
        )
        self._search.forget()
        self._coordinator = Coordinator(
            self._hub,
            self._clerk,
            self._claims,
            self.me,
            roster,
            store_host=self._store_host,
            term=term,
            held=held,
            deliver=self._hear,
            on_overtaken=self._superseded,
            last_go=self.go,
            script=self._script,
        )
        self._coordinator.join_own(self._join())
        for message in list(self._said):
            self._coordinator.hear(self.me.node, message)
        self._mesh.report_again()

    # --- others come to us -----------------------------------------------------------------------

    def _accepted(self, peer: Peer) -> None:
        peer.on_message = lambda data: self._first_word(peer, data)

    def _first_word(self, peer: Peer, data: bytes) -> None:
        message = self._understand(peer, data)
        match message:
            case Watch(node=node):
                peer.on_message = lambda _: None
                peer.on_closed = lambda why, certain: self._has_ended(node) if certain else None
            case Join() if self._coordinator is not None:
                self._coordinator.admit(peer, message)
            case Join() if self._follows is not None:
                node, address = self._follows
                peer.send(encode(Referral(node=node, address=address)))
            case Join() if self._over is not None:
                peer.send(encode(self._over))
            case Join() if not self._is_over:  # to be asked again: a closed door would mean an end
                peer.send(encode(Referral(node="", address="")))
            case _:
                peer.close()
