"""Find who coordinates: by storage where nobody is known, else from successor to successor.

**Nobody is known** (``Search``): storage says who coordinates, or has the next number to claim. Who
has claimed the newest number is called. If nobody is reached there, and its counter on storage
stands still, it is believed gone, and the next number is claimed. What that takes
:mod:`outlast.policy.succession` says: a claim ends the attempt of whoever is reached by all but us.

What can go wrong: a claim that cannot be read (a disk that was full, a torn write) counts by its
number. Nobody can be called there, so that its counter alone decides.

**The coordinator is gone** (``Inheritance``): from one successor to the next, until one is reached;
perhaps it is us. A successor that has not noticed yet refers to the one that is gone: it is called
again for a while. Who reaches nobody seeks anew, which needs storage.

**No majority, or too few** (``WayBack``): a successor without a majority waits for the others'
turn, and one with fewer machines than an attempt takes waits for more. Those that stand before it
in line are called meanwhile: the network may have healed, and each of them may wait as it does. All
go back to the one that stands first, and none of them goes on alone.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection
from typing import Any, Final, Protocol

from outlast.launch.membership.coordinator import Coordinator
from outlast.launch.membership.hub import HANGS, REFUSED
from outlast.launch.membership.messages import Go, JobEnded, Member, Waits
from outlast.peer.claims import Claim, Claims, Clerk, SignOfLife, is_alive, new_term
from outlast.policy.membership import MembershipRules
from outlast.policy.succession import CounterWatch, Seeking, gone_after_s, successors

AGAIN_S: Final = 0.1  # between two calls at a successor that has not noticed yet
HOPS_MAX: Final = 3  # from one that refers to another
BACK_S: Final = 0.3  # between two rounds of calls at those that stand before a successor

Failed = Callable[[str, bool], None]


class Seeker(Protocol):
    """The machine that looks for a coordinator; all of it runs in the hub's thread.

    Attributes:
        me: itself.
        rules: of the job.
        attempt: the largest number of an attempt that it has heard of.
        go: the attempt that it is in, or was in last.
        ended: of its machines, those known to have ended.
        hung: coordinators that were given up because they hang.
    """

    me: Member
    rules: MembershipRules
    attempt: int
    go: Go | None
    ended: set[str]
    hung: set[str]

    @property
    def is_settled(self) -> bool:
        """Whether somebody coordinates by now."""

    def dial(self, node: str, address: str, failed: Failed, *, hops: int = 0) -> None:
        """Call a machine and follow it; told why when it does not coordinate."""

    def later(self, delay_s: float, act: Callable[[], None]) -> None:
        """Run something after some seconds."""

    def seek(self) -> None:
        """Ask storage."""

    def take_over(self, awaited: set[str], before: list[Member]) -> None:
        """Coordinate, with those who are expected to come; told who stands before us."""

    def coordinate_claimed(self, claim: Claim) -> None:
        """Coordinate with a claim."""

    def end(self, over: JobEnded) -> None:
        """The job is over."""

    def tell(self, message: Any) -> None:
        """What is waited for."""


class Inheritance:
    """One machine's way to the next coordinator.

    Args:
        seeker: this machine.
        go: the attempt that has lost its coordinator.
        patience_s: how long a successor may still refer to the one that is gone.
    """

    def __init__(self, seeker: Seeker, go: Go, *, patience_s: float) -> None:
        self._seeker = seeker
        self._go = go
        self._ended = seeker.ended  # those of this attempt: another one has a set of its own
        self._patience_s = patience_s
        self._before: list[Member] = []  # of us in line: the one that is lost, and successors

    def begin(self, lost: str, departing: Collection[str]) -> None:
        """Go to the first successor of ``lost`` that can be reached."""
        members = {member.node: member for member in self._go.members}
        order = successors(
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
        seeker = self._seeker
        if seeker.is_settled:
            return
        if not left:
            seeker.seek()
            return
        successor = left[0]
        if successor.node == seeker.me.node:
            # Those that have ended, too: a router that resets connections looks the same from here.
            seeker.take_over({member.node for member in left}, self._before)
            return

        def failed(why: str, certain: bool) -> None:
            if why.startswith("refers") and time.monotonic() < until_s:
                # It has not noticed yet that the coordinator is gone; or only we have lost it.
                seeker.later(AGAIN_S, lambda: self._go_to(left, until_s))
            elif why.startswith("refers"):
                seeker.seek()
            else:
                if certain or why == REFUSED:
                    self._ended.add(successor.node)
                self._before.append(successor)
                self._go_to(left[1:], self._patient_until_s())

        seeker.dial(successor.node, successor.address, failed)


class WayBack:
    """From a role in which nothing can begin to one that stands before us and answers again.

    Args:
        seeker: this machine.
        role: ours.
        before: who stands before us in line, the first one first.
    """

    def __init__(self, seeker: Seeker, role: Coordinator, before: list[Member]) -> None:
        self._seeker = seeker
        self._role = role
        self._before = before

    def look(self) -> None:
        """Call them now and then, until we have asked for a claim or given the role up."""
        if self._role.is_untried and self._before:
            self._call(list(self._before))

    def _call(self, left: list[Member]) -> None:
        if not (left and self._role.can_give_way):
            self._seeker.later(BACK_S, self.look)
            return
        first, *others = left
        self._seeker.dial(first.node, first.address, lambda why, certain: self._call(others))


class Search:
    """One machine's search for whoever coordinates.

    Args:
        seeker: this machine.
        clerk, claims: the job's storage.
        hung_s: how long a process may not move while its kernel answers.
    """

    def __init__(self, seeker: Seeker, clerk: Clerk, claims: Claims, *, hung_s: float) -> None:
        self._seeker = seeker
        self._clerk = clerk
        self._claims = claims
        self._hung_s = hung_s
        self._sign = CounterWatch()
        self._seeking = Seeking(1, 0.0)
        self._sought_s = 0.0  # since when
        self._round = 0  # of questions to storage: of two that overlap the newer counts
        self._in_vain = ""  # why the last claim could not be made

    def begin(self) -> None:
        """Look for a coordinator, or begin anew."""
        known = self._seeker
        machines = len(known.go.members) if known.go is not None else known.rules.max_nodes
        self._seeking = Seeking(machines, random.random())  # noqa: S311 - to take turns
        self._sought_s = time.monotonic()
        self._round += 1
        self._ask_after(self._seeking.first_s(random.random()))  # noqa: S311

    def forget(self) -> None:
        """Somebody coordinates: what was seen says nothing about the next one."""
        self._sign, self._in_vain = CounterWatch(), ""

    def _again(self) -> None:
        tried_s = time.monotonic() - self._sought_s
        self._ask_after(self._seeking.again_s(tried_s, random.random()))  # noqa: S311

    def _ask_after(self, delay_s: float) -> None:
        number = self._round

        def ask() -> None:
            asked_s = time.monotonic()

            def found(what: tuple[Claim | None, SignOfLife | None] | None, problem: Any) -> None:
                if not self._is_outdated(number):
                    self._found(what, problem, asked_s)

            if not self._is_outdated(number):
                self._clerk.ask(lambda: (self._claims.newest(), self._claims.alive()), found)

        self._seeker.later(delay_s, ask)

    def _is_outdated(self, number: int) -> bool:
        return self._seeker.is_settled or number != self._round

    def _found(
        self, found: tuple[Claim | None, SignOfLife | None] | None, problem: Any, asked_s: float
    ) -> None:
        if problem is not None or found is None:
            self._seeker.tell(Waits(words=f"storage to answer ({problem})"))
            self._sign.failed()
            self._again()
            return
        claim, alive = found
        if claim is None:
            self._claim(1, 0)
        elif alive is not None and alive.over and alive.attempt >= claim.attempt:
            go = self._seeker.go
            if go is not None and go.attempt <= alive.attempt:  # we were not told
                self._seeker.end(JobEnded(exit_code=alive.exit_code, reason=alive.reason))
            else:
                number = max(claim.attempt, alive.attempt) + 1
                self._claim(number, claim.attempt)  # it is started again
        elif claim.node == self._seeker.me.node:
            self._claim(claim.attempt + 1, claim.attempt)
        elif not claim.address and is_alive(claim.process) is False:
            self._claim(claim.attempt + 1, claim.attempt)  # it ran the job alone, here, and is gone
        else:
            self._sign.seen((claim, alive), asked_s=asked_s, answered_s=time.monotonic())
            self._call(claim)

    def _call(self, claim: Claim) -> None:
        number = self._round

        def failed(why: str, certain: bool) -> None:
            if not self._is_outdated(number):
                self._not_there(claim, why)

        if claim.node and claim.address:
            self._seeker.dial(claim.node, claim.address, failed, hops=HOPS_MAX)
        else:
            failed("", False)

    def _not_there(self, claim: Claim, why: str) -> None:
        """The one who claimed does not answer: gone, only out of our reach, or it hangs."""
        known, me = self._seeker, self._seeker.me
        go = known.go
        is_member = go is not None and go.attempt >= claim.attempt
        has_ended = claim.node in known.ended  # its kernel closed its connection to us
        limit_s = gone_after_s(
            refused=why == REFUSED,
            here=(claim.host, _host(claim.address)) == (me.host, _host(me.address)),
            member=is_member or me.node in claim.members or has_ended,
        )
        if why == HANGS and claim.node not in known.hung:
            limit_s = max(limit_s, self._hung_s)
        others = set(claim.members) - known.ended - {claim.node, me.node}
        if go is not None and (others or not claim.members):  # they may be about to claim
            limit_s = max(limit_s, known.rules.patience_s)
        if self._sign.stands_still(limit_s):
            self._claim(claim.attempt + 1, claim.attempt)
            return
        words = f"the coordinator on {claim.host}, which is not reached"
        if claim.process:
            words = f"the job to end on {claim.host}, which runs it alone"
        elif not claim.node:
            words = f"the coordinator of attempt {claim.attempt}, whose claim cannot be read"
        self._seeker.tell(Waits(words=self._in_vain or words))
        self._again()

    def _claim(self, number: int, known: int) -> None:
        me = self._seeker.me
        claim = Claim(
            attempt=max(number, self._seeker.attempt + 1),
            node=me.node,
            host=me.host,
            address=me.address,
            term=new_term(),
        )

        def answered(taken: bool | None, problem: OSError | None) -> None:
            if self._seeker.is_settled:
                return
            if taken:
                self._seeker.coordinate_claimed(claim)
                return
            self._in_vain = ""
            if problem is not None:
                self._in_vain = f"storage to take the claim of an attempt ({problem})"
                self._seeker.tell(Waits(words=self._in_vain))
                self._sign.failed()
            self._again()

        self._clerk.ask(lambda: self._claims.take(claim, known), answered)


def _host(address: str) -> str:
    return address.rpartition(":")[0]
