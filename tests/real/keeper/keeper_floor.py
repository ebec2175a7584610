"""What the tests of the keeper share: jobs with tiers, and looking at keepers from outside."""

import collections
import contextlib
import os
import signal
from pathlib import Path

import psutil
from floor import Job, until
from saved import is_committed, saved

from outlast.checkpoint.manifest import NOTE, save_of
from outlast.keeper import wire
from outlast.keeper.client import Client
from outlast.keeper.process import RUNTIME_VARIABLE
from outlast.ledger.job import read_job
from outlast.storage import Directory
from whole_reads import verify

SCRIPT = Path(__file__).parent / "keeper_script.py"
MEMORY_TIER = 'name = "memory"\nurl = "memory:"\n'


class KeeperJob(Job):
    """A job with a runtime directory of its own, and tiers."""

    def __init__(
        self, directory, num_ranks=1, *, memory=False, tiers=None, checkpoint="", free=6, pause=0
    ):
        super().__init__(directory, num_ranks)
        self.free = free  # the step whose save is not waited for
        self.pause = pause
        self.runtime = directory.with_name(f"{directory.name}-run")
        self.runtime.mkdir(mode=0o700, exist_ok=True)
        self.hold = directory.with_name(f"{directory.name}-hold")
        tables = [MEMORY_TIER] if memory else []
        tables += tiers or [f'name = "local"\nurl = "{self.checkpoints}"\n']
        self.config = directory.with_name(f"{directory.name}.toml")
        text = "".join(f"[[tier]]\n{table}" for table in tables)
        self.config.write_text((f"[checkpoint]\n{checkpoint}\n" if checkpoint else "") + text)

    @property
    def env(self):
        return {
            **super().env,
            "OUTLAST_CONFIG": self.config,
            "HOLD_FILE": self.hold,
            "FREE": self.free,
            "PAUSE_AT": self.pause,
            RUNTIME_VARIABLE: self.runtime,
        }

    def held(self, rank=0):
        return self.hold.with_suffix(f".held.{rank}").exists()

    def paused(self):
        return all(
            self.hold.with_suffix(f".paused.{rank}").exists() for rank in range(self.num_ranks)
        )

    def go(self):
        self.hold.with_suffix(".go").touch()

    def whole(self, since):
        """The first step from ``since`` on whose snapshot is whole on all ranks, or None.

        With several ranks a save may be agreed for a later step than it was due at.
        """
        marks = [path.suffixes[-2:] for path in self.hold.parent.glob(f"{self.hold.name}.whole.*")]
        steps = collections.Counter(int(step[1:]) for step, _ in marks)
        found = [step for step, n in steps.items() if step >= since and n == self.num_ranks]
        return min(found, default=None)

    def verified(self, storage=None):
        """The committed steps, each of them verified."""
        storage = storage or self.storage
        saves = [save_of(name) for name in storage.children() if is_committed(storage, name)]
        for save in saves:
            verify(storage, save)
        return [save.step for save in saves]

    def sockets(self):
        return sorted(self.runtime.glob("*.sock"))

    @contextlib.contextmanager
    def client(self, attempt=0):
        """A worker that has nothing to do but look."""
        (path,) = self.sockets()
        hello = wire.Hello(job=read_job(self.directory).id, attempt=attempt, rank=10**4)
        client = Client(path, hello, lambda *_: None, timeout_s=60)
        try:
            yield client
        finally:
            client.close()

    def in_memory(self):
        """The snapshots in memory, as a tier; every file compared with its hashes."""
        with self.client() as client:
            memory = client.recall()
        for name in memory.children():
            verify(memory, save_of(name))
        return memory

    def same_in_memory(self, step):
        """Whether memory holds the same bytes of a step as the disk."""
        memory, disk = self.in_memory(), Directory(self.checkpoints)
        save = saved(self.checkpoints, step).name
        names = [name for name in disk.children(save) if name != NOTE]
        assert memory.children(save) == names
        return all(memory.read(f"{save}/{name}") == disk.read(f"{save}/{name}") for name in names)


def keepers(floor):
    """Processes that are keepers, of this test's jobs."""
    found = []
    for process in floor.offspring():
        with contextlib.suppress(psutil.Error):
            if "outlast.keeper" in process.cmdline():
                found.append(process)
    return found


def keeper(floor):
    """The one keeper, once it is there."""
    (found,) = until(lambda: keepers(floor), "a keeper")
    return found


def memfds(floor):
    """How many pieces of our shared memory this test's processes hold."""
    inodes = set()
    for process in floor.offspring():
        with contextlib.suppress(OSError):
            for fd in Path(f"/proc/{process.pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if str(fd.readlink()).startswith("/memfd:outlast-arena"):
                        inodes.add(fd.stat().st_ino)
    return len(inodes)


def stop(process):
    """SIGSTOP, and wait until it has."""
    os.kill(process.pid, signal.SIGSTOP)
    until(lambda: process.status() == psutil.STATUS_STOPPED, "it is stopped")
