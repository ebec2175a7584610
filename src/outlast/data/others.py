"""The records of samples of other workers, as far as this worker can tell of them.

A machine that is lost as a whole takes its workers' records (``trail.py``) with it. Under
``outlast.SameBits`` all workers send each other a small message at each step's end. In it each one
says how many samples of its newest stretch it has had by then, and their digest. Together with the
records that some other workers began the attempt with, that is what these workers would have said
themselves.

Guarantees: what is told of a worker at a step is what that worker had counted by that step's end.

What can go wrong: of the places where a lost worker had another sample than the one whose turn it
was, those in this attempt are not listed; the audit then says that the sums do not agree. A worker
is known to few others only: where all of those are lost with it, its record is lost.

Rejected: records that travel to another machine at each step (something more to send).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import msgspec

from outlast.data.trail import Record, Stretch, extended, read_record

NUM_WORDS: Final = 7  # of each worker: step, number of the stretch, samples, 4 x 32 bits of digest
NOTHING: Final = [-1.0] * NUM_WORDS
NUM_KNOWN: Final = 4  # workers, at most, whose records each worker knows
_SHIFTS: Final = (96, 64, 32, 0)
_STEPS_KEPT: Final = 2  # workers are a step apart at most


class Rows(Protocol):
    """What all workers said, a row each; read where it is asked for only."""

    def __getitem__(self, rank: int, /) -> Any:
        """One row, with ``tolist``."""


def known_to(rank: int, world_size: int) -> list[int]:
    """The workers that ``rank`` knows: far apart, so that few of them are on one machine."""
    count = min(world_size - 1, NUM_KNOWN)
    steps = [round(one * world_size / (count + 1)) for one in range(1, count + 1)]
    return [(rank + step) % world_size for step in steps]


def newest_of(trail: Mapping[str, Any]) -> Stretch | None:
    """The stretch in which samples are handed out now, in a record as data."""
    stretches = read_record(trail).stretches if trail else []
    return stretches[-1] if stretches and stretches[-1].number == trail["number"] else None


def words_of(newest: Stretch | None) -> list[float]:
    """What a worker says of itself, of its newest stretch as of the end of the step in progress."""
    if newest is None:
        return NOTHING
    digest = int(newest.digest, 16)
    parts = (digest >> shift & 0xFFFFFFFF for shift in _SHIFTS)
    words = (newest.step + newest.steps, newest.number, newest.samples, *parts)
    return [float(word) for word in words]


class Others:
    """What one worker knows in one attempt.

    Args:
        rank, world_size: this worker's.
        begun_with: worker → the record that it began the attempt with, as data.
    """

    def __init__(
        self, rank: int, world_size: int, begun_with: Mapping[int, Mapping[str, Any]]
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._records = {other: read_record(trail) for other, trail in begun_with.items()}
        self._number = max((int(one.get("number", 0)) for one in begun_with.values()), default=0)
        self._heard: dict[int, tuple[Stretch, Rows]] = {}  # by step
        self._newest: Stretch | None = None

    def heard(self, newest: Stretch | None, rows: Rows) -> None:
        """All workers have said their words of the step in progress.

        Args:
            newest: this worker's stretch, as of its end.
            rows: the words.
        """
        if newest is None or not self._records:
            return
        before = self._newest
        if before is None or newest.number != before.number:
            self._begin(newest)
        self._newest = newest
        step = newest.step + newest.steps
        self._heard[step] = newest, rows
        for old in [one for one in self._heard if one <= step - _STEPS_KEPT or one > step]:
            del self._heard[old]

    def _begin(self, newest: Stretch) -> None:
        """Another stretch: what was said last of the one before is all of it."""
        before = self._newest
        follows = newest.number == (self._number if before is None else before.number) + 1
        if before is not None and follows:
            ended = self._at(newest.step)
            follows = ended.keys() == self._records.keys()
            self._records = ended
        if not follows:  # nobody has said what was in between
            self._records, self._heard = {}, {}

    def at(self, step: int, number: int) -> dict[int, dict[str, Any]]:
        """Worker → its record at the end of ``step``, as data, in stretch ``number``."""
        if step not in self._heard or self._heard[step][0].number != number:
            return {}
        return {
            rank: {"number": number, **msgspec.to_builtins(record)}
            for rank, record in self._at(step).items()
        }

    def _at(self, step: int) -> dict[int, Record]:
        found: dict[int, Record] = {}
        if step not in self._heard:
            return found
        mine, rows = self._heard[step]
        for rank, record in self._records.items():
            said = [int(word) for word in rows[rank].tolist()]
            if said[:2] == [step, mine.number]:
                digest = sum(part << shift for part, shift in zip(said[3:], _SHIFTS, strict=True))
                its = msgspec.structs.replace(mine, samples=said[2], digest=f"{digest:032x}")
                found[rank] = extended(record, its)
        return found


class Noting:
    """Says this worker's words, and hears everybody's.

    Args:
        trail: gives this worker's record, as of the end of the step in progress.

    Attributes:
        others: who hears; None where no machine can be lost beside this one, and nothing is said.
    """

    def __init__(self, trail: Callable[[], Mapping[str, Any]]) -> None:
        self.others: Others | None = None
        self._trail = trail
        self._newest: Stretch | None = None  # that is told of

    def words(self) -> list[float]:
        """Of this worker."""
        self._newest = None if self.others is None else newest_of(self._trail())
        return words_of(self._newest)

    def heard(self, rows: Rows) -> None:
        """Of all workers, which said them when this one did."""
        if self.others is not None:
            self.others.heard(self._newest, rows)
