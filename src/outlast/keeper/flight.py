"""One save: what has come of it so far, on this machine and as far as it was told of others."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Protocol

import msgspec

from outlast.checkpoint.manifest import (
    FULL,
    FileEntry,
    Manifest,
    encode_part,
    make_part,
    part_entry,
    part_file,
    shard_file,
    state_file,
)
from outlast.checkpoint.names import SaveName
from outlast.keeper import wire
from outlast.keeper.commit import Part, combined
from outlast.keeper.gather import Gathering
from outlast.keeper.persist import ShardFile


class Peer(Protocol):
    """A worker's connection, as a save sees it."""

    rank: int | None
    is_gone: bool

    def send(self, message: wire.Message, blob: bytes = b"") -> None:
        """Queue a message; never waits."""


class Side(Protocol):
    """This machine's part in a save of ranks on several machines; nothing of it waits."""

    leads: bool  # whether this machine has rank 0

    def report(self, step: int, serial: int, rank: int, part: Part) -> None:
        """Tell rank 0's keeper of a rank's part."""

    def tell(self, ended: wire.Ended, manifest: bytes, to: object = None) -> None:
        """Tell the other machines, or one of them, how a save ended."""

    def detail(self, step: int, serial: int, rank: int, groups: tuple[str, ...]) -> bool:
        """Ask for a rank's single digests; whether its machine can be asked."""

    def want(self, step: int, serial: int) -> None:
        """Ask rank 0's keeper for the manifest of a save."""

    def done(self, serial: int) -> None:
        """Tell rank 0's keeper that nothing more is needed of it for a save."""

    def close(self) -> None:
        """No save of this attempt is in flight any more."""


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
        self.part = b""  # what it wrote, as other ranks will read it; none in a job of one rank
        self.digests: dict[str, str] = {}
        self.complete_s: float | None = None  # when the copy was whole
        self.failures: list[str] = []  # in words
        self.is_overwritten = False  # the arena holds a later snapshot by now

    def in_groups(self, groups: Collection[str]) -> dict[str, str]:
        """The single digests of pieces that are held by these groups of ranks."""
        known = self.layout.groups
        return {key: one for key, one in self.digests.items() if known.get(key, "") in groups}

    def small_files(self, rank: int) -> dict[str, bytes]:
        """The files that do not lie in the arena."""
        part = {part_file(rank): self.part} if self.part else {}
        return {state_file(rank): self.small, **part}

    def sizes(self, rank: int) -> list[int]:
        """Bytes of each of its files, as far as they are known."""
        return [self.layout.size, *map(len, self.small_files(rank).values())]

    @property
    def reads_arena(self) -> bool:
        """Whether bytes of the arena have yet to be hashed or written."""
        return bool(self.layout.size) and self.entry is None


class Save:
    """One save.

    Attributes:
        name: of its directory, in each tier.
        local: the ranks of this machine.
        gathered: all ranks' parts, as far as they are known here.
        writing: how many acts are under way that may still read its memory. A save ends only when
            there is none.
        is_concluding: a commit is under way; nothing else decides any more.
        ended: how it ends, once that is known.
        manifest: what was committed, for the keepers of other machines.
        is_left: no later attempt waits for it any more; see ``earlier``.
    """

    def __init__(self, name: SaveName, world_size: int, local: Collection[int]) -> None:
        self.name = name
        self.attempt, self.step, self.serial = name.attempt, name.step, name.serial
        self.local = local
        self.world_size = world_size
        self.tiers: tuple[str, ...] | None = None
        self.kind = FULL
        self.exact = True
        self.started_s = time.monotonic()
        self.absent: dict[int, Peer] = {}
        self.ranks: dict[int, RankSide] = {}
        self.gathered = Gathering(world_size)
        self.writing = 0
        self.is_concluding = False
        self.is_signed = False
        self.by_storage = True  # whether it is the storage's failure, if it fails
        self.is_told = False  # whether another machine's keeper has put its failure on record
        self.ended: wire.Ended | None = None
        self.manifest = b""
        self.mark: object = None  # what it was like when it was looked at last
        self.moved_s = self.started_s  # when that was not what it had been before
        self.num_moves = 0
        self.is_waited_for = self.is_being_left = self.is_left = False

    def join(self, rank: int, one: RankSide) -> None:
        """A rank has begun; the first one says what kind of save it is."""
        begin = one.begin
        if not self.ranks:
            self.tiers, self.kind, self.exact = begin.tiers, begin.kind, begin.exact
            self.started_s = begin.started_s
        self.ranks[rank] = one

    @property
    def parts(self) -> dict[int, Part]:
        """The parts that are known, by rank."""
        return self.gathered.parts

    @property
    def is_shared(self) -> bool:
        """Whether other machines have ranks of it too."""
        return len(self.local) < self.world_size

    @property
    def has_rank_0(self) -> bool:
        """Whether rank 0 has begun it here, or has said that it cannot."""
        return 0 in self.ranks or 0 in self.absent

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
        """Whether it can only be committed with what workers of this machine have yet to do."""
        done = sum(one.complete_s is not None for one in self.ranks.values())
        return done < len(self.local)

    @property
    def progress(self) -> object:
        """The same for as long as nothing of it moves."""
        shards = tuple(one.shard.num_left if one.shard else 0 for one in self.ranks.values())
        return self.writing, self.is_concluding, self.ended is None, len(self.parts), shards

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


def part_of(
    save: Save, rank: int, one: RankSide, small: FileEntry, shard: FileEntry | None
) -> Part:
    """A rank's part, once the hashes of its files are known; the file of it is in ``one.part``."""
    files = {state_file(rank): small}
    if shard is not None:
        files[shard_file(rank)] = shard
    if save.world_size == 1:
        return Part(files=files, tensors=one.layout.tensors, num_files=len(files))
    contents = one.layout.contents
    one.part = encode_part(make_part(save.step, rank, files, contents))
    return Part(
        entry=part_entry(one.part, 0, files.values()),
        structure=contents.structure,
        num_elements=contents.num_elements,
        num_files=len(files) + 1,
        replicas=combined(one.digests, one.layout.groups),
    )
