"""Storage stalls while a job falls apart: its halves never both commit, and one of them goes on.

Three machines train. The third is cut off from the others, and storage stalls or fails around that
moment, for both or for one of them. The coordinators, rosters, claims, fences and savers are the
real ones; the clock, the connections and the moments at which storage answers are the test's.
"""

import heapq
import itertools
import types

import pytest
from keeper_fakes import FakeKeeper, StepGate

from outlast.checkpoint.transfer import read_manifest
from outlast.keeper.conclude import Fence
from outlast.launch.membership import coordinator as coordinators
from outlast.launch.membership.coordinator import Coordinator
from outlast.launch.membership.messages import Go, Halt, Join, Member
from outlast.launch.membership.messages import decode as decoded
from outlast.peer.claims import Claims
from outlast.policy.membership import MembershipRules, Roster, RosterPhase
from outlast.storage import Directory
from thorough import ALL

RULES = MembershipRules(min_nodes=1, max_nodes=3, gather_s=0.5, expect_s=0.0)
TICK_S = 0.1
SAVE_S = 0.9
END_S = 22.0
CUT_S = 2.0  # when the third machine is lost


class World:
    """One clock, one storage, and who may ask it when."""

    def __init__(self, folder, monkeypatch):
        self.now_s = 0.0
        self.storage = Directory(folder / "claims")
        self.claims = Claims(self.storage)
        self.folder = folder
        self.monkeypatch = monkeypatch
        self.timers, self.count = [], itertools.count()
        self.stall = lambda side: ""  # "hangs", "fails" or ""
        clock = types.SimpleNamespace(monotonic=lambda: self.now_s)
        monkeypatch.setattr(coordinators, "time", clock)
        monkeypatch.setattr("os.fsync", lambda _: None)  # nobody's power goes here
        monkeypatch.setattr(coordinators, "open_store", lambda host: (object(), 1))

    def later(self, delay_s, act):
        heapq.heappush(self.timers, (self.now_s + delay_s, next(self.count), act))

    def run(self, until_s, sides):
        while self.now_s < until_s:
            while self.timers and self.timers[0][0] <= self.now_s:
                heapq.heappop(self.timers)[2]()
            for side in sides:
                side.live()
            self.now_s += TICK_S


class Clerk:
    """As the real one, but storage answers when the world lets it."""

    def __init__(self, side):
        self.side, self.orders = side, []

    @property
    def is_busy(self):
        return bool(self.orders)

    def ask(self, what, then):
        self.orders.append((what, then))

    def work(self):
        how = self.side.world.stall(self.side)
        while self.orders and how != "hangs":
            what, then = self.orders.pop(0)
            if how == "fails":
                then(None, OSError(5, "Input/output error"))
            else:
                then(what(), None)


class Peer:
    """A connection to another machine of this side; what it is told counts as its word."""

    def __init__(self, side, node):
        self.side, self.node, self.address = side, node, f"{node}:1"

    def send(self, data):
        self.side.told(self.node, decoded(data))

    def close(self):
        pass


class Side:
    """Machines that see each other, their coordinator, and the keeper that commits for them."""

    def __init__(self, world, name, nodes, roster, held):
        self.world, self.name, self.nodes = world, name, nodes
        self.clerk = Clerk(self)
        self.go, self.is_over, self.step, self.saved_s = None, False, 0, 0.0
        self.ran_s = {}
        self.tier = Directory(world.folder / name)
        gated = types.SimpleNamespace(
            children=lambda folder: self._storage().children(folder),
            read=lambda path: self._storage().read(path),
            describe=world.storage.describe,
        )
        self.gate = StepGate(Fence(gated, clock=lambda: world.now_s))
        self.keeper = FakeKeeper(world.monkeypatch, {"local": self.tier}, self.gate)
        self.keeper.saves._conclusions._clock = lambda: world.now_s
        self.worker = None
        self.commits = []  # (attempt, step, seconds)
        self.coordinator = Coordinator(
            types.SimpleNamespace(address=f"{name}:1", later=world.later),
            self.clerk,
            world.claims,
            Member(node=nodes[0], host=nodes[0], address=f"{name}:1"),
            roster,
            store_host=name,
            term=f"term-of-{name}",
            held=held,
            deliver=lambda message: self.told(nodes[0], message),
            on_overtaken=self.overtaken,
            last_go=None,
            script="",
        )

    def _storage(self):
        how = self.world.stall(self)
        if how:
            raise OSError(5, "Input/output error" if how == "fails" else "it hangs")
        return self.world.storage

    # --- machines

    def join(self, attempt):
        for node in self.nodes:
            join = Join(node=node, host=node, address=f"{node}:1", attempt=attempt)
            if node == self.nodes[0]:
                self.coordinator.join_own(join)
            else:
                self.coordinator.admit(Peer(self, node), join)
        self.are_ready(attempt)

    def are_ready(self, attempt):
        for node in self.nodes:
            roster = self.coordinator.roster
            self.coordinator._obey(roster.ready(node, self.world.now_s, attempt=attempt))

    def lose(self, node):
        self.nodes = [one for one in self.nodes if one != node]
        roster = self.coordinator.roster
        why = "has been silent"
        self.coordinator._gone(node)
        self.coordinator._obey(roster.lost(node, self.world.now_s, why, certain=False))

    def told(self, node, message):
        if node != self.nodes[0]:
            return
        if isinstance(message, Go):
            self.go = message
            self.ran_s[message.attempt] = self.world.now_s
            self.gate.told(message.attempt, message.term)
            self.worker = self.keeper.worker(attempt=message.attempt)
            self.arenas = [self.worker.arena, self.keeper.books.make(0, 1064)]
            self.serial = 0
        elif isinstance(message, Halt) and self.go is not None:
            attempt, self.go, self.worker = self.go.attempt, None, None
            self.world.later(0.2, lambda: self.are_ready(attempt))

    def overtaken(self):
        self.is_over, self.go, self.worker = True, None, None

    # --- time

    def live(self):
        self.clerk.work()
        is_due = self.world.now_s - self.saved_s > SAVE_S
        if self.worker and is_due and len(self.keeper.saves.names()) < len(self.arenas):
            self.saved_s = self.world.now_s
            busy = self.keeper.saves.arenas()
            arena = next(one for one in self.arenas if one not in busy)
            self.serial += 1
            self.step += 1
            self.worker.save(self.step, self.serial, arena=arena)
        self.keeper.run()
        try:
            self.gate.look()
        except OSError as error:
            for key in self.gate.asked:
                self.gate.words[key] = str(error)
        self.keeper.saves.tick()
        self.keeper.run()
        known = len(self.commits)
        for event, fields in self.keeper.events:
            if event == "commit" and fields["step"] not in [step for _, step, _ in self.commits]:
                self.commits.append((fields["attempt"], fields["step"], self.world.now_s))
        for attempt, step, _ in self.commits[known:]:
            assert read_manifest(self.tier, step).attempt == attempt

    def committed(self):
        return {attempt for attempt, _, _ in self.commits}


def fall_apart(world, stall):
    """Three machines train; the third is cut off. Returns both sides at the end."""
    first = Roster(RULES, 0.0, first="a", held=1)
    many = Side(world, "many", ["a", "b", "c"], first, held=1)
    many.join(0)
    world.run(CUT_S, [many])
    assert many.committed() == {1}
    world.stall = stall
    many.lose("c")
    # The third has lost its coordinator, reaches nobody of its successors, and takes the role.
    roster = Roster(RULES, world.now_s, first="c", attempt=1, members=("a", "b", "c"))
    few = Side(world, "few", ["c"], roster, held=None)
    few.step = 1000
    few.join(1)
    world.run(END_S, [many, few] if world.order == "many first" else [few, many])
    return many, few


def judge(world, many, few):
    """What must hold, however it went."""
    both = many.committed() & few.committed()
    assert both <= set(), f"both have committed for attempt {both}"
    for one, other in ((many, few), (few, many)):
        # Whoever is passed by commits nothing from then on.
        for attempt, _, _ in one.commits:
            later = [at for number, _, at in other.commits if number > attempt]
            after = [at for number, _, at in one.commits if number == attempt]
            assert not later or max(after) <= min(later)
    # One of them trains, and commits, after storage is back; the other does not.
    alive = [side for side in (many, few) if side.coordinator.roster.phase is RosterPhase.RUNNING]
    alive = [side for side in alive if not side.is_over]
    assert len(alive) == 1, "nobody goes on, or both do"
    assert alive[0].commits[-1][2] > END_S - 2.0
    assert world.claims.newest().term == f"term-of-{alive[0].name}"


SINCE_S = [-1.0, 0.0, 0.3, 1.0]  # after the cut
FOR_S = [0.5, 1.5, 5.8, 6.5, 9.0]
ORDERS = itertools.cycle(["many first", "few first", "few first", "many first"])
STALLS = list(zip(itertools.product(SINCE_S, FOR_S), ORDERS, strict=False))[:: 1 if ALL else 3]


@pytest.mark.parametrize("who", ["both", "many", "few"])
@pytest.mark.parametrize("how", ["hangs", "fails"])
def test_storage_stalls_for_some_of_them(tmp_path, monkeypatch, how, who):
    ends = set()
    for (since_s, for_s), order in STALLS:
        folder = tmp_path / f"{since_s}-{for_s}"
        world = World(folder, monkeypatch)
        world.order = order

        def stall(side, now=world, begins_s=CUT_S + since_s, lasts_s=for_s):
            meets = who in ("both", side.name)
            return how if meets and begins_s <= now.now_s < begins_s + lasts_s else ""

        many, few = fall_apart(world, stall)
        try:
            judge(world, many, few)
        except AssertionError as error:
            raise AssertionError(f"{since_s=} {for_s=} {order=}: {error}") from error
        ends.add("few" if many.is_over else "many")
    assert "many" in ends


def test_a_majority_that_began_without_a_claim_commits_only_when_it_has_it(tmp_path, monkeypatch):
    world = World(tmp_path, monkeypatch)
    world.order = "many first"
    many, few = fall_apart(world, lambda side: "hangs" if world.now_s < 12.0 else "")
    judge(world, many, few)
    began_s, committed_s = many.ran_s[2], min(at for n, _, at in many.commits if n == 2)
    assert began_s < CUT_S + 2.0, "the majority waited for storage"
    assert committed_s >= 12.0
    (event,) = [f for e, f in many.keeper.events if e == "storage_error"][:1]
    assert event["operation"] == "claim"


def test_a_minority_that_was_first_keeps_the_number_and_the_majority_ends(tmp_path, monkeypatch):
    world = World(tmp_path, monkeypatch)
    world.order = "few first"
    many, few = fall_apart(
        world, lambda side: "hangs" if side.name == "many" and world.now_s < 15.0 else ""
    )
    judge(world, many, few)
    assert 2 in many.ran_s  # it went on without a claim
    assert 2 not in many.committed()
    assert 2 in few.committed()
    assert many.is_over
    refused = [f for e, f in many.keeper.events if e == "save_skipped"]
    assert refused, "what it held was given up"
