"""Machines, their network and their storage, around one job's membership.

The runtime's parts that are bound to sockets are stood in for by models with the same rules: a
machine seeks the coordinator on storage, follows it or becomes it (``launch/membership/node``); the
coordinator tells its roster what happens and obeys (``launch/membership/coordinator``).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Final

from outlast.planner.job import Clock, MachineLoss
from outlast.policy.membership import Form, MembershipRules, Order
from outlast.policy.succession import Seeking, Silence, successors
from simulated_machines.coordinator import Coordinator
from simulated_machines.losses import Place
from simulated_machines.parts import Costs, Formed, Machine, Storage

GONE_S: Final = 2.5  # without a sign of life of one that refuses


class Cluster:
    """All of it.

    Args:
        machines: how many.
        rules: of the job.
        costs: how long things take.
        seed: of all chance.
        place: racks and zones.
        tells_changes: an attempt's list is sent as what has changed, where that is known.
    """

    def __init__(
        self,
        machines: int,
        rules: MembershipRules,
        costs: Costs,
        *,
        seed: int,
        place: Place = Place(),  # noqa: B008 - immutable
        tells_changes: bool = True,
    ) -> None:
        self.clock = Clock()
        self.chance = random.Random(seed)
        self.rules, self.costs, self.place = rules, costs, place
        self.tells_changes = tells_changes
        self.storage = Storage(self.clock, self.chance, costs.storage_s)
        self.machines = [Machine(number) for number in range(machines)]
        self.formed: list[Formed] = []
        self.thoughts_s: list[float] = []
        self.messages: Counter[str] = Counter()
        self.by_second: Counter[int] = Counter()
        self.sent_bytes = 0.0
        self.coordinators: dict[int, Coordinator] = {}
        self._lost_s: float | None = None
        self._heirs: tuple[tuple[tuple[str, ...], str], list[str]] | None = None

    # --- what is measured ---------------------------------------------------------------------

    def count(self, kind: str) -> None:
        """A message of the coordinator."""
        self.messages[kind] += 1
        self.by_second[int(self.clock.now_s)] += 1

    def thought(self, took_s: float) -> None:
        """The roster has decided something, in real seconds."""
        self.thoughts_s.append(took_s)

    def formed_one(
        self, form: Form, stop_s: float, form_s: float, told_s: float, cause: str
    ) -> None:
        """An attempt has started."""
        lost_s = stop_s if self._lost_s is None else min(self._lost_s, stop_s)
        self._lost_s = None
        self.formed.append(
            Formed(
                attempt=form.attempt,
                machines=len(form.members),
                lost_s=lost_s,
                stop_s=stop_s,
                form_s=form_s,
                claimed_s=self.clock.now_s,
                told_s=told_s,
                cause=cause,
            )
        )

    # --- what happens -------------------------------------------------------------------------

    def start(self, number: int, *, warm_s: float = 0.0) -> None:
        """A machine's agent begins; its workers can start after ``warm_s``."""
        machine = self.machines[number]
        if machine.is_up:
            return
        machine.life += 1
        machine.is_up, machine.follows, machine.leaves = True, None, False
        machine.attempt = machine.past = 0
        machine.members = ()
        machine.sign = None
        machine.is_warming = warm_s > 0
        life = machine.life

        def warmed() -> None:
            if machine.life == life and machine.is_up:
                machine.is_warming = False
                if machine.follows is not None:
                    self._say_ready(machine)

        self.clock.after(warm_s, warmed)
        self.seek(machine)

    def lose(self, loss: MachineLoss) -> None:
        """Machines go."""
        names = [self.machines[one] for one in loss.machines if self.machines[one].is_up]
        if not names:
            return
        if self._lost_s is None and any(machine.attempt for machine in names):
            self._lost_s = self.clock.now_s
        for machine in names:
            self._lose_one(machine, loss.how)
            self._come_back(machine.number, loss.back_s)

    def _come_back(self, number: int, back_s: float) -> None:
        if back_s < float("inf"):
            self.clock.after(back_s, lambda: self.start(number, warm_s=self.costs.warm_s))

    def _lose_one(self, machine: Machine, how: str) -> None:
        at, name = machine.follows, machine.name
        machine.is_up = False
        role = self.coordinators.pop(machine.number, None)
        if role is not None:
            role.is_over = True
            self._coordinator_lost(role, silent=how == "silent")
        elif at is not None:
            if how == "silent":
                self.clock.after(
                    self._silence_s(len(at.guests)),
                    lambda: at.lost(name, "has been silent", certain=False),
                )
            else:
                left = how == "notice"
                words = "left" if left else "has ended"
                self.clock.after(
                    self.costs.latency_s, lambda: at.lost(name, words, certain=True, left=left)
                )

    def _silence_s(self, peers: int) -> float:
        """How long the real judgement takes to find a machine that has just gone silent."""
        silence = Silence(self.costs.silence_s)
        beat_s = min(max(self.costs.silence_s / 8, peers / 10_000), self.costs.silence_s / 2)
        now_s = beat_s * self.chance.random()
        while not silence.is_lost(now_s):
            silence.asked(now_s)
            now_s += beat_s
        return now_s

    # --- a machine ------------------------------------------------------------------------------

    def halted(self, machine: Machine, by: Coordinator) -> None:
        """It ends its workers and says so."""
        life = machine.life

        def ended() -> None:
            if machine.life == life and machine.is_up and machine.follows is by:
                self._say_ready(machine)

        self.clock.after(self.costs.stop_s * self.chance.lognormvariate(0, 0.5), ended)

    def _say_ready(self, machine: Machine) -> None:
        at, name, machine.past = machine.follows, machine.name, machine.attempt
        assert at is not None
        past = machine.past

        def hear(now_s: float) -> list[Order]:
            return at.roster.ready(name, now_s, attempt=past) if name in at.guests else []

        self.clock.after(self.costs.latency_s, lambda: at.hear(hear))

    def follow(self, machine: Machine, coordinator: Coordinator) -> None:
        """Connect to a coordinator."""
        machine.follows = coordinator
        coordinator.admit(machine)
        if machine.attempt > machine.past:
            self.halted(machine, coordinator)  # whoever loses its coordinator ends its workers
        elif not machine.is_warming:
            self._say_ready(machine)

    def _coordinator_lost(self, role: Coordinator, *, silent: bool) -> None:
        lost = role.me
        for name, (machine, life) in role.guests.items():
            if machine is lost or machine.life != life or not machine.is_up:
                continue
            machine.follows = None
            delay_s = self._silence_s(1) if silent else self.costs.latency_s
            if name in machine.members:
                self._inherit_after(delay_s, machine, role.me.name, silent)
            else:
                self.clock.after(delay_s, self._seeker(machine))

    def _inherit_after(self, delay_s: float, machine: Machine, lost: str, silent: bool) -> None:
        life = machine.life

        def inherit() -> None:
            if machine.life != life or not machine.is_up or machine.follows is not None:
                return
            order = self._order_of(machine.members, lost)
            waited_s = 0.0
            for successor in order:
                other = self._alive(successor)
                if other is not None:
                    self._go_to(machine, other, lost, waited_s)
                    return
                # One that ended refuses at once; one that is silent is waited for.
                waited_s += self.costs.silence_s if silent else self.costs.latency_s
            self.seek(machine)

        self.clock.after(delay_s, inherit)

    def _order_of(self, members: tuple[str, ...], lost: str) -> list[str]:
        """The real order, of which the first few are enough, found once for all machines."""
        key = (members, lost)
        if self._heirs is None or self._heirs[0] != key:
            labels = {name: self._labels(name) for name in members}
            self._heirs = (key, successors(members, labels, lost=lost))
        return self._heirs[1]

    def _labels(self, name: str) -> dict[str, str]:
        number = int(name.partition(".")[0])
        rack, zone = number // self.place.per_rack, number // self.place.per_zone
        return {"rack": str(rack), "zone": str(zone)}

    def _alive(self, name: str) -> Machine | None:
        machine = self.machines[int(name.partition(".")[0])]
        return machine if machine.is_up and machine.name == name else None

    def _go_to(self, machine: Machine, successor: Machine, lost: str, waited_s: float) -> None:
        if successor is machine and machine.number not in self.coordinators:
            others = {name for name in machine.members if name != lost}
            self.coordinate(machine, None, others)
            return
        life = machine.life

        def arrive() -> None:
            if machine.life != life or not machine.is_up or machine.follows is not None:
                return
            role = self.coordinators.get(successor.number)
            if role is not None and role.is_there:
                self.follow(machine, role)
            elif successor.is_up:
                self.clock.after(0.1, arrive)
            else:
                self.seek(machine)

        self.clock.after(waited_s + 2 * self.costs.latency_s, arrive)

    def coordinate(self, machine: Machine, held: int | None, expected: set[str]) -> None:
        """Take the role."""
        role = Coordinator(self, machine, held, expected)
        self.coordinators[machine.number] = role
        self.follow(machine, role)

    # --- nobody is known ------------------------------------------------------------------------

    def _seeker(self, machine: Machine) -> Callable[[], None]:
        life = machine.life

        def seek() -> None:
            if machine.life == life and machine.is_up and machine.follows is None:
                self.seek(machine)

        return seek

    def seek(self, machine: Machine) -> None:
        """Look on storage for a coordinator, as often as the policy says."""
        Search(self, machine).begin()


class Search:
    """One machine's search for a coordinator, as in the runtime's node."""

    def __init__(self, cluster: Cluster, machine: Machine) -> None:
        self._cluster, self._machine, self._life = cluster, machine, machine.life
        count = len(machine.members) or cluster.rules.max_nodes
        self._seeking = Seeking(count, cluster.chance.random())
        self._began_s = cluster.clock.now_s

    def begin(self) -> None:
        """The first question, in its turn."""
        chance = self._cluster.chance
        self._cluster.clock.after(self._seeking.first_s(chance.random()), self._ask)

    @property
    def _is_open(self) -> bool:
        machine = self._machine
        return machine.life == self._life and machine.is_up and machine.follows is None

    def _ask(self) -> None:
        if self._is_open:
            self._cluster.storage.ask(("list", "read", "read"), self._found)

    def _again(self) -> None:
        tried_s = self._cluster.clock.now_s - self._began_s
        wait_s = self._seeking.again_s(tried_s, self._cluster.chance.random())
        self._cluster.clock.after(wait_s, self._ask)

    def _claim(self, known: int) -> None:
        def answered() -> None:
            if not self._is_open:
                return
            machine = self._machine
            number = max(known, machine.attempt) + 1
            if self._cluster.storage.take(machine.number, number, known):
                self._cluster.coordinate(machine, number, set())
            else:
                self._again()

        self._cluster.storage.ask(("list", "put_new"), answered)

    def _found(self) -> None:
        if not self._is_open:
            return
        storage, machine = self._cluster.storage, self._machine
        known, now_s = storage.newest, self._cluster.clock.now_s
        role = self._cluster.coordinators.get(storage.claims.get(known, -1))
        if not known:
            self._claim(0)
        elif role is not None and role.is_there:
            self._cluster.follow(machine, role)
        else:
            if machine.sign is None or machine.sign[0] != storage.sign:
                machine.sign = (storage.sign, now_s)
            if now_s - machine.sign[1] > GONE_S:
                self._claim(known)
            else:
                self._again()
