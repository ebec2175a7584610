"""Everything at once: machines come and go, the network splits, storage decides, coordinators die.

Agents hang, too: one that does neither hears nor says anything while its workers run on.

Two sides of one network each have a coordinator with a roster of its own; one storage knows who has
claimed what. A machine obeys the coordinator it is connected to, and ends its workers when it loses
that. Checked all the time: attempts that could both commit never run at the same time.
"""

import math

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from outlast.policy.exclusion import Exclusion
from outlast.policy.membership import (
    EndJob,
    Excludes,
    Form,
    Leaves,
    MembershipRules,
    Roster,
    RosterPhase,
    StopWorkers,
)
from thorough import examples

NAMES = "abcdef"
RULES = MembershipRules(min_nodes=1, max_nodes=5, stop_s=4.0)
names = st.sampled_from(NAMES)


class Machine:
    """One machine: what it has heard, and whether its workers run."""

    def __init__(self):
        self.heard = 0
        self.last = ()  # members of the last attempt
        self.runs = None  # the number whose workers run here
        self.at = None  # the coordinator it is connected to
        self.leaves = False
        self.hangs = False
        self.ends_s = math.inf  # when it has ended workers that it is to stop


class Seat:
    """A coordinator: its roster, and what it has asked storage."""

    def __init__(self, roster, held):
        self.roster = roster
        self.known = held if held is not None else roster.attempt
        self.asked = None
        self.unheard = []  # machines that have left it while it hung


class Membership(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.now_s = 0.0
        self.machines = {}
        self.seats = {}  # node → coordinator
        self.claims = {}  # number → node
        self.attempts = {}  # (number, first) → (members, predecessors, was claimed)
        self.storage_answers = True

    # --- what surrounds the roster --------------------------------------------------------------

    def obey(self, node, orders):
        seat = self.seats[node]
        for order in orders:
            match order:
                case StopWorkers():
                    for name in seat.roster.members:
                        if name in self.machines and self.machines[name].at == node:
                            self.stopping.add(name)
                            limit_s = math.inf if order.gentle else RULES.stop_s
                            self.machines[name].ends_s = self.now_s + limit_s
                case Form():
                    self.check_form(node, order)
                    seat.asked = order
                case Leaves():
                    assert order.node in self.machines
                case Excludes():
                    self.check_goes(node, order)
                case EndJob():
                    raise AssertionError("nobody has finished")

    def check_form(self, node, form):
        assert form.attempt > max(self.machines[name].heard for name in form.members)
        assert RULES.min_nodes <= len(form.members) <= RULES.max_nodes
        assert form.members[0] == node or node not in form.members
        roster, unheard = self.seats[node].roster, self.seats[node].unheard
        for name in form.members:
            machine = self.machines[name]
            assert machine.at == node or name in unheard  # void once it is heard
            assert machine.runs is None
            assert not machine.leaves
            assert not machine.hangs
        for pair in self.cuts.get(node, ()):
            assert not pair <= set(form.members)
        if not form.required:
            voters = set(roster.members) - self.left
            here = {n for n in voters if n in self.machines and self.machines[n].at == node}
            here = {n for n in here if not self.machines[n].hangs} | (voters & set(unheard))
            assert 2 * len(here) > len(voters)

    def check_goes(self, node, order):
        """Nobody goes where too few others are connected."""
        others = [n for n, m in self.machines.items() if m.at == node and n != order.out.host]
        assert not order.goes or len(others) >= RULES.min_nodes

    def take(self, node, number, known):
        """As Claims.take does."""
        newest = max(self.claims, default=0)
        if newest > number or (newest > known and self.claims[newest] != node):
            return False
        return all(
            self.claims.setdefault(one, node) == node for one in {min(newest + 1, number), number}
        )

    def start(self, node, form, *, is_claimed):
        seat = self.seats[node]
        before = seat.roster.members
        if not seat.roster.claimed(form, self.now_s):
            return
        seat.asked = None
        self.attempts[form.attempt, node] = (form.members, before, is_claimed)
        for name in form.members:
            machine = self.machines[name]
            assert machine.runs is None
            machine.runs, machine.heard, machine.last = form.attempt, form.attempt, form.members
            machine.by = node

    def moving(self, name):
        """The machine, if its agent is there and moves, and its coordinator's does."""
        machine = self.machines.get(name)
        if machine is None or machine.hangs:
            return None
        is_heard = machine.at is None or not self.machines[machine.at].hangs
        return machine if is_heard else None

    def gives_up(self, node):
        """A coordinator ends, or is overtaken: those who follow it are without one."""
        del self.seats[node]
        for name, machine in self.machines.items():
            if machine.at == node:
                machine.at = None
                machine.runs = None  # whoever has lost it ends its workers
                self.stopping.discard(name)
        self.cuts.pop(node, None)

    # --- what happens ---------------------------------------------------------------------------

    @initialize(count=st.integers(0, len(NAMES)))
    def begin(self, count):
        """Some machines train already: from nothing, hardly anything would ever run."""
        self.stopping = set()  # machines that were told to end their workers
        self.cuts = {}
        self.left = set()
        for name in NAMES[:count]:
            self.comes(name)
        if count:
            self.all_trouble_heals()

    @rule(name=names)
    def comes(self, name):
        if name not in self.machines:
            self.machines[name] = Machine()
            self.left.discard(name)

    @rule(name=names, coordinator=names)
    def connects(self, name, coordinator):
        machine = self.moving(name)
        if machine is None or machine.at is not None or coordinator not in self.seats:
            return
        if self.machines[coordinator].hangs:
            return
        if name in self.seats and name != coordinator:
            return
        machine.at = coordinator
        roster = self.seats[coordinator].roster
        self.obey(coordinator, roster.joined(name, self.now_s, attempt=machine.heard))
        if machine.leaves:
            self.obey(coordinator, roster.leaving(name, self.now_s))

    @rule(name=names, late=st.booleans())
    def is_ready(self, name, late):
        machine = self.moving(name)
        if machine is None or machine.at is None:
            return
        heard = machine.heard
        if machine.runs is not None and name not in self.stopping:
            if not late:
                return
            heard -= 1  # a word from before this attempt
        else:
            machine.runs = None
            self.stopping.discard(name)
        roster = self.seats[machine.at].roster
        self.obey(machine.at, roster.ready(name, self.now_s, attempt=heard))

    @rule(name=names)
    def workers_fail(self, name):
        machine = self.moving(name)
        if machine is None or machine.at is None or machine.runs is None:
            return
        machine.runs = None
        self.stopping.discard(name)
        roster = self.seats[machine.at].roster
        self.obey(machine.at, roster.ready(name, self.now_s, attempt=machine.heard))

    @rule(name=names, certain=st.booleans(), survives=st.booleans())
    def is_lost(self, name, certain, survives):
        """To its coordinator; a reset does not say that it has ended, nor does silence."""
        machine = self.machines.get(name)
        if machine is None or machine.at is None or machine.at == name:
            return
        if self.machines[machine.at].hangs:
            return
        at, machine.at = machine.at, None
        machine.runs = None
        self.stopping.discard(name)
        if not survives:
            del self.machines[name]
        self.obey(at, self.seats[at].roster.lost(name, self.now_s, "lost", certain=certain))

    @rule(
        name=names,
        coordinator=names,
        for_s=st.sampled_from([3.0, 30.0]),
        gentle=st.booleans(),
        spare_only=st.booleans(),
    )
    def is_left_out(self, name, coordinator, for_s, gentle, spare_only):
        if coordinator in self.seats and not self.machines[coordinator].hangs:
            out = Exclusion(host=name, reason="", for_s=for_s, spare_only=spare_only)
            roster = self.seats[coordinator].roster
            self.obey(coordinator, roster.left_out(out, self.now_s, gentle=gentle))

    @rule(name=names)
    def has_notice(self, name):
        machine = self.moving(name)
        if machine is not None and machine.at is not None and not machine.leaves:
            machine.leaves = True
            self.obey(machine.at, self.seats[machine.at].roster.leaving(name, self.now_s))

    @rule(name=names)
    def goes(self, name):
        machine = self.moving(name)
        if machine is None or machine.at in (None, name) or not machine.leaves:
            return
        del self.machines[name]
        self.left.add(name)
        self.stopping.discard(name)
        roster = self.seats[machine.at].roster
        orders = roster.lost(name, self.now_s, "left", certain=True, left=True)
        self.obey(machine.at, orders)

    @rule(one=names, other=names, coordinator=names)
    def are_apart(self, one, other, coordinator):
        here = [
            n for n in (one, other) if n in self.machines and self.machines[n].at == coordinator
        ]
        if coordinator in self.seats and self.machines[coordinator].hangs:
            return
        if one == other or len(here) < 2:
            return
        self.cuts.setdefault(coordinator, set()).add(frozenset((one, other)))
        self.obey(coordinator, self.seats[coordinator].roster.apart(one, other, self.now_s))

    @rule(one=names, other=names, coordinator=names)
    def are_together(self, one, other, coordinator):
        if coordinator in self.seats and not self.machines[coordinator].hangs:
            self.cuts.get(coordinator, set()).discard(frozenset((one, other)))
            self.obey(coordinator, self.seats[coordinator].roster.together(one, other, self.now_s))

    @rule(name=names)
    def coordinator_ends(self, name):
        if name in self.seats:
            self.gives_up(name)
            del self.machines[name]
            self.stopping.discard(name)

    @rule(name=names, heard=st.booleans())
    def hangs(self, name, heard):
        """An agent stops to move; ``heard``: its coordinator finds out."""
        machine = self.machines.get(name)
        if machine is None or machine.hangs or name in self.seats:
            return
        if heard and self.moving(name) and machine.at is not None:
            machine.hangs = True
            roster = self.seats[machine.at].roster
            self.obey(machine.at, roster.hung(name, self.now_s, heard_s=self.now_s - 30.0))

    @rule(name=names)
    def moves(self, name):
        machine = self.machines.get(name)
        if machine is None or not machine.hangs or name in self.seats:
            return
        machine.hangs = False
        if machine.at is not None and not self.machines[machine.at].hangs:
            self.obey(machine.at, self.seats[machine.at].roster.moves(name, self.now_s))

    @rule(name=names)
    def coordinator_hangs(self, name):
        """The others turn away from it, and it does not know."""
        if name not in self.seats or self.machines[name].hangs:
            return
        self.machines[name].hangs = True
        for other, machine in self.machines.items():
            if machine.at == name and other != name:
                self.seats[name].unheard.append(other)
                machine.at = machine.runs = None
                machine.hangs = False  # what it was cannot be seen any more
                self.stopping.discard(other)

    @rule(name=names)
    def coordinator_moves(self, name):
        if name not in self.seats or not self.machines[name].hangs:
            return
        self.machines[name].hangs = False
        seat = self.seats[name]
        while seat.unheard:
            other = seat.unheard.pop(0)
            if name in self.seats:
                orders = seat.roster.lost(other, self.now_s, "has ended", certain=True)
                self.obey(name, orders)
        if self.storage_answers and name in self.seats:
            self.look(name)

    @rule(name=names, seeks=st.booleans())
    def takes_the_role(self, name, seeks):
        """As a successor without a claim, or by storage's next number when nobody lives there."""
        machine = self.moving(name)
        if machine is None or machine.at is not None or len(self.seats) == 2 or machine.leaves:
            return
        held = None
        if seeks or not machine.last:
            newest = max(self.claims, default=0)
            owner = self.claims.get(newest)
            lives = owner in self.seats and not self.machines[owner].hangs
            if not self.storage_answers or lives:
                return
            held = max(newest, machine.heard) + 1
            if not self.take(name, held, newest):
                return
        machine.at = name
        roster = Roster(
            RULES,
            self.now_s,
            first=name,
            attempt=machine.heard,
            held=held,
            members=machine.last,
            awaited=machine.last,
        )
        self.seats[name] = Seat(roster, held)
        self.obey(name, roster.joined(name, self.now_s, attempt=machine.heard))

    @rule(name=names)
    def storage_says(self, name):
        seat = self.seats.get(name)
        if seat is None or seat.asked is None or not self.storage_answers:
            return
        if self.machines[name].hangs:
            return
        form = seat.asked
        if not self.take(name, form.attempt, seat.known):
            self.gives_up(name)
            return
        seat.known = max(seat.known, form.attempt)
        self.start(name, form, is_claimed=True)

    @rule(name=names)
    def storage_stalls(self, name):
        """A majority does not wait for it."""
        seat = self.seats.get(name)
        if seat is None or seat.asked is None or seat.asked.required or self.storage_answers:
            return
        if self.machines[name].hangs:
            return
        if seat.roster.phase is RosterPhase.FORMING:
            self.start(name, seat.asked, is_claimed=False)

    @rule()
    def storage_goes_or_comes(self):
        """When it comes back, whoever runs without a claim makes up for it or gives up."""
        self.storage_answers = not self.storage_answers
        if self.storage_answers:
            for name in list(self.seats):
                self.look(name)

    @rule(seconds=st.sampled_from([0.1, 1.0, 4.0, 7.0, 40.0]))
    def time_goes_by(self, seconds):
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s += min(1.0, seconds)
            for name in self.stopping:  # though its coordinator has not heard so
                machine = self.machines[name]
                if self.now_s >= machine.ends_s and not machine.hangs:
                    machine.runs = None
            for name in list(self.seats):
                if self.machines[name].hangs:
                    continue
                if self.storage_answers:
                    self.look(name)
                if name in self.seats:
                    self.obey(name, self.seats[name].roster.tick(self.now_s))

    def look(self, node):
        """As the coordinator does each second."""
        seat = self.seats[node]
        if self.machines[node].hangs:
            return
        if seat.roster.phase is RosterPhase.RUNNING:
            number = seat.roster.number
            if self.claims.get(number) != node and self.take(node, number, seat.known):
                members, before, _ = self.attempts[number, node]
                self.attempts[number, node] = (members, before, True)
                seat.known = max(seat.known, number)
        newest = max(self.claims, default=0)
        if newest > seat.known and self.claims[newest] != node:
            self.gives_up(node)

    # --- what must hold -------------------------------------------------------------------------

    @invariant()
    def one_attempt_can_commit(self):
        running = {}
        for machine in self.machines.values():
            if machine.runs is not None:
                running.setdefault((machine.runs, machine.by), set())
        whole = [
            key
            for key in running
            if all(
                name in self.machines
                and self.machines[name].runs == key[0]
                and self.machines[name].by == key[1]
                for name in self.attempts[key][0]
            )
        ]
        if self.storage_answers:  # nothing is committed while it does not
            settled = [key for key in whole if self.attempts[key][2]]
            assert all(self.claims[number] == node for number, node in settled)
            assert len(whole) <= 1

    @invariant()
    def numbers_only_grow(self):
        for node, seat in self.seats.items():
            assert seat.roster.attempt >= seat.roster.number
            for name in seat.roster.members:
                machine = self.machines.get(name)
                if machine is not None and machine.at == node and machine.runs is not None:
                    assert machine.runs == seat.roster.number

    def all_move(self):
        for name in list(self.machines):
            self.coordinator_moves(name)
            self.moves(name)

    @precondition(lambda self: self.machines)
    @rule()
    def all_trouble_heals(self):
        """Then an attempt forms, with all that can take part, within bounded time."""
        self.storage_answers = True
        self.all_move()
        for name in list(self.seats)[1:]:
            self.gives_up(name)
        for name in [name for name, machine in self.machines.items() if machine.leaves]:
            if name in self.seats:
                self.coordinator_ends(name)
            else:
                self.goes(name)
                self.machines.pop(name, None)
        usable = list(self.machines)
        if not usable:
            return
        for name in list(self.seats):
            self.look(name)
        if not self.seats:
            self.takes_the_role(usable[0], seeks=True)
        coordinator = next(iter(self.seats))
        for pair in list(self.cuts.get(coordinator, ())):
            self.are_together(*sorted(pair), coordinator)
        for _ in range(800):  # a machine that was lost again and again waits for ten minutes
            for name in usable:
                self.connects(name, coordinator)
                if self.machines[name].runs is None or name in self.stopping:
                    self.is_ready(name, late=False)
            self.storage_says(coordinator)
            self.time_goes_by(1.0)
            roster = self.seats[coordinator].roster
            if roster.phase is RosterPhase.RUNNING and len(roster.members) == min(len(usable), 5):
                break
        else:
            raise AssertionError(f"{roster.phase} {roster.members} of {usable}: {roster.waits_for}")


Membership.TestCase.settings = settings(examples(60), stateful_step_count=60)
TestMembership = Membership.TestCase
