"""Resume loaders that have no position of their own: go through them again.

Torch's own DataLoader over a map-style data set is resumed exactly. Guarantees: batches, and the
draws from the script's random streams, are those of ``for epoch: for batch in loader``; a resumed
run gives the batches that the undisturbed one would have given, and no skipped sample is loaded.
How: at each epoch's start the random-number states (the process's and those of the loader's and
samplers' generators) are kept; to resume, they are put back, the epoch is started again, and the
sampler's first batches of indices are thrown away.

What can go wrong, and is exact with ``outlast.data.Loader``: random numbers drawn by the data set
inside loader processes (``num_workers > 0``); a sampler that draws index by index from a stream
that the loop's body or loading ahead draws from too; ``in_order=False``; another number of workers,
which is refused. The first two are said at the resume: the first is seen where it happens
(``GeneratorWatch``), for the second a word for all indices of the epoch so far is kept and
compared.

Rejected: saving the list of indices (as large as the data set, in every checkpoint).

Any other iterable of batches is loaded again up to the position. Guarantees: what it yields is
loaded from the random numbers that it started from. Where it draws more on its way (a generator
function that begins a loader anew in each pass, a sampler that is iterated while a loop goes on)
the random numbers in front of its newest draws are kept too, and put back at the same place. What
comes on the way is compared with what came then, and a difference is said.

One with a state of its own (``own_state.py``) goes on from that instead: from where it stood in
front of the newest batch, if that batch comes again. Nothing else is read again.

What can go wrong: an iterable whose content follows from something else than random numbers is not
the same, and it is said if one of the batches before the position differs. A one-shot iterator
(``iter(x) is x``) ends the feed when it runs out; to resume it, give one that starts at the
beginning.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import gc
import logging
import operator
import types
from collections.abc import Collection, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, Final

import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from outlast.data import generators, random_state, shield
from outlast.data.epochs import ReplayFeed, check_kind, check_sizes, check_world_size, going_through
from outlast.data.generators import GeneratorWatch, Held, same
from outlast.data.own_state import HeldState, IteratorState, state_of_iterator, state_within
from outlast.data.random_state import preserved
from outlast.data.trail import chained, continued, told_of

logger = logging.getLogger(__name__)

OwnState = HeldState | IteratorState


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

    def again(self, state: Mapping[str, Any]) -> None:
        """As ``restore``, and load the newest batch; its samples alone are loaded."""
        num = int(state["batches"])
        if not state["started"] or not num or num in state.get("passed", ()):
            self.restore(state)
            return
        self.restore({**state, "batches": num - 1, "word": None, "ahead": ()})
        assert self._iterator is not None  # noqa: S101 - opened by it
        try:
            self.newest = [self._take(self._iterator)]
        except StopIteration:
            self.batches = num
            raise self._too_short(num - 1) from None
        self.batches = num
        self._compare(state)

    def _resume(self, state: Mapping[str, Any]) -> None:
        self._drawn = [str(name) for name in state.get("drawn", ())]
        super()._resume(state)
        self._compare(state)
        goes_on = self.batches or (self.epoch and self._iterated.persistent_workers)
        if self._drawn and goes_on and self._has_started:
            self._doubt(
                f"the loader's processes draw from {' and '.join(self._drawn)}, and begin anew in "
                "the midst of an epoch",
                "Use outlast.data.Loader, which seeds each sample, or num_workers=0",
            )

    def _compare(self, state: Mapping[str, Any]) -> None:
        """Doubt an order that is not the saved one."""
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


# Marks of draws on the way. An iterable that draws for each of its batches makes more of them; what
# they would put back is then no order.
MARKS_KEPT: Final = 4


class DrawRecord:
    """What came of an iterable, and where it drew random numbers.

    Attributes:
        total: batches that came.
        word: for those since ``since``; None where it is not known.
        since: the batch, counted from 0, from which ``word`` counts.
    """

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        state = state or {}
        self.total = int(state.get("total", 0))
        word = state.get("word", 0)
        self.word = None if word is None else int(word)  # None where it is not known
        self.since = int(state.get("since", 0))
        self._began: list[dict[str, Any]] = list(state.get("began", ()))
        self._drew: list[dict[str, Any]] = list(state.get("drew", ()))

    def state(self) -> dict[str, Any]:
        """As data, for another record."""
        return {
            "total": self.total,
            "word": self.word,
            "since": self.since,
            "began": list(self._began),
            "drew": list(self._drew),
        }

    def marks(self) -> dict[int, Mapping[str, Any]]:
        """What is to be put back in front of which batch, counted from 0."""
        return {int(mark["at"]): mark for mark in (*self._drew, *self._began)}

    def came(self, told: bytes, before: dict[str, Any], *, began: bool, drew: bool) -> None:
        """Another batch; ``before`` are the states in front of it.

        Args:
            told: what of it counts in a word.
            before: a mark, if it is one.
            began: an iterator was made on the way.
            drew: random numbers were drawn on the way.
        """
        mark = {"at": self.total, **before}
        if began and self.total:
            self._began = [*self._began, mark][-2:]
            self._drew = []
            self.since, self.word = self.total, 0
        elif drew and self.total:
            self._drew = [*self._drew, mark][-MARKS_KEPT:]
        self.word = continued(self.word or 0, told)
        self.total += 1


class IterableFeed(ReplayFeed):
    """Feeds from any iterable; see above."""

    kind = "iterable"

    def __init__(self, loader: Any, *, world_size: int) -> None:
        super().__init__(loader, world_size=world_size)
        self._own: OwnState | None = state_within(loader)
        self._tried: dict[str, Any] = {}  # the newest batch, and the own state in front of it
        self._is_resumed = False  # from an own state, in this epoch
        self._before: Any = None  # the own state behind the epoch before, in this loop or another
        self._end: Any = None  # the same behind this feed's newest batch
        # One that goes on in the next epoch where it was has one record over all of them.
        self.goes_on = hasattr(loader, "__next__") or holds_iterator(loader)
        self._record = DrawRecord()
        self._starts = generators.starts_within(loader)

    @property
    def is_hidden(self) -> bool:
        """Whether it goes on in a later loop without that being seen."""
        return hides_iterator(self.loader)

    def go_on_from(self, before: object) -> None:
        """An earlier loop went through the same object; it may go on where it was."""
        if isinstance(before, IterableFeed):
            self._before = before._end
        if not isinstance(before, IterableFeed) or not self.goes_on or is_fresh(self.loader):
            return
        self._record, self._start, self._starts = before._record, before._start, before._starts
        before._iterator = None  # it is not to be ended

    def _mark_start(self) -> None:
        if self.goes_on and self._record.total:
            return
        super()._mark_start()
        self._start["within"] = self._starts
        self._record = DrawRecord()

    def _open(self) -> Iterator[Any]:
        iterator = super()._open()
        if self._own is None:
            self._own = state_of_iterator(iterator)
        return iterator

    def _end_epoch(self, iterator: Iterator[Any]) -> None:
        if self._is_resumed and self._own is not None:
            self._own.pass_ended()
            self._is_resumed = False
        super()._end_epoch(iterator)
        self._before = self._held_state()

    def _held_state(self) -> Any:
        return self._own.read(None) if isinstance(self._own, HeldState) else None

    def close(self) -> None:
        """End the loader's processes; the position stays readable."""
        if self._has_started and self._end is None:
            self._end = self._held_state()
        super().close()

    def _take(self, iterator: Iterator[Any]) -> Any:
        # A state in front of an epoch's first batch is that behind the epoch before.
        own = self._own.read(iterator) if self.batches and self._own else self._before
        seen, held, num_made = random_state.look(), self._held.read(), generators.num_made()
        with generators.by_a_feed():
            batch = next(iterator)
        began = generators.num_made() != num_made
        drew = not same([*seen, *held], [*random_state.look(), *self._held.read()])
        mark = {}
        if drew or began:
            mark = {"random": random_state.as_data(seen), "held": self._held.data_of(held)}
        told = told_of(batch)
        self._record.came(told, mark, began=began, drew=drew)
        self._tried = {"from": own, "word": continued(0, told)} if own is not None else {}
        return batch

    def state(self) -> dict[str, Any]:
        """The position; what came before it, and an own state in front of the newest batch."""
        state = {**super().state(), "record": self._record.state(), "sizes": sizes_of(self.loader)}
        return {**state, "tried": self._tried} if self._tried else state

    def _resume(self, state: Mapping[str, Any]) -> None:
        check_sizes(state.get("sizes", {}), sizes_of(self.loader))
        saved = DrawRecord(state["record"]) if "record" in state else None
        self._record = saved or DrawRecord({"total": state["batches"]})
        tried = state.get("tried")
        if tried and self._has_started:
            self._start = dict(state["start"])
            if self._goes_on_from(tried):
                return
        word = self._record.word
        super()._resume(state)
        if self.goes_on and self._record.total and not self._has_started:
            self._start = dict(state["start"])  # that of an earlier loop over the same object
            self._replay()
            self._iterator = None
        if self.epoch and self._has_started and getattr(self.loader, "persistent_workers", False):
            self._doubt(
                "the loader's processes persist from epoch to epoch, and begin anew",
                "Give the DataLoader persistent_workers=False, or use outlast.data.Stream",
            )
        if saved is not None and word is not None and self._record.word != word:
            name = type(self.loader).__name__
            self._doubt(
                f"what {name} gives again, up to batch {self.batches} of epoch {self.epoch}, is "
                "not what it gave",
                "Give steps() the DataLoader itself, or outlast.data.Loader or Stream",
            )

    def _goes_on_from(self, tried: Mapping[str, Any]) -> bool:
        """Go on behind the newest batch, if the own state in front of it gives that batch."""
        own, number = self._own or IteratorState(), self._record.total - 1
        marks = self._record.marks()
        if self.batches == 1:
            self._rewind()
        elif number in marks:  # what the batch draws is part of it
            self._put(marks[number])
        self._samplers.tell(self.epoch)
        try:
            with generators.by_a_feed():
                self._iterator = own.resumed(tried["from"], self._open)
                if tried["word"] is None:  # the batch was given back
                    self._is_resumed = True
                    return True
                batch = next(self._iterator, self)
                if batch is self:  # it had gone to the end of the epoch before
                    own.pass_ended()
                    self._iterator = self._open()
                    batch = next(self._iterator)
            came = chained(0, batch)
        except Exception as error:  # noqa: BLE001 - it may raise anything, from its processes too
            logger.info("%s does not go to its own state: %r", type(self.loader).__name__, error)
            came = None
        if came == tried["word"]:
            self._is_resumed, self._tried, self.newest = True, dict(tried), [batch]
            return True
        self._end_processes()
        own.put_back()
        return False

    def _replay(self) -> None:
        starts = iter(self._start.get("within", ()))
        with generators.by_a_feed():
            self.loader = self._iterated = generators.made_again(
                self.loader, starts, shield.shut_down
            )
        self._rewind()
        self._iterator = self._open()
        total = self._record.total if self.goes_on else self.batches
        since, marks, word = self._record.since, self._record.marks(), 0
        first = total - self.batches  # of this epoch
        with going_through("batches", total) as done:
            for number in range(total):
                if number in marks:
                    self._put(marks[number])
                passed = number - first + 1 in self._passed
                with preserved() if passed else nullcontext():
                    batch = self._again(number)
                word = chained(word, batch) if number >= since else word
                self.newest = [batch]
                done(number + 1)
        self._record.word = word

    def _put(self, mark: Mapping[str, Any]) -> None:
        random_state.restore(mark["random"])
        self._held.restore(mark["held"])

    def _again(self, number: int) -> Any:
        assert self._iterator is not None  # noqa: S101 - opened before
        with generators.by_a_feed():
            try:
                return next(self._iterator)
            except StopIteration:
                pass
            if not self.goes_on or self._is_one_shot(self._iterator):
                raise self._too_short(number)
            self._iterator = self._open()  # its next epoch, of those that were gone through
            try:
                return next(self._iterator)
            except StopIteration:
                raise self._too_short(number) from None


def is_fresh(loader: Any) -> bool:
    """Whether it is a DataLoader's iterator that stands at its beginning, maybe for another time.

    ``iter(loader)`` gives the same one in each epoch where the loader's processes persist.
    """
    return isinstance(loader, _BaseDataLoaderIter) and not loader._num_yielded


def holds_iterator(loader: Any) -> bool:
    """Whether it keeps an iterator over its epochs, as timm's and ultralytics' loaders do."""
    values = dict(getattr(loader, "__dict__", {}))
    values.pop("_iterator", None)  # a DataLoader's own, of persistent processes
    return any(hasattr(one, "__next__") for one in values.values())


def hides_iterator(given: Any, depth: int = 4) -> bool:
    """Whether behind ``given``, which begins anew in each loop, is a loader that keeps one."""
    if isinstance(given, types.GeneratorType):
        inner = list(given.gi_frame.f_locals.values()) if given.gi_frame is not None else []
    elif isinstance(given, generators.WRAPPERS):
        inner = gc.get_referents(given)
    else:
        inner = list(getattr(given, "__dict__", {}).values())
    inner = [one for one in inner if hasattr(one, "__iter__")]
    loaders = [one for one in inner if isinstance(one, torch.utils.data.DataLoader)]
    if any(holds_iterator(one) or one.persistent_workers for one in loaders):
        return True
    return depth > 0 and any(hides_iterator(one, depth - 1) for one in inner[:16])


def sizes_of(loader: Any) -> dict[str, Any]:
    """What a count of batches depends on, as far as a DataLoader tells."""
    if not isinstance(loader, torch.utils.data.DataLoader):
        return {}
    with contextlib.suppress(AttributeError):
        return {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    return {}
