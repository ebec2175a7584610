"""Background traffic that gives way: no faster than it may be, and last in line for a core."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import Final

NICENESS: Final = 19
# What sealing, sending, receiving and comparing cost a core is about 1.1 s for each GB on either
# side: sent and received at this rate, that is a twentieth of all cores where none is idle.
RATE_PER_CORE_BYTES: Final = 22e6
RATE_MAX_BYTES: Final = 1e9  # about what one thread can seal
CATCH_UP_S: Final = 0.05  # of the rate, after a wait that took longer than it should have


def rate_of(setting: float | None) -> float:
    """Bytes per second: as it was set, or after the cores that this process may use."""
    cores = len(os.sched_getaffinity(0))
    return min(cores * RATE_PER_CORE_BYTES, RATE_MAX_BYTES) if setting is None else setting


def yield_to_training() -> None:
    """From here on this thread is last in line for a core (Linux).

    Where the kernel groups processes by session ("autogroup", in no container) that holds among the
    keeper's own threads alone: there it is the rate that keeps the traffic in its bounds.
    """
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
