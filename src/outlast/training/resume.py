"""Finding the newest checkpoint that verifies on every rank, and saying what was passed over.

Rank 0 proposes a step, newest first; every rank verifies and reads what it needs of it and reports;
one rank's refusal is everybody's. Nothing is changed in any object before all have agreed.

Never a silent start from step 0: when the ledger or a manifest says that something was committed
and nothing verifies, the job refuses to start.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Collection
from typing import Final

import msgspec

from outlast.attempt.link import Link
from outlast.checkpoint.catalog import find_steps
from outlast.checkpoint.load import Loaded, load
from outlast.errors import CheckpointInvalid, ResumeRefused, StateMismatch, StorageError
from outlast.storage import Storage

logger = logging.getLogger(__name__)

READ_TIMEOUT_S: Final = 3600.0


class Skipped(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that was passed over, and why."""

    step: int
    reason: str


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a resume came to.

    Attributes:
        step: completed steps to go on from; 0 on a first start.
        loaded: the state, or None on a first start.
        skipped: newer checkpoints that were passed over.
        read_s: seconds spent verifying and reading.
    """

    step: int
    loaded: Loaded | None
    skipped: list[Skipped]
    read_s: float


class _Report(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's word on a proposed step; empty strings mean that it is fine."""

    invalid: str = ""
    storage: str = ""
    mismatch: str = ""


class _Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """Rank 0's word: a step to try, or the end of the search."""

    step: int | None = None
    skipped: list[Skipped] = []
    refused: str = ""
    storage: str = ""


def find(
    storage: Storage, link: Link, promised: Collection[int], check: Callable[[Loaded], None]
) -> Outcome:
    """Verify and read the newest checkpoint that is valid for all ranks.

    Args:
        storage: where checkpoints lie.
        link: the other ranks.
        promised: steps that the ledger says were committed (rank 0 needs them).
        check: raises StateMismatch when a checkpoint does not fit this rank's objects.

    Raises:
        StateMismatch: the newest valid checkpoint does not fit.
        ResumeRefused: something was committed and nothing verifies.
        StorageError: the storage cannot be read.
    """
    start = time.monotonic()
    search = _Search(storage, promised) if link.rank == 0 else None
    number = 0
    while True:
        if search is not None:
            link.publish(f"resume/{number}", msgspec.json.encode(search.propose()))
        raw = link.fetch(f"resume/{number}", READ_TIMEOUT_S)
        proposal = msgspec.json.decode(raw, type=_Proposal)
        if proposal.storage:
            raise StorageError(proposal.storage)
        if proposal.refused:
            raise ResumeRefused(proposal.refused)
        if proposal.step is None:
            return Outcome(step=0, loaded=None, skipped=[], read_s=time.monotonic() - start)
        loaded, report = _try(storage, proposal.step, link.rank, check)
        link.publish(f"resume/{number}/{link.rank}", msgspec.json.encode(report))
        worst = _worst(link, number)
        if worst.mismatch:
            raise StateMismatch(worst.mismatch)
        if loaded is not None and not worst.invalid and not worst.storage:
            elapsed = time.monotonic() - start
            return Outcome(
                step=proposal.step, loaded=loaded, skipped=proposal.skipped, read_s=elapsed
            )
        if search is not None:
            search.reject(proposal.step, worst)
        number += 1


class _Search:
    """Rank 0's list of candidates."""

    def __init__(self, storage: Storage, promised: Collection[int]) -> None:
        self._place = storage.describe()
        self._failure = ""
        self._skipped: list[Skipped] = []
        try:
            committed = find_steps(storage).committed
        except OSError as error:
            committed = []
            self._failure = f"{self._place} cannot be listed: {error.strerror or error}"
        self._candidates = committed
        self._any = bool(committed) or bool(promised)
        newest = max(committed, default=-1)
        if promised and max(promised) > newest:
            reason = "its manifest is missing, though the ledger has its commit"
            self._skipped.append(Skipped(step=max(promised), reason=reason))

    def propose(self) -> _Proposal:
        """The next candidate, or the end."""
        if self._candidates:
            return _Proposal(step=self._candidates.pop(), skipped=self._skipped)
        if self._failure:
            return _Proposal(storage=self._failure)
        if not self._any:
            return _Proposal()
        reasons = "; ".join(f"step {skipped.step}: {skipped.reason}" for skipped in self._skipped)
        return _Proposal(
            refused=(
                f"checkpoints were committed to {self._place} and none is valid ({reasons}); "
                "bring one back from a copy, or start anew with another --dir"
            )
        )

    def reject(self, step: int, report: _Report) -> None:
        """Pass ``step`` over."""
        self._skipped.append(Skipped(step=step, reason=report.invalid or report.storage))
        if report.storage:
            self._failure = f"{self._place} cannot be read: {report.storage}"


def _try(
    storage: Storage, step: int, rank: int, check: Callable[[Loaded], None]
) -> tuple[Loaded | None, _Report]:
    try:
        loaded = load(storage, step, rank=rank, everything=rank == 0)
        check(loaded)
        return loaded, _Report()
    except StateMismatch as error:
        return None, _Report(mismatch=str(error))
    except CheckpointInvalid as error:
        return None, _Report(invalid=error.reason)
    except (ValueError, KeyError, TypeError) as error:
        return None, _Report(invalid=f"its small state is not understood: {error!r}")
    except MemoryError:
        return None, _Report(storage="not enough memory to read it")
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, type(error).__name__)
        return None, _Report(storage=f"{name}: {error.strerror or error}")


def _worst(link: Link, number: int) -> _Report:
    """The first report that is not fine, the same for every rank."""
    reports = [
        msgspec.json.decode(link.fetch(f"resume/{number}/{rank}", READ_TIMEOUT_S), type=_Report)
        for rank in range(link.world_size)
    ]
    fine = _Report()
    for field in ("invalid", "storage", "mismatch"):  # what cannot be read cannot be compared
        for report in reports:
            if getattr(report, field):
                return report
    return fine
