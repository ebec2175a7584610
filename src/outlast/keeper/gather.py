"""The parts of all ranks of one save, counted as they come.

What a part costs does not depend on how many there are already: nothing here looks at all of them
again, so that a save's end costs rank 0's keeper the same for each rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from outlast.keeper.commit import Part, differing

MAX_ASKED: Final = 16  # ranks that are asked for single digests, for each group that differs


class Gathering:
    """What is known of a save's parts.

    Attributes:
        parts: by rank.
        failed: ranks that have none, in the order in which they said so.
        void: names of the tensors that made it so.
        num_elements: how many elements they wrote together.
    """

    def __init__(self, world_size: int) -> None:
        self.parts: dict[int, Part] = {}
        self.failed: list[int] = []
        self.void: set[str] = set()
        self.num_elements = 0
        self._world_size = world_size
        self._seen: dict[str, dict[str, int]] = {}  # group → digest → the first rank that has it
        self._split: set[str] = set()
        self._asked: dict[int, dict[str, str] | None] | None = None

    def add(self, rank: int, part: Part) -> bool:
        """Take a rank's part; whether it had none before."""
        if rank in self.parts or not 0 <= rank < self._world_size:
            return False
        self.parts[rank] = part
        self.num_elements += part.num_elements
        if part.error:
            self.failed.append(rank)
            self.void.update(part.void)
        for group, digest in part.replicas.items():
            seen = self._seen.setdefault(group, {})
            seen.setdefault(digest, rank)
            if len(seen) > 1:
                self._split.add(group)
        return True

    @property
    def is_whole(self) -> bool:
        """Whether every rank has said something."""
        return len(self.parts) == self._world_size

    @property
    def differs(self) -> bool:
        """Whether what was taken for replicas is not the same everywhere."""
        return bool(self._split)

    def missing(self) -> Iterator[int]:
        """Ranks that are still waited for: those without a part, then those that were asked."""
        for rank in range(self._world_size):
            if rank not in self.parts:
                yield rank
        for rank, digests in (self._asked or {}).items():
            if digests is None:
                yield rank

    # --- which replicas differ --------------------------------------------------------------------

    def ask(self) -> dict[int, tuple[str, ...]]:
        """Whose single digests are needed, and of which groups: one rank for each version.

        Empty when they were asked for before.
        """
        if self._asked is not None:
            return {}
        needed: dict[int, list[str]] = {}
        for group in sorted(self._split):
            for rank in sorted(self._seen[group].values())[:MAX_ASKED]:
                needed.setdefault(rank, []).append(group)
        self._asked = dict.fromkeys(needed)
        return {rank: tuple(groups) for rank, groups in needed.items()}

    def answer(self, rank: int, digests: dict[str, str]) -> bool:
        """A rank's single digests, none if it cannot say; whether all that were asked are there."""
        if self._asked is None or self._asked.get(rank, digests) is not None:
            return False
        self._asked[rank] = digests
        return all(one is not None for one in self._asked.values())

    def waits_for(self, rank: int) -> bool:
        """Whether this rank was asked and has not answered."""
        return self._asked is not None and rank in self._asked and self._asked[rank] is None

    def differing(self) -> tuple[str, ...]:
        """What differs, by name, once all have answered."""
        return differing(one for one in (self._asked or {}).values() if one is not None)
