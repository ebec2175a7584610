"""What attempts before the next one have left in flight, when that one asks for its state.

Mostly it is over in a moment, and the newest checkpoint with it. Where a tier hangs it may never be
over, and nobody is to wait for that: what has not moved for some seconds is left behind. It stays
in flight, in its place and in its memory, and is committed when the tier answers after all.

Guarantees: a snapshot that is whole in this machine's memory, of all ranks, can be read from there
some seconds after it was asked for, whatever its tier does. What is left behind is said, once.
What can go wrong: a save that only its tier can bring (it went through a ring, or its memory was
taken) is waited for as long as the caller likes; there is nothing else of it.

Rejected: giving up what hangs (the tier may have all of it but the last block); waiting as long as
blocks are written (a slow tier would hold up what memory has).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from outlast.checkpoint.manifest import FileEntry, hashed
from outlast.keeper.conclude import Conclusions
from outlast.keeper.files import Files
from outlast.keeper.flight import RankSide, Save, part_of
from outlast.keeper.memory import Books
from outlast.keeper.trouble import in_words

logger = logging.getLogger(__name__)

QUIET_S: Final = 5.0
LOOK_S: Final = 0.05
NUM_HASHERS: Final = 4
ENDED: Final = "its attempt ended before the commit"


class Earlier:
    """Waits for saves of earlier attempts, and says when it does not any longer.

    Args:
        saves: those in flight, by attempt and number.
        files: knows where a save goes.
        books: the arenas.
        conclusions: ends saves, and keeps snapshots.
        changed: of the lock that guards all of these; notified when a save has ended.
        record: puts an event into the ledger.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        saves: Mapping[tuple[int, int], Save],
        files: Files,
        books: Books,
        conclusions: Conclusions,
        *,
        changed: threading.Condition,
        record: Callable[..., None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._saves = saves
        self._files = files
        self._books = books
        self._conclusions = conclusions
        self._changed = changed
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
            with self._changed:
                before = [
                    one for one in self._saves.values() if one.attempt < attempt and not one.is_left
                ]
                waited_s = wait.waited_s
                is_over = not before or waited_s >= timeout_s
                ripe = [] if is_over else [one for one in before if self._is_ripe(one, wait)]
                if not is_over and not ripe:
                    self._changed.wait(min(LOOK_S, timeout_s - waited_s))
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
        with self._changed:
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
        with self._changed:
            self._untold.append(words)
            save.is_left = True
            self._changed.notify_all()
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
