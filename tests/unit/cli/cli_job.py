"""A job's directory and its tiers, written as a job would have left them."""

import random

import msgspec
from unit_names import save_of

from outlast.checkpoint.manifest import (
    Chunk,
    Manifest,
    TensorEntry,
    encode,
    shard_file,
    sign,
    state_file,
    write_hashed,
)
from outlast.ledger.file import Ledger, read_events
from outlast.ledger.job import Job
from outlast.storage import Directory

JOB = "0123456789ab"
SHARD, STATE = shard_file(0), state_file(0)
BYTES = 4096
TOML = """
[[tier]]
name = "fast"
url = "fast"
[[tier]]
name = "slow"
url = "slow"
keep = 2
"""


def one_of(step):
    """Saves follow each other in one attempt."""
    return save_of(step, serial=step)


def name_of(step):
    return str(one_of(step))


class MadeJob:
    """A job in ``place``: its ledger, and checkpoints in the directories of its tiers."""

    def __init__(self, place, toml=TOML):
        self.place = place
        self.directory = place / "outlast-job"
        self.directory.mkdir()
        job = Job(id=JOB, created_t=0.0, settings={}, versions={})
        (self.directory / "job.json").write_bytes(msgspec.json.encode(job))
        (place / "outlast.toml").write_text(toml)
        self.ledger = Ledger(self.directory, job=job.id, attempt=1)

    def events(self, *names):
        return [event for event in read_events(self.directory) if event.event in names]

    def path(self, tier, step, name=""):
        return self.place / tier / name_of(step) / name

    def save(self, *steps, tiers=("fast", "slow"), kind="full", exact=True, told=True):
        """Committed checkpoints; the same bytes in each tier."""
        for step in steps:
            for tier in tiers:
                write_checkpoint(Directory(self.place / tier), step, kind, exact)
                if told and tier == "fast":
                    self.ledger.append("commit", step=step, save=name_of(step))
                if told and tier != "fast":
                    self.ledger.append("tier_copied", step=step, save=name_of(step), tier=tier)

    def begin(self, tier, step):
        """A save that has no manifest yet."""
        sign(Directory(self.place / tier), one_of(step), JOB)

    def flip(self, tier, step, name=SHARD):
        """One bit of one file."""
        path = self.path(tier, step, name)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)

    def same(self):
        """Whether both tiers hold the same files with the same bytes."""
        fast, slow = (
            {
                str(path.relative_to(self.place / tier)): path.read_bytes()
                for path in (self.place / tier).rglob("*")
                if path.is_file()
            }
            for tier in ("fast", "slow")
        )
        return fast == slow

    def steps(self, tier):
        """(committed, unfinished) in a tier."""
        found = sorted((self.place / tier).glob("step-*"))
        numbers = {int(path.name[5:17]): (path / "manifest.json").is_file() for path in found}
        return [s for s, whole in numbers.items() if whole], [
            s for s, whole in numbers.items() if not whole
        ]


def write_checkpoint(storage, step, kind="full", exact=True):
    """One checkpoint of one rank and one tensor."""
    data = random.Random(step).randbytes(BYTES)
    sign(storage, one_of(step), JOB)
    files = {
        SHARD: write_hashed(storage, f"{name_of(step)}/{SHARD}", [data]),
        STATE: write_hashed(storage, f"{name_of(step)}/{STATE}", [b'{"state": {}}']),
    }
    chunk = Chunk(offsets=(0,), shape=(BYTES,), file=SHARD, start=0, end=BYTES)
    manifest = Manifest(
        format=3,
        job=JOB,
        step=step,
        attempt=1,
        serial=step,
        nonce=one_of(step).nonce,
        world_size=1,
        layout={"data_parallel": 1},
        created_t=1.8e9 + step,
        files=files,
        tensors={"model.weight": TensorEntry(dtype="U8", shape=(BYTES,), chunks=(chunk,))},
        kind=kind,
        exact=exact,
    )
    storage.put(f"{name_of(step)}/manifest.json", encode(manifest))
