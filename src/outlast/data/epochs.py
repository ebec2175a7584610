"""What all feeds over finite epochs share: counting, epoch ends, and a position that can be saved.

Guarantees: an epoch's start (its random-number states, ``set_epoch``) happens inside the call
that hands out its first batch, as it does in ``for epoch: for batch in loader``; the position
always tells the batches handed out, never what was loaded ahead.

``going_through`` shows how far a resume is with what it goes through again, where that takes more
than two seconds: on a terminal one line that moves and goes; elsewhere a line now and then.
"""

from __future__ import annotations

import abc
import contextlib
import operator
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch

from outlast.data import generators, random_state, shield
from outlast.data.generators import Held
from outlast.errors import ConfigError
from outlast.ledger.narrator import say

APPEARS_AFTER_S: Final = 2.0
MOVES_EVERY_S: Final = 0.2
SAYS_EVERY_S: Final = 30.0


@contextlib.contextmanager
def going_through(
    what: str, total: int, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[int], None]]:
    """Gives a function that is told how many of ``total`` are done.

    Args:
        what: what is gone through, in the plural.
        total: how many there are.
        clock: tells seconds.
    """
    began_s = clock()
    next_s = began_s + APPEARS_AFTER_S
    stream = sys.stderr
    is_terminal = stream is not None and stream.isatty()
    shown = False

    def done(count: int) -> None:
        nonlocal next_s, shown
        now_s = clock()
        if now_s < next_s or not 0 < count < total:
            return
        left_s = (now_s - began_s) / count * (total - count)
        text = f"going through the loader's {what} again: {count} of {total}, {left_s:.0f} s left"
        if is_terminal:
            shown, next_s = True, now_s + MOVES_EVERY_S
            with contextlib.suppress(OSError, ValueError):
                stream.write(f"\r\x1b[Koutlast: {text}")
                stream.flush()
        else:
            next_s = now_s + SAYS_EVERY_S
            say(text)

    try:
        yield done
    finally:
        if shown:
            with contextlib.suppress(OSError, ValueError):
                stream.write("\r\x1b[K")
                stream.flush()


_NAMES = {
    "outlast": "outlast.data.Loader",
    "stream": "outlast.data.Stream",
    "stateful": "a loader with state_dict and load_state_dict",
    "stock": "a torch DataLoader over a map-style data set",
    "iterable": "an iterable without a state",
}


def check_kind(state: Mapping[str, Any], kind: str, loader: Any) -> None:
    """Refuse a position that another kind of loader saved."""
    if state["kind"] != kind:
        saved = _NAMES.get(state["kind"], repr(state["kind"]))
        raise ConfigError(
            f"the checkpoint was saved with {saved}, and the loader given now "
            f"({type(loader).__name__}) is {_NAMES[kind]}: its position means nothing here. Give "
            "the loader that the checkpoint was saved with, or start a new job from its model"
        )


def check_world_size(state: Mapping[str, Any], world_size: int, loader: Any) -> None:
    """Refuse a position that belongs to a share of the data which no longer exists."""
    if state["world_size"] != world_size:
        raise ConfigError(
            f"the checkpoint was saved by {state['world_size']} workers, this attempt has "
            f"{world_size}, and the position of {type(loader).__name__} is one worker's own: "
            "samples would be repeated or left out. Resume with "
            f"{state['world_size']} workers, or use outlast.data.Loader (for streams "
            "outlast.data.Stream), which is exact at any number of workers"
        )


def _samplers_of(loader: Any) -> list[Any]:
    """Those of a loader, and those within them, each once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    within = getattr(batch_sampler, "batch_sampler", None)  # of one worker's share of batches
    inner = [getattr(one, "sampler", None) for one in (batch_sampler, within)]
    some = [getattr(loader, "sampler", None), batch_sampler, within, *inner]
    return list({id(one): one for one in some if one is not None}.values())


def generators_of(loader: Any) -> list[torch.Generator]:
    """The torch generators that a loader and its samplers draw from, each once."""
    found: list[torch.Generator] = []
    for holder in (loader, *_samplers_of(loader)):
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator) and not any(generator is g for g in found):
            found.append(generator)
    return found


def generator_states(loader: Any) -> list[Any]:
    """Where the generators of a loader stand, as tensors."""
    return [generator.get_state() for generator in generators_of(loader)]


def check_sizes(saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Refuse a position that counts other batches than this loader's."""
    for name in here.keys() & saved.keys():
        if saved[name] != here[name]:
            raise ConfigError(
                f"the checkpoint's DataLoader had {name}={saved[name]}, this one has "
                f"{name}={here[name]}: the batches consumed so far would be other ones. "
                "Build it as it was, or start a new job from the checkpoint's model"
            )


def restore_generators(loader: Any, states: list[Any]) -> None:
    """Put the generators of a loader back.

    Raises:
        ConfigError: it has more or fewer than it had.
    """
    # A sampler may make its generator where it is first iterated, and has not been here.
    for sampler in _samplers_of(loader):
        is_yet_to_come = getattr(sampler, "generator", False) is None
        if is_yet_to_come and len(generators_of(loader)) < len(states):
            sampler.generator = torch.Generator()
    generators = generators_of(loader)
    if len(states) != len(generators):
        raise ConfigError(
            f"the checkpoint's loader and samplers had {len(states)} torch generators, this "
            f"loader's have {len(generators)}; build the loader as it was built then"
        )
    for generator, saved in zip(generators, states, strict=True):
        generator.set_state(saved.cpu())


class Samplers:
    """A loader's samplers that want to know which epoch begins.

    A script with a loop for each epoch tells them itself, before each loop. So a loop counts from
    the epoch that it finds, and leaves them as it found them. One whose epoch cannot be read is
    told nothing for a loop's first epoch: what the script has told it stands.
    """

    def __init__(self, loader: Any) -> None:
        some = _samplers_of(loader)
        listening = [one for one in some if callable(getattr(one, "set_epoch", None))]
        self._found = [(one, _epoch_of(one)) for one in listening]
        self._told = 0

    def tell(self, epoch: int) -> None:
        """This loop's epoch of this number, from 0, begins."""
        self._told = max(self._told, epoch)
        for sampler, found in self._found:
            if found is not None:
                sampler.set_epoch(found + epoch)
            elif self._told:
                sampler.set_epoch(epoch)

    def leave(self) -> None:
        """The loop is over."""
        for sampler, found in self._found:
            if found is not None:
                sampler.set_epoch(found)
            elif self._told:
                sampler.set_epoch(0)  # where it stands in a process that begins with the next loop


def _epoch_of(sampler: Any) -> int | None:
    """Where it stands, under the names that samplers have for it; None where it does not say."""
    unset = None
    for name in ("epoch", "_epoch"):
        if hasattr(sampler, name):
            epoch = getattr(sampler, name)
            if epoch is None:
                unset = 0  # it has not been told yet
            elif not isinstance(epoch, bool):
                with contextlib.suppress(TypeError):
                    return operator.index(epoch)  # NumPy's numbers too
    return unset


def _parts_of(loader: Any) -> list[Any]:
    return [loader, getattr(loader, "dataset", None), *_samplers_of(loader)]


def _own(part: Any) -> dict[str, Any]:
    return getattr(part, "__dict__", {})


@contextlib.contextmanager
def standing(loader: Any) -> Iterator[None]:
    """Behind it, what a loader, its data set and its samplers count themselves is as it was."""
    before = [(own, {**own}) for own in map(_own, _parts_of(loader))]
    try:
        yield
    finally:
        for values, own in before:
            values.clear()
            values.update(own)


class EpochFeed(abc.ABC):
    """Batches of a loader, one epoch after the other.

    Attributes:
        epoch: the epoch of the last batch handed out, from 0.
        batches: batches handed out in that epoch.
        max_epochs: the feed ends rather than starting the epoch of this number; None for never.
        is_tied: the position belongs to the number of workers.
        goes_on: a later loop over the same loader begins where this one has ended.
        is_used_up: nothing comes of it any more, in any loop.
        doubts: after ``restore``, in words: what differs from the undisturbed run, and what to
            write instead.
        newest: after ``restore``, the batch in front of the position, where that was read.
    """

    kind: str
    is_tied = True
    goes_on = False

    def __init__(self, loader: Any, *, world_size: int) -> None:
        self.loader = loader
        self._iterated = loader
        self._samplers = Samplers(loader)
        self.epoch = 0
        self.batches = 0
        self.max_epochs: int | None = None
        self.doubts: list[str] = []
        self.newest: list[Any] = []
        self._held = Held()
        self._world_size = world_size
        self._has_started = False
        self._passed: list[
            int
        ] = []  # of the epoch's batches, from 1, those whose draws were undone
        self._next_epoch = 0
        self._iterator: Iterator[Any] | None = None
        self.is_used_up = False  # an iterator that cannot be had anew

    @property
    def is_hidden(self) -> bool:
        """Whether the loader goes on in a later loop without that being seen."""
        return False

    def go_on_from(self, before: object) -> None:
        """Another loop went through the same loader before this one."""
        del before  # each begins anew

    def hold(self, held: Held) -> None:
        """Keep these generators, too, where an epoch starts; before the first batch."""
        self._held = held

    def is_at_end(self) -> bool:
        """Whether it is known, without asking for it, that there is no further batch."""
        return self._is_in_last_epoch() and self.batches >= (self._length() or 1 << 62)

    def has_more(self) -> bool:
        """Whether it is known, without asking for it, that there is a further batch."""
        return not self._is_in_last_epoch() or self.batches < (self._length() or 0)

    def _is_in_last_epoch(self) -> bool:
        is_last = self.max_epochs is not None and self.epoch >= self.max_epochs - 1
        return is_last and self._has_started

    def _length(self) -> int | None:
        """Batches of an epoch, as far as the loader tells."""
        try:
            return len(self.loader)
        except (TypeError, NotImplementedError, AttributeError):
            return None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """The next batch.

        Raises:
            StopIteration: ``max_epochs`` are over, or a one-shot iterator ran out.
            ConfigError: the loader gives no batch.
        """
        while True:
            iterator = self._iterator
            if iterator is None:
                iterator = self._begin_epoch()
            try:
                batch = self._take(iterator)
            except StopIteration:
                self._end_epoch(iterator)
                continue
            self.batches += 1
            return batch

    def pass_over(self, step: int) -> None:
        """Leave out the next batch, and what loading it draws from the random streams.

        What an epoch's start draws stays drawn: the order of all its batches follows from it.
        """
        del step  # no record is kept of these samples
        epoch, is_inside = self.epoch, self._iterator is not None
        before = random_state.capture()
        next(self)
        if is_inside and self.epoch == epoch:
            random_state.restore(before)
            self._passed.append(self.batches)

    def _take(self, iterator: Iterator[Any]) -> Any:
        """The iterator's next batch."""
        return next(iterator)

    def _begin_epoch(self) -> Iterator[Any]:
        if self.max_epochs is not None and self._next_epoch >= self.max_epochs:
            raise StopIteration
        self._mark_start()
        self.epoch, self.batches, self._has_started = self._next_epoch, 0, True
        self._passed = []
        self._samplers.tell(self.epoch)
        self._iterator = self._open()
        return self._iterator

    def _end_epoch(self, iterator: Iterator[Any]) -> None:
        if self._is_one_shot(iterator):
            self.is_used_up = True
            raise StopIteration
        if not self.batches:
            raise ConfigError(
                f"the loader gave no batch in epoch {self.epoch}; its data set, its share for "
                "this worker or what its sampler yields is empty (or smaller than a batch, with "
                "drop_last)"
            )
        self._iterator = None
        self._next_epoch = self.epoch + 1

    def _is_one_shot(self, iterator: Iterator[Any]) -> bool:
        """Whether an exhausted ``iterator`` cannot be had anew."""
        return iterator is self.loader

    @abc.abstractmethod
    def _mark_start(self) -> None:
        """Keep what a resume in the epoch that begins will need."""

    def _open(self) -> Iterator[Any]:
        """A new iterator over the epoch that begins."""
        with generators.by_a_feed():
            return shield.start(self._iterated)

    def state(self) -> dict[str, Any]:
        """The position after the batches handed out so far: plain values and tensors."""
        return {
            "kind": self.kind,
            "epoch": self.epoch,
            "batches": self.batches,
            "world_size": self._world_size,
            "started": self._has_started,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position, before the first batch.

        Leaves this process's random numbers in any state: whoever calls restores them after.

        Raises:
            ConfigError: the position was saved with another kind of loader, by another number
                of workers, or does not exist in this loader.
        """
        check_kind(state, self.kind, self.loader)
        check_world_size(state, self._world_size, self.loader)
        self.epoch = self._next_epoch = int(state["epoch"])
        self.batches = int(state["batches"])
        self._has_started = bool(state["started"])
        self._resume(state)

    def again(self, state: Mapping[str, Any]) -> None:
        """As ``restore``, and have the newest batch, if that can be."""
        self.restore(state)

    def any_batch(self) -> list[Any]:
        """A batch for a loop that had ended; none of what would go on behind it in a later loop.

        What the loader, its data set and its samplers count themselves is then as it was.
        """
        held = [value for own in map(_own, _parts_of(self.loader)) for value in own.values()]
        if self.goes_on or any(hasattr(one, "__next__") for one in held):
            return []
        with standing(self.loader):
            try:
                return [next(self)]
            except StopIteration:
                return []
            finally:
                self.leave()
                self.close()

    @abc.abstractmethod
    def _resume(self, state: Mapping[str, Any]) -> None:
        """If an epoch had started: open it again, and go to ``self.batches``."""

    def leave(self) -> None:
        """The loop is over: samplers stand as the script had left them."""
        self._samplers.leave()

    def put_down(self) -> None:
        """Another loop begins; an iterator that the script holds, and its processes, live on."""
        if self.goes_on:
            self._iterator = None
        else:
            self.close()

    def begin_at(self, epoch: int) -> None:
        """The first epoch to come is this one; nothing where one has begun."""
        if not self._has_started:
            self.epoch = self._next_epoch = epoch

    def leave_epoch(self) -> None:
        """What is left of this epoch is not handed out: the next batch is the next one's first.

        Processes that persist live on, and take the next epoch's indices.
        """
        if not getattr(self._iterated, "persistent_workers", False):
            self._end_processes()
        self._iterator = None
        self._next_epoch = self.epoch + 1

    def close(self) -> None:
        """End the loader's processes; the position stays readable."""
        self._end_processes()

    def _end_processes(self) -> None:
        iterator, self._iterator = self._iterator, None
        shield.shut_down(iterator)
        if isinstance(self._iterated, torch.utils.data.DataLoader):
            lasting, self._iterated._iterator = self._iterated._iterator, None
            if lasting is not iterator:  # of persistent ones, between two epochs
                shield.shut_down(lasting)


class ReplayFeed(EpochFeed):
    """Resumes by starting the epoch again, from the random numbers that it started from."""

    def __init__(self, loader: Any, *, world_size: int) -> None:
        super().__init__(loader, world_size=world_size)
        self._start: dict[str, Any] = {}

    def _mark_start(self) -> None:
        self._start = {
            "random": random_state.capture(),
            "generators": generator_states(self.loader),
            "held": self._held.state(),
        }

    def state(self) -> dict[str, Any]:
        """The position, and the random-number states at the epoch's start.

        Before the first epoch, where the loader's generators stand; the process's own streams
        are the caller's to save.
        """
        start = self._start or {"generators": generator_states(self.loader)}
        return {**super().state(), "start": start, "passed": list(self._passed)}

    def _resume(self, state: Mapping[str, Any]) -> None:
        start = state["start"]
        if not self._has_started:
            restore_generators(self.loader, start["generators"])
            return
        self._start = dict(start)
        self._passed = [int(number) for number in state.get("passed", ())]
        self._replay()

    @abc.abstractmethod
    def _replay(self) -> None:
        """Rewind, open the epoch ``self.epoch`` and pass over ``self.batches``."""

    def _rewind(self) -> None:
        """Put all random-number states back to the epoch's start."""
        random_state.restore(self._start["random"])
        self._held.restore(self._start.get("held", ()))
        restore_generators(self.loader, self._start["generators"])
        self._samplers.tell(self.epoch)

    def _doubt(self, what: str, instead: str) -> None:
        """Note that what follows differs from the undisturbed run; see ``doubts``."""
        self.doubts.append(
            f"{what}: the samples that follow are not those of an undisturbed run. {instead}"
        )

    def _too_short(self, num_batches: int) -> ConfigError:
        return ConfigError(
            f"the checkpoint had consumed {self.batches} batches of epoch {self.epoch}, and the "
            f"loader has only {num_batches} there: the data set or the batch size has changed. "
            "Give it as it was, or start a new job from the checkpoint's model"
        )
