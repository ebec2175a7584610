"""A global batch cut into a fixed number of shards, and the part of it that one worker holds.

Guarantees: which samples a shard has depends on nothing but the batch; which shards a worker holds
depends on nothing but the number of shards and of workers. Each shard is collated by itself: its
padding and its shape are the same wherever it is computed.

Rejected: cutting up the batch that a worker was given (a collated batch has been padded to what is
in it, and random numbers of ``collate_fn`` belong to all of it).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outlast.errors import ConfigError


def held(num_shards: int, rank: int, world_size: int) -> range:
    """The shards that a worker holds, in order.

    All workers' follow each other without a gap; their numbers differ by one at most. Where there
    are more workers than shards, some have one and the others none.
    """
    return range(num_shards * rank // world_size, num_shards * (rank + 1) // world_size)


class Shards:
    """What a worker holds of one global batch; made by ``outlast.data.Loader(…, shards=V)``.

    Attributes:
        parts: one batch for each shard held here, in order; may be empty.
        of: number of shards of the global batch.
        first: which of them ``parts`` begins with.
        position: samples that the job has consumed before, or another number that no other batch
            of the job has; all workers' are the same. Random numbers are seeded with it.

    Raises:
        ConfigError: the numbers do not fit.
    """

    def __init__(self, parts: Sequence[Any], *, of: int, first: int, position: int) -> None:
        if first < 0 or first + len(parts) > of or position < 0:
            raise ConfigError(
                f"{len(parts)} shards from number {first} on, at position {position}, are not "
                f"part of {of} shards; shards and positions count from 0"
            )
        self.parts = list(parts)
        self.of = of
        self.first = first
        self.position = position

    def __len__(self) -> int:
        return len(self.parts)

    def pin_memory(self) -> Shards:
        """The same in pinned memory; torch's DataLoader asks for it."""
        from torch.utils.data._utils.pin_memory import pin_memory

        parts = [pin_memory(part) for part in self.parts]
        return Shards(parts, of=self.of, first=self.first, position=self.position)
