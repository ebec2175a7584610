"""Where the same failure was seen: on one machine, or on several.

A failure that one machine has and others do not is that machine's (a GPU gone, no driver, a card
that another process fills, a network card that hangs collectives); one that follows the work to
other machines is the script's. So nothing is called a bug before it was tried elsewhere, where
there is an elsewhere.

What makes two failures the same is their kind and what they say, without numbers: ranks, ports,
process ids and gigabytes differ from one machine and one attempt to the next.

What can go wrong: a bug that only rank 0 can have looks like its machine's until another machine
has rank 0. It costs one more attempt and one machine for as long, which is let in again then.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Collection, Iterable
from typing import Final

import msgspec

GAP_MAX: Final = 2  # from one attempt to the next: a number may be claimed and never used
REMEMBERED: Final = 200
_VARYING: Final = re.compile(r"0x[0-9a-f]+|\d+")


class Sighting(msgspec.Struct, frozen=True, kw_only=True):
    """A failure, and where it was.

    Attributes:
        attempt: number of the attempt.
        hosts: the machines that had it; of a hang, those of the ranks that hung.
        kind: its name.
        cause: of the same failure the same (``cause_of``).
        step: the last step completed before, or None.
        t: when, on a clock that all machines have.
    """

    attempt: int
    hosts: tuple[str, ...]
    kind: str
    cause: str
    step: int | None = None
    t: float = 0.0


class AgentView(msgspec.Struct, frozen=True, kw_only=True):
    """Where an agent is, and what is known of all machines.

    Attributes:
        host: this machine.
        attempt: number of the attempt that has failed.
        seen: what was seen on any machine, oldest first.
    """

    host: str
    attempt: int
    seen: tuple[Sighting, ...] = ()


class Recurrence(msgspec.Struct, frozen=True, kw_only=True):
    """The same failure in attempts that follow each other, the last one included.

    Attributes:
        attempts: how many.
        hosts: the machines that had it.
        same_step: in how many of them it was after the same step.
    """

    attempts: int
    hosts: frozenset[str]
    same_step: int


def cause_of(kind: str, words: str) -> str:
    """What is the same for failures of a kind that say the same."""
    return f"{kind} {zlib.crc32(_VARYING.sub('#', words).encode(errors='replace')):08x}"


def recurrence_of(sighting: Sighting, seen: Iterable[Sighting], since: int) -> Recurrence:
    """How often, and where, the same was seen in a row up to now.

    Args:
        sighting: the newest one.
        seen: others, in any order.
        since: the first attempt that counts: what was before some progress does not.
    """
    alike = [one for one in seen if one.cause == sighting.cause and one.attempt >= since]
    found = [sighting]
    for one in sorted(alike, key=lambda one: -one.attempt):
        if found[-1].attempt - one.attempt > GAP_MAX:
            break
        found.append(one)
    return Recurrence(
        attempts=len({one.attempt for one in found}),
        hosts=frozenset(host for one in found for host in one.hosts),
        same_step=len({one.attempt for one in found if one.step == sighting.step}),
    )


def is_overshadowed(sighting: Sighting, seen: Iterable[Sighting], graver: Collection[str]) -> bool:
    """Whether another machine had a failure just then that this one can be the consequence of.

    Args:
        sighting: this one.
        seen: what other machines had.
        graver: names of the kinds that it can be the consequence of.
    """
    return any(
        one.kind in graver
        and 0 <= sighting.attempt - one.attempt <= GAP_MAX
        and not set(one.hosts) & set(sighting.hosts)
        for one in seen
    )
