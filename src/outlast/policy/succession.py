"""When another machine counts as lost, which one coordinates then, and how often a machine asks.

All machines compute the same.

A connection (:class:`Silence`) is lost when the other machine's kernel does not acknowledge what we
send: it does so however busy its processes are, so a loaded machine is not taken for a lost one.
The time runs from the first question that was not acknowledged, not from the last sign of life, and
begins anew where *we* did not look for long (a virtual machine that stands still takes its kernel
with it): nobody is to blame for that. The limit adapts: where acknowledgements were seen to take
long, silence must last longer.

A machine that cannot reach the coordinator looks at its counter on storage (:class:`CounterWatch`).
What can go wrong there: storage that stalls stops the counter of a healthy coordinator, too, and
keeps back whoever reads it just then. So only prompt looks count, several of them, and a machine
that has no part in the attempt is patient for longer than storage may stall.

Storage must not feel how many machines there are. A few ask often, so that a dead coordinator is
replaced soon; where there are many, the others take turns, and all together ask about
``ASKS_PER_S`` times a second.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Final

DELAY_FACTOR: Final = 4.0  # times the longest delay seen lately
GROWTH_MAX: Final = 10.0  # times the limit asked for, at most
DELAYS_KEPT: Final = 256
FORGIVEN: Final = 2  # times in a row that we may have been held up
ASKS_PER_S: Final = 200.0
AGAIN_S: Final = 0.2
AGAIN_MAX_S: Final = 2.0
EAGER: Final = int(ASKS_PER_S * AGAIN_S)  # so many machines may ask every AGAIN_S

PROMPT_S: Final = 1.0  # that a look may take longer than twice the quickest one
LOOKS_MIN: Final = 4  # that have to see a counter stand still
REFUSED_S: Final = 2.5  # without a sign of life, after which one that is not there is believed gone
UNREACHED_S: Final = 6.0
STRANGER_S: Final = 12.0  # for one that has no part in the attempt: storage may stall for 10 s


# --- a connection --------------------------------------------------------------------------------


class Silence:
    """The judgement of one connection; times in seconds of any one clock.

    Args:
        limit_s: how long silence may last on a network that answers at once.
        recent: how many delays are remembered.
    """

    def __init__(self, limit_s: float, *, recent: int = DELAYS_KEPT) -> None:
        self._least_s = limit_s
        self._asked_s: float | None = None
        self._looked_s: float | None = None
        self._forgiven = 0
        self._delays: deque[float] = deque(maxlen=recent)

    @property
    def limit_s(self) -> float:
        """How long silence may last now."""
        wanted_s = DELAY_FACTOR * max(self._delays, default=0.0)
        return min(max(self._least_s, wanted_s), GROWTH_MAX * self._least_s)

    def excuse(self) -> None:
        """We could not hear anything: what was asked before teaches nothing."""
        self._asked_s = None

    def asked(self, now_s: float) -> None:
        """Something was sent that is to be acknowledged."""
        if self._asked_s is None:
            self._asked_s = now_s

    def seen(self, at_s: float) -> None:
        """The newest sign of life is of this time."""
        if self._asked_s is not None and at_s >= self._asked_s:
            self._delays.append(at_s - self._asked_s)
            self._asked_s = None
            self._forgiven = 0

    def is_lost(self, now_s: float) -> bool:
        """Whether silence has lasted too long; to be asked several times within the limit."""
        looked_s, self._looked_s = self._looked_s, now_s
        if self._asked_s is None:
            return False
        was_held_up = looked_s is not None and now_s - looked_s > self._least_s / 2
        if was_held_up and self._forgiven < FORGIVEN:
            self._forgiven += 1
            self._asked_s = now_s
        return now_s - self._asked_s > self.limit_s


# --- who is next ---------------------------------------------------------------------------------


def successors(
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
