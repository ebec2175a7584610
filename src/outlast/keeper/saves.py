"""What is in flight: from the first block of a snapshot to its commit.

A save is known by the attempt and its number in the attempt, which all ranks count alike. Each rank
of this machine fills its arena, blocks are written as they become full, and when every rank of the
job has reported its part the manifest is put: the commit. A rank that dies before its copy is whole
voids the save; one that dies after it changes nothing.

With ranks on several machines, each machine's keeper reports its parts through its workers, and the
keeper of rank 0 commits. What others say may come before this machine's own ranks begin.

A save ends only when nobody writes any of its files any more: the next one may be of the same step.

One lock guards everything here; nothing is written or sent to a slow receiver under it.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from outlast.keeper import wire
from outlast.keeper.commit import Part
from outlast.keeper.conclude import Conclusions
from outlast.keeper.earlier import ENDED, Earlier
from outlast.keeper.files import Files
from outlast.keeper.flight import Committed, Peer, RankSide, Save
from outlast.keeper.gate import Gate
from outlast.keeper.memory import Books
from outlast.keeper.persist import Pool
from outlast.storage import Storage

logger = logging.getLogger(__name__)

MAX_PAST: Final = 64


class Saves:
    """All saves in flight on this machine.

    Args:
        job: id of the job.
        tiers: name → durable storage, the fastest first.
        books: the arenas and what is in them.
        pool: threads for writing.
        record: puts an event into the ledger.
        on_committed: told of each commit, in a thread of the pool.
        on_change: told that the books have changed.
        gate: says which attempts may commit, and when; all, at once, by default.
    """

    def __init__(
        self,
        job: str,
        tiers: Mapping[str, Storage],
        books: Books,
        pool: Pool,
        *,
        record: Callable[..., None],
        on_committed: Callable[[Committed], None],
        on_change: Callable[[], None],
        gate: Gate | None = None,
    ) -> None:
        self.lock = threading.RLock()
        self._books = books
        self._pool = pool
        self._record = record
        self._on_change = on_change
        self._files = Files(
            job,
            tiers,
            books,
            pool,
            lock=self.lock,
            on_part=self._report,
            on_quiet=self._end_if_quiet,
        )
        self._conclusions = Conclusions(
            job,
            self._files,
            books,
            pool,
            gate,
            lock=self.lock,
            record=record,
            refuse=self._refuse,
            decide=self._decide,
            on_committed=on_committed,
            on_change=on_change,
        )
        self._open: dict[tuple[int, int], Save] = {}
        self._past: collections.OrderedDict[tuple[int, int], wire.Ended]
        self._past = collections.OrderedDict()
        self._changed = threading.Condition(self.lock)
        self._earlier = Earlier(
            self._open, self._files, books, self._conclusions, changed=self._changed, record=record
        )

    # --- what workers say -----------------------------------------------------------------------

    def begin(
        self,
        peer: Peer,
        message: wire.Begin,
        layout: wire.Layout,
        *,
        attempt: int,
        world_size: int,
        ring_bytes: int,
    ) -> None:
        """A rank begins to copy."""
        rank = peer.rank
        assert rank is not None  # noqa: S101 - the server lets only workers begin
        with self.lock:
            # Whatever comes of this save: the worker is writing there by now.
            self._books.overwrite(message.arena)
            self._on_change()
            self._leave_earlier(attempt, rank, message)
            save = self._join(peer, attempt, world_size, message)
            if save is None:
                return
            if rank in save.here:
                raise ValueError(f"rank {rank} begins save {message.serial} twice")
            save.join(rank, RankSide(peer, message, layout, ring_bytes))
            if save.ended is None and (before := self._writes_the_same(save)) is not None:
                words = f"attempt {before.attempt}'s files of step {save.step} are not ended yet"
                self._report(save, rank, Part(error=words))
            elif save.ended is None:
                self._files.begin(save, rank)
                self._conclude(save)

    def absent(self, peer: Peer, message: wire.Absent, *, attempt: int, world_size: int) -> None:
        """A rank has nothing to give to a save."""
        rank = peer.rank
        assert rank is not None  # noqa: S101 - the server lets only workers speak of saves
        with self.lock:
            save = self._join(peer, attempt, world_size, message)
            if save is None:
                return
            if rank not in save.ranks:
                save.absent[rank] = peer
            part = Part(error=message.reason, void=message.names, by_storage=False)
            self._report(save, rank, part)

    def ready(self, attempt: int, rank: int, message: wire.Ready) -> None:
        """Blocks of a rank's file are full."""
        with self.lock:
            one = self._rank(attempt, message.serial, rank)
            if one is not None and one.shard is not None and one.complete_s is None:
                for block in sorted(set(message.blocks) - one.full):
                    one.full.add(block)
                    one.shard.ready(block)

    def complete(self, attempt: int, rank: int, message: wire.Complete, small: bytes) -> None:
        """A rank's snapshot is whole: from here on it does not need its worker."""
        with self.lock:
            one = self._rank(attempt, message.serial, rank)
            if one is None or one.complete_s is not None:
                return
            save = self._open[attempt, message.serial]
            if one.shard is not None and one.full != set(range(one.shard.num_blocks)):
                words = "the snapshot was called whole before all of it was copied"
                self._report(save, rank, Part(error=words, by_storage=False))
                return
            one.small, one.digests, one.complete_s = small, message.digests, time.monotonic()
            self._files.advance(save, rank)

    def void(self, attempt: int, rank: int, message: wire.Void) -> None:
        """A rank's snapshot must not be believed."""
        with self.lock:
            if self._rank(attempt, message.serial, rank) is not None:
                save = self._open[attempt, message.serial]
                part = Part(error=message.reason, void=message.names, by_storage=False)
                self._report(save, rank, part)

    def lost(self, attempt: int, peer: Peer) -> None:
        """A worker is gone: what it had not finished copying is void."""
        rank = peer.rank
        if rank is None:
            return
        with self.lock:
            for save in [one for one in self._open.values() if one.attempt == attempt]:
                mine = save.ranks.get(rank)
                if rank >= save.world_size:
                    continue  # it has no part in it
                if mine is None or (mine.peer is peer and mine.complete_s is None):
                    words = f"rank {rank} was lost during its copy"
                    self._report(save, rank, Part(error=words, by_storage=False))

    def relayed(
        self, peer: Peer, attempt: int, world_size: int, message: wire.Part, data: bytes
    ) -> None:
        """Another machine's rank has reported, perhaps before our own have begun."""
        part = msgspec.json.decode(data, type=Part)
        with self.lock:
            save = self._join(peer, attempt, world_size, message)
            if save is not None and save.is_open:
                save.parts.setdefault(message.rank, part)
                self._conclude(save)

    def decided(
        self, peer: Peer, attempt: int, world_size: int, message: wire.Outcome, data: bytes
    ) -> None:
        """The keeper of rank 0, on another machine, has committed or refused."""
        with self.lock:
            save = self._join(peer, attempt, world_size, message)
            if save is None or not save.is_open:
                return
            if message.error or message.void:
                save.is_told = True
                self._refuse(save, message.error, message.void)
            else:
                self._conclusions.follow(save, data)

    def nobody_is_left(self) -> None:
        """No worker is connected: what waits for one of them waits in vain."""
        self._refuse_all(
            lambda save: save.needs_workers, "its workers ended before the snapshot was whole"
        )

    def wait_for_earlier(
        self, attempt: int, timeout_s: float, tell: Callable[[str], None] | None = None
    ) -> None:
        """Wait until nothing of attempts before ``attempt`` is in flight that may still count.

        What hangs is left behind after some seconds; ``tell`` is told so.
        """
        # Their workers are gone, whether or not the kernel has told us yet.
        self._refuse_all(lambda save: save.attempt < attempt and save.needs_workers, ENDED)
        self._earlier.wait(attempt, timeout_s, tell)

    def tick(self) -> None:
        """Now and then: what waits to be let through is put on record, or given up."""
        with self.lock:
            self._conclusions.tick()

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight."""
        with self.lock:
            return not self._open

    def steps(self) -> set[int]:
        """The steps of all saves in flight."""
        with self.lock:
            return {save.step for save in self._open.values()}

    def arenas(self) -> set[int]:
        """The arenas of all saves in flight."""
        with self.lock:
            sides = [one for save in self._open.values() for one in save.ranks.values()]
            return {one.begin.arena for one in sides}

    # --- inside ---------------------------------------------------------------------------------

    def _join(
        self,
        peer: Peer,
        attempt: int,
        world_size: int,
        message: wire.Begin | wire.Absent | wire.Part | wire.Outcome,
    ) -> Save | None:
        """The save that a message belongs to; None if it has ended before."""
        key = (attempt, message.serial)
        if key in self._past:
            if isinstance(message, wire.Begin | wire.Absent):
                peer.send(self._past[key])
            return None
        if key not in self._open:
            self._open[key] = Save(attempt, world_size, message.step, message.serial)
        save = self._open[key]
        if save.step != message.step and save.is_open:
            # The ranks count their saves alike; where they do not, nothing of it is to be believed.
            self._refuse(save, f"some ranks save step {save.step} and others {message.step}")
        return save

    def _leave_earlier(self, attempt: int, rank: int, message: wire.Begin) -> None:
        """A rank copies one snapshot after the other, so those before this one are whole or void.

        And what has yet to be read from this arena is no longer what it was.
        """
        for save in list(self._open.values()):
            one = save.ranks.get(rank)
            if save.attempt == attempt and one is not None and one.complete_s is None:
                words = f"rank {rank} began another snapshot before it was whole"
                self._report(save, rank, Part(error=words, by_storage=False))
            for side in save.ranks.values():
                if side.begin.arena == message.arena:
                    side.is_overwritten = True
                    if side.reads_arena and save.is_open:
                        save.by_storage = False
                        self._refuse(save, f"its memory was taken for step {message.step}")

    def _writes_the_same(self, save: Save) -> Save | None:
        """A save that a tier hangs on, and whose files would one day take the place of these."""
        tier, _ = self._files.target(save)
        for one in self._open.values():
            if one.is_left and one.step == save.step and self._files.target(one)[0] == tier:
                return one if tier else None
        return None

    def _rank(self, attempt: int, serial: int, rank: int) -> RankSide | None:
        save = self._open.get((attempt, serial))
        return save.ranks.get(rank) if save and save.is_open else None

    # --- all ranks' parts -----------------------------------------------------------------------

    def _report(self, save: Save, rank: int, part: Part) -> None:
        """A rank of this machine has its part; with several machines rank 0 is told of it."""
        if rank in save.parts or not save.is_open:
            return
        save.parts[rank] = part
        one = save.ranks.get(rank)
        if part.error and one is not None and one.shard is not None:
            one.shard.abandon()
        messenger = save.messenger(rank)
        if 0 not in save.here and len(save.here) < save.world_size and messenger is not None:
            message = wire.Part(step=save.step, serial=save.serial, rank=rank)
            messenger.send(message, msgspec.json.encode(part))
        self._conclude(save)

    def _conclude(self, save: Save) -> None:
        failed = [rank for rank, part in save.parts.items() if part.error]
        if not save.is_open or 0 not in save.here:
            return
        if failed:
            part = save.parts[failed[0]]
            void = tuple(sorted({name for one in save.parts.values() for name in one.void}))
            who = f"rank {failed[0]}: " if save.world_size > 1 else ""
            save.by_storage = part.by_storage
            self._refuse(save, who + part.error, void)
        elif len(save.parts) == save.world_size:
            self._conclusions.commit(save)

    # --- the end --------------------------------------------------------------------------------

    def _refuse_all(self, which: Callable[[Save], bool], error: str) -> None:
        with self.lock:
            for save in [one for one in self._open.values() if one.is_open and which(one)]:
                save.by_storage = False
                self._refuse(save, error)

    def _refuse(self, save: Save, error: str, void: tuple[str, ...] = ()) -> None:
        self._decide(save, wire.Ended(step=save.step, serial=save.serial, error=error, void=void))

    def _decide(self, save: Save, ended: wire.Ended, manifest: bytes = b"") -> None:
        """How a save ends is known."""
        with self.lock:
            if save.ended is not None:
                return
            save.ended, save.manifest = ended, manifest
            for one in save.ranks.values():
                if ended.error and one.shard is not None:
                    one.shard.abandon()
            self._end_if_quiet(save)

    def _end_if_quiet(self, save: Save) -> None:
        if save.ended is not None and not save.writing:
            self._pool.put(lambda: self._end(save))

    def _end(self, save: Save) -> None:
        ended = save.ended
        assert ended is not None  # noqa: S101 - decided before
        with self.lock:
            if (save.attempt, save.serial) in self._past:
                return
            self._past[save.attempt, save.serial] = ended
            while len(self._past) > MAX_PAST:
                self._past.popitem(last=False)
        if ended.error and not ended.void and not save.is_told:
            self._record_failure(save, ended.error)
        with self.lock:
            del self._open[save.attempt, save.serial]
            here = save.here
            for one in save.ranks.values():
                one.shard = None  # it knows the save: together they would keep the memory mapped
            self._changed.notify_all()
        if 0 in here and len(here) < save.world_size:
            outcome = wire.Outcome(
                step=save.step, serial=save.serial, error=ended.error, void=ended.void
            )
            here[0].send(outcome, save.manifest)
        for peer in here.values():
            peer.send(ended)

    def _record_failure(self, save: Save, error: str) -> None:
        if not save.by_storage:
            self._record(
                "save_skipped", durable=False, attempt=save.attempt, step=save.step, reason=error
            )
            return
        tier, storage = self._files.target(save)
        self._record(
            "storage_error",
            attempt=save.attempt,
            operation="save",
            path=storage.describe() if storage else tier or "memory",
            error=error,
            step=save.step,
        )
