"""What our own sums do where another worker is lost: whoever knows of losses says it from above.

There is at most one who does, and mostly none: then an error is raised, and nothing is noted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Final

from outlast.data.others import NOTHING, Noting, Rows

# Whether an error is a loss elsewhere, so that the step is void and made again.
voiding: Final[list[Callable[[BaseException], bool]]] = []
# What workers tell each other in a message that is sent anyway, at each step's end.
noting: Final[list[Noting]] = []
# What is sent before training begins, and is of nothing where all have the same.
beginning: Final[list[Callable[[], AbstractContextManager[None]]]] = []


def is_void(error: BaseException) -> bool:
    """Whether nobody is to hear of ``error``, because the step is made again."""
    return any(judge(error) for judge in voiding)


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
