"""Any iterable of batches that has no position of its own: gone through again to resume.

Guarantees: what it yields is loaded again up to the position, from the random numbers that it
started from. Where it draws more on its way (a generator function that begins a loader anew in each
pass, a sampler that is iterated while a loop goes on) the random numbers in front of its newest
draws are kept too, and put back at the same place. What comes on the way is compared with what
came then, and a difference is said.

A torch DataLoader over an ``IterableDataset`` that has ``state_dict`` and ``load_state_dict``,
without loader processes, goes on from its data set's state instead; nothing is read again.

What can go wrong: an iterable whose content follows from something else than random numbers is not
the same, and it is said if one of the batches before the position differs. A one-shot iterator
(``iter(x) is x``) ends the feed when it runs out; to resume it, give one that starts at the
beginning.
"""

from __future__ import annotations

import contextlib
import gc
import types
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any, Final

import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from outlast.data import generators, random_state, shield
from outlast.data.epochs import ReplayFeed, check_sizes, going_through
from outlast.data.fingerprint import chained
from outlast.data.generators import same
from outlast.data.random_state import preserved

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

    def came(self, batch: Any, before: dict[str, Any], *, began: bool, drew: bool) -> None:
        """Another batch; ``before`` are the states in front of it.

        Args:
            batch: what came.
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
        self.word = chained(self.word or 0, batch)
        self.total += 1


class IterableFeed(ReplayFeed):
    """Feeds from any iterable; see above."""

    kind = "iterable"

    def __init__(self, loader: Any, *, world_size: int) -> None:
        super().__init__(loader, world_size=world_size)
        self._source = source_of(loader)
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

    def _take(self, iterator: Iterator[Any]) -> Any:
        seen, held, num_made = random_state.look(), self._held.read(), generators.num_made()
        with generators.by_a_feed():
            batch = next(iterator)
        began = generators.num_made() != num_made
        drew = not same([*seen, *held], [*random_state.look(), *self._held.read()])
        mark = {}
        if drew or began:
            mark = {"random": random_state.as_data(seen), "held": self._held.data_of(held)}
        self._record.came(batch, mark, began=began, drew=drew)
        return batch

    def state(self) -> dict[str, Any]:
        """The position; what came before it, or the data set's own state in place of that."""
        state = {**super().state(), "record": self._record.state(), "sizes": sizes_of(self.loader)}
        if self._source is not None:
            state["source"] = self._source.state_dict()
            state["source_ended"] = self._has_started and self._has_ended()
        return state

    def _has_ended(self) -> bool:
        """Whether the data set has come to its end: its state is that of its next pass."""
        fetcher = getattr(self._iterator, "_dataset_fetcher", None)
        return self._iterator is None or bool(getattr(fetcher, "ended", False))

    def _resume(self, state: Mapping[str, Any]) -> None:
        check_sizes(state.get("sizes", {}), sizes_of(self.loader))
        saved = DrawRecord(state["record"]) if "record" in state else None
        self._record = saved or DrawRecord({"total": state["batches"]})
        if self._source is not None and "source" in state:
            self._source.load_state_dict(state["source"])
            if self._has_started:
                self._start = dict(state["start"])
                is_over = bool(state.get("source_ended"))
                self._iterator = iter(()) if is_over else self._open()
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


def source_of(loader: Any) -> Any | None:
    """The data set of a torch DataLoader that is resumed from the data set's own state."""
    if not isinstance(loader, torch.utils.data.DataLoader) or loader.num_workers:
        return None
    dataset = loader.dataset
    is_stream = isinstance(dataset, torch.utils.data.IterableDataset)
    plain = type(loader).__iter__ is torch.utils.data.DataLoader.__iter__
    return dataset if is_stream and plain and has_state(dataset) else None


def has_state(value: Any) -> bool:
    """Whether ``value`` has a ``state_dict`` that works, and ``load_state_dict``."""
    try:
        read, write = value.state_dict, value.load_state_dict
    except Exception:  # noqa: BLE001 - a wrapper may raise anything
        return False
    if not callable(read) or not callable(write):
        return False
    with preserved():
        try:
            return read() is not None
        except Exception:  # noqa: BLE001
            return False


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
