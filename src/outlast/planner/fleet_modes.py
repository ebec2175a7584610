"""Compare ways in which a fleet can train: synchronously, locally, with spare or double work.

============  ===================================================================================
synchronous   every step waits for all; a loss rewinds all to the last checkpoint
local         replicas exchange every H steps; who goes loses its own part of a round alone
streaming     the same in fragments, overlapped, at 4 bits (see ``links``)
backup        of R replicas the first R - b count in each step; nobody waits for the others
redundant     each machine does part of its neighbour's work; a loss pauses, nothing is made again
templates     survivors hold all: the step that was being made is made again, in smaller groups
============  ===================================================================================

Goodput is useful work over that of all replicas, undisturbed, on a link that costs nothing. The
closed forms take failures as independent and exponential, first order but for ``synchronous``,
which has the exact model. On a recording :func:`replayed` runs the planner's own simulator.

Modes that never rewind save once in ``RARE_H``, for the day on which all are lost. Machines that
are away are away in every mode alike; those that come stop a synchronous job once more.

What a local or a dropped gradient does to the loss is not here; ``worth`` is where whoever knows
says it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Final, Literal, get_args

import msgspec
import numpy as np

from outlast.planner.backup import backup_step_s
from outlast.planner.formulas import lost_to_local_updates_s
from outlast.planner.job import JobOutcome, JobRun, JobSetup, Level
from outlast.planner.links import (
    PAPER_BITS_PER_S,
    Bandwidths,
    LinkJob,
    Method,
    utilisation,
    utilisation_at,
)
from outlast.planner.study import Scenario, Story, tell
from outlast.policy.cadence import EverySeconds
from outlast.policy.hazard import poisson_tail
from outlast.policy.interval import Costs, best_h, exact_wall

FleetMode = Literal["synchronous", "local", "streaming", "backup", "redundant", "templates"]
FLEET_MODES: Final[tuple[FleetMode, ...]] = get_args(FleetMode)
LINK_OF: Final[dict[FleetMode, Method]] = {
    "synchronous": "synchronous",
    "local": "local",
    "streaming": "compressed",
    "backup": "synchronous",
    "redundant": "synchronous",
    "templates": "synchronous",
}
RARE_H: Final = 1.0
HOUR_S: Final = 3600.0
# Seconds that a step with redundant work takes over one without, less one: 151.04 over 91.35
# (CheckFree, arXiv 2506.15461, table 2).
REDUNDANT_WORK: Final = 0.65
# What a local step is worth at H = 100: losses 2.49 and 2.50 at equal tokens, 1B parameters, along
# the slope of loss over work, -0.1315 (Streaming DiLoCo, arXiv 2501.18512, tables and section 3.2).
PUBLISHED_WORTH: Final = (2.49 / 2.50) ** (1 / 0.1315)
RATE_LEAST, RATE_MOST = 1e-9, 1e4  # per hour, between which a break-even is looked for
_HALVINGS: Final = 80
_FINER: Final = 3  # grids, each between two points of the one before


class FleetJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job of replicas, and what its link and its failures are like.

    Attributes:
        link: the model, its step and what crosses the link.
        replicas: R, at least 2.
        bits_per_s: of the link of a replica.
        costs: of a checkpoint, of a restart and of noticing.
        replace_h: until a lost replica's successor trains.
        regroup_h: pause of the modes that rewind nothing.
        backups: b, below R.
        tail: mean of what a replica's step takes at random, over what each takes alike.
        redundant_work: of the redundant mode, over that of the others.
        worth: of a local step, in synchronous ones.
        price_per_h: of a replica.
    """

    link: LinkJob
    replicas: int
    bits_per_s: float
    costs: Costs
    replace_h: float = 0.0
    regroup_h: float = 10 / HOUR_S
    backups: int = 1
    tail: float = 0.0
    redundant_work: float = REDUNDANT_WORK
    worth: float = PUBLISHED_WORTH
    price_per_h: float | None = None

    def counted(self, mode: FleetMode) -> int:
        """Replicas whose gradients count."""
        return self.replicas - (self.backups if mode == "backup" else 0)

    def work_s(self, mode: FleetMode) -> float:
        """Seconds of a step without its link: of as many as are waited for."""
        common_s = self.link.step_s
        if mode == "redundant":
            common_s *= 1 + self.redundant_work
        if mode in ("local", "streaming"):  # over a round what is random in a step evens out
            return common_s * (1 + self.tail)
        spare = self.backups if mode == "backup" else 0
        tail_s = self.tail * common_s
        return backup_step_s(self.replicas - spare, spare, common_s=common_s, tail_s=tail_s)

    def linked(self, mode: FleetMode) -> LinkJob:
        """The link of a mode, whose steps take as long as they do in it."""
        return msgspec.structs.replace(self.link, step_s=self.work_s(mode))


class ModeRow(msgspec.Struct, frozen=True, kw_only=True):
    """One mode's results.

    Attributes:
        mode: which one.
        step_s: with its share of what the link takes.
        utilisation: computing time over that.
        kept_share: of the time and of the replicas, after failures.
        goodput: useful work over that of all replicas that nothing disturbs.
        steps_per_h: useful ones, each of all replicas' samples.
        cost_per_step: of the replicas that are there; None without a price.
        bytes_per_step: that cross a replica's link, in each direction, on average.
    """

    mode: FleetMode
    step_s: float
    utilisation: float
    kept_share: float
    goodput: float
    steps_per_h: float
    cost_per_step: float | None
    bytes_per_step: float


def kept(job: FleetJob, mode: FleetMode, per_h: float, step_s: float) -> float:
    """Share of the work that failures leave, 1 without any.

    Args:
        job: with what failures cost.
        mode: see the module.
        per_h: failures of the whole job.
        step_s: of a step.
    """
    there = 1 / (1 + per_h * job.replace_h / job.replicas)
    costs = job.costs
    if mode == "synchronous":
        joining_h = (costs.checkpoint_h + costs.restore_h) * (job.replace_h > 0)
        return there / (exact_wall(costs, per_h, best_h(costs, per_h)) + per_h * joining_h)
    saving = 1 + costs.checkpoint_h / save_every_h(job, mode, per_h)
    if mode == "backup":
        return _of_first(job, per_h) / saving
    lost_h = step_s / HOUR_S / 2 + costs.detect_h + job.regroup_h
    if mode in ("local", "streaming"):
        lost_h = (
            lost_to_local_updates_s(job.link.sync_steps, step_s, job.replicas, whole_window=False)
            / HOUR_S
        )
    elif mode == "redundant":
        # Its neighbours on either side, while it is away: then a stage is nowhere.
        pair_per_h = 2 * per_h / job.replicas
        fatal = -math.expm1(-pair_per_h * (job.replace_h + job.regroup_h + costs.detect_h))
        lost_h += fatal * (costs.restore_h + save_every_h(job, mode, per_h) / 2)
    return there / (saving + per_h * lost_h)


def save_every_h(job: FleetJob, mode: FleetMode, per_h: float) -> float:
    """Hours between two checkpoints: the best for the modes that may rewind, else ``RARE_H``."""
    best = best_h(job.costs, per_h)
    if mode == "synchronous":
        return best
    return min(best, RARE_H) if mode == "redundant" else RARE_H


def _of_first(job: FleetJob, per_h: float) -> float:
    """Of the replicas that count, those that are there: of R the first R - b, Poisson many away."""
    counted, away = job.counted("backup"), per_h * job.replace_h
    # E[max(away - b, 0)], summed over its tail
    missing = sum(poisson_tail(job.backups + gone, away) for gone in range(counted))
    return 1 - missing / counted


class KeptWork(msgspec.Struct, frozen=True):
    """The share of the work that was kept, and the replicas that were held on average."""

    kept_share: float
    held: float


def row(job: FleetJob, mode: FleetMode, per_h: float, found: KeptWork | None = None) -> ModeRow:
    """A mode's results.

    Args:
        job: see there.
        mode: see the module.
        per_h: failures of the whole job.
        found: by the simulator; the closed forms are used without it.
    """
    link = job.linked(mode)
    used = utilisation_at(link, LINK_OF[mode], job.bits_per_s)
    step_s = link.step_s / used
    if found is None:
        held = job.replicas / (1 + per_h * job.replace_h / job.replicas)
        found = KeptWork(kept(job, mode, per_h, step_s), held)
    share = found.kept_share
    steps_per_h = HOUR_S / step_s * share * job.counted(mode) / job.replicas
    if mode in ("local", "streaming"):
        steps_per_h *= job.worth
    price = job.price_per_h
    cost = None
    if price is not None:
        cost = price * found.held / steps_per_h if steps_per_h else math.inf
    return ModeRow(
        mode=mode,
        step_s=step_s,
        utilisation=used,
        kept_share=share,
        goodput=steps_per_h * job.link.step_s / HOUR_S,
        steps_per_h=steps_per_h,
        cost_per_step=cost,
        bytes_per_step=link.bits_per_step(LINK_OF[mode]) / 8,
    )


def compared(job: FleetJob, per_h: float) -> list[ModeRow]:
    """All modes, in their order, by the closed forms."""
    return [row(job, mode, per_h) for mode in FLEET_MODES]


# --- when local updates pay ----------------------------------------------------------------------


def pays_below(job: FleetJob, local: FleetMode, other: FleetMode, per_h: float) -> float:
    """Bits per second below which one mode does more than another; 0 for none, inf for any."""
    low, high = float(PAPER_BITS_PER_S[0]) / 1e3, float(PAPER_BITS_PER_S[-1]) * 1e2
    for _ in range(_FINER):
        grid = np.geomspace(low, high, 100)
        ahead = _goodputs(job, local, per_h, grid) > _goodputs(job, other, per_h, grid)
        if ahead[-1]:
            return math.inf
        if not ahead.any():
            return 0.0
        last = len(grid) - 1 - int(np.argmax(ahead[::-1]))
        low, high = float(grid[last]), float(grid[last + 1])
    return low


def _goodputs(job: FleetJob, mode: FleetMode, per_h: float, bits_per_s: Bandwidths) -> Bandwidths:
    link = job.linked(mode)
    used = utilisation(link, LINK_OF[mode], bits_per_s)
    shares = np.array([kept(job, mode, per_h, link.step_s / float(one)) for one in used])
    scale = job.link.step_s / link.step_s * job.counted(mode) / job.replicas
    return np.asarray(used * shares * scale * (job.worth if mode in ("local", "streaming") else 1))


def pays_above(job: FleetJob, local: FleetMode, other: FleetMode) -> float:
    """Failures per hour above which one mode does more than another; 0 for any, inf for none.

    Looked for between ``RATE_LEAST`` and ``RATE_MOST``: the first at which it does.
    """
    steps_s = {
        mode: job.work_s(mode) / utilisation_at(job.linked(mode), LINK_OF[mode], job.bits_per_s)
        for mode in (local, other)
    }

    def done(mode: FleetMode, per_h: float) -> float:
        share = kept(job, mode, per_h, steps_s[mode]) * job.counted(mode) / steps_s[mode]
        return share * (job.worth if mode in ("local", "streaming") else 1)

    def ahead(per_h: float) -> bool:
        return done(local, per_h) > done(other, per_h)

    return _first(ahead)


def _first(ahead: Callable[[float], bool]) -> float:
    rates = np.geomspace(RATE_LEAST, RATE_MOST, 131)
    high = next((float(rate) for rate in rates if ahead(float(rate))), None)
    if high is None:
        return math.inf
    if high == rates[0]:
        return 0.0
    low = high * float(rates[0] / rates[1])
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if ahead(middle) else (middle, high)
    return high


# --- on a recording, or drawn ---------------------------------------------------------------------


def replayed(job: FleetJob, scenario: Scenario, replications: int) -> list[ModeRow]:
    """All modes on the same failures, by the planner's simulator.

    Args:
        job: see there.
        scenario: what happens to its machines, each of which is a replica; its setup's ``machines``
            and ``horizon_s`` count.
        replications: how many.
    """
    per_h = scenario.known_per_h
    # With steps it is no simple scenario: losses are told with the machine that is lost.
    stepping = msgspec.structs.replace(scenario.setup, step_s=job.link.step_s)
    told = msgspec.structs.replace(scenario, setup=stepping)
    stories = [tell(told, number) for number in range(replications)]
    rows = []
    for mode in FLEET_MODES:
        first = row(job, mode, per_h)
        setup = _setup(job, mode, scenario, first.step_s)
        every_h = save_every_h(job, mode, per_h)
        outcomes = [
            _run(setup, story, every_h * HOUR_S, f"{scenario.seed} {number}", job.replicas)
            for number, story in enumerate(stories)
        ]
        wall_s = math.fsum(one.wall_s for one in outcomes)
        found = KeptWork(
            math.fsum(one.useful_s for one in outcomes) / wall_s,
            math.fsum(one.machine_s for one in outcomes) / wall_s,
        )
        rows.append(row(job, mode, per_h, found))
    return rows


def _run(setup: JobSetup, story: Story, every_s: float, seed: str, replicas: int) -> JobOutcome:
    """One replication."""
    spare = tuple(one for one in range(setup.machines, replicas) if one not in story.absent)
    comes = [(0.0, spare), *story.comes] if spare else story.comes
    chance = random.Random(seed)  # noqa: S311 - a simulation
    cadence = EverySeconds(every_s, 0.0)
    run = JobRun(setup, cadence, story.losses, chance, absent=story.absent, comes=comes)
    return run.run()


def _setup(job: FleetJob, mode: FleetMode, scenario: Scenario, step_s: float) -> JobSetup:
    costs = job.costs
    level = Level(
        cost_s=costs.checkpoint_h * HOUR_S,
        lag_s=costs.lag_h * HOUR_S,
        restore_s=costs.restore_h * HOUR_S,
    )
    common = JobSetup(
        machines=job.counted(mode),
        levels=(level,),
        horizon_s=scenario.setup.horizon_s,
        step_s=step_s,
        detect_s=costs.detect_h * HOUR_S,
        rejoin_s=job.regroup_h * HOUR_S,
        sync_steps=job.link.sync_steps,
    )
    if mode == "synchronous":
        return msgspec.structs.replace(common, mode="restart")
    if mode in ("local", "streaming"):
        return msgspec.structs.replace(common, mode="local", rejoin_s=0.0)
    if mode == "backup":
        return msgspec.structs.replace(common, mode="replicas", detect_s=0.0, rejoin_s=0.0)
    return msgspec.structs.replace(common, mode="elastic" if mode == "redundant" else "replicas")
