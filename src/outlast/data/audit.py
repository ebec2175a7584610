"""The proof, afterwards, of which samples went into which steps.

The workers' records (``trail.py``) are put together, the order is worked out again from its seed,
and both are compared: the workers' sums must be those of every sample at its place, with no other
exceptions than the places where a worker noted one.

Guarantees: "proved" is said only of steps whose sums were computed anew and agree; every noted
place is said with its step and what it amounts to: a repeat, a loss, a swap, a sample out of turn.
A deviation that no worker noted is found by the sums, and said with the steps it lies between.

What can go wrong: more places than a record lists; then their number is said. The steps of a loader
that does not tell its ids are in no record, and called not covered.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from outlast.data.order import places_of
from outlast.data.trail import (
    DRAWN,
    MISSING,
    Dropped,
    Finding,
    SampleRecord,
    Stretch,
    add,
    digest,
    expected,
    merged,
)

CHUNK: Final = 1 << 18
IDS_MAX: Final = 256
_OF_BATCHES: Final = frozenset({"global_batch", "since", "word"})  # of an order: what may change
_MASK: Final = (1 << 64) - 1


class SampleFault(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was not as it should be.

    Attributes:
        what: "repeat", "loss", "swap", "out of turn", "stranger", "uncounted" (the sums do not
            agree and no worker noted why), "not covered" or "more" (places that are not listed).
        step: the step, from 1; of several the first.
        last_step: the last step that it concerns.
        sample: the sample's id, or None.
        text: the sentence for a person.
    """

    what: str
    step: int
    last_step: int
    text: str
    sample: int | None = None


class SamplesLeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """Samples that were left out on purpose, after a rollback.

    Attributes:
        step: the step before which they would have come.
        samples: how many.
        ids: which, the first ``IDS_MAX`` of them.
    """

    step: int
    samples: int
    ids: list[int]


class SampleVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """What an audit found.

    Attributes:
        steps: steps that are covered by records.
        samples: samples that were handed out in them.
        proved: every sample came at its place, and at no other.
        faults: why not.
        stretches: what one loop of an attempt handed out or left out, or several together.
        left_out: what was left out on purpose; it is no fault.
        dropped: what was handed out to a worker that was late and is in no sum, as far as it is
            listed; no fault either, where ``workers.late`` is "drop".
        num_dropped: how many samples that are in all.
    """

    steps: int
    samples: int
    proved: bool
    faults: list[SampleFault]
    stretches: list[Stretch]
    left_out: list[SamplesLeftOut] = []
    dropped: list[Dropped] = []
    num_dropped: int = 0


class History:
    """What the workers of a checkpoint noted, together.

    Args:
        records: one of each worker.
        step: completed steps of the job at that checkpoint.
    """

    def __init__(self, records: Iterable[SampleRecord], step: int) -> None:
        self._record = merged(records)
        self._step = step

    @property
    def stretches(self) -> list[Stretch]:
        """Oldest first."""
        return self._record.stretches

    def ids(self, step: int) -> list[int]:
        """The ids that went into ``step``, in the order of its global batch.

        Raises:
            ValueError: no record says.
        """
        for stretch in self.stretches:
            if not stretch.step < step <= stretch.step + stretch.steps:
                continue
            if not stretch.global_batch:
                if stretch.order["kind"] == DRAWN:
                    raise ValueError(f"its batch was drawn ({stretch.order['by']}), not recorded")
                raise ValueError("the size of its batch is not known any more")
            if self._record.more:
                raise ValueError("too many other samples came for all of them to be known")
            size = stretch.global_batch
            first = stretch.position + (step - stretch.step - 1) * size
            dropped = self._dropped_of(step)
            got = [
                [one] for one in expected(stretch.order, np.arange(first, first + size)).tolist()
            ]
            ends: dict[int, int] = {}  # place of a sample too many → last of its worker's slice
            for finding in sorted(self._within(step, step), key=lambda one: one.position):
                place = finding.position - first
                if finding.is_extra:
                    ends[place] = ends.get(place - 1, place - 1)
                    got[ends[place]].append(finding.got)
                else:
                    got[place][:1] = [] if finding.got == MISSING else [finding.got]
            return [one for place, here in enumerate(got) if place not in dropped for one in here]
        raise ValueError("no record covers it")

    def _dropped_of(self, step: int) -> set[int]:
        """Which samples of a step are not in its sum, by their place in the batch."""
        listed, unlisted_from = self._record.dropped, self._record.unlisted_from
        if unlisted_from and step >= unlisted_from:
            raise ValueError("too many samples of late workers were dropped to list all of them")
        return {
            one.offset + place
            for one in listed
            if one.step <= step <= one.last_step
            for place in range(one.num)
        }

    def verdict(self) -> SampleVerdict:
        """Work the order out again and compare."""
        faults = [*self._gaps(), *self._explained()]
        if self._record.more:
            faults.append(self._unlisted())
        for stretch in self.stretches:
            fault = self._unexplained(stretch) or _disagreement(stretch)
            if fault is not None:
                faults.append(fault)
        faults.sort(key=lambda fault: (fault.step, fault.last_step))
        return SampleVerdict(
            steps=sum(stretch.steps for stretch in self.stretches),
            samples=sum(stretch.samples for stretch in self.stretches),
            proved=not faults and bool(self.stretches),
            faults=faults,
            stretches=self.stretches,
            left_out=[_left_out(stretch) for stretch in self.stretches if stretch.left_out],
            dropped=sorted(self._record.dropped, key=lambda one: (one.step, one.offset)),
            num_dropped=sum(one.samples for one in self._record.dropped)
            + self._record.more_dropped,
        )

    def _within(self, first: int, last: int) -> list[Finding]:
        return [one for one in self._record.findings if first <= one.step <= last]

    # --- what no worker could see ----------------------------------------------------------------

    def _gaps(self) -> Iterator[SampleFault]:
        """Steps without a record, and stretches that do not go on where the last one ended.

        An order's first one begins at sample 0.
        """
        reached = 0
        ends: dict[str, int] = {}  # by order: where the newest stretch of it ended
        for stretch in self.stretches:
            if stretch.step != reached:
                yield self._not_covered(reached, stretch.step)
            elif (end := ends.get(_whose(stretch), 0)) != stretch.position - stretch.left_out:
                yield self._jump(stretch, end, is_first=_whose(stretch) not in ends)
            reached = stretch.step + stretch.steps
            ends[_whose(stretch)] = stretch.samples_end
        if reached < self._step:
            yield self._not_covered(reached, self._step)

    def _jump(self, stretch: Stretch, end: int, *, is_first: bool) -> SampleFault:
        step, begins = stretch.step + 1, stretch.position - stretch.left_out
        text = f"step {step} goes on at sample {begins} of the job and what was before it ended "
        text += f"at {end}"
        if is_first:
            text = f"step {step} begins at sample {begins} of the job"
        if begins > end:
            text += f": the {begins - end} before it are in no step that was completed"
        return SampleFault(what="uncounted", step=step, last_step=step, text=text)

    def _not_covered(self, reached: int, until: int) -> SampleFault:
        return SampleFault(
            what="not covered",
            step=reached + 1,
            last_step=until,
            text=f"{_steps(reached + 1, until)}: no record of their samples (another loader, or an "
            "older version)",
        )

    def _unlisted(self) -> SampleFault:
        last = max(finding.step for finding in self._record.findings)
        return SampleFault(
            what="more",
            step=last,
            last_step=self._step,
            text=f"from step {last} on {self._record.more} more samples came where others should "
            "have",
        )

    def _unexplained(self, stretch: Stretch) -> SampleFault | None:
        first, last = stretch.step + 1, stretch.step + stretch.steps
        noted = self._within(first, last)
        num = stretch.samples_end - stretch.position
        num += sum(1 if one.is_extra else -(one.got == MISSING) for one in noted)
        if self._record.more:
            return None  # it is known that they cannot agree
        where = _steps(first, last)
        if num != stretch.samples:
            text = f"{where}: {num} samples should have come, the workers had {stretch.samples}"
        elif _sum(stretch, noted) != int(stretch.digest, 16):
            text = f"{where}: other samples came than the order's, or in another order"
        else:
            return None
        return SampleFault(what="uncounted", step=first, last_step=last, text=text)

    # --- what workers noted ----------------------------------------------------------------------

    def _explained(self) -> Iterator[SampleFault]:
        groups: list[list[Stretch]] = []
        for stretch in self.stretches:
            if groups and groups[-1][-1].order == stretch.order:
                groups[-1].append(stretch)
            else:
                groups.append([stretch])
        for group in groups:
            inside = self._within(group[0].step + 1, group[-1].step + group[-1].steps)
            if inside:
                yield from _Explained(group, inside, is_cut=bool(self._record.more)).faults()


class _Explained:
    """What the places that were noted in stretches of one order amount to.

    Args:
        stretches: oldest first.
        findings: the places.
        is_cut: there are more, behind the last of them.
    """

    def __init__(self, stretches: list[Stretch], findings: list[Finding], *, is_cut: bool) -> None:
        self._stretches = stretches
        self._order = stretches[0].order
        self._findings = sorted(findings, key=lambda one: (one.position, one.is_extra))
        # What is due from here on may still come, or has come where it is not listed.
        self._end = self._findings[-1].position if is_cut else stretches[-1].samples_end
        positions = np.array([one.position for one in self._findings], np.int64)
        turns = expected(self._order, positions).tolist()
        self._turns = [
            None if one.is_extra else turn for one, turn in zip(self._findings, turns, strict=True)
        ]
        got = collections.Counter(one.got for one in findings if one.got != MISSING)
        due = collections.Counter(turn for turn in self._turns if turn is not None)
        self._repeated, self._lost = got - due, due - got

    def faults(self) -> Iterator[SampleFault]:
        """Swaps first: their two samples are neither lost nor repeated."""
        swapped: set[int] = set()
        places = {
            (turn, one.got): index
            for index, (one, turn) in enumerate(zip(self._findings, self._turns, strict=True))
        }
        for index, (one, turn) in enumerate(zip(self._findings, self._turns, strict=True)):
            other = None if turn is None else places.get((one.got, turn))
            if other is not None and other not in swapped and index not in swapped:
                swapped |= {index, other}
                yield self._swap(one, self._findings[other], one.got, turn)
        for index, (one, turn) in enumerate(zip(self._findings, self._turns, strict=True)):
            if index not in swapped:
                yield from self._alone(one, turn)

    def _swap(self, one: Finding, other: Finding, came: int, turn: int | None) -> SampleFault:
        first, last = sorted((one.step, other.step))
        where = f"in step {first}" if first == last else f"of steps {first} and {last}"
        return SampleFault(
            what="swap",
            step=first,
            last_step=last,
            sample=came,
            text=f"samples {turn} and {came} {where} came in each other's place",
        )

    def _alone(self, one: Finding, turn: int | None) -> Iterator[SampleFault]:
        def fault(what: str, sample: int, text: str) -> SampleFault:
            return SampleFault(
                what=what,
                step=one.step,
                last_step=one.step,
                sample=sample,
                text=f"step {one.step}: sample {sample} {text}",
            )

        if one.got != MISSING:
            own = self._turn_of(one)
            if own is None and self._order["kind"] == DRAWN:
                yield fault("out of turn", -2 - one.got, "came, and it was not its turn")
            elif own is None:
                yield fault("stranger", one.got, "came, and there is no such sample")
            elif self._repeated[one.got] > 0 and own < self._end:
                self._repeated[one.got] -= 1
                yield fault("repeat", one.got, f"came once more; its turn is {self._step(own)}")
            else:
                yield fault("out of turn", one.got, f"came out of turn, which is {self._step(own)}")
        if turn is not None and self._lost[turn] > 0 and one.position < self._end:
            self._lost[turn] -= 1
            yield fault("loss", turn, "did not come, and it was its turn")

    def _turn_of(self, one: Finding) -> int | None:
        """The place of the sample that came, in the epoch in which it came; None if it has none."""
        order = self._order
        if order["kind"] == DRAWN:
            return one.got if one.got >= 0 else None
        if order["kind"] == "stream":
            return _place_in_stream(order, one.got) if one.got >= 0 else None
        size = order["size"]
        if not 0 <= one.got < size:
            return None
        epoch, place = one.position // size, one.got
        if order["shuffle"]:
            ids = np.array([one.got], np.int64)
            place = int(places_of(ids, size=size, seed=order["seed"], epoch=epoch)[0])
        return int(epoch * size + place)

    def _step(self, position: int) -> str:
        """The step in which a place is, in words."""
        for stretch in self._stretches:
            if stretch.position <= position < stretch.samples_end:
                if not stretch.global_batch:
                    return _steps(stretch.step + 1, stretch.step + stretch.steps)
                inside = (position - stretch.position) // stretch.global_batch
                return f"step {stretch.step + 1 + inside}"
        return "later" if position >= self._stretches[-1].samples_end else "earlier"


def _disagreement(stretch: Stretch) -> SampleFault | None:
    """Workers that had not drawn the same order: samples came twice, and others not at all."""
    if stretch.order.get("word", "") is not None:
        return None
    first, last = stretch.step + 1, stretch.step + stretch.steps
    text = f"{_steps(first, last)}: {stretch.order['by']} gave the workers different orders"
    return SampleFault(what="uncounted", step=first, last_step=last, text=text)


def _left_out(stretch: Stretch) -> SamplesLeftOut:
    shown = min(stretch.left_out, IDS_MAX)
    first = stretch.position - stretch.left_out
    ids = expected(stretch.order, np.arange(first, first + shown, dtype=np.int64)).tolist()
    return SamplesLeftOut(step=stretch.step + 1, samples=stretch.left_out, ids=ids)


def _steps(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _place_in_stream(order: Mapping[str, Any], number: int) -> int:
    """Where sample ``number`` of the job comes: :func:`expected` of a stream backwards."""
    lanes, since = order["lanes"], order["since"]
    per_lane = order["global_batch"] // lanes
    inside, lane = divmod(number - since, lanes)
    step, place = divmod(inside, per_lane)
    return int(since + step * order["global_batch"] + lane * per_lane + place)


def _less(one: int, other: int) -> int:
    high = ((one >> 64) - (other >> 64)) & _MASK
    return high << 64 | ((one - other) & _MASK)


def _sum(stretch: Stretch, noted: Sequence[Finding]) -> int:
    """The digest of what must have come, given what was noted."""
    total = 0
    for start in range(stretch.position, stretch.samples_end, CHUNK):
        positions = np.arange(start, min(start + CHUNK, stretch.samples_end), dtype=np.int64)
        total = add(total, digest(positions, expected(stretch.order, positions)))
    for one in noted:
        place = np.array([one.position], np.int64)
        if not one.is_extra:
            total = _less(total, digest(place, expected(stretch.order, place)))
        if one.got != MISSING:
            total = add(total, digest(place, np.array([one.got], np.int64)))
    return total


def _whose(stretch: Stretch) -> str:
    """What all stretches of one loader have in common, whatever the size of its batches."""
    fixed = {key: value for key, value in stretch.order.items() if key not in _OF_BATCHES}
    return json.dumps(fixed, sort_keys=True)
