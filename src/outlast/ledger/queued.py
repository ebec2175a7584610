"""A ledger whose writer does not wait for the disk.

An agent that writes down a worker's loss before it restarts the workers would wait for storage that
hangs, and for an fsync where it does not. Here a thread writes; times are those of the call. A
keeper or a session waits for what it promises to others, but not for longer than ``patience_s``.

Guarantees: events of this process keep their order; ``close`` waits for what is due, as long as
storage does not hang.
What can go wrong: a machine that dies in these milliseconds takes its last words along; storage
that hangs for long fills the queue, whose newest events are then counted as lost.
"""

from __future__ import annotations

import logging
import queue
import threading
from pathlib import Path
from typing import Any, Final

from outlast.ledger.events import Event, EventName
from outlast.ledger.file import Ledger

logger = logging.getLogger(__name__)

WAITING_MAX: Final = 10_000
CLOSE_S: Final = 5.0
PATIENCE_S: Final = 2.0  # of those who promise to others what they write down


class QueuedLedger(Ledger):
    """A :class:`Ledger` written by a thread of its own.

    Args:
        directory, job, attempt, rank: as a Ledger's.
        patience_s: how long ``append`` waits for an event that is to be durable; once that was in
            vain, not at all until the disk has caught up.
    """

    def __init__(
        self,
        directory: Path,
        *,
        job: str,
        attempt: int = 0,
        rank: int | None = None,
        patience_s: float = 0.0,
    ):
        super().__init__(directory, job=job, attempt=attempt, rank=rank)
        self._patience_s = patience_s
        self._is_behind = False
        self._due: queue.Queue[tuple[Event, bool] | threading.Event | None] = queue.Queue(
            WAITING_MAX
        )
        self._thread = threading.Thread(target=self._write_on, name="outlast-ledger", daemon=True)
        self._thread.start()

    def append(
        self, event: EventName, *, durable: bool = True, rank: int | None = None, **fields: Any
    ) -> Event:
        """Have one event appended soon; after ``close``, now."""
        entry = self.entry(event, rank, fields)
        if not self._thread.is_alive():
            self.write(entry, durable=durable)
            return entry
        try:
            self._due.put_nowait((entry, durable))
        except queue.Full:
            self.lost_events += 1
            return entry
        if durable and self._patience_s and not self._is_behind:
            self._is_behind = not self.flush(self._patience_s)
        return entry

    def record(self, event: EventName, **fields: Any) -> bool:
        """Append an event that others will rely on; whether it is on disk, in some seconds."""
        lost = self.lost_events
        self.append(event, **fields)
        return (not self._thread.is_alive() or self.flush(CLOSE_S)) and self.lost_events == lost

    def flush(self, timeout_s: float = CLOSE_S) -> bool:
        """Wait until all that was appended is written; whether it is, in this time."""
        written = threading.Event()
        try:
            self._due.put(written, timeout=timeout_s)
        except queue.Full:
            return False
        return written.wait(timeout_s)

    def close(self) -> None:
        """Write what is due, for at most some seconds, and close the file."""
        try:
            self._due.put(None, timeout=CLOSE_S)
            self._thread.join(CLOSE_S)
        except queue.Full:
            pass
        if self._thread.is_alive():
            logger.warning("the ledger %s does not take its last events: its disk hangs", self.path)
        else:
            super().close()

    def _write_on(self) -> None:
        while (due := self._due.get()) is not None:
            if isinstance(due, threading.Event):
                due.set()
            else:
                entry, durable = due
                self.write(entry, durable=durable)
            if self._due.empty():
                self._is_behind = False
