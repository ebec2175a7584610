"""Who coordinates next, and when a machine that seeks asks again. All machines compute the same.

Who cannot reach the one that coordinates looks at its counter on storage. What can go wrong there:
storage that stalls stops the counter of a healthy coordinator, too, and keeps back whoever reads
it just then. So only prompt looks count, several of them, and a machine that has no part in the
attempt is patient for longer than storage may stall.

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

PROMPT_S: Final = 1.0  # that a look may take longer than twice the quickest one
LOOKS_MIN: Final = 4  # that have to see a counter stand still
REFUSED_S: Final = 2.5  # without a sign of life, after which one that is not there is believed gone
UNREACHED_S: Final = 6.0
STRANGER_S: Final = 12.0  # for one that has no part in the attempt: storage may stall for 10 s


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


class CounterWatch:
    """Whether somebody's counter on storage stands still, for one that looks now and then."""

    def __init__(self) -> None:
        self._seen: object = None
        self._since_s = self._looked_s = 0.0
        self._looks = 0  # that saw the same, all of them prompt
        self._quickest_s = 0.0

    def seen(self, what: object, *, asked_s: float, answered_s: float) -> None:
        """Storage was asked then, and said ``what``."""
        took_s = answered_s - asked_s
        is_prompt = took_s <= PROMPT_S + 2 * self._quickest_s
        self._quickest_s = min(took_s, self._quickest_s or took_s)
        if not is_prompt:  # it may have stood still for want of storage
            self._looks = 0
            return
        if not self._looks or what != self._seen:
            self._seen, self._since_s, self._looks = what, answered_s, 0
        self._looks += 1
        self._looked_s = asked_s

    def failed(self) -> None:
        """Storage answers with an error, and may have answered the other one with errors, too."""
        self._looks = 0

    def stands_still(self, limit_s: float) -> bool:
        """Whether it has been seen to stand still for longer than this."""
        return self._looks >= LOOKS_MIN and self._looked_s - self._since_s > limit_s


def gone_after_s(*, refused: bool, here: bool, member: bool) -> float:
    """How long a coordinator out of reach may give no sign of life before its number is passed.

    Args:
        refused: nobody listens there, as some machine's kernel or a firewall says.
        here: it was on this very machine.
        member: whoever asks has a part in its attempt.
    """
    limit_s = REFUSED_S if refused else UNREACHED_S
    return limit_s if member or (refused and here) else max(limit_s, STRANGER_S)
