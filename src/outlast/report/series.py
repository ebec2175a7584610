"""What the page draws, as plain numbers: attempts, losses, step times, saves, failures by machine.

Pure functions of the ledger's events, in the order of their times. A series is thinned to as many
points as a picture shows: of each stretch its lowest and its highest value stay, so that a spike of
one sample is still seen. Of a step that was made again the last making counts.

Guarantees: damaged fields are left out, never an error.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import msgspec

from outlast.ledger.events import Event
from outlast.ledger.goodput import number, whole
from outlast.ledger.measured import SampledSteps

POINTS: Final = 400  # of one curve
SCALARS: Final = 6  # curves of what the script logs
_TROUBLE: Final = {
    "worker_lost": "worker lost",
    "node_lost": "machine lost",
    "hang": "hang",
    "straggler": "slow",
    "notice": "notice",
    "storage_error": "storage error",
}
Points = list[tuple[float, float]]


class AttemptSpan(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt.

    Attributes:
        number: its number.
        begin_t, end_t: wall-clock times, from its forming to the last that is known of it.
        workers, machines: how many.
        from_step: that it went on from, if it came so far.
        step: the last one that is known to be complete.
        source: where its state came from, as "from memory".
        end: how it ended, in words; "" where nothing is said.
    """

    number: int
    begin_t: float
    end_t: float
    workers: int
    machines: int
    from_step: int | None = None
    step: int | None = None
    source: str = ""
    end: str = ""


class SavePoint(NamedTuple):
    """A checkpoint that came to a tier, ``seconds`` after its snapshot or its copy's beginning."""

    t: float
    tier: str
    seconds: float
    num_bytes: int
    step: int


def attempts(ordered: Sequence[Event]) -> list[AttemptSpan]:
    """Each attempt, oldest first."""
    found: dict[int, AttemptSpan] = {}
    for event in ordered:
        number = event.attempt
        if event.event == "attempt_formed":
            workers, nodes = whole(event, "world_size") or 0, event.get("nodes")
            machines = len(nodes) if isinstance(nodes, list) else whole(event, "nodes") or 0
            known = found.get(number)
            begin_t = event.t if known is None else known.begin_t
            found[number] = AttemptSpan(
                number=number, begin_t=begin_t, end_t=event.t, workers=workers, machines=machines
            )
            continue
        one = found.get(number)
        if one is None:
            continue
        changes: dict[str, object] = {"end_t": max(one.end_t, event.t)}
        if event.event == "resumed" and event.rank == 0:
            changes |= {"from_step": whole(event), "source": str(event.get("source") or "")}
        elif event.event == "step":
            changes["step"] = max(one.step or 0, whole(event) or 0)
        elif event.event == "restart":
            changes["end"] = str(event.get("reason") or "")
        elif event.event in ("drained", "job_finished") and not one.end:
            changes["end"] = str(event.get("reason") or event.event)
        found[number] = msgspec.structs.replace(one, **changes)
    return [found[number] for number in sorted(found)]


def scalars(ordered: Iterable[Event]) -> dict[str, Points]:
    """Name → (step, value), of what the script logs; the first names where there are many."""
    found: dict[str, dict[int, float]] = {}
    for event in ordered:
        values, step = event.get("scalars"), whole(event)
        if event.event != "step" or step is None or not isinstance(values, dict):
            continue
        for name, value in values.items():
            if _is_number(value) and (name in found or len(found) < SCALARS):
                found.setdefault(str(name), {})[step] = float(value)
    return {name: thinned(sorted(values.items())) for name, values in found.items()}


def step_times(ordered: Iterable[Event]) -> Points:
    """(wall-clock time, seconds of a step in the mean since the sample before), of rank 0."""
    steps = SampledSteps()
    taken = ((event.t, steps.take(event)) for event in ordered)
    return thinned([(t, found[0]) for t, found in taken if found is not None])


def saves(ordered: Iterable[Event]) -> list[SavePoint]:
    """Each checkpoint that came to a tier."""
    found = []
    for event in ordered:
        if event.event not in ("commit", "tier_copied"):
            continue
        seconds = number(event, "durable_s" if event.event == "commit" else "seconds")
        size, step, tier = whole(event, "bytes"), whole(event), event.get("tier")
        if seconds is not None and size is not None and step is not None:
            found.append(SavePoint(event.t, str(tier or ""), seconds, size, step))
    return found


def failures_by_machine(ordered: Iterable[Event]) -> dict[str, dict[str, int]]:
    """Machine → what happened there → how often; the one with most first."""
    found: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for event in ordered:
        what = _TROUBLE.get(event.event)
        if what is None or (event.event == "straggler" and event.get("over")):
            continue
        named = event.get("nodes") if event.event == "hang" else [event.node]
        for machine in named if isinstance(named, list) else [event.node]:
            counts = found[str(machine)]
            counts[what] = counts.get(what, 0) + 1
    return dict(sorted(found.items(), key=lambda one: (-sum(one[1].values()), one[0])))


def thinned(points: Points, most: int = POINTS) -> Points:
    """At most about ``most`` of them: of each stretch the lowest and the highest."""
    if len(points) <= most:
        return points
    size = math.ceil(2 * len(points) / most)
    kept: Points = [points[0]]
    for at in range(1, len(points) - 1, size):
        stretch = points[at : min(at + size, len(points) - 1)]
        chosen = {min(stretch, key=_value), max(stretch, key=_value)}
        kept += sorted(chosen)
    return [*kept, points[-1]]


def _value(point: tuple[float, float]) -> float:
    return point[1]


def _is_number(value: object) -> bool:
    is_one = isinstance(value, int | float) and not isinstance(value, bool)
    return is_one and math.isfinite(value)  # type: ignore[arg-type]
