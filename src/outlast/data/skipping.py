"""Batches that a rollback has left out are passed over, on every worker at the same place.

Batches are counted, not steps: a step that was undone comes again with another batch. They are
passed over when the batch behind them is asked for, so a position that is saved stands before them,
and whoever goes on from it passes them over again.

Guarantees: the batches behind them are those that would have come anyhow. With our own loaders, and
with others whose batches do not depend on random numbers drawn from the script's streams, the run
is bit for bit that on data without them.

What can go wrong: another number of samples in a batch than when it was counted makes it another
batch: do not change it before the rollback is behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outlast.data.feed import Feed
from outlast.policy.rollbacks import Batches, is_left_out


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
