"""Several machines' keepers and the sealed channels between them, one message at a time.

What runs is the real code of copies in other machines' memory: ``Peers`` with its replicator, its
server, its store and its tier, in the books and arenas of ``memory``; every frame is sealed and
unsealed by ``peer.seal``. What stands in: a thread that has to wait for a message, or is about to
send one, stands still until it is told to go on (``Strand``); so each message is a point at which
a machine may pause, be cut off or end. One strand moves at a time.
"""

import collections
import threading
from types import SimpleNamespace

from keeper_fakes import JOB

from outlast.checkpoint import transfer
from outlast.errors import CutShort, SealError
from outlast.keeper import memory, peers, replicas, wire
from outlast.keeper.memory import Arena, Holdings
from outlast.keeper.wire import PeerMachine
from outlast.peer.seal import HEAD_BYTES, TAG_BYTES, Handshake

GIB = 1 << 30
KEY = b"k" * 32
LIMIT_S = 20.0


class Ended(BaseException):
    """Its process is gone."""


class Strand:
    """A thread that moves only while somebody waits for it."""

    def __init__(self, network, owner, act):
        self.network, self.owner = network, owner
        self.is_over = False
        self._go, self._stands = threading.Semaphore(0), threading.Semaphore(0)
        self._is_ended = False
        self._act = act
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def moves(self):
        """On to the next point at which it stands still."""
        if self.is_over:
            return
        before, self.network.strand = self.network.strand, self
        self._go.release()
        assert self._stands.acquire(timeout=LIMIT_S), "a strand hangs"
        self.network.strand = before

    def stands_still(self):
        """From within: let others move."""
        self._stands.release()
        self._go.acquire()
        if self._is_ended:
            raise Ended

    def ends(self):
        self._is_ended = True
        self.moves()
        self._thread.join(LIMIT_S)

    def _run(self):
        self._go.acquire()
        try:
            if not self._is_ended:
                self._act()
        except Ended:
            pass
        except Exception as error:  # seen by the test, not by a thread's excepthook
            self.network.failures.append(error)
        finally:
            self.is_over = True
            self._stands.release()


class Condition:
    """A condition whose waits are a strand's."""

    def __init__(self, network):
        self._network, self._lock = network, threading.RLock()

    def __enter__(self):
        self._lock.acquire()

    def __exit__(self, *_):
        self._lock.release()

    def notify_all(self):
        pass

    def wait(self, timeout_s=None):
        self._lock.release()
        try:
            self._network.strand.stands_still()
        finally:
            self._lock.acquire()


class End:
    """One end of a channel between two keepers; the frames under way are sealed bytes."""

    def __init__(self, network, owner, address, ends):
        self.network, self.owner, self.peer = network, owner, address
        self.came = collections.deque()
        self.other = None
        self.is_closed = False
        self.bulk_bytes = 0
        self._sealer, self._unsealer = ends
        self._bulk = (b"", b"", None)

    def send(self, payload, bulk=(), *, pace=None):
        parts = [bytes(part) for part in bulk]
        self.network.breathe()
        if self.is_closed or self.other.is_closed:
            raise ConnectionResetError("it is over")
        whole = b"".join(parts)
        head = self._sealer.seal(payload, bulk_bytes=len(whole))
        frame = b"".join(bytes(one) for one in head)
        if whole:
            seal = self._sealer.bulk()
            seal.update(whole)
            frame += whole + seal.tag()
        self.other.came.append(frame)

    def receive(self, timeout_s=None):
        if self.bulk_bytes:
            raise ValueError("take the bulk of the last message first")
        while not (self.came and self.network.reach(self.owner, self.other.owner)):
            if self.is_closed or (self.other.is_closed and not self.came):
                return None
            if not self.network.waits(self):
                raise TimeoutError(f"{self.peer} says nothing")
        try:
            frame = memoryview(self.came.popleft())
            head = self._unsealer.head(frame[:HEAD_BYTES])
            frame, payload = frame[HEAD_BYTES:], b""
            if head.payload_bytes:
                payload = bytes(frame[: head.payload_bytes])
                end = head.payload_bytes + TAG_BYTES
                self._unsealer.body(payload, frame[head.payload_bytes : end])
                frame = frame[end:]
        except SealError:
            self.close()
            raise
        self.bulk_bytes = head.bulk_bytes
        self._bulk = (frame[: head.bulk_bytes], frame[head.bulk_bytes :], self._unsealer.bulk())
        return payload

    def receive_into(self, view, *, pace=None):
        data, tag, seal = self._bulk
        view = view.cast("B")
        if len(view) != self.bulk_bytes:
            raise ValueError(f"{self.bulk_bytes} bytes come, and there is room for {len(view)}")
        self.network.breathe()  # the bytes are coming in
        view[:] = data
        seal.update(data)
        try:
            seal.check(tag)
        except SealError:
            self.close()
            raise
        self.bulk_bytes = 0

    def close(self):
        self.is_closed = True


class Door:
    """Where a keeper listens; it takes the place of the real door, and hears the same."""

    def __init__(self, listener, key, tls, *, purpose, talk, record, places):
        self.owner, self._talk = listener, talk
        self.closing = threading.Event()
        listener.door = self

    def refused(self, host, peer, reason):
        self.owner.refusals.append(reason)

    def close(self):
        self.closing.set()

    def serve(self, end):
        try:
            self._talk(end)
        except (CutShort, SealError, OSError, ValueError):
            pass
        finally:
            end.close()


class Machine:
    """One keeper's memory, and its part among the others."""

    def __init__(self, network, number):
        self.network, self.number, self.node = network, number, f"m{number}"
        self.is_alive, self.is_paused = True, False
        self.door, self.refusals = None, []
        self.strands = []
        self.holdings = Holdings({}, lambda *_: None)
        setup = SimpleNamespace(
            job=JOB, replicas=network.replicas, rate_bytes=1e15, each_step=network.each_step
        )
        lock = threading.RLock()
        network.made = self
        self.peers = peers.Peers(
            setup,
            self.holdings,
            lock,
            wait_for_earlier=lambda attempt: None,
            record=lambda *_, **__: None,
        )
        self.peers.serve(wire.Serve(node=self.node), KEY, number)

    @property
    def member(self):
        return PeerMachine(node=self.node, host=self.node, port=1)

    @property
    def books(self):
        return self.holdings.books

    @property
    def believes(self):
        """Machine → the manifest of the snapshot that it is believed to keep for this one."""
        return {one.node: data for one, data in self.peers._replicator._have.items()}

    def moves(self, count=1):
        for _ in range(count):
            for strand in list(self.strands):
                strand.moves()
            self.strands = [strand for strand in self.strands if not strand.is_over]

    def ends(self):
        self.is_alive = False
        for end in self.network.ends:
            if end.owner is self:
                end.close()
        for strand in self.strands:
            strand.ends()
        for number in list(self.books.arenas):
            self.books.drop(number)
        self.holdings._page.close()


class Network:
    """All machines, and who reaches whom."""

    def __init__(self, patch, num_replicas, each_step=False):
        self.replicas, self.each_step = num_replicas, each_step
        self.machines = {}  # by node
        self.strand = None
        self.made = None
        self.asks = None  # whose resume reads, outside of any strand
        self.cuts = set()
        self.ends, self.failures = [], []
        threads = SimpleNamespace(
            Thread=self._thread,
            Condition=lambda: Condition(self),
            Event=threading.Event,
            RLock=threading.RLock,
            get_native_id=threading.get_native_id,
        )
        patch.setattr(replicas, "threading", threads)
        patch.setattr(replicas, "yield_to_training", lambda: None)
        patch.setattr(replicas, "Door", Door)
        patch.setattr(memory, "available_bytes", lambda: 8 * GIB)
        patch.setattr(Arena, "touch_in_background", lambda _: None)
        patch.setattr(peers, "connect", self._connect)
        patch.setattr(peers, "socket", SimpleNamespace(socket=lambda fileno: self.made))
        patch.setattr(peers, "ThreadPoolExecutor", Serially)
        patch.setattr(transfer, "NUM_THREADS", 1)
        patch.setattr(peers, "time", SimpleNamespace(monotonic=lambda: 0.0))

    def comes(self, number):
        machine = Machine(self, number)
        self.machines[machine.node] = machine
        return machine

    def reach(self, one, other):
        return frozenset((one.node, other.node)) not in self.cuts

    def breathe(self):
        """A point at which whoever runs may stand still."""
        if self.strand is not None:
            self.strand.stands_still()

    def waits(self, end):
        """Whether it is worth to look again whether something came."""
        if self.strand is not None:
            self.strand.stands_still()
            return True
        other = end.other.owner
        if other.is_paused or not self.reach(end.owner, other):
            return False
        before = len(end.came)
        for _ in range(8):
            other.moves()
            if len(end.came) > before or end.other.is_closed:
                return True
        return False

    def _thread(self, target, name="", daemon=True):
        if name != "outlast-replicate":
            return SimpleNamespace(start=target)  # done at once
        machine = self.made
        return SimpleNamespace(start=lambda: machine.strands.append(Strand(self, machine, target)))

    def _connect(self, address, key, purpose, timeout_s, **_):
        one = self.asks if self.strand is None else self.strand.owner
        self.breathe()
        other = self.machines.get(address[0])
        if other is None or not other.is_alive:
            raise ConnectionRefusedError("Connection refused")
        if other.is_paused or not self.reach(one, other):
            raise TimeoutError("timed out")
        ends = met(key, purpose)
        here, there = End(self, one, other.node, ends[0]), End(self, other, one.node, ends[1])
        here.other, there.other = there, here
        self.ends += [here, there]
        other.strands.append(Strand(self, other, lambda: other.door.serve(there)))
        return here


class Serially:
    """A pool of threads that is none."""

    def __init__(self, *_):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    @staticmethod
    def map(act, items):
        return map(act, items)


def met(key, purpose):
    """The sealers and unsealers of two who have shaken hands."""
    nonces = (b"c" * 32, b"a" * 32)
    one, other = (
        Handshake(key, purpose, connects=connects, nonce=nonce)
        for connects, nonce in zip((True, False), nonces, strict=True)
    )
    other.feed(one.hello)
    one.feed(other.hello + other.proof())
    other.feed(one.proof())
    return one.ends(), other.ends()
