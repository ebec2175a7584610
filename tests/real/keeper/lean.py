"""A keeper process alone, and a worker that is not one: it speaks as one, and costs milliseconds.

What is saved is a function of the step, so that every byte of a checkpoint can be foretold.
"""

import json
import subprocess
import sys
import threading

from floor import until
from saved import is_committed

from outlast.checkpoint.manifest import (
    BLOCK_BYTES,
    FORMAT,
    Chunk,
    TensorEntry,
    as_places,
    save_of,
    shard_file,
    state_file,
)
from outlast.checkpoint.transfer import inventory_of
from outlast.keeper import wire
from outlast.keeper.client import Client
from outlast.keeper.process import Setup, TierSetup, encode_setup
from outlast.storage import Directory
from part_contents import contents_of
from whole_reads import verify

HEAD_BYTES = 4096
JOB = "lean"
# One writer, so that the order of its calls is always the same; spares of any size.
START = """
import sys
from outlast.keeper import flight, server
from outlast.storage import directory
directory.MIN_BYTES = 1
flight.Pool.__init__.__defaults__ = ({writers},)
server.main()
"""


def shard(step, size):
    """The bytes of a rank's shard file of ``step``."""
    head = {"x": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    text = json.dumps(head).encode().ljust(HEAD_BYTES - 8)
    data = (step * 2654435761 % 2**32).to_bytes(4, "little") * (size // 4 + 1)
    return len(text).to_bytes(8, "little") + text + data[:size]


def small(step, rank):
    """The bytes of a rank's small file of ``step``."""
    state = {"format": FORMAT, "step": step, "rank": rank, "own": [], "state": {"n": step}}
    return json.dumps(state).encode()


class Place:
    """A keeper's job: where everything lies, and keepers for it."""

    def __init__(self, floor, directory, *, tiers=(("local", 2),), linger_s=5.0):
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "run").mkdir(mode=0o700, exist_ok=True)
        self.floor = floor
        self.directory = directory
        self.log = directory / "keeper.log"
        self.storages = {name: Directory(directory / name) for name, _ in tiers}
        self.storage = self.storages[tiers[0][0]]
        self.setup = Setup(
            job=JOB,
            directory=str(directory),
            socket=str(directory / "run" / "k.sock"),
            tiers=tuple(TierSetup(name=n, url=str(directory / n), keep=k) for n, k in tiers),
            linger_s=linger_s,
        )
        self.attempt = 0

    def keeper(self, writers=1):
        """Start a keeper."""
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", START.format(writers=writers)],
                env=self.floor._environ({}),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )
        with process.stdin:
            process.stdin.write(encode_setup(self.setup))
        return process

    def worker(self, size=20_000, rank=0, world_size=1, **options):
        """A worker of the next attempt."""
        if rank == 0:
            self.attempt += 1
        hello = wire.Hello(job=JOB, attempt=self.attempt, rank=rank, world_size=world_size)
        return Worker(self, hello, size, **options)

    def committed(self, storage=None):
        """The steps that are listed as committed; every byte of each is what it should be."""
        storage = storage or self.storage
        names = [name for name in storage.children() if is_committed(storage, name)]
        return [save_of(name).step for name in names if self._is_right(storage, name)]

    def _is_right(self, storage, name):
        try:
            step = save_of(name).step
            manifest = verify(storage, save_of(name))
            inventory = inventory_of(manifest, as_places(storage))
            size = inventory.tensor("x", 0).shape[0]
            for rank in range(manifest.world_size):
                if shard_file(rank) in inventory.files(rank):
                    assert storage.read(f"{name}/{shard_file(rank)}") == shard(step, size)
                assert storage.read(f"{name}/{state_file(rank)}") == small(step, rank)
        except Exception:
            if is_committed(storage, name):
                raise
            return False  # pruned while it was read: its manifest goes first
        return True

    def parts(self):
        """Files of writes that did not end."""
        return [path for path in self.directory.rglob(".*.part") if path.is_file()]


class Worker:
    """What a worker says to its keeper."""

    def __init__(self, place, hello, size, *, buffers=1):
        self.hello, self.size = hello, size
        self.ended = {}
        self.written = set()
        self._changed = threading.Condition()
        path = place.directory / "run" / "k.sock"
        self.client = Client(path, hello, self._heard, self._lost, timeout_s=60)
        self.serial = 0
        self.lost = False
        if not size:
            return
        self.reserved, self.arenas = self.client.reserve(size + HEAD_BYTES, buffers, 1)
        chunk = Chunk(
            offsets=(0,),
            shape=(size,),
            file=shard_file(hello.rank),
            start=HEAD_BYTES,
            end=HEAD_BYTES + size,
        )
        entry = TensorEntry(dtype="U8", shape=(size,), chunks=(chunk,))
        tensors = {"x": entry}
        said = {"tensors": tensors}
        if hello.world_size > 1:
            said = {"contents": contents_of(tensors)}
        self.layout = wire.Layout(number=1, size=size + HEAD_BYTES, **said)
        self.client.send(self.layout)

    def begin(self, step, *, tiers=None, arena=0, whole=True):
        """Begin a save, copy it, and say so; with ``whole=False`` all but the end."""
        self.serial += 1
        serial = self.serial
        self.client.send(
            wire.BeginSave(
                step=step,
                serial=serial,
                layout=1,
                arena=self.reserved.arenas[arena],
                tiers=tiers,
                kind="full",
                exact=True,
                started_s=0.0,
            )
        )
        data = shard(step, self.size)
        self.arenas[arena].view[: len(data)] = data
        blocks = range(-(-len(data) // BLOCK_BYTES))
        self.client.send(wire.BlocksReady(step=step, serial=serial, blocks=tuple(blocks)))
        if whole:
            self.complete(step, serial)
        return serial

    def complete(self, step, serial):
        done = wire.Complete(step=step, serial=serial, digests={})
        self.client.send(done, small(step, self.hello.rank))

    def wait(self, serial):
        """How a save ended: its error, or "" when it is committed."""
        until(lambda: serial in self.ended or self.lost, "the save's end")
        return self.ended[serial].error if serial in self.ended else "lost"

    def save(self, step, **options):
        return self.wait(self.begin(step, **options))

    def close(self):
        self.client.close()

    def _heard(self, message, _):
        if isinstance(message, wire.SaveEnded):
            self.ended[message.serial] = message
        elif isinstance(message, wire.BlockWritten):
            self.written.add(message.block)

    def _lost(self):
        self.lost = True
