"""A data loader whose batches do not depend on how many machines are there.

Guarantees: a step consumes the same global batch at any number of workers and at any number of
loader processes; random augmentation included, because each sample has its own random numbers,
seeded from (seed, position). In an epoch every sample comes exactly once, none is dropped: epochs
follow each other without a gap, and a batch may span two.

What can go wrong: a data set whose size or order of samples changes under the same seed (the size
is checked when a state is loaded, the order cannot be); randomness from generators that a data
set keeps for itself; a ``collate_fn`` that draws random numbers is exact only at the same number
of workers, since each worker collates its own slice.

The order may be drawn by a sampler or by weights, and batches may be of variable length
(``drawn.py``). All of that holds then too, but that an epoch has what the sampler gives in it, and
that a batch sampler's batches do not reach from one epoch into the next.

Rejected: a batch size per worker (the global batch would change with the number of machines, and
with it the training).
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from outlast.data import shield
from outlast.data.drawn import (
    DrawnOrder,
    DrawnPlace,
    Portion,
    checked_lengths,
    checked_weights,
    drawn_by_sampler,
    drawn_by_seed,
    drawn_by_weights,
)
from outlast.data.generators import GLOBAL, GeneratorWatch
from outlast.data.order import (
    Shards,
    Shares,
    held,
    mix64,
    ranges_of,
    sample_ids,
    sample_seed,
)
from outlast.data.random_state import preserved, seed_all
from outlast.data.usage import answered, checked_size, only_one
from outlast.errors import ConfigError

KIND: Final = "outlast"
FORM: Final = "outlast.data.Loader(dataset, global_batch=B)"

COLLATE_TAG = 0xC011A7E
_numbers: Final = itertools.count(1)  # of this process' loaders
_LIMIT = 1 << 63


class _Running(NamedTuple):
    """An iterator over batches, and this worker's portions of those that it has yet to give."""

    batches: Any
    portions: Iterator[Portion]
    place: DrawnPlace
    worker: tuple[int, int]


class Loader:
    """Endless batches of a map-style data set, the same at any number of workers.

    Of each global batch of ``B`` samples, worker ``r`` of ``W`` gets those from ``B*r//W`` up to
    ``B*(r+1)//W``; slices differ in length by one at most. A session sets the worker by itself;
    without one, see :meth:`set_worker`. How large a step is, is said by one of ``global_batch``,
    ``batch_sampler`` and ``global_tokens``.

    While sample number ``p`` of the job is fetched, Python's, NumPy's global and torch's default
    CPU generator are seeded from ``(seed, p)``; the training process's own streams are not
    touched by that.

    Attributes:
        handed: the ids of the samples in the batch handed out last, in its order: those that
            the data set was asked for, told by whoever asked it.
        portion: this worker's part of that batch.
        waited_s: how long that batch was waited for, in seconds.
        number: its own among this process' loaders, from 1.
        loaded_to: the furthest place in the job's data that batches were asked for up to.

    Args:
        dataset: has ``__len__`` and ``__getitem__``; samples are fetched one by one with the
            latter (``__getitems__`` would share one random stream among several).
        global_batch: samples per step over all workers.
        seed: of the order and of each sample's randomness, in ``range(2**63)``.
        shuffle: a new order each epoch, the default; without it, the data set's own.
        sampler: gives an epoch's indices, of all workers together: a torch sampler, or anything
            that can be iterated in each epoch.
        batch_sampler: gives an epoch's batches of indices, each of them one step of all workers.
        weights: of each sample; an epoch has as many draws as samples, with replacement.
        lengths: of each sample, in tokens or the like.
        global_tokens: a step takes samples in their order while they have so many tokens at most;
            workers get about as many tokens each. At least the longest sample's for each worker.
        shards: cut each global batch into this many parts of equal size, whatever the number of
            workers, and hand out the whole parts that this worker holds, as
            :class:`~outlast.data.order.Shards`; for ``outlast.SameBits``.
        num_workers: loader processes, as in torch's DataLoader; so are the rest.
        collate_fn: from a list of samples to a batch; torch's default if None.
        pin_memory: copy batches to pinned memory.
        prefetch_factor: batches that each process loads ahead.
        multiprocessing_context: how processes are started.
        worker_init_fn: called in each process with its number. Random numbers are seeded for each
            sample behind it.
        persistent_workers: processes, and what they have loaded ahead, live on between two loops.
        timeout: seconds that a batch may take to come from the processes; 0 for any time.

    Raises:
        ConfigError: a data set that is empty or not map-style, or a setting out of range.
    """

    @answered("outlast.data.Loader", FORM)
    def __init__(
        self,
        dataset: Any,
        *,
        global_batch: int | None = None,
        seed: int = 0,
        shuffle: bool | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        weights: Sequence[float] | None = None,
        lengths: Sequence[int] | None = None,
        global_tokens: int | None = None,
        shards: int | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        multiprocessing_context: Any = None,
        worker_init_fn: Callable[[int], None] | None = None,
        persistent_workers: bool = False,
        timeout: float = 0,
    ) -> None:
        self.dataset = dataset
        self.size = checked_size(dataset)
        self.seed = checked_int("seed", seed, 0)
        self.shuffle = shuffle is not False
        sizes = {"global_batch": global_batch, "batch_sampler": batch_sampler}
        if only_one({**sizes, "global_tokens": global_tokens}, "how large a step is") is None:
            raise ConfigError(
                f"outlast.data.Loader is not told how large a step is. Write {FORM}, where B is "
                "the number of samples of all workers together"
            )
        orders = {"sampler": sampler, "batch_sampler": batch_sampler, "weights": weights}
        only_one({"shuffle": shuffle, **orders}, "which order samples have")
        # 0 where batches are drawn, and differ.
        self.global_batch = 0
        if global_batch is not None:
            self.global_batch = checked_int("global_batch", global_batch, 1)
        if (lengths is None) is not (global_tokens is None):
            raise ConfigError(
                "lengths= and global_tokens= belong together: outlast.data.Loader(dataset, "
                "lengths=[len(one) for one in dataset], global_tokens=N)"
            )
        self._drawn = self._drawn_order(sampler, batch_sampler, weights)
        if self._drawn is not None and lengths is not None and global_tokens is not None:
            tokens = checked_int("global_tokens", global_tokens, 1)
            self._drawn.cut_by(checked_lengths(lengths, self.size), tokens)
        self.shards = None if shards is None else _checked_shards(shards, self.global_batch)
        self.num_workers = num_workers
        self.collate_fn = collate_fn or torch.utils.data.default_collate
        self.pin_memory = pin_memory
        self.prefetch_factor = prefetch_factor
        self.multiprocessing_context = multiprocessing_context
        self.worker_init_fn = worker_init_fn
        self.persistent_workers = persistent_workers
        self.timeout = timeout
        self.handed: NDArray[np.int64] = np.empty(0, np.int64)
        self.portion: Portion | None = None
        self.rank = 0
        self.world_size = 1
        self.waited_s = 0.0
        self.number = next(_numbers)
        self.loaded_to = 0
        self._shares = Shares(self.shards or 1, 1)
        self._place = DrawnPlace()
        self._watch: GeneratorWatch | None = None
        self._resting: _Running | None = None  # between two loops, where its processes persist

    def _drawn_order(self, sampler: Any, batch_sampler: Any, weights: Any) -> DrawnOrder | None:
        """Who has the order; None where it follows from a position by itself."""
        size, seed = self.size, self.seed
        if weights is not None:
            numbers = checked_weights(weights, size)
            return DrawnOrder(drawn_by_weights(numbers, seed), name="weights", size=size)
        given = batch_sampler if sampler is None else sampler
        if given is not None:
            draw = drawn_by_sampler(given, seed)
            name, is_batched = type(given).__name__, sampler is None
            return DrawnOrder(draw, name=name, size=size, is_batched=is_batched)
        if not self.global_batch:
            draw = drawn_by_seed(size, seed, shuffle=self.shuffle)
            return DrawnOrder(draw, name="lengths", size=size)
        return None

    def __len__(self) -> int:
        """Steps of an epoch, for a schedule; rounded up, as one may reach into the next.

        Raises:
            TypeError: they follow from what draws the order.
        """
        if self._drawn is not None:
            raise TypeError(
                "how many steps an epoch has follows from what draws its order: end the loop by "
                "until= in steps(), and give a schedule that number"
            )
        return math.ceil(self.size / self.global_batch)

    def set_worker(self, rank: int, world_size: int) -> None:
        """Say which slice of each global batch is this worker's; call before iterating.

        Raises:
            ConfigError: there are more workers than samples in a global batch.
        """
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank {rank} is not one of {world_size} workers")
        if self.global_batch and world_size > self.global_batch and self.shards is None:
            raise ConfigError(
                f"{world_size} workers cannot share a global batch of {self.global_batch} "
                f"samples; set global_batch to {world_size} or more, or run fewer workers"
            )
        if self._drawn is not None:
            self._drawn.check_workers(world_size)
        if world_size != self.world_size:
            self._shares = Shares(self.shards or 1, world_size)
        self.rank, self.world_size = rank, world_size

    def share_out(self, position: int, counts: Sequence[int]) -> None:
        """From a place on each worker holds so many shards; all workers say it, of the same place.

        Args:
            position: where a batch begins, not before ``loaded_to`` of any worker: what is loaded
                already has the shares of before.
            counts: of each worker, as many as there are shards in all.
        """
        self._shares.change(position, counts)

    @property
    def has_usual_shares(self) -> bool:
        """Whether each batch so far, as far as it is remembered, was shared out as ever."""
        return self._shares.are_usual

    @property
    def newest_shares(self) -> tuple[int, ...]:
        """How many shards each worker holds of the batches furthest ahead."""
        return self._shares.newest

    def _span_at(self, position: int) -> tuple[int, int, tuple[int, ...]]:
        """(first, behind the last) of this worker's samples in a batch, and the shares in it."""
        counts = self._shares.at(position)
        if not counts:
            return *self.slice_of_batch, ()
        mine, size = ranges_of(counts)[self.rank], self.global_batch // sum(counts)
        return mine.start * size, mine.stop * size, counts

    @property
    def kind(self) -> str:
        """What its positions are marked with."""
        return KIND

    @property
    def position(self) -> int:
        """Samples that the job has consumed, by all workers."""
        return self._place.position

    @position.setter
    def position(self, value: int) -> None:
        if not self.global_batch:
            raise ConfigError("where batches are drawn, load_state_dict() alone moves the cursor")
        self._place = DrawnPlace(value)

    @property
    def slice_of_batch(self) -> tuple[int, int]:
        """(first, behind the last) of this worker's samples in each global batch of one size.

        Unless shares have changed.
        """
        num_parts = self.shards or self.global_batch
        mine = held(num_parts, self.rank, self.world_size)
        size = self.global_batch // num_parts if num_parts else 0
        return mine.start * size, mine.stop * size

    @property
    def epoch(self) -> int:
        """The epoch of the next sample."""
        if self._drawn is None:
            return self.position // self.size
        return self._drawn.epoch_at(self._place)

    @property
    def noted(self) -> NDArray[np.int64]:
        """What is recorded of ``handed``: where the order is drawn, numbers of samples in the job.

        The number of one that came out of its turn is -2 less its id.
        """
        portion = self.portion
        if portion is None or portion.ids is None:
            return self.handed
        first = portion.place.position + portion.first
        due = np.array(portion.ids[: len(self.handed)], np.int64)
        numbers = -2 - self.handed
        in_turn = np.flatnonzero(self.handed[: len(due)] == due)
        numbers[in_turn] = first + in_turn
        return numbers

    def ids(self, position: int, count: int | None = None) -> list[int]:
        """The sample ids from the job's cursor ``position`` on, over all workers.

        Args:
            position: samples consumed before.
            count: number of ids; a global batch if None.
        """
        count = self.global_batch if count is None else count
        if self._drawn is not None:
            return self._drawn.ids(position, count)
        return sample_ids(position, count, size=self.size, seed=self.seed, shuffle=self.shuffle)

    def __iter__(self) -> Iterator[Any]:
        """Batches from the cursor on, without end; the cursor counts those handed out.

        Raises:
            ConfigError: the cursor was moved by someone else meanwhile, or what draws the order
                cannot be used.
        """
        running = self._taken_up() or self._started()
        expected, is_left = self._place, False
        try:
            while True:
                since_s = time.monotonic()
                batch, handed = next(running.batches)
                self.waited_s = time.monotonic() - since_s
                if self._place != expected:
                    raise ConfigError(
                        f"the loader was at sample {expected.position} and is now at "
                        f"{self.position}: it was moved, or is iterated twice at once; make a new "
                        "iterator"
                    )
                self.portion = next(running.portions)
                self._place = expected = self.portion.behind
                self.handed = np.frombuffer(handed, np.int64)
                if isinstance(batch, Shards):
                    batch.loader = self.number
                is_left = True
                yield batch
                is_left = False
        finally:
            if is_left and self.persistent_workers and self.num_workers:
                self.close()
                self._resting = running._replace(place=expected)
            else:
                shield.shut_down(running.batches)

    def _taken_up(self) -> _Running | None:
        """What rests since the loop before, if it goes on where this one begins."""
        resting = self._resting
        if resting is None or self._place != resting.place:
            self.close()
            return None
        if (self.rank, self.world_size) != resting.worker:
            self.close()
            return None
        self._resting = None
        return resting

    def _started(self) -> _Running:
        loader = torch.utils.data.DataLoader(
            self._slices(),
            batch_size=None,
            sampler=_Spans(self),
            num_workers=self.num_workers,
            collate_fn=identity,
            pin_memory=self.pin_memory,
            prefetch_factor=self.prefetch_factor,
            multiprocessing_context=self.multiprocessing_context,
            worker_init_fn=self.worker_init_fn,
            timeout=self.timeout,
            # Its own generator: starting the iterator draws nothing from the script's stream.
            generator=torch.Generator().manual_seed(self.seed),
        )
        if self.num_workers and self._watch is None:
            parts = {"loader.dataset": self.dataset, "loader.collate_fn": self.collate_fn}
            self._watch = GeneratorWatch(loader, [*parts.items()])
        worker = self.rank, self.world_size
        return _Running(shield.start(loader), self._portions(), self._place, worker)

    def close(self) -> None:
        """End the processes that live on between two loops; the next one starts others."""
        resting, self._resting = self._resting, None
        if resting is not None:
            shield.shut_down(resting.batches)

    def _portions(self) -> Iterator[Portion]:
        """This worker's parts of the batches from here on."""
        place, drawn = self._place, self._drawn
        while True:
            first, stop, _ = self._span_at(place.position)
            if drawn is not None and not self.global_batch:
                portion = drawn.step(place, self.rank, self.world_size)
            else:
                ids = None
                if drawn is not None:
                    ids = drawn.ids(place.position + first, stop - first)
                behind = DrawnPlace(place.position + self.global_batch)
                portion = Portion(place, self.global_batch, first, stop - first, ids, behind)
            yield portion
            place = portion.behind

    def drawn(self) -> list[str]:
        """The script's own generators that its processes have drawn from, by name."""
        drawn = self._watch.drawn() if self._watch is not None else []
        return [name for name in drawn if name != GLOBAL]  # which is seeded for each sample

    def _slices(self) -> Slices:
        return Slices(self)

    def order(self) -> dict[str, Any]:
        """All that the ids of a position follow from."""
        fixed = {"kind": KIND, "size": self.size, "seed": self.seed, "shuffle": self.shuffle}
        if self._drawn is None:
            return fixed
        word = self._drawn.epoch(self.epoch).word
        return {**fixed, "kind": "drawn", "by": self._drawn.name, "word": word}

    def state_dict(self) -> dict[str, Any]:
        """The cursor after the batches handed out so far, and what it is valid for."""
        state = {
            **self.order(),
            "kind": KIND,
            "position": self.position,
            "global_batch": self.global_batch,
        }
        if self._drawn is None:
            return state
        return {**state, "place": list(self._place), "before": self._before()}

    def _before(self) -> dict[str, Any]:
        """In front of the newest batch."""
        assert self._drawn is not None  # noqa: S101 - else a position says it
        place = self._place if self.portion is None else self.portion.place
        word = self._drawn.epoch(self._drawn.epoch_at(place)).word
        return {"position": place.position, "place": list(place), "word": word}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the cursor of ``state``; iterators made before become unusable.

        The global batch may have changed: the cursor counts samples.

        Raises:
            ConfigError: the data set's size, the seed, the shuffling or what draws the order
                changed; the samples consumed so far would not be the ones that were.
        """
        here = {"by": "", **self.order()}
        for name in ("size", "seed", "shuffle", "by"):
            saved = state.get(name, "")
            if saved != here[name]:
                raise ConfigError(
                    f"the checkpoint's loader had {_shown(name, saved)}, this one has "
                    f"{_shown(name, here[name])}: samples would be repeated or left out. Give the "
                    f"loader {_shown(name, saved)} again, or start a new job from the checkpoint's "
                    "model"
                )
        there = DrawnPlace(int(state["position"]))
        if not self.global_batch:
            there = DrawnPlace(*map(int, state["place"]))
        self._check_word(there, state)
        self._place, self.portion = there, None

    def _check_word(self, there: DrawnPlace, state: Mapping[str, Any]) -> None:
        if self._drawn is None:
            return
        number = self._drawn.epoch_at(there)
        if self._drawn.epoch(number).word != state["word"]:
            raise ConfigError(
                f"{self._drawn.name} gives another order in epoch {number} than "
                "it gave when the checkpoint was written: samples would be repeated or left out. "
                "Give the loader what it had, or start a new job from the checkpoint's model"
            )


def _shown(name: str, value: Any) -> str:
    if name != "by":
        return f"{name}={value}"
    return f"an order by {value}" if value else "an order of its own"


class _PartSpan(NamedTuple):
    """What a worker loads of one batch.

    Attributes:
        position: of its first sample.
        ids: of its samples, or how many there are.
        first: its place in the batch.
        counts: how many shards each worker holds of the batch; () for the usual ones.
    """

    position: int
    ids: list[int] | int
    first: int = 0
    counts: tuple[int, ...] = ()


class _Spans:
    """What this worker loads, step by step."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[_PartSpan]:
        loader = self._loader
        for one in loader._portions():
            position = one.place.position
            loader.loaded_to = one.behind.position
            ids, counts = one.num if one.ids is None else one.ids, loader._span_at(position)[2]
            yield _PartSpan(position + one.first, ids, one.first, counts)


class Slices:
    """A data set of batches, indexed by span; what a loader process holds."""

    def __init__(self, loader: Loader) -> None:
        self._dataset = loader.dataset
        self._collate = loader.collate_fn
        self._seed = loader.seed
        self._shards = loader.shards
        self._size = loader.global_batch // (loader.shards or 1)  # of a shard
        self._order: dict[str, Any] = {
            "size": loader.size,
            "seed": loader.seed,
            "shuffle": loader.shuffle,
        }

    def __getitem__(self, span: _PartSpan) -> tuple[Any, bytes]:
        """The batch, and the ids that the data set was asked for as int64 (bytes pass any pipe)."""
        ids = span.ids
        if isinstance(ids, int):
            ids = self.ids(span.position, ids)
        if torch.utils.data.get_worker_info() is not None:
            return self._load(span, ids)
        with preserved(cuda=False):
            return self._load(span, ids)

    def _load(self, span: _PartSpan, ids: list[int]) -> tuple[Any, bytes]:
        position = span.position
        if self._shards is None:
            return self._fetch(position, ids)
        starts = range(0, len(ids), self._size)
        found = [self._fetch(position + start, ids[start : start + self._size]) for start in starts]
        batch = Shards(
            [part for part, _ in found],
            of=self._shards,
            first=span.first // self._size,
            position=position - span.first,
            counts=span.counts,
        )
        return batch, b"".join(asked for _, asked in found)

    def ids(self, position: int, count: int) -> list[int]:
        """Which samples a span is."""
        return sample_ids(position, count, **self._order)

    def _fetch(self, position: int, ids: list[int]) -> tuple[Any, bytes]:
        samples, asked = [], []
        for offset, index in enumerate(ids):
            seed_all(sample_seed(position + offset, seed=self._seed))
            samples.append(self._dataset[index])
            asked.append(index)
        seed_all(mix64(COLLATE_TAG, self._seed, position))
        return self._collate(samples), np.array(asked, np.int64).tobytes()


def identity(batch: Any) -> Any:
    """What the data set made is the batch."""
    return batch


def checked_int(name: str, value: int, least: int) -> int:
    """``value`` if it is a whole number from ``least`` on."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < _LIMIT:
        raise ConfigError(f"{name} must be a whole number from {least} on, not {value!r}")
    return value


def _checked_shards(shards: int, global_batch: int) -> int:
    checked_int("shards", shards, 1)
    if not global_batch:
        raise ConfigError("shards= are equal parts of a step: give global_batch= with it")
    if global_batch % shards:
        below = global_batch // shards * shards
        fitting = [str(size) for size in (below, below + shards) if size]
        raise ConfigError(
            f"a global batch of {global_batch} samples cannot be cut into {shards} equal shards; "
            f"one of {' or '.join(fitting)} can"
        )
    return shards
