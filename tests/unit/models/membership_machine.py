"""The model of membership: the real agents' objects on a simulated network and storage.

Real are ``Node``, ``Coordinator``, ``Search``, ``Inheritance``, ``WayBack``, ``Mesh``, ``Claims``,
the roster and every message; see ``simulated_network`` for what stands for the rest. A machine here
obeys as an agent does: it starts workers when it is told to go, ends them when it is told to halt,
says so, and ends when the job does.

The guarantee (docs/membership.md, "How it is decided who goes on"), as it is checked:

- An attempt trains while all of its members run it, none of them stands still and all reach each
  other. Two attempts train at once only where the older one's coordinator does not get at storage,
  or has not looked there yet: it ends within ``NOTICED_S`` of being able to. Where both have one
  number (a majority that could claim nothing, and somebody else who could) the one with the claim
  stays. A claim is never written anew, so at most one of them commits (see ``keeper.conclude``).
- Attempts' numbers only rise, at each machine, and on storage.
- A machine is in an attempt only if it was ready for it; it is in one at a time.
- That the job is over is the last thing that anybody is told.
- When all trouble heals, all machines that are there are in one attempt in bounded time, or have
  been told that the job is over.
"""

import logging
import random
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from simulated_network import Process, SimClerk, SimHub, World

from outlast.launch.membership import coordinator as coordinating
from outlast.launch.membership import node as membering
from outlast.launch.membership import search as searching
from outlast.launch.membership.messages import Finish, Go, Halt, JobEnded, Leaving, Member
from outlast.launch.membership.node import Node
from outlast.peer import claims as claiming
from outlast.peer.claims import Claims, claimed, claimed_numbers
from outlast.policy.membership import MembershipRules

HOSTS = "abcde"
MOST = 4
NOTICED_S = 6.0  # two looks at storage, an answer that is late, and the slowest clock
HEALED_S = 900.0  # a machine that was lost again and again waits for ten minutes
RATES = (0.9, 1.0, 1.1)  # of clocks: seconds that they show in a second
hosts = st.sampled_from(HOSTS)


class Agent:
    """A machine's agent: a process with a hub, and workers that do as they are told."""

    def __init__(self, world, host, number, rules, rate):
        self.world = world
        self.process = Process(world, host, number, rate)
        self.hub = SimHub(self.process)
        self.me = Member(node=f"{host}{number}", host=host, address=self.process.address)
        self.runs = None  # the Go whose workers run
        self.goes = []  # numbers that it was told
        self.over = None
        self.past = 0
        self.broken = []
        self.node = Node(
            self.hub,
            SimClerk(self.process),
            Claims(world.storage),
            rules,
            self.me,
            store_host=host,
            attempt=0,
            tell=self.told,
        )
        self.process.act(lambda: self.node.start(warming=False))
        self.process.act(self.is_ready)

    @property
    def is_there(self):
        return self.process.is_alive

    def told(self, message):
        match message:
            case Go():
                if self.over is not None:
                    self.broken.append(f"{self.me.node} goes on after the job was over")
                if self.runs is not None:
                    self.broken.append(f"{self.me.node} runs one attempt and begins another")
                if self.goes and message.attempt <= self.goes[-1]:
                    self.broken.append(f"attempt {message.attempt} after {self.goes[-1]}")
                self.goes.append(message.attempt)
                self.runs = message
            case Halt(gentle=gentle):
                going = self.runs
                delay_s = self.world.chance.uniform(0.0, 2.0) if gentle else 0.3
                self.hub.later(delay_s, lambda: self.workers_end(going))
            case JobEnded():
                self.over, self.runs = message, None

    def workers_end(self, going):
        if self.runs is going and self.over is None:
            self.runs = None
            self.is_ready()

    def is_ready(self):
        self.past = self.goes[-1] if self.goes else 0
        self.node.ready(self.past, 1)


class Memberships(RuleBasedStateMachine):
    """Up to five machines, four in an attempt, and everything that can be wrong between them."""

    def __init__(self):
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.agents = {}  # host → its agent
        self.gone = []  # agents that have ended
        self.num = 0
        self.written = {}  # number → term, of all claims ever
        self.twice = {}  # the older of two attempts that train at once → since when it could see it
        self.said_over = None

    @initialize(seed=st.integers(0, 2**16), count=st.integers(2, 5), least=st.integers(1, 2))
    def begins(self, seed, count, least):
        """Some machines train already."""
        world = self.world = World(seed)
        terms = iter(range(10**6))
        patch, clock = self.patch.setattr, world.clock()
        for room in (coordinating, membering, searching):
            patch(room, "time", clock)
        for room in (membering, searching):
            patch(room, "new_term", lambda: f"term-{next(terms)}")
        patch(searching, "random", random.Random(seed))
        patch(coordinating, "TICK_S", 0.2)
        patch(coordinating, "open_store", lambda host: (None, 1))
        patch(claiming, "time", SimpleNamespace(monotonic=world.monotonic))
        patch(logging.root.manager, "disable", logging.CRITICAL)
        self.rules = MembershipRules(min_nodes=least, max_nodes=MOST)
        for host in HOSTS[:count]:
            self.comes(host, 1.0)
        self.run(12.0)

    def teardown(self):
        self.patch.undo()

    # --- machines ---------------------------------------------------------------------------------

    @rule(host=hosts, rate=st.sampled_from(RATES))
    def comes(self, host, rate):
        if host not in self.agents:
            self.num += 1
            self.agents[host] = Agent(self.world, host, self.num, self.rules, rate)

    @rule(host=hosts, power=st.booleans())
    def dies(self, host, power):
        if host in self.agents:
            agent = self.agents.pop(host)
            agent.process.dies(power=power)
            self.gone.append(agent)

    @rule(host=hosts, whole=st.booleans())
    def stops(self, host, whole):
        """Its agent is stopped, or the whole machine stands still."""
        if host in self.agents:
            process = self.agents[host].process
            process.is_stopped, process.is_frozen = not whole, whole

    @rule(host=hosts)
    def goes_on(self, host):
        if host in self.agents:
            self.agents[host].process.goes_on()

    @rule(host=hosts)
    def workers_fail(self, host):
        agent = self.agents.get(host)
        if agent is not None and agent.runs is not None:
            agent.process.act(lambda going=agent.runs: agent.workers_end(going))

    @rule(host=hosts)
    def has_notice(self, host):
        agent = self.agents.get(host)
        if agent is not None and agent.over is None and len(self.agents) > 2:
            agent.process.act(lambda: agent.node.say(Leaving()))
            self.run(1.0)
            self.dies(host, power=False)

    @rule(host=hosts, code=st.sampled_from([0, 76]), sure=st.integers(0, 7))
    def job_ends(self, host, code, sure):
        """Now and then: most sequences go on without it."""
        agent = self.agents.get(host)
        if agent is not None and agent.runs is not None and not sure:
            agent.process.act(lambda: agent.node.say(Finish(exit_code=code, reason="said so")))

    # --- network and storage ----------------------------------------------------------------------

    @rule(side=st.sets(hosts, min_size=1, max_size=3), storage=st.sampled_from(["", "in", "out"]))
    def splits(self, side, storage):
        """These on one side; ``storage`` is on theirs ("in"), the others' ("out") or both."""
        for one in side:
            for other in set(HOSTS) - side:
                self.world.cuts.add(frozenset((one, other)))
        if storage:
            self.world.cut_off |= set(HOSTS) - side if storage == "in" else side

    @rule(one=hosts, other=hosts)
    def are_apart(self, one, other):
        if one != other:
            self.world.cuts.add(frozenset((one, other)))

    @rule()
    def network_heals(self):
        self.world.cuts.clear()
        self.world.cut_off.clear()

    @rule()
    def storage_stalls_or_answers(self):
        self.world.stalls = not self.world.stalls

    @rule(seconds=st.sampled_from([0.05, 0.3, 1.0, 4.0, 8.0, 35.0]))
    def time_goes_by(self, seconds):
        self.run(seconds)

    def run(self, seconds):
        """Time passes; what must hold is looked at many times."""
        left = seconds
        while left > 0:
            step_s = min(left, 0.5)
            self.world.run(step_s)
            left -= step_s
            self.look()

    # --- what must hold ---------------------------------------------------------------------------

    def trains(self):
        """(number, term) → its members, of attempts whose members all run it and all reach all."""
        running = {}
        for agent in self.agents.values():
            if agent.runs is not None and not agent.process.is_frozen:
                running.setdefault((agent.runs.attempt, agent.runs.term), {})[agent.me.node] = agent
        whole = {}
        for key, here in running.items():
            members = next(iter(here.values())).runs.members
            if here.keys() == {one.node for one in members}:
                names = [agent.process.host for agent in here.values()]
                if not any(frozenset((a, b)) in self.world.cuts for a in names for b in names):
                    whole[key] = here
        return whole

    def look(self):
        for agent in [*self.agents.values(), *self.gone]:
            assert not agent.broken, agent.broken[0]
        for number in claimed_numbers(self.world.storage):
            term = claimed(self.world.storage, number).term
            assert self.written.setdefault(number, term) == term, f"claim {number} is anew"
        whole = self.trains()
        now_s = self.world.now_s
        in_order = sorted(whole, key=self.is_newer)
        older = in_order[:-1]
        self.twice = {key: s for key, s in self.twice.items() if key in older}
        for place, key in enumerate(older, 1):
            newer = {one: whole[one] for one in in_order[place:]}
            if not (self.can_look(whole[key]) and self.is_seen(newer, by=whole[key])):
                self.twice[key] = now_s  # from here on, it may see that it was passed over
            since_s = self.twice.setdefault(key, now_s)
            assert now_s - since_s <= NOTICED_S, f"{key} trains beside {list(whole)}"

    def is_newer(self, key):
        """Of two with one number the one that has claimed it counts."""
        number, term = key
        return number, claimed(self.world.storage, number).term == term

    def is_seen(self, newer, *, by):
        """Whether one of these attempts can be known to ``by``, an older one's members.

        A majority that is cut off from storage goes on without a claim, and can commit nothing. To
        who is cut off from it as well it is not there, until it has claimed its number.
        """
        return any(
            claimed(self.world.storage, number).term == term
            or any(
                frozenset((one.process.host, other.process.host)) not in self.world.cuts
                for one in members.values()
                for other in by.values()
            )
            for (number, term), members in newer.items()
        )

    def can_look(self, members):
        """Whether a coordinator is there that can look at storage: the first member's agent."""
        agents = {agent.node.go.members[0].node: agent for agent in members.values()}
        first = next(iter(agents))
        coordinator = members.get(first)
        if coordinator is None:
            return False
        is_cut = self.world.stalls or coordinator.process.host in self.world.cut_off
        return coordinator.process.moves and not is_cut

    @invariant()
    def holds(self):
        if hasattr(self, "world"):
            self.look()

    @rule()
    def all_trouble_heals(self):
        """Then all machines come together, or hear that the job is over, in bounded time."""
        world = self.world
        world.cuts.clear()
        world.cut_off.clear()
        world.stalls = False
        for agent in self.agents.values():
            agent.process.goes_on()
        for host in [host for host, agent in self.agents.items() if agent.over is not None]:
            self.dies(host, power=False)  # it has ended, as it was told to
        if len(self.agents) < self.rules.min_nodes:
            return
        for _ in range(int(HEALED_S)):
            self.run(1.0)
            if self.is_together():
                return
        states = {
            host: (agent.goes[-1:], agent.runs is not None, agent.node.is_settled)
            for host, agent in self.agents.items()
        }
        raise AssertionError(f"not together after {HEALED_S} s: {states}")

    def is_together(self):
        there = [agent for agent in self.agents.values() if agent.over is None]
        if len(there) < len(self.agents):  # somebody was told that it is over: so are all
            return not there or not any(agent.goes for agent in there)
        whole = self.trains()
        return any(len(here) == min(len(there), MOST) for here in whole.values())
