"""Several machines of one job on one: a keeper each, with workers that are none (see ``lean``).

Where rank 0's keeper is, their keepers are told by hand.
"""

import contextlib
import os
import signal
import socket
import threading
from pathlib import Path

import msgspec
from floor import until
from lean import HEAD_BYTES, Place, Worker, shard, small

from outlast.checkpoint.manifest import MANIFEST, Contents, shard_file, state_file
from outlast.checkpoint.manifest import Place as ReadFrom
from outlast.checkpoint.reader import open_checkpoint
from outlast.keeper import wire
from outlast.keeper.client import Client, Remote
from outlast.keeper.process import Supervisor, TierSetup
from outlast.ledger.file import read_events
from outlast.peer import listen
from outlast.storage import Directory
from part_contents import contents_of

SESSION_KEY = b"s" * 32


class Machine(Place):
    """One machine: its keeper, and whoever supervises it."""

    def __init__(
        self, floor, place, shared, *, key, node, labels=None, tls=None, slower=None, **more
    ):
        super().__init__(floor, place)
        self.node, self.labels = node, labels or {}
        self.storage = Directory(shared)
        tiers = [TierSetup(name="shared", url=str(shared), keep=3)]
        if slower is not None:
            tiers.append(TierSetup(name="slower", url=str(slower), keep=3))
        self.setup = msgspec.structs.replace(self.setup, tiers=tuple(tiers), **more)
        self.supervisor = Supervisor(self.setup)
        self.supervisor.start()
        self.host, self.port = self.supervisor.serve("127.0.0.1", key, node=node, tls=tls)

    def member(self, port=None):
        return wire.PeerMachine(
            node=self.node, host=self.host, port=port or self.port, labels=self.labels
        )

    def events(self, name):
        where = Path(self.setup.directory)
        return [event for event in read_events(where) if event.event == name]

    def replicated(self, step):
        return [event for event in self.events("replicated") if event["step"] == step]

    @contextlib.contextmanager
    def client(self, attempt):
        """A worker of ``attempt`` that only looks."""
        hello = wire.Hello(job=self.setup.job, attempt=attempt, rank=10**4)
        client = Client(self.directory / "run" / "k.sock", hello, lambda *_: None, timeout_s=60)
        try:
            yield client
        finally:
            client.close()

    @contextlib.contextmanager
    def places(self, attempt):
        """What a worker of ``attempt`` here reads from, without storage."""
        with self.client(attempt) as client:
            memory = client.recall()
            yield [
                ReadFrom("memory", memory),
                *([ReadFrom("peer", Remote(client, "peer", "peers"))] if memory.num_peers else []),
            ]

    def die(self):
        """The machine is gone, all at once."""
        pid = self.supervisor.pid
        self.supervisor._closing.set()
        os.kill(pid, signal.SIGKILL)
        self.supervisor.leave()

    def close(self):
        self.supervisor.leave()
        with contextlib.suppress(ProcessLookupError, TypeError):
            os.kill(self.supervisor.pid, signal.SIGKILL)


class Fleet:
    """The machines of a job, and the ranks of its attempts: one a machine."""

    def __init__(self, floor, place, nodes, *, key=b"k" * 32, size=20_000, shared=None, **more):
        self.floor, self.place, self.key, self.more = floor, place, key, more
        self.size = size
        self.shared = shared or place / "shared"
        self.attempt = 0
        self.machines = {}
        self.workers = []
        for node in nodes:
            self.add(node)

    def add(self, node, **more):
        machine = Machine(
            *(self.floor, self.place / node, self.shared),
            **{"key": self.key, "node": node, **self.more, **more},
        )
        self.machines[node] = machine
        return machine

    def form(self, *nodes, ports=None):
        """A new attempt of these machines: all are told, and each has a worker."""
        self.end()
        self.attempt += 1
        members = [self.machines[node].member((ports or {}).get(node)) for node in nodes]
        for node in nodes:
            assert self.machines[node].supervisor.tell_members(self.attempt, members, 60)
        return nodes

    def start(self, *nodes, buffers=2, **options):
        """``form``, and workers."""
        self.form(*nodes, **options)
        self.workers = [
            OneOfSeveral(self, self.machines[node], rank, len(nodes), buffers)
            for rank, node in enumerate(nodes)
        ]
        self.introduce()

    def introduce(self, keys=()):
        """The keepers of all but rank 0 are told where that of rank 0 is."""
        with listen("127.0.0.1") as listener:
            host, port = listener.getsockname()[:2]
            key = SESSION_KEY
            self.workers[0].client.send(wire.Lead(), key, (listener.fileno(),))
        for worker in self.workers[1:]:
            key = dict(keys).get(worker.hello.rank, SESSION_KEY)
            worker.client.send(wire.Follow(host=host, port=port), key)

    def save(self, step):
        """Save a step on all machines; their errors."""
        serials = [worker.begin(step) for worker in self.workers]
        pairs = zip(self.workers, serials, strict=True)
        return [worker.wait(serial) for worker, serial in pairs]

    def end(self):
        """The attempt is over: its workers are gone."""
        for worker in self.workers:
            worker.client.leave()
        self.workers = []

    def close(self):
        self.end()
        for machine in self.machines.values():
            machine.close()

    def has_copies(self, step, *nodes):
        """Wait until each machine's snapshot of ``step`` is kept by another."""
        until(
            lambda: all(self.machines[node].replicated(step) for node in nodes),
            f"copies of step {step} of {nodes}",
        )


class OneOfSeveral(Worker):
    """A worker of a job on several machines."""

    def __init__(self, fleet, machine, rank, world_size, buffers):
        hello = wire.Hello(
            job=machine.setup.job,
            attempt=fleet.attempt,
            rank=rank,
            world_size=world_size,
            first_local=rank,
            num_local=1,
        )
        super().__init__(machine, hello, fleet.size, buffers=buffers)
        # Ranks have tensors of their own here: the plan of a job has each element once.
        name = f"x@rank-{rank:05d}"
        held = self.layout.contents.tensors or contents_of(self.layout.tensors).tensors
        said = {"contents": Contents(tensors={name: held["x"]})}
        if world_size == 1:
            said = {"tensors": {name: self.layout.tensors["x"]}}
        layout = wire.Layout(number=1, size=self.layout.size, **said)
        self.client.send(layout)
        self._turn = 0

    def begin(self, step, **options):
        self._turn += 1
        return super().begin(step, arena=self._turn % len(self.arenas), **options)


def whole(places, step, num_ranks, size):
    """Whether every byte of every rank's files is what it should be, read from ``places``."""
    checkpoint = open_checkpoint(places, step)
    checkpoint.read((), share=(0, 1))
    found = {}
    for rank in range(num_ranks):
        for name, data in (
            (shard_file(rank), shard(step, size)),
            (state_file(rank), small(step, rank)),
        ):
            assert checkpoint.inventory.file(name).size == len(data)
            copies = checkpoint._copies_of(name)
            buffer = memoryview(bytearray(1 << 24))
            blocks = range(len(copies.entry.xxh3_128))
            found[name] = b"".join(bytes(copies.block(n, buffer)) for n in blocks) == data
            copies.close()
    return all(found.values())


class Relay:
    """Between two keepers: passes bytes on, keeps them, and changes one where it is told."""

    def __init__(self, port, *, flip_at=None):
        self.target, self.flip_at = port, flip_at
        self.sent = []  # what came from each connection's beginning
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)

    def _accept(self):
        while True:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                self.listener.close()
                return
            other = socket.create_connection(("127.0.0.1", self.target))
            kept = bytearray()
            self.sent.append(kept)
            threading.Thread(target=self._join, args=(sock, other, kept), daemon=True).start()

    def _join(self, sock, other, kept):
        with sock, other:
            back = threading.Thread(target=self._pass, args=(other, sock, None), daemon=True)
            back.start()
            self._pass(sock, other, kept)
            back.join()

    def _pass(self, source, target, kept):
        done = 0
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                if kept is not None:
                    kept += data
                    if self.flip_at is not None and done <= self.flip_at < done + len(data):
                        data[self.flip_at - done] ^= 1
                done += len(data)
                target.sendall(data)
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


__all__ = ["HEAD_BYTES", "MANIFEST", "Fleet", "Machine", "Relay", "whole"]
