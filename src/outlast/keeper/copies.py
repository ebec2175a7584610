"""From the tier where a checkpoint was committed to those behind it.

One thread a tier. It copies the newest checkpoint that is due there, file by file, verified on the
way, and the manifest last. What fails is tried again with growing pauses until a newer checkpoint
takes its place: there is never more than one waiting, so a slow or broken tier costs nothing but
its own copies. Pruning is the same thread's: a writer never waits for a removal.

With ranks on several machines each keeper copies its own ranks' files. Over its connection to that
of rank 0 it says how far it is, that they are there, or that they do not come. Rank 0's keeper,
which puts the manifest, waits for those words, and looks once for one file of each machine that
says it is done.

Guarantees: what is being copied, or written, is not pruned from under anybody's hands; a save that
is committed in a tier is not written there again. Nobody waits for ever: a machine that says it
does not come ends the waiting at once, one whose keeper is gone after ``GONE_S``, and ``STALL_S``
without any progress does in any case. Where there are no words (keepers that were started again)
storage is asked instead: ``LOOKS`` files at a time.
"""

from __future__ import annotations

import bisect
import collections
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, Protocol

from outlast.checkpoint.catalog import KnownHealth, is_still_there, prune
from outlast.checkpoint.manifest import (
    FULL,
    MANIFEST,
    NOTE,
    Manifest,
    Place,
    SaveName,
    decode,
    named,
    part_file,
    rank_of,
    sign,
)
from outlast.checkpoint.manifest import num_bytes as num_bytes_of
from outlast.checkpoint.mend import copy_file
from outlast.checkpoint.transfer import inventory_of
from outlast.errors import CheckpointInvalid
from outlast.keeper import protocol
from outlast.keeper.conclude import REMOVED, Committed
from outlast.keeper.memory import Due, MemoryTier
from outlast.policy.drain import hopeless
from outlast.storage import Storage, in_words, unwritten

# --- what other machines bring --------------------------------------------------------------------

GONE_S: Final = 5.0  # that nothing moves, and all that is missing is of keepers that are gone
STALL_S: Final = 60.0  # that nothing moves
ASK_STORAGE_S: Final = 10.0  # that nothing moves, before files of living keepers are looked for
LOOK_S: Final = 0.5
LOOKS: Final = 64  # files that are looked for at a time
MAX_KNOWN: Final = 16  # saves and tiers of which words are kept
REASON_MAX: Final = 1024  # characters


class NotComing(Exception):
    """A machine's files of a save do not come to a tier."""


class Late(TimeoutError):
    """Nothing has moved for too long; ``is_final`` if the machines concerned can be asked."""

    def __init__(self, words: str, *, is_final: bool) -> None:
        super().__init__(words)
        self.is_final = is_final


class Arrived(NamedTuple):
    """What is known of other machines' files of a save in a tier.

    Attributes:
        there: ranks whose machine says that they are there.
        never: why some do not come, "" if none says so.
        living: ranks whose machine's keeper is connected.
        gone: ranks whose machine's keeper was, and is not any more.
        moves: changes when something moves.
    """

    there: Sequence[range] = ()
    never: str = ""
    living: Sequence[range] = ()
    gone: Sequence[range] = ()
    moves: int = 0


class OtherMachines(Protocol):
    """The other machines, as whoever brings files to a tier sees them; nothing waits."""

    def bring(self, save: SaveName, word: protocol.Brought) -> None:
        """Say what becomes of this machine's files."""

    def arrived(self, save: SaveName, tier: str) -> Arrived | None:
        """What is known of the others' files; None where they cannot be asked."""


class NoOthers:
    """No other machines, or none that can be asked."""

    def bring(self, save: SaveName, word: protocol.Brought) -> None:
        """Nobody waits for it."""

    def arrived(self, save: SaveName, tier: str) -> Arrived | None:
        """Nobody can be asked."""


class WordsSaid:
    """The last words of this machine, for connections that are made later."""

    def __init__(self) -> None:
        self._words: collections.OrderedDict[tuple[int, str, int], protocol.Brought]
        self._words = collections.OrderedDict()
        self._lock = threading.Lock()

    def note(self, attempt: int, word: protocol.Brought) -> None:
        """This is said."""
        with self._lock:
            key = attempt, word.tier, word.serial
            self._words[key] = word
            self._words.move_to_end(key)
            while len(self._words) > MAX_KNOWN:
                self._words.popitem(last=False)

    def of(self, attempt: int) -> list[protocol.Brought]:
        """What was said of an attempt's saves."""
        with self._lock:
            return [word for key, word in self._words.items() if key[0] == attempt]


class WordsHeard:
    """The last words of other machines about an attempt. Not for several threads at once."""

    def __init__(self) -> None:
        self._words: collections.OrderedDict[
            tuple[str, int], dict[int, tuple[range, protocol.Brought]]
        ] = collections.OrderedDict()
        self._num_heard: collections.Counter[tuple[str, int]] = collections.Counter()

    def note(self, ranks: range, word: protocol.Brought) -> None:
        """The machine that has ``ranks`` says this."""
        key = word.tier, word.serial
        self._words.setdefault(key, {})[ranks.start] = ranks, word
        self._words.move_to_end(key)
        self._num_heard[key] += 1
        while len(self._words) > MAX_KNOWN:
            old, _ = self._words.popitem(last=False)
            del self._num_heard[old]

    def arrived(
        self, tier: str, serial: int, living: Sequence[range], gone: Sequence[range]
    ) -> Arrived:
        """What it comes to."""
        words = self._words.get((tier, serial), {}).values()
        never = (f"rank {one.start}: {word.reason}" for one, word in words if word.state == "never")
        return Arrived(
            there=[ranks for ranks, word in words if word.state == "there"],
            never=next(never, ""),
            living=living,
            gone=gone,
            moves=self._num_heard[tier, serial],
        )


class Waiting:
    """Waits for the files of other machines in a tier.

    Args:
        manifest: of the save.
        ranks: those of this machine.
        tier: the tier's name.
        storage: the tier's.
        others: says what is known of the other machines.
        clock: monotonic seconds.

    Attributes:
        pause_s: until the next look is worth it.
    """

    def __init__(
        self,
        manifest: Manifest,
        ranks: Collection[int],
        *,
        tier: str,
        storage: Storage,
        others: OtherMachines,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pause_s = LOOK_S
        self._save, self._tier = manifest.save, tier
        self._storage, self._others, self._clock = storage, others, clock
        mine = set(ranks)
        self._missing: dict[int, list[tuple[str, int]]] = {}
        # A rank's part comes last: where it is, the others are.
        entries = [(part_file(rank), part.file) for rank, part in enumerate(manifest.parts)]
        for name, entry in [*entries, *manifest.files.items()]:
            rank = rank_of(name)
            if rank is not None and rank not in mine:
                self._missing.setdefault(rank, []).append((name, entry.size))
        self._moved_s = clock()
        self._moves = -1
        self._last = -1  # rank that was looked for

    def look(self) -> bool:
        """Whether everything is there.

        Raises:
            NotComing: something does not come; says what, and why.
            Late: nothing has moved for too long; says what is missing.
            OSError: storage cannot be asked.
        """
        if not self._missing:
            return True
        known = self._others.arrived(self._save, self._tier)
        arrived = known or Arrived()
        if arrived.never:
            raise NotComing(arrived.never)
        quiet_s = self._clock() - self._moved_s
        done = self._done(arrived)
        chosen = self._choose(arrived, done, all_of_them=quiet_s >= ASK_STORAGE_S)
        found = [rank for rank in chosen if self._is_there(rank)]
        for rank in found:
            for one in done.get(rank, (rank,)):
                self._missing.pop(one, None)
        if found or arrived.moves != self._moves:
            self._moves, self._moved_s = arrived.moves, self._clock()
        elif self._missing:
            self._be_late(known, quiet_s)
        self.pause_s = 0.0 if found and len(found) == len(chosen) else LOOK_S
        return not self._missing

    def _done(self, arrived: Arrived) -> dict[int, list[int]]:
        """Of each machine that says it is done: one rank → its ranks that are missing."""
        found = {}
        for ranks in arrived.there:
            missing = [rank for rank in ranks if rank in self._missing]
            if missing:
                found[missing[0]] = missing
        return found

    def _choose(
        self, arrived: Arrived, done: dict[int, list[int]], *, all_of_them: bool
    ) -> list[int]:
        """The ranks whose files are looked for this time, in turn."""
        skipped: set[int] = set()
        if not all_of_them:
            skipped.update(*arrived.living)
        skipped.update(*done.values())
        wanted = sorted([*done, *(rank for rank in self._missing if rank not in skipped)])
        at = bisect.bisect_right(wanted, self._last)
        chosen = (wanted[at:] + wanted[:at])[:LOOKS]
        if chosen:
            self._last = chosen[-1]
        return chosen

    def _is_there(self, rank: int) -> bool:
        try:
            return all(
                self._storage.size(f"{self._save}/{name}") == size
                for name, size in self._missing[rank]
            )
        except FileNotFoundError:
            return False

    def _be_late(self, known: Arrived | None, quiet_s: float) -> None:
        gone: set[int] = set().union(*known.gone) if known else set()
        is_gone = self._missing.keys() <= gone
        if quiet_s < (GONE_S if is_gone else STALL_S):
            return
        num, first = len(self._missing), min(self._missing)
        why = "its machine's keeper is gone" if is_gone else f"nothing moved for {quiet_s:.0f} s"
        more = f", nor did those of {num - 1} more ranks" if num > 1 else ""
        name = self._missing[first][0][0]
        raise Late(
            f"{name} did not come from its machine{more}: {why}",
            is_final=known is not None and not is_gone,
        )


logger = logging.getLogger(__name__)

# --- copying --------------------------------------------------------------------------------------

PAUSE_S: Final = 1.0
LAST_TRIES: Final = 4  # of a tier that fails, once the job is over: seconds, not for ever
PAUSE_MAX_S: Final = 60.0
SAY_S: Final = 5.0  # between two words to rank 0's keeper on how far it is
PACE_AFTER_S: Final = 2.0  # of a try, until its pace says something


Source = Storage | MemoryTier


class CopySuperseded(Exception):
    """A copy is given up: a newer checkpoint is waiting."""


class Stopped(Exception):
    """A copy is given up: there is no time left."""


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
            self._put_manifest(committed)

    def _put_manifest(self, committed: Committed) -> None:
        save, target = committed.manifest.save, self.tier.storage
        path = f"{save}/{MANIFEST}"
        if not target.put_new(path, committed.data) and target.read(path) != committed.data:
            words = "is there and is not what was committed; see: outlast checkpoints repair"
            raise FileExistsError(f"{target.describe(path)} {words}")
        if not is_still_there(target, save):
            raise NotComing(REMOVED)

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
                error=in_words(error, tier.storage),
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
        what = f"step {manifest.step}"
        text = unwritten(error, self.tier.storage, str(manifest.save), [self.total_bytes], what)
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
    """The copies to all durable tiers of a keeper.

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
