"""Where rooms above hook into our sums: waits, workers that are lost, workers that are late.

The "losses" are lost workers, not values of a loss function. This room knows nothing of either: who
does puts a function into one of the lists here. Each list has one entry at most, and mostly none;
then a wait costs a look at a list, and an error is raised as it came.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Final, Protocol

import torch

from outlast.data.order import Shards
from outlast.data.trail import NOTHING, Noting, Rows


class WaitListener(Protocol):
    """Whoever measures waiting."""

    def begin(self) -> object:
        """This thread waits from now on."""

    def end(self) -> None:
        """It has what it waited for."""


listeners: Final[list[WaitListener]] = []


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Waits for other workers are made in here."""
    told = [listener for listener in listeners if listener.begin()]
    try:
        yield
    finally:
        for listener in told:
            listener.end()


# Whether an error is a loss elsewhere, so that the step is void and made again.
voiding: Final[list[Callable[[BaseException], bool]]] = []
# What workers tell each other in a message that is sent anyway, at each step's end.
noting: Final[list[Noting]] = []
# What is sent before training begins, and is of nothing where all have the same.
beginning: Final[list[Callable[[], AbstractContextManager[None]]]] = []


LATE_WORDS: Final = 6  # what each worker says of its time
NO_TIME: Final = [0.0] * LATE_WORDS


class LateWatch(Protocol):
    """Whoever sees to it that nobody waits for long for a worker that is late.

    Attributes:
        may_leave_out: whether shards may be left out, of any worker.
    """

    may_leave_out: bool

    def is_of(self, model: torch.nn.Module) -> bool:
        """Whether it looks after the sums of this model."""

    def begins(self, batch: Shards) -> None:
        """The first shard of ``batch`` is about to be handed out."""

    def goes_on(self, num_made: int) -> bool:
        """Whether another shard is to be made, once so many are."""

    def words(self) -> list[float]:
        """What this worker says, ``LATE_WORDS`` of them, below 2^53."""

    def heard(self, rows: torch.Tensor) -> None:
        """What all workers said: (world_size, LATE_WORDS), float64."""

    def left_out(self, num_made: Sequence[int], num_held: Sequence[int]) -> None:
        """In this step not all shards were made that each worker holds."""


late: Final[list[LateWatch]] = []


def late_watch_of(model: torch.nn.Module) -> LateWatch | None:
    """Who looks after it."""
    return next((one for one in late if one.is_of(model)), None)


class Sending:
    """Sums of ours that are being made.

    Attributes:
        is_void: whether they had no end, and nobody is to hear of it: the step is made again.
    """

    is_void = False


sending: Final[list[Sending]] = []  # in the thread that trains


@contextlib.contextmanager
def sent() -> Iterator[Sending]:
    """Within, sums are ours: an error that is a loss elsewhere ends them, and is not raised.

    Raises:
        RuntimeError: another worker is gone, and nobody knows why.
    """
    sending.append(one := Sending())
    try:
        yield one
    except RuntimeError as error:
        if not any(judge(error) for judge in voiding):
            raise
        one.is_void = True
    finally:
        sending.remove(one)


def words() -> list[float]:
    """What this worker says of itself."""
    return next((one.words() for one in noting), NOTHING)


def heard(rows: Rows) -> None:
    """All workers' words are there, a row each."""
    for one in noting:
        one.heard(rows)


@contextlib.contextmanager
def at_the_beginning() -> Iterator[None]:
    """Within, a model's first values are sent."""
    with contextlib.ExitStack() as stack:
        for enter in beginning:
            stack.enter_context(enter())
        yield
