"""From the tier where a checkpoint was committed to those behind it.

One thread a tier. It copies the newest checkpoint that is due there, file by file, verified on the
way, and the manifest last. What fails is tried again with growing pauses until a newer checkpoint
takes its place: there is never more than one waiting, so a slow or broken tier costs nothing but
its own copies. Pruning is the same thread's: a writer never waits for a removal.

Guarantees: what is being copied, or written, is not pruned from under anybody's hands; a save that
is committed in a tier is not written there again.

With ranks on several machines each keeper copies its own ranks' files, and says so to that of rank
0, which puts the manifest when they are all there: see ``arrivals``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

from outlast.checkpoint.catalog import KnownHealth, prune
from outlast.checkpoint.inventory import num_bytes as num_bytes_of
from outlast.checkpoint.manifest import FULL, MANIFEST, NOTE, Place, SaveName, decode, named, sign
from outlast.checkpoint.transfer import copy_file, inventory_of
from outlast.errors import CheckpointInvalid
from outlast.keeper import flight, protocol
from outlast.keeper.arrivals import REASON_MAX, Late, NoOthers, NotComing, OtherMachines, Waiting
from outlast.keeper.flight import Committed
from outlast.keeper.memory import Due, MemoryTier
from outlast.policy.drain import hopeless
from outlast.storage import Storage

logger = logging.getLogger(__name__)

PAUSE_S: Final = 1.0
LAST_TRIES: Final = 4  # of a tier that fails, once the job is over: seconds, not for ever
PAUSE_MAX_S: Final = 60.0
SAY_S: Final = 5.0  # between two words to rank 0's keeper on how far it is
PACE_AFTER_S: Final = 2.0  # of a try, until its pace says something


Source = Storage | MemoryTier


class CopySuperseded(Exception):
    """A newer checkpoint is waiting."""


class Stopped(Exception):
    """There is no time left."""


class DurableTier:
    """A durable tier with what is kept there."""

    def __init__(self, name: str, storage: Storage, keep: int) -> None:
        self.name = name
        self.storage = storage
        self.keep = keep


class Copier:
    """Brings checkpoints to one tier, and prunes it, in a thread of its own.

    Args:
        tier: where to.
        copies: of which this is one tier: where from, and what is known of the checkpoints.
    """

    def __init__(self, tier: DurableTier, copies: TierCopies) -> None:
        self.tier = tier
        self._copies = copies
        self._record, self._others = copies.record, copies.others
        self.failures = 0
        self.is_given_up = False
        self.is_missing = False  # whether it did not get what it was to get last
        self.done_bytes = self.total_bytes = 0
        self._since_s = 0.0  # when it began with what is being copied
        self._said_s = 0.0
        self._changed = threading.Condition()
        self._next: Committed | None = None
        self._current: Committed | None = None
        self._is_prune_due = False
        self._busy = False
        self._stopping = False
        self._tries_left: int | None = None
        self._thread = threading.Thread(
            target=self._run, name=f"outlast-copy-{tier.name}", daemon=True
        )
        self._thread.start()

    def submit(self, committed: Committed) -> None:
        """Copy this one next; one that still waits is passed over."""
        self._copies.on_due(self.tier.name, _due(committed), True)
        with self._changed:
            if self.is_given_up:
                return
            passed, self._next = self._next, committed
            self._changed.notify_all()
        if passed is not None:
            self._passed_over(passed)

    def tidy(self) -> None:
        """Remove soon what retention no longer needs here."""
        with self._changed:
            self._is_prune_due = True
            self._changed.notify_all()

    def reads(self, tier: str) -> set[SaveName]:
        """The saves that are to be copied from ``tier``."""
        with self._changed:
            due = [one for one in (self._next, self._current) if one is not None]
            return {one.manifest.save for one in due if one.tier == tier}

    @property
    def idle(self) -> bool:
        """Whether everything that was due is there."""
        with self._changed:
            return self._next is None and not self._busy and not self._is_prune_due

    def end(self, tries: int | None) -> None:
        """Nobody trains any more: what fails so many times from now on is given up.

        None: somebody does, and there is no end to trying.
        """
        with self._changed:
            if tries is None or self._tries_left is None:  # said again, it is no new beginning
                self._tries_left = tries

    def _count_down(self, error: Exception) -> None:
        with self._changed:
            if self._tries_left is not None:
                self._tries_left -= 1
                if self._tries_left <= 0:
                    raise NotComing(f"the job was over, and it failed still: {error}")

    def rest_s(self) -> float | None:
        """Seconds that it still needs at the pace of this try; None while that is not known."""
        elapsed_s = time.monotonic() - self._since_s
        if self._current is None or self.is_given_up or elapsed_s < PACE_AFTER_S:
            return None
        rest = self.total_bytes - self.done_bytes
        # Before the first byte it takes at least as long again.
        return rest * elapsed_s / self.done_bytes if self.done_bytes else elapsed_s

    def give_up(self) -> None:
        """There is not enough time for it, and others need what it takes."""
        with self._changed:
            left, self._next = [self._current, self._next], None
            self.is_given_up = self._stopping = True
            self._changed.notify_all()
        newest = max((one.manifest.save for one in left if one), default=None)
        for one in left:
            if one is not None and one.manifest.save == newest:
                self._skipped(one, "there was no time left for it")

    def stop(self) -> None:
        """Give up what is under way."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._next is not None or self._is_prune_due or self._stopping
                )
                if self._stopping:
                    return
                self._current, self._next = self._next, None
                self._is_prune_due, self._busy = False, True
                committed = self._current
            try:
                if committed is not None:
                    self._bring(committed)
                    with self._changed:
                        self._current = None  # not read any more: its source may go
                    self.is_missing = False
                    self._copies.on_due(self.tier.name, _due(committed), False)
                    self._copies.copied_from(committed.tier)
                if committed is None or 0 in committed.ranks:
                    self._prune()
            except CopySuperseded:
                if committed is not None:
                    self._passed_over(committed)
            except NotComing as error:
                self.is_missing = True
                if committed is not None:
                    self._skipped(committed, f"{error}")
            except Stopped:
                return
            except Exception:
                logger.exception("tier %s", self.tier.name)
            finally:
                with self._changed:
                    self._current, self._busy = None, False

    def _bring(self, committed: Committed) -> None:
        pause_s = PAUSE_S
        brought: set[str] = set()
        while True:
            start_s = time.monotonic()
            try:
                self._copy(committed, brought)
            except (OSError, CheckpointInvalid) as error:
                self.failures += 1
                self._failed(committed, error)
                if isinstance(error, FileExistsError):  # a damaged one: nothing to repeat
                    raise NotComing(f"{error}") from None
                if isinstance(error, Late) and error.is_final and self._tries_left is not None:
                    raise NotComing(f"{error}") from None
                self._count_down(error)
                self._pause(pause_s)
                pause_s = min(pause_s * 2, PAUSE_MAX_S)
                continue
            self._say(committed, "there")
            self._on_record(committed, time.monotonic() - start_s)
            return

    def _on_record(self, committed: Committed, took_s: float) -> None:
        manifest = committed.manifest
        said = {
            "attempt": manifest.attempt,
            "step": manifest.step,
            "save": str(manifest.save),
            "tier": self.tier.name,
        }
        if committed.tier:
            seconds = round(took_s, 6)
            self._record("tier_copied", **said, seconds=seconds, bytes=self.total_bytes)
        elif 0 in committed.ranks:  # it was in memory alone: from now on it is a checkpoint
            size = num_bytes_of(manifest)
            self._record("commit", **said, kind=manifest.kind, bytes=size, late=True)

    def _copy(self, committed: Committed, brought: set[str]) -> None:
        """Bring our files, but for those that an earlier try has ``brought``; wait for the rest."""
        manifest, directory = committed.manifest, committed.manifest.save
        source, target = self._copies.sources[committed.tier], self.tier.storage
        if self._is_there(committed):
            return
        if not committed.tier and not source.exists(f"{directory}/{MANIFEST}"):
            raise NotComing("it is not in memory any more")
        inventory = inventory_of(manifest, [Place(committed.tier, source)])
        ours = {
            name: entry
            for rank in committed.ranks
            # A rank's part comes last: where it is, the others are.
            for name, entry in reversed(inventory.files(rank).items())
        }
        self.total_bytes = sum(entry.size for entry in ours.values())
        self.done_bytes = before = 0
        self._since_s = time.monotonic()

        def progress(done: int, _total: int) -> None:
            self.done_bytes = before + done
            if self._stopping:
                raise Stopped
            if time.monotonic() - self._said_s > SAY_S:
                self._say(committed)

        for name, entry in ours.items():
            if name in brought and _has(target, f"{directory}/{name}", entry.size):
                before += entry.size
                continue
            if not target.exists(f"{directory}/{NOTE}"):
                sign(target, directory, self._copies.job)
            copy_file(source, target, f"{directory}/{name}", entry, progress)
            brought.add(name)
            before += entry.size
        if 0 in committed.ranks:
            waiting = Waiting(
                manifest,
                committed.ranks,
                tier=self.tier.name,
                storage=target,
                others=self._others,
            )
            while not waiting.look():
                self._pause(waiting.pause_s)
            path = f"{directory}/{MANIFEST}"
            if not target.put_new(path, committed.data) and target.read(path) != committed.data:
                raise FileExistsError(
                    f"{target.describe(path)} is there and is not what was committed; see: "
                    "outlast checkpoints repair"
                )

    def _is_there(self, committed: Committed) -> bool:
        """Whether the tier has it: what a commit names is not written again."""
        try:
            path = f"{committed.manifest.save}/{MANIFEST}"
            return self.tier.storage.read(path) == committed.data
        except (FileNotFoundError, IsADirectoryError):
            return False

    def _prune(self) -> None:
        """A failure is said and passed over."""
        tier = self.tier
        try:
            prune(
                tier.storage,
                self._copies.job,
                keep=tier.keep,
                invalid=set(self._copies.invalid),
                in_use=lambda: self._copies.in_use(tier.name),
                health=self._copies.health,
            )
        except OSError as error:
            logger.warning("old checkpoints could not be removed: %s", error)
            self._record(
                "storage_error",
                operation="prune",
                path=tier.storage.describe(),
                error=flight.in_words(error, tier.storage),
                tier=tier.name,
            )

    def _pause(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._next is not None, seconds)
            if self._stopping:
                raise Stopped
            if self._next is not None:
                raise CopySuperseded

    def _failed(self, committed: Committed, error: Exception) -> None:
        manifest = committed.manifest
        text = flight.of_copy(
            *(error, self.tier.storage, str(manifest.save)), [self.total_bytes], manifest.step
        )
        logger.warning(
            "step %d is not in %s yet: %s", committed.manifest.step, self.tier.name, text
        )
        self._record(
            "storage_error",
            attempt=committed.manifest.attempt,
            operation="copy",
            path=self.tier.storage.describe(),
            error=text,
            step=committed.manifest.step,
            tier=self.tier.name,
        )

    def _say(
        self, committed: Committed, state: Literal["", "there", "never"] = "", why: str = ""
    ) -> None:
        """Tell rank 0's keeper, if it is on another machine."""
        self._said_s = time.monotonic()
        if 0 not in committed.ranks:
            word = protocol.Brought(
                serial=committed.manifest.serial,
                tier=self.tier.name,
                done=self.done_bytes,
                state=state,
                reason=why[:REASON_MAX],
            )
            self._others.bring(committed.manifest.save, word)

    def _passed_over(self, committed: Committed) -> None:
        self._skipped(committed, "a newer one came before it was there")

    def _skipped(self, committed: Committed, why: str) -> None:
        self._say(committed, "never", why)
        self._record(
            "save_skipped",
            durable=False,
            attempt=committed.manifest.attempt,
            step=committed.manifest.step,
            reason=f"tier {self.tier.name} did not get it: {why}",
            tier=self.tier.name,
        )


def _has(storage: Storage, path: str, size: int) -> bool:
    try:
        return storage.size(path) == size
    except FileNotFoundError:
        return False


def _due(committed: Committed) -> Due:
    return Due(save=str(committed.manifest.save), source=committed.tier, ranks=committed.ranks)


class TierCopies:
    """All tiers of a keeper.

    Args:
        job: id of the job.
        tiers: durable ones, the fastest first.
        record: puts an event into the ledger: ``record(name, **fields)``.
        in_flight: says which saves are being written.
        on_due: told, for a tier, what it has yet to get, and when it no longer has.
        others: the other machines that bring their files.
        memory: what is in this machine's memory.

    Attributes:
        sources: name → storage of all durable tiers; "" → this machine's memory.
        invalid: saves that a resume has rejected.
        health: what is known of the checkpoints besides.
    """

    def __init__(
        self,
        job: str,
        tiers: list[DurableTier],
        record: Callable[..., Any],
        in_flight: Callable[[], set[SaveName]] = set,
        on_due: Callable[[str, Due, bool], None] = lambda *_: None,
        *,
        others: OtherMachines | None = None,
        memory: Source | None = None,
    ) -> None:
        self.job, self.record, self.on_due = job, record, on_due
        self.others = others or NoOthers()
        self.invalid: set[SaveName] = set()
        self.health = KnownHealth()
        self.sources: dict[str, Source] = {tier.name: tier.storage for tier in tiers}
        if memory is not None:
            self.sources[""] = memory
        self._in_flight = in_flight
        self._lock = threading.Lock()
        self._newest: Committed | None = None
        self._given: dict[str, SaveName] = {}  # tier → the newest save that it was to get
        self._copiers = {tier.name: Copier(tier, self) for tier in tiers}

    def committed(self, committed: Committed) -> None:
        """A checkpoint was committed: prune where it lies, bring it where it is due."""
        if not committed.tier:
            return
        for name, copier in self._copiers.items():
            if name != committed.tier and (committed.tiers is None or name in committed.tiers):
                self._give(copier, committed)
        self._newest = committed
        if committed.by_us:
            self._copiers[committed.tier].tidy()

    def bring_newest(self) -> None:
        """This run of the job is over: each tier is to get where it ended, due or not."""
        newest = self._newest
        if newest is None or newest.manifest.kind != FULL:
            return
        for name, copier in self._copiers.items():
            if name != newest.tier and self._is_new(name, newest.manifest.save):
                copier.submit(newest)

    def bring_from_memory(self, committed: Committed) -> bool:
        """Nobody trains any more: what is in memory alone goes to the first tier; once.

        Returns:
            Whether that is news.
        """
        name, copier = next(iter(self._copiers.items()))
        if not self._is_new(name, committed.manifest.save):
            return False
        copier.submit(committed)
        return True

    def _is_new(self, tier: str, save: SaveName) -> bool:
        """Whether ``tier`` was not to get ``save`` yet; it is from now on."""
        with self._lock:
            known, self._given[tier] = self._given.get(tier), save
            return known != save

    def _give(self, copier: Copier, committed: Committed) -> None:
        self._is_new(copier.tier.name, committed.manifest.save)
        copier.submit(committed)

    def go_on(self, due: Mapping[str, Due]) -> None:
        """Bring what a predecessor had yet to bring, as far as it is still there."""
        for name, one in due.items():
            source = self.sources.get(one.source)
            if name not in self._copiers or source is None:
                continue
            try:
                data = source.read(f"{one.save}/{MANIFEST}")
                manifest = decode(data, named(one.save))
            except (OSError, CheckpointInvalid) as error:
                logger.warning("%s is not brought to %s: %s", one.save, name, error)
                continue
            found = Committed(
                manifest=manifest,
                data=data,
                ranks=one.ranks,
                tiers=(name,),
                tier=one.source,
                by_us=False,
            )
            self._give(self._copiers[name], found)

    def replan(self, left_s: float) -> None:
        """So much time is left: who cannot make it makes way for those that can."""
        paces = [(copier, copier.rest_s()) for copier in self._copiers.values()]
        known = [(copier, rest_s) for copier, rest_s in paces if rest_s is not None]
        given_up = hopeless(left_s, [rest_s for _, rest_s in known])
        for (copier, _), is_hopeless in zip(known, given_up, strict=True):
            if is_hopeless:
                logger.warning("tier %s will not be up to date in time", copier.tier.name)
                copier.give_up()

    @property
    def idle(self) -> bool:
        """Whether every tier has what is due."""
        return all(copier.idle for copier in self._copiers.values())

    @property
    def is_complete(self) -> bool:
        """Whether every tier has what is due, and none was given up."""
        lacking = (one.is_given_up or one.is_missing for one in self._copiers.values())
        return self.idle and not any(lacking)

    def progress(self) -> tuple[str, int, int]:
        """What is still under way: in words, bytes done, bytes in all."""
        busy = [copier for copier in self._copiers.values() if not copier.idle]
        words = ", ".join(
            copier.tier.name + (f" ({copier.failures} failures)" if copier.failures else "")
            for copier in busy
        )
        done = sum(copier.done_bytes for copier in busy)
        return words, done, sum(copier.total_bytes for copier in busy)

    def end(self, *, is_over: bool) -> None:
        """Whether nobody trains any more: a tier that fails is then given up after a few tries."""
        for copier in self._copiers.values():
            copier.end(LAST_TRIES if is_over else None)

    def stop(self) -> None:
        """Give up what is under way."""
        for copier in self._copiers.values():
            copier.stop()

    def in_use(self, tier: str) -> set[SaveName]:
        """The saves of a tier that somebody writes or reads."""
        return self._in_flight().union(*(one.reads(tier) for one in self._copiers.values()))

    def copied_from(self, tier: str) -> None:
        """What was kept for the copy alone may go now."""
        if tier in self._copiers:
            self._copiers[tier].tidy()
