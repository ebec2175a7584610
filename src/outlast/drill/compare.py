"""Two runs of one script beside each other, step by step, from what their workers recorded.

A run's *history* is, for each rank and step, every time that the step was made. Attempts of a
script without a session count from 1 each time; they are put where they belong by the state that
they found ahead of their first step: it is the one behind some step of the undisturbed run, or
nobody's.

Guarantees: a step counts as equal only if every time it was made says the same as the undisturbed
run in all that was recorded; what is compared of a step, and in which order, is what a step is made
of: its batches, its random numbers, the learning rates, its losses, the state behind it.

A stream of random numbers that the script has not seeded begins elsewhere in each run. It is left
out; where it is used, the losses tell.

What can go wrong: ranks of runs on other numbers of workers are not the same ranks; then only what
is the same for all of them, the state, can be compared, and only where the script makes it so.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from outlast.drill.record import StateFound, StepRecord, WorkerRecord

PARTS: Final = ("inputs", "rates", "losses", "state", "random")


class MadeStep(NamedTuple):
    """One time that a step was made.

    Attributes:
        step: where it belongs in the undisturbed run; None for nowhere.
        record: what was recorded.
        pid: of the process that made it.
    """

    step: int | None
    record: StepRecord
    pid: int


class StepDifference(NamedTuple):
    """The first thing that differs.

    Attributes:
        step: which step.
        rank: whose.
        part: one of ``PARTS``.
        name: of the tensor or value; "" where the part has no names.
        pid: of the process that made the step that differs.
    """

    step: int
    rank: int
    part: str
    name: str
    pid: int

    @property
    def words(self) -> str:
        """In words that go on from "differs"."""
        what = {"inputs": "the batch", "rates": "the learning rate", "losses": "the loss"}
        name = what.get(self.part, self.name or self.part)
        return f"from step {self.step} on: {name} on rank {self.rank}"


class RunHistory:
    """All that the workers of one run made.

    Args:
        records: of each process.
        undisturbed: the run that attempts without a session are put beside; None for the
            undisturbed run itself.

    Attributes:
        lost: processes that found a state that no step of the undisturbed run had.
    """

    def __init__(
        self, records: Iterable[WorkerRecord], undisturbed: RunHistory | None = None
    ) -> None:
        self._made: dict[int, dict[int, list[MadeStep]]] = defaultdict(lambda: defaultdict(list))
        self._found: dict[int, StateFound] = {}
        self._of: dict[int, WorkerRecord] = {}
        self._shifts: dict[int, int | None] = {}
        self.lost: list[WorkerRecord] = []
        for record in sorted(records, key=lambda one: one.begun.t):
            self._of[record.begun.pid] = record
            shift = _shift(record, undisturbed)
            self._shifts[record.begun.pid] = shift
            if shift is None:
                self.lost.append(record)
            if record.found is not None:
                self._found.setdefault(record.begun.rank, record.found)
            for step in record.steps:
                at = None if shift is None else step.step + shift
                key = step.step if at is None else at
                self._made[step.rank][key].append(MadeStep(at, step, record.begun.pid))

    @property
    def ranks(self) -> list[int]:
        """Those that made steps."""
        return sorted(self._made)

    def made(self, rank: int, step: int) -> list[MadeStep]:
        """Every time that a rank made a step, the first one first."""
        return sorted(self._made.get(rank, {}).get(step, []), key=lambda one: one.record.t)

    def last(self, rank: int) -> int:
        """The newest step that a rank made; 0 for none."""
        return max(self._made.get(rank, {}), default=0)

    def reached(self) -> int:
        """The newest step that all ranks of the undisturbed number made; 0 for none."""
        return min((self.last(rank) for rank in self.ranks), default=0)

    def found(self, rank: int) -> StateFound | None:
        """What a rank's first process found ahead of its first step."""
        return self._found.get(rank)

    def found_by(self, pid: int) -> StateFound | None:
        """What a process found ahead of its first step."""
        return self._of[pid].found

    def began_at(self, pid: int) -> int | None:
        """Completed steps of the job that a process began behind; None for nobody knows."""
        found, shift = self._of[pid].found, self._shifts[pid]
        return None if found is None or shift is None else found.step + shift

    def first_of(self, pid: int) -> StepRecord | None:
        """The first step that a process made."""
        steps = self._of[pid].steps
        return steps[0] if steps else None

    def again(self, upto: int) -> int:
        """Steps up to ``upto`` that some rank made more than once."""
        return sum(
            any(len({one.pid for one in self.made(rank, step)}) > 1 for rank in self.ranks)
            for step in range(1, upto + 1)
        )

    def steps(self, rank: int) -> Iterator[MadeStep]:
        """Every step of a rank, in the order of time."""
        made = [one for times in self._made.get(rank, {}).values() for one in times]
        yield from sorted(made, key=lambda one: one.record.t)


def _shift(record: WorkerRecord, undisturbed: RunHistory | None) -> int | None:
    """What is to be added to a process' step numbers; None for what belongs nowhere."""
    found = record.found
    if found is None or found.is_counted or undisturbed is None:
        return 0
    rank = record.begun.rank
    first = undisturbed.found(rank)
    if first is not None and agrees(found.state, first.state):
        return 0
    for step in range(undisturbed.last(rank), 0, -1):
        for one in undisturbed.made(rank, step):
            if agrees(found.state, one.record.state):
                return step
    return None


def agrees(found: Mapping[str, str], state: Mapping[str, str]) -> bool:
    """Whether what a process found is in a state, as far as it has found something."""
    shared = found.keys() & state.keys()
    return bool(shared) and all(found[name] == state[name] for name in shared)


def first_difference(
    undisturbed: RunHistory, other: RunHistory, upto: int
) -> StepDifference | None:
    """What differs first in the steps 1 … ``upto``; None if nothing does.

    A step that the other run has never made is no difference here: see ``RunHistory.reached``.
    """
    seeded = {rank: _seeded(undisturbed, other, rank) for rank in undisturbed.ranks}
    for step in range(1, upto + 1):
        for rank in undisturbed.ranks:
            was = undisturbed.made(rank, step)
            for one in other.made(rank, step):
                if was and (found := _differ(was[0].record, one, rank, seeded[rank])):
                    return found._replace(step=step)
    return None


def _seeded(undisturbed: RunHistory, other: RunHistory, rank: int) -> set[str]:
    """The streams of random numbers that began alike."""
    one, another = undisturbed.found(rank), other.found(rank)
    if one is None or another is None:
        return set()
    return {name for name in one.random if one.random[name] == another.random.get(name)}


def _differ(was: StepRecord, one: MadeStep, rank: int, seeded: set[str]) -> StepDifference | None:
    record = one.record
    if was.world_size != record.world_size:
        names = [n for n in was.state if was.state[n] != record.state.get(n, was.state[n])]
        return StepDifference(0, rank, "state", names[0], one.pid) if names else None
    for part in PARTS:
        before, after = getattr(was, part), getattr(record, part)
        if before == after:
            continue
        name = ""
        if isinstance(before, dict):
            names = [n for n in [*before, *after] if before.get(n) != after.get(n)]
            if part == "random":
                names = [n for n in names if n in seeded]
            if not names:
                continue
            name = names[0]
        return StepDifference(0, rank, part, name, one.pid)
    return None


class SamplesSeen(NamedTuple):
    """What became of the data.

    Attributes:
        batches: how many the undisturbed run's ranks had.
        lost: of these, how many the other run has not in the steps that count.
        repeated: how many it has more often.
        is_known: whether it can be told: the runs have the same number of workers.
    """

    batches: int
    lost: int
    repeated: int
    is_known: bool


def samples(undisturbed: RunHistory, other: RunHistory, upto: int) -> SamplesSeen:
    """Compare the batches of the steps 1 … ``upto``; of a step made twice, the last time counts."""
    before, after = Counter[str](), Counter[str]()
    is_known = True
    for step in range(1, upto + 1):
        for rank in undisturbed.ranks:
            was, now = undisturbed.made(rank, step)[:1], other.made(rank, step)[-1:]
            if was and now and was[0].record.world_size != now[0].record.world_size:
                is_known = False
            before.update(digest for one in was for digest in one.record.inputs)
            after.update(digest for one in now for digest in one.record.inputs)
    return SamplesSeen(
        batches=before.total(),
        lost=(before - after).total(),
        repeated=(after - before).total(),
        is_known=is_known,
    )
