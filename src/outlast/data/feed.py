"""Feeds: endless batches from any loader, with a position that can be saved and gone back to.

Guarantees: what a feed hands out and what it draws from the script's random streams is what the
plain loop over the loader would; ``state`` tells the batches handed out, never those loaded
ahead; ``restore`` leaves nothing for the first batch to draw that belongs to the epoch's start.

What can go wrong depends on the kind, and each says so where it is written: "outlast" and "stream"
are exact at any number of workers; "stock" is exact at the same number of workers (``replay.py``);
"iterable" is loaded again up to the position, and exact as far as what it yields depends on the
random numbers at the epoch's start; "stateful" goes to the loader's own state where that gives the
newest batch again (``own_state.py``), else is as "iterable".

Batches that a rollback has left out are skipped, on every worker at the same place (``Skipping``).
Batches are counted, not steps: a step that was undone comes again with another batch. They are
passed over when the batch behind them is asked for, so a position that is saved stands before them,
and whoever goes on from it passes them over again.

Guarantees: the batches behind them are those that would have come anyhow. With our own loaders, and
with others whose batches do not depend on random numbers drawn from the script's streams, the run
is bit for bit that on data without them.

What can go wrong: another number of samples in a batch than when it was counted makes it another
batch: do not change it before the rollback is behind.

At a resume a worker goes on with its share of the positions that other workers saved
(``take_over``). Guarantees: whatever the number of workers was and is, each worker's record of
samples is carried on by one worker, and each lane of a stream is known to the worker that has it
now. With the same number of workers nothing but a worker's own part is read.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from outlast.data import generators, stream
from outlast.data.epochs import EpochFeed, check_kind, generator_states, restore_generators
from outlast.data.generators import Held, same
from outlast.data.loader import Loader
from outlast.data.order import held
from outlast.data.own_state import HeldState, is_of_others, is_stateful
from outlast.data.replay import IterableFeed, StockFeed, is_stock
from outlast.data.stream import Stream
from outlast.data.trail import Trail
from outlast.data.usage import check_iterable
from outlast.errors import ConfigError
from outlast.policy.rollbacks import Batches, is_left_out

# torchdata's name for "the epoch is over": a loader resumed from it goes straight into the next.
_FINISHED = "_iterator_finished"


class Feed(Protocol):
    """What a session iterates: batches of a loader, with a position.

    Attributes:
        loader: what it iterates.
        kind: "outlast", "stream", "stateful", "stock" or "iterable".
        epoch: the epoch of the last batch handed out (of its first sample), from 0.
        max_epochs: the feed ends rather than starting the epoch of this number.
        is_tied: its position is one worker's own, and belongs to the number of workers.
        goes_on: a later loop over the same loader begins where this one has ended.
        is_used_up: nothing comes of the loader any more, in any loop.
        doubts: after ``restore``, in words: what differs from the undisturbed run.
        newest: after ``restore``, the batch in front of the position, where that was read.
    """

    kind: str
    loader: Any
    is_tied: bool
    goes_on: bool
    is_used_up: bool
    epoch: int
    max_epochs: int | None
    doubts: list[str]
    newest: list[Any]

    @property
    def is_hidden(self) -> bool:
        """Whether the loader goes on in a later loop without that being seen."""

    def go_on_from(self, before: object) -> None:
        """Another loop, of the feed ``before``, went through the same loader before this one."""

    def hold(self, held: Held) -> None:
        """Keep these generators, too, where an epoch starts; before the first batch."""

    def is_at_end(self) -> bool:
        """Whether it is known, without asking for it, that there is no further batch."""

    def has_more(self) -> bool:
        """Whether it is known, without asking for it, that there is a further batch."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position, before the first batch; random numbers are the caller's."""

    def again(self, state: Mapping[str, Any]) -> None:
        """As ``restore``, and have the newest batch, if that can be."""

    def any_batch(self) -> list[Any]:
        """A batch for a loop that had ended, if that can be: the loader stands as before."""

    def __iter__(self) -> Iterator[Any]: ...

    def __next__(self) -> Any: ...

    def pass_over(self, step: int) -> None:
        """Leave out the next batch; ``step`` are completed. As ``next``, without its batch."""

    def state(self) -> dict[str, Any]:
        """The position after the batches handed out: plain values and tensors."""

    def leave(self) -> None:
        """The loop is over; what the script tells the loader's samplers is its own again."""

    def put_down(self) -> None:
        """Another loop begins: end the processes that were this loop's alone."""

    def close(self) -> None:
        """End the loader's processes."""


def open_feed(
    loader: Any,
    *,
    rank: int,
    world_size: int,
    trail: Trail | None = None,
    step: int = 0,
    is_trusted: bool = False,
) -> Feed:
    """The feed that suits ``loader``.

    Args:
        loader: an ``outlast.data.Loader`` or ``outlast.data.Stream``, anything iterable with
            ``state_dict`` and ``load_state_dict``, a torch DataLoader, or any other iterable of
            batches.
        rank: this worker's rank, from 0.
        world_size: number of workers.
        trail: the record of what is handed out, where the loader tells.
        step: completed steps of the job.
        is_trusted: whether a state of the loader's own is gone to without a trial.

    Raises:
        ConfigError: ``loader`` cannot be iterated, or not by this many workers.
    """
    trail = Trail() if trail is None else trail
    if isinstance(loader, Loader | Stream):
        return OutlastFeed(loader, rank=rank, world_size=world_size, trail=trail, step=step)
    check_iterable(loader)
    if is_stateful(loader):
        is_exact = is_trusted or getattr(type(loader), "has_exact_state", False)
        return (TrustedFeed if is_exact else StatefulFeed)(loader, world_size=world_size)
    if is_stock(loader):
        return StockFeed(loader, world_size=world_size)
    return IterableFeed(loader, world_size=world_size)


class OutlastFeed:
    """Our own loaders: one cursor for the whole job, valid at any number of workers."""

    is_tied = False
    goes_on = True
    is_used_up = False
    is_hidden = False

    def __init__(
        self, loader: Loader | Stream, *, rank: int, world_size: int, trail: Trail, step: int
    ) -> None:
        loader.set_worker(rank, world_size)
        self.kind = loader.kind
        self.loader = loader
        self.epoch = loader.epoch or 0
        self._trail = trail
        self._step = step
        self._max_epochs: int | None = None
        self.doubts: list[str] = []
        self.newest: list[Any] = []
        self._drawn: list[str] = []
        self._iterator: Iterator[Any] | None = None

    @property
    def max_epochs(self) -> int | None:
        """The feed ends rather than starting the epoch of this number."""
        return self._max_epochs

    @max_epochs.setter
    def max_epochs(self, value: int | None) -> None:
        if value is not None and self.loader.epoch is None:
            raise ConfigError(
                "nobody knows where an epoch of this stream ends; say how many steps there are, as "
                "in steps(stream, until=10_000), or give outlast.data.Stream the sizes of its "
                "shards"
            )
        self._max_epochs = value

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """The next batch; an epoch's last one may reach into the next epoch."""
        batch, epoch = self._take()
        self._trail.took(self.loader.noted, self._span())
        self.epoch = epoch
        return batch

    def pass_over(self, step: int) -> None:
        """Leave out the next batch: it is loaded, and noted as left out on purpose."""
        _, self.epoch = self._take()
        self._begin(step, left_out=self._size())

    def _span(self) -> tuple[int, int, int] | None:
        """(first, count, samples of all) of the newest batch, where batches are cut unlike."""
        loader = self.loader
        if not isinstance(loader, Loader) or loader.portion is None:
            return None
        if loader.global_batch and loader.has_usual_shares:
            return None
        portion = loader.portion
        return portion.place.position + portion.first, portion.num, portion.size

    def _size(self) -> int:
        """Samples of the newest batch, of all workers."""
        span = self._span()
        return self.loader.global_batch if span is None else span[2]

    def _take(self) -> tuple[Any, int]:
        """The next batch, and the epoch of its first sample."""
        epoch = self.loader.epoch or 0
        if self._max_epochs is not None and epoch >= self._max_epochs:
            raise StopIteration
        if self._iterator is None:
            self._begin(self._step)
            self._iterator = iter(self.loader)
        with generators.by_a_feed():
            return next(self._iterator), epoch

    def begin_again(self, step: int, *, in_hand: bool) -> None:
        """Other workers take over from here: the record has another stretch, as theirs has.

        Args:
            step: completed steps.
            in_hand: whether the newest batch belongs to the step behind it.
        """
        if self._iterator is None:  # it begins with the first batch
            self._step = step
            return
        self._begin(step, back=self._size() if in_hand else 0)
        if in_hand:
            self._trail.took(self.loader.noted, self._span())

    def _begin(self, step: int, left_out: int = 0, back: int = 0) -> None:
        loader = self.loader
        self._trail.begin(
            step=step,
            position=loader.position - back,
            global_batch=loader.global_batch,
            world_size=loader.world_size,
            slice_of_batch=loader.slice_of_batch,
            order=loader.order(),
            left_out=left_out,
        )

    def state(self) -> dict[str, Any]:
        """The loader's state, the epoch and the number of workers."""
        return {
            **self.loader.state_dict(),
            "drawn": sorted({*self._drawn, *self.loader.drawn()}),
            "epoch": self.epoch,
            "world_size": self.loader.world_size,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position, whatever the number of workers that saved it.

        Raises:
            ConfigError: another kind of loader saved it, or something changed that the order
                follows from.
        """
        check_kind(state, self.kind, self.loader)
        self.close()
        self.loader.load_state_dict(state)
        self.epoch = int(state["epoch"])
        self._drawn = [str(name) for name in state.get("drawn", ())]
        if self._drawn:
            self.doubts.append(
                f"the loader's processes draw from {' and '.join(self._drawn)}, which begins anew: "
                "what it draws is not what it would have drawn. Draw from torch's, NumPy's or "
                "Python's global generator, which is seeded for each sample"
            )

    def again(self, state: Mapping[str, Any]) -> None:
        """As ``restore``, and load the newest batch.

        A stream keeps no place before it: there it is the job's first one.
        """
        begin = self.loader.state_dict()
        self.restore(state)
        if self.kind == "outlast":
            begin = given_back({"position": state, BATCH: 1})[0]["position"]
        self.loader.load_state_dict(begin)
        self.newest = self.any_batch()
        self.loader.load_state_dict(state)

    def any_batch(self) -> list[Any]:
        """A batch for a loop that had ended, if that can be: the loader stands as before."""
        begin = self.loader.state_dict()
        with generators.by_a_feed(), contextlib.closing(self._iterate()) as batches:
            found = [*itertools.islice(batches, 1)]
        self.close()
        self.loader.load_state_dict(begin)
        return found

    def _iterate(self) -> Generator[Any]:
        yield from self.loader

    def go_on_from(self, before: object) -> None:
        """Nothing: the loader stands where it was."""

    def hold(self, held: Held) -> None:
        """Nothing: its epochs start from a seed, and it watches its processes itself."""

    def is_at_end(self) -> bool:
        """Whether the last epoch is over."""
        return self._max_epochs is not None and (self.loader.epoch or 0) >= self._max_epochs

    def has_more(self) -> bool:
        """Whether the last epoch is not over."""
        return not self.is_at_end()

    def leave(self) -> None:
        """Nothing: there is no sampler."""

    def put_down(self) -> None:
        """Another loop begins."""
        iterator, self._iterator = self._iterator, None
        close = getattr(iterator, "close", None)
        if close is not None:
            close()

    def close(self) -> None:
        """End the loader's processes; the position stays readable."""
        self.put_down()
        if isinstance(self.loader, Loader):
            self.loader.close()


class _WithOwnState(EpochFeed):
    """What feeds have in common whose loader has a state of its own.

    For torchdata's StatefulDataLoader a gap is closed here: a generator that the loader shares with
    its sampler is put back where it was (torchdata skips the draw for the processes' seed when it
    resumes).
    """

    kind = "stateful"
    _final_state: dict[str, Any] | None = None

    def _is_one_shot(self, iterator: Iterator[Any]) -> bool:
        # Many loaders are their own iterator and start over in __iter__; see if this one does.
        return iterator is self.loader and not self.batches

    def any_batch(self) -> list[Any]:
        """Of loaders whose next pass is known to begin anew, or where its state says."""
        is_known = isinstance(self.loader, torch.utils.data.DataLoader) or is_of_others(self.loader)
        return super().any_batch() if is_known else []

    def state(self) -> dict[str, Any]:
        """The position, what the loader's own state adds, and where its generators stand."""
        if self._final_state is not None:
            return self._final_state
        generators_now = {"generators": generator_states(self.loader)}
        return {**super().state(), **self._of_loader(), **generators_now}

    def _of_loader(self) -> dict[str, Any]:
        return {}

    def _resume(self, state: Mapping[str, Any]) -> None:
        self._go_on(state)
        restore_generators(self.loader, state["generators"])

    def _go_on(self, state: Mapping[str, Any]) -> None:
        """Go to the state that the loader had behind the newest batch."""
        if state["loader"] is not None:
            self._samplers.tell(self.epoch)
            self.loader.load_state_dict(state["loader"])
        if self._has_started:
            self._iterator = self._open()

    def close(self) -> None:
        """End the loader's processes; the position stays readable."""
        self._final_state = self.state()
        super().close()


class TrustedFeed(_WithOwnState):
    """A loader whose ``state_dict`` stands right behind the newest batch, and leaves nothing out.

    Those that Outlast puts around a framework's loaders say so of themselves (``has_exact_state``).
    For torchdata's StatefulDataLoader another gap is closed here: a state taken after an epoch's
    end leads to the end of that epoch, not into the next.
    """

    def again(self, state: Mapping[str, Any]) -> None:
        """As ``restore``, and have the newest batch, where the loader has it."""
        self.restore(state)
        newest = getattr(self.loader, "newest", [])
        self.newest = [*newest]
        newest.clear()  # a batch is large

    def _mark_start(self) -> None:
        """Nothing: the loader's own state is all there is to keep."""

    def _of_loader(self) -> dict[str, Any]:
        # Asked before it started, a StatefulDataLoader would start, and draw random numbers.
        is_torch = isinstance(self.loader, torch.utils.data.DataLoader)
        own = self.loader.state_dict() if self._has_started or not is_torch else None
        if is_torch and own and self._iterator is None and _FINISHED in own:
            own = {**own, _FINISHED: False}
        return {"loader": own}


class StatefulFeed(_WithOwnState, IterableFeed):
    """A loader with ``state_dict`` and ``load_state_dict``, used as it is.

    Exact as far as the loader's own state is; where that gives another batch than came, the epoch
    is gone through again.
    """

    def __init__(self, loader: Any, *, world_size: int) -> None:
        super().__init__(loader, world_size=world_size)
        self._own = self._holder = HeldState(loader)
        self.goes_on = False

    @property
    def is_hidden(self) -> bool:
        """Not where it has a state."""
        return False

    def _of_loader(self) -> dict[str, Any]:
        """The state behind the newest batch, where a step may set it itself: a pace, say."""
        is_known = isinstance(self.loader, torch.utils.data.DataLoader) or is_of_others(self.loader)
        return {"behind": self._holder.read(None)} if self._has_started and not is_known else {}

    def _go_on(self, state: Mapping[str, Any]) -> None:
        if state.get("loader") is not None:  # of an older version
            super()._go_on(state)
            return
        IterableFeed._resume(self, state)
        behind = state.get("behind")
        if behind is not None and not same([behind], [self._holder.read(None)]):
            self._iterator = self._holder.resumed(behind, self._open)


class Skipping:
    """One worker's count of batches.

    Args:
        ranges: what is left out.

    Attributes:
        loop: number of the loop, from 1.
        batch: number of its newest batch, handed out or passed over.
    """

    def __init__(self, ranges: Sequence[Batches]) -> None:
        self._ranges = ranges
        self.loop = 0
        self.batch = 0

    def begin(self, loop: int, batch: int) -> None:
        """A loop goes on behind ``batch``, 0 for its beginning."""
        self.loop, self.batch = loop, batch

    def next(self, feed: Feed, step: int) -> Any:
        """The next batch that is not left out; ``step`` are completed.

        Raises:
            StopIteration: the feed has ended.
        """
        while self._ranges and is_left_out(self._ranges, self.loop, self.batch + 1):
            feed.pass_over(step)
            self.batch += 1
        batch = next(feed)
        self.batch += 1
        return batch


TRAIL = "trail"
BATCH = "batch"


def place(loop: int, feed: Feed, trail: Mapping[str, Any], batch: int) -> dict[str, Any]:
    """Where a worker is in its data, or will be once the step in progress is completed.

    Args:
        loop: number of the loop that the feed belongs to.
        feed: what it iterates.
        trail: the record of samples, as data.
        batch: number of the loop's newest batch, those left out included.
    """
    return {"loop": loop, BATCH: batch, "position": feed.state(), TRAIL: trail}


def given_back(
    placed: Mapping[str, Any],
) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
    """The place before the newest batch of ``placed``, and the random numbers of that moment.

    A stream knows only what is behind the batch, and so does a loader with a state of its own in
    an epoch's first batch: ``placed`` is what there is then. The random numbers are known for an
    epoch's first batch, else None: what loading the batch has drawn stays drawn.
    """
    position = placed["position"]
    kind, batches = position["kind"], position.get("batches", 0)
    random = None
    if "source" in position or "loader" in position:  # a state that is behind the batch
        return placed, None
    if kind == "outlast":
        at = position["position"] - position["global_batch"]
        before = position.get("before", {"position": at})
    elif kind in ("stock", "iterable", "stateful") and batches > 1:
        passed = [number for number in position.get("passed", ()) if number < batches]
        before = {"batches": batches - 1, "passed": passed}
        if "tried" in position:  # where its own state is that in front of the batch
            before["tried"] = {**position["tried"], "word": None}
    elif kind in ("stock", "iterable") and batches:  # as if the epoch had not begun
        start = dict(position["start"])
        random = start.pop("random")
        before = {"batches": 0, "passed": [], "started": False, "start": start}
    else:
        return placed, None
    # What came is not compared then: its word has the batch in it.
    if kind != "outlast" and "word" in position:
        before["word"] = None
    if "record" in position:
        record = position["record"]
        before["record"] = {**record, "total": record["total"] - 1, "word": None}
    return {**placed, BATCH: placed[BATCH] - 1, "position": {**position, **before}}, random


def take_over(
    read: Callable[[int], Mapping[str, Any]], saved_by: int, rank: int, world_size: int
) -> tuple[dict[str, Any], Trail]:
    """The data state that this worker goes on from.

    Args:
        read: rank → what that rank saved; ``{}`` where no loader had begun.
        saved_by: how many workers saved.
        rank: this worker.
        world_size: how many there are now.

    Returns:
        What :func:`read` gave for one of them, with the parts of others that are this worker's,
        and the record of samples to go on with.
    """
    base = dict(read(rank % saved_by))
    # Worker r of W has the r-th of W parts of everything that is dealt out: ranks, lanes, samples.
    position = base.get("position", {})
    if position.get("kind") == stream.KIND:
        lanes = held(position["lanes"], rank, world_size)
        points: dict[str, Any] = {}
        for other in range(saved_by):
            if _meet(lanes, held(position["lanes"], other, saved_by)):
                points |= read(other)["position"]["points"]
        mine = {lane: point for lane, point in points.items() if int(lane) in lanes}
        base["position"] = {**position, "points": mine}
    trail = record_of(read, saved_by, rank, world_size)
    if TRAIL in base:
        base[TRAIL] = trail.state()
    return base, trail


def record_of(
    read: Callable[[int], Mapping[str, Any]], saved_by: int, rank: int, world_size: int
) -> Trail:
    """The record of samples that ``rank`` goes on with; arguments as of :func:`take_over`."""
    trail, base = Trail(), read(rank % saved_by)
    if TRAIL in base:
        others = held(saved_by, rank, world_size)
        trail.restore(base[TRAIL], [read(other)[TRAIL] for other in others])
    return trail


def _meet(one: range, other: range) -> bool:
    return max(one.start, other.start) < min(one.stop, other.stop)
