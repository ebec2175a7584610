"""From all ranks' parts to the commit: a manifest, let through at the gate, put, and known.

A save that the gate does not let through yet is held: its snapshot stays in memory and its files
lie where they were written, without the manifest that would make them a checkpoint. It is committed
as soon as the gate says so; training goes on meanwhile. What is given up is the older of two that
are held, what nobody waits for any more, and what its attempt has left behind.

All but what takes time is called with the saves' lock held.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import msgspec

from outlast.checkpoint.inventory import num_bytes as num_bytes_of
from outlast.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    decode,
    encode,
    shard_file,
)
from outlast.keeper import trouble, wire
from outlast.keeper.commit import Part, merge, put_manifest
from outlast.keeper.files import Files
from outlast.keeper.flight import Committed, Save
from outlast.keeper.gate import Gate
from outlast.keeper.gather import Gathering
from outlast.keeper.memory import Books, Kept
from outlast.keeper.persist import Pool

logger = logging.getLogger(__name__)

LATE_S: Final = 5.0  # after which it is put on record that a save is held
ALONE_S: Final = 30.0  # that one is held whose workers are gone


class _Held(msgspec.Struct):
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
        gate: says which attempts may commit; None: all may.
        lock: guards the saves.
        record: puts an event into the ledger; may take long.
        refuse: ends a save with an error, and names of void tensors.
        decide: ends a save, with its manifest.
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
        gate: Gate | None,
        *,
        lock: threading.RLock,
        record: Callable[..., None],
        refuse: Callable[..., None],
        decide: Callable[[Save, wire.Ended, bytes], None],
        on_committed: Callable[[Committed], None],
        on_change: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job = job
        self._files = files
        self._books = books
        self._pool = pool
        self._gate = gate
        self._lock = lock
        self._record = record
        self._refuse = refuse
        self._decide = decide
        self._on_committed = on_committed
        self._on_change = on_change
        self._clock = clock
        self._held: dict[tuple[int, int], _Held] = {}

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
                words = trouble.of_save(error, save, self._files.target(save)[1])
                logger.warning("step %d: %s", save.step, words)
                with self._lock:
                    self._refuse(save, words)

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
                self._refuse(save, f"{error}: {words}" if words else error)

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
            with self._lock:
                if self._held.pop(key, None) is None:
                    return  # given up meanwhile
                if refused:
                    save.by_storage = False
                    self._refuse(save, refused)
                    return
            self._do(save, act)

        with self._lock:
            self._held[key] = _Held(save, self._clock())
        self._gate.ask(key, save.attempt, judged)

    # --- the commit -----------------------------------------------------------------------------

    def keep(self, save: Save, parts: Mapping[int, Part]) -> bool:
        """Have a save read from memory, where all of it lies, before its commit; if it can be."""
        gathered = Gathering(save.world_size)
        for rank, part in parts.items():
            gathered.add(rank, part)
        if gathered.differs:
            return False
        _, data = self._manifest(save, parts)
        return self._keep(save, data, "")

    def _manifest(self, save: Save, parts: Mapping[int, Part]) -> tuple[Manifest, bytes]:
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
        ended = wire.Ended(
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
        self._decide(save, wire.Ended(step=save.step, serial=save.serial, tier=tier), b"")

    def _keep(self, save: Save, data: bytes, tier: str) -> bool:
        """The snapshot is readable in memory, as far as this machine has it; whether it is."""
        with self._lock:
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
            self._books.kept[str(save.name)] = Kept(
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
