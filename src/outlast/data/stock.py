"""Exact resume of torch's own DataLoader over a map-style data set.

Guarantees: batches, and the draws from the script's random streams, are those of ``for epoch: for
batch in loader``; a resumed run gives the batches that the undisturbed one would have given, and
no skipped sample is loaded. How: at each epoch's start the random-number states (the process's
and those of the loader's and samplers' generators) are kept; to resume, they are put back, the
epoch is started again, and the sampler's first batches of indices are thrown away.

What can go wrong, and is exact with ``outlast.data.Loader``: random numbers drawn by the data set
inside loader processes (``num_workers > 0``; their streams cannot be seen from here); a sampler
that keeps a ``random.Random`` or NumPy generator of its own; a sampler that draws from the global
stream index by index while processes load ahead; ``in_order=False``; another number of workers,
which is refused.

Rejected: saving the list of indices (as large as the data set, in every checkpoint).
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch

from outlast.data.epochs import ReplayFeed, check_kind, check_world_size
from outlast.data.random_state import preserved
from outlast.errors import ConfigError


def is_stock(loader: Any) -> bool:
    """Whether ``loader`` iterates as torch's DataLoader does, over a map-style data set."""
    stock = torch.utils.data.DataLoader
    return (
        isinstance(loader, stock)
        and type(loader).__iter__ is stock.__iter__
        and not isinstance(loader.dataset, torch.utils.data.IterableDataset)
    )


class StockFeed(ReplayFeed):
    """Feeds from a copy of the loader whose sampler can leave out its first items.

    The user's loader is not changed; it shares its data set, samplers and generators with the
    copy.
    """

    kind = "stock"

    def __init__(self, loader: Any, *, world_size: int) -> None:
        super().__init__(loader, world_size=world_size)
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._indices = _Skippable(getattr(loader, name))
        self._iterated = copy.copy(loader)
        # Past DataLoader.__setattr__, which forbids it: iterators only read the attribute.
        object.__setattr__(self._iterated, name, self._indices)
        self._iterated._iterator = None

    def state(self) -> dict[str, Any]:
        """The position, and the sizes that it depends on."""
        return {**super().state(), "sizes": self._sizes()}

    def _sizes(self) -> dict[str, Any]:
        """What a count of batches depends on, as far as a loader tells."""
        batch_sampler = self.loader.batch_sampler
        if batch_sampler is not None and type(batch_sampler) is not torch.utils.data.BatchSampler:
            return {}  # a sampler of variable batches may change its length on its way
        holder = self.loader if batch_sampler is None else batch_sampler
        try:
            num_indices = len(holder.sampler)
        except (TypeError, NotImplementedError):
            num_indices = None
        return {
            "batch_size": getattr(batch_sampler, "batch_size", None),
            "drop_last": getattr(batch_sampler, "drop_last", None),
            "num_indices": num_indices,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position; see :meth:`~outlast.data.epochs.EpochFeed.restore`."""
        check_kind(state, self.kind, self.loader)
        check_world_size(state, self._world_size, self.loader)
        saved, here = state.get("sizes", {}), self._sizes()
        for name in here.keys() & saved.keys():
            if saved[name] != here[name]:
                raise ConfigError(
                    f"the checkpoint's DataLoader had {name}={saved[name]}, this one has "
                    f"{name}={here[name]}: the batches consumed so far would be other ones. "
                    "Build it as it was, or start a new job from the checkpoint's model"
                )
        super().restore(state)

    def _replay(self) -> None:
        if self.epoch and self._iterated.persistent_workers:
            # In the undisturbed run this epoch reused its processes, and drew no seed for them:
            # start them before the random numbers are put back, on an epoch without indices.
            self._indices.is_empty = True
            self._open()
            self._indices.is_empty = False
        self._rewind()
        self._indices.num_skipped, self._indices.passed = self.batches, self._passed
        try:
            self._iterator = self._open()
            if not self._iterated.num_workers:
                # Without processes the sampler would draw its seed at the first batch, from
                # random numbers that are not the epoch's start any more.
                self._indices.prime()
        except _TooShort as short:
            raise self._too_short(short.num_items) from None
        finally:
            self._indices.num_skipped = 0


class _TooShort(Exception):
    def __init__(self, num_items: int) -> None:
        super().__init__(num_items)
        self.num_items = num_items


class _Skippable:
    """A sampler that leaves out its first ``num_skipped`` items.

    What it draws for those in ``passed``, counted from 1, leaves no trace, as it left none then.
    """

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.num_skipped = 0
        self.passed: Collection[int] = ()
        self.is_empty = False
        self._latest = _SkippingIterator(iter(()), 0, ())

    def __iter__(self) -> Iterator[Any]:
        if self.is_empty:
            return iter(())
        self._latest = _SkippingIterator(iter(self.sampler), self.num_skipped, self.passed)
        return self._latest

    def __len__(self) -> int:
        return len(self.sampler)

    def prime(self) -> None:
        """Have the latest iterator draw what it draws at an epoch's start."""
        self._latest.prime()


class _SkippingIterator:
    """Skips at the first item, not before: torch draws another seed between the two."""

    def __init__(self, items: Iterator[Any], num_skipped: int, passed: Collection[int]) -> None:
        self._items = items
        self._num_skipped = num_skipped
        self._passed = passed
        self._held: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._num_skipped:
            self._skip()
        return self._held.pop() if self._held else next(self._items)

    def _skip(self) -> None:
        wanted, self._num_skipped = self._num_skipped, 0
        for number in range(wanted):
            try:
                with preserved() if number + 1 in self._passed else nullcontext():
                    next(self._items)
            except StopIteration:
                raise _TooShort(number) from None

    def prime(self) -> None:
        if self._num_skipped:
            self._skip()
        elif not self._held:
            # Nothing to skip: only taking the first item makes a sampler draw its seed.
            self._held.extend(item for item in [next(self._items, None)] if item is not None)
