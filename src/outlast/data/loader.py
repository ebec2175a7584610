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

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from outlast.data import shield
from outlast.data.order import mix64, sample_ids, sample_seed
from outlast.data.random_state import preserved
from outlast.errors import ConfigError

KIND = "outlast"

_COLLATE_TAG = 0xC011A7E
_LIMIT = 1 << 63


class Loader:
    """Endless batches of a map-style data set, the same at any number of workers.

    Of each global batch of ``B`` samples, worker ``r`` of ``W`` gets those from ``B*r//W`` up to
    ``B*(r+1)//W``; slices differ in length by one at most. A session sets the worker by itself;
    without one, see :meth:`set_worker`.

    While sample number ``p`` of the job is fetched, Python's, NumPy's global and torch's default
    CPU generator are seeded from ``(seed, p)``; the training process's own streams are not
    touched by that.

    Args:
        dataset: has ``__len__`` and ``__getitem__``; samples are fetched one by one with the
            latter (``__getitems__`` would share one random stream among several).
        global_batch: samples per step over all workers.
        seed: of the order and of each sample's randomness, in ``range(2**63)``.
        shuffle: a new order each epoch; without it, the data set's own.
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
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        multiprocessing_context: Any = None,
    ) -> None:
        self.dataset = dataset
        self.size = _checked_size(dataset)
        self.global_batch = _checked_int("global_batch", global_batch, 1)
        self.seed = _checked_int("seed", seed, 0)
        self.shuffle = bool(shuffle)
        self.num_workers = num_workers
        self.collate_fn = collate_fn or torch.utils.data.default_collate
        self.pin_memory = pin_memory
        self.prefetch_factor = prefetch_factor
        self.multiprocessing_context = multiprocessing_context
        self.position = 0
        self.rank = 0
        self.world_size = 1

    def set_worker(self, rank: int, world_size: int) -> None:
        """Say which slice of each global batch is this worker's; call before iterating.

        Raises:
            ConfigError: there are more workers than samples in a global batch.
        """
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank {rank} is not one of {world_size} workers")
        if world_size > self.global_batch:
            raise ConfigError(
                f"{world_size} workers cannot share a global batch of {self.global_batch} "
                f"samples; set global_batch to {world_size} or more, or run fewer workers"
            )
        self.rank, self.world_size = rank, world_size

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
            _Slices(self),
            batch_size=None,
            sampler=_Spans(self.position, self.global_batch, self.rank, self.world_size),
            num_workers=self.num_workers,
            collate_fn=_identity,
            pin_memory=self.pin_memory,
            prefetch_factor=self.prefetch_factor,
            multiprocessing_context=self.multiprocessing_context,
            # Its own generator: starting the iterator draws nothing from the script's stream.
            generator=torch.Generator().manual_seed(self.seed),
        )
        iterator = shield.start(loader)
        expected = self.position
        try:
            for batch in iterator:
                if self.position != expected:
                    raise ConfigError(
                        f"the loader was at sample {expected} and is now at {self.position}: it "
                        "was moved, or is iterated twice at once; make a new iterator"
                    )
                self.position = expected = expected + self.global_batch
                yield batch
        finally:
            shield.shut_down(iterator)

    def state_dict(self) -> dict[str, Any]:
        """The cursor after the batches handed out so far, and what it is valid for."""
        return {
            "kind": KIND,
            "position": self.position,
            "seed": self.seed,
            "size": self.size,
            "shuffle": self.shuffle,
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

    def __init__(self, position: int, global_batch: int, rank: int, world_size: int) -> None:
        self._position = position
        self._global_batch = global_batch
        self._first = global_batch * rank // world_size
        self._stop = global_batch * (rank + 1) // world_size

    def __iter__(self) -> Iterator[tuple[int, int]]:
        position = self._position
        while True:
            yield position + self._first, self._stop - self._first
            position += self._global_batch


class _Slices:
    """A data set of batches, indexed by span; what a loader process holds."""

    def __init__(self, loader: Loader) -> None:
        self._dataset = loader.dataset
        self._collate = loader.collate_fn
        self._seed = loader.seed
        self._order: dict[str, Any] = {
            "size": loader.size,
            "seed": loader.seed,
            "shuffle": loader.shuffle,
        }

    def __getitem__(self, span: tuple[int, int]) -> Any:
        if torch.utils.data.get_worker_info() is not None:
            return self._fetch(*span)
        with preserved(cuda=False):
            return self._fetch(*span)

    def _fetch(self, position: int, count: int) -> Any:
        samples = []
        for offset, index in enumerate(sample_ids(position, count, **self._order)):
            _seed_all(sample_seed(position + offset, seed=self._seed))
            samples.append(self._dataset[index])
        _seed_all(mix64(_COLLATE_TAG, self._seed, position))
        return self._collate(samples)


def _seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
    # Not torch.manual_seed, which would reseed the training process's accelerators too.
    torch.default_generator.manual_seed(seed)


def _identity(batch: Any) -> Any:
    return batch


def _checked_size(dataset: Any) -> int:
    if isinstance(dataset, torch.utils.data.IterableDataset) or not (
        hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    ):
        raise ConfigError(
            f"outlast.data.Loader needs a data set with __len__ and __getitem__, and "
            f"{type(dataset).__name__} is not one; give a torch DataLoader of it to the session"
        )
    size = len(dataset)
    if size < 1:
        raise ConfigError(f"the data set ({type(dataset).__name__}) is empty")
    return size


def _checked_int(name: str, value: int, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < _LIMIT:
        raise ConfigError(f"{name} must be a whole number from {least} on, not {value!r}")
    return value
