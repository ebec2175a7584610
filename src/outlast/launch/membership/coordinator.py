"""The coordinator's hands: it tells the roster what happens, and everybody what the roster orders.

Runs in the hub's thread of one agent. Storage is asked by the clerk; nothing here waits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec

from outlast.attempt.link import open_store
from outlast.launch.membership.hub import Hub, Peer
from outlast.launch.membership.messages import (
    Apart,
    Bye,
    Departs,
    Done,
    Exclude,
    Excluded,
    Fill,
    Finish,
    Fixed,
    Go,
    Halt,
    JobEnded,
    Join,
    Leaving,
    Member,
    Needs,
    Readmit,
    Ready,
    Refused,
    Remains,
    Superseded,
    Together,
    Waits,
    Welcome,
    WorkersEnded,
    changes,
    decode,
    encode,
    fingerprint,
)
from outlast.peer.claims import Claim, Claims, Clerk, SignOfLife
from outlast.policy.membership import (
    EndJob,
    Excludes,
    Form,
    Leaves,
    Order,
    Roster,
    RosterPhase,
    StopWorkers,
)

logger = logging.getLogger(__name__)

ALIVE_S: Final = 1.0
TICK_S: Final = 0.05
CLAIM_S: Final = 1.0  # that a majority waits for storage
CLAIM_AGAIN_S: Final = 1.0
WORDS_S: Final = 0.5  # between two words about what is waited for, to so many machines
WORDS_MACHINES: Final = 100
IDLE: Final = (RosterPhase.GATHERING, RosterPhase.STOPPING)


class _AdmittedMember(msgspec.Struct):
    """A machine that has joined; ``peer`` is None for the coordinator's own."""

    member: Member
    peer: Peer | None


class Coordinator:
    """One agent in the coordinator's role.

    Args:
        hub: its connections.
        clerk: asks storage.
        claims: where numbers are claimed.
        me: its own machine.
        roster: decides.
        store_host: address that a worker store is served at.
        term: the name of this time of coordinating, which its claims carry.
        held: a number that is claimed already, or None.
        deliver: takes what is said to its own machine.
        on_overtaken: told that somebody else coordinates.
        last_go: the last attempt that its own machine was in, if any.
        script: what the job runs, as far as known here.
    """

    def __init__(
        self,
        hub: Hub,
        clerk: Clerk,
        claims: Claims,
        me: Member,
        roster: Roster,
        *,
        store_host: str,
        term: str,
        held: int | None,
        deliver: Callable[[Any], None],
        on_overtaken: Callable[[], None],
        last_go: Go | None,
        script: str,
    ) -> None:
        self.roster = roster
        self._hub = hub
        self._clerk = clerk
        self._claims = claims
        self._me = me
        self._store_host = store_host
        self._term = term
        self._deliver = deliver
        self._on_overtaken = on_overtaken
        self._admitted: dict[str, _AdmittedMember] = {}
        self._stores: list[Any] = []
        self._unclaimed: Claim | None = None  # of a running attempt
        # The largest number that was claimed by us, or by one whose members we go on with.
        self._known = held if held is not None else roster.attempt
        self._count = 0
        self._words, self._words_s = "", 0.0
        self._over: JobEnded | None = None
        self._last_go = last_go
        self._script = script
        self._fingerprint = "" if last_go is None else fingerprint(last_go)
        self._knows: set[str] = set()  # who has its list
        self._is_closed = False
        self._has_sessions = False  # the workers of the attempt that runs, as far as is known
        self._has_asked = held is not None  # storage for a claim
        hub.later(TICK_S, self._tick)
        hub.later(0.0, self._live)

    # --- machines --------------------------------------------------------------------------------

    def admit(self, peer: Peer, join: Join) -> None:
        """A machine has connected and said who it is."""
        if self._over is not None:
            peer.send(encode(self._over))
            return
        if join.script and self._script and join.script != self._script:
            self._refuse(peer, join)
            return
        self._script = self._script or join.script
        known = self._admitted.get(join.node)
        if known is not None and known.peer is not None:
            known.peer.close()  # it has connected anew
        member = Member(
            node=join.node,
            host=join.host,
            address=join.address,
            workers=join.workers,
            keeper=join.keeper,
            labels=join.labels,
        )
        self._admitted[join.node] = _AdmittedMember(member, peer)
        peer.on_message = lambda data: self._from_peer(join.node, peer, data)
        peer.on_closed = lambda why, certain: self._lost(join.node, peer, why, certain=certain)
        peer.on_hung = lambda is_hung: self._hung(join.node, peer, is_hung=is_hung)
        runs = self.roster.phase is RosterPhase.RUNNING
        peer.send(encode(self._welcome(runs=runs)))
        self._joined(join)
        if self.roster.phase is RosterPhase.RUNNING:
            self._tell([join.node], self._no_place(join.node))
        elif self._words or runs:  # who was told that others train waits for more
            self._tell([join.node], self._waits(self._words))

    def join_own(self, join: Join) -> None:
        """The coordinator's own machine takes part."""
        self._admitted[join.node] = _AdmittedMember(self._me, None)
        self._deliver(self._welcome(runs=False))
        self._joined(join)

    def _welcome(self, *, runs: bool) -> Welcome:
        low, high = self.roster.asked.min_nodes, self.roster.asked.max_nodes
        return Welcome(node=self._me.node, min_nodes=low, max_nodes=high, runs=runs)

    def hear(self, node: str, message: Any) -> None:
        """Act on what a machine says."""
        now_s = time.monotonic()
        roster = self.roster
        match message:
            case Ready() | Fill():
                orders = self._ready_or_fill(node, message)
            case Leaving() | Remains():
                orders = self._leaving_or_not(node, message)
            case Done():
                orders = roster.done(node, now_s)
            case WorkersEnded(attempt=attempt):
                orders = roster.ended(node, now_s, attempt=attempt)
            case Exclude() | Readmit():
                orders = self._exclude_or_readmit(message)
            case Fixed(machines=machines):
                orders = self._fix(machines)
            case Needs(seconds=seconds):
                orders = roster.needs(seconds, now_s)
            case Apart(other=other):
                orders = roster.apart(node, other, now_s) if other in self._admitted else []
            case Together(other=other):
                orders = roster.together(node, other, now_s)
            case Finish(exit_code=code, reason=reason):
                orders = roster.end(code, reason)
            case Bye(reason=reason, broke=broke):
                self._gone(node)
                orders = roster.lost(node, now_s, reason, certain=True, left=True, broke=broke)
            case _:
                raise ValueError(f"{message.__struct_config__.tag} is not for a coordinator")
        self._obey(orders)

    def _leaving_or_not(self, node: str, message: Leaving | Remains) -> list[Order]:
        now_s = time.monotonic()
        if isinstance(message, Leaving):
            return self.roster.leaving(node, now_s)
        self._tell_all(Remains(node=node))
        return self.roster.remains(node, now_s)

    def _ready_or_fill(self, node: str, message: Ready | Fill) -> list[Order]:
        now_s = time.monotonic()
        if isinstance(message, Fill):
            return self.roster.fill(node, now_s)
        admitted = self._admitted.get(node)
        if admitted is not None and message.workers:
            admitted.member = msgspec.structs.replace(admitted.member, workers=message.workers)
        return self.roster.ready(node, now_s, attempt=message.attempt)

    def has_ended(self, node: str) -> None:
        """A member's process has ended, as a machine's connection to it says."""
        if node not in self._admitted and not self._is_closed:
            self._obey(self.roster.has_ended(node, time.monotonic()))

    @property
    def is_untried(self) -> bool:
        """Whether this time of coordinating has come to nothing yet, on storage neither."""
        return not (self._is_closed or self._has_asked)

    @property
    def can_give_way(self) -> bool:
        """Whether another may coordinate in our place, as no attempt is on its way here.

        A majority that is too few waits for machines that may be with the one that it has lost.
        """
        return self.is_untried and (self.roster.lacks_majority or self.roster.lacks_machines)

    def give_way(self) -> None:
        """Stop coordinating: those who are here are to look for another, as we do."""
        self._tell(
            [node for node, admitted in self._admitted.items() if admitted.peer], Superseded()
        )
        self.close()

    def close(self) -> None:
        """Stop coordinating, without a word: others see the connections end."""
        self._is_closed = True
        for admitted in self._admitted.values():
            if admitted.peer is not None:
                admitted.peer.close()
        self._admitted = {}

    def _refuse(self, peer: Peer, join: Join) -> None:
        """Two jobs in one directory: machines of the second must not take part in the first."""
        reason = (
            f"the job here runs {self._script} (coordinated by {self._me.host}), and this machine "
            f"was started with {join.script}; give the same script on all machines, or another "
            "--dir"
        )
        logger.warning("%s was refused: it runs %s", join.host, join.script)
        peer.send(encode(Refused(reason=reason)))  # and it goes: a reset could overtake the word

    def _exclude_or_readmit(self, message: Exclude | Readmit) -> list[Order]:
        now_s = time.monotonic()
        if isinstance(message, Exclude):
            return self.roster.left_out(message.out, now_s, gentle=message.gentle)
        self._tell_all(message)
        return self.roster.readmit(message.host, now_s)

    def _fix(self, machines: int) -> list[Order]:
        """The workers say whether their data are tied to the number of machines."""
        is_new = machines != self.roster.fixed
        if is_new:
            self.roster.fix(machines)
            self._tell_all(Fixed(machines=machines))
        if self.roster.phase is RosterPhase.RUNNING and (is_new or not self._has_sessions):
            self._has_sessions = True
            self._tell_those_who_wait()
        return self.roster.tick(time.monotonic()) if is_new else []

    def _hung(self, node: str, peer: Peer, *, is_hung: bool) -> None:
        admitted = self._admitted.get(node)
        if (
            admitted is None
            or admitted.peer is not peer
            or self._is_closed
            or self._over is not None
        ):
            return
        now_s = time.monotonic()
        if is_hung:
            logger.warning(
                "the agent of %s does not move; its kernel answers", admitted.member.host
            )
            self._obey(self.roster.hung(node, now_s, heard_s=peer.heard_s))
        else:
            self._obey(self.roster.moves(node, now_s))

    def _joined(self, join: Join) -> None:
        now_s = time.monotonic()
        # Who was in the newest attempt knows what its data are tied to; an older one is outdated.
        is_newest = (
            self.roster.phase is not RosterPhase.RUNNING and join.attempt >= self.roster.number
        )
        if join.fixed and is_newest:
            self.roster.fix(join.fixed)
        for out in join.out:
            self.roster.out.put(out, now_s)
        self._knows.discard(join.node)
        if join.knows and join.knows == self._fingerprint:
            self._knows.add(join.node)
        self._obey(
            self.roster.joined(
                join.node, now_s, host=join.host, attempt=join.attempt, warming=join.warming
            )
        )

    def _from_peer(self, node: str, peer: Peer, data: bytes) -> None:
        try:
            self.hear(node, decode(data))
        except ValueError as error:
            logger.warning("%s says what is not understood: %s", peer.address, error)
            peer.part()
            self._lost(node, peer, "says what is not understood", certain=False)

    def _lost(self, node: str, peer: Peer, why: str, *, certain: bool) -> None:
        admitted = self._admitted.get(node)
        if admitted is None or admitted.peer is not peer or self._is_closed:
            return  # it has another connection by now
        self._gone(node)
        self._obey(self.roster.lost(node, time.monotonic(), why, certain=certain))
        if self.roster.phase is RosterPhase.RUNNING and self._has_sessions:
            self._tell_those_who_wait()

    def _gone(self, node: str) -> None:
        self._knows.discard(node)
        admitted = self._admitted.pop(node, None)
        if admitted is not None and admitted.peer is not None:
            admitted.peer.close()

    # --- orders ----------------------------------------------------------------------------------

    def _obey(self, orders: list[Order]) -> None:
        for order in orders:
            match order:
                case StopWorkers(reason=reason, gentle=gentle):
                    self._tell_members(Halt(reason=reason, gentle=gentle))
                case Form():
                    self._claim(order)
                case Excludes(out=out, goes=goes):
                    self._tell_all(Excluded(out=out, goes=goes))
                case Leaves(node=node, goes_on=goes_on):
                    host = self._admitted[node].member.host
                    self._tell_all(Departs(node=node, host=host, goes_on=goes_on))
                case EndJob(exit_code=code, reason=reason):
                    self._end(JobEnded(exit_code=code, reason=reason))

    def _claim(self, form: Form) -> None:
        self._has_asked = True
        claim = Claim(
            attempt=form.attempt,
            node=self._me.node,
            host=self._me.host,
            address=self._hub.address,
            term=self._term,
            members=form.members,
        )
        # A number that is held is asked for again: others may have given us up meanwhile.
        known = self._known
        self._clerk.ask(
            lambda: self._claims.take(claim, known),
            lambda taken, problem: self._answered(form, claim, taken, problem),
        )
        if not form.required:
            self._hub.later(CLAIM_S, lambda: self._go_without(form, claim))

    def _answered(self, form: Form, claim: Claim, taken: bool | None, problem: Any) -> None:
        """Storage has said whether the number is ours."""
        if self._is_closed:
            return
        if problem is None and not taken:
            self._overtaken()
        elif problem is None:
            self._known = max(self._known, claim.attempt)
            if self._unclaimed == claim:
                self._unclaimed = None
            self._start(form)
        else:
            logger.warning("attempt %d cannot be claimed: %s", form.attempt, problem)
            if not form.required:
                self._go_without(form, claim)
            elif self._is_current(form):
                self._hub.later(CLAIM_AGAIN_S, lambda: self._claim_later(form))

    def _claim_later(self, form: Form) -> None:
        """Storage was away: whoever has formed without it has the first word when it is back."""
        if not self._is_current(form):
            return

        def answered(_: int, problem: OSError | None) -> None:
            if problem is not None:
                self._hub.later(CLAIM_AGAIN_S, lambda: self._claim_later(form))
            else:
                wait_s = self.roster.rules.patience_s if self.roster.members else 0.0
                self._hub.later(wait_s, lambda: self._claim_again(form))

        self._clerk.ask(self._claims.newest_number, answered)

    def _claim_again(self, form: Form) -> None:
        if self._is_current(form):
            self._claim(form)

    def _is_current(self, form: Form) -> bool:
        roster = self.roster
        is_forming = roster.phase is RosterPhase.FORMING and not self._is_closed
        return is_forming and roster.attempt == form.attempt

    def _go_without(self, form: Form, claim: Claim) -> None:
        """A majority does not wait for storage; the claim is made up for."""
        if self._is_current(form):
            self._unclaimed = claim
            self._start(form)

    def _start(self, form: Form) -> None:
        if not self.roster.claimed(form, time.monotonic()):
            return
        store, port = open_store(self._store_host)
        self._stores = [*self._stores[-1:], store]  # workers of the last one may still be ending
        host = f"[{self._store_host}]" if ":" in self._store_host else self._store_host
        members = tuple(self._admitted[node].member for node in form.members)
        inside = set(form.members)
        aside = tuple(node for node in self._admitted if node not in inside)
        go = Go(
            attempt=form.attempt,
            members=members,
            store=f"{host}:{port}",
            aside=aside,
            fixed=self.roster.fixed,
            term=self._term,
        )
        self._has_sessions = False
        short = changes(self._last_go, go)
        knows = self._knows & set(form.members) if short is not None else set()
        if short is not None:
            self._tell([node for node in form.members if node in knows], short)
        self._tell([node for node in form.members if node not in knows], go)
        self._tell_those_who_wait()
        self._last_go, self._knows = go, set(form.members)
        self._fingerprint = fingerprint(go)

    def _no_place(self, node: str) -> Waits:
        """To those who come while an attempt runs, or wait aside."""
        if out := self.roster.out.words(self._admitted[node].member.host, time.monotonic()):
            return Waits(words=out, runs=True)
        count, most = len(self.roster.members), self.roster.rules.max_nodes
        words = f"a place: {count} of at most {most} machines train"
        if self.roster.fixed:
            words += f", and the job's loader is tied to {most}"
        return Waits(words=words, runs=True, workers=self._workers_before(node))

    def _workers_before(self, node: str) -> tuple[int, ...]:
        """How many workers those have who come before ``node`` if all who wait are taken in.

        Empty where it is not to begin beside others: it is one of them, there is no place, or
        nobody knows of a session that it could join.
        """
        inside, now_s = set(self.roster.members), time.monotonic()
        if not self._has_sessions or self._last_go is None or node in inside:
            return ()
        found = [one.workers for one in self._last_go.members]
        for other, admitted in self._admitted.items():
            if len(found) >= self.roster.rules.max_nodes:
                return ()
            if other == node:
                return tuple(found)
            if other not in inside and not self.roster.out.words(admitted.member.host, now_s):
                found.append(admitted.member.workers)
        return ()

    def _tell_those_who_wait(self) -> None:
        inside = set(self.roster.members)
        for node in [one for one in self._admitted if one not in inside]:
            self._tell([node], self._no_place(node))

    def _waits(self, words: str) -> Waits:
        """While nothing runs: for whom machines wait that could go on if they were more."""
        return Waits(words=words, lacks=self.roster.phase is RosterPhase.GATHERING)

    def _end(self, over: JobEnded) -> None:
        self._over = over
        self._count += 1
        alive = SignOfLife(
            attempt=max(self.roster.number, self._known),
            node=self._me.node,
            count=self._count,
            over=True,
            exit_code=over.exit_code,
            reason=over.reason,
        )
        self._clerk.ask(lambda: self._claims.say_alive(alive), lambda *_: None)
        self._tell_all(over)

    def _tell_members(self, message: Any) -> None:
        self._tell(self.roster.members, message)

    def _tell_all(self, message: Any) -> None:
        self._tell(list(self._admitted), message)

    def _tell(self, nodes: Iterable[str], message: Any) -> None:
        data = encode(message)  # once: a list of ten thousand machines is large
        for node in nodes:
            admitted = self._admitted.get(node)
            if admitted is None:
                continue
            if admitted.peer is None:
                self._deliver(message)
            else:
                admitted.peer.send(data)

    # --- time ------------------------------------------------------------------------------------

    def _tick(self) -> None:
        if self._is_closed or self._over is not None:
            return
        self._obey(self.roster.tick(time.monotonic()))
        self._say_what_it_waits_for()
        self._hub.later(TICK_S, self._tick)

    def _live(self) -> None:
        """Leave a sign of life, look for a newer claim, make up for one that is missing."""
        if self._is_closed or self._over is not None:
            return
        if not self._clerk.is_busy:  # storage that hangs is not asked twice
            self._count += 1
            alive = SignOfLife(attempt=self.roster.attempt, node=self._me.node, count=self._count)
            missing, known = self._unclaimed, self._known
            self._clerk.ask(lambda: self._look(alive, missing, known), self._looked)
        self._hub.later(ALIVE_S, self._live)

    def _look(
        self, alive: SignOfLife, missing: Claim | None, known: int
    ) -> tuple[Claim | None, SignOfLife | None]:
        """In the clerk's thread: the newest claim, and the last sign of life of another's."""
        if missing is not None:
            self._claims.take(missing, known)
        newest = self._claims.newest()
        was_ours = newest is not None and not newest.node and newest.attempt <= known
        if newest is None or newest.node == self._me.node or was_ours:  # it cannot be read any more
            self._claims.say_alive(alive)
            self._claims.forget_old()
            return newest, None
        return newest, self._claims.alive()

    def _looked(
        self, found: tuple[Claim | None, SignOfLife | None] | None, problem: OSError | None
    ) -> None:
        if problem is not None or found is None or found[0] is None or self._is_closed:
            return
        newest, sign = found[0], found[1]
        if sign is not None and sign.over and sign.attempt >= self._known:
            # The predecessor had ended the job; its word did not reach us.
            self._obey(self.roster.end(sign.exit_code, sign.reason))
        elif newest.node != self._me.node and newest.attempt > self._known:
            self._overtaken()
        elif newest.node == self._me.node:
            self._known = max(self._known, newest.attempt)
            if self._unclaimed is not None and newest.attempt >= self._unclaimed.attempt:
                self._unclaimed = None

    def _overtaken(self) -> None:
        logger.warning("another machine coordinates this job by now")
        self.give_way()
        self._on_overtaken()

    def _say_what_it_waits_for(self) -> None:
        """For people: now and then is enough, and the rarer the more there are who hear it."""
        now_s = time.monotonic()
        if now_s < self._words_s:
            return
        words = self.roster.waits_for if self.roster.phase in IDLE else ""
        if self.roster.phase is RosterPhase.FORMING:
            words = "storage, for the claim of the next attempt"
        if words != self._words:
            self._words = words
            self._words_s = now_s + WORDS_S * max(1.0, len(self._admitted) / WORDS_MACHINES)
            if words:
                self._tell_all(self._waits(words))
