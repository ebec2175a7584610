"""The thread that writes checkpoints while training goes on.

At most one save is in flight; the memory of its snapshot is free again when it ends. A save that
fails is put into the ledger and counted, the older commit stands, and the next due save is the
retry: writing never stops training.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable

import msgspec

from outlast.checkpoint.catalog import prune
from outlast.checkpoint.save import Captured, Committed, Saver
from outlast.ledger.file import Ledger
from outlast.storage import Storage

logger = logging.getLogger(__name__)


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """How a save ended: ``error`` is "" when it was committed."""

    step: int
    error: str = ""


class Writer:
    """Writes one captured state after the other in its own thread.

    Args:
        saver: knows the order of a save.
        storage: where checkpoints lie; rank 0 prunes there.
        ledger: gets commits and failures.
        rank: this worker's rank.
        keep: how many checkpoints stay.
        on_written: told of each end, in the writing thread.
    """

    def __init__(
        self,
        saver: Saver,
        storage: Storage,
        ledger: Ledger,
        *,
        rank: int,
        keep: int,
        on_written: Callable[[Written], None],
    ) -> None:
        self.committed_step = 0
        self.failures = 0
        self.invalid: set[int] = set()
        self._saver = saver
        self._storage = storage
        self._ledger = ledger
        self._rank = rank
        self._keep = keep
        self._on_written = on_written
        self._changed = threading.Condition()
        self._current: Captured | None = None
        self._started_s = 0.0
        self._last = Written(step=0)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="outlast-writer", daemon=True)
        self._thread.start()

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight."""
        return self._current is None

    def submit(self, captured: Captured) -> None:
        """Write ``captured``; the writer must be idle."""
        with self._changed:
            if self._current is not None:
                raise RuntimeError("a save is in flight already")
            self._current = captured
            self._started_s = time.monotonic()
            self._changed.notify_all()

    def wait(self, timeout_s: float | None) -> Written | None:
        """How the last save ended, waited for; None when it has not within ``timeout_s``."""
        with self._changed:
            if self._changed.wait_for(lambda: self._current is None, timeout_s):
                return self._last
            return None

    def stop(self, timeout_s: float) -> None:
        """Let the save in flight end, for at most ``timeout_s``, and end the thread."""
        self.wait(timeout_s)
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(timeout=1)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._current is not None or self._stopping)
                captured = self._current
            if captured is None:
                return
            written = self._write(captured)
            with self._changed:
                self._current, self._last = None, written
                self._changed.notify_all()
            self._on_written(written)

    def _write(self, captured: Captured) -> Written:
        step = captured.step
        try:
            committed = self._saver.save(captured)
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
            self.failures += 1
            text = f"{type(error).__name__}: {error}"
            if getattr(error, "errno", None) == errno.ENOSPC:
                text += f"; free space, or keep fewer (checkpoint.keep is {self._keep})"
            logger.warning("step %d was not saved: %s", step, text)
            self._ledger.append(
                "storage_error",
                operation="save",
                path=self._storage.describe(),
                error=text,
                step=step,
            )
            return Written(step=step, error=text)
        self.committed_step = step
        if self._rank == 0:
            self._record(committed)
        return Written(step=step)

    def _record(self, committed: Committed) -> None:
        self.invalid.discard(committed.step)
        self._ledger.append(
            "commit",
            step=committed.step,
            durable_s=round(time.monotonic() - self._started_s, 6),
            bytes=committed.num_bytes,
            files=committed.num_files,
        )
        try:
            prune(self._storage, keep=self._keep, invalid=self.invalid)
        except OSError as error:
            logger.warning("old checkpoints could not be removed: %s", error)
            self._ledger.append(
                "storage_error", operation="prune", path=self._storage.describe(), error=str(error)
            )
