"""How far a long command is: a line on standard error, where a person is looking at it.

It appears after two seconds, so that what is quick says nothing; it goes when the work is done.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Final

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

APPEARS_AFTER_S: Final = 2.0


class Bar:
    """Bytes done of bytes in all, over several parts of the work.

    Args:
        total: bytes in all.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._before = self._done = 0
        self._label = ""
        self._began_s = time.monotonic()
        self._progress: Progress | None = None
        self._terminal = sys.stderr.isatty()

    def begin(self, label: str) -> None:
        """The next part starts; its bytes are counted on top of what was done before."""
        self._label, self._before = label, self._done

    def part(self, done: int, _total: int) -> None:
        """``done`` bytes of this part are done."""
        self.advance(self._before + done - self._done)

    def advance(self, num_bytes: int) -> None:
        """So many more bytes are done; may be called from any one thread at a time."""
        self._done += max(num_bytes, 0)
        if not self._terminal or time.monotonic() - self._began_s < APPEARS_AFTER_S:
            return
        if self._progress is None:
            self._progress = _line()
            self._progress.add_task(self._label, total=self._total)
            self._progress.start()
        self._progress.update(
            self._progress.task_ids[0],
            description=self._label,
            completed=min(self._done, self._total),
        )

    def close(self) -> None:
        """Take the line away."""
        if self._progress is not None:
            self._progress.stop()


def _line() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        DownloadColumn(),
        TimeRemainingColumn(),
        TextColumn("left"),
        console=Console(stderr=True),
        transient=True,
    )


@contextlib.contextmanager
def bar(total: int) -> Iterator[Bar]:
    """A bar for ``total`` bytes that goes away with the block."""
    shown = Bar(total)
    try:
        yield shown
    finally:
        shown.close()
