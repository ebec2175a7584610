"""Explore recordings: every tree that a power loss may leave of them is asked for our promises."""

from __future__ import annotations

import contextlib
import random
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from operations import Recorded
from power_loss import Disk, State
from promises import Broken, Known, Promises

MEMORY = Path("/dev/shm")


class Explored(NamedTuple):
    """What was looked at of one recording.

    Attributes:
        name: of the operation.
        moments: at which the power may fail.
        states: trees that were built.
        news: those among them that were not seen before.
        known: what has been promised at its end.
    """

    name: str
    moments: int
    states: int
    news: int
    known: Known

    def __str__(self) -> str:
        return f"{self.name}: {self.states} states at {self.moments} moments, {self.news} different"


@contextlib.contextmanager
def promises() -> Iterator[Promises]:
    """What looks at trees, in memory where there is such a file system."""
    above = MEMORY if MEMORY.is_dir() else None
    directory = Path(tempfile.mkdtemp(prefix="outlast-explorer-", dir=above))
    try:
        yield Promises(directory / "root")
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def explore(
    recorded: Recorded, looks: Promises, known: Known, rng: random.Random, num_drawn: int
) -> Explored:
    """Look at all moments of a recording, with everything, with nothing and with drawn subsets.

    Args:
        recorded: the recording.
        looks: what looks.
        known: what had been promised before.
        rng: draws subsets of what is not durable.
        num_drawn: so many at each moment.

    Raises:
        Broken: a promise is not kept; says of which operation, after which call, and what was lost.
    """
    disk = Disk(recorded.recording)
    start = known._replace(
        job=recorded.job or known.job, hurt=recorded.hurt, keep=recorded.keep, kept=0
    )
    states = news = 0
    for moment in disk.moments:
        now = start.after(disk.said(moment), disk.durable(moment))
        for state in (*disk.at(moment), *disk.drawn(moment, rng, num_drawn)):
            states += 1
            try:
                news += looks.check(state.tree, now)
            except Broken as error:
                raise Broken(_words(recorded.name, disk, state, error)) from error
    last = len(disk.moments) - 1
    end = start.after(disk.said(last), disk.durable(last))
    return Explored(recorded.name, len(disk.moments), states, news, end)


def explore_all(
    all_recorded: Iterable[Recorded], rng: random.Random, num_drawn: int, known: Known | None = None
) -> list[Explored]:
    """One recording after the other, each on what the one before has left."""
    known, found = known or Known(), []
    with promises() as looks:
        for recorded in all_recorded:
            found.append(explore(recorded, looks, known, rng, num_drawn))
            known = found[-1].known
    return found


def _words(name: str, disk: Disk, state: State, error: Broken) -> str:
    lost = "; ".join(state.lost) or "nothing"
    return (
        f"{error}\n  {name}: the power fails at moment {state.moment} of {disk.moments[-1]}, after "
        f"{disk.call(state.moment)}\n  what is lost: {lost}"
    )
