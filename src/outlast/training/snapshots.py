"""A worker's snapshots in one attempt: when they are due, how they are taken, how their saves end.

The training thread hands the state to the engine, and tells the ledger nothing: what there is to be
written down is left to the threads that hear of a save's end, and to the attempt's. What a save has
cost, and how it ended, decides when the next one is due.
"""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from outlast.attempt import trackers
from outlast.attempt.link import Agreement
from outlast.checkpoint.manifest import FULL
from outlast.config import Settings
from outlast.ledger.narrator import say
from outlast.policy.cadence import Change
from outlast.script.states import States
from outlast.training.books import AttemptBooks
from outlast.training.engine import Engine
from outlast.training.flight import Unsaved, Written
from outlast.training.judging import LossMonitor
from outlast.training.turns import Turns


class Snapshots:
    """One worker's in one attempt: when they are due, how they are taken, how their saves end.

    Args:
        settings: the job's.
        books: the attempt's.
        judging: told what is committed.
        on_written: told (step, error) of each save's end.

    Attributes:
        engine: has them copied and committed.
        turns: when the next one is due.
        states: makes what is saved.
        unsaved: what people hear of saves that fail.
        agreement: with the other ranks, once it is there.
    """

    def __init__(
        self,
        settings: Settings,
        books: AttemptBooks,
        judging: LossMonitor,
        on_written: Callable[[int, str], None],
    ) -> None:
        self.agreement: Agreement | None = None
        self._settings = settings
        self._books = books
        self._link = books.link
        self._judging = judging
        self._on_written = on_written
        self._notes: collections.deque[dict[str, Any]] = collections.deque()
        self.engine = Engine(
            settings,
            self._link,
            job=books.job.id,
            attempt=books.attempt,
            on_written=self._written,
            on_change=self.changed,
            say=say,
        )
        self.states = States(settings)
        self.unsaved = Unsaved(say if not self._link.rank else lambda _: None)
        past = books.past
        self.turns = Turns(
            settings,
            self.engine,
            self.skipped,
            on_change=self._note_cadence,
            known=None if past is None else past.failures.hazard,
            costs_s=() if past is None else past.costs_s,
            storms=past is not None and past.storms,
            beyond=None if past is None else past.failures.beyond,
            told=None if past is None else past.tier_intervals_s,
            leads=not self._link.rank,
        )

    def prepare(self, step: int, objects: Mapping[str, Any], state: dict[str, Any]) -> None:
        """After the first step of an attempt: have everything ready for the first save."""
        if self._link.rank == 0:
            trackers.note(self._settings.dir)
        self.engine.prepare(self.states.of(step, objects, state, FULL))

    def due(self, step: int) -> dict[str, Any] | None:
        """On rank 0: what to ask for at the boundary after the next step, if anything."""
        return None if self._link.rank else self.turns.due(step)

    def capture(
        self,
        step: int,
        objects: Mapping[str, Any],
        state: dict[str, Any],
        info: Mapping[str, Any],
        start_s: float,
    ) -> None:
        """Have the engine take a snapshot of ``state``; the loop is blocked since ``start_s``.

        Raises:
            OSError, OutlastError: it could not be begun.
        """
        self.turns.answered()
        tiers = info.get("tiers")
        asked_s = time.monotonic()
        found = self.states.of(step, objects, state, str(info.get("content") or FULL))
        flat_s = time.monotonic()
        size = self.engine.capture(found, None if tiers is None else tuple(tiers), start_s)
        now = time.monotonic()
        self._books.samples.stalled(now - start_s)
        cost_s = self.turns.taken(step, now, now - start_s, tiers)
        if self._link.rank == 0:
            self._notes.append(
                {
                    "step": step,
                    "blocked_s": round(now - start_s, 6),
                    **({} if cost_s is None else {"cost_s": round(cost_s, 6)}),
                    "tiers": tiers,
                    "bytes": size,
                    "reason": str(info.get("reason", "")),
                    "kind": found.kind,
                    "timings": {
                        "state_s": round(asked_s - start_s, 6),
                        "flatten_s": round(flat_s - asked_s, 6),
                        "begin_s": round(now - flat_s, 6),
                    },
                }
            )

    def skipped(self, step: int, reason: str) -> None:
        """A save that was due was not taken."""
        self.turns.answered()
        self._books.ledger.append("save_skipped", durable=False, step=step, reason=reason)

    def _written(self, written: Written) -> None:
        if written.void:
            self.turns.repeat("the snapshot before was void")
            if self._link.rank == 0:
                self.skipped(written.step, f"{written.error}; it is taken again, all at once")
        else:
            if self._link.rank == 0 and not written.told:
                self.skipped(written.step, written.error)
            self.unsaved.ended(written)
            self.turns.written(
                written.step, written.took_s, alone=not written.tier, error=written.error
            )
            if written.tier or written.error:  # nobody has asked for one in memory alone
                self._on_written(written.step, written.error)
            self._judging.committed(self.engine.committed_step)
        self.changed()

    def _note_cadence(self, change: Change) -> None:
        self._books.ledger.append("cadence", durable=False, **msgspec.structs.asdict(change))

    def changed(self) -> None:
        """In another thread: what the training thread left to be written down, and a poke."""
        while self._notes:
            with contextlib.suppress(IndexError):
                self._books.ledger.append("snapshot", durable=False, **self._notes.popleft())
        if self.agreement is not None:
            with contextlib.suppress(OSError, RuntimeError):  # the store is gone, the attempt over
                self.agreement.poke()
