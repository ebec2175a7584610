"""Which machines take part in one round of the doctor.

Each machine counts on storage while it is there; one is taken for present when its number was seen
to go on, so that no clock is compared and nothing that a dead process left is waited for. The first
by name proposes the round; storage decides between two proposals (they have the same number).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

SETTLE_S: Final = 5.0  # for more machines than the fewest, after the last one came
STILL_S: Final = 15.0  # without going on, after which one is gone


class Company:
    """What one machine sees of the others, on any one clock.

    Args:
        me: its own name.
        min_nodes, max_nodes: machines that the job wants.
        settle_s: see ``SETTLE_S``.
        still_s: see ``STILL_S``.
    """

    def __init__(
        self,
        me: str,
        min_nodes: int,
        max_nodes: int,
        *,
        settle_s: float = SETTLE_S,
        still_s: float = STILL_S,
    ) -> None:
        self._me = me
        self._min, self._max = min_nodes, max_nodes
        self._settle_s, self._still_s = settle_s, still_s
        self._counts: dict[str, int] = {}
        self._moved_s: dict[str, float] = {}  # node → when its number was last seen to go on
        self._taken: set[str] = set()
        self._arrival_s: float | None = None

    def seen(self, counts: Mapping[str, int], now_s: float) -> None:
        """What storage holds now: node → its number."""
        for node, count in counts.items():
            before = self._counts.get(node)
            if before is not None and before != count:
                if node not in self._moved_s:
                    self._arrival_s = now_s
                self._moved_s[node] = now_s
            self._counts[node] = count
        for node in self._moved_s.keys() - counts.keys():  # it has gone on purpose
            del self._moved_s[node]

    def taken(self, nodes: Iterable[str]) -> None:
        """These are in a round already."""
        self._taken |= set(nodes)

    def present(self, now_s: float) -> list[str]:
        """Those who are here and free, this machine among them, by name."""
        alive = {
            node for node, moved_s in self._moved_s.items() if now_s - moved_s <= self._still_s
        }
        return sorted((alive | {self._me}) - (self._taken - {self._me}))

    def is_gone(self, node: str, now_s: float) -> bool:
        """Whether one that was here goes on no more."""
        moved_s = self._moved_s.get(node)
        return moved_s is None or now_s - moved_s > self._still_s

    def proposal(self, now_s: float) -> list[str]:
        """The machines of a round that this one should propose now; none while it should not."""
        present = self.present(now_s)
        if len(present) < self._min or present[0] != self._me:
            return []
        since_s = self._arrival_s if self._arrival_s is not None else now_s
        if len(present) < self._max and now_s - since_s < self._settle_s:
            return []
        return present[: self._max]
