"""Who takes part in the next attempt: the coordinator's decisions, without sockets or clocks.

Facts come in (a machine has come, is ready, was lost, leaves, cannot reach another), orders come
out. The runtime and the simulator use this very object.

======================  =========================================================================
phase                   what it waits for
======================  =========================================================================
gathering               enough machines; a little longer for those that are on their way
stopping                all living members to have ended their workers
forming                 the claim of the attempt's number on storage
running                 trouble, or somebody new who is worth a pause
ended                   nothing
======================  =========================================================================

Guarantees: an attempt is ordered only with machines that are ready, no two of which are known not
to reach each other; its number is larger than that of any attempt that a member has heard of. One
of its machines that goes, leaves or comes anew before it has started makes it void.
Without more than half of the members a claim on storage is required. Only those who have said that
they leave do not count: a connection that ends says nothing about its process for certain. While
more than half of the members are silent, and may be alive elsewhere, the claim is not asked for
before ``patience_s``, so that they have had their turn. Half of them or fewer could form nothing
without a claim either: whoever makes it first has it, and nobody waits.

An event costs the same at ten machines and at ten thousand: each set of machines is kept, not
computed. What looks at all machines (an order to form, a machine that is lost) happens once a loss,
not once a tick.

A machine whose agent hangs (its process does not move, its kernel answers) is no trouble while its
workers train. It is waited for in nothing, takes part in nothing new, and gives nobody a majority.

Rejected: waiting a fixed time for late machines after every loss (torchrun's last call: 30 s).
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Collection, Iterable
from typing import Final

import msgspec

from outlast.policy.exclusion import Exclusion, Exclusions, Intake, Reach
from outlast.policy.succession import ASKS_PER_S

NAMES_MAX: Final = 3
REASONS_MAX: Final = 3


class MembershipRules(msgspec.Struct, frozen=True, kw_only=True):
    """What the owner wants, and how long things are waited for; times in seconds.

    Attributes:
        min_nodes, max_nodes: machines in an attempt.
        gather_s: for more machines than the fewest, when nothing runs, after the last one came.
        warm_s: for machines that are warming up, when nothing runs.
        gather_max_s: for more machines than the fewest, however steadily they come.
        stop_s: for a living member to end its workers.
        gentle_s: for the same at a step's end, which may take long.
        gentle_factor: times the longest step and save that were seen lately, once they were.
        gentle_least_s: for the same, however short they were.
        drain_s: for the same where a machine leaves and the workers of the first have ended.
        patience_s: that those without a majority leave to the others.
        begin_s: for an agent to start its workers once it was told to.
        settle_s: for more words about who cannot reach whom.
        expect_s: for members of the last attempt to come to a new coordinator, after the last.
        expect_max_s: the same, however steadily they come.
    """

    min_nodes: int
    max_nodes: int
    gather_s: float = 3.0
    gather_max_s: float = 15.0
    warm_s: float = 60.0
    stop_s: float = 5.0
    gentle_s: float = 600.0
    gentle_factor: float = 5.0
    gentle_least_s: float = 10.0
    drain_s: float = 30.0
    patience_s: float = 6.0
    begin_s: float = 2.0
    settle_s: float = 1.0
    expect_s: float = 3.0
    expect_max_s: float = 15.0

    @property
    def gather_longest_s(self) -> float:
        """As ``gather_max_s``, and longer for very many machines, which come one by one."""
        return max(self.gather_max_s, 2 * self.max_nodes / ASKS_PER_S)


class RosterPhase(enum.Enum):
    """Where the job is."""

    GATHERING = "gathering"
    STOPPING = "stopping"
    FORMING = "forming"
    RUNNING = "running"
    ENDED = "ended"


class StopWorkers(msgspec.Struct, frozen=True, kw_only=True):
    """To all members: end your workers (``gentle``: at a step's end) and get ready."""

    reason: str
    gentle: bool = False


class Form(msgspec.Struct, frozen=True, kw_only=True):
    """Claim ``attempt`` on storage, then start it; without the claim only if not ``required``."""

    attempt: int
    members: tuple[str, ...]
    required: bool


class Leaves(msgspec.Struct, frozen=True, kw_only=True):
    """To all: ``node`` will go; ``goes_on``: enough others stay."""

    node: str
    goes_on: bool


class Excludes(msgspec.Struct, frozen=True, kw_only=True):
    """To all: a machine is left out; ``goes``: enough others stay, so that it really is."""

    out: Exclusion
    goes: bool


class EndJob(msgspec.Struct, frozen=True, kw_only=True):
    """To all: the job is over."""

    exit_code: int
    reason: str


Order = StopWorkers | Form | Leaves | Excludes | EndJob


class Seat:
    """One connected machine."""

    def __init__(self, node: str, host: str, order: int) -> None:
        self.node = node
        self.host = host
        self.order = order
        self.ready_s: float | None = None


def names(some: list[str], count: int | None = None) -> str:
    """A few names in words, and how many more there are of ``count``."""
    count = len(some) if count is None else count
    shown = some[:NAMES_MAX]
    more = count - len(shown)
    if more:
        return f"{', '.join(shown)} and {more} others"
    return " and ".join(shown)


class Roster:
    """The coordinator's mind.

    Args:
        rules: see :class:`MembershipRules`.
        now_s: any clock's seconds; the same clock for all calls.
        first: the coordinator's own machine, which gets rank 0.
        attempt: the largest number of an attempt that is known.
        held: a number that is claimed already, for the first attempt formed here, or None.
        members: of the last attempt, if it may still run somewhere.
        ended: those of them whose processes seem to have ended.
        awaited: those of them that are expected to come to this coordinator.
        intake: judges newcomers.

    Attributes:
        number: of the attempt that runs or ran last, as far as its machines have been here.
        asked: what the owner wants; ``rules`` are others while the data are tied to ``fixed``
            machines, which is else 0.
        waits_for: in words, while nothing runs.
        out: machines that are left out.
    """

    def __init__(
        self,
        rules: MembershipRules,
        now_s: float,
        *,
        first: str,
        attempt: int = 0,
        held: int | None = None,
        members: Iterable[str] = (),
        ended: Iterable[str] = (),
        awaited: Iterable[str] = (),
        intake: Intake | None = None,
    ) -> None:
        self.members: tuple[str, ...] = tuple(members)
        self._places = {node: place for place, node in enumerate(self.members)}
        self._first = first
        self._seats: dict[str, Seat] = {}
        self._count = 0
        # Of those who are here.
        self._ready: set[str] = set()  # and do not leave
        self._late: dict[str, None] = {}  # members with workers, in the order they came
        self._warming: set[str] = set()
        self._leaving: set[str] = set()
        self._hung: dict[str, bool] = {}  # and whether they were ready
        # Of the members, here or not.
        self._here: set[str] = set()
        self._silent = set(self.members) - set(ended)  # not here, and perhaps alive
        self._left: set[str] = set()  # have said that they go for good
        self._finished: set[str] = set()
        self._expected = set(awaited) - {first}
        self._reach = Reach()
        # What is decided.
        self.rules = self.asked = rules
        self.fixed = 0
        self.attempt = attempt
        self.number = attempt if self.members else 0
        self.phase = RosterPhase.STOPPING if self.members else RosterPhase.GATHERING
        self.waits_for = ""
        self._held = held
        self._since_s = self._lost_s = self._arrival_s = self._formed_s = now_s
        self._until_s = now_s + rules.stop_s  # that workers have to end
        self._enough_s: float | None = None  # since when enough are here
        self.out = Exclusions()
        self._trouble: list[str] = []
        self._is_hard = False  # trouble that workers cannot end by themselves
        self._gentle = False
        self._forming: Form | None = None
        self._phase_before = self.phase
        self._intake = intake or Intake()

    # --- facts ---------------------------------------------------------------------------------

    def joined(
        self, node: str, now_s: float, *, host: str = "", attempt: int = 0, warming: bool = False
    ) -> list[Order]:
        """A machine has connected; ``attempt`` is the largest number it has heard of."""
        self.attempt = max(self.attempt, attempt)
        if node in self._seats:
            self._unseat(node)  # it has connected anew
        seat = Seat(node, host or node, self._count)
        self._seats[node] = seat
        self._count += 1
        self._arrival_s = now_s
        self._expected.discard(node)
        if warming:
            self._warming.add(node)
        if node in self._places:
            self._here.add(node)
            self._silent.discard(node)
            self._left.discard(node)
            self._late[node] = None
            if self.phase is RosterPhase.RUNNING:
                # Whoever loses its coordinator ends its workers.
                self._trouble.append(f"{seat.host} had lost its connection")
                self._is_hard = True
        return self._decide(now_s)

    def ready(self, node: str, now_s: float, *, attempt: int | None = None) -> list[Order]:
        """A machine's workers have ended, or it never had any: it waits for the next attempt.

        Args:
            node: which.
            now_s: now.
            attempt: the largest number whose workers have ended; None: whatever ran. A word that
                was on its way when a later attempt began says nothing about that one.
        """
        if attempt is not None and attempt < self.number and node in self._places:
            return []
        seat = self._seats[node]
        seat.ready_s = now_s
        self._warming.discard(node)
        self._finished.discard(node)
        self._arrival_s = now_s
        if node not in self._leaving:
            self._ready.add(node)
        self._late.pop(node, None)
        if self.phase is RosterPhase.RUNNING and node in self._places:
            self._trouble.append(f"the workers of {seat.host} ended")
        return self._decide(now_s)

    def ended(self, node: str, now_s: float, *, attempt: int) -> list[Order]:
        """A machine's workers have ended, and it will be ready in a while."""
        is_news = self.phase is RosterPhase.RUNNING and attempt >= self.number
        if is_news and node in self._places:
            self._trouble.append(f"the workers of {self._host(node)} ended")
        return self._decide(now_s)

    def lost(
        self,
        node: str,
        now_s: float,
        why: str,
        *,
        certain: bool,
        left: bool = False,
        broke: bool = False,
    ) -> list[Order]:
        """A machine is gone.

        Args:
            node: which.
            now_s: now.
            why: in words.
            certain: its connection was ended, not only silent.
            left: it has said that it goes for good.
            broke: its workers were ended in the midst of a step.
        """
        if node not in self._seats:
            return []
        host = self._host(node)
        had_workers = node in self._late or (
            self.phase is RosterPhase.RUNNING and node in self._places
        )
        is_leaving = node in self._leaving
        self._unseat(node)
        self._reach.forget(node)
        if node in self._places:
            if left:
                self._left.add(node)
            elif not certain:
                self._silent.add(node)
                self._lost_s = now_s
            if had_workers and node not in self._finished:
                self._trouble.append(f"{host} {why}")
                self._is_hard = self._is_hard or broke or not is_leaving
            if not is_leaving and not left:
                self._intake.lost(host, now_s)
        if self._late and now_s >= self._until_s:  # we may have hung: more losses are to be heard
            return []
        return self._decide(now_s)

    def has_ended(self, node: str, now_s: float) -> list[Order]:
        """A member that is not here will not come: its process has ended."""
        if node not in self._seats:
            self._expected.discard(node)
            self._silent.discard(node)
        return self._decide(now_s)

    def leaving(self, node: str, now_s: float) -> list[Order]:
        """A machine has had notice: it takes no part in further attempts."""
        if node in self._leaving:
            return []
        self._leaving.add(node)
        self._ready.discard(node)
        self._late.pop(node, None)
        self._spoil(node)
        # One that warms up will be there: it may be this one's replacement.
        left = len(self._seats) - len(self._leaving | self._hung.keys())
        order = Leaves(node=node, goes_on=left >= self.rules.min_nodes)
        return [order, *self._decide(now_s)]

    def remains(self, node: str, now_s: float) -> list[Order]:
        """A machine that has had notice takes part once more: its workers have yet to hand over."""
        if node in self._leaving:
            self._leaving.discard(node)
            if self.phase is RosterPhase.STOPPING and node in self._places:
                self._late[node] = None
        return self._decide(now_s)

    def done(self, node: str, now_s: float) -> list[Order]:
        """All workers of a member have finished their work."""
        if node in self._places:
            self._finished.add(node)
        return self._decide(now_s)

    def apart(self, one: str, other: str, now_s: float) -> list[Order]:
        """Two machines cannot reach each other."""
        if one != other and one in self._seats and other in self._seats:
            self._reach.apart(one, other, now_s)
            if self._forming is not None and {one, other} <= set(self._forming.members):
                self._spoil(one)
        return self._decide(now_s)

    def together(self, one: str, other: str, now_s: float) -> list[Order]:
        """Two machines reach each other again."""
        self._reach.together(one, other)
        return self._decide(now_s)

    def hung(self, node: str, now_s: float, *, heard_s: float) -> list[Order]:
        """A machine's agent does not move, though its kernel answers; its workers may train on.

        Args:
            node: which.
            now_s: now.
            heard_s: when its process last gave a sign of life.
        """
        if node not in self._seats or node in self._hung:
            return []
        self._hung[node] = node in self._ready
        self._ready.discard(node)
        self._late.pop(node, None)
        self._spoil(node)
        has_workers = self.phase is RosterPhase.RUNNING and node in self._places
        if has_workers and heard_s < self._formed_s + self.rules.begin_s:
            # Its workers may never have been started: the others would wait for them.
            self._trouble.append(f"the agent of {self._host(node)} does not move")
            self._is_hard = True
        return self._decide(now_s)

    def moves(self, node: str, now_s: float) -> list[Order]:
        """The agent of a machine that hung moves again."""
        if self._hung.pop(node, False) and node not in self._leaving:
            self._ready.add(node)
        return self._decide(now_s)

    def left_out(self, out: Exclusion, now_s: float, *, gentle: bool = False) -> list[Order]:
        """A machine is to be left out; ``gentle``: its workers may go on to a step's end."""
        if not self.out.put(out, now_s):
            return []
        able = [seat.host for seat in self._able() if seat.host != out.host]
        least, num_members = self.rules.min_nodes, len(self.members)
        goes = self.out.can_do_without(
            out.host, able, members=num_members, least=least, now_s=now_s
        )
        if not goes:
            self.out.stays(out.host)
        orders: list[Order] = [Excludes(out=out, goes=goes)]
        theirs = [n for n, seat in self._seats.items() if seat.host == out.host] if goes else []
        for node in theirs:
            self._spoil(node)
        if self.phase is RosterPhase.RUNNING and any(node in self._places for node in theirs):
            reason = f"{out.host} is left out: {out.reason}"
            limit_s = self.rules.gentle_s if gentle else self.rules.stop_s
            return orders + self._stop(reason, now_s, limit_s, gentle=gentle)
        return orders + self._decide(now_s)

    def readmit(self, host: str, now_s: float) -> list[Order]:
        """A machine that was left out may take part again."""
        self.out.bring_back(host)
        return self._decide(now_s)

    def fill(self, node: str, now_s: float) -> list[Order]:
        """A member could have more workers than it has in the attempt that runs."""
        if self.phase is not RosterPhase.RUNNING or node not in self._places or self._trouble:
            return self._decide(now_s)
        reason = f"all workers of {self._host(node)} are back"
        return self._stop(reason, now_s, self.rules.gentle_s, gentle=True)

    def fix(self, machines: int) -> None:
        """The job's data are tied to so many machines; 0: to no number any more."""
        self.fixed = machines
        tied = msgspec.structs.replace(self.asked, min_nodes=machines, max_nodes=machines)
        self.rules = tied if machines else self.asked

    def needs(self, seconds: float, now_s: float) -> list[Order]:
        """Workers that stop gently were seen to need so long for a step and for a save."""
        if self._gentle:
            rules = self.rules
            limit_s = max(rules.gentle_least_s, rules.gentle_factor * seconds)
            self._until_s = min(self._until_s, self._since_s + limit_s)
        return self._decide(now_s)

    def claimed(self, order: Form, now_s: float) -> bool:
        """The order's number is ours, or was not needed: whether the attempt starts now."""
        if self.phase is not RosterPhase.FORMING or order is not self._forming:
            return False
        self.phase, self._forming = RosterPhase.RUNNING, None
        self.number = order.attempt
        self.members = order.members
        self._places = {node: place for place, node in enumerate(order.members)}
        self._here = set(order.members)
        self._silent, self._left, self._finished, self._expected = set(), set(), set(), set()
        self._late = {}
        self._formed_s = now_s
        self._calm()
        for node in order.members:
            self._seats[node].ready_s = None
        self._ready.difference_update(order.members)
        was_pause = self._phase_before is RosterPhase.STOPPING
        paused_s = now_s - self._since_s if was_pause else None
        self._intake.formed(len(order.members), now_s, paused_s=paused_s)
        return True

    def end(self, exit_code: int, reason: str) -> list[Order]:
        """The job is over, whatever the machines do."""
        if self.phase is RosterPhase.ENDED:
            return []
        self.phase = RosterPhase.ENDED
        return [EndJob(exit_code=exit_code, reason=reason)]

    def tick(self, now_s: float) -> list[Order]:
        """Time has gone by."""
        return self._decide(now_s)

    @property
    def lacks_majority(self) -> bool:
        """Whether nothing runs or forms, and what formed here would need a claim."""
        waits = self.phase in (RosterPhase.STOPPING, RosterPhase.GATHERING)
        return waits and bool(self.members) and not self._has_majority(self._left)

    @property
    def lacks_machines(self) -> bool:
        """Whether nothing runs or forms, and fewer are here than an attempt takes."""
        waits = self.phase in (RosterPhase.STOPPING, RosterPhase.GATHERING)
        return waits and bool(self.members) and self._num_able < self.rules.min_nodes

    # --- who is where --------------------------------------------------------------------------

    def _rank(self, node: str) -> tuple[bool, int, int]:
        """The coordinator's machine first, then the members as they were, then by arrival."""
        place = self._places.get(node, len(self._places))
        return node != self._first, place, self._seats[node].order

    def _cut_off(self, nodes: Collection[str], until_s: float = float("inf")) -> set[str]:
        return self._reach.cut_off(nodes, first=self._first, rank=self._rank, until_s=until_s)

    def _num_hung(self, *, without: Collection[str] = ()) -> int:
        """How many members hang, some not counted."""
        return sum(node in self._here and node not in without for node in self._hung)

    def _has_majority(self, without: Collection[str]) -> bool:
        """Whether more than half of the members are here, some not counted."""
        votes = len(self.members) - len(without)
        return 2 * (len(self._here) - self._num_hung()) > votes > 0

    def _able(self) -> list[Seat]:
        """Those who could be in another attempt, as far as known."""
        cannot = self._leaving | self._warming | self._hung.keys()
        return [seat for node, seat in self._seats.items() if node not in cannot]

    @property
    def _num_able(self) -> int:
        return len(self._seats) - len(self._leaving | self._warming | self._hung.keys())

    def _host(self, node: str) -> str:
        seat = self._seats.get(node)
        return seat.host if seat else node

    def _unseat(self, node: str) -> None:
        del self._seats[node]
        self._ready.discard(node)
        self._late.pop(node, None)
        self._warming.discard(node)
        self._leaving.discard(node)
        self._hung.pop(node, None)
        self._here.discard(node)
        self._spoil(node)

    def _spoil(self, node: str) -> None:
        """What forms with a machine that is not ready any more will not start."""
        if self._forming is not None and node in self._forming.members:
            self._forming = None
            self.phase = self._phase_before

    # --- decisions -----------------------------------------------------------------------------

    def _decide(self, now_s: float) -> list[Order]:
        if self.phase is RosterPhase.RUNNING:
            return self._while_running(now_s)
        if self.phase in (RosterPhase.FORMING, RosterPhase.ENDED):
            return []
        orders: list[Order] = []
        if self._gentle:
            orders += self._while_gentle(now_s)
        order = self._formation(now_s)
        if order is not None:
            self._phase_before, self.phase = self.phase, RosterPhase.FORMING
            self._forming = order
            self.attempt = order.attempt
            self._held = None
            self._calm()
            orders.append(order)
        return orders

    def _while_running(self, now_s: float) -> list[Order]:
        if self._finished and len(self._finished) == len(self.members) - self._num_hung(
            without=self._finished
        ):
            return self.end(0, "")
        if self._trouble:
            # Where a machine leaves all workers drain; those that are not ready yet soon will be.
            drains = bool(self._leaving) and not self._is_hard
            limit_s = self.rules.drain_s if drains else self.rules.stop_s
            reason = "; ".join(self._trouble[:REASONS_MAX])
            return self._stop(reason, now_s, limit_s, gentle=drains)
        if self._reach:
            out = self._cut_off(self._places.keys(), now_s - self.rules.settle_s)
            if out:
                who = names(sorted(self._host(node) for node in out))
                reason = f"{who} cannot reach every other machine"
                return self._stop(reason, now_s, self.rules.stop_s)
        if self._takes_in(now_s):
            limit_s = self.rules.gentle_s
            return self._stop("new machines are taken in", now_s, limit_s, gentle=True)
        return []

    def _stop(
        self, reason: str, now_s: float, limit_s: float, *, gentle: bool = False
    ) -> list[Order]:
        self.phase = RosterPhase.STOPPING
        self._since_s = now_s
        self._until_s = now_s + limit_s
        self._late = {
            node: None
            for node in self.members
            if node in self._here
            and not (node in self._ready or node in self._leaving or node in self._hung)
        }
        self._calm()
        self._gentle = gentle
        orders: list[Order] = [StopWorkers(reason=reason, gentle=gentle)]
        return orders + self._decide(now_s)

    def _while_gentle(self, now_s: float) -> list[Order]:
        """Workers that stop by themselves cannot when one of them is lost: they wait for it."""
        rules = self.rules
        if self._trouble and not self._is_hard:  # one that leaves: the others are nearly done
            self._until_s = min(self._until_s, now_s + rules.drain_s)
            self._trouble = []
        if not self._late or not (self._trouble or now_s >= self._until_s):
            return []
        reason = "; ".join(self._trouble[:REASONS_MAX]) or "workers did not stop by themselves"
        self._until_s = now_s + rules.stop_s
        self._calm()
        return [StopWorkers(reason=reason)]

    def _calm(self) -> None:
        self._trouble, self._is_hard, self._gentle = [], False, False

    def _formation(self, now_s: float) -> Form | None:
        if self._must_wait(now_s):
            return None
        cut = self._cut_off(self._ready)
        picked = self._pick(cut, now_s) if self.out else ()
        if not self._is_enough(len(picked) if self.out else len(self._ready) - len(cut), now_s):
            return None
        required = not self._has_majority(self._left)
        may_go_on = 2 * len(self._silent) > len(self.members) - len(self._left)
        if required and may_go_on and now_s - self._lost_s < self.rules.patience_s:
            self.waits_for = "most of the machines, which may be alive elsewhere"
            return None
        held = self._held if self._held is not None else 0
        number = held if held > self.attempt else self.attempt + 1
        members = picked or self._pick(cut, now_s)
        return Form(attempt=number, members=members, required=required)

    def _pick(self, cut: set[str], now_s: float) -> tuple[str, ...]:
        """Members of an attempt that forms now, by rank."""
        ready = [(node, self._host(node)) for node in sorted(self._ready - cut, key=self._rank)]
        least, most = self.rules.min_nodes, self.rules.max_nodes
        return self.out.pick(ready, least=least, most=most, now_s=now_s)

    def _must_wait(self, now_s: float) -> bool:
        """Whether an attempt would be too early, whoever is ready."""
        rules = self.rules
        if self._first not in self._seats or self._first in self._leaving:
            self.waits_for = "another coordinator"
            return True
        came_s = max(self._since_s, self._arrival_s)
        is_expecting = (
            now_s - came_s < rules.expect_s and now_s - self._since_s < rules.expect_max_s
        )
        if self._expected and is_expecting:
            self.waits_for = "members of the last attempt"
            return True
        if self._late and now_s < self._until_s:
            late = [self._host(node) for node in itertools.islice(self._late, NAMES_MAX)]
            self.waits_for = f"the workers of {names(late, len(self._late))} to end"
            return True
        return False

    def _is_enough(self, count: int, now_s: float) -> bool:
        """Whether so many begin now, or wait a little for others that are on their way."""
        rules = self.rules
        if count < rules.min_nodes:
            self.waits_for = f"machines: {count} of {rules.min_nodes} are here"
            if self.fixed:
                self.waits_for += f", and the job's loader is tied to {self.fixed}"
            self._enough_s = None
            # As good as nothing runs: those who come later are waited for as at the start.
            self.phase = RosterPhase.GATHERING
            return False
        if self._enough_s is None:
            self._enough_s = now_s
        if self.phase is RosterPhase.STOPPING or count >= rules.max_nodes:
            return True
        if self._warming and now_s - self._enough_s < rules.warm_s:
            self.waits_for = "machines that warm up"
            return False
        is_quiet = now_s - self._arrival_s >= rules.gather_s
        if is_quiet or now_s - self._enough_s >= rules.gather_longest_s:
            return True
        self.waits_for = f"more machines: {count} of at most {rules.max_nodes} are here"
        return False

    def _takes_in(self, now_s: float) -> bool:
        """Whether those who wait are worth a pause."""
        room = self.rules.max_nodes - len(self.members)
        if self.out:  # those that take part for want of others give up their place
            room += sum(self.out.holds(self._host(node), now_s) for node in self.members)
        if room <= 0 or not self._ready:
            return False
        cut = self._reach.touching(self._places.keys())
        waiting = [self._seats[node] for node in self._ready if node not in cut]
        if self.out:
            waiting = [seat for seat in waiting if not self.out.bars(seat.host, now_s)]
        waiting.sort(key=lambda seat: seat.order)
        if not waiting:
            return False
        return self._intake.is_worth_it(
            [(s.host, now_s if s.ready_s is None else s.ready_s) for s in waiting[:room]],
            members=len(self.members),
            warming=len(self._warming),
            now_s=now_s,
        )
