"""Who coordinates next, and when a machine that seeks asks again. All machines compute the same.

Storage must not feel how many machines there are. A few ask often, so that a dead coordinator is
replaced soon; where there are many, the others take turns, and all together ask about
``ASKS_PER_S`` times a second.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

ASKS_PER_S: Final = 200.0
AGAIN_S: Final = 0.2
AGAIN_MAX_S: Final = 2.0
EAGER: Final = int(ASKS_PER_S * AGAIN_S)  # so many machines may ask every AGAIN_S


def heirs(
    members: Sequence[str],
    labels: Mapping[str, Mapping[str, str]],
    *,
    lost: str,
    ended: Collection[str] = (),
    departing: Collection[str] = (),
) -> list[str]:
    """Who is to coordinate when ``lost`` is gone, best first.

    Machines go together (a rack, a zone): those that have little in common with the lost one come
    first, in the order of their ranks. Machines that are about to leave only if nobody else is
    there.

    Args:
        members: of the attempt, by rank.
        labels: of each machine, as far as known.
        lost: who coordinated.
        ended: those that are known to have ended.
        departing: those that have had notice.
    """
    theirs = set(labels.get(lost, {}).items())
    alive = [node for node in members if node != lost and node not in ended]
    staying = [node for node in alive if node not in departing] or alive
    return sorted(staying, key=lambda node: len(theirs & set(labels.get(node, {}).items())))


class Seeking:
    """How often one machine asks storage who coordinates.

    Args:
        machines: that may seek at once, as far as known.
        chance: drawn evenly from 0 to 1, as in the methods: no two machines keep time together.
    """

    def __init__(self, machines: int, chance: float) -> None:
        self._machines = machines
        self.is_eager = machines <= EAGER or chance < EAGER / machines

    def first_s(self, chance: float) -> float:
        """How long to wait before the first question."""
        return 0.0 if self.is_eager else self._machines / ASKS_PER_S * chance

    def again_s(self, tried_s: float, chance: float) -> float:
        """How long to wait before the next question, after having sought for ``tried_s``."""
        if self.is_eager:
            wait_s = min(max(AGAIN_S, tried_s / 10), AGAIN_MAX_S)
        else:
            wait_s = self._machines / ASKS_PER_S
        return wait_s * (0.5 + chance)
