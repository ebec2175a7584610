"""The pace of what goes on behind training: no faster than it may, and last in line for a core.

While no core is spare, a thread with a pace has ``BUSY_SHARE`` of one core at most, so that
training loses no more than that to it. (Ranks that wait for each other lose whatever is taken from
any one of them, so it is the share of one core that counts, at any number of cores.) Not bounded is
what goes below ``FLOOR_BYTES``: a copy that never ends is no copy; and what training waits for.

The thread itself tells whether a core is spare: one that has to wait for a core longer than a part
of the time that it then has one found none free. The kernel counts both (``schedstat``); that holds
in containers too, whose share of the machine /proc/stat does not tell. Where the kernel does not
count, no core is taken for spare.

Two thirds of what a byte costs are its seal (HMAC-SHA256; hashlib has nothing faster). Tried, and
of no use: being woken for larger pieces only (SO_RCVLOWAT). Smaller pieces cost more of themselves.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Final

NICENESS: Final = 19
# Sealing and sending take about 0.8 s of a core for each GB, receiving and comparing as much: sent
# and received at this rate, that is a thirtieth of all cores.
RATE_PER_CORE_BYTES: Final = 22e6
RATE_MAX_BYTES: Final = 1e9  # about what one thread can seal
BUSY_SHARE: Final = 0.02
FLOOR_BYTES: Final = 4e6
CATCH_UP_S: Final = 0.05  # of the rate, after a wait that took longer than it should have
LOOK_S: Final = 0.01  # of processor time, between two looks at how long was waited for it
FADES: Final = 0.8  # what the looks before count, with each look
CROWDED: Final = 0.25  # waited, to had
_SCHEDSTAT: Final = Path("/proc/thread-self/schedstat")


def rate_of(setting: float | None) -> float:
    """Bytes per second: as it was set, or after the cores that this process may use."""
    cores = len(os.sched_getaffinity(0))
    return min(cores * RATE_PER_CORE_BYTES, RATE_MAX_BYTES) if setting is None else setting


def yield_to_training() -> None:
    """From here on this thread is last in line for a core (Linux).

    Where the kernel groups processes by session ("autogroup", in no container) that holds among the
    keeper's own threads alone: there it is the pace that keeps the traffic in its bounds.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


class Cores:
    """Whether the calling thread finds a core when it wants one. For one thread."""

    def __init__(self) -> None:
        self._looked: tuple[float, float] | None = None  # at (had, waited)
        self._had_s = self._waited_s = 0.0  # of late
        self._is_spare = False

    def is_spare(self, had_s: float) -> bool:
        """Whether it did of late.

        Args:
            had_s: processor time that the thread has had so far, in seconds.
        """
        if self._looked is None or had_s - self._looked[0] >= LOOK_S:
            before, waited_s = self._looked, _waited_s()
            self._looked = (had_s, waited_s or 0.0)
            if before is not None and waited_s is not None:
                self._had_s = FADES * self._had_s + had_s - before[0]
                self._waited_s = FADES * self._waited_s + waited_s - before[1]
                self._is_spare = self._waited_s < CROWDED * self._had_s
        return self._is_spare


def _waited_s() -> float | None:
    """How long the calling thread has waited for a core so far; None where nobody counts it."""
    try:
        return int(_SCHEDSTAT.read_bytes().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None


class TrafficPace:
    """Waits so that no more goes than may. For one thread.

    Args:
        rate_bytes: per second, at most.
        stop: ends every wait.
        cores: gives way while none of them is spare; None to go on at ``rate_bytes`` all the same.
    """

    def __init__(
        self, rate_bytes: float, stop: threading.Event, cores: Cores | None = None
    ) -> None:
        self._rate = rate_bytes
        self._stop = stop
        self._cores = cores
        self._free_s = time.monotonic()  # when everything that was let through has gone
        self._last_bytes = 0
        self._had_s = 0.0  # processor time before the last bytes went

    def __call__(self, num_bytes: int) -> None:
        """Wait until ``num_bytes`` may go.

        Raises:
            ConnectionAbortedError: it was stopped.
        """
        if self._cores is not None:
            self._free_s += self._more_s(self._cores)
        now = time.monotonic()
        self._free_s = max(self._free_s, now - CATCH_UP_S)
        wait_s = self._free_s - now
        self._free_s += num_bytes / self._rate
        self._last_bytes = num_bytes
        if self._stop.wait(wait_s) if wait_s > 0 else self._stop.is_set():
            raise ConnectionAbortedError("it is not to be sent any more")

    def _more_s(self, cores: Cores) -> float:
        """How much longer the last bytes are to have taken, after what they cost."""
        had_s = time.thread_time()
        cost_s, self._had_s = had_s - self._had_s, had_s
        if cores.is_spare(had_s):
            return 0.0
        longest_s = self._last_bytes / FLOOR_BYTES
        return max(min(cost_s / BUSY_SHARE, longest_s) - self._last_bytes / self._rate, 0.0)
