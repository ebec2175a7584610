"""What was handed out: a record that travels with the checkpoints, and is proved afterwards.

Each worker notes the ids of its samples as its batches are handed out: those that the data set was
asked for, not those that should have come. Two things are kept of them. A digest, the sum of a hash
of (place in the job, id) over all samples: sums of several workers and of several attempts add up
to that of the whole run, whatever its number of workers was, and any other order gives another sum.
And, place by place, where an id was not the one whose turn it was.

Guarantees: some 300 bytes for each stretch (what a loop of an attempt handed out, or a rollback
left out), whatever the number of steps; those older than the last ``KEPT`` become one entry by and
by. Each sample costs some 0.2 µs, in lots, on the training thread.

What can go wrong: an id is the number that a data set was asked for; a data set that gives another
sample for it, or whose content changed, is not seen. Sums of 128 bits find accidents; somebody who
writes checkpoints by hand can make them fit.

Rejected: a digest for each step (8 MB in every checkpoint after a million steps); only comparing as
the run goes (what two workers both leave out, neither of them misses); the ledger (lines of steps
that are rolled back stay in it).

What is known of other workers' records (``Others``): a machine that is lost as a whole takes those
of its workers with it. Under
``outlast.SameBits`` all workers send each other a small message at each step's end. In it each one
says how many samples of its newest stretch it has had by then, and their digest. Together with the
records that some other workers began the attempt with, that is what these workers would have said
themselves.

Guarantees: what is told of a worker at a step is what that worker had counted by that step's end.

What can go wrong: of the places where a lost worker had another sample than the one whose turn it
was, those in this attempt are not listed; the audit then says that the sums do not agree. A worker
is known to few others only: where all of those are lost with it, its record is lost.

Rejected: records that travel to another machine at each step (something more to send).

Where an item has no number, a short word for its content says whether it is the one that it was
(``fingerprint``): equal items have equal words, in every process and every version of Python; other
ones have the same word once in 2^64. Made of bytes, never of ``hash`` or pickle. An item that holds
an object of a kind that is not known here has no word, and is not compared.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import xxhash

from outlast.checkpoint.tensors import bytes_of
from outlast.checkpoint.tree import PlainData
from outlast.data.order import ids_at, scramble

PICKED: Final = 256
PICKED_ITEMS: Final = 32


def fingerprint(item: Any) -> str | None:
    """The word of ``item``: of tensors, arrays, numbers, text, bytes and containers of them."""
    digest = xxhash.xxh3_64()
    try:
        _feed(digest, item)
    except (TypeError, ValueError, RuntimeError, RecursionError):
        return None
    return str(digest.hexdigest())


def chained(before: int, item: Any) -> int:
    """The word, as a number below 2^63, of a sequence that ``item`` comes behind."""
    return continued(before, told_of(item))


def continued(before: int, told: bytes) -> int:
    """The same of an item of which ``told_of`` gave this: for whoever needs it in two words."""
    return int(xxhash.xxh3_64_intdigest(told, seed=before)) >> 1


def told_of(item: Any) -> bytes:
    """What of ``item`` counts in a word.

    For speed: of a large tensor or array some ``PICKED`` elements count, of a long container its
    first ones and its length, of a tensor on a device its shape, of an object of a kind that is not
    known nothing.
    """
    if type(item) is list and all(type(one) is int for one in item):
        return repr(item).encode()  # a sampler's indices
    digest = xxhash.xxh3_64()
    # What was fed before an error counts.
    with contextlib.suppress(TypeError, ValueError, RuntimeError, RecursionError):
        _feed(digest, _picked(item))
    return digest.digest()


def _picked(item: Any) -> Any:
    """A short stand-in for ``item``, of plain values."""
    if isinstance(item, torch.Tensor):
        if item.device.type != "cpu" or item.layout is not torch.strided:
            return ["t", str(item.dtype), list(item.shape)]
        flat = item.detach().reshape(-1) if item.numel() <= PICKED else _some(item.detach())
        return [list(item.shape), flat.contiguous()]
    if isinstance(item, np.ndarray) and item.size > PICKED:
        return [list(item.shape), item[_places(item.shape)]]
    if isinstance(item, Mapping):
        pairs = itertools.islice(item.items(), PICKED_ITEMS)
        return [len(item), [[_picked(key), _picked(value)] for key, value in pairs]]
    if isinstance(item, list | tuple):
        return [len(item), [_picked(one) for one in item[:PICKED_ITEMS]]]
    if isinstance(item, str | bytes):
        return [len(item), item[:PICKED]]
    known = item is None or isinstance(item, bool | int | float | complex | np.ndarray | np.generic)
    return item if known else type(item).__name__


def _some(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[tuple(torch.from_numpy(one) for one in _places(tuple(tensor.shape)))]


@functools.lru_cache(maxsize=64)  # batches are of few shapes
def _places(shape: tuple[int, ...]) -> tuple[np.ndarray[Any, Any], ...]:
    """Evenly spread elements, by their index in each dimension."""
    numbers = np.linspace(0, np.prod(shape) - 1, PICKED).astype(np.int64)
    return np.unravel_index(numbers, shape)


def _feed(digest: Any, item: Any) -> None:
    if isinstance(item, torch.Tensor):
        digest.update(f"t{item.dtype}{tuple(item.shape)}".encode())
        digest.update(f"|u1({item.numel() * item.element_size()},)".encode())
        digest.update(bytes_of(item))
    elif isinstance(item, np.ndarray | np.generic):
        array = np.ascontiguousarray(item)
        if array.dtype.hasobject:
            raise TypeError("an array of objects has no bytes of its own")
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(array.tobytes())
    elif isinstance(item, bytes | bytearray):
        digest.update(b"b%d:" % len(item))
        digest.update(item)
    elif item is None or isinstance(item, str | bool | int | float | complex):
        digest.update(f"{type(item).__name__}{item!r};".encode("utf-8", "surrogatepass"))
    elif isinstance(item, Mapping):
        digest.update(b"d%d:" % len(item))
        for key, value in item.items():
            _feed(digest, key)
            _feed(digest, value)
    elif isinstance(item, list | tuple):
        digest.update(b"l%d:" % len(item))
        for one in item:
            _feed(digest, one)
    else:
        raise TypeError(f"{type(item).__name__} is of no known kind")


KEPT: Final = 64
FINDINGS_MAX: Final = 256  # of each worker
DROPPED_MAX: Final = 256  # runs, likewise
LOT: Final = 1 << 14  # ids that are noted together
BATCHES_TOLD, IDS_TOLD = 16, 1 << 10  # or, where the record is told at each step, so few at most
_LOT: Final = "lot"
_WORD: Final = "word"  # of a drawn order: for the epoch in which a stretch begins
DRAWN: Final = "drawn"  # the kind of an order that a sampler draws
MISSING: Final = -1

Ids = npt.NDArray[np.int64]
_FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)
_MASK: Final = (1 << 64) - 1


class Stretch(msgspec.Struct, kw_only=True):
    """Steps that follow each other in one order, and what the workers counted here got of them.

    Attributes:
        number: of the attempt's stretch, counted over the job.
        step: the job's steps that were complete before it.
        steps: how many it has.
        position: the job's cursor at its beginning, in samples.
        samples_end: the cursor at its end.
        global_batch: samples per step; 0 where several were put together that differ in it.
        world_size: number of workers; 0 where several were put together.
        order: what the ids follow from.
        samples: how many were handed out.
        digest: over those, 128 bits in hexadecimal.
        left_out: samples just before ``position`` that were left out on purpose, after a rollback.
    """

    number: int
    step: int
    steps: int
    position: int
    samples_end: int
    global_batch: int
    world_size: int
    order: dict[str, Any]
    samples: int = 0
    digest: str = "0" * 32
    left_out: int = 0


class Finding(msgspec.Struct, kw_only=True, frozen=True):
    """One place at which another sample came than the one whose turn it was.

    Attributes:
        step: number of the step, from 1.
        position: the place, as the job's cursor.
        got: the id that came; -1 for none.
        is_extra: it came besides the samples of its worker's slice, behind the last of them.
    """

    step: int
    position: int
    got: int
    is_extra: bool = False


class Dropped(msgspec.Struct, kw_only=True, frozen=True):
    """Samples that a late worker had and that are in no sum: the same places in a run of steps.

    Attributes:
        step: number of the first step, from 1.
        last_step: of the last one.
        offset: the first sample's place in each step's batch.
        num: how many in each step, one behind the other.
    """

    step: int
    last_step: int
    offset: int
    num: int

    @property
    def samples(self) -> int:
        """How many in all."""
        return self.num * (self.last_step - self.step + 1)


class SampleRecord(msgspec.Struct, kw_only=True):
    """What one worker's checkpoint says.

    Attributes:
        stretches: oldest first.
        findings: the first ones.
        more: findings that are not listed.
        dropped: the first runs of them.
        more_dropped: samples that were dropped and are not listed.
        unlisted_from: the first step that such samples were dropped in; 0 for none.
    """

    stretches: list[Stretch] = []
    findings: list[Finding] = []
    more: int = 0
    dropped: list[Dropped] = []
    more_dropped: int = 0
    unlisted_from: int = 0

    def drop(self, one: Dropped) -> None:
        """Note samples of a step that is complete."""
        last = self.dropped[-1] if self.dropped else None
        goes_on = (one.step, one.offset, one.num)
        if last is not None and (last.last_step + 1, last.offset, last.num) == goes_on:
            longer = msgspec.structs.replace(last, last_step=one.last_step)
            self.dropped = [*self.dropped[:-1], longer]
        elif len(self.dropped) < DROPPED_MAX:
            self.dropped = [*self.dropped, one]
        else:
            self.more_dropped += one.samples
            self.unlisted_from = self.unlisted_from or one.step


def expected(order: Mapping[str, Any], positions: Ids) -> Ids:
    """The ids whose turn it is at ``positions``.

    Where the order is drawn, they are the positions themselves: the worker has compared what came
    with what was drawn. A stream's ids are numbers: p is the ``p // lanes``-th sample of lane
    ``p % lanes``. In a batch the samples of one lane lie together.
    """
    if order["kind"] == DRAWN:
        return positions
    if order["kind"] == "stream":
        lanes, since = order["lanes"], order["since"]
        per_lane = order["global_batch"] // lanes
        step, row = np.divmod(positions - since, order["global_batch"])
        lane, place = np.divmod(row, per_lane)
        return np.asarray(since + (step * per_lane + place) * lanes + lane, np.int64)
    return ids_at(positions, size=order["size"], seed=order["seed"], shuffle=bool(order["shuffle"]))


def digest(positions: Ids, ids: Ids) -> int:
    """The sum, modulo 2^64 in each half, of a hash of each pair."""
    places, values = positions.astype(np.uint64).ravel(), ids.astype(np.uint64).ravel()
    halves = []
    for salt in (_FIRST, _SECOND):
        mixed = scramble(values * salt + scramble(places + salt))
        halves.append(int(np.add.reduce(mixed, dtype=np.uint64)))
    return halves[0] << 64 | halves[1]


def add(one: int, other: int) -> int:
    """The digest of two sets of samples together."""
    high = ((one >> 64) + (other >> 64)) & _MASK
    return high << 64 | ((one + other) & _MASK)


class _Lot(msgspec.Struct, kw_only=True, frozen=True):
    """Batches of the newest stretch that are not counted yet.

    Attributes:
        noted: the stretch's steps that are counted.
        ids: of each batch, in hexadecimal.
        spans: of each batch, see ``_Had``; an older version has the worker's slice of all batches.
        first, count: that slice.
    """

    noted: int
    ids: list[str]
    spans: list[tuple[int, int, int]] = []
    first: int = 0
    count: int = 0


class _Had(msgspec.Struct):
    """A worker's part of a batch.

    Attributes:
        first: the position of its first sample.
        num: how many samples were its due.
        size: samples of the batch, of all workers.
        ids: those that came.
    """

    first: int
    num: int
    size: int
    ids: Ids
    _told: str = ""

    def told(self) -> str:
        """The ids in hexadecimal, which may be asked for at each step."""
        self._told = self._told or np.asarray(self.ids, "<i8").tobytes().hex()
        return self._told


class Trail:
    """One worker's record, as its batches are handed out."""

    def __init__(self) -> None:
        self._record = SampleRecord()
        self._number = 0
        self._open: Stretch | None = None
        self._first = self._count = 0
        self._noted = 0  # steps of the open stretch that are in its digest
        self._lot: list[_Had] = []
        self._lot_size = 0
        self._dropped: Dropped | None = None  # of the newest batch, whose step may not be complete

    def begin(
        self,
        *,
        step: int,
        position: int,
        global_batch: int,
        world_size: int,
        slice_of_batch: tuple[int, int],
        order: Mapping[str, Any],
        left_out: int = 0,
    ) -> None:
        """Batches follow, one for each step.

        A batch that was handed out and whose step was not completed is forgotten.

        Args:
            step: completed steps of the job.
            position: the job's cursor, in samples.
            global_batch: samples per step; 0 where batches differ.
            world_size: number of workers.
            slice_of_batch: (first, behind the last) of this worker's samples in each batch.
            order: what the ids follow from; see :func:`expected`.
            left_out: samples before ``position`` that are left out on purpose.
        """
        before = self._open
        self._close(step)
        if before is not None and not before.steps:  # nothing has come of it
            left_out += before.left_out
        else:
            self._number += 1
        self._open = Stretch(
            number=self._number,
            step=step,
            steps=0,
            position=position,
            samples_end=position,
            global_batch=global_batch,
            world_size=world_size,
            order=dict(order),
            left_out=left_out,
        )
        self._first, self._count = slice_of_batch[0], slice_of_batch[1] - slice_of_batch[0]
        self._noted = 0

    def took(self, ids: Ids, span: tuple[int, int, int] | None = None) -> None:
        """A batch was handed out, made of the samples ``ids``.

        Args:
            ids: those that came.
            span: position of the worker's first sample, how many are its due, and how many the
                batch has; None where all batches are cut alike.
        """
        stretch = self._open
        assert stretch is not None  # noqa: S101 - a feed begins before it hands out
        alike = stretch.samples_end + self._first, self._count, stretch.global_batch
        had = _Had(*(span or alike), ids)
        self._keep_dropped()
        stretch.steps += 1
        stretch.samples_end += had.size
        if self._lot_size >= LOT:
            self._note()
        self._lot.append(had)
        self._lot_size += max(len(ids), 1)  # there may be fewer shards than workers

    def dropped(self, num: int) -> None:
        """The last ``num`` samples of the newest batch of this worker are not in its step's sum."""
        stretch, newest = self._open, self._lot[-1]
        assert stretch is not None  # noqa: S101 - a batch was handed out
        step = stretch.step + stretch.steps
        end = newest.first + newest.num - (stretch.samples_end - newest.size)
        if self._dropped is not None:  # of another pass over the same batch
            num = max(num, self._dropped.num)
        self._dropped = Dropped(step=step, last_step=step, offset=end - num, num=num)

    def _keep_dropped(self) -> None:
        one, self._dropped = self._dropped, None
        if one is not None:
            self._record.drop(one)

    def cut(self, step: int) -> None:
        """No batch follows, and those handed out after ``step`` completed ones are forgotten."""
        self._close(step)

    def state(self) -> dict[str, Any]:
        """The record as data, for :meth:`restore`: of all batches that were handed out.

        While a step is in progress, that is what the record will be at its end.
        """
        found = self.uncounted()
        return {"number": found["number"], **msgspec.to_builtins(read_record(found))}

    def uncounted(self) -> PlainData:
        """The same at a tenth of the cost: the newest batches as they are, counted by who reads it.

        It takes a quarter of a millisecond to count one batch, or sixteen together.
        """
        if len(self._lot) > BATCHES_TOLD or self._lot_size > IDS_TOLD:
            self._note(but=1)  # the newest one's step may never be completed
        stretches = [*self._record.stretches]
        if self._open is not None and self._open.steps:
            stretches.append(self._open)
        record = msgspec.structs.replace(self._record, stretches=_kept(stretches))
        if self._dropped is not None:
            record.drop(self._dropped)
        # A stretch without a step is of this worker alone: who takes over begins the same one.
        is_begun = self._open is not None and not self._open.steps
        found = {"number": self._number - is_begun, **msgspec.to_builtins(record)}
        if self._lot:
            found[_LOT] = {
                "noted": self._noted,
                "ids": [one.told() for one in self._lot],
                "spans": [[one.first, one.num, one.size] for one in self._lot],
            }
        return PlainData(found)

    def restore(self, state: Mapping[str, Any], others: Iterable[Mapping[str, Any]] = ()) -> None:
        """Go on from what was noted before, and take over the counts of ``others``.

        Args:
            state: any worker's, for the stretches that there were; its counts are not taken.
            others: those whose counts this worker carries on, each carried on by one worker.
        """
        records = [read_record(other) for other in others]
        self._record = merged([_without_counts(read_record(state)), *records])
        self._number = int(state.get("number", 0))
        self._open, self._lot, self._lot_size, self._dropped = None, [], 0, None

    def _close(self, step: int) -> None:
        stretch = self._open
        if self._dropped is not None and self._dropped.step <= step:
            self._keep_dropped()
        self._dropped = None
        while stretch is not None and self._lot and stretch.step + stretch.steps > step:
            stretch.steps -= 1
            stretch.samples_end -= self._lot.pop().size
        self._note()
        if self._open is not None and self._open.steps:
            self._record.stretches = _kept([*self._record.stretches, self._open])
        self._open = None

    def _note(self, but: int = 0) -> None:
        """Count the lot, ``but`` for so many of its newest batches."""
        stretch, cut = self._open, max(len(self._lot) - but, 0)
        lot = self._lot[:cut]
        if stretch is None or not lot:
            return
        self._lot = self._lot[cut:]
        self._lot_size = sum(max(len(had.ids), 1) for had in self._lot)
        counts = np.array([had.num for had in lot])
        ends = np.cumsum(counts)
        firsts = np.array([had.first for had in lot], np.int64)
        positions = np.arange(ends[-1], dtype=np.int64) + np.repeat(firsts - ends + counts, counts)
        turns = expected(stretch.order, positions)
        if all(len(had.ids) == had.num for had in lot):
            got = np.concatenate([had.ids for had in lot])
            self._sum(positions, got)
            places = np.flatnonzero(got != turns)
            wrong = np.unique(np.searchsorted(ends, places, side="right")).tolist()
        else:
            wrong = list(range(len(lot)))
            for had in lot:
                self._sum(had.first + np.arange(len(had.ids), dtype=np.int64), had.ids)
        for row in wrong:
            due = turns[ends[row] - counts[row] : ends[row]]
            step = stretch.step + self._noted + row + 1
            self._compare(step, lot[row].first, due, lot[row].ids)
        self._noted += len(lot)

    def _sum(self, positions: Ids, ids: Ids) -> None:
        stretch = self._open
        assert stretch is not None  # noqa: S101
        stretch.samples += int(ids.size)
        stretch.digest = f"{add(int(stretch.digest, 16), digest(positions, ids)):032x}"

    def _compare(self, step: int, start: int, turns: Ids, got: Ids) -> None:
        for place in range(max(len(turns), len(got))):
            here = int(got[place]) if place < len(got) else MISSING
            is_extra = place >= len(turns)
            if is_extra or here != int(turns[place]):
                finding = Finding(step=step, position=start + place, got=here, is_extra=is_extra)
                if len(self._record.findings) < FINDINGS_MAX:
                    self._record.findings.append(finding)
                else:
                    self._record.more += 1


def read_record(state: Mapping[str, Any]) -> SampleRecord:
    """The record in what :meth:`Trail.state` or :meth:`Trail.uncounted` gave.

    Raises:
        ValueError: it is none.
    """
    lot = state.get(_LOT)
    parts = {key: value for key, value in state.items() if key not in ("number", _LOT)}
    record = msgspec.convert(parts, SampleRecord)
    return record if lot is None else _counted(record, msgspec.convert(lot, _Lot))


def _counted(record: SampleRecord, lot: _Lot) -> SampleRecord:
    """With the batches of the newest stretch that were not counted yet."""
    if not record.stretches:
        raise ValueError("batches without a stretch that they belong to")
    trail = Trail()
    trail._record, trail._open = record, record.stretches[-1]
    trail._noted, newest = lot.noted, trail._open
    first, size = newest.position + lot.first, newest.global_batch
    spans = lot.spans or [
        (first + (lot.noted + number) * size, lot.count, size) for number in range(len(lot.ids))
    ]
    trail._lot = [
        _Had(*span, np.frombuffer(bytes.fromhex(ids), "<i8"))
        for span, ids in zip(spans, lot.ids, strict=True)
    ]
    trail._note()
    return record


def merged(records: Iterable[SampleRecord]) -> SampleRecord:
    """What several workers noted, as if one had."""
    found = SampleRecord()
    by_number: dict[int, Stretch] = {}
    for record in records:
        found.findings = [*found.findings, *record.findings]
        found.more += record.more
        found.dropped = [*found.dropped, *record.dropped]
        found.more_dropped += record.more_dropped
        steps = [one.unlisted_from for one in (found, record) if one.unlisted_from]
        found.unlisted_from = min(steps, default=0)
        for stretch in record.stretches:
            known = by_number.get(stretch.number)
            if known is None:
                by_number[stretch.number] = msgspec.structs.replace(stretch)
            else:
                if known.order != stretch.order:  # these workers had not drawn the same
                    known.order = {**known.order, _WORD: None}
                known.samples += stretch.samples
                known.digest = _added(known.digest, stretch.digest)
    found.stretches = [by_number[number] for number in sorted(by_number)]
    return found


def extended(record: SampleRecord, newest: Stretch) -> SampleRecord:
    """A record of earlier stretches and the newest one."""
    stretches = [one for one in record.stretches if one.number < newest.number]
    return msgspec.structs.replace(record, stretches=_kept([*stretches, newest]))


def _without_counts(record: SampleRecord) -> SampleRecord:
    """Its stretches alone: all workers keep the same list of them, or sums would not meet."""
    return SampleRecord(
        stretches=[
            msgspec.structs.replace(stretch, samples=0, digest="0" * 32)
            for stretch in record.stretches
        ]
    )


def _kept(stretches: list[Stretch]) -> list[Stretch]:
    """The newest; those before them as one, where they follow each other in one order.

    Which are put together depends on their numbers alone, so that all workers do the same.
    """
    newest = stretches[-1].number if stretches else 0
    limit = newest - newest % KEPT - KEPT
    kept: list[Stretch] = []
    for stretch in stretches:
        last = kept[-1] if kept else None
        if (
            last is not None
            and stretch.number <= limit
            and _lasting(last.order) == _lasting(stretch.order)
            and last.step + last.steps == stretch.step
            and last.samples_end == stretch.position
        ):
            kept[-1] = _joined(last, stretch)
        else:
            kept.append(stretch)
    return kept


def _lasting(order: Mapping[str, Any]) -> dict[str, Any]:
    """What is the same in all epochs, if all workers have drawn the same."""
    return {key: value for key, value in order.items() if key != _WORD or value is None}


def _joined(one: Stretch, other: Stretch) -> Stretch:
    same_batch = one.global_batch == other.global_batch
    return msgspec.structs.replace(
        one,
        order=_lasting(one.order),
        steps=one.steps + other.steps,
        samples_end=other.samples_end,
        global_batch=one.global_batch if same_batch else 0,
        world_size=one.world_size if one.world_size == other.world_size else 0,
        samples=one.samples + other.samples,
        digest=_added(one.digest, other.digest),
    )


def _added(one: str, other: str) -> str:
    return f"{add(int(one, 16), int(other, 16)):032x}"


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
        attempt: its number.
        rank, world_size: this worker's.
        begun_with: worker → the record that it began the attempt with, as data.
    """

    def __init__(
        self,
        attempt: int,
        rank: int,
        world_size: int,
        begun_with: Mapping[int, Mapping[str, Any]],
    ) -> None:
        self.attempt = attempt
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

    def _at(self, step: int) -> dict[int, SampleRecord]:
        found: dict[int, SampleRecord] = {}
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
