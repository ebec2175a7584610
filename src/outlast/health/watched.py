"""The workers of one attempt, as a watcher sees them."""

from __future__ import annotations

from pathlib import Path

from outlast.attempt.beat import BeatReader
from outlast.health.messages import Begin, WatchedWorker


class Watched:
    """Opens what workers say, as they begin to say it.

    Args:
        begin: as the agent said it.

    Attributes:
        begin: the same.
        heard: rank → what that worker says; those that have not begun to are missing.
    """

    def __init__(self, begin: Begin) -> None:
        self.begin = begin
        self.heard: dict[int, BeatReader] = {}
        self._beats = Path(begin.beats)

    @property
    def workers(self) -> tuple[WatchedWorker, ...]:
        """Those of this machine."""
        return self.begin.workers

    def look(self) -> None:
        """Open what is there by now."""
        for worker in self.workers:
            if worker.rank not in self.heard:
                try:
                    self.heard[worker.rank] = BeatReader(self._beats, worker.local_rank)
                except (OSError, ValueError):
                    continue  # it has not begun to speak

    def close(self) -> None:
        """Let go of the memory."""
        for heard in self.heard.values():
            heard.close()
        self.heard.clear()
