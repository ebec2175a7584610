"""All ranks leave an attempt together, at a boundary, with nobody lost: into the next one, or home.

Whoever has yet to end the step needs the others' connections: each rank says in words that it is at
the boundary. Rank 0 hears all of them, and says what is done: those whose machines have had notice
leave the job, the others go on in their processes; or all save here and end, where one of them
cannot go on. So no rank goes on while another waits for its part of a checkpoint.

What a rank alone knows (:mod:`outlast.attempt.beat`) would go with its machine. Two others take it
before anybody goes, of those who stay too: a machine may be lost on the way, or have notice after
rank 0's word.

Rejected: a barrier (gloo may lose one whose connections end as it is posted); all of it through
rank 0 (as many bytes as there are workers, to each of them).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import msgspec

from outlast.attempt.beat import RankState
from outlast.attempt.link import Link

ALL_END: Final = "the machines of the job change: all save, and start again"
WAIT_S: Final = 600.0  # that ranks wait for each other at such a boundary
_KEY: Final = "moves"
_Asks = Sequence[Mapping[str, Any]]


class PartingWord(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank says at the boundary.

    Attributes:
        why_not: why it cannot go on in its process; "" if it can.
        timeline, step, rest, own: of its :class:`outlast.inprocess.living.Moment` there.
    """

    why_not: str = ""
    timeline: int = 0
    step: int = 0
    rest: bytes = b""
    own: bytes = b""


UNHELD: Final = PartingWord(why_not="a worker of it cannot go on in its process")


class Parting(msgspec.Struct, frozen=True, kw_only=True):
    """What all do.

    Attributes:
        drains: whether all save, and end; otherwise all but ``leavers`` go on.
        leavers: ranks of machines that leave the job.
        info: of the notices: reason, left_s, and how a drain is planned.
        why_not: why they do not go on, where it is not that all leave.
    """

    drains: bool = False
    leavers: list[int] = []
    info: dict[str, Any] = {}
    why_not: str = ""


def leavers_of(asks: _Asks, world_size: int) -> list[int]:
    """Ranks that leave while others go on; none where one who asks wants all to stop.

    Args:
        asks: for a drain; who leaves alone says its ranks.
        world_size: number of workers.
    """
    found = sorted({rank for info in asks for rank in info.get("leaves") or ()})
    is_of_some = all(info.get("leaves") for info in asks)
    return found if is_of_some and len(found) < world_size else []


def soonest(asks: _Asks) -> dict[str, Any]:
    """What was said with the ask that leaves the least time."""
    timed = [info for info in asks if info.get("left_s") is not None]
    return dict(min(timed, key=lambda info: info["left_s"]) if timed else asks[0])


def meet(
    link: Link,
    word: PartingWord,
    asks: Callable[[], _Asks],
    plan: Callable[[dict[str, Any]], object],
) -> Parting:
    """Come to the boundary; what all do from here.

    Args:
        link: the other ranks.
        word: this rank's.
        asks: on rank 0, gives all asks for a drain so far.
        plan: on rank 0, adds to the info of a drain how it is done.

    Raises:
        OSError, RuntimeError: another rank is gone.
    """
    link.publish(f"{_KEY}/{link.rank}/own", msgspec.msgpack.encode(word))
    if link.rank:
        link.publish(f"{_KEY}/{link.rank}", word.why_not.encode())
        return msgspec.json.decode(link.fetch(_KEY, WAIT_S), type=Parting)
    others = range(1, link.world_size)
    reasons = [word.why_not, *(link.fetch(f"{_KEY}/{rank}", WAIT_S).decode() for rank in others)]
    why_not, notices = next(filter(None, reasons), ""), asks()
    leavers = leavers_of(notices, link.world_size)
    drains = bool(why_not) or (bool(notices) and not leavers)
    info = soonest(notices) if notices else {}
    if drains:
        plan(info)
    parting = Parting(drains=drains, leavers=[] if drains else leavers, info=info, why_not=why_not)
    link.publish(_KEY, msgspec.json.encode(parting))
    return parting


def take(link: Link, parting: Parting) -> list[RankState]:
    """Take, on a rank that goes on, what is its to keep of what others know alone.

    Raises:
        OSError, RuntimeError: another rank is gone.
    """
    stay = _who_stay(link, parting)
    records = []
    for rank in range(link.world_size):
        if rank == link.rank or link.rank not in _keepers(rank, stay):
            continue
        raw = link.fetch(f"{_KEY}/{rank}/own", WAIT_S)
        word = msgspec.msgpack.decode(raw, type=PartingWord)
        records.append(
            RankState(
                timeline=word.timeline,
                rank=rank,
                world_size=link.world_size,
                step=word.step,
                is_final=True,
                is_certain=True,
                stage=2,
                draws=0,
                rest=word.rest,
                blob=word.own,
            )
        )
    link.publish(f"{_KEY}/{link.rank}/taken", b"")
    return records


def see_off(link: Link, parting: Parting, timeout_s: float) -> None:
    """Wait, on a rank that leaves, until the others have all that they need of it.

    The attempt's store may be served by this machine.
    """
    until_s = time.monotonic() + timeout_s
    with contextlib.suppress(OSError, RuntimeError):  # they are late, or gone
        for rank in _who_stay(link, parting):
            link.fetch(f"{_KEY}/{rank}/taken", until_s - time.monotonic())


def _who_stay(link: Link, parting: Parting) -> list[int]:
    leavers = set(parting.leavers)
    return [rank for rank in range(link.world_size) if rank not in leavers]


def _keepers(rank: int, stay: Sequence[int]) -> Collection[int]:
    """Who takes what ``rank`` knows: its next one, and one half of the way round."""
    num = len(stay)
    return {stay[(rank + 1) % num], stay[(rank + 1 + num // 2) % num]}
