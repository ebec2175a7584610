"""Who is here, as the coordinator's mind knows them: facts alone, no decision.

An event costs the same at ten machines and at ten thousand: each set below is kept, not computed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from outlast.policy.reach import Reach
from outlast.policy.seats import Seat


class Presence:
    """The machines of a job that have come, and those of its last attempt.

    Args:
        first: the coordinator's own machine, which gets rank 0.
        members: of the last attempt, if it may still run somewhere.
        ended: those of them whose processes seem to have ended.
        awaited: those of them that are expected to come to this coordinator.
    """

    def __init__(
        self, first: str, members: Iterable[str], ended: Iterable[str], awaited: Iterable[str]
    ) -> None:
        self.members: tuple[str, ...] = tuple(members)
        self._places = {node: place for place, node in enumerate(self.members)}
        self._first = first
        self._seats: dict[str, Seat] = {}
        self._count = 0
        # Of those who are here.
        self._ready: set[str] = set()  # and do not leave
        self._late: dict[str, None] = {}  # members with workers, in the order they came
        self._warming: set[str] = set()
        self._leaving: set[str] = set()
        self._hung: dict[str, bool] = {}  # and whether they were ready
        # Of the members, here or not.
        self._here: set[str] = set()
        self._silent = set(self.members) - set(ended)  # not here, and perhaps alive
        self._left: set[str] = set()  # have said that they go for good
        self._finished: set[str] = set()
        self._expected = set(awaited) - {first}
        self._reach = Reach()

    def _rank(self, node: str) -> tuple[bool, int, int]:
        """The coordinator's machine first, then the members as they were, then by arrival."""
        place = self._places.get(node, len(self._places))
        return node != self._first, place, self._seats[node].order

    def _cut_off(self, nodes: Collection[str], until_s: float = float("inf")) -> set[str]:
        return self._reach.cut_off(nodes, first=self._first, rank=self._rank, until_s=until_s)

    def _num_hung(self, *, without: Collection[str] = ()) -> int:
        """How many members hang, some not counted."""
        return sum(node in self._here and node not in without for node in self._hung)

    def _has_majority(self, without: Collection[str]) -> bool:
        """Whether more than half of the members are here, some not counted."""
        votes = len(self.members) - len(without)
        return 2 * (len(self._here) - self._num_hung()) > votes > 0

    def _able(self) -> list[Seat]:
        """Those who could be in another attempt, as far as known."""
        cannot = self._leaving | self._warming | self._hung.keys()
        return [seat for node, seat in self._seats.items() if node not in cannot]

    @property
    def _num_able(self) -> int:
        return len(self._seats) - len(self._leaving | self._warming | self._hung.keys())

    def _host(self, node: str) -> str:
        seat = self._seats.get(node)
        return seat.host if seat else node
