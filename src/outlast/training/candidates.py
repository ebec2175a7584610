"""The steps that a job could go on from, newest first, and why those that cannot were passed over.

The candidates are those of all places together: one place may have lost what another still holds.
A place that cannot be listed is passed over in words while another works; nothing is concluded from
its silence, though: if no other place has a step, the job does not start anew.

What is whole in the machines' memory, and not older than what the ledger promises, is tried before
any storage is so much as listed: storage that cannot be reached, or stalls, holds nobody up then.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from outlast.checkpoint.catalog import find_steps
from outlast.checkpoint.load import read_manifest
from outlast.checkpoint.manifest import FULL, step_name
from outlast.checkpoint.places import Place
from outlast.errors import CheckpointInvalid


class Skipped(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that was passed over, and why."""

    step: int
    reason: str


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """Rank 0's word: a step to try, or the end of the search; with neither, a first start."""

    step: int | None = None
    skipped: list[Skipped] = []
    notes: list[str] = []
    refused: str = ""
    storage: str = ""


class Candidates:
    """Rank 0's list.

    Args:
        places: where checkpoints may lie.
        promised: steps that the ledger says were committed.
    """

    def __init__(self, places: Sequence[Place], promised: Collection[int]) -> None:
        self._where = " and ".join(place.storage.describe() for place in places)
        self._promised = promised
        self._failure = ""
        self._notes: list[str] = []
        self._skipped: list[Skipped] = []
        self._partial: list[int] = []
        self._steps: set[int] = set()
        self._tried: set[int] = set()
        self._storages = [place for place in places if not place.in_memory]
        self._is_complete = False  # whether these were listed too
        self._candidates: list[int] = []
        in_memory = [place for place in places if place.in_memory]
        self._look(in_memory)
        whole = [step for step in self._steps if _is_whole(in_memory, step)]
        if whole and max(whole) >= max(promised, default=-1):
            self._candidates = [max(whole)]
        else:
            self._look_everywhere()

    def propose(self) -> Proposal:
        """The next candidate, or the end."""
        if not self._candidates:
            self._look_everywhere()
        if self._candidates:
            step = self._candidates.pop()
            self._tried.add(step)
            return Proposal(step=step, skipped=self._skipped, notes=self._notes)
        if self._failure:
            return Proposal(storage=self._failure)
        if not self._steps and not self._promised:
            return Proposal()
        reasons = [f"step {skipped.step}: {skipped.reason}" for skipped in self._skipped]
        reasons += [f"step {step}: it holds weights alone" for step in self._partial]
        return Proposal(
            refused=(
                f"checkpoints were committed to {self._where} and none is valid "
                f"({'; '.join(reasons)}); "
                "bring one back from a copy, or start anew with another --dir"
            )
        )

    def again(self, step: int) -> None:
        """Propose ``step`` once more."""
        self._candidates.append(step)

    def reject(self, step: int, invalid: str, storage: str, kind: str) -> None:
        """Pass ``step`` over: it is not valid, cannot be read, or is not meant to be resumed."""
        if invalid or storage:
            self._skipped.append(Skipped(step=step, reason=invalid or storage))
        elif kind != FULL:
            self._partial.append(step)
        if storage:
            self._failure = f"{self._where} cannot be read: {storage}"

    # --- inside ------------------------------------------------------------------------------

    def _look_everywhere(self) -> None:
        """List what was not listed yet: those of memory alone did not do."""
        if self._is_complete:
            return
        self._is_complete = True
        self._look(self._storages)
        self._candidates = sorted(self._steps - self._tried)
        if self._promised and max(self._promised) > max(self._steps, default=-1):
            reason = "its manifest is missing, though the ledger has its commit"
            self._skipped.append(Skipped(step=max(self._promised), reason=reason))

    def _look(self, places: Sequence[Place]) -> None:
        for place in places:
            try:
                self._steps |= set(find_steps(place.storage).committed)
            except OSError as error:
                where = place.storage.describe()
                reason = f"{where} cannot be listed: {error.strerror or error}"
                self._failure = "; ".join(filter(None, (self._failure, reason)))
                self._notes.append(f"{reason}; going on without it")


def _is_whole(places: Sequence[Place], step: int) -> bool:
    """Whether every file of a checkpoint is in some machine's memory, as far as can be told."""
    try:
        manifest = read_manifest(places, step)
        there = {name for place in places for name in place.storage.children(step_name(step))}
        return manifest.kind == FULL and manifest.files.keys() <= there
    except (CheckpointInvalid, OSError):
        return False
