"""One save: what has come of it so far, on this machine and as far as it was told of others."""

from __future__ import annotations

import errno
import time
from typing import Final, Protocol

import msgspec

from outlast.checkpoint.manifest import FULL, FileEntry, Manifest, shard_file, state_file
from outlast.keeper import wire
from outlast.keeper.commit import Part
from outlast.keeper.persist import ShardFile

NO_SPACE: Final = "; free space, or keep fewer checkpoints (checkpoint.keep)"


class Peer(Protocol):
    """A worker's connection, as a save sees it."""

    rank: int | None
    is_gone: bool

    def send(self, message: wire.Message, blob: bytes = b"") -> None:
        """Queue a message; never waits."""


class RankSide:
    """One local rank's side of a save."""

    def __init__(self, peer: Peer, begin: wire.Begin, layout: wire.Layout, ring_bytes: int) -> None:
        self.peer = peer
        self.begin = begin
        self.layout = layout
        self.ring_bytes = ring_bytes
        self.shard: ShardFile | None = None
        self.entry: FileEntry | None = None
        self.full: set[int] = set()  # blocks
        self.small = b""
        self.digests: dict[str, str] = {}
        self.complete_s: float | None = None  # when the copy was whole
        self.failures: list[Exception] = []
        self.is_overwritten = False  # the arena holds a later snapshot by now

    @property
    def reads_arena(self) -> bool:
        """Whether bytes of the arena have yet to be hashed or written."""
        return bool(self.layout.size) and self.entry is None


class Save:
    """One save.

    Attributes:
        writing: how many acts are under way that may still change files of this step. A save ends
            only when there is none: the next one may be of the same step, and what comes late
            would replace its files.
        is_concluding: a commit is under way; nothing else decides any more.
        ended: how it ends, once that is known.
        manifest: what was committed, for the keepers of other machines.
        is_left: no later attempt waits for it any more; see ``earlier``.
    """

    def __init__(self, attempt: int, world_size: int, step: int, serial: int) -> None:
        self.attempt = attempt
        self.world_size = world_size
        self.step = step
        self.serial = serial
        self.tiers: tuple[str, ...] | None = None
        self.kind = FULL
        self.exact = True
        self.started_s = time.monotonic()
        self.absent: dict[int, Peer] = {}
        self.ranks: dict[int, RankSide] = {}
        self.parts: dict[int, Part] = {}
        self.writing = 0
        self.is_concluding = False
        self.is_way_free = False
        self.by_storage = True  # whether it is the storage's failure, if it fails
        self.is_told = False  # whether another machine's keeper has put its failure on record
        self.ended: wire.Ended | None = None
        self.manifest = b""
        self.is_waited_for = self.is_being_left = self.is_left = False

    def join(self, rank: int, one: RankSide) -> None:
        """A rank has begun; the first one says what kind of save it is."""
        begin = one.begin
        if not self.ranks:
            self.tiers, self.kind, self.exact = begin.tiers, begin.kind, begin.exact
            self.started_s = begin.started_s
        self.ranks[rank] = one

    @property
    def here(self) -> dict[int, Peer]:
        """The connections of this machine's ranks."""
        return {rank: one.peer for rank, one in self.ranks.items()} | self.absent

    @property
    def is_open(self) -> bool:
        """Whether it may still be refused."""
        return self.ended is None and not self.is_concluding

    @property
    def needs_workers(self) -> bool:
        """Whether it can only be committed with what workers have yet to do."""
        done = sum(one.complete_s is not None for one in self.ranks.values())
        return done < self.world_size

    @property
    def progress(self) -> object:
        """The same for as long as nothing of it moves."""
        shards = tuple(one.shard.num_left if one.shard else 0 for one in self.ranks.values())
        return self.writing, self.is_concluding, self.ended is None, len(self.parts), shards

    def messenger(self, rank: int) -> Peer | None:
        """A worker of this machine that lives: the rank's own, or another."""
        here = self.here
        first = [here[rank]] if rank in here else []
        return next((peer for peer in [*first, *here.values()] if not peer.is_gone), None)

    def timings(self, commit_s: float) -> dict[str, float]:
        """Where the time went, in seconds; those of the slowest rank, work of all threads."""
        now = time.monotonic()
        found = {"commit_s": now - commit_s}
        for one in self.ranks.values():
            copied = (one.complete_s or now) - self.started_s
            parts = {"copy_s": copied, **(one.shard.timings if one.shard else {})}
            for name, value in parts.items():
                found[name] = max(found.get(name, 0.0), value)
        return {name: round(value, 6) for name, value in found.items()}


class Committed(msgspec.Struct, frozen=True, kw_only=True):
    """What follows a commit needs to know.

    Attributes:
        manifest: what was committed.
        data: its bytes.
        ranks: whose files this machine has.
        tiers: where it is to go, None for everywhere.
        tier: where it lies already, "" if only in memory.
        by_us: whether this keeper put the manifest there.
    """

    manifest: Manifest
    data: bytes
    ranks: tuple[int, ...]
    tiers: tuple[str, ...] | None
    tier: str
    by_us: bool


def part_of(rank: int, one: RankSide, small: FileEntry, shard: FileEntry | None) -> Part:
    """A rank's part, once the hashes of its files are known."""
    files = {state_file(rank): small}
    if shard is not None:
        files[shard_file(rank)] = shard
    return Part(files=files, tensors=one.layout.tensors, digests=one.digests)


def in_words(error: Exception) -> str:
    """An error as people and the ledger read it."""
    text = f"{type(error).__name__}: {error}"
    if getattr(error, "errno", None) == errno.ENOSPC:
        text += NO_SPACE
    return text.encode(errors="backslashreplace").decode()  # a path may be in any encoding
