"""The steps that a job could go on from, newest first, and why those that cannot were passed over.

The candidates are those of all places together: one place may have lost what another still holds.
A place that cannot be listed is passed over in words while another works; nothing is concluded from
its silence, though: if no other place has a step, the job does not start anew.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from outlast.checkpoint.catalog import find_steps
from outlast.checkpoint.manifest import FULL
from outlast.checkpoint.places import Place


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
        self._failure = ""
        self._skipped: list[Skipped] = []
        self._partial: list[int] = []
        steps: set[int] = set()
        unlisted: list[str] = []
        for place in places:
            try:
                steps |= set(find_steps(place.storage).committed)
            except OSError as error:
                where = place.storage.describe()
                unlisted.append(f"{where} cannot be listed: {error.strerror or error}")
        self._failure = "; ".join(unlisted)
        self._notes = [f"{reason}; going on without it" for reason in unlisted]
        self._candidates = sorted(steps)
        self._any = bool(steps) or bool(promised)
        if promised and max(promised) > max(steps, default=-1):
            reason = "its manifest is missing, though the ledger has its commit"
            self._skipped.append(Skipped(step=max(promised), reason=reason))

    def propose(self) -> Proposal:
        """The next candidate, or the end."""
        if self._candidates:
            step = self._candidates.pop()
            return Proposal(step=step, skipped=self._skipped, notes=self._notes)
        if self._failure:
            return Proposal(storage=self._failure)
        if not self._any:
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
