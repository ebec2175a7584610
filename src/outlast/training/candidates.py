"""The saves that a job could go on from, newest first, and why those that cannot were passed over.

The newest step counts, and of its saves the newest that is whole: what saved a step again has
superseded the save before, which is there until retention lets it go.

The candidates are those of all places together: one place may have lost what another still holds.
A place that cannot be listed is passed over in words while another works; nothing is concluded from
its silence, though: if no other place has a step, the job does not start anew.

What is whole in the machines' memory, and not older than what the ledger promises, is tried before
any storage is so much as listed: storage that cannot be reached, or stalls, holds nobody up then.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from outlast.checkpoint.catalog import find_saves
from outlast.checkpoint.manifest import FULL, part_file
from outlast.checkpoint.names import Place, SaveName
from outlast.checkpoint.transfer import read_manifest
from outlast.errors import CheckpointInvalid
from outlast.ledger.job import FILE_NAME


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
    """Rank 0's list.

    Args:
        places: where checkpoints may lie.
        promised: saves that the ledger says were committed.
    """

    def __init__(self, places: Sequence[Place], promised: Collection[SaveName]) -> None:
        self._where = " and ".join(place.storage.describe() for place in places)
        self._promised = promised
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
                self._saves |= found
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
