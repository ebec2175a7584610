"""Lanes: a stream cut into parts that are read on their own, whoever reads them.

A lane reads its share of the shards one after the other, shuffles what it reads in blocks, packs it
if that is asked for, and gives one sample after the other. Nothing in it depends on other lanes or
on the number of workers: a worker holds some of the lanes, and takes the same number of samples
from each of them for each step.

Guarantees: a lane that goes on from its point gives the samples that it would have given, with the
same random numbers. The point is a handful of numbers: where the block begins that holds the next
unit to be handed out, and how many of its units are gone.

What it costs: going on reads at most one block (``buffer`` items) again, after going to where it
begins in its shard: by the shard's own state if it has one, by its ``skip(n)``, or by reading over
the items before.

What can go wrong: a shard that gives other items the second time (refused, if it is the block's
first item, or if there are fewer of them); one that raises (``ShardError``
says which and where; the point before it stands); sizes that are not the shards' own (refused as
soon as it is seen).

Rejected: a buffer in which each new item takes a random one's place, as many libraries have. What
is in it comes from all over the past, so that either its content goes into every checkpoint or the
past is read again. Blocks of the same size hold as many items and are known from where they begin.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import torch

from outlast.data.order import mix64, permute, sample_seed
from outlast.data.random_state import seed_all
from outlast.data.trail import fingerprint
from outlast.errors import ConfigError, ShardError

EMPTY_PASSES_MAX: Final = 100
UNSHUFFLED_BLOCK: Final = 64  # items between two points where nothing is shuffled

_SHARD_TAG, _BLOCK_TAG, _ITEM_TAG = 0x54A2D, 0xB10C, 0x17E4
_END: Final = object()


class ShardSpan(NamedTuple):
    """What a lane reads of one shard: units ``first`` to ``stop``, to its end if that is None."""

    shard: int
    first: int
    stop: int | None


class Point(msgspec.Struct, frozen=True):
    """Where a lane stands, in a handful of numbers.

    Attributes:
        number: samples that it has given.
        epoch: the pass in which its block begins.
        span: which of its spans in that pass.
        items: items of that shard before the block.
        units: units of that shard before the block.
        block: number of the block in its pass.
        used: units of the block that are handed out.
        inner: the shard's own state where the block begins, if it has one.
        first: the fingerprint of the first item in the block, before it is shuffled.
    """

    number: int = 0
    epoch: int = 0
    span: int = 0
    items: int = 0
    units: int = 0
    block: int = 0
    used: int = 0
    inner: Any = None
    first: str | None = None


class LaneSource(NamedTuple):
    """What all lanes of a stream are cut from; what a loader process holds.

    Attributes:
        open_shard: number of a shard → its items, from the first on.
        num_shards: how many there are.
        lanes: number of lanes.
        sizes: units in each shard; None if they are not known.
        seed: of all that is random.
        shuffle: whether each pass has its own order of shards.
        buffer: items that are shuffled together; 1 for none.
        pack: units in a sample; None where an item is a sample.
        transform: from what was read to a sample.
    """

    open_shard: Callable[[int], Any]
    num_shards: int
    lanes: int
    sizes: tuple[int, ...] | None
    seed: int
    shuffle: bool
    buffer: int
    pack: int | None
    transform: Callable[[Any], Any] | None

    def order(self, epoch: int) -> list[int]:
        """The shards as they follow each other in a pass."""
        numbers = np.arange(self.num_shards)
        if self.shuffle:
            seed = mix64(_SHARD_TAG, self.seed)
            numbers = permute(numbers, size=self.num_shards, seed=seed, epoch=epoch)
        found: list[int] = numbers.tolist()
        return found

    def spans(self, lane: int, epoch: int) -> list[ShardSpan]:
        """What ``lane`` reads in a pass, in order.

        Where sizes are known, all units of a pass in a row are cut so that sample number p of the
        job is always that of lane ``p % lanes``: an epoch ends at the same sample in all lanes.
        Where they are not, a lane has every ``lanes``-th shard, and its passes are its own.
        """
        order = self.order(epoch)
        if self.sizes is None:
            return [ShardSpan(shard, 0, None) for shard in order[lane :: self.lanes]]
        total = sum(self.sizes)
        first, stop = (
            self._before(one, total * (epoch + 1)) - self._before(one, total * epoch)
            for one in (lane, lane + 1)
        )
        spans, start = [], 0
        for shard in order:
            size = self.sizes[shard]
            low, high = max(first - start, 0), min(stop - start, size)
            if low < high:
                spans.append(ShardSpan(shard, low, high))
            start += size
        return spans

    def _before(self, lane: int, units: int) -> int:
        """How many of the job's first ``units`` units are those of lanes before ``lane``."""
        size = self.pack or 1
        samples, left = divmod(units, size)
        rounds, more = divmod(samples, self.lanes)
        # What is left over begins the sample that is next, which is that of lane ``more``.
        return size * (lane * rounds + min(lane, more)) + (left if more < lane else 0)


class Lane:
    """One lane, from a point on.

    Attributes:
        point: where it stands after the samples given so far.
    """

    def __init__(self, source: LaneSource, lane: int, point: Point) -> None:
        self.point = point
        self._source = source
        self._lane = lane
        self._reader = _LaneReader(source, lane, point)
        self._block = _ShuffledBlock(self._items(), point)
        if point.used and not self._block.is_empty() and point.first is not None:
            self._reader.expect(point.first)
        self._block.drop(point.used)

    def take(self) -> tuple[int, Any]:
        """The next sample, and its number in the job.

        Raises:
            ShardError: a shard raised.
            ConfigError: sizes do not hold, or there is nothing to read.
        """
        sample = self._packed(self._source.pack) if self._source.pack else self._single()
        point = self.point
        block = self._block
        self.point = msgspec.structs.replace(
            block.point, number=point.number + 1, used=block.used, first=self._reader.first
        )
        number = point.number * self._source.lanes + self._lane
        if self._source.transform is not None:
            seed_all(sample_seed(number, seed=self._source.seed))
            sample = self._source.transform(sample)
        return number, sample

    def _single(self) -> Any:
        if self._block.is_empty():
            self._open_block()
        return self._block.take(1)[0]

    def _packed(self, size: int) -> torch.Tensor:
        parts: list[torch.Tensor] = []
        missing = size
        while missing:
            if self._block.is_empty():
                self._open_block()
            parts.append(self._block.take(missing))
            missing -= len(parts[-1])
        return torch.cat(parts)

    def _open_block(self) -> None:
        """Go to the next block that is not empty; passes follow each other."""
        num_empty = 0
        while True:
            point = self._reader.point()
            block = _ShuffledBlock(self._items(), point)
            if not block.is_empty():
                self._block = block
                return
            num_empty += 1
            if num_empty > EMPTY_PASSES_MAX and self._source.sizes is None:
                raise ConfigError(
                    f"lane {self._lane} of {self._source.lanes} found no item in "
                    f"{EMPTY_PASSES_MAX} passes over its shards; they are empty. Leave empty "
                    "shards out, or set fewer lanes"
                )
            self._reader.next_pass()

    def _items(self) -> Iterator[Any]:
        """The items of the next block, in the order in which they are handed out."""
        source, reader = self._source, self._reader
        if source.buffer == 1:
            return reader.items(UNSHUFFLED_BLOCK)
        return self._shuffled(reader.block, reader.epoch)

    def _shuffled(self, number: int, epoch: int) -> Iterator[Any]:
        items = list(self._reader.items(self._source.buffer))
        seed = mix64(_BLOCK_TAG, self._source.seed, self._lane, number)
        if items:
            turns = permute(np.arange(len(items)), size=len(items), seed=seed, epoch=epoch)
            yield from (items[turn] for turn in turns.tolist())


class _ShuffledBlock:
    """Items in the order in which they are handed out, units of them at a time."""

    def __init__(self, items: Iterator[Any], point: Point) -> None:
        self.point = point
        self.used = 0
        self._items = items
        self._current: Any = None
        self._inside = 0

    def is_empty(self) -> bool:
        """Whether all of it is handed out, or it never had any."""
        if self._current is None:
            self._current, self._inside = next(self._items, None), 0
        return self._current is None

    def take(self, most: int) -> Any:
        """Up to ``most`` units of the next item; call it only where there is one."""
        item = self._current
        units = item.values[self._inside : self._inside + most]
        self._inside += len(units)
        self.used += len(units)
        if self._inside >= len(item.values):
            self._current = None
        return units

    def drop(self, num_units: int) -> None:
        """Units that were handed out before.

        Raises:
            ConfigError: there are not that many.
        """
        while self.used < num_units:
            if not self.is_empty():
                self.take(num_units - self.used)
            else:
                raise ConfigError(
                    f"a shard gave {self.used} units where the checkpoint had used {num_units}: "
                    "the data have changed. Give them as they were, or start a new job from the "
                    "checkpoint's model"
                )


class _Item(NamedTuple):
    """What is handed out of an item, unit by unit: numbers to be packed, or one whole thing."""

    values: Any


class _LaneReader:
    """The items of a lane, span by span.

    Attributes:
        epoch: the pass that it is in.
        block: number of the next block in it.
        first: the fingerprint of the first item in the block that is being read.
    """

    def __init__(self, source: LaneSource, lane: int, point: Point) -> None:
        self.epoch = point.epoch
        self.block = point.block
        self.first: str | None = None
        self._source = source
        self._lane = lane
        self._spans = source.spans(lane, point.epoch)
        self._span = point.span
        self._items = point.items
        self._units = point.units
        self._inner = point.inner
        self._holder: Any = None
        self._iterator: Iterator[Any] | None = None

    def point(self) -> Point:
        """Where the next block begins."""
        inner = self._inner
        if self._iterator is not None and self._holder is not None:
            inner = copy.deepcopy(self._holder.state_dict())
        return Point(
            epoch=self.epoch,
            span=self._span,
            items=self._items,
            units=self._units,
            block=self.block,
            inner=inner,
        )

    def next_pass(self) -> None:
        """Begin the next pass, from its first span."""
        self.epoch += 1
        self.block = self._span = 0
        self._spans = self._source.spans(self._lane, self.epoch)
        self._rewind()

    def items(self, most: int) -> Iterator[_Item]:
        """Up to ``most`` items, which are one block; none at the pass's end."""
        self.block += 1
        self.first = None
        return self._read_on(most)

    def expect(self, first: str) -> None:
        """See that the block begins with the item that it began with when it was saved.

        Raises:
            ConfigError: it does not.
        """
        if self.first is not None and self.first != first:
            raise ConfigError(
                f"lane {self._lane} goes on in pass {self.epoch} with another item than the one "
                "that was there when the checkpoint was written: the data have changed, or what "
                "opens a shard does not come to the same place by its state_dict or skip(n). "
                "Samples would be repeated or left out. Give the data as they were"
            )

    def _read_on(self, most: int) -> Iterator[_Item]:
        is_first = True
        while most and self._span < len(self._spans):
            item = self._next()
            if item is _END:
                self._span += 1
                self._rewind()
            elif item is not None:
                most -= 1
                if is_first:
                    self.first, is_first = fingerprint(item.values), False
                yield item

    def _rewind(self) -> None:
        self._items = self._units = 0
        self._inner = self._holder = self._iterator = None

    def _next(self) -> Any:
        """What the span has of the shard's next item: maybe nothing (None), or its end."""
        span = self._spans[self._span]
        if span.stop is not None and self._units >= span.stop:
            self._check_end(span)
            return _END
        if self._iterator is None:
            self._open(span)
        item = self._read(span)
        if item is _END:
            if span.stop is not None:
                raise self._other_size(span, f"ends after {self._units}")
            return _END
        start = self._units
        self._items += 1
        if self._source.pack is None:
            self._units += 1
            return _Item((item,))
        values = _as_units(item, span.shard)
        self._units += len(values)
        low = max(span.first - start, 0)
        high = len(values) if span.stop is None else min(span.stop - start, len(values))
        return _Item(values[low:high]) if low < high else None

    def _open(self, span: ShardSpan) -> None:
        """Go to the item that is next."""
        if self._source.pack is None and not self._items:
            self._items = self._units = span.first  # an item is a unit
        self._seed(span, 0)
        with self._blamed(span):
            opened = self._source.open_shard(span.shard)
            self._iterator, rest = iter(opened), self._items
            holders = [one for one in (self._iterator, opened) if _has_state(one)]
            self._holder = holders[0] if holders else None
            # What is skipped may have a state of another form than what is not.
            if self._holder is None and rest and callable(getattr(opened, "skip", None)):
                self._iterator, rest = iter(opened.skip(rest)), 0
            if self._inner is not None:
                if self._holder is None:
                    raise ConfigError(
                        f"shard {span.shard} had a state of its own when the checkpoint was "
                        "written, and has none now; open it as it was opened then"
                    )
                self._holder.load_state_dict(self._inner)
                if self._holder is opened:
                    self._iterator = iter(opened)
                self._inner, rest = None, 0
        for number in range(rest):
            self._seed(span, number)
            with self._blamed(span):
                if next(self._iterator, _END) is _END:
                    raise self._other_size(span, f"ends after {number} items, of {rest} consumed")

    def _read(self, span: ShardSpan) -> Any:
        assert self._iterator is not None  # noqa: S101 - opened before
        self._seed(span, self._items)
        with self._blamed(span):
            return next(self._iterator, _END)

    def _check_end(self, span: ShardSpan) -> None:
        """A shard that is read to its end has no more than its size says."""
        sizes = self._source.sizes
        if sizes is None or span.stop != sizes[span.shard] or self._iterator is None:
            return
        is_over = self._units == span.stop
        while is_over and (item := self._read(span)) is not _END:
            # Items without a unit may follow: they are in no size.
            is_over = self._source.pack is not None and not len(_as_units(item, span.shard))
        if not is_over:
            raise self._other_size(span, "goes on behind them")

    def _seed(self, span: ShardSpan, item: int) -> None:
        seed_all(mix64(_ITEM_TAG, self._source.seed, self.epoch, span.shard, item))

    def _blamed(self, span: ShardSpan) -> _Blamed:
        return _Blamed(span.shard, self._items, self.epoch)

    def _other_size(self, span: ShardSpan, what: str) -> ConfigError:
        sizes = self._source.sizes
        said = f"sizes says {sizes[span.shard]}" if sizes else "it had them before"
        return ConfigError(
            f"shard {span.shard} {what}, and {said}: samples would be repeated or left out. Give "
            "the sizes and the data as they are"
        )


class _Blamed:
    """What goes wrong in the user's shard is said with its place."""

    def __init__(self, shard: int, items: int, epoch: int) -> None:
        self._where = shard, items, epoch

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: Any, error: BaseException | None, _traceback: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, ConfigError):
            shard, items, epoch = self._where
            raise ShardError(
                f"shard {shard} raised {type(error).__name__} after {items} items of pass {epoch}: "
                f"{error}. No sample is lost: mend it and start the same command again"
            ) from error


def _has_state(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


def _as_units(item: Any, shard: int) -> torch.Tensor:
    try:
        values = torch.as_tensor(item)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"pack needs items that are rows of numbers, and shard {shard} gave a "
            f"{type(item).__name__} ({error}); tokenize before packing"
        ) from None
    if values.dim() != 1:
        raise ConfigError(
            f"pack needs items of one dimension, and shard {shard} gave one of shape "
            f"{tuple(values.shape)}; flatten it before"
        )
    return values
