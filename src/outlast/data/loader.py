"""A data loader whose batches do not depend on how many machines are there.

Guarantees: a step consumes the same global batch at any number of workers and at any number of
loader processes; random augmentation included, because each sample has its own random numbers,
seeded from (seed, position). In an epoch every sample comes exactly once, none is dropped: epochs
follow each other without a gap, and a batch may span two.

What can go wrong: a data set whose size or order of samples changes under the same seed (the size
is checked when a state is loaded, the order cannot be); randomness from generators that a data
set keeps for itself; a ``collate_fn`` that draws random numbers is exact only at the same number
of workers, since each worker collates its own slice.

Rejected: a batch size per worker (the global batch would change with the number of machines, and
with it the training).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from outlast.data import shield
from outlast.data.generators import GLOBAL, GeneratorWatch
from outlast.data.order import Shards, held, mix64, sample_ids, sample_seed
from outlast.data.random_state import preserved, seed_all
from outlast.errors import ConfigError

KIND = "outlast"

COLLATE_TAG = 0xC011A7E
_LIMIT = 1 << 63


class Loader:
    """Endless batches of a map-style data set, the same at any number of workers.

    Of each global batch of ``B`` samples, worker ``r`` of ``W`` gets those from ``B*r//W`` up to
    ``B*(r+1)//W``; slices differ in length by one at most. A session sets the worker by itself;
    without one, see :meth:`set_worker`.

    While sample number ``p`` of the job is fetched, Python's, NumPy's global and torch's default
    CPU generator are seeded from ``(seed, p)``; the training process's own streams are not
    touched by that.

    Attributes:
        position: samples that the job has consumed, by all workers.
        handed: the ids of the samples in the batch handed out last, in its order: those that
            the data set was asked for, told by whoever asked it.

    Args:
        dataset: has ``__len__`` and ``__getitem__``; samples are fetched one by one with the
            latter (``__getitems__`` would share one random stream among several).
        global_batch: samples per step over all workers.
        seed: of the order and of each sample's randomness, in ``range(2**63)``.
        shuffle: a new order each epoch; without it, the data set's own.
        shards: cut each global batch into this many parts of equal size, whatever the number of
            workers, and hand out the whole parts that this worker holds, as
            :class:`~outlast.data.order.Shards`; for ``outlast.SameBits``.
        num_workers: loader processes, as in torch's DataLoader; so are the rest.
        collate_fn: from a list of samples to a batch; torch's default if None.
        pin_memory: copy batches to pinned memory.
        prefetch_factor: batches that each process loads ahead.
        multiprocessing_context: how processes are started.

    Raises:
        ConfigError: a data set that is empty or not map-style, or a setting out of range.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        global_batch: int,
        seed: int = 0,
        shuffle: bool = True,
        shards: int | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        multiprocessing_context: Any = None,
    ) -> None:
        self.dataset = dataset
        self.size = _checked_size(dataset)
        self.global_batch = checked_int("global_batch", global_batch, 1)
        self.seed = checked_int("seed", seed, 0)
        self.shuffle = bool(shuffle)
        self.shards = None if shards is None else _checked_shards(shards, self.global_batch)
        self.num_workers = num_workers
        self.collate_fn = collate_fn or torch.utils.data.default_collate
        self.pin_memory = pin_memory
        self.prefetch_factor = prefetch_factor
        self.multiprocessing_context = multiprocessing_context
        self.position = 0
        self.handed: NDArray[np.int64] = np.empty(0, np.int64)
        self.rank = 0
        self.world_size = 1
        self._watch: GeneratorWatch | None = None

    def set_worker(self, rank: int, world_size: int) -> None:
        """Say which slice of each global batch is this worker's; call before iterating.

        Raises:
            ConfigError: there are more workers than samples in a global batch.
        """
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank {rank} is not one of {world_size} workers")
        if world_size > self.global_batch and self.shards is None:
            raise ConfigError(
                f"{world_size} workers cannot share a global batch of {self.global_batch} "
                f"samples; set global_batch to {world_size} or more, or run fewer workers"
            )
        self.rank, self.world_size = rank, world_size

    @property
    def kind(self) -> str:
        """What its positions are marked with."""
        return KIND

    @property
    def slice_of_batch(self) -> tuple[int, int]:
        """(first, behind the last) of this worker's samples in each global batch."""
        num_parts = self.shards or self.global_batch
        mine, size = held(num_parts, self.rank, self.world_size), self.global_batch // num_parts
        return mine.start * size, mine.stop * size

    @property
    def epoch(self) -> int:
        """The epoch of the next sample."""
        return self.position // self.size

    def ids(self, position: int, count: int | None = None) -> list[int]:
        """The sample ids from the job's cursor ``position`` on, over all workers.

        Args:
            position: samples consumed before.
            count: number of ids; a global batch if None.
        """
        count = self.global_batch if count is None else count
        return sample_ids(position, count, size=self.size, seed=self.seed, shuffle=self.shuffle)

    def __iter__(self) -> Iterator[Any]:
        """Batches from the cursor on, without end; the cursor counts those handed out.

        Raises:
            ConfigError: the cursor was moved by someone else meanwhile.
        """
        loader = torch.utils.data.DataLoader(
            self._slices(),
            batch_size=None,
            sampler=_Spans(self.position, self.global_batch, *self.slice_of_batch),
            num_workers=self.num_workers,
            collate_fn=identity,
            pin_memory=self.pin_memory,
            prefetch_factor=self.prefetch_factor,
            multiprocessing_context=self.multiprocessing_context,
            # Its own generator: starting the iterator draws nothing from the script's stream.
            generator=torch.Generator().manual_seed(self.seed),
        )
        if self.num_workers and self._watch is None:
            parts = {"loader.dataset": self.dataset, "loader.collate_fn": self.collate_fn}
            self._watch = GeneratorWatch(loader, [*parts.items()])
        iterator = shield.start(loader)
        expected = self.position
        try:
            for batch, handed in iterator:
                if self.position != expected:
                    raise ConfigError(
                        f"the loader was at sample {expected} and is now at {self.position}: it "
                        "was moved, or is iterated twice at once; make a new iterator"
                    )
                self.position = expected = expected + self.global_batch
                self.handed = np.frombuffer(handed, np.int64)
                yield batch
        finally:
            shield.shut_down(iterator)

    def drawn(self) -> list[str]:
        """The script's own generators that its processes have drawn from, by name."""
        drawn = self._watch.drawn() if self._watch is not None else []
        return [name for name in drawn if name != GLOBAL]  # which is seeded for each sample

    def _slices(self) -> Slices:
        return Slices(self)

    def order(self) -> dict[str, Any]:
        """All that the ids of a position follow from."""
        return {"kind": KIND, "size": self.size, "seed": self.seed, "shuffle": self.shuffle}

    def state_dict(self) -> dict[str, Any]:
        """The cursor after the batches handed out so far, and what it is valid for."""
        return {
            **self.order(),
            "position": self.position,
            "global_batch": self.global_batch,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the cursor of ``state``; iterators made before become unusable.

        The global batch may have changed: the cursor counts samples.

        Raises:
            ConfigError: the data set's size, the seed or the shuffling changed; the samples
                consumed so far would not be the ones that were.
        """
        for name in ("size", "seed", "shuffle"):
            saved, here = state[name], getattr(self, name)
            if saved != here:
                raise ConfigError(
                    f"the checkpoint's loader had {name}={saved}, this one has {name}={here}: "
                    f"samples would be repeated or left out. Give the loader {name}={saved} "
                    "again, or start a new job from the checkpoint's model"
                )
        self.position = int(state["position"])


class _Spans:
    """Which samples of the job this worker loads, step by step: (first position, count)."""

    def __init__(self, position: int, global_batch: int, first: int, stop: int) -> None:
        self._position = position
        self._global_batch = global_batch
        self._first = first
        self._stop = stop

    def __iter__(self) -> Iterator[tuple[int, int]]:
        position = self._position
        while True:
            yield position + self._first, self._stop - self._first
            position += self._global_batch


class Slices:
    """A data set of batches, indexed by span; what a loader process holds."""

    def __init__(self, loader: Loader) -> None:
        self._dataset = loader.dataset
        self._collate = loader.collate_fn
        self._seed = loader.seed
        self._shards = loader.shards
        self._size = loader.global_batch // (loader.shards or 1)  # of a shard
        self._first = loader.slice_of_batch[0]
        self._order: dict[str, Any] = {
            "size": loader.size,
            "seed": loader.seed,
            "shuffle": loader.shuffle,
        }

    def __getitem__(self, span: tuple[int, int]) -> tuple[Any, bytes]:
        """The batch, and the ids that the data set was asked for as int64 (bytes pass any pipe)."""
        if torch.utils.data.get_worker_info() is not None:
            return self._load(*span)
        with preserved(cuda=False):
            return self._load(*span)

    def _load(self, position: int, count: int) -> tuple[Any, bytes]:
        if self._shards is None:
            return self._fetch(position, count)
        starts = range(position, position + count, self._size)
        found = [self._fetch(start, self._size) for start in starts]
        batch = Shards(
            [part for part, _ in found],
            of=self._shards,
            first=self._first // self._size,
            position=position - self._first,
        )
        return batch, b"".join(asked for _, asked in found)

    def ids(self, position: int, count: int) -> list[int]:
        """Which samples a span is."""
        return sample_ids(position, count, **self._order)

    def _fetch(self, position: int, count: int) -> tuple[Any, bytes]:
        samples, asked = [], []
        for offset, index in enumerate(self.ids(position, count)):
            seed_all(sample_seed(position + offset, seed=self._seed))
            samples.append(self._dataset[index])
            asked.append(index)
        seed_all(mix64(COLLATE_TAG, self._seed, position))
        return self._collate(samples), np.array(asked, np.int64).tobytes()


def identity(batch: Any) -> Any:
    """What the data set made is the batch."""
    return batch


def _checked_size(dataset: Any) -> int:
    if isinstance(dataset, torch.utils.data.IterableDataset) or not (
        hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    ):
        raise ConfigError(
            f"outlast.data.Loader needs a data set with __len__ and __getitem__, and "
            f"{type(dataset).__name__} is not one; for a stream that can be cut into shards use "
            "outlast.data.Stream, for any other give a torch DataLoader of it to the session"
        )
    size = len(dataset)
    if size < 1:
        raise ConfigError(f"the data set ({type(dataset).__name__}) is empty")
    return size


def checked_int(name: str, value: int, least: int) -> int:
    """``value`` if it is a whole number from ``least`` on."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < _LIMIT:
        raise ConfigError(f"{name} must be a whole number from {least} on, not {value!r}")
    return value


def _checked_shards(shards: int, global_batch: int) -> int:
    checked_int("shards", shards, 1)
    if global_batch % shards:
        below = global_batch // shards * shards
        fitting = [str(size) for size in (below, below + shards) if size]
        raise ConfigError(
            f"a global batch of {global_batch} samples cannot be cut into {shards} equal shards; "
            f"one of {' or '.join(fitting)} can"
        )
    return shards
