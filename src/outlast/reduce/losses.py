"""What our own sums do where another worker is lost: whoever knows of losses says it from above.

There is at most one who does, and mostly none: then an error is raised.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Final

# Whether an error is a loss elsewhere, so that the step is void and made again.
voiding: Final[list[Callable[[BaseException], bool]]] = []
# What is sent before training begins, and is of nothing where all have the same.
beginning: Final[list[Callable[[], AbstractContextManager[None]]]] = []


def is_void(error: BaseException) -> bool:
    """Whether nobody is to hear of ``error``, because the step is made again."""
    return any(judge(error) for judge in voiding)


@contextlib.contextmanager
def at_the_beginning() -> Iterator[None]:
    """Within, a model's first values are sent."""
    with contextlib.ExitStack() as stack:
        for enter in beginning:
            stack.enter_context(enter())
        yield
