"""What one worker goes on with, of the positions that other workers saved.

Guarantees: whatever the number of workers was and is, each worker's record of samples is carried on
by one worker, and each lane of a stream is known to the worker that has it now. With the same
number of workers nothing but a worker's own part is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from outlast.data import stream
from outlast.data.feed import Feed
from outlast.data.order import held
from outlast.data.trail import Trail

TRAIL = "trail"
BATCH = "batch"


def place(loop: int, feed: Feed, trail: Mapping[str, Any], batch: int) -> dict[str, Any]:
    """Where a worker is in its data, or will be once the step in progress is completed.

    Args:
        loop: number of the loop that the feed belongs to.
        feed: what it iterates.
        trail: the record of samples, as data.
        batch: number of the loop's newest batch, those left out included.
    """
    return {"loop": loop, BATCH: batch, "position": feed.state(), TRAIL: trail}


def given_back(
    placed: Mapping[str, Any],
) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
    """The place before the newest batch of ``placed``, and the random numbers of that moment.

    A stream and a loader with a state of its own know only what is behind the batch: ``placed`` is
    what there is. The random numbers are known for an epoch's first batch, else None: what loading
    the batch has drawn stays drawn.
    """
    position = placed["position"]
    kind, batches = position["kind"], position.get("batches", 0)
    random = None
    if "source" in position:  # a data set's own state
        return placed, None
    if kind == "outlast":
        before = {"position": position["position"] - position["global_batch"]}
    elif kind in ("stock", "iterable") and batches > 1:
        passed = [number for number in position.get("passed", ()) if number < batches]
        before = {"batches": batches - 1, "passed": passed}
    elif kind in ("stock", "iterable") and batches:  # as if the epoch had not begun
        start = dict(position["start"])
        random = start.pop("random")
        before = {"batches": 0, "passed": [], "started": False, "start": start}
    else:
        return placed, None
    # What came is not compared then: its word has the batch in it.
    before |= {name: None for name in ("word",) if name in position}
    if "record" in position:
        record = position["record"]
        before["record"] = {**record, "total": record["total"] - 1, "word": None}
    return {**placed, BATCH: placed[BATCH] - 1, "position": {**position, **before}}, random


def take_over(
    read: Callable[[int], Mapping[str, Any]], saved_by: int, rank: int, world_size: int
) -> tuple[dict[str, Any], Trail]:
    """The data state that this worker goes on from.

    Args:
        read: rank → what that rank saved; ``{}`` where no loader had begun.
        saved_by: how many workers saved.
        rank: this worker.
        world_size: how many there are now.

    Returns:
        What :func:`read` gave for one of them, with the parts of others that are this worker's,
        and the record of samples to go on with.
    """
    base = dict(read(rank % saved_by))
    # Worker r of W has the r-th of W parts of everything that is dealt out: ranks, lanes, samples.
    position = base.get("position", {})
    if position.get("kind") == stream.KIND:
        lanes = held(position["lanes"], rank, world_size)
        points: dict[str, Any] = {}
        for other in range(saved_by):
            if _meet(lanes, held(position["lanes"], other, saved_by)):
                points |= read(other)["position"]["points"]
        mine = {lane: point for lane, point in points.items() if int(lane) in lanes}
        base["position"] = {**position, "points": mine}
    trail = record_of(read, saved_by, rank, world_size)
    if TRAIL in base:
        base[TRAIL] = trail.state()
    return base, trail


def record_of(
    read: Callable[[int], Mapping[str, Any]], saved_by: int, rank: int, world_size: int
) -> Trail:
    """The record of samples that ``rank`` goes on with; arguments as of :func:`take_over`."""
    trail, base = Trail(), read(rank % saved_by)
    if TRAIL in base:
        others = held(saved_by, rank, world_size)
        trail.restore(base[TRAIL], [read(other)[TRAIL] for other in others])
    return trail


def _meet(one: range, other: range) -> bool:
    return max(one.start, other.start) < min(one.stop, other.stop)
