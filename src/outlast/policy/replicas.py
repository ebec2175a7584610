"""Who keeps whose newest snapshot in memory, besides its owner.

Machines are put into one order, those of a zone together, in it those of a rack, in it those of a
pool; each machine's copies lie one (two: a third and two thirds) of the way round. So each machine
keeps exactly as many copies as there are of its own, at any number of machines, and a copy lies in
another zone whenever no zone has more than its share of the machines; where one has, in another
rack, and so on.

Guarantees: all copies of a snapshot lie on different machines, so that as many machines as there
are replicas can be lost at once. The same facts give the same answer on every machine.
Rejected: a ring of neighbours (two copies in a row fall into one rack; a stride is a ring all the
same); the best place for each by a cost (loads differ, and a newcomer moves everybody's copies as
well, for a gain only where labels are odd).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from outlast.values import LABELS

REPLICAS_MAX: Final = 2


class PlacedMachine(msgspec.Struct, frozen=True, kw_only=True):
    """One machine.

    Attributes:
        node: its name in the job.
        labels: where it stands, by the words in ``LABELS``; what is not known is left out.
    """

    node: str
    labels: Mapping[str, str] = {}


def num_replicas(setting: int | None, num_machines: int) -> int:
    """How many copies of each machine's snapshot others keep.

    Args:
        setting: as it was set, or None to decide here: one if there is anybody to keep it.
        num_machines: of the attempt.
    """
    wanted = 1 if setting is None else setting
    return max(min(wanted, num_machines - 1), 0)


def holders(machines: Sequence[PlacedMachine], replicas: int) -> dict[str, tuple[str, ...]]:
    """Whose memory holds the copies of each machine's snapshot, by node.

    Args:
        machines: of the attempt; each node once, in any order.
        replicas: how many copies there are to be besides the owner's; fewer if there are not
            enough machines.
    """
    order = [machine.node for machine in sorted(machines, key=_place)]
    count = len(order)
    steps = [number * count // (replicas + 1) for number in range(1, replicas + 1)]
    if replicas >= count:
        steps = list(range(1, count))
    return {
        node: tuple(order[(position + step) % count] for step in steps)
        for position, node in enumerate(order)
    }


def _place(machine: PlacedMachine) -> tuple[str, ...]:
    return (*(machine.labels.get(label, "") for label in LABELS), machine.node)
