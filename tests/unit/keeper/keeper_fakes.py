"""A pool that works when it is told to, workers that only listen, and a disk in a directory."""

import json
import os

from outlast.checkpoint.manifest import BLOCK_BYTES, FORMAT, Chunk, TensorEntry, shard_file
from outlast.keeper import flight, wire
from outlast.keeper.conclude import FenceVerdict
from outlast.keeper.memory import Books
from outlast.keeper.saves import SavesInFlight
from part_contents import contents_of

JOB = "job"
HEAD_BYTES = 64


class StepPool:
    """Does nothing until ``run``: then everything, in order, in the calling thread."""

    def __init__(self):
        self.acts = []

    def put(self, act):
        self.acts.append(act)

    def run(self):
        while self.acts:
            self.acts.pop(0)()


class FakePeer:
    """A worker's connection that keeps what is sent."""

    def __init__(self, rank):
        self.rank, self.sent, self.is_gone = rank, [], False

    def send(self, message, blob=b""):
        self.sent.append((message, blob))

    def of(self, kind):
        return [message for message, _ in self.sent if isinstance(message, kind)]


class FakeSide:
    """The way to other machines' keepers: keeps what is said."""

    def __init__(self, leads):
        self.leads, self.is_closed, self.can_ask = leads, False, True
        self.reports, self.told, self.asked, self.wanted, self.over = [], [], [], [], []

    def report(self, step, serial, rank, part):
        self.reports.append((step, serial, rank, part))

    def tell(self, ended, manifest, to=None):
        self.told.append((ended, manifest, to))

    def detail(self, step, serial, rank, groups):
        self.asked.append((rank, groups))
        return self.can_ask

    def want(self, step, serial):
        self.wanted.append((step, serial))

    def done(self, serial):
        self.over.append(serial)

    def close(self):
        self.is_closed = True


class StepGate:
    """A gate that asks its fence when it is told to, in the calling thread."""

    def __init__(self, fence):
        self.fence, self.place = fence, fence.place
        self.asked = {}
        self.words = {}
        self.overtaken = {}

    def refused(self, attempt):
        return self.overtaken.get(attempt, "")

    def told(self, attempt, term):
        self.fence.told(attempt, term)

    def ask(self, key, attempt, then):
        self.asked[key] = (attempt, then)

    def forget(self, key):
        self.asked.pop(key, None)
        return self.words.pop(key, "")

    def why(self, key):
        return self.words.get(key, "")

    def look(self):
        """Ask about everything that waits; storage may raise OSError."""
        for key, (attempt, then) in list(self.asked.items()):
            verdict, words = self.fence.judge(attempt)
            if verdict is FenceVerdict.WAIT:
                self.words[key] = words
            elif self.asked.pop(key, None):
                if verdict is FenceVerdict.REFUSE:
                    self.overtaken[attempt] = words
                then(words)


class FakeKeeper:
    """Saves, with everything around them made of Python objects."""

    def __init__(self, monkeypatch, tiers, gate=None):
        self.pool, self.books, self.gate = StepPool(), Books(), gate
        self.events, self.committed, self.timers = [], [], []
        monkeypatch.setattr(flight, "later", lambda _, act: self.timers.append(act))
        self.saves = SavesInFlight(
            JOB,
            tiers,
            self.books,
            self.pool,
            record=lambda event, **fields: self.events.append((event, fields)),
            on_committed=self.committed.append,
            on_change=lambda: None,
            gate=gate,
        )

    def worker(self, rank=0, world_size=1, *, size=1000, attempt=1, ring_bytes=0, peer=None):
        return FakeWorker(self, rank, world_size, size, attempt, ring_bytes, peer)

    def meet(self, local, attempt=1):
        """Only these ranks are this machine's."""
        side = FakeSide(leads=0 in local)
        self.saves.know(attempt, local)
        self.saves.meet(attempt, side)
        return side

    def run(self):
        """Until nothing is left to do; what waits for its time is done too."""
        while self.pool.acts or self.timers:
            self.pool.run()
            if self.timers:
                self.timers.pop(0)()


def hello(attempt=1, world_size=2):
    """How a worker has introduced itself."""
    return wire.Hello(job=JOB, attempt=attempt, world_size=world_size)


class FakeWorker:
    """One rank, speaking to ``SavesInFlight`` as the server would."""

    def __init__(self, keeper, rank, world_size, size, attempt, ring_bytes, peer):
        self.keeper, self.rank, self.size, self.ring_bytes = keeper, rank, size, ring_bytes
        self.peer = peer or FakePeer(rank)
        self.who = {"hello": hello(attempt, world_size)}
        self.attempt = attempt
        self.arena = keeper.books.make(rank, ring_bytes or size + HEAD_BYTES)
        name = f"x@rank-{rank:05d}"
        chunk = Chunk(
            offsets=(0,),
            shape=(size,),
            file=shard_file(rank),
            start=HEAD_BYTES,
            end=HEAD_BYTES + size,
        )
        tensors = {name: TensorEntry(dtype="U8", shape=(size,), chunks=(chunk,))} if size else {}
        whole = size + HEAD_BYTES if size else 0
        said = {"tensors": tensors} if world_size == 1 else {"contents": contents_of(tensors)}
        self.layout = wire.Layout(number=1, size=whole, **said)

    def begin(self, step, serial, *, tiers=None, arena=None, each_step=False):
        message = wire.BeginSave(
            step=step,
            serial=serial,
            layout=1,
            arena=arena or self.arena,
            tiers=tiers,
            kind="full",
            exact=True,
            started_s=0.0,
            each_step=each_step,
        )
        options = {**self.who, "ring_bytes": self.ring_bytes}
        self.keeper.saves.begin(self.peer, message, self.layout, **options)

    def fill(self, step, serial, blocks=None):
        if not self.ring_bytes:
            data = bytes([step % 256]) * self.layout.size
            self.keeper.books.arenas[self.arena].view[: len(data)] = data
        blocks = range(-(-self.layout.size // BLOCK_BYTES)) if blocks is None else blocks
        ready = wire.BlocksReady(step=step, serial=serial, blocks=tuple(blocks))
        self.keeper.saves.ready(self.attempt, self.rank, ready)

    def complete(self, step, serial, digests=None):
        state = {"format": FORMAT, "step": step, "rank": self.rank, "own": [], "state": {}}
        done = wire.Complete(step=step, serial=serial, digests=digests or {})
        self.keeper.saves.complete(self.attempt, self.rank, done, json.dumps(state).encode())

    def absent(self, step, serial, reason="nothing to give", names=()):
        message = wire.Absent(step=step, serial=serial, reason=reason, names=names)
        self.keeper.saves.absent(self.peer, message, **self.who)

    def void(self, step, serial, names=("x",)):
        message = wire.Void(step=step, serial=serial, reason="changed", names=names)
        self.keeper.saves.void(self.attempt, self.rank, message)

    def save(self, step, serial, **options):
        self.begin(step, serial, **options)
        self.fill(step, serial)
        self.complete(step, serial)

    @property
    def ended(self):
        return self.peer.of(wire.SaveEnded)


def full_disk(*_):
    return OSError(28, os.strerror(28))
