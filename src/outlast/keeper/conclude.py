"""How a save ends: committed, refused, held at the gate, or left behind by the next attempt.

The commit: all parts become a manifest, which is fence-checked, written and announced. All but what
takes time is called with the lock of the saves held. A save ends only when nobody writes any of its
files any more: the next one may be of the same step.

Held: a save that the gate does not let through yet stays in memory, and its files lie where they
were written, without the manifest that would make them a checkpoint. It is committed as soon as
the gate says so; training goes on meanwhile. Given up are the older of two that are held, one whose
workers are gone, and one that its attempt has left behind.

Left behind: when the next attempt asks for its state, most saves of earlier attempts are over in a
moment. Where a tier hangs they may never be: what has not moved for some seconds is then left. It
stays in flight, in its place and in its memory, and is committed when the tier answers after all.

Guarantees: a snapshot that is whole in this machine's memory, of all ranks, can be read from there
some seconds after it was asked for, whatever its tier does. Each save that is left is said, once.
What can go wrong: a save that only its tier can bring (it went through a ring, or its memory was
taken) is waited for as long as the caller likes; there is nothing else of it.
Rejected: giving up what hangs (the tier may have all of it but the last block); waiting as long as
blocks are written (a slow tier would hold up what memory has).
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import msgspec

from outlast.checkpoint.inventory import num_bytes as num_bytes_of
from outlast.checkpoint.manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    decode,
    encode,
    hashed,
    shard_file,
)
from outlast.keeper import wire
from outlast.keeper.fence import Gate
from outlast.keeper.flight import (
    Committed,
    Files,
    GatheredParts,
    PastSave,
    RankOutcome,
    RankSide,
    Save,
    SaveTable,
    in_words,
    merge,
    of_save,
    part_of,
)
from outlast.keeper.memory import Books, KeptSnapshot
from outlast.keeper.persist import Pool
from outlast.storage import Storage

logger = logging.getLogger(__name__)

PAUSES_S: Final = (0.2, 1.0)  # between tries to put the manifest
MAX_PAST: Final = 64
MAX_MANIFESTS: Final = 4  # of the newest of these: other machines may still ask for them
LATE_S: Final = 5.0  # after which it is put on record that a save is held
ALONE_S: Final = 30.0  # that one is held whose workers are gone
QUIET_S: Final = 5.0
LOOK_S: Final = 0.05
NUM_HASHERS: Final = 4
ENDED: Final = "its attempt ended before the commit"


class _HeldSave(msgspec.Struct):
    """A save at the gate."""

    save: Save
    since_s: float
    is_on_record: bool = False


class Conclusions:
    """How saves end well.

    Args:
        job: id of the job.
        files: knows where a save goes.
        books: where committed snapshots are noted.
        pool: threads for writing.
        saves: all of them, and the lock that guards them.
        gate: says which attempts may commit; None: all may.
        record: puts an event into the ledger; may take long.
        on_committed: told of each commit, in a thread of the pool.
        on_change: told that the books have changed.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        job: str,
        files: Files,
        books: Books,
        pool: Pool,
        saves: SaveTable,
        *,
        gate: Gate | None,
        record: Callable[..., None],
        on_committed: Callable[[Committed], None],
        on_change: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job = job
        self._files = files
        self._books = books
        self._pool = pool
        self._gate = gate
        self._saves = saves
        self._record = record
        self._on_committed = on_committed
        self._on_change = on_change
        self._clock = clock
        self._held: dict[tuple[int, int], _HeldSave] = {}

    def commit(self, save: Save) -> None:
        """All parts are there."""
        save.is_concluding = True
        self._do(save, lambda: self._commit(save))

    def follow(self, save: Save, data: bytes) -> None:
        """Rank 0's keeper, on another machine, has committed this manifest."""
        save.is_concluding = True
        self._do(save, lambda: self._follow(save, data))

    def manifest_there(self, save: Save) -> bytes:
        """The manifest that lies in this save's place, if one does."""
        _, storage = self._files.target(save)
        try:
            return b"" if storage is None else storage.read(f"{save.name}/{MANIFEST}")
        except OSError:
            return b""

    def _do(self, save: Save, act: Callable[[], None]) -> None:
        """Have a save's last act done; whatever goes wrong with it is its end."""

        def guarded() -> None:
            try:
                act()
            except Exception as error:  # noqa: BLE001 - it is the save's, told to all
                words = of_save(error, save, self._files.target(save)[1])
                logger.warning("step %d: %s", save.step, words)
                with self._saves.lock:
                    self.refuse(save, words)

        self._pool.put(guarded)

    # --- held -----------------------------------------------------------------------------------

    def is_held(self, save: Save) -> bool:
        """Whether it waits for nothing but to be let through."""
        return (save.attempt, save.serial) in self._held

    def let_go(self, saves: Iterable[Save], error: str, *, by_storage: bool = False) -> None:
        """Do not wait for these any longer; those that are not held are not touched."""
        for save in saves:
            key = (save.attempt, save.serial)
            if self._held.pop(key, None) is not None:
                assert self._gate is not None  # noqa: S101 - it holds them
                words = self._gate.forget(key)
                save.by_storage = by_storage
                self.refuse(save, f"{error}: {words}" if words else error)

    def tick(self) -> None:
        """Put on record what is held for long; of several only the newest is worth it."""
        now_s = self._clock()
        late = [one for one in self._held.values() if now_s - one.since_s > LATE_S]
        if not late:
            return
        newest = max(late, key=lambda one: (one.save.attempt, one.save.serial))
        words = f"step {newest.save.step} waits in its place"
        self.let_go([one.save for one in late if one is not newest], words)
        is_alone = all(peer.is_gone for peer in newest.save.here.values())
        if is_alone and now_s - newest.since_s > ALONE_S:
            self.let_go([newest.save], "its workers have ended", by_storage=True)
        elif not newest.is_on_record:
            newest.is_on_record = True
            self._put_on_record(newest.save)

    def _put_on_record(self, save: Save) -> None:
        assert self._gate is not None  # noqa: S101 - it holds the save
        place, why = self._gate.place, self._gate.why((save.attempt, save.serial))
        self._pool.put(
            lambda: self._record(
                "storage_error",
                attempt=save.attempt,
                operation="claim",
                path=place,
                error=f"{why}; the snapshot stays in memory meanwhile",
                step=save.step,
            )
        )

    def _hold(self, save: Save, act: Callable[[], None]) -> None:
        """``act()`` in the pool once the gate lets the save through."""
        assert self._gate is not None  # noqa: S101 - the caller looked
        key = (save.attempt, save.serial)

        def judged(refused: str) -> None:
            with self._saves.lock:
                if self._held.pop(key, None) is None:
                    return  # given up meanwhile
                if refused:
                    save.by_storage = False
                    self.refuse(save, refused)
                    return
            self._do(save, act)

        with self._saves.lock:
            self._held[key] = _HeldSave(save, self._clock())
        self._gate.ask(key, save.attempt, judged)

    # --- the commit -----------------------------------------------------------------------------

    def keep(self, save: Save, parts: Mapping[int, RankOutcome]) -> bool:
        """Have a save read from memory, where all of it lies, before its commit; if it can be."""
        gathered = GatheredParts(save.world_size)
        for rank, part in parts.items():
            gathered.add(rank, part)
        if gathered.differs:
            return False
        _, data = self._manifest(save, parts)
        return self._keep(save, data, "")

    def _manifest(self, save: Save, parts: Mapping[int, RankOutcome]) -> tuple[Manifest, bytes]:
        manifest = merge(
            parts,
            job=self._job,
            save=save.name,
            kind=save.kind,
            exact=save.exact,
            created_t=time.time(),
        )
        data = encode(manifest)
        return decode(data, save.name), data  # nothing is committed that a reader would refuse

    def _commit(self, save: Save) -> None:
        needed, found = save.ranks[0].layout.num_elements, save.gathered.num_elements
        if save.world_size > 1 and needed not in (
            0,
            found,
        ):  # nothing is committed that a reader would refuse
            raise ValueError(f"the ranks wrote {found} elements of {needed}")
        start_s = time.monotonic()
        manifest, data = self._manifest(save, save.parts)
        if self._gate is None:
            self._put(save, manifest, data, start_s)
        else:
            self._hold(save, lambda: self._put(save, manifest, data, start_s))

    def _put(self, save: Save, manifest: Manifest, data: bytes, start_s: float) -> None:
        tier, storage = self._files.target(save)
        if storage is not None:
            put_manifest(storage, f"{save.name}/{MANIFEST}", data)
        self._keep(save, data, tier)
        timings = save.timings(start_s)
        num_bytes = num_bytes_of(manifest)
        num_files = sum(part.num_files for part in save.parts.values()) + 1
        if tier:
            self._record(
                "commit",
                attempt=save.attempt,
                step=save.step,
                save=str(save.name),
                durable_s=round(time.monotonic() - save.started_s, 6),
                bytes=num_bytes,
                files=num_files,
                tier=tier,
                kind=save.kind,
                timings=timings,
            )
        self._announce(save, manifest, data, tier, by_us=True)
        ended = wire.SaveEnded(
            step=save.step,
            serial=save.serial,
            tier=tier,
            num_bytes=num_bytes,
            num_files=num_files,
            timings=timings,
        )
        self._decide(save, ended, data)

    def _follow(self, save: Save, data: bytes) -> None:
        """Rank 0's keeper has committed: the same manifest holds here."""
        manifest = decode(data, save.name)
        tier, storage = self._files.target(save)
        name = f"{save.name}/{MANIFEST}"
        by_us = False
        try:
            # In a directory that both machines see it is there already.
            if storage is not None and not storage.exists(name):
                storage.put(name, data)
                by_us = True
        except OSError as error:
            logger.warning("step %d: %s was not written here: %s", save.step, MANIFEST, error)
        self._keep(save, data, tier)
        self._announce(save, manifest, data, tier, by_us=by_us)
        self._decide(save, wire.SaveEnded(step=save.step, serial=save.serial, tier=tier), b"")

    def _keep(self, save: Save, data: bytes, tier: str) -> bool:
        """The snapshot is readable in memory, as far as this machine has it; whether it is."""
        with self._saves.lock:
            sides = save.ranks.values()
            arenas = {one.begin.arena for one in sides if one.layout.size}
            if any(one.ring_bytes or one.is_overwritten for one in sides):
                return False
            if not arenas <= self._books.arenas.keys():  # given back meanwhile
                return False
            files = {
                shard_file(rank): (one.begin.arena, one.layout.size)
                for rank, one in save.ranks.items()
                if one.layout.size
            }
            small: dict[str, bytes] = {}
            for rank, one in save.ranks.items():
                small |= one.small_files(rank)
            self._books.kept[str(save.name)] = KeptSnapshot(
                files=files, small={**small, MANIFEST: data}, attempt=save.attempt, tier=tier
            )
            self._on_change()
            return True

    def _announce(
        self, save: Save, manifest: Manifest, data: bytes, tier: str, *, by_us: bool
    ) -> None:
        """Before the save ends: at no moment is there nothing left to do while copies are due."""
        self._on_committed(
            Committed(
                manifest=manifest,
                data=data,
                ranks=tuple(save.ranks),
                tiers=save.tiers,
                tier=tier,
                by_us=by_us,
            )
        )

    # --- the end --------------------------------------------------------------------------------

    def refuse(self, save: Save, error: str, void: tuple[str, ...] = ()) -> None:
        """End a save with an error, and names of void tensors."""
        ended = wire.SaveEnded(
            step=save.step,
            serial=save.serial,
            error=error,
            void=void,
            by_storage=save.by_storage and not void,
        )
        self._decide(save, ended)

    def _decide(self, save: Save, ended: wire.SaveEnded, manifest: bytes = b"") -> None:
        """How a save ends is known."""
        with self._saves.lock:
            if save.ended is not None:
                return
            save.ended, save.manifest = ended, manifest
            for one in save.ranks.values():
                if ended.error and one.shard is not None:
                    one.shard.abandon()
            self.end_if_quiet(save)

    def end_if_quiet(self, save: Save) -> None:
        """Have a save ended whose end is known, once nobody writes any of its files."""
        if save.ended is not None and not save.writing:
            self._pool.put(lambda: self._end(save))

    def _end(self, save: Save) -> None:
        ended = save.ended
        assert ended is not None  # noqa: S101 - decided before
        with self._saves.lock:
            if (save.attempt, save.serial) in self._saves.past:
                return
            self._saves.past[save.attempt, save.serial] = PastSave(ended, save.manifest)
            while len(self._saves.past) > MAX_PAST:
                self._saves.past.popitem(last=False)
            for past in list(self._saves.past.values())[:-MAX_MANIFESTS]:
                past.manifest = b""
            side = self._saves.sides.get(save.attempt) if save.is_shared else None
        if ended.error and not ended.void and not save.is_told:
            self._record_failure(save, ended.error)
        if side is not None:  # before this keeper may leave, since it is idle
            side.tell(ended, save.manifest) if side.leads else side.done(save.serial)
        with self._saves.lock:
            del self._saves.open[save.attempt, save.serial]
            here = save.here
            for one in save.ranks.values():
                one.shard = None  # it knows the save: together they would keep the memory mapped
            self._saves.changed.notify_all()
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


def put_manifest(storage: Storage, name: str, data: bytes) -> None:
    """Commit, tried again when it fails.

    Raises:
        FileExistsError: another manifest has the name, as that of a save that is being removed.
        OSError: as the storage gave it.
    """
    for pause_s in (*PAUSES_S, None):
        try:
            # Of a try that failed the name may be there, and be ours.
            if not storage.put_new(name, data) and storage.read(name) != data:
                raise FileExistsError(
                    errno.EEXIST, "another manifest is there already", storage.describe(name)
                )
        except FileExistsError:
            raise
        except OSError as error:
            if pause_s is None:
                raise
            logger.warning("%s: %s; trying again", storage.describe(name), error)
            time.sleep(pause_s)
        else:
            return


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
