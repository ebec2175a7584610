"""Who reaches whom: pairs of machines that are cut off from each other, and who leaves for it.

Rejected: re-forming whenever two machines cannot reach each other (for ever, when only that pair
is cut).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

FOREVER = float("inf")


class Reach:
    """The pairs that are known to be cut, each since when."""

    def __init__(self) -> None:
        self._pairs: dict[frozenset[str], float] = {}

    def __bool__(self) -> bool:
        return bool(self._pairs)

    def apart(self, one: str, other: str, now_s: float) -> None:
        """Two machines cannot reach each other."""
        self._pairs.setdefault(frozenset((one, other)), now_s)

    def together(self, one: str, other: str) -> None:
        """They reach each other again."""
        self._pairs.pop(frozenset((one, other)), None)

    def forget(self, node: str) -> None:
        """A machine is gone."""
        if self._pairs:
            self._pairs = {pair: t for pair, t in self._pairs.items() if node not in pair}

    def touching(self, nodes: Collection[str]) -> set[str]:
        """All of a pair that one of ``nodes`` belongs to."""
        found = [pair for pair in self._pairs if any(node in nodes for node in pair)]
        return {node for pair in found for node in pair}

    def cut_off(
        self,
        nodes: Collection[str],
        *,
        first: str,
        rank: Callable[[str], Any],
        until_s: float = FOREVER,
    ) -> set[str]:
        """Who has to leave so that the others all reach each other: the fewest, or nearly so.

        Whoever is cut off from most goes first; of equals the one of the higher rank.

        Args:
            nodes: among these.
            first: the one that stays in any case.
            rank: orders them.
            until_s: pairs that were cut later do not count yet.
        """
        if not self._pairs:
            return set()
        left = [
            pair
            for pair, since_s in self._pairs.items()
            if since_s <= until_s and all(node in nodes for node in pair)
        ]
        out: set[str] = set()
        while left:
            count = Counter(node for pair in left for node in pair if node != first)
            worst = max(count, key=lambda node: (count[node], rank(node)))
            out.add(worst)
            left = [pair for pair in left if worst not in pair]
        return out
