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
to reach each other; its number is larger than that of any attempt that a member has heard of.
Machines that may still be alive somewhere else are outvoted or waited for: without more than half
of the members that are not known to be gone, a claim on storage is required, and not before
``patience_s``, so that a majority elsewhere has had its turn.

Rejected: re-forming whenever two machines cannot reach each other (for ever, when only that pair
is cut); waiting a fixed time for late machines after every loss (torchrun's last call: 30 s).
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable
from typing import Final

import msgspec

from outlast.policy.intake import Intake

REASONS_MAX: Final = 3


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """What the owner wants, and how long things are waited for; times in seconds.

    Attributes:
        min_nodes, max_nodes: machines in an attempt.
        gather_s: for more machines than the fewest, when nothing runs, after the last one came.
        warm_s: for machines that are warming up, when nothing runs.
        stop_s: for a living member to end its workers.
        gentle_s: for the same at a step's end, which may take long.
        patience_s: that those without a majority leave to the others.
        settle_s: for more words about who cannot reach whom.
        expect_s: for members of the last attempt to come to a new coordinator.
    """

    min_nodes: int
    max_nodes: int
    gather_s: float = 3.0
    warm_s: float = 60.0
    stop_s: float = 5.0
    gentle_s: float = 600.0
    patience_s: float = 6.0
    settle_s: float = 1.0
    expect_s: float = 3.0


class Phase(enum.Enum):
    """Where the job is."""

    GATHERING = "gathering"
    STOPPING = "stopping"
    FORMING = "forming"
    RUNNING = "running"
    ENDED = "ended"


class Stop(msgspec.Struct, frozen=True, kw_only=True):
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


class End(msgspec.Struct, frozen=True, kw_only=True):
    """To all: the job is over."""

    exit_code: int
    reason: str


Order = Stop | Form | Leaves | End


class _Seat:
    """One connected machine."""

    def __init__(self, node: str, host: str, order: int, now_s: float) -> None:
        self.node = node
        self.host = host
        self.order = order
        self.arrived_s = now_s
        self.ready_s: float | None = None
        self.warming = False
        self.leaving = False
        self.done = False

    @property
    def is_ready(self) -> bool:
        return self.ready_s is not None and not self.leaving


class Roster:
    """The coordinator's mind.

    Args:
        rules: see :class:`Rules`.
        now_s: any clock's seconds; the same clock for all calls.
        first: the coordinator's own machine, which gets rank 0.
        attempt: the largest number of an attempt that is known.
        held: a number that is claimed already, for the first attempt formed here, or None.
        members: of that attempt, if it may still run somewhere.
        gone: those of them that are known to be gone.
        awaited: those of them that are expected to come to this coordinator.
        intake: judges newcomers.
    """

    def __init__(
        self,
        rules: Rules,
        now_s: float,
        *,
        first: str,
        attempt: int = 0,
        held: int | None = None,
        members: Iterable[str] = (),
        gone: Iterable[str] = (),
        awaited: Iterable[str] = (),
        intake: Intake | None = None,
    ) -> None:
        self.rules = rules
        self.attempt = attempt
        self.members: tuple[str, ...] = tuple(members)
        self.phase = Phase.STOPPING if self.members else Phase.GATHERING
        self.waits_for = ""  # in words, while nothing runs
        self._first = first
        self._held = held
        self._seats: dict[str, _Seat] = {}
        self._count = 0
        self._gone: set[str] = set(gone)
        self._expected = set(awaited) - {first}
        self._apart: dict[frozenset[str], float] = {}
        self._since_s = now_s
        self._lost_s = now_s
        self._arrival_s = now_s
        self._trouble: list[str] = []
        self._gentle = False
        self._intake = intake or Intake()

    # --- facts ---------------------------------------------------------------------------------

    def joined(
        self, node: str, now_s: float, *, host: str = "", attempt: int = 0, warming: bool = False
    ) -> list[Order]:
        """A machine has connected; ``attempt`` is the largest number it has heard of."""
        self.attempt = max(self.attempt, attempt)
        self._seats[node] = _Seat(node, host or node, self._count, now_s)
        self._seats[node].warming = warming
        self._count += 1
        self._arrival_s = now_s
        self._gone.discard(node)
        self._expected.discard(node)
        return self._decide(now_s)

    def ready(self, node: str, now_s: float) -> list[Order]:
        """A machine's workers have ended, or it never had any: it waits for the next attempt."""
        seat = self._seats[node]
        seat.ready_s = now_s
        seat.warming = seat.done = False
        self._arrival_s = now_s
        if self.phase is Phase.RUNNING and node in self.members:
            self._trouble.append(f"the workers of {seat.host} ended")
        return self._decide(now_s)

    def lost(self, node: str, now_s: float, why: str, *, certain: bool) -> list[Order]:
        """A machine is gone; ``certain``: its process is known to have ended, or it said so."""
        seat = self._seats.pop(node, None)
        self._apart = {pair: t for pair, t in self._apart.items() if node not in pair}
        if seat is None:
            return []
        if node in self.members:
            self._lost_s = now_s
            if certain or seat.done:
                self._gone.add(node)
            if not seat.done or self.phase is not Phase.RUNNING:
                self._trouble.append(f"{seat.host} {why}")
            if not seat.leaving:
                self._intake.lost(seat.host, now_s)
        return self._decide(now_s)

    def leaving(self, node: str, now_s: float) -> list[Order]:
        """A machine has had notice: it takes no part in further attempts."""
        seat = self._seats[node]
        if seat.leaving:
            return []
        seat.leaving = True
        order = Leaves(node=node, goes_on=self._goes_on())
        return [order, *self._decide(now_s)]

    def done(self, node: str, now_s: float) -> list[Order]:
        """All workers of a member have finished their work."""
        self._seats[node].done = True
        return self._decide(now_s)

    def apart(self, one: str, other: str, now_s: float) -> list[Order]:
        """Two machines cannot reach each other."""
        if one != other:
            self._apart.setdefault(frozenset((one, other)), now_s)
        return self._decide(now_s)

    def together(self, one: str, other: str, now_s: float) -> list[Order]:
        """Two machines reach each other again."""
        self._apart.pop(frozenset((one, other)), None)
        return self._decide(now_s)

    def claimed(self, order: Form, now_s: float) -> bool:
        """The order's number is ours, or was not needed: whether the attempt starts now."""
        if self.phase is not Phase.FORMING or order.attempt != self.attempt:
            return False
        self.phase = Phase.RUNNING
        self.members = order.members
        self._gone, self._trouble, self._gentle = set(), [], False
        for node in order.members:
            self._seats[node].ready_s = None
        self._intake.formed(len(order.members), now_s, paused_s=now_s - self._since_s)
        return True

    def overtaken(self, attempt: int, now_s: float) -> None:
        """A number is somebody else's: the next is to be larger."""
        self.attempt = max(self.attempt, attempt)
        if self.phase is Phase.FORMING:
            self._stop_running(Phase.STOPPING, now_s)

    def end(self, exit_code: int, reason: str) -> list[Order]:
        """The job is over, whatever the machines do."""
        if self.phase is Phase.ENDED:
            return []
        self.phase = Phase.ENDED
        return [End(exit_code=exit_code, reason=reason)]

    def tick(self, now_s: float) -> list[Order]:
        """Time has gone by."""
        return self._decide(now_s)

    # --- decisions -----------------------------------------------------------------------------

    def _decide(self, now_s: float) -> list[Order]:
        if self.phase is Phase.RUNNING:
            return self._while_running(now_s)
        if self.phase is Phase.FORMING:
            if not self._trouble:
                return []
            self._stop_running(Phase.STOPPING, now_s)
        if self.phase is Phase.ENDED:
            return []
        order = self._formation(now_s)
        if order is None:
            return []
        self.phase = Phase.FORMING
        self.attempt = order.attempt
        self._held = None
        self._trouble = []
        return [order]

    def _while_running(self, now_s: float) -> list[Order]:
        if all(self._is_done(node) for node in self.members):
            return self.end(0, "")
        if self._trouble:
            # Where a machine leaves all workers drain; those that are not ready yet soon will be.
            drains = any(seat.leaving for seat in self._seats.values())
            return self._stop("; ".join(self._trouble[:REASONS_MAX]), now_s, gentle=drains)
        settled = [
            pair
            for pair, since_s in self._apart.items()
            if pair <= set(self.members) and now_s - since_s >= self.rules.settle_s
        ]
        if settled:
            out = self._cut_off(self.members)
            names = " and ".join(sorted(self._host(node) for node in out))
            return self._stop(f"{names} cannot reach every other machine", now_s)
        if self._takes_in(now_s):
            return self._stop("new machines are taken in", now_s, gentle=True)
        return []

    def _stop(self, reason: str, now_s: float, *, gentle: bool = False) -> list[Order]:
        self._stop_running(Phase.STOPPING, now_s)
        self._gentle = gentle
        orders: list[Order] = [Stop(reason=reason, gentle=gentle)]
        return orders + self._decide(now_s)

    def _stop_running(self, phase: Phase, now_s: float) -> None:
        self.phase = phase
        self._since_s = now_s
        self._trouble = []

    def _formation(self, now_s: float) -> Form | None:
        seats = sorted(self._seats.values(), key=self._rank)
        ready = [seat.node for seat in seats if seat.is_ready]
        out = self._cut_off(ready)
        pool = [node for node in ready if node not in out]
        if self._must_wait(pool, now_s):
            return None
        required = not self._has_majority()
        if required and self.members and now_s - self._lost_s < self.rules.patience_s:
            self.waits_for = "the other half of the machines, which may be alive elsewhere"
            return None
        members = tuple(pool[: self.rules.max_nodes])
        held = self._held if self._held is not None else 0
        number = held if held > self.attempt else self.attempt + 1
        return Form(attempt=number, members=members, required=required)

    def _must_wait(self, pool: list[str], now_s: float) -> bool:
        """Whether an attempt of ``pool`` would be too early."""
        rules = self.rules
        first = self._seats.get(self._first)
        if first is None or first.leaving:
            self.waits_for = "another coordinator"
            return True
        coming = self._coming(now_s)
        if coming:
            self.waits_for = coming
            return True
        if len(pool) < rules.min_nodes:
            # As good as nothing runs: those who come later are waited for as at the start.
            self.waits_for = f"machines: {len(pool)} of {rules.min_nodes} are here"
            self.phase = Phase.GATHERING
            return True
        if self.phase is Phase.STOPPING or len(pool) >= rules.max_nodes:
            return False
        warming = any(seat.warming for seat in self._seats.values())
        if warming and now_s - self._since_s < rules.warm_s:
            self.waits_for = "machines that warm up"
            return True
        self.waits_for = f"more machines: {len(pool)} of at most {rules.max_nodes} are here"
        return now_s - self._arrival_s < rules.gather_s

    def _coming(self, now_s: float) -> str:
        """Who is about to be ready, in words."""
        if self._expected and now_s - self._since_s < self.rules.expect_s:
            return "members of the last attempt"
        limit_s = self.rules.gentle_s if self._gentle else self.rules.stop_s
        if now_s - self._since_s >= limit_s:
            return ""
        late = [
            self._host(seat.node)
            for seat in self._seats.values()
            if not seat.is_ready and not seat.leaving and seat.node in self.members
        ]
        return f"the workers of {' and '.join(late)} to end" if late else ""

    def _rank(self, seat: _Seat) -> tuple[bool, int, int]:
        """The coordinator's machine first, then the members as they were, then by arrival."""
        is_member = seat.node in self.members
        place = self.members.index(seat.node) if is_member else len(self.members)
        return seat.node != self._first, place, seat.order

    def _cut_off(self, nodes: Iterable[str]) -> set[str]:
        """Who has to leave so that the others all reach each other: the fewest, or nearly so.

        Whoever is cut off from most goes first; of equals the one of the higher rank.
        """
        those = set(nodes)
        pairs = [pair for pair in self._apart if pair <= those]
        out: set[str] = set()
        while pairs:
            count = Counter(node for pair in pairs for node in pair if node != self._first)
            worst = max(count, key=lambda node: (count[node], self._rank(self._seats[node])))
            out.add(worst)
            pairs = [pair for pair in pairs if worst not in pair]
        return out

    def _has_majority(self) -> bool:
        """Whether more than half of the members that may be alive are here."""
        alive = [node for node in self.members if node not in self._gone]
        here = [node for node in alive if node in self._seats]
        return bool(alive) and 2 * len(here) > len(alive)

    def _goes_on(self) -> bool:
        staying = [seat for seat in self._seats.values() if not seat.leaving and not seat.warming]
        return len(staying) >= self.rules.min_nodes

    def _takes_in(self, now_s: float) -> bool:
        """Whether those who wait are worth a pause."""
        room = self.rules.max_nodes - len(self.members)
        if room <= 0:
            return False
        waiting = [
            seat
            for seat in self._seats.values()
            if seat.is_ready and seat.node not in self.members and self._reaches_members(seat.node)
        ]
        if not waiting:
            return False
        return self._intake.is_worth_it(
            {seat.host: seat.ready_s or now_s for seat in waiting[:room]},
            members=len(self.members),
            warming=sum(seat.warming for seat in self._seats.values()),
            now_s=now_s,
        )

    def _reaches_members(self, node: str) -> bool:
        return not any(frozenset((node, other)) in self._apart for other in self.members)

    def _is_done(self, node: str) -> bool:
        seat = self._seats.get(node)
        return node in self._gone if seat is None else seat.done

    def _host(self, node: str) -> str:
        seat = self._seats.get(node)
        return seat.host if seat else node
