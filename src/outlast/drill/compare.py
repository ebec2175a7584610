"""Two runs of one script beside each other, step by step, from what their workers recorded.

A run's *history* is, for each rank and step, every time that the step was made. Attempts of a
script without a session count from 1 each time; they are put where they belong by the state that
they found ahead of their first step: it is the one behind some step of the undisturbed run, or
nobody's.

Guarantees: a step counts as equal only if every time it was made says the same as the undisturbed
run in all that was recorded. What differs is told in the order in which a step comes about: its
batch, the random numbers and the state that it begins with, the learning rates, its losses, and
what it leaves behind. So the first thing that differs is the one nearest to the cause.

What a resume begins with is compared with what the step before left, and where a loop begins there
with what that began with, name by name: a checkpoint of a loop's end has what was counted there.

Random numbers that no step draws make no difference. Those of a stream that the script has not
seeded begin elsewhere in each run: the proof of a resume says so; the drill leaves them out, and
where they are used, the losses tell.

What can go wrong: ranks of runs on other numbers of workers are not the same ranks; then only what
is the same for all of them, the state, can be compared, and only where the script makes it so.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from outlast.drill.record import StateFound, StepRecord, WorkerRecord

BATCH: Final = "batch"
RANDOM: Final = "random numbers"
BEFORE: Final = "state before"
RATE: Final = "learning rate"
LOSS: Final = "loss"
STATE: Final = "state"
RANDOM_AFTER: Final = "random numbers behind it"
MISSING: Final = "end"  # the step was never made
_RECORDED: Final = (
    (BATCH, "inputs"),
    (RANDOM, "random_before"),
    (RATE, "rates"),
    (LOSS, "losses"),
    (STATE, "state"),
    (RANDOM_AFTER, "random"),
)
_MADE: Final = {RATE: "optimizers' steps", LOSS: "backward passes"}  # each has one


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
    """The first thing that differs between two runs.

    Attributes:
        step: in which step, from 1.
        rank: whose.
        part: what kind of thing; see the constants above.
        names: of the tensors, values or generators, as far as it has names.
        values: of a number: what it was in the one run and in the other.
    """

    step: int
    rank: int
    part: str
    names: list[str]
    values: tuple[str, str] | None = None

    @property
    def words(self) -> str:
        """In words that go on from "differs"."""
        begin = f"from step {self.step} on: "
        if self.part == MISSING:
            return f"{begin}rank {self.rank} never made it {''.join(self.names)}".rstrip()
        some = ", ".join(self.names[:3])
        more = f" and {len(self.names) - 3} more" if len(self.names) > 3 else ""
        named = f": {some}{more}" if some else ""
        two = ""
        if self.values is not None:
            one, other = map(_readable, self.values)
            two = f", {one} and {other}" if one != other else ", in its last bits"
        what = {
            BEFORE: "what the step begins with",
            STATE: "what the step leaves behind",
        }.get(self.part, f"the {self.part}")
        return f"{begin}{what} on rank {self.rank}{named}{two}"


def _readable(number: str) -> str:
    with contextlib.suppress(ValueError):
        return f"{float.fromhex(number):.6g}"
    return number


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

    def behind(self, rank: int, step: int) -> Sequence[Mapping[str, str]]:
        """What a rank had behind a step, when that ended and when the next one began, if it says.

        Empty where the step was not made.
        """
        if not step:
            found = self.found(rank)
            return [] if found is None else [found.state]
        made = self.made(rank, step)[:1]
        loops = [self._of[one.pid].loops.get(one.record.step) for one in made]
        return [one.record.state for one in made] + [one.changed for one in loops if one]

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
    undisturbed: RunHistory, other: RunHistory, upto: int, *, is_strict: bool = False
) -> StepDifference | None:
    """What differs first in the steps 1 … ``upto``; None if nothing does.

    Args:
        undisturbed: the run that others are compared with.
        other: its attempts are put where they belong.
        upto: the newest step that is compared.
        is_strict: whether a step that the other run has never made is a difference, and so are
            random numbers that are drawn and were not seeded alike. Without it the former is told
            by ``RunHistory.reached``, and the latter by the losses, where they are used.
    """
    streams = {rank: _drawn_from(undisturbed, rank) for rank in undisturbed.ranks}
    if not is_strict:
        streams = {rank: all_ & _seeded(undisturbed, other, rank) for rank, all_ in streams.items()}
    for step in range(1, upto + 1):
        for rank in undisturbed.ranks:
            was = undisturbed.made(rank, step)
            for one in other.made(rank, step) if was else ():
                found = other.found_by(one.pid)
                begun = found if other.first_of(one.pid) is one.record else None
                before = () if begun is None else undisturbed.behind(rank, step - 1)
                differs = _differs(was[0].record, one.record, begun, before, streams[rank])
                if differs is not None:
                    return StepDifference(step, rank, *differs)
            if is_strict and was and not other.made(rank, step):
                return StepDifference(step, rank, MISSING, [])
    return None


def _drawn_from(undisturbed: RunHistory, rank: int) -> set[str]:
    """The generators that steps draw from: others may have any state, and make no difference."""
    seen: dict[str, set[str]] = {}
    for made in undisturbed.steps(rank):
        for name, digest in [*made.record.random_before.items(), *made.record.random.items()]:
            seen.setdefault(name, set()).add(digest)
    return {name for name, digests in seen.items() if len(digests) > 1}


def _seeded(undisturbed: RunHistory, other: RunHistory, rank: int) -> set[str]:
    """The generators that began alike."""
    one, another = undisturbed.found(rank), other.found(rank)
    if one is None or another is None:
        return set()
    return {name for name in one.random if one.random[name] == another.random.get(name)}


def _differs(
    was: StepRecord,
    now: StepRecord,
    found: StateFound | None,
    before: Sequence[Mapping[str, str]],
    streams: set[str],
) -> tuple[str, list[str], tuple[str, str] | None] | None:
    if was.world_size != now.world_size:  # ranks are not the same ranks: see the module
        names = [n for n in was.state if was.state[n] != now.state.get(n, was.state[n])]
        return (STATE, names, None) if names else None
    for part, field in _RECORDED:
        if part == RATE and found is not None and before:
            names = [
                name
                for name, digest in found.state.items()
                if name in before[0] and all(one.get(name) != digest for one in before)
            ]
            if names:
                return BEFORE, names, None
        one, other = getattr(was, field), getattr(now, field)
        if part in (RANDOM, RANDOM_AFTER):
            one, other = ({n: d for n, d in all_.items() if n in streams} for all_ in (one, other))
        if one == other:
            continue
        if isinstance(one, dict):
            return part, [n for n in {**one, **other} if one.get(n) != other.get(n)], None
        if part in _MADE and len(one) != len(other):
            return part, [f"of {len(one)} and of {len(other)} {_MADE[part]}"], None
        pairs = [pair for pair in zip(one, other, strict=False) if pair[0] != pair[1]]
        is_number = part in (RATE, LOSS) and pairs
        values = (_hex(pairs[0][0]), _hex(pairs[0][1])) if is_number else None
        return part, [], values
    return None


def _hex(number: str | float) -> str:
    return number if isinstance(number, str) else number.hex()


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
