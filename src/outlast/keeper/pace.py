"""Background traffic that gives way: no faster than it may be, and last in line for a core."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import Final

NICENESS: Final = 19
CATCH_UP_S: Final = 0.05  # of the rate, after a wait that took longer than it should have


def yield_to_training() -> None:
    """From here on this thread gets a core only where nobody else wants it (Linux)."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


class Pace:
    """Waits so that no more than so many bytes go in a second.

    Args:
        rate_bytes: per second.
        stop: ends every wait.
    """

    def __init__(self, rate_bytes: float, stop: threading.Event) -> None:
        self._rate = rate_bytes
        self._stop = stop
        self._free_s = time.monotonic()  # when everything that was let through has gone

    def __call__(self, num_bytes: int) -> None:
        """Wait until ``num_bytes`` may go.

        Raises:
            ConnectionAbortedError: it was stopped.
        """
        now = time.monotonic()
        self._free_s = max(self._free_s, now - CATCH_UP_S)
        wait_s = self._free_s - now
        self._free_s += num_bytes / self._rate
        if self._stop.wait(wait_s) if wait_s > 0 else self._stop.is_set():
            raise ConnectionAbortedError("it is not to be sent any more")
