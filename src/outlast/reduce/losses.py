"""Where rooms above hook into our sums: to measure waits, and to go on when a worker is lost.

The "losses" are lost workers, not values of a loss function. This room knows nothing of either: who
does puts a function into one of the lists here. Each list has one entry at most, and mostly none;
then a wait costs a look at a list, and an error is raised as it came.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Final, Protocol

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
