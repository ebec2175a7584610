"""The coordinator's role: the real roster, and a model of the thread that serves it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from outlast.policy.exclusion import Intake
from outlast.policy.membership import EndJob, Form, Leaves, Order, Roster, RosterPhase, StopWorkers
from simulated_machines.parts import Machine, Server

if TYPE_CHECKING:
    from simulated_machines.cluster import Cluster

TICK_S: Final = 0.05
ALIVE_S: Final = 1.0
CHANGE_BYTES: Final = 2000.0  # of a list as what has changed in it


class Coordinator:
    """The role: a roster, and what its thread does for it."""

    def __init__(self, cluster: Cluster, me: Machine, held: int | None, expected: set[str]) -> None:
        self.cluster, self.me = cluster, me
        self.life = me.life
        self.known = held if held is not None else me.attempt
        self.thread = Server(cluster.clock)
        self.guests: dict[str, tuple[Machine, int]] = {}
        self.is_over = False
        self._count = 0
        self.list = me.members  # of the last attempt that was heard of here
        self._knows: set[str] = set()  # who has it
        self._form_s = self._stop_s = cluster.clock.now_s
        self._cause = "a new coordinator"
        self.roster = Roster(
            cluster.rules,
            cluster.clock.now_s,
            first=me.name,
            attempt=me.attempt,
            held=held,
            members=me.members,
            awaited=expected,
            intake=Intake(),
        )
        self._tick()
        self._live()

    @property
    def is_there(self) -> bool:
        """Whether its process lives and has the role."""
        return not self.is_over and self.me.is_up and self.me.life == self.life

    def hear(self, what: Callable[[float], list[Order]], *, cost_s: float | None = None) -> None:
        """A message comes: the thread turns to it when it has time."""
        cost_s = self.cluster.costs.receive_s if cost_s is None else cost_s
        self.cluster.count("received")
        self.cluster.clock.after(self.thread.spend(cost_s), lambda: self.act(what))

    def act(self, what: Callable[[float], list[Order]]) -> None:
        """Ask the roster, and obey; its processor time is real, and measured."""
        if not self.is_there:
            return
        began = time.thread_time()
        orders = what(self.cluster.clock.now_s)
        self.cluster.thought(time.thread_time() - began)
        for order in orders:
            self._obey(order)

    def admit(self, machine: Machine) -> None:
        """A machine has joined."""
        life = machine.life

        def join(now_s: float) -> list[Order]:
            if machine.life != life or not machine.is_up:
                return []
            if machine.attempt and machine.members == self.list:
                self._knows.add(machine.name)
            self.guests[machine.name] = (machine, life)
            return self.roster.joined(
                machine.name, now_s, attempt=machine.attempt, warming=machine.is_warming
            )

        self.hear(join, cost_s=self.cluster.costs.accept_s)

    def lost(self, name: str, why: str, *, certain: bool, left: bool = False) -> None:
        """A connection is over, as its thread sees it."""

        def lose(now_s: float) -> list[Order]:
            if name not in self.guests:
                return []
            del self.guests[name]
            self._knows.discard(name)
            return self.roster.lost(name, now_s, why, certain=certain, left=left)

        self.hear(lose)

    def _obey(self, order: Order) -> None:
        match order:
            case StopWorkers(reason=reason):
                self._stop_s, self._cause = self.cluster.clock.now_s, reason
                for name in self.roster.members:
                    self._tell(name, self.cluster.halted)
            case Form():
                self._form_s = self.cluster.clock.now_s
                kinds = ("list", "read", "put_new")
                self.cluster.storage.ask(kinds, lambda: self._claimed(order))
            case Leaves() | EndJob():
                pass

    def _tell(
        self, name: str, heard: Callable[[Machine, Coordinator], None], num_bytes: float = 100.0
    ) -> None:
        guest = self.guests.get(name)
        if guest is None:
            return
        costs, (machine, life) = self.cluster.costs, guest
        self.cluster.count("sent")
        self.cluster.sent_bytes += num_bytes
        cost_s = costs.send_s + num_bytes / costs.seal_bytes_s + num_bytes / costs.wire_bytes_s

        def arrive() -> None:
            if machine.is_up and machine.life == life and machine.follows is self:
                heard(machine, self)

        self.cluster.clock.after(self.thread.spend(cost_s) + costs.latency_s, arrive)

    def _claimed(self, form: Form) -> None:
        if not self.is_there:
            return
        if not self.cluster.storage.take(self.me.number, form.attempt, self.known):
            self._give_up()
            return
        self.known = max(self.known, form.attempt)
        now_s = self.cluster.clock.now_s
        began = time.thread_time()
        starts = self.roster.claimed(form, now_s)
        self.cluster.thought(time.thread_time() - began)
        if not starts:
            return
        whole = self.cluster.costs.member_bytes * len(form.members)
        for name in form.members:
            changed = name in self._knows and self.cluster.tells_changes
            self._tell(name, self._go(form), CHANGE_BYTES if changed else whole)
        self.list, self._knows = form.members, set(form.members)
        told_s = now_s + self.thread.spend(0.0) + self.cluster.costs.latency_s
        self.cluster.formed_one(form, self._stop_s, self._form_s, told_s, self._cause)

    @staticmethod
    def _go(form: Form) -> Callable[[Machine, Coordinator], None]:
        def go(machine: Machine, _: Coordinator) -> None:
            machine.attempt, machine.members = form.attempt, form.members

        return go

    def _give_up(self) -> None:
        self.is_over = True
        for machine, life in self.guests.values():
            if machine.life == life and machine.follows is self:
                machine.follows = None
                self.cluster.seek(machine)

    def _tick(self) -> None:
        if self.is_there:
            if self.roster.phase is not RosterPhase.ENDED:
                self.act(self.roster.tick)
            self.cluster.clock.after(TICK_S, self._tick)

    def _live(self) -> None:
        if self.is_there:
            self._count += 1
            kinds = ("list", "read", "put", "list")
            self.cluster.storage.ask(kinds, self._looked)
            self.cluster.clock.after(ALIVE_S, self._live)

    def _looked(self) -> None:
        storage = self.cluster.storage
        if not self.is_there:
            return
        newest = storage.newest
        if newest > self.known and storage.claims[newest] != self.me.number:
            self._give_up()
        elif storage.claims.get(newest) == self.me.number:
            storage.sign = (self.me.number, self._count)
