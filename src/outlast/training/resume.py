"""Going on: the newest checkpoint that verifies on every rank, or what survivors of a loss hold.

Rank 0 proposes a save, newest first; every rank checks that it fits its objects, verifies its share
of the files, reads what it needs, and reports; one rank's refusal is everybody's. A step that does
not fit changes nothing in any object. One that proves damaged half-way may have filled objects in
part, with verified bytes: an older step then overwrites them, or the job does not start.

Never a silent start from step 0: when the ledger or a manifest says that something was committed
and nothing verifies, the job refuses to start.

The candidates are those of all places together: one place may have lost what another still holds.
The newest step counts, and of its saves the newest that is whole: what saved a step again has
superseded the save before, which is there until retention lets it go. A place that cannot be
listed is passed over in words while another works; nothing is concluded from its silence, though:
if no other place has a step, the job does not start anew.

What is whole in the machines' memory, and not older than what the ledger promises, is tried before
any storage is so much as listed: storage that cannot be reached, or stalls, holds nobody up then.
"""

from __future__ import annotations

import collections
import functools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from outlast.attempt.beat import Basis
from outlast.attempt.link import Link
from outlast.attempt.over import LINE_VARIABLE
from outlast.checkpoint.catalog import find_saves, standing
from outlast.checkpoint.manifest import FULL, Place, SaveName, as_places, named, part_file
from outlast.checkpoint.mend import Repaired
from outlast.checkpoint.reader import (
    Checkpoint,
    ignore,
    open_checkpoint,
)
from outlast.checkpoint.transfer import in_words, read_manifest
from outlast.data.trail import Others
from outlast.errors import CheckpointInvalid, ResumeRefused, StateMismatch, StorageError
from outlast.fleet import LocalUpdates
from outlast.inprocess import handover
from outlast.inprocess.divided import division_of
from outlast.inprocess.handover import Regained
from outlast.keeper.client import Remote
from outlast.keeper.memory import MemoryTier
from outlast.ledger.job import FILE_NAME
from outlast.ledger.narrator import say
from outlast.script.initial import Origin
from outlast.script.objects import Objects
from outlast.script.restore import READ_TIMEOUT_S, Restore
from outlast.storage import Directory, Storage
from outlast.tiers import PEER
from outlast.training.anomalies import LossMonitor
from outlast.training.books import AttemptBooks
from outlast.training.engine import Engine
from outlast.training.turns import Turns


class Skipped(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that was passed over, and why; ``save`` is its name, where there is one."""

    step: int
    reason: str
    save: str = ""


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """Rank 0's word: a save to try, or the end of the search; with neither, a first start.

    Attributes:
        save: its name.
        committed: the newest step that is known to be in storage, up to that one; 0 for none.
    """

    save: str = ""
    committed: int = 0
    skipped: list[Skipped] = []
    notes: list[str] = []
    refused: str = ""
    storage: str = ""


class Candidates:
    """Rank 0's list of saves to resume from, the newest first.

    Args:
        places: where checkpoints may lie.
        promised: saves that the ledger says were committed.
        begins_at: where a framework's own checkpoint stands that is loaded already, 0 for none.
            The job's are passed by where they are older.
    """

    def __init__(
        self, places: Sequence[Place], promised: Collection[SaveName], begins_at: int = 0
    ) -> None:
        self._where = " and ".join(place.storage.describe() for place in places)
        self._begins_at = begins_at
        self._promised = {save for save in promised if save.step >= begins_at}
        self._older = {save.step for save in promised if save.step < begins_at}
        self._failure = ""
        self._notes: list[str] = []
        self._skipped: list[Skipped] = []
        self._partial: list[SaveName] = []
        self._saves: set[SaveName] = set()
        self._stored: set[SaveName] = set(promised)
        self._tried: set[SaveName] = set()
        self._storages = [place for place in places if not place.in_memory]
        self._is_complete = False  # whether these were listed too
        self._candidates: list[SaveName] = []
        in_memory = [place for place in places if place.in_memory]
        self._look(in_memory)
        whole = [save for save in self._saves if _is_whole(in_memory, save)]
        if whole and max(whole) >= max(promised, default=SaveName(-1)):
            self._candidates = [max(whole)]
        else:
            self._look_everywhere()

    def propose(self) -> Proposal:
        """The next candidate, or the end."""
        if not self._candidates:
            self._look_everywhere()
        if self._candidates:
            save = self._candidates.pop()
            self._tried.add(save)
            stored = [one.step for one in self._stored if one <= save]
            committed = max(stored, default=0)
            return Proposal(
                save=str(save), committed=committed, skipped=self._skipped, notes=self._notes
            )
        if self._failure:
            return Proposal(
                storage=f"{self._failure}; run the same command again once it can be, or start "
                "anew with another --dir"
            )
        if self._begins_at:
            notes = [*self._notes]
            if self._older:
                notes.append(
                    f"this job's own checkpoints, up to step {max(self._older)}, are older than "
                    f"step {self._begins_at}, from which the framework goes on: they are passed by"
                )
            return Proposal(skipped=self._skipped, notes=notes)
        if not self._saves and not self._promised:
            return Proposal(notes=[*self._notes, *self._others()])
        reasons = [f"step {skipped.step}: {skipped.reason}" for skipped in self._skipped]
        reasons += [f"step {save.step}: it holds weights alone" for save in self._partial]
        return Proposal(
            refused=(
                f"checkpoints were committed to {self._where} and none is valid "
                f"({'; '.join(reasons)}); "
                "bring one back from a copy, or start anew with another --dir"
            )
        )

    def again(self, save: SaveName) -> None:
        """Propose ``save`` once more."""
        self._candidates.append(save)

    def reject(self, save: SaveName, invalid: str, storage: str, kind: str) -> None:
        """Pass ``save`` over: it is not valid, cannot be read, or is not meant to be resumed."""
        if invalid or storage:
            reason = invalid or storage
            self._skipped.append(Skipped(step=save.step, reason=reason, save=str(save)))
        elif kind != FULL:
            self._partial.append(save)
        if storage:
            self._failure = f"{self._where} cannot be read: {storage}"

    # --- inside ------------------------------------------------------------------------------

    def _look_everywhere(self) -> None:
        """List what was not listed yet: those of memory alone did not do."""
        if self._is_complete:
            return
        self._is_complete = True
        self._look(self._storages)
        self._candidates = sorted(self._saves - self._tried)
        promised = max(self._promised, default=SaveName(-1))
        if promised > max(self._saves, default=SaveName(-1)):
            reason = "its manifest is missing, though the ledger has its commit"
            self._skipped.append(Skipped(step=promised.step, reason=reason))

    def _others(self) -> list[str]:
        """What lies in the places of other jobs: whoever expected to go on from it must hear so."""
        found: dict[str, int] = {}
        for place in self._storages:
            others: dict[str, int] = getattr(place.storage, "others", {})
            for job, step in others.items():
                found[job] = max(found.get(job, 0), step)
        return [
            f"{self._where} also holds checkpoints of job {job or 'unknown'}, up to step {step}: "
            "they are left alone, and this job starts from its beginning (to go on from them, run "
            f"in that job's directory, or put its id into this one's {FILE_NAME})"
            for job, step in sorted(found.items())
        ]

    def _look(self, places: Sequence[Place]) -> None:
        for place in places:
            try:
                found = set(find_saves(place.storage).committed)
                self._older |= {save.step for save in found if save.step < self._begins_at}
                self._saves |= {save for save in found if save.step >= self._begins_at}
                self._stored |= found if not place.in_memory else set()
            except OSError as error:
                where = place.storage.describe()
                reason = f"{where} cannot be listed: {error.strerror or error}"
                self._failure = "; ".join(filter(None, (self._failure, reason)))
                self._notes.append(f"{reason}; going on without it")


def _is_whole(places: Sequence[Place], save: SaveName) -> bool:
    """Whether every file of a checkpoint is in some machine's memory, as far as can be told."""
    try:
        manifest = read_manifest(places, save)
        there = {name for place in places for name in place.storage.children(str(save))}
        # A rank's part is there exactly where the rank's other files are.
        needed = {*manifest.files, *map(part_file, range(len(manifest.parts)))}
        return manifest.kind == FULL and needed <= there
    except (CheckpointInvalid, OSError):
        return False


logger = logging.getLogger(__name__)

OnDamaged = Callable[[int, str, Place, str], None]
OnRepaired = Callable[[int, str, Place], None]
INEXACT: Final = "some of its tensors were stored in fewer bits: the run goes on, not bit for bit"


class ResumeOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a resume came to.

    Attributes:
        step: completed steps to go on from; on a first start 0, or where a framework stands.
        loaded: the state, or None on a first start.
        committed: the newest step up to there that storage has; less than ``step`` where the state
            came from the machines' memory alone.
        skipped: newer checkpoints that were passed over.
        read_s: seconds spent verifying and reading.
        sources: file → the name of the place that this rank read it from.
        repaired: what this rank mended.
        notes: what a person should know besides.
    """

    step: int
    loaded: Checkpoint | None
    skipped: list[Skipped]
    read_s: float
    committed: int = 0
    sources: dict[str, str] = {}
    repaired: list[Repaired] = []
    notes: list[str] = []

    @property
    def origin(self) -> str:
        """Where the state came from, as in "from local and shared, 1 file repaired from shared"."""
        if not self.sources:
            return "from nowhere"
        places = collections.Counter(
            place for places in self.sources.values() for place in places.split(" and ")
        )
        words = "from " + " and ".join(name for name, _ in places.most_common())
        mended = collections.Counter(one.source for one in self.repaired)
        for source, count in mended.items():
            words += f", {count} file{'s' * (count > 1)} repaired from {source}"
        return words


class _TrialReport(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's word on a proposed step; empty strings mean that it is fine.

    Attributes:
        kind: of the manifest; what is not full is passed by.
        checksum: of the manifest: all ranks must have read the same.
        is_open: whether names that this rank lacks have yet to be found on another.
        host: the machine.
        damaged: (file, place) of what is to be mended.
    """

    invalid: str = ""
    storage: str = ""
    mismatch: str = ""
    kind: str = FULL
    checksum: str = ""
    is_open: bool = False
    host: str = ""
    damaged: list[tuple[str, str]] = []


def find(
    where: Storage | Sequence[Place],
    link: Link,
    promised: Collection[SaveName],
    check: Callable[[Checkpoint], Restore | None],
    *,
    begins_at: int = 0,
    on_damaged: OnDamaged = ignore,
    on_repaired: OnRepaired = ignore,
) -> ResumeOutcome:
    """Verify and read the newest checkpoint that is valid for all ranks.

    Args:
        where: places that may hold checkpoints, the fastest first, or one storage.
        link: the other ranks.
        promised: saves that the ledger says were committed (rank 0 needs them).
        check: says what this rank takes from a checkpoint, or raises StateMismatch when that does
            not fit; None stands for everything in the small state.
        begins_at: the step of a framework's own checkpoint, which is gone on from where the job
            has no valid one that is as new; 0 for none.
        on_damaged: told (step, file, place, reason) of what is wrong where the step is.
        on_repaired: told (step, file, place) of what was mended, once all ranks have read.

    Raises:
        StateMismatch: the newest valid checkpoint does not fit.
        ResumeRefused: something was committed and nothing verifies.
        StorageError: no place can be read.
    """
    start_s = time.monotonic()
    places = as_places(where)
    search = Candidates(places, promised, begins_at) if link.rank == 0 else None
    trial: _Trial | None = None
    number = 0
    while True:
        proposal = _exchange_proposal(link, number, search)
        if not proposal.save:
            read_s = time.monotonic() - start_s
            _say(proposal.notes, link.rank)
            return ResumeOutcome(
                step=begins_at,
                loaded=None,
                skipped=proposal.skipped,
                read_s=read_s,
                notes=proposal.notes,
            )
        save = named(proposal.save)
        if trial is None or trial.save != save:
            trial = _Trial(places, save, link, check, on_damaged)
        report = trial.run()
        link.publish(f"resume/{number}/{link.rank}", msgspec.json.encode(report))
        reports = _reports(link, number)
        worst = _worst(reports)
        if worst.mismatch:
            raise StateMismatch(worst.mismatch)
        fine = not worst.invalid and not worst.storage and worst.kind == FULL
        if fine and any(one.is_open for one in reports):
            trial.settle(number)
            if search is not None:
                search.again(save)
        elif fine and trial.checkpoint is not None:
            read_s = time.monotonic() - start_s
            outcome = _finish(proposal, trial.checkpoint, reports, link.rank, on_repaired)
            return msgspec.structs.replace(outcome, read_s=read_s)
        elif search is not None:
            search.reject(save, worst.invalid, worst.storage, worst.kind)
        number += 1


def _exchange_proposal(link: Link, number: int, search: Candidates | None) -> Proposal:
    if search is not None:
        link.publish(f"resume/{number}", msgspec.json.encode(search.propose()))
    proposal = msgspec.json.decode(link.fetch(f"resume/{number}", READ_TIMEOUT_S), type=Proposal)
    if proposal.storage:
        raise StorageError(proposal.storage)
    if proposal.refused:
        raise ResumeRefused(proposal.refused)
    return proposal


def _finish(
    proposal: Proposal,
    checkpoint: Checkpoint,
    reports: list[_TrialReport],
    rank: int,
    on_repaired: OnRepaired,
) -> ResumeOutcome:
    """All ranks have read the step: what was damaged on the way is mended now, once a machine."""
    mine = reports[rank]
    others = {(one.host, *what) for one in reports[:rank] for what in one.damaged}
    repaired = checkpoint.repair(
        functools.partial(on_repaired, checkpoint.manifest.step),
        only=lambda one: (mine.host, one.file, one.place.name) not in others,
    )
    notes = list(proposal.notes)
    if not checkpoint.manifest.exact:
        notes.append(f"step {checkpoint.manifest.step}: {INEXACT}")
    _say(notes, rank)
    return ResumeOutcome(
        step=checkpoint.manifest.step,
        loaded=checkpoint,
        committed=proposal.committed,
        skipped=proposal.skipped,
        read_s=0.0,
        sources=checkpoint.sources,
        repaired=repaired,
        notes=notes,
    )


def _say(notes: Sequence[str], rank: int) -> None:
    for note in notes if rank == 0 else ():
        logger.warning("%s", note)


class _Trial:
    """This rank's dealings with one proposed save."""

    def __init__(
        self,
        places: Sequence[Place],
        save: SaveName,
        link: Link,
        check: Callable[[Checkpoint], Restore | None],
        on_damaged: OnDamaged,
    ) -> None:
        self.save = save
        self.checkpoint: Checkpoint | None = None
        self._places = places
        self._link = link
        self._check = check
        self._on_damaged = on_damaged
        self._restore: Restore | None = None

    def run(self) -> _TrialReport:
        """Open, check, verify this rank's share, and read what fits; what came of it."""
        try:
            return self._run()
        except CheckpointInvalid as error:
            return _TrialReport(invalid=error.reason)
        except (ValueError, KeyError, TypeError) as error:
            return _TrialReport(invalid=f"its small state is not understood: {error!r}")
        except MemoryError:
            return _TrialReport(storage="not enough memory to read it")
        except OSError as error:
            return _TrialReport(storage=in_words(error))

    def settle(self, number: int) -> None:
        """Compare with the other ranks the names that one of them lacks: all ranks call it.

        Raises:
            StateMismatch: a name of the checkpoint is no rank's.
        """
        claims = sorted(self._restore.claims) if self._restore is not None else []
        key = f"resume/{number}/claims"
        self._link.publish(f"{key}/{self._link.rank}", msgspec.json.encode(claims))
        claimed: set[str] = set()
        for rank in range(self._link.world_size):
            raw = self._link.fetch(f"{key}/{rank}", READ_TIMEOUT_S)
            claimed.update(msgspec.json.decode(raw, type=list[str]))
        problem = ""
        try:
            if self._restore is not None:
                self._restore.settle(claimed)
        except StateMismatch as error:
            problem = str(error)
        self._link.publish(f"{key}/{self._link.rank}/verdict", problem.encode())
        for rank in range(self._link.world_size):
            text = self._link.fetch(f"{key}/{rank}/verdict", READ_TIMEOUT_S).decode()
            if text:
                raise StateMismatch(text)

    def _run(self) -> _TrialReport:
        if self.checkpoint is None:
            self.checkpoint = open_checkpoint(
                self._places,
                self.save,
                rank=self._link.rank,
                on_damaged=functools.partial(self._on_damaged, self.save.step),
            )
        checkpoint = self.checkpoint
        if checkpoint.manifest.kind != FULL:
            return _TrialReport(kind=checkpoint.manifest.kind)
        mismatch = ""
        if self._restore is None:
            try:
                self._restore = self._check(checkpoint) or _everything(checkpoint)
            except StateMismatch as error:
                mismatch = str(error)  # heard only if all that it was found in can be believed
        restore, share = self._restore, (self._link.rank, self._link.world_size)
        is_open = restore is not None and bool(restore.absent)
        if restore is None or is_open:
            checkpoint.read((), share=share)
        else:
            try:
                restore.read(share)
            except StateMismatch as error:  # what is seen of the values alone
                mismatch = str(error)
        return _TrialReport(
            mismatch=mismatch,
            checksum=checkpoint.manifest.checksum,
            is_open=is_open,
            host=socket.gethostname(),
            damaged=[(one.file, one.place.name) for one in checkpoint.damage],
        )


def _everything(checkpoint: Checkpoint) -> Restore:
    restore = Restore(checkpoint, f"step {checkpoint.manifest.step}")
    for key in checkpoint.data:
        restore.take(key)
    return restore


def _reports(link: Link, number: int) -> list[_TrialReport]:
    return [
        msgspec.json.decode(
            link.fetch(f"resume/{number}/{rank}", READ_TIMEOUT_S), type=_TrialReport
        )
        for rank in range(link.world_size)
    ]


def _worst(reports: list[_TrialReport]) -> _TrialReport:
    """The first report that is not fine, the same for every rank."""
    for field in ("invalid", "storage", "mismatch"):  # what cannot be read cannot be compared
        for report in reports:
            if getattr(report, field):
                return report
    if len({(report.kind, report.checksum) for report in reports}) > 1:
        return _TrialReport(invalid="not all workers see the same save of this step")
    return reports[0]


class Sources:
    """Where an attempt's state comes from: survivors, machines' memory, tiers.

    Args:
        books: the attempt's.
        engine: the worker's part in its saves.
        turns: hears when what was resumed from is in no storage.
        judging: knows what rollbacks have undone.

    Attributes:
        others_live: whether processes of the attempt before are here whose state is not used.
        votes: whether all workers vote before an optimizer's step (see ``inprocess.divided``).
    """

    def __init__(
        self, books: AttemptBooks, engine: Engine, turns: Turns, judging: LossMonitor
    ) -> None:
        self.others_live = self.votes = False
        self._books = books
        self._link = books.link
        self._engine, self._turns = engine, turns
        self._judging = judging
        self._memory: MemoryTier | None = None  # that was looked at to resume

    def regain(
        self,
        objects: Objects,
        *,
        is_able: bool,
        lives: bool = False,
        others: Others | None = None,
    ) -> Regained | None:
        """What survivors of the attempt before hold, if that can be gone on from; first of all.

        Args:
            objects: the session's.
            is_able: whether this process could go on where another worker is lost.
            lives: whether this process is one of them.
            others: what it knows of other workers' records of samples.
        """
        if not self._books.under_agent:
            return None
        key = f"session/{self._link.rank}"
        self._link.publish(key, str(os.getpid()).encode())  # the agent sees: it drains itself
        if not handover.is_wanted(self._link, LINE_VARIABLE in os.environ):
            return None
        division = division_of(objects)
        self.votes = bool(division.twins) and handover.all_are_able(self._link, is_able)
        found = handover.find(
            self._link,
            {save.step for save in self._books.promised},
            division=division,
            lives=lives,
            others=others,
            rollbacks=self._judging.rollbacks,
        )
        if isinstance(found, str):
            self.others_live = bool(found)
            if found and self._link.rank == 0:
                say(f"the state of the workers that survived is not used: {found}")
            return None
        basis = Basis(found.attempt, found.step, found.world_size)
        self._books.descent = self._books.descent._replace(timeline=found.timeline, basis=basis)
        self._engine.line.start()
        self._engine.line.wait_until_ready()
        self._engine.committed_step = found.committed
        if self._link.rank == 0:
            fields = found.fields(self._link.world_size)
            self._books.ledger.append("resumed", **fields, building_s=self._books.building_s)
        return found

    def resume(self, check: Callable[[Checkpoint], Restore], begins_at: int = 0) -> ResumeOutcome:
        """Find the newest valid checkpoint, with the other ranks, and put it into the ledger.

        Args:
            check: as of :func:`find`.
            begins_at: likewise.
        """
        self._engine.line.start()
        if any(tier.kind == "object" for tier in self._books.settings.tiers):
            self._engine.line.wait_until_ready(needed=True)  # it alone may ask an object store
        places = self._places()
        outcome = find(
            places,
            self._link,
            self._books.promised,
            check,
            begins_at=begins_at,
            on_damaged=self._damaged,
            on_repaired=self._repaired,
        )
        self._engine.line.wait_until_ready()
        self._engine.line.reject(tuple(one.save for one in outcome.skipped if one.save))
        self._engine.committed_step = outcome.committed
        if outcome.loaded is not None and outcome.committed < outcome.step:
            self._turns.repeat("no storage has what was resumed from")
        if self._link.rank == 0:
            source = outcome.loaded.manifest.world_size if outcome.loaded else None
            for skipped in outcome.skipped:
                self._books.ledger.append("verify_failed", step=skipped.step, reason=skipped.reason)
            self._books.ledger.append(
                "resumed",
                step=outcome.step,
                source=outcome.origin if outcome.loaded else "",
                places=[place.storage.describe() for place in places],
                read_s=round(outcome.read_s, 6),
                skipped=[msgspec.structs.asdict(skipped) for skipped in outcome.skipped],
                from_world_size=source,
                building_s=self._books.building_s,
            )
        return outcome

    def started_from(self, origins: Iterable[Origin]) -> None:
        """The job's first state is not the script's."""
        for origin in origins if self._link.rank == 0 else ():
            self._books.ledger.append("initialised", **msgspec.structs.asdict(origin))

    def closed_rounds(self, local_updates: Iterable[LocalUpdates], step: int) -> None:
        """Rounds of local updates that the number of replicas has ended, with the resume."""
        for each in local_updates if self._link.rank == 0 else ():
            if each.closed is not None:
                self._books.ledger.append("round_closed", step=step, **each.closed)

    def reopen(self, save: SaveName) -> Checkpoint:
        """Open the checkpoint that was resumed from once more, before the next save begins.

        Raises:
            CheckpointInvalid, OSError: it is in no place any more.
        """
        places, self._memory = self._places(), None
        return open_checkpoint(places, save, rank=self._link.rank)

    def _places(self) -> list[Place]:
        """All tiers, as this worker may read them."""
        memory, client = self._engine.line.memory(), self._engine.line.client
        # A keeper that has just been started has nothing, and is no place to look for anything.
        places = []
        if memory is not None and memory.children():
            places.append(Place("memory", memory, in_memory=True))
        if memory is not None and memory.num_peers and client is not None:
            peers = Remote(client, PEER, "other machines' memory")
            places.append(Place(PEER, peers, in_memory=True))
        self._memory = memory
        return [*standing(places, self._books.job.id, self._judging.rollbacks), *self.tiers()]

    def tiers(self) -> list[Place]:
        """What outlives the machines' memory."""
        places, client = [], self._engine.line.client
        for tier in self._books.settings.tiers:
            if tier.kind == "directory":
                places.append(Place(tier.name, Directory(Path(tier.url))))
            elif tier.kind == "object" and client is not None:
                places.append(Place(tier.name, Remote(client, tier.name, tier.url)))
        return standing(places, self._books.job.id, self._judging.rollbacks)

    def _damaged(self, step: int, file: str, place: Place, reason: str) -> None:
        tier = place.name
        self._books.ledger.append("verify_failed", step=step, file=file, tier=tier, reason=reason)

    def _repaired(self, step: int, file: str, place: Place) -> None:
        self._books.ledger.append("repaired", step=step, file=file, tier=place.name)

    def look_away(self) -> None:
        """Everything is read: unmap what was looked at, behind the first step."""
        memory, self._memory = self._memory, None
        if memory is not None:
            threading.Thread(target=memory.look_away, name="outlast-unmap", daemon=True).start()
