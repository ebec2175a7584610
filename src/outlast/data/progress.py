"""How far a resume is with what it goes through again, where that takes more than two seconds.

On a terminal one line that moves and goes; elsewhere a line now and then.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Final

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
