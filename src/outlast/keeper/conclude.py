"""How a save ends: committed, refused, or held until it is known whether its attempt may commit.

The commit: all parts become a manifest, which is fence-checked, written and announced. All but what
takes time is called with the lock of the saves held. A save ends only when nobody writes any of its
files any more: the next one may be of the same step.

The fence: a machine that is cut off may still hold a whole snapshot, and storage may be all that it
reaches. By then the others have claimed a new attempt's number there; or, after storage had
stalled, two halves of the job go on under the same number, and the claim is that of one of them. So
each attempt comes with the term that formed it (one agent's time as coordinator, a name that nobody
else has), and a snapshot is committed only when the newest number is claimed by the term of the
newest attempt that this machine takes part in. A number's claim is never written anew: of two terms
one at most passes for it. A keeper that takes part in the new attempt still brings to an end what
the one before has left; its workers wait for that.

The gate asks the fence again and again while the answer is to wait, in one thread. Claims that
cannot be read, or are not there yet, let nobody pass and refuse nobody; storage that hangs holds up
that thread alone.

Held: a save that the gate does not let through yet stays in memory, and its files lie where they
were written, without the manifest that would make them a checkpoint. It is committed as soon as
the gate says so; training goes on meanwhile. Given up are the older of two that are held, one whose
workers are gone, and one that its attempt has left behind (``saves.Earlier``).

Rejected: to let a snapshot pass while storage does not answer (where tiers lie elsewhere than the
claims, two halves commit); to refuse it (a second's stall costs a checkpoint).
"""

from __future__ import annotations

import enum
import errno
import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Final, NamedTuple

import msgspec

from outlast.checkpoint.catalog import is_still_there
from outlast.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    Manifest,
    PartEntry,
    SaveName,
    decode,
    encode,
    shard_file,
)
from outlast.checkpoint.manifest import num_bytes as num_bytes_of
from outlast.keeper import wire
from outlast.keeper.flight import (
    Files,
    GatheredParts,
    PastSave,
    Pool,
    RankOutcome,
    Save,
    SaveTable,
)
from outlast.keeper.memory import Books, KeptSnapshot
from outlast.peer.claims import claimed, claimed_numbers
from outlast.storage import Storage

# --- the fence ------------------------------------------------------------------------------------

TOLD_S: Final = 3.0  # between a claim and word of the attempt to all its keepers
TERMS_MAX: Final = 64  # that are remembered
AGAIN_S: Final = 0.5


class FenceVerdict(enum.Enum):
    """What becomes of a snapshot that asked to be committed."""

    COMMIT = "commit"
    WAIT = "wait"
    REFUSE = "refuse"


class Judgement(NamedTuple):
    """A verdict, and why it is not to commit."""

    verdict: FenceVerdict
    words: str = ""


PASSES: Final = Judgement(FenceVerdict.COMMIT)


class Fence:
    """Judges whether a snapshot may be committed, by the claims of attempts.

    Args:
        storage: where attempts are claimed.
        told_s: how long word of a newer attempt may take to come here, in seconds.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        storage: Storage,
        told_s: float = TOLD_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._storage = storage
        self._told_s = told_s
        self._clock = clock
        self._lock = threading.Lock()
        self._terms: dict[int, str] = {}  # of the attempts that this machine took part in
        self._ours: set[int] = set()  # numbers that were seen to be claimed by them
        self._newer: tuple[int, float] = (0, 0.0)  # a number we are not part of, and since when

    @property
    def place(self) -> str:
        """Where the claims are, for people."""
        return self._storage.describe()

    def told(self, attempt: int, term: str) -> None:
        """This machine takes part in ``attempt``, which ``term`` has formed."""
        with self._lock:
            self._terms[attempt] = term
            for old in sorted(self._terms)[:-TERMS_MAX]:
                del self._terms[old]

    def judge(self, attempt: int) -> Judgement:
        """Whether a snapshot of ``attempt`` may be committed; takes as long as storage does.

        Raises:
            OSError: storage cannot be asked.
        """
        newest = max(claimed_numbers(self._storage), default=0)
        with self._lock:
            told = max(self._terms, default=0)
        if newest > told and self._is_of_our_agent(newest):
            told = newest
        if newest > max(attempt, told):
            return self._behind(attempt, newest)
        if attempt > told:
            return Judgement(
                FenceVerdict.WAIT, f"nobody has told this keeper who formed attempt {attempt}"
            )
        if newest < told:
            return Judgement(FenceVerdict.WAIT, f"attempt {told} is not claimed yet")
        for number in sorted({attempt, told}, reverse=True):
            if not self._is_ours(number, told):
                return Judgement(
                    FenceVerdict.REFUSE,
                    f"attempt {number} was claimed by other machines; what this one held of "
                    f"attempt {attempt} is not committed",
                )
        return PASSES

    def _is_of_our_agent(self, number: int) -> bool:
        """Whether the agent that runs the job on this machine alone has claimed ``number``.

        It may be gone before it could say so, and nobody else takes part in its attempts.
        """
        claim = claimed(self._storage, number)
        with self._lock:
            is_ours = claim.is_for_one and claim.term in self._terms.values()
        if is_ours:
            self.told(number, claim.term)
        return is_ours

    def _behind(self, attempt: int, newest: int) -> Judgement:
        """The job has gone on; word of that may be on its way to us."""
        now_s = self._clock()
        with self._lock:
            if self._newer[0] != newest:
                self._newer = (newest, now_s)
            since_s = self._newer[1]
        if now_s - since_s < self._told_s:
            return Judgement(FenceVerdict.WAIT, f"attempt {newest} is claimed, perhaps with us")
        return Judgement(
            FenceVerdict.REFUSE,
            f"attempt {newest} has begun without this machine; what it held of attempt {attempt} "
            "is not committed",
        )

    def _is_ours(self, number: int, told: int) -> bool:
        """Whether the term that formed our attempt ``number`` has claimed it.

        Attempts of one term follow each other, so the last one's claim stands for all of them.
        """
        with self._lock:
            term, last = self._terms.get(number, ""), self._terms[told]
            if number in self._ours or (number < told and term == last and told in self._ours):
                return True
        if not term or claimed(self._storage, number).term != term:
            return False
        with self._lock:
            self._ours.add(number)
            self._ours.intersection_update(self._terms)
        return True


class _Question:
    """A question about one snapshot."""

    def __init__(self, attempt: int, then: Callable[[str], None], words: str) -> None:
        self.attempt = attempt
        self.then = then
        self.words = words


class Gate:
    """Asks ``fence`` in a thread of its own, again while the answer is to wait.

    Args:
        fence: judges.
        again_s: between two questions about what waits, in seconds.
    """

    def __init__(self, fence: Fence, again_s: float = AGAIN_S) -> None:
        self._fence = fence
        self._again_s = again_s
        self._asked: dict[Hashable, _Question] = {}
        self._refused: dict[int, str] = {}  # attempts that may commit nothing any more, and why
        self._changed = threading.Condition()
        self._has_news = False
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="outlast-gate", daemon=True)
        self._thread.start()

    @property
    def place(self) -> str:
        """Where the claims are, for people."""
        return self._fence.place

    def told(self, attempt: int, term: str) -> None:
        """This machine takes part in ``attempt``, which ``term`` has formed."""
        self._fence.told(attempt, term)
        self._wake()

    def ask(self, key: Hashable, attempt: int, then: Callable[[str], None]) -> None:
        """Whether a snapshot of ``attempt`` may be committed.

        Args:
            key: what the question is known by.
            attempt: the snapshot's.
            then: told once, in the gate's thread: "" or why it must not. It must not wait.
        """
        words = f"the attempts' claims in {self.place} are not answered for"
        with self._changed:
            self._asked[key] = _Question(attempt, then, words)
        self._wake()

    def forget(self, key: Hashable) -> str:
        """Nobody waits for the answer any more; returns why there was none."""
        with self._changed:
            question = self._asked.pop(key, None)
        return question.words if question is not None else ""

    def why(self, key: Hashable) -> str:
        """Why there is no answer yet, in words."""
        with self._changed:
            question = self._asked.get(key)
        return question.words if question is not None else ""

    def refused(self, attempt: int) -> str:
        """Why a snapshot of ``attempt`` must not be committed, as far as that is known already."""
        return self._refused.get(attempt, "")

    def stop(self) -> None:
        """End the thread, unless storage holds it."""
        with self._changed:
            self._is_over = True
        self._wake()

    def _wake(self) -> None:
        with self._changed:
            self._has_news = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                wait_s = self._again_s if self._asked else None
                self._changed.wait_for(lambda: self._has_news, wait_s)
                self._has_news = False
                if self._is_over:
                    return
                asked = list(self._asked.items())
            for key, question in asked:
                self._look(key, question)

    def _look(self, key: Hashable, question: _Question) -> None:
        try:
            judgement = self._fence.judge(question.attempt)
        except Exception as error:
            if not isinstance(error, OSError):
                logger.exception("the claims of attempts")
            words = f"the attempts' claims in {self.place} cannot be read: {_why(error)}"
            judgement = Judgement(FenceVerdict.WAIT, words)
        with self._changed:
            if self._asked.get(key) is not question:
                return  # given up meanwhile
            if judgement.verdict is FenceVerdict.WAIT:
                question.words = judgement.words
                return
            del self._asked[key]
            if judgement.verdict is FenceVerdict.REFUSE:
                self._refused[question.attempt] = judgement.words
        try:
            question.then(judgement.words)
        except Exception:
            logger.exception("a save that was judged")  # the others are still to be judged


def _why(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)


logger = logging.getLogger(__name__)

# --- the end --------------------------------------------------------------------------------------

PAUSES_S: Final = (0.2, 1.0)  # between tries to put the manifest
REMOVED: Final = "the save was removed while this process was paused"
MAX_PAST: Final = 64
# Of the newest of these: other machines may still ask for them. Of the steps that are kept there
# are some each second, and a machine may be held up for a while.
MAX_MANIFESTS: Final = 4
MAX_STEPS: Final = 16
LATE_S: Final = 5.0  # after which it is put on record that a save is held
ALONE_S: Final = 30.0  # that one is held whose workers are gone
ENDED: Final = "its attempt ended before the commit"


class _HeldSave(msgspec.Struct):
    """A save at the gate."""

    save: Save
    since_s: float
    is_on_record: bool = False


class Committed(msgspec.Struct, frozen=True, kw_only=True):
    """What follows a commit needs to know.

    Attributes:
        manifest: what was committed.
        data: its bytes.
        ranks: whose files this machine has.
        tiers: where it is to go, None for everywhere.
        tier: where it lies already, "" if only in memory.
        by_us: whether this keeper put the manifest there.
        each_step: it is one that training waits for.
        held: of ``wire.SaveEnded``.
    """

    manifest: Manifest
    data: bytes
    ranks: tuple[int, ...]
    tiers: tuple[str, ...] | None
    tier: str
    by_us: bool
    each_step: bool = False
    held: int = 0


def merge(
    parts: Mapping[int, RankOutcome],
    *,
    job: str,
    save: SaveName,
    kind: str,
    exact: bool,
    created_t: float,
) -> Manifest:
    """The manifest of what all ranks of the world wrote: one entry each."""
    first = parts[0]
    structures: dict[str, int] = {}
    entries = []
    for rank in range(len(parts)):
        part = parts[rank]
        number = structures.setdefault(part.structure, len(structures))
        if part.entry is not None:
            size, hashes, num_bytes = part.entry.size, part.entry.xxh3_128, part.entry.num_bytes
            entries.append(PartEntry(size, hashes, number, num_bytes))
    return Manifest(
        format=FORMAT,
        job=job,
        step=save.step,
        attempt=save.attempt,
        serial=save.serial,
        nonce=save.nonce,
        world_size=len(parts),
        layout={"world": len(parts)},
        created_t=created_t,
        files={} if entries else first.files,
        tensors={} if entries else first.tensors,
        parts=tuple(entries),
        kind=kind,
        exact=exact,
    )


class Conclusions:
    """The ends of saves: commits, refusals, and saves that are held.

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
                words = self._files.words(save, error)
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
        # What is kept of each step asks no storage: training would stand still where that stalls.
        # It is no commit, and only ranks of one attempt that all still talk to each other make it.
        # But of an attempt that is known to be overtaken no resume is to find newer steps.
        if self._gate is not None and save.each_step and (why := self._gate.refused(save.attempt)):
            save.by_storage = False
            with self._saves.lock:
                self.refuse(save, why)
        elif self._gate is None or save.each_step:
            self._put(save, manifest, data, start_s)
        else:
            self._hold(save, lambda: self._put(save, manifest, data, start_s))

    def _put(self, save: Save, manifest: Manifest, data: bytes, start_s: float) -> None:
        tier, storage = self._files.target(save)
        if storage is not None:
            put_manifest(storage, save.name, data)
        self._keep(save, data, tier)
        save.held = min((part.held for part in save.parts.values()), default=0)
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
            held=save.held,
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
        self._decide(save, self._ended_as(save, tier), b"")

    def _ended_as(self, save: Save, tier: str) -> wire.SaveEnded:
        return wire.SaveEnded(step=save.step, serial=save.serial, tier=tier, held=save.held)

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
                each_step=save.each_step,
                held=save.held,
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
            self._saves.past[save.attempt, save.serial] = PastSave(
                ended, save.manifest, save.each_step
            )
            while len(self._saves.past) > MAX_PAST:
                self._saves.past.popitem(last=False)
            most = MAX_STEPS if save.each_step else MAX_MANIFESTS
            alike = [p for p in self._saves.past.values() if p.each_step is save.each_step]
            for past in alike[:-most]:
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


def put_manifest(storage: Storage, save: SaveName, data: bytes) -> None:
    """Commit, tried again when it fails.

    Raises:
        FileExistsError: another manifest has the name, as that of a save that is being removed.
        FileNotFoundError: the save was removed while this process was paused.
        OSError: as the storage gave it.
    """
    name = f"{save}/{MANIFEST}"
    for pause_s in (*PAUSES_S, None):
        try:
            # Of a try that failed the name may be there, and be ours.
            if not storage.put_new(name, data) and storage.read(name) != data:
                raise FileExistsError(
                    errno.EEXIST, "another manifest is there already", storage.describe(name)
                )
            is_there = is_still_there(storage, save)
        except FileExistsError:
            raise
        except OSError as error:
            if pause_s is None:
                raise
            logger.warning("%s: %s; trying again", storage.describe(name), error)
            time.sleep(pause_s)
        else:
            break
    if not is_there:
        raise FileNotFoundError(errno.ENOENT, REMOVED, storage.describe(str(save)))
