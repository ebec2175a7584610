"""Machines, a network and a storage on one virtual clock, for the real objects of the membership.

``SimHub`` stands for ``launch.membership.hub``: the same calls, the same words when a connection
ends, the same judgement of silence and of a process that hangs. A connection is TCP's: what is sent
on one comes in order or not at all (the seal refuses anything else); what is sent on several comes
in any order. ``SimClerk`` does what storage is asked at one moment and brings the answer at a later
one; between the two the machine may be paused, or gone.

A machine can be cut off from any other and from storage, its agent can be stopped (its kernel
answers, its workers train on), it can stand still as a whole, be killed, lose power, and its clock
runs faster or slower than the others'.
"""

import errno
import heapq
import itertools
import random
from types import SimpleNamespace

from outlast.launch.membership.hub import DIAL_S, HANGS, HUNG, REFUSED

SILENCE_S = 3.0
BEAT_S = 0.5
LATENCY_S = 0.01


class Storage:
    """As much of a storage as claims need; ``fails`` is what it answers with, or None."""

    def __init__(self):
        self.files = {}

    def describe(self, name=""):
        return f"/storage/{name}"

    def children(self, folder=""):
        below = f"{folder}/"
        return sorted(name.removeprefix(below) for name in self.files if name.startswith(below))

    def read(self, name):
        if name not in self.files:
            raise FileNotFoundError(errno.ENOENT, "no such file", name)
        return self.files[name]

    def put(self, name, data):
        self.files[name] = data

    def put_new(self, name, data):
        return self.files.setdefault(name, data) is data

    def remove(self, name):
        self.files.pop(name, None)


class World:
    """Time and what lies between the machines.

    Args:
        seed: of all latencies.

    Attributes:
        now_s: the virtual clock.
        acting: the machine whose code runs now.
        cuts: pairs of hosts that do not reach each other, as frozensets.
        cut_off: hosts that do not reach storage.
        stalls: whether storage answers nobody.
    """

    def __init__(self, seed):
        self.now_s = 0.0
        self.chance = random.Random(seed)
        self.storage = Storage()
        self.acting = None
        self.cuts, self.cut_off, self.stalls = set(), set(), False
        self.processes = {}  # address → process
        self.links = []
        self._events = []
        self._order = itertools.count()
        self.at(0.0, self._beat)

    # --- time -------------------------------------------------------------------------------------

    def at(self, delay_s, act):
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._order), act))

    def run(self, seconds):
        until_s = self.now_s + seconds
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, act = heapq.heappop(self._events)
            act()
        self.now_s = until_s

    def monotonic(self):
        """The clock of the machine whose code runs."""
        process = self.acting
        return self.now_s if process is None else process.began_s + self.now_s * process.rate

    def clock(self):
        """What stands for the module ``time``."""
        return SimpleNamespace(monotonic=self.monotonic)

    def latency_s(self):
        return LATENCY_S * self.chance.lognormvariate(0, 1)

    # --- who reaches whom -------------------------------------------------------------------------

    def reach(self, one, other):
        """Whether two kernels reach each other now."""
        is_cut = frozenset((one.host, other.host)) in self.cuts
        has_stopped = any(end.is_frozen or end.has_no_power for end in (one, other))
        return not (is_cut or has_stopped)

    def _beat(self):
        self.links = [link for link in self.links if not link.is_over]
        for link in list(self.links):
            link.beat()
        self.at(BEAT_S, self._beat)


class Process:
    """An agent's process on a host.

    Attributes:
        is_alive, is_stopped, is_frozen: it runs; it was sent SIGSTOP; its machine stands still.
        has_no_power: it ended with its machine, so that no kernel says so.
    """

    def __init__(self, world, host, number, rate):
        self.world, self.host, self.number, self.rate = world, host, number, rate
        self.address = f"{host}:{number}"
        self.began_s = 1000.0 * number  # no two clocks show the same
        self.is_alive, self.is_stopped, self.is_frozen, self.has_no_power = (
            True,
            False,
            False,
            False,
        )
        self._waiting = []
        world.processes[self.address] = self

    @property
    def moves(self):
        return self.is_alive and not self.is_stopped and not self.is_frozen

    def act(self, function):
        """Run something of this process: now, when it moves again, or never."""
        if not self.is_alive:
            return
        if not self.moves:
            self._waiting.append(function)
            return
        before, self.world.acting = self.world.acting, self
        try:
            function()
        finally:
            self.world.acting = before

    def goes_on(self):
        """It was stopped, or its machine stood still."""
        self.is_stopped = self.is_frozen = False
        waiting, self._waiting = self._waiting, []
        for function in waiting:
            self.act(function)

    def dies(self, *, power=False):
        self.is_alive, self.has_no_power = False, power
        for link in list(self.world.links):
            for end in link.ends:
                if end.process is self and not end.is_closed:
                    end.vanish()


class SimPeer:
    """One end of a connection, as the hub's peers are."""

    def __init__(self, process, address):
        self.process, self.address = process, address
        self.on_message = lambda _: None
        self.on_closed = lambda *_: None
        self.on_open = lambda _: None
        self.on_hung = lambda _: None
        self.is_closed = False
        self.is_hung = False
        self.heard_s = process.world.monotonic()
        self.link = None

    def send(self, message):
        if not self.is_closed and self.link is not None:
            self.link.carry(self, message)

    def close(self):
        self._end(parts=False)

    def part(self):
        self._end(parts=True)

    def vanish(self):
        """Its process is gone: the kernel says so, if there is one."""
        self._end(parts=False)

    def _end(self, *, parts):
        if not self.is_closed:
            self.is_closed = True
            if self.link is not None:
                self.link.carry(self, None, parts=parts)

    def lose(self, why, *, certain):
        """As the hub's ``_lose``: end it, and tell its owner."""
        if self.is_closed:
            return
        self.close() if certain else self.part()
        self.on_closed(why, certain)


class Link:
    """Two ends; what is sent comes in order, late, or never."""

    def __init__(self, one, other):
        self.ends = (one, other)
        self.world = one.process.world
        self._queues = {one: [], other: []}  # what is under way to each end
        self._mute_s = dict.fromkeys(self.ends)  # since when the other's kernel is not heard
        self._still_s = dict.fromkeys(self.ends)  # since when the other's process does not move
        one.link = other.link = self
        self.world.links.append(self)

    @property
    def is_over(self):
        return all(end.is_closed for end in self.ends)

    def other(self, end):
        return self.ends[end is self.ends[0]]

    def carry(self, end, message, *, parts=False):
        to = self.other(end)
        self._queues[to].append((message, parts))
        self.world.at(self.world.latency_s(), lambda: self._arrive(end, to))

    def _arrive(self, end, to):
        """The next thing is there; while nothing comes through it is tried again."""
        if to.is_closed or not self._queues[to]:
            return
        if not self.world.reach(end.process, to.process):
            if not (end.process.has_no_power or to.process.has_no_power):
                self.world.at(BEAT_S, lambda: self._arrive(end, to))
            return
        message, parts = self._queues[to].pop(0)
        to.process.act(lambda: self._heard(to, message, parts))

    @staticmethod
    def _heard(to, message, parts):
        if to.is_closed:
            return
        to.heard_s = to.process.world.monotonic()
        if message is not None:
            to.on_message(message)
        elif parts:
            to.lose("has broken off the connection", certain=False)
        else:
            to.lose("has ended", certain=True)

    def beat(self):
        """Each end judges the other's kernel, and its process."""
        for end in self.ends:
            if end.is_closed or not end.process.is_alive or end.process.is_frozen:
                self._mute_s[end] = self._still_s[end] = None
                continue
            if end.process.is_stopped:
                continue
            other = self.other(end).process
            self._judge_kernel(end, other)
            self._judge_process(end, other)

    def _judge_kernel(self, end, other):
        now_s = self.world.now_s
        if self.world.reach(end.process, other):
            self._mute_s[end] = None
            return
        since_s = self._mute_s[end]
        if since_s is None:
            self._mute_s[end] = now_s
        elif (now_s - since_s) * end.process.rate > SILENCE_S:
            end.process.act(lambda: end.lose(f"has been silent for {SILENCE_S} s", certain=False))

    def _judge_process(self, end, other):
        now_s = self.world.now_s
        if other.moves or end.is_closed:
            self._still_s[end] = None
            if end.is_hung:
                end.is_hung = False
                end.process.act(lambda: end.on_hung(False))
            if other.moves and self.world.reach(end.process, other):
                end.process.act(lambda: setattr(end, "heard_s", self.world.monotonic()))
            return
        since_s = self._still_s[end]
        if since_s is None:
            self._still_s[end] = now_s
        elif now_s - since_s > HUNG * SILENCE_S and not end.is_hung:
            end.is_hung = True
            end.process.act(lambda: end.on_hung(True))


class SimHub:
    """An agent's hub, on the virtual clock."""

    def __init__(self, process):
        self.process = process
        self.address = process.address
        self.silence_s, self.hung_s = SILENCE_S, HUNG * SILENCE_S
        self.on_accepted = lambda peer: peer.close()
        process.hub = self

    def later(self, delay_s, function):
        process = self.process
        process.world.at(delay_s / process.rate, lambda: process.act(function))

    def dial(self, address, *, rush=0):
        world, peer = self.process.world, SimPeer(self.process, address)
        world.at(world.latency_s(), lambda: self._connect(peer, address))
        return peer

    def _connect(self, peer, address):
        world, other = self.process.world, self.process.world.processes[address]
        if peer.is_closed:
            return
        limit_s = max(DIAL_S, SILENCE_S)
        if not world.reach(self.process, other):
            self._fails(peer, "does not answer", limit_s)
        elif not other.is_alive:
            self._fails(peer, REFUSED, world.latency_s())
        elif not other.moves:
            self._fails(peer, HANGS, limit_s)
        else:
            there = SimPeer(other, self.address)
            Link(peer, there)
            other.act(lambda: other.hub.on_accepted(there))
            world.at(world.latency_s(), lambda: self.process.act(lambda: self._open(peer)))

    @staticmethod
    def _open(peer):
        if not peer.is_closed:
            peer.on_open(peer)

    def _fails(self, peer, why, after_s):
        world = self.process.world
        world.at(after_s, lambda: self.process.act(lambda: peer.lose(why, certain=False)))


class SimClerk:
    """Asks storage, one thing after the other; the answer comes later than the deed."""

    def __init__(self, process):
        self._process = process
        self._orders = []
        self.is_busy = False

    def ask(self, what, then):
        self._orders.append((what, then))
        if not self.is_busy:
            self._next()

    def _next(self):
        self.is_busy = bool(self._orders)
        if self._orders:
            world = self._process.world
            world.at(world.latency_s(), lambda: self._process.act(self._try))

    def _try(self):
        world = self._process.world
        if world.stalls or self._process.host in world.cut_off:
            world.at(BEAT_S, lambda: self._process.act(self._try))
            return
        what, then = self._orders.pop(0)
        result, problem = None, None
        try:
            result = what()
        except OSError as error:
            problem = error

        def answer():
            self._next()
            then(result, problem)

        world.at(world.latency_s(), lambda: self._process.act(answer))
