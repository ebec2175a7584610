"""What is said to people while the end of a job waits for slower tiers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from outlast.keeper.wire import Progress

WAIT_FIRST_S: Final = 2.0
WAIT_EVERY_S: Final = 5.0


class Waits:
    """Says what the end of a job waits for: slower tiers that do not have everything yet.

    Args:
        say: tells people.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._told_s = 0.0
        self._first: tuple[float, int] | None = None  # when, and how many bytes were done

    def tell(self, progress: Progress) -> None:
        """Say it after two seconds, and then every five, with the time that is left."""
        now = time.monotonic()
        if not progress.words:
            return
        self._first = self._first or (now, progress.done_bytes)
        if now - self._first[0] < WAIT_FIRST_S or now - self._told_s < WAIT_EVERY_S:
            return
        self._told_s = now
        done = progress.done_bytes - self._first[1]
        left = progress.total_bytes - progress.done_bytes
        rate = done / max(now - self._first[0], 0.001)
        time_left = f", {in_short(left / rate)} left" if done > 0 else ""
        self._say(
            f"bringing the newest checkpoint to {progress.words}: "
            f"{progress.done_bytes / 1e9:.2f} of {progress.total_bytes / 1e9:.2f} GB{time_left}"
        )


def in_short(seconds: float) -> str:
    """Seconds as a person says them."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
