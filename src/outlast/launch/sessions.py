"""What the agent of rank 0 sees of the sessions, for the other machines to know.

Two things: whether the data are tied to the number of workers (a session says so through the
attempt's store), and how long workers need to stop at a step's end (their beats, and the ledger's
saves). Looking costs two questions to a store in this process, five times a second.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from outlast.attempt.beat import read_beat
from outlast.attempt.link import DATA_KEY, PREFIX, TIED
from outlast.launch.machines import Machines
from outlast.policy.hang import StepTimes

LOOK_S: Final = 0.2


class Sessions:
    """The sessions of this machine's workers, in one attempt after the other.

    Args:
        machines: to be told.
        beats: directory of this machine's workers' beats.
        saving_s: how long a save takes, when it goes slowly; None before the first.
    """

    def __init__(
        self, machines: Machines, beats: Path, saving_s: Callable[[], float | None]
    ) -> None:
        self._machines = machines
        self._beats = beats
        self._saving_s = saving_s
        self._steps = StepTimes()
        self._are_tied: bool | None = None
        self._looked_s = 0.0

    def begin(self) -> None:
        """Another attempt starts."""
        self._steps.begin()
        self._are_tied = None

    def look(self, group: Any) -> None:
        """At each look at the workers ``group``; only rank 0's machine has something to say."""
        now_s = time.monotonic()
        if group.group_rank or not self._machines.are_many or now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        beat = read_beat(self._beats, 0)
        if beat is not None:
            self._steps.seen(beat.step, now_s)
        key = f"{PREFIX}/{DATA_KEY}"
        with contextlib.suppress(RuntimeError):  # the store is gone: so is the attempt
            if group.store.check([key]):
                are_tied = group.store.get(key) == TIED
                if are_tied != self._are_tied:
                    self._are_tied = are_tied
                    self._machines.data_are_tied(are_tied)

    def tell_needs(self) -> None:
        """Workers are asked to stop at a step's end: how long that may take, once it is known."""
        longest_s, saving_s = self._steps.longest_s(time.monotonic()), self._saving_s()
        if longest_s is not None and saving_s is not None:
            self._machines.need(longest_s + saving_s)
