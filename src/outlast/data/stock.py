"""Exact resume of torch's own DataLoader over a map-style data set.

Guarantees: batches, and the draws from the script's random streams, are those of ``for epoch: for
batch in loader``; a resumed run gives the batches that the undisturbed one would have given, and
no skipped sample is loaded. How: at each epoch's start the random-number states (the process's
and those of the loader's and samplers' generators) are kept; to resume, they are put back, the
epoch is started again, and the sampler's first batches of indices are thrown away.

What can go wrong, and is exact with ``outlast.data.Loader``: random numbers drawn by the data set
inside loader processes (``num_workers > 0``); a sampler that draws index by index from a stream
that the loop's body or loading ahead draws from too; ``in_order=False``; another number of workers,
which is refused. The first two are said at the resume: the first is seen where it happens
(``inside.py``), for the second a word for all indices of the epoch so far is kept and compared.

Rejected: saving the list of indices (as large as the data set, in every checkpoint).
"""

from __future__ import annotations

import collections
import copy
import operator
from collections.abc import Collection, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch

from outlast.data.epochs import ReplayFeed, check_kind, check_sizes, check_world_size, going_through
from outlast.data.fingerprint import chained
from outlast.data.generators import GeneratorWatch, Held
from outlast.data.random_state import preserved


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
        self._watch: GeneratorWatch | None = None
        self._drawn: list[str] = []

    def hold(self, held: Held) -> None:
        """Keep these generators; watch what is drawn in the loader's processes."""
        super().hold(held)
        if self._iterated.num_workers and self._watch is None:
            parts = ("dataset", "collate_fn", "worker_init_fn")
            roots = [(f"loader.{name}", getattr(self.loader, name)) for name in parts]
            self._watch = GeneratorWatch(self._iterated, roots)

    def _take(self, iterator: Iterator[Any]) -> Any:
        batch = super()._take(iterator)
        self._indices.handed_out()
        return batch

    def _mark_start(self) -> None:
        super()._mark_start()
        self._indices.word = 0

    def state(self) -> dict[str, Any]:
        """The position, and the sizes that it depends on."""
        drawn = {*self._drawn, *(self._watch.drawn() if self._watch else ())}
        return {
            **super().state(),
            "sizes": self._sizes(),
            "word": self._indices.word,
            "ahead": self._indices.ahead(),
            "drawn": sorted(drawn),
        }

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
        check_sizes(state.get("sizes", {}), self._sizes())
        super().restore(state)

    def _resume(self, state: Mapping[str, Any]) -> None:
        self._drawn = [str(name) for name in state.get("drawn", ())]
        super()._resume(state)
        word, ahead = state.get("word"), state.get("ahead", ())
        differs = word is not None and word != self._indices.word
        # As far as both are: the epoch's end may be nearer now.
        differs |= any(map(operator.ne, ahead, self._indices.ahead()))
        if self._has_started and differs:
            self._doubt(
                f"the sampler's order of epoch {self.epoch} is another one than it was",
                "Let it draw its whole order when it is iterated, from a generator that nothing "
                "else draws from, or use outlast.data.Loader",
            )
        goes_on = self.batches or (self.epoch and self._iterated.persistent_workers)
        if self._drawn and goes_on and self._has_started:
            self._doubt(
                f"the loader's processes draw from {' and '.join(self._drawn)}, and begin anew in "
                "the midst of an epoch",
                "Use outlast.data.Loader, which seeds each sample, or num_workers=0",
            )

    def _replay(self) -> None:
        if self.epoch and self._iterated.persistent_workers:
            # In the undisturbed run this epoch reused its processes, and drew no seed for them:
            # start them before the random numbers are put back, on an epoch without indices.
            self._indices.is_empty = True
            self._open()
            self._indices.is_empty = False
        self._rewind()
        self._indices.word = 0
        self._indices.num_skipped, self._indices.passed = self.batches, self._passed
        try:
            self._iterator = self._open()
            if not self._iterated.num_workers:
                # Without processes the sampler would draw its seed at the first batch, from
                # random numbers that are not the epoch's start any more.
                self._indices.prime()
            self._indices.opened()
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

    Attributes:
        word: for the epoch's items up to the batch handed out last.
    """

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.num_skipped = 0
        self.passed: Collection[int] = ()
        self.is_empty = False
        self.word = 0
        self._latest = _SkippingIterator(iter(()), 0, ())

    def __iter__(self) -> Iterator[Any]:
        if self.is_empty:
            return iter(())
        self._latest = _SkippingIterator(iter(self.sampler), self.num_skipped, self.passed)
        return self._latest

    def __len__(self) -> int:
        return len(self.sampler)

    def ahead(self) -> list[int]:
        """The words up to each item that is drawn and not handed out: it is being loaded."""
        return self._latest.ahead()

    def handed_out(self) -> None:
        """Another batch is."""
        self.word = self._latest.handed_out()

    def prime(self) -> None:
        """Have the latest iterator draw what it draws at an epoch's start."""
        self._latest.prime()

    def opened(self) -> None:
        """What was to be left out is."""
        self.word = self._latest.word


class _SkippingIterator:
    """Skips at the first item, not before: torch draws another seed between the two.

    Attributes:
        word: for what was left out, then for what was handed out too.
    """

    def __init__(self, items: Iterator[Any], num_skipped: int, passed: Collection[int]) -> None:
        self._items = items
        self._num_skipped = num_skipped
        self._passed = passed
        self._held: list[Any] = []
        self._ahead: collections.deque[int] = collections.deque()  # words of what is being loaded
        self._drawn = 0  # the newest of them
        self.word = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._num_skipped:
            self._skip()
        item = self._held.pop() if self._held else next(self._items)
        self._drawn = chained(self._drawn, item)
        self._ahead.append(self._drawn)
        return item

    def ahead(self) -> list[int]:
        """The words up to each item that was drawn and not handed out."""
        return list(self._ahead)

    def handed_out(self) -> int:
        """The word, now that another batch is handed out."""
        if self._ahead:
            self.word = self._ahead.popleft()
        return self.word

    def _skip(self) -> None:
        wanted, self._num_skipped = self._num_skipped, 0
        with going_through("batches of indices", wanted) as done:
            for number in range(wanted):
                try:
                    with preserved() if number + 1 in self._passed else nullcontext():
                        self._drawn = chained(self._drawn, next(self._items))
                except StopIteration:
                    raise _TooShort(number) from None
                done(number + 1)
        self.word = self._drawn

    def prime(self) -> None:
        if self._num_skipped:
            self._skip()
        elif not self._held:
            # Nothing to skip: only taking the first item makes a sampler draw its seed.
            self._held.extend(item for item in [next(self._items, None)] if item is not None)
