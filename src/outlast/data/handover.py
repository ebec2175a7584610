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
from outlast.data.shards import held
from outlast.data.trail import Trail

TRAIL = "trail"
BATCH = "batch"


def place(
    loop: int, feed: Feed, trail: Trail, batch: int, *, ahead: bool = False
) -> dict[str, Any]:
    """Where a worker is in its data; ``ahead``: will be, once the step in progress is completed.

    Args:
        loop: number of the loop that the feed belongs to.
        feed: what it iterates.
        trail: the record of samples.
        batch: number of the loop's newest batch, those left out included.
        ahead: see above.
    """
    taken = trail.ahead() if ahead else trail.state()
    return {"loop": loop, BATCH: batch, "position": feed.state(), TRAIL: taken}


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
    ranks = held(saved_by, rank, world_size)
    position = base.get("position", {})
    if position.get("kind") == stream.KIND:
        lanes = held(position["lanes"], rank, world_size)
        points: dict[str, Any] = {}
        for other in range(saved_by):
            if _meet(lanes, held(position["lanes"], other, saved_by)):
                points |= read(other)["position"]["points"]
        mine = {lane: point for lane, point in points.items() if int(lane) in lanes}
        base["position"] = {**position, "points": mine}
    trail = Trail()
    if TRAIL in base:
        trail.restore(base[TRAIL], [read(other)[TRAIL] for other in ranks])
        base[TRAIL] = trail.state()
    return base, trail


def _meet(one: range, other: range) -> bool:
    return max(one.start, other.start) < min(one.stop, other.stop)
