"""Say what goes wrong with a fleet of machines, and when.

Machines go alone (at a published rate per GPU and day), with their rack or with their zone; by a
reset that everybody sees, in silence, or with a notice. Recorded traces give moments and sizes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from outlast.planner.formulas import PUBLISHED
from outlast.planner.job import MachineLoss
from outlast.planner.traces import in_slots, read

DAY_S: Final = 86_400.0
LLAMA_3: Final = PUBLISHED[0].per_gpu_day  # unexpected stops


class Place(NamedTuple):
    """How machines are put up."""

    per_rack: int = 16
    per_zone: int = 1280


def at_rates(
    machines: int,
    duration_s: float,
    chance: random.Random,
    *,
    per_gpu_day: float = LLAMA_3,
    gpus: int = 8,
    speed_up: float = 1.0,
    rack_share: float = 0.05,
    zone_share: float = 0.005,
    silent_share: float = 0.2,
    notice_share: float = 0.1,
    place: Place = Place(),  # noqa: B008 - immutable
) -> Iterator[MachineLoss]:
    """Losses as a Poisson process.

    Args:
        machines: how many there are.
        duration_s: of the whole.
        chance: where it all comes from.
        per_gpu_day: losses per GPU and day.
        gpus: of a machine.
        speed_up: times as many losses: to see many in a short time.
        rack_share: of the losses, those that take a whole rack.
        zone_share: those that take a whole zone.
        silent_share: those without a reset.
        notice_share: those that are announced.
        place: racks and zones.
    """
    rate_s = per_gpu_day * gpus * machines * speed_up / DAY_S
    at_s = 0.0
    while True:
        at_s += chance.expovariate(rate_s)
        if at_s > duration_s:
            return
        one, draw = chance.randrange(machines), chance.random()
        size = place.per_zone if draw < zone_share else place.per_rack
        if draw >= zone_share + rack_share:
            size = 1
        start = one // size * size
        together = tuple(range(start, min(start + size, machines)))
        kind = chance.random()
        how = "silent" if kind < silent_share else "reset"
        if kind > 1 - notice_share:
            how = "notice"
        yield MachineLoss(at_s, together, how, back_s=chance.expovariate(1 / 900.0))


def of_bamboo(path: Path, machines: int, chance: random.Random) -> Iterator[MachineLoss]:
    """A spot fleet's trace (``time_ms,add|remove,node``), each of its nodes a share of ours.

    Removals at one moment are one reclaim; a removed node's machines come back with the next add.
    """
    trace = read(path)
    share = max(machines // trace.machines, 1)
    adds = [change.at_s for change in trace.changes if change.came]
    for at_s, _, slots in in_slots(trace):
        if slots:
            first = [slot * share for slot in slots]
            together = [one for slot in first for one in range(slot, min(slot + share, machines))]
            back_s = min((add - at_s for add in adds if add > at_s), default=math.inf)
            how = "notice" if chance.random() < 0.5 else "reset"
            yield MachineLoss(at_s, tuple(together), how, back_s=back_s)


def of_lanl(
    path: Path, machines: int, *, hours: float, first_hour: float = 0.0
) -> Iterator[MachineLoss]:
    """LANL's node failures (``t_hours,node,downtime_min``); records of one moment go together."""
    for change in read(path).changes:
        at_s = change.at_s - 3600 * first_hour
        if 0 <= at_s <= 3600 * hours:
            together = tuple(dict.fromkeys(int(node) % machines for node in change.went))
            yield MachineLoss(at_s, together, "reset", back_s=change.back_s)
