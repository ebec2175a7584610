"""What goes wrong, and when.

Machines go alone (at a published rate per GPU and day), with their rack or with their zone; by a
reset that everybody sees, in silence, or with a notice. Recorded traces give moments and sizes.
"""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

DAY_S: Final = 86_400.0
LLAMA_3: Final = 4.74e-4  # unexpected stops per GPU-day: 419 in 54 days on 16,384 GPUs
RSC_1: Final = 8.1e-4  # Meta's RSC-1, per GPU-day: 6.5 per 1000 node-days of 8 GPUs


class Loss(NamedTuple):
    """Machines that go together; ``back_s``: after how long they come back, or never."""

    at_s: float
    machines: tuple[int, ...]
    how: str  # "reset", "silent" or "notice"
    back_s: float = math.inf


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
) -> Iterator[Loss]:
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
        yield Loss(at_s, together, how, back_s=chance.expovariate(1 / 900.0))


def of_bamboo(path: Path, machines: int, chance: random.Random) -> Iterator[Loss]:
    """A spot fleet's trace (``time_ms,add|remove,node``), each of its nodes a share of ours.

    Removals at one moment are one reclaim; a removed node's machines come back with the next add.
    """
    with path.open() as file:
        rows = [(int(ms) / 1000, what, name) for ms, what, name in csv.reader(file)]
    num_nodes = _most_at_once(rows)
    share = max(machines // num_nodes, 1)
    slots: dict[str, int] = {}
    free = list(range(num_nodes))
    adds = [at_s for at_s, what, _ in rows if what == "add"]
    going: dict[float, list[int]] = {}
    for at_s, what, name in rows:
        if what == "add" and free:
            slots[name] = free.pop(0)
        elif what == "remove" and name in slots:
            slot = slots.pop(name)
            free.append(slot)
            first = slot * share
            going.setdefault(at_s, []).extend(range(first, min(first + share, machines)))
    for at_s, together in sorted(going.items()):
        back_s = min((add - at_s for add in adds if add > at_s), default=math.inf)
        how = "notice" if chance.random() < 0.5 else "reset"
        yield Loss(at_s, tuple(together), how, back_s=back_s)


def of_lanl(path: Path, machines: int, *, hours: float, first_hour: float = 0.0) -> Iterator[Loss]:
    """LANL's node failures (``t_hours,node,downtime_min``); records of one moment go together."""
    going: dict[float, list[tuple[int, float]]] = {}
    with path.open() as file:
        for row in csv.DictReader(file):
            at_h = float(row["t_hours"]) - first_hour
            if 0 <= at_h <= hours:
                down_s = 60 * float(row["downtime_min"])
                going.setdefault(at_h, []).append((int(row["node"]) % machines, down_s))
    for at_h, some in sorted(going.items()):
        together = tuple(dict.fromkeys(node for node, _ in some))
        yield Loss(at_h * 3600, together, "reset", back_s=max(down_s for _, down_s in some))


def _most_at_once(rows: list[tuple[float, str, str]]) -> int:
    here: set[str] = set()
    most = 1
    for _, what, name in rows:
        (here.add if what == "add" else here.discard)(name)
        most = max(most, len(here))
    return most
