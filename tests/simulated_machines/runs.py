"""Scenarios of one job's membership, and what is measured in them."""

from __future__ import annotations

import functools
import random
import statistics
from collections.abc import Iterable
from typing import Final

import msgspec

from outlast.planner.job import MachineLoss
from outlast.policy.membership import MembershipRules
from simulated_machines.cluster import Cluster
from simulated_machines.losses import Place
from simulated_machines.parts import Costs, Formed

SETTLED_S: Final = 300.0  # by when the first attempt has formed


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What one scenario showed; times in seconds, of the virtual clock unless they say otherwise.

    Attributes:
        machines: of the job.
        losses: how many times something was lost.
        attempts: formed, the first included.
        first_s: from the start of all machines to the first attempt.
        recovery_s: from each loss to the moment the last machine was told of the next attempt.
        parts_s: medians of its parts: noticed, workers ended, claimed, told.
        parts_of_first: the same, of the first loss alone.
        worst_machines: fewest machines in an attempt after the first.
        thought_us: real processor time of the roster per event, median and largest, microseconds.
        thought_s: the same, of the whole scenario.
        messages_per_s: of the coordinator, largest second.
        storage_per_s: operations on storage, of the largest second and of the median second.
        storage: operations by kind.
    """

    machines: int
    losses: int
    attempts: int
    first_s: float
    recovery_s: list[float]
    parts_s: dict[str, float]
    parts_of_first: dict[str, float]
    worst_machines: int
    thought_us: tuple[float, float]
    thought_s: float
    messages_per_s: int
    storage_per_s: tuple[int, float]
    storage: dict[str, int]


def run(
    machines: int,
    losses: Iterable[MachineLoss],
    *,
    seed: int = 0,
    duration_s: float = 3600.0,
    min_share: float = 0.5,
    costs: Costs = Costs(),  # noqa: B008 - immutable
    place: Place = Place(),  # noqa: B008 - immutable
    tells_changes: bool = True,
    with_role: int = 0,
) -> Figures:
    """Start all machines at once, then let ``losses`` happen, counted from ``SETTLED_S``.

    Args:
        machines: how many.
        losses: what goes wrong.
        seed: of all chance.
        duration_s: of the whole, after the first attempt had its time.
        min_share: of the machines, the fewest in an attempt.
        costs: how long things take.
        place: racks and zones.
        tells_changes: see :class:`Cluster`.
        with_role: each loss takes the coordinator's machine, with so many of its rack in all.
    """
    rules = MembershipRules(min_nodes=max(int(machines * min_share), 1), max_nodes=machines)
    cluster = Cluster(machines, rules, costs, seed=seed, place=place, tells_changes=tells_changes)
    start = random.Random(seed)
    for number in range(machines):
        cluster.clock.after(start.random(), functools.partial(cluster.start, number))
    count = 0
    for loss in losses:
        if loss.at_s <= duration_s:
            count += 1
            lose = functools.partial(_lose, cluster, loss, with_role)
            cluster.clock.after(SETTLED_S + loss.at_s, lose)
    cluster.clock.run(SETTLED_S + duration_s)
    return _figures(cluster, count)


def _lose(cluster: Cluster, loss: MachineLoss, with_role: int) -> None:
    if with_role:
        first = next(iter(cluster.coordinators)) // with_role * with_role
        loss = loss._replace(machines=tuple(range(first, first + with_role)))
    cluster.lose(loss)


def _figures(cluster: Cluster, count: int) -> Figures:
    formed = cluster.formed
    after = [one for one in formed[1:] if one.lost_s >= SETTLED_S]
    seconds = [
        cluster.storage.by_second.get(second, 0) for second in range(int(cluster.clock.now_s))
    ]
    return Figures(
        machines=len(cluster.machines),
        losses=count,
        attempts=len(formed),
        first_s=formed[0].told_s if formed else float("inf"),
        recovery_s=[one.told_s - one.lost_s for one in after],
        parts_s=_parts(after),
        parts_of_first=_parts(after[:1]),
        worst_machines=min((one.machines for one in after), default=0),
        thought_us=(
            statistics.median(cluster.thoughts_s) * 1e6,
            max(cluster.thoughts_s) * 1e6,
        ),
        thought_s=sum(cluster.thoughts_s),
        messages_per_s=max(cluster.by_second.values(), default=0),
        storage_per_s=(max(seconds), statistics.median(seconds)),
        storage=dict(cluster.storage.counts),
    )


def _parts(formed: list[Formed]) -> dict[str, float]:
    if not formed:
        return {}
    return {
        "noticed": statistics.median(one.stop_s - one.lost_s for one in formed),
        "workers ended": statistics.median(one.form_s - one.stop_s for one in formed),
        "claimed": statistics.median(one.claimed_s - one.form_s for one in formed),
        "told": statistics.median(one.told_s - one.claimed_s for one in formed),
    }
