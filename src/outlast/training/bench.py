"""Rank 0's table of what the ranks have told, from which steps are judged in their order.

It lives in rank 0's training process, under its interpreter's lock, so a thousand ranks must cost
next to nothing: a rank's word is a few arrays, added up by NumPy as they come, and what is kept is
a sum per step, however many ranks there are.

What can go wrong: a rank that tells nothing. The others' words are kept for ``STEPS_MAX`` steps,
and dropped behind that: those steps are judged by what is there.

Rejected: a list of (rank, value) per step: some milliseconds a step at a thousand ranks, and tens
of gigabytes while one of them is silent.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from outlast.attempt.link import Message
from outlast.policy.rollbacks import LossJudge, Sign, StepValue

STEPS_MAX: Final = 1 << 14
WORST_MAX: Final = 64  # ranks that are named


def word_of(rank: int, until: int, values: Sequence[tuple[int, str, float]]) -> Message:
    """What a rank tells: its values (step, name, number) of the steps up to ``until``."""
    told: dict[str, tuple[list[int], list[float]]] = {}
    for step, what, number in values:
        steps, numbers = told.setdefault(what, ([], []))
        steps.append(step)
        numbers.append(number)
    of = {
        what: [
            steps[0] if steps == [*range(steps[0], steps[0] + len(steps))] else steps,
            base64.b64encode(np.array(numbers, dtype=np.float64).tobytes()).decode(),
        ]
        for what, (steps, numbers) in told.items()
    }
    return {"kind": "values", "rank": rank, "until": until, "of": of}


class Bench:
    """The table.

    Args:
        judge: it sees the steps.
        step: completed steps at the attempt's beginning.
        world_size: number of ranks.

    Attributes:
        judge: as given.
        next: the step that is judged next.
    """

    def __init__(self, judge: LossJudge, step: int, world_size: int) -> None:
        self.judge = judge
        self.next = step + 1
        self._until = np.full(world_size, step, dtype=np.int64)
        self._columns: dict[str, _Column] = {}

    def take(self, message: Message) -> None:
        """One rank's word, or that of a commit."""
        if message["kind"] == "committed":
            self.judge.committed(int(message["step"]))
            return
        rank = int(message["rank"])
        self._until[rank] = max(self._until[rank], int(message["until"]))
        for what, (steps, packed) in message["of"].items():
            values = np.frombuffer(binascii.a2b_base64(packed), np.float64)
            column = self._columns.get(what)
            if column is None:
                column = self._columns[what] = _Column()
            if isinstance(steps, int) and self.next <= steps < self.next + STEPS_MAX - len(values):
                column.add_row(rank, steps, values)
            else:
                every = (
                    np.arange(len(values)) + steps if isinstance(steps, int) else np.array(steps)
                )
                fits = (every >= self.next) & (every < self.next + STEPS_MAX)
                column.add(rank, every[fits], values[fits])

    def judge_next(self) -> Sign | bool | None:
        """Judge one step: its sign, or True for a good one; None while not all have told it."""
        if self.next > self._until.min():
            return None
        step, self.next = self.next, self.next + 1
        found = {what: column.take(step) for what, column in self._columns.items()}
        readings = {what: one for what, one in found.items() if one is not None}
        return self.judge.see(step, readings) or True


class _Column:
    """One kind of value: for each step its sum, how many there are, and where it is worst."""

    def __init__(self) -> None:
        self._count = np.zeros(STEPS_MAX, dtype=np.int64)
        self._sum = np.zeros(STEPS_MAX)
        self._largest = np.full(STEPS_MAX, -math.inf)
        self._where = np.zeros(STEPS_MAX, dtype=np.int64)
        self._wrong: dict[int, set[int]] = {}  # step → ranks whose value is no finite number

    def add_row(self, rank: int, step: int, values: Any) -> None:
        """A rank's values of steps in a row from ``step`` on: the usual, and the fastest."""
        first = step % STEPS_MAX
        row = slice(first, first + len(values))
        if row.stop > STEPS_MAX or not np.isfinite(values).all():
            self.add(rank, np.arange(step, step + len(values)), values)
            return
        self._count[row] += 1
        self._sum[row] += values
        self._note_largest(rank, row, values)

    def add(self, rank: int, steps: Any, values: Any) -> None:
        """A rank's values of any steps, of one perhaps more than one."""
        at = steps % STEPS_MAX
        np.add.at(self._count, at, 1)
        with np.errstate(invalid="ignore", over="ignore"):  # infinity and its opposite
            np.add.at(self._sum, at, values)
        is_finite = np.isfinite(values)
        for step in steps[~is_finite].tolist():
            ranks = self._wrong.setdefault(step, set())
            if len(ranks) < WORST_MAX:
                ranks.add(rank)
        for place, value in zip(at[is_finite].tolist(), values[is_finite].tolist(), strict=True):
            self._note_largest(rank, slice(place, place + 1), value)

    def _note_largest(self, rank: int, row: slice, values: Any) -> None:
        is_larger = values > self._largest[row]
        self._where[row][is_larger] = rank
        np.maximum(self._largest[row], values, out=self._largest[row])

    def take(self, step: int) -> StepValue | None:
        """What there is of ``step``, which is then forgotten."""
        at = step % STEPS_MAX
        count = int(self._count[at])
        if not count:
            return None
        wrong = self._wrong.pop(step, None)
        worst = tuple(sorted(wrong)) if wrong else (int(self._where[at]),)
        reading = StepValue(value=float(self._sum[at]) / count, worst=worst)
        self._count[at], self._sum[at], self._largest[at] = 0, 0.0, -math.inf
        return reading
