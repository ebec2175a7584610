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
closed forms take failures as independent and exponential: by the exact model of
:mod:`outlast.policy.interval` what is rewound, be it to a checkpoint or to the beginning of a step.
On a recording :func:`replayed` runs the planner's own simulator.

Saves are taken between two steps, so that a long step makes the intervals longer. Modes that never
rewind save once in ``RARE_H``, for the day on which all are lost. A successor comes after
``replace_h`` in every mode alike, and stops those once more that wait for all, unless it is there
before they begin again.

What a local or a dropped gradient does to the loss is not here; ``worth`` is where whoever knows
says it.
"""

from __future__ import annotations

import math
import random
from typing import Final, Literal, get_args

import msgspec
import numpy as np

from outlast.planner.backup import backup_step_s
from outlast.planner.breakeven import AheadSpan, Flags, Values, ahead_spans
from outlast.planner.job import JobOutcome, JobRun, JobSetup, Level
from outlast.planner.links import (
    BITS_LEAST,
    BITS_MOST,
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
PAUSING: Final[tuple[FleetMode, ...]] = ("redundant", "templates")
LOCAL: Final[tuple[FleetMode, ...]] = ("local", "streaming")
RARE_H: Final = 1.0
HOUR_S: Final = 3600.0
# Seconds that a step with redundant work takes over one without, less one: 151.04 over 91.35
# (CheckFree, arXiv 2506.15461, table 2).
REDUNDANT_WORK: Final = 0.65
# What a local step is worth at H = 100: losses 2.49 and 2.50 at equal tokens, 1B parameters, along
# the slope of loss over work, -0.1315 (Streaming DiLoCo, arXiv 2501.18512, tables and section 3.2).
PUBLISHED_WORTH: Final = (2.49 / 2.50) ** (1 / 0.1315)
PUBLISHED_STEPS: Final = 100
RATE_LEAST, RATE_MOST = 1e-9, 1e6  # per hour, between which a break-even is looked for
NO_PROGRESS: Final = 1e-3  # of what undisturbed replicas would do
_ALMOST: Final = 1e-9  # of a time: who comes at the same moment is there


class FleetJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job of replicas, and what its link and its failures are like.

    Attributes:
        link: the model, its step and what crosses the link.
        replicas: R, at least 2.
        bits_per_s: of the link of a replica.
        costs: of a checkpoint, of a restart and of noticing.
        replace_h: until a lost replica's successor trains; None for as long as it takes to notice
            the loss and to restore.
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
    replace_h: float | None = None
    regroup_h: float = 10 / HOUR_S
    backups: int = 1
    tail: float = 0.0
    redundant_work: float = REDUNDANT_WORK
    worth: float = PUBLISHED_WORTH
    price_per_h: float | None = None

    @property
    def away_h(self) -> float:
        """Hours from a loss until the successor trains."""
        if self.replace_h is None:
            return self.costs.detect_h + self.costs.restore_h
        return self.replace_h

    def pause_h(self, mode: FleetMode) -> float:
        """Hours from a loss until those that are left begin again."""
        if mode == "synchronous":
            return self.costs.detect_h + self.costs.restore_h
        return self.costs.detect_h + self.regroup_h if mode in PAUSING else 0.0

    def joining_h(self, mode: FleetMode) -> float:
        """Hours for which all stop once more when a successor comes."""
        if mode not in ("synchronous", *PAUSING) or self.away_h <= self.pause_h(mode):
            return 0.0
        if mode in PAUSING:
            return self.regroup_h
        return self.costs.checkpoint_h + self.costs.lag_h + self.costs.restore_h

    def counted(self, mode: FleetMode) -> int:
        """Replicas whose gradients count."""
        return self.replicas - (self.backups if mode == "backup" else 0)

    def work_s(self, mode: FleetMode) -> float:
        """Seconds of a step without its link: of as many as are waited for."""
        common_s = self.link.step_s
        if mode == "redundant":
            common_s *= 1 + self.redundant_work
        if mode in LOCAL:  # over a round what is random in a step evens out
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
    step_h = step_s / HOUR_S
    every_h = save_every_h(job, mode, per_h, step_s)
    saving = job.costs.checkpoint_h / every_h
    if mode == "backup":
        return _of_first(job, per_h) / (1 + saving)
    # While all stand still nobody is missed.
    missed_h = max(job.away_h - job.pause_h(mode), 0.0)
    there = 1 / (1 + per_h * missed_h / job.replicas) / (1 + per_h * job.joining_h(mode))
    if mode == "synchronous":
        return there / exact_wall(job.costs, per_h, every_h)
    if mode in LOCAL:
        return there * _of_rounds(job, per_h, step_h) / (1 + saving)
    pausing = Costs(checkpoint_h=0.0, restore_h=job.regroup_h, detect_h=job.costs.detect_h)
    wall = exact_wall(pausing, per_h, step_h) + saving
    if mode == "redundant":
        # A neighbour on either side before those that are left have regrouped: a stage is nowhere.
        pair_per_h = 2 * per_h / job.replicas
        fatal = -math.expm1(-pair_per_h * job.pause_h(mode))
        wall += per_h * fatal * (job.costs.restore_h + every_h / 2)
    return there / wall


def save_every_h(job: FleetJob, mode: FleetMode, per_h: float, step_s: float) -> float:
    """Hours between two checkpoints, of whole steps.

    The best for the modes that may rewind, else ``RARE_H``.
    """
    step_h, best = step_s / HOUR_S, best_h(job.costs, per_h)
    if mode != "synchronous":
        wanted = min(best, RARE_H) if mode == "redundant" else RARE_H
        return step_h * max(math.ceil(wanted / step_h - _ALMOST), 1)
    steps = max(math.floor(best / step_h), math.ceil(job.costs.lag_h / step_h), 1)
    choices = (step_h * steps, step_h * (steps + 1))
    return min(choices, key=lambda every_h: exact_wall(job.costs, per_h, every_h))


def _of_rounds(job: FleetJob, per_h: float, step_h: float) -> float:
    """Of a replica's part of a round, what is made after its last loss: (1 - e^-x)/x.

    x is the number of its losses in a round, per_h / R · H · step_h.
    """
    losses = per_h / job.replicas * job.link.sync_steps * step_h
    return -math.expm1(-losses) / losses if losses else 1.0


def _of_first(job: FleetJob, per_h: float) -> float:
    """Of the replicas that count, those that are there: of R the first R - b, Poisson many away."""
    counted, away = job.counted("backup"), per_h * job.away_h
    missing = _beyond(job.backups, away) - _beyond(job.replicas, away)
    return min(max(1 - missing / counted, 0.0), 1.0)


def _beyond(count: int, mean: float) -> float:
    """E[max(A - count, 0)] of Poisson many A: mean · P(A ≥ count) - count · P(A > count)."""
    return mean * poisson_tail(count - 1, mean) - count * poisson_tail(count, mean)


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
        held = job.replicas / (1 + per_h * job.away_h / job.replicas)
        found = KeptWork(kept(job, mode, per_h, step_s), held)
    share = found.kept_share
    steps_per_h = HOUR_S / step_s * share * job.counted(mode) / job.replicas
    if mode in LOCAL:
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


def pays_at_links(
    job: FleetJob, local: FleetMode, other: FleetMode, per_h: float
) -> list[AheadSpan]:
    """Bits per second at which one mode does more than another, at a rate of failures."""

    def ahead(bits_per_s: Values) -> Flags:
        ours, theirs = (_goodputs(job, mode, per_h, bits_per_s) for mode in (local, other))
        return np.asarray(ours > theirs)

    return ahead_spans(ahead, BITS_LEAST, BITS_MOST, [job.bits_per_s])


def pays_at_rates(
    job: FleetJob, local: FleetMode, other: FleetMode, per_h: float
) -> list[AheadSpan]:
    """Failures per hour at which one mode does more than another, on the job's link.

    Args:
        job: see there.
        local: the one; beyond the rates at which it makes progress it stays as it is there.
        other: the other.
        per_h: a rate for which the answer holds exactly.
    """

    def goodputs(mode: FleetMode, rates: Values) -> Values:
        return np.array([row(job, mode, float(rate)).goodput for rate in rates])

    known = np.union1d(np.geomspace(RATE_LEAST, RATE_MOST, 151), [per_h])
    most = float(known[goodputs(local, known) >= NO_PROGRESS].max(initial=per_h))

    def ahead(rates: Values) -> Flags:
        within = np.minimum(rates, most)
        return np.asarray(goodputs(local, within) > goodputs(other, within))

    return ahead_spans(ahead, RATE_LEAST, RATE_MOST, [per_h])


def even_worth(rows: list[ModeRow], worth: float, local: FleetMode, other: FleetMode) -> float:
    """The worth of a local step at which two modes do the same; inf where local ones do nothing.

    Args:
        rows: of all modes.
        worth: that they were found with.
        local: the mode whose steps are local.
        other: the other.
    """
    goodput = {one.mode: one.goodput for one in rows}
    return goodput[other] * worth / goodput[local] if goodput[local] else math.inf


def _goodputs(job: FleetJob, mode: FleetMode, per_h: float, bits_per_s: Bandwidths) -> Bandwidths:
    link = job.linked(mode)
    used = utilisation(link, LINK_OF[mode], bits_per_s)
    shares = np.array([kept(job, mode, per_h, link.step_s / float(one)) for one in used])
    scale = job.link.step_s / link.step_s * job.counted(mode) / job.replicas
    return np.asarray(used * shares * scale * (job.worth if mode in LOCAL else 1))


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
    replace_s = scenario.replace_s * (1 - _ALMOST)  # before those that begin at that moment
    told = msgspec.structs.replace(scenario, setup=stepping, replace_s=replace_s)
    stories = [tell(told, number) for number in range(replications)]
    rows = []
    for mode in FLEET_MODES:
        first = row(job, mode, per_h)
        setup = _setup(job, mode, scenario, first.step_s)
        every_h = save_every_h(job, mode, per_h, first.step_s)
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
    if mode in LOCAL:
        return msgspec.structs.replace(common, mode="local", rejoin_s=0.0)
    if mode == "backup":  # who is lost is not waited for: nothing is made again, nobody pauses
        return msgspec.structs.replace(common, mode="local", rejoin_s=0.0, sync_steps=0)
    return msgspec.structs.replace(common, mode="elastic" if mode == "redundant" else "replicas")
