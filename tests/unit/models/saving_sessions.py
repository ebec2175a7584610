"""Sessions of one job, each with the real code of its keeper, that go on when they are told to.

A session is one attempt's worker processes and its keeper: ``SavesInFlight`` with its files, gate,
fence and manifest, and ``TierCopies`` with its copiers and its pruning. Nothing runs by itself:
the pool's acts, the copiers, the gate and the retries wait to be told. ``Pause`` ends what would
wait for a time; ``Crash`` (see ``ram_disk``) ends the session.
"""

import json
import threading
from types import SimpleNamespace

from keeper_fakes import HEAD_BYTES, JOB, FakeKeeper, FakeWorker, StepGate
from unit_saver import small_blocks

from outlast.checkpoint import transfer
from outlast.checkpoint.manifest import FORMAT, SaveName, shard_file, state_file
from outlast.keeper import conclude, copies, flight, wire
from outlast.keeper.conclude import Fence
from outlast.keeper.copies import DurableTier, TierCopies
from outlast.peer.claims import Claim, Claims, claimed, claimed_numbers

WORLD = 2
SIZE = 90  # bytes of a rank's tensor: with the head in front of it three blocks
BLOCK_BYTES = 64
SAVES_MAX = 40  # of a session: its keeper remembers 64
TIERS = ("local", "shared")  # the first is where saves are committed


class Pause(BaseException):
    """It waits for a time, or for something to do."""


class IdleThread:
    """A thread that is run by whoever made it."""

    def __init__(self, target=None, **_):
        self.target = target

    def start(self):
        pass


class SteppedCondition:
    """A condition on which nobody waits: what is not so now ends the run."""

    def __init__(self, lock=None):
        self._lock = lock or threading.RLock()

    def __enter__(self):
        self._lock.acquire()

    def __exit__(self, *_):
        self._lock.release()

    def notify_all(self):
        pass

    def wait_for(self, is_so, timeout_s=None):
        if not is_so():
            raise Pause
        return True


def set_the_stage(patch, later):
    """Small blocks, no threads, no clock; ``later`` takes what would be tried again."""
    small_blocks(patch, BLOCK_BYTES)
    patch.setattr(transfer, "NUM_THREADS", 1)
    stepped = SimpleNamespace(Thread=IdleThread, Condition=SteppedCondition, Lock=threading.Lock)
    patch.setattr(copies, "threading", stepped)
    clock = SimpleNamespace(monotonic=lambda: 0.0, time=lambda: 1.0, sleep=lambda _: None)
    patch.setattr(conclude, "time", clock)
    patch.setattr(copies, "time", clock)
    patch.setattr(flight, "later", later)


def bytes_of(number, serial, rank, size=SIZE):
    """What a rank's tensor has in it: other bytes in each save."""
    word = f"session {number} save {serial} rank {rank}; ".encode()
    return (word * (size // len(word) + 1))[:size]


def nonce_of(number):
    """What tells a session's saves from those of all others."""
    return f"{number:08x}"


class ModelWorker(FakeWorker):
    """A rank whose files say which save they are of."""

    def __init__(self, session, rank):
        super().__init__(session.keeper, rank, WORLD, SIZE, session.attempt, 0, None)
        self.session = session
        said = {"job": JOB, "attempt": session.attempt, "world_size": WORLD}
        self.who = {"hello": wire.Hello(**said, nonce=session.nonce)}

    def content(self, serial):
        return bytes(HEAD_BYTES) + bytes_of(self.session.number, serial, self.rank)

    def small(self, step, serial):
        whose = [self.session.number, serial, self.rank]
        state = {"format": FORMAT, "step": step, "rank": self.rank, "own": []}
        return json.dumps({**state, "state": {"whose": whose}}).encode()

    def copies(self, step, serial):
        """The copy into the arena, from its first block to its end."""
        data = self.content(serial)
        self.keeper.books.arenas[self.arena].view[: len(data)] = data
        self.fill(step, serial)
        done = wire.Complete(step=step, serial=serial, digests={})
        self.keeper.saves.complete(self.attempt, self.rank, done, self.small(step, serial))

    def fill(self, step, serial, blocks=None):
        blocks = tuple(range(-(-self.layout.size // BLOCK_BYTES)))
        ready = wire.BlocksReady(step=step, serial=serial, blocks=blocks)
        self.keeper.saves.ready(self.attempt, self.rank, ready)


class Session:
    """One attempt of the job, as it carries on whatever the others do.

    Args:
        number: no other session has it.
        attempt: the attempt's number; two halves of a split job have the same.
        disks: tier → disk.
        claims: disk with the claims of attempts.
        keep: tier → how many checkpoints stay there.

    Attributes:
        passed: saves that the fence was right to let through.
    """

    def __init__(self, patch, number, attempt, disks, claims, *, keep):
        self.number, self.attempt, self.nonce = number, attempt, nonce_of(number)
        self.term = f"term-{number}"
        self.claims = claims
        self.serial = 0
        self.passed = set()
        self.events = []
        self.gate = StepGate(Fence(claims, told_s=0.0, clock=lambda: 0.0))
        self.timers = []  # what is tried again after a while
        later = flight.later
        self.keeper = FakeKeeper(patch, {"local": disks["local"]}, gate=self.gate)
        patch.setattr(flight, "later", later)  # which the fake has taken for itself
        self.keeper.events = self.events
        tiers = [DurableTier(name, disks[name], keep[name]) for name in TIERS]
        self.copies = TierCopies(JOB, tiers, self._record, self.keeper.saves.names)
        self.keeper.saves._conclusions._on_committed = self.copies.committed
        self.workers = [ModelWorker(self, rank) for rank in range(WORLD)]
        self.gate.told(attempt, self.term)

    def _record(self, event, **fields):
        self.events.append((event, fields))

    def claim(self):
        """Whether this session has its attempt's number now."""
        known = max(claimed_numbers(self.claims), default=0)
        made = Claim(attempt=self.attempt, node=self.term, host="", address="", term=self.term)
        return Claims(self.claims).take(made, known)

    @property
    def may_commit(self):
        """Whether the newest claim is its own, read without the code that is being tried."""
        newest = max(claimed_numbers(self.claims), default=0)
        return newest == self.attempt and claimed(self.claims, newest).term == self.term

    def begins(self, step):
        """All ranks begin a save of ``step``; its name, and each rank's files."""
        self.serial += 1
        files = {}
        for worker in self.workers:
            worker.begin(step, self.serial)
            files[shard_file(worker.rank)] = worker.content(self.serial)
            files[state_file(worker.rank)] = worker.small(step, self.serial)
        return SaveName(step, self.attempt, self.serial, self.nonce), files

    def looks(self):
        """The gate asks about all that waits."""
        if self.may_commit:
            self.passed.update(serial for _, serial in self.gate.asked)
        self.gate.look()

    def has_room(self):
        """Whether another save can begin: the copies into the arenas are whole or void."""
        saves = self.keeper.saves.table.open.values()
        return self.serial < SAVES_MAX and not any(one.needs_workers for one in saves)

    def goes_on(self, acts):
        """So many acts of the pool, and what they ask for; what failed is tried again at last."""
        pool = self.keeper.pool
        for _ in range(acts):
            if not pool.acts and self.timers:
                self.timers.pop(0)()
            if pool.acts:
                pool.acts.pop(0)()
            elif not self.timers:
                break
            if self.gate.asked:
                self.looks()

    def brings(self, tier):
        """The copier of a tier, until it waits for something."""
        try:
            self.copies._copiers[tier]._run()
        except Pause:
            return

    def in_use(self, tier):
        """What it writes or is to read there."""
        return self.copies.in_use(tier)

    @property
    def told_committed(self):
        """Serials of saves whose commit a worker was told of, or the ledger has."""
        told = {one.serial for one in self.workers[0].ended if not one.error}
        logged = {fields["save"] for event, fields in self.events if event == "commit"}
        return told | {int(name.split(".s")[1][:4]) for name in logged}

    def ends(self):
        """Its memory goes."""
        for number in list(self.keeper.books.arenas):
            self.keeper.books.drop(number)
