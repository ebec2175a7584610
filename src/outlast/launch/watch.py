"""Waiting for a worker to end: the agent knows of it within a millisecond, and never polls.

torch's agent sleeps between two looks at its workers; a death is noticed half that time late. Here
it sleeps on what the kernel says of each process (a pidfd), for at most as long. Where there are no
pidfds it just sleeps.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any

from outlast.launch.warm.wire import readable


class Watch:
    """Sleeps until a process ends.

    Args:
        interval_s: the longest sleep.
        news: a descriptor that is readable when there is something else to look at, or None; who
            looks at it makes it unreadable.
    """

    def __init__(self, interval_s: float, news: int | None = None) -> None:
        self._interval_s = interval_s
        self._news = () if news is None else (news,)
        self._fds: dict[int, int] = {}  # pid → pidfd

    def wait(self, processes: Iterable[Any], lines: Iterable[int] = ()) -> None:
        """Sleep until one of these ends that still run (as far as ``returncode`` knows).

        Args:
            processes: them.
            lines: descriptors that are read once they can be: that ends the sleep too.
        """
        running = {one.pid for one in processes if one.returncode is None}
        for pid in self._fds.keys() - running:
            os.close(self._fds.pop(pid))
        try:
            for pid in running - self._fds.keys():
                self._fds[pid] = os.pidfd_open(pid)
        except (OSError, AttributeError):
            time.sleep(self._interval_s)
            return
        readable([*self._fds.values(), *self._news, *lines], self._interval_s)

    def close(self) -> None:
        """Give back what it holds."""
        while self._fds:
            os.close(self._fds.popitem()[1])
