"""All saves in flight: what workers and other machines say, from the first block to the commit.

A save is known by the attempt and its number in the attempt, which all ranks count alike. Its way::

    begun         each rank of this machine fills its arena; full blocks are written    (flight)
      │           a rank's copy is whole, its shard and its small file are written
    reported      the rank's part is known, here and to the keeper of rank 0    (shared_saves)
      │           all ranks of the job have reported their parts
    concluding    the manifest is made, fence-checked, written and announced          (conclude)
      │           or, until then: refused, for the first reason that anybody gives
    ended         once nobody writes any of its files; all who wait for it are told

A rank that dies before its copy is whole voids the save; one that dies after it changes nothing.
With ranks on several machines the keeper of rank 0 commits. What others say may come before this
machine's own ranks begin, and where rank 0 is may be known later than that.

One lock guards everything here; nothing is written or sent to a slow receiver under it.

Left behind (``Earlier``): when the next attempt asks for its state, most saves of earlier attempts
are over in a moment. Where a tier hangs they may never be: what has not moved for some seconds is
then left. It stays in flight, in its place and in its memory, and is committed when the tier
answers after all.

Guarantees: a snapshot that is whole in this machine's memory, of all ranks, can be read from there
some seconds after it was asked for, whatever its tier does. Each save that is left is said, once.
What can go wrong: a save that only its tier can bring (it went through a ring, or its memory was
taken) is waited for as long as the caller likes; there is nothing else of it.
Rejected: giving up what hangs (the tier may have all of it but the last block); waiting as long as
blocks are written (a slow tier would hold up what memory has).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import msgspec
import xxhash

from outlast.checkpoint.manifest import FileEntry, SaveName, hashed
from outlast.keeper import protocol, wire
from outlast.keeper.conclude import ENDED, Committed, Conclusions, Gate
from outlast.keeper.flight import (
    Files,
    Pool,
    RankOutcome,
    RankSide,
    Save,
    SaveTable,
    WorkerPeer,
    part_of,
)
from outlast.keeper.memory import Books
from outlast.storage import Storage, in_words

if TYPE_CHECKING:
    from outlast.keeper.shared_saves import SaveLeader, Side

logger = logging.getLogger(__name__)

QUIET_S: Final = 5.0  # that a save of an earlier attempt does not move, until it is left
LOOK_S: Final = 0.05
NUM_HASHERS: Final = 4
LOST: Final = "its machine was lost before the commit; the older checkpoint stands"


class SavesInFlight:
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
        copied: of an attempt, the number of the newest save that other machines hold a copy of.
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
        copied: Callable[[int], int] = lambda _: 0,
    ) -> None:
        self._copied = copied
        self.table = SaveTable()
        self.lock = self.table.lock
        self._books = books
        self._pool = pool
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
            self.table,
            gate=gate,
            record=record,
            on_committed=on_committed,
            on_change=on_change,
        )
        self._given_up: dict[
            tuple[int, int], tuple[int, int, int, RankOutcome]
        ] = {}  # as `unanswered`
        self._local: dict[int, set[int]] = {}  # attempt → ranks of this machine
        # Attempt and rank → the number of the newest save that it has begun, and who that was.
        self._begun: dict[tuple[int, int], tuple[int, WorkerPeer]] = {}
        self._asked = 0  # the newest attempt that has asked for what is there
        self._earlier = Earlier(self.table, self._files, books, self._conclusions, record=record)

    # --- who else there is ----------------------------------------------------------------------

    def know(self, attempt: int, ranks: Iterable[int]) -> None:
        """These ranks of an attempt are this machine's."""
        with self.lock:
            self._local.setdefault(attempt, set()).update(ranks)

    def local(self, attempt: int, world_size: int) -> Collection[int]:
        """The ranks of this machine."""
        return self._local.get(attempt) or range(world_size)

    def meet(self, attempt: int, side: Side) -> Side | None:
        """Other machines of an attempt are reached in this way; the way before it, if any."""
        with self.lock:
            before = self.table.sides.get(attempt)
            self.table.sides[attempt] = side
            for save in self._of(attempt):
                for rank in save.parts.keys() & set(save.local):
                    self._pass_on(save, rank, save.parts[rank])
            return before

    def part(self) -> list[Side]:
        """The ways that nobody needs any more: later attempts have begun."""
        with self.lock:
            newest = max(self.table.sides, default=0)
            busy = {attempt for attempt, _ in self.table.open}
            over = [one for one in self.table.sides if one < newest and one not in busy]
            for attempt in over:
                self._local.pop(attempt, None)
                self._forget(attempt)
            return [self.table.sides.pop(attempt) for attempt in over]

    # --- what workers say -----------------------------------------------------------------------

    def begin(
        self,
        peer: WorkerPeer,
        message: wire.BeginSave,
        layout: wire.Layout,
        *,
        hello: wire.Hello,
        ring_bytes: int,
    ) -> None:
        """A rank begins to copy."""
        rank = peer.rank
        assert rank is not None  # noqa: S101 - the server lets only workers begin
        with self.lock:
            # Whatever comes of this save: the worker is writing there by now.
            self._books.overwrite(message.arena)
            self._on_change()
            self._leave_earlier(hello.attempt, rank, message)
            self._begun = {key: one for key, one in self._begun.items() if key[0] >= hello.attempt}
            self._begun[hello.attempt, rank] = message.serial, peer
            save = self._join(peer, hello, message)
            if save is None:
                return
            if rank in save.ranks or rank in save.absent:
                raise ValueError(f"rank {rank} begins save {message.serial} twice")
            save.join(rank, RankSide(peer, message, layout, ring_bytes))
            if save.ended is None:
                self._files.begin(save, rank)
                self._conclude(save)
            for earlier in self._of(hello.attempt):
                self._do_without(earlier)

    def absent(self, peer: WorkerPeer, message: wire.Absent, *, hello: wire.Hello) -> None:
        """A rank has nothing to give to a save."""
        rank = peer.rank
        assert rank is not None  # noqa: S101 - the server lets only workers speak of saves
        with self.lock:
            save = self._join(peer, hello, message)
            if save is None:
                return
            if rank not in save.ranks:
                save.absent[rank] = peer
            save.is_told = save.is_told or message.is_told
            part = RankOutcome(error=message.reason, void=message.names, by_storage=False)
            self._report(save, rank, part)

    def ready(self, attempt: int, rank: int, message: wire.BlocksReady) -> None:
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
            save = self.table.open[attempt, message.serial]
            if one.shard is not None and one.full != set(range(one.shard.num_blocks)):
                words = "the snapshot was called whole before all of it was copied"
                self._report(save, rank, RankOutcome(error=words, by_storage=False))
                return
            one.small, one.digests, one.complete_s = small, message.digests, time.monotonic()
            self._files.advance(save, rank)

    def void(self, attempt: int, rank: int, message: wire.Void) -> None:
        """A rank's snapshot must not be believed."""
        with self.lock:
            if self._rank(attempt, message.serial, rank) is not None:
                save = self.table.open[attempt, message.serial]
                part = RankOutcome(error=message.reason, void=message.names, by_storage=False)
                self._report(save, rank, part)

    def lost(self, attempt: int, peer: WorkerPeer) -> None:
        """A worker is gone: what it had not finished copying is void."""
        rank = peer.rank
        if rank is None:
            return
        with self.lock:
            for save in [one for one in self.table.open.values() if one.attempt == attempt]:
                mine = save.ranks.get(rank)
                if rank >= save.world_size:
                    continue  # it has no part in it
                if mine is None or (mine.peer is peer and mine.complete_s is None):
                    words = f"rank {rank} was lost during its copy"
                    self._report(save, rank, RankOutcome(error=words, by_storage=False))

    # --- what other machines' keepers say -------------------------------------------------------

    def reported(
        self, hello: wire.Hello, message: protocol.PartReport, part: RankOutcome, source: object
    ) -> None:
        """Another machine's rank has reported, perhaps before our own have begun."""
        with self.lock:
            past = self.table.past.get((hello.attempt, message.serial))
            if past is None:
                save = self._find(hello, message)
                if save.is_open and save.gathered.add(message.rank, part):
                    self._conclude(save)
                return
            side = self.table.sides.get(hello.attempt)
        if side is not None:
            side.tell(past.ended, past.manifest, source)

    def detailed(self, attempt: int, message: protocol.Digests, digests: dict[str, str]) -> None:
        """Another machine's rank has these digests."""
        with self.lock:
            save = self.table.open.get((attempt, message.serial))
            if save is not None:
                self._answered(save, message.rank, digests)

    def machine_gone(self, attempt: int, ranks: range, words: str) -> None:
        """What these ranks have not reported does not come any more."""
        with self.lock:
            for save in self._of(attempt):
                for rank in ranks:
                    if save.is_open and save.gathered.waits_for(rank):
                        self._answered(save, rank, {})
                    if save.is_open and save.gathered.add(
                        rank, RankOutcome(error=words, by_storage=False)
                    ):
                        self._conclude(save)

    def machine_lost(self, attempt: int, ranks: range) -> None:
        """Membership has given a machine up, which may be silent only: nobody waits for it."""
        self.machine_gone(attempt, ranks, LOST)
        if 0 in ranks:  # it could be told of what is given up here, but decides no more
            self._refuse_all(lambda save: save.attempt == attempt, LOST)

    def manifest_of(self, attempt: int, serial: int) -> bytes:
        """The manifest of a save that was committed; b"" if it is not known any more."""
        with self.lock:
            past = self.table.past.get((attempt, serial))
            return b"" if past is None else past.manifest

    def overdue(self, attempt: int, leader: SaveLeader) -> bool:
        """Fail what has not moved for too long; whether anything of the attempt is in flight."""
        now_s = time.monotonic()
        with self.lock:
            mine = self._of(attempt)
            for save in mine:
                mark = save.progress, leader.moves(save.serial)
                if mark != save.mark:
                    save.mark, save.moved_s = mark, now_s
                quiet_s = now_s - save.moved_s
                if save.is_open and quiet_s >= leader.limits.gone_s:
                    self._fail_overdue(save, leader, quiet_s)
            return bool(mine)

    def _fail_overdue(self, save: Save, leader: SaveLeader, quiet_s: float) -> None:
        for rank in save.gathered.missing():
            limit_s, words = leader.patience(save, rank)
            if quiet_s >= limit_s:
                save.by_storage = False
                self._conclusions.refuse(save, f"rank {rank}: {words} for {quiet_s:.0f} s")
                return

    def decided(
        self, hello: wire.Hello, message: protocol.SaveOutcome, void: tuple[str, ...]
    ) -> None:
        """The keeper of rank 0, on another machine, has committed or refused."""
        attempt = hello.attempt
        with self.lock:
            side = self.table.sides.get(attempt)
            self._given_up.pop((attempt, message.serial), None)
            if (attempt, message.serial) in self.table.past:
                if side is not None:
                    side.done(message.serial)
                return
            save = self._find(hello, message)
            if not save.is_open:
                return
            if message.error or void:
                save.is_told = True
                self._conclusions.refuse(save, message.error, void)
            elif not save.ranks:
                save.is_told = True
                self._conclusions.refuse(save, "this machine's keeper knows nothing of it")
            else:
                save.held = message.held
                self._pool.put(lambda: self._look_for_manifest(save, message))

    def _look_for_manifest(self, save: Save, message: protocol.SaveOutcome) -> None:
        """In a tier that both machines see it is there already; or rank 0's keeper is asked."""
        data = self._conclusions.manifest_there(save)
        with self.lock:
            if not save.is_open:
                return
            if xxhash.xxh3_128_hexdigest(data) == message.manifest:
                self._conclusions.follow(save, data)
            elif (side := self.table.sides.get(save.attempt)) is not None:
                side.want(save.step, save.serial)

    def given(self, attempt: int, message: protocol.Root, data: bytes) -> None:
        """The manifest that was asked for."""
        with self.lock:
            save = self.table.open.get((attempt, message.serial))
            if save is None or not save.is_open:
                return
            if data:
                self._conclusions.follow(save, data)
            else:
                save.by_storage = False
                self._conclusions.refuse(
                    save, "its manifest is not to be had from rank 0's keeper any more"
                )

    def unanswered(self, attempt: int) -> list[tuple[int, int, int, RankOutcome]]:
        """(step, serial, rank, part) of everything that has been reported and still counts."""
        with self.lock:
            found = [one for key, one in self._given_up.items() if key[0] == attempt]
            return found + [
                (save.step, save.serial, rank, part)
                for save in self._of(attempt)
                if save.is_open
                for rank, part in save.parts.items()
            ]

    def digests_of(self, attempt: int, message: protocol.Detail) -> dict[str, str]:
        """A rank's single digests in some groups."""
        with self.lock:
            save = self.table.open.get((attempt, message.serial))
            one = save.ranks.get(message.rank) if save is not None else None
            return {} if one is None else one.in_groups(message.groups)

    def moves(self, attempt: int) -> dict[int, tuple[int, bool]]:
        """By save: how often something of it has moved; whether it waits for a worker."""
        with self.lock:
            found = {}
            for save in self._of(attempt):
                if save.progress != save.mark:
                    save.mark, save.num_moves = save.progress, save.num_moves + 1
                found[save.serial] = (save.num_moves, save.needs_workers)
            return found

    def is_past(self, attempt: int) -> bool:
        """Whether a later attempt has asked for what is there."""
        return attempt < self._asked

    def left_alone(self, attempt: int, words: str) -> None:
        """Nobody decides any more about what has been reported."""
        with self.lock:
            self._forget(attempt)
            for save in self._of(attempt):
                if save.is_open and save.parts:
                    save.by_storage = False
                    self._conclusions.refuse(save, words)

    def _forget(self, attempt: int) -> None:
        """Nobody is to hear of what was given up."""
        for key in [one for one in self._given_up if one[0] == attempt]:
            del self._given_up[key]

    def _of(self, attempt: int) -> list[Save]:
        return [save for save in self.table.open.values() if save.attempt == attempt]

    # --- the end of attempts --------------------------------------------------------------------

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
        with self.lock:
            self._asked = max(self._asked, attempt)
        # Their workers are gone, whether or not the kernel has told us yet.
        self._refuse_all(lambda save: save.attempt < attempt and save.needs_workers, ENDED)
        self._earlier.wait(attempt, timeout_s, tell)

    def tick(self) -> None:
        """Now and then: what waits to be let through is put on record, or given up."""
        with self.lock:
            self._conclusions.tick()

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight but what later attempts have left behind.

        That may never end: where a rank has never begun its part, or a storage does not answer.
        """
        with self.lock:
            return all(save.is_left for save in self.table.open.values())

    def names(self) -> set[SaveName]:
        """The names of all saves in flight."""
        with self.lock:
            return {save.name for save in self.table.open.values()}

    def arenas(self) -> set[int]:
        """The arenas of all saves in flight."""
        with self.lock:
            sides = [one for save in self.table.open.values() for one in save.ranks.values()]
            return {one.begin.arena for one in sides}

    # --- inside ---------------------------------------------------------------------------------

    def _join(
        self, peer: WorkerPeer, hello: wire.Hello, message: wire.BeginSave | wire.Absent
    ) -> Save | None:
        """The save that a worker's message belongs to; None if it has ended before."""
        past = self.table.past.get((hello.attempt, message.serial))
        if past is not None:
            peer.send(past.ended)
            return None
        return self._find(hello, message)

    def _find(
        self,
        hello: wire.Hello,
        message: wire.BeginSave | wire.Absent | protocol.PartReport | protocol.SaveOutcome,
    ) -> Save:
        """The save that a message belongs to."""
        key = (hello.attempt, message.serial)
        if key not in self.table.open:
            local = self.local(hello.attempt, hello.world_size)
            name = SaveName(message.step, hello.attempt, message.serial, hello.nonce)
            self.table.open[key] = Save(name, hello.world_size, local)
            self._do_without(self.table.open[key])
        save = self.table.open[key]
        if save.step != message.step and save.is_open:
            # The ranks count their saves alike; where they do not, nothing of it is to be believed.
            self._conclusions.refuse(
                save, f"some ranks save step {save.step} and others {message.step}"
            )
        return save

    def _do_without(self, save: Save) -> None:
        """Ranks that have begun a later save take no part in this one any more.

        Each counts its saves upwards. One that had begun this one with a keeper that has died tries
        again under the next number, and another one that was not so far does not know of that.
        """
        for rank in save.local:
            number, peer = self._begun.get((save.attempt, rank), (0, None))
            if number > save.serial and peer and rank not in save.ranks | save.absent:
                save.absent[rank] = peer
                words = f"rank {rank} has begun a later one without it"
                # Void: whoever is behind takes it again, under the number of those ahead.
                self._report(save, rank, RankOutcome(error=words, void=("",), by_storage=False))

    def _leave_earlier(self, attempt: int, rank: int, message: wire.BeginSave) -> None:
        """A rank copies one snapshot after the other, so those before this one are whole or void.

        And what has yet to be read from this arena is no longer what it was.
        """
        for save in list(self.table.open.values()):
            one = save.ranks.get(rank)
            if save.attempt == attempt and one is not None and one.complete_s is None:
                words = f"rank {rank} began another snapshot before it was whole"
                self._report(save, rank, RankOutcome(error=words, by_storage=False))
            for side in save.ranks.values():
                if side.begin.arena == message.arena:
                    side.is_overwritten = True
                    if side.reads_arena and save.is_open:
                        save.by_storage = False
                        self._conclusions.refuse(
                            save, f"its memory was taken for step {message.step}"
                        )

    def _rank(self, attempt: int, serial: int, rank: int) -> RankSide | None:
        save = self.table.open.get((attempt, serial))
        return save.ranks.get(rank) if save and save.is_open else None

    # --- all ranks' parts -----------------------------------------------------------------------

    def _report(self, save: Save, rank: int, part: RankOutcome) -> None:
        """A rank of this machine has its part; with several machines rank 0's keeper is told."""
        if save.each_step and not part.error:
            part = msgspec.structs.replace(part, held=self._copied(save.attempt))
        if not save.is_open or not save.gathered.add(rank, part):
            return
        one = save.ranks.get(rank)
        if part.error and one is not None and one.shard is not None:
            one.shard.abandon()
        self._pass_on(save, rank, part)
        self._conclude(save)

    def _pass_on(self, save: Save, rank: int, part: RankOutcome) -> None:
        side = self.table.sides.get(save.attempt)
        if side is not None and save.is_open:
            side.report(save.step, save.serial, rank, part)

    def _conclude(self, save: Save) -> None:
        gathered = save.gathered
        if not save.is_open or not save.has_rank_0:
            return
        if gathered.failed:
            rank = gathered.failed[0]
            part = gathered.parts[rank]
            who = f"rank {rank}: " if save.world_size > 1 else ""
            save.by_storage = part.by_storage
            self._conclusions.refuse(save, who + part.error, tuple(sorted(gathered.void)))
        elif gathered.is_whole and gathered.differs:
            self._compare(save)
        elif gathered.is_whole:
            self._conclusions.commit(save)

    def _compare(self, save: Save) -> None:
        """Replicas differ: one rank for each version says what it has."""
        side = self.table.sides.get(save.attempt)
        for rank, groups in save.gathered.ask().items():
            one = save.ranks.get(rank)
            if one is not None:
                self._answered(save, rank, one.in_groups(groups))
            elif side is None or not side.detail(save.step, save.serial, rank, groups):
                self._answered(save, rank, {})

    def _answered(self, save: Save, rank: int, digests: dict[str, str]) -> None:
        if save.is_open and save.gathered.answer(rank, digests):
            void = save.gathered.differing()
            some = ", ".join(void[:3]) or "of some it is not known which"
            self._conclusions.refuse(save, f"not the same on all ranks: {some}", void)

    # --- the end --------------------------------------------------------------------------------

    def _refuse_all(self, which: Callable[[Save], bool], error: str) -> None:
        with self.lock:
            for save in [one for one in self.table.open.values() if one.is_open and which(one)]:
                save.by_storage = False
                if save.is_shared and 0 not in save.local:
                    self._give_notice(save, error)
                self._conclusions.refuse(save, error)

    def _give_notice(self, save: Save, error: str) -> None:
        """Rank 0's keeper must hear of what this one gives up, also where it cannot just now."""
        lost = RankOutcome(error=error, by_storage=False)
        parts = {rank: save.parts.get(rank, lost) for rank in save.local}
        rank, part = next((item for item in parts.items() if item[1].error), (min(parts), lost))
        self._given_up[save.attempt, save.serial] = (save.step, save.serial, rank, part)
        self._pass_on(save, rank, part)

    def _end_if_quiet(self, save: Save) -> None:
        self._conclusions.end_if_quiet(save)


# --- saves of earlier attempts --------------------------------------------------------------------


class Earlier:
    """Waits for saves of earlier attempts, and says when it does not any longer.

    Args:
        saves: all of them; its condition is notified when one has ended.
        files: knows where a save goes.
        books: the arenas.
        conclusions: ends saves, and keeps snapshots.
        record: puts an event into the ledger.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        saves: SaveTable,
        files: Files,
        books: Books,
        conclusions: Conclusions,
        *,
        record: Callable[..., None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._saves = saves
        self._files = files
        self._books = books
        self._conclusions = conclusions
        self._record = record
        self._clock = clock
        self._untold: list[str] = []

    def wait(self, attempt: int, timeout_s: float, tell: Callable[[str], None] | None) -> None:
        """Wait until nothing of attempts before ``attempt`` is in flight that may still count.

        Args:
            attempt: the next one.
            timeout_s: for what is in no memory.
            tell: told one line of each save that takes long; None: somebody else will be.
        """
        wait = _Wait(self._clock)
        while True:
            with self._saves.changed:
                before = [
                    one
                    for one in self._saves.open.values()
                    if one.attempt < attempt and not one.is_left
                ]
                waited_s = wait.waited_s
                is_over = not before or waited_s >= timeout_s
                ripe = [] if is_over else [one for one in before if self._is_ripe(one, wait)]
                if not is_over and not ripe:
                    self._saves.changed.wait(min(LOOK_S, timeout_s - waited_s))
                words = list(self._untold) if tell is not None else []
                del self._untold[: len(words)]
            if tell is not None:
                for one in words:
                    tell(one)
            if is_over:
                return
            for save in ripe:
                self._leave(save, waited_s)

    def _is_ripe(self, save: Save, wait: _Wait) -> bool:
        """Whether it is not to be waited for any longer. With the lock held."""
        is_held = self._conclusions.is_held(save)
        quiet_s = wait.quiet_s(save, is_held)
        if is_held:
            is_ripe = quiet_s >= QUIET_S  # it may wait for ever, and nobody counts on it
        elif self._is_whole(save):
            is_ripe = wait.waited_s >= QUIET_S
        elif save.ended is None and len(save.ranks) == save.world_size:
            is_ripe = False
            if wait.waited_s >= QUIET_S and not save.is_waited_for:
                save.is_waited_for = True
                self._untold.append(
                    f"waiting for step {save.step}, which attempt {save.attempt} has left half "
                    f"written to {self._place(save)}: memory does not have it"
                )
        else:
            is_ripe = quiet_s >= QUIET_S
        return is_ripe and not save.is_being_left

    def _is_whole(self, save: Save) -> bool:
        """Whether all of it lies in this machine's memory."""
        return (
            save.ended is None
            and len(save.ranks) == save.world_size
            and not any(part.error for part in save.parts.values())
            and all(
                one.complete_s is not None
                and not one.ring_bytes
                and not one.is_overwritten
                and (not one.layout.size or one.begin.arena in self._books.arenas)
                for one in save.ranks.values()
            )
        )

    def _leave(self, save: Save, waited_s: float) -> None:
        with self._saves.changed:
            if save.is_being_left:  # by another worker's question
                return
            save.is_being_left = True
            is_held, is_whole = self._conclusions.is_held(save), self._is_whole(save)
            if is_held:
                self._conclusions.let_go([save], ENDED)
        is_kept = is_whole and not is_held and self._is_kept(save)
        place = self._place(save)
        what = f"attempt {save.attempt}'s save of step {save.step}"
        end = f"for the attempts' claims to let {what} through" if is_held else ""
        done = "going on from its snapshot in memory" if is_kept else "going on without it"
        words = f"waited {waited_s:.0f} s {end or f'for {place} to end {what}'}; {done}"
        with self._saves.changed:
            self._untold.append(words)
            save.is_left = True
            self._saves.changed.notify_all()
        if not is_held:  # which is put on record by its end
            self._record(
                "storage_error",
                durable=False,
                attempt=save.attempt,
                operation="wait",
                path=place,
                error=words,
                step=save.step,
            )

    def _place(self, save: Save) -> str:
        _, storage = self._files.target(save)
        return "memory" if storage is None else storage.describe()

    def _is_kept(self, save: Save) -> bool:
        try:
            return self._keep(save)
        except Exception as error:  # noqa: BLE001 - an older one will do: whoever asks is answered
            logger.warning("step %d is not read from memory: %s", save.step, in_words(error))
            return False

    def _keep(self, save: Save) -> bool:
        """Have its snapshot readable in memory, with hashes of what lies there.

        Not in the writers' threads: they may all hang.
        """
        sides = list(save.ranks.items())
        with ThreadPoolExecutor(NUM_HASHERS, "outlast-hash") as pool:
            entries = list(pool.map(lambda one: self._hashed(one[1]), sides))
        parts = {
            rank: part_of(save, rank, one, hashed(one.small), entry)
            for (rank, one), entry in zip(sides, entries, strict=True)
        }
        return self._conclusions.keep(save, parts)

    def _hashed(self, one: RankSide) -> FileEntry | None:
        if one.entry is not None or not one.layout.size:
            return one.entry
        return hashed(self._books.arenas[one.begin.arena].view[: one.layout.size])


class _Wait:
    """One wait: since when, and since when nothing of a save has moved."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._start_s = clock()
        self._seen: dict[tuple[int, int], tuple[object, float]] = {}

    @property
    def waited_s(self) -> float:
        """Seconds since the beginning."""
        return self._clock() - self._start_s

    def quiet_s(self, save: Save, is_held: bool) -> float:
        """For how long a save has been as it is."""
        key, state, now_s = (save.attempt, save.serial), (is_held, save.progress), self._clock()
        known, since_s = self._seen.get(key, (None, now_s))
        if known != state:
            since_s = now_s
            self._seen[key] = (state, since_s)
        return now_s - since_s
