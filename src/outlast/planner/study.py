"""Compare policies on the same failures: many replications of a scenario, each with its seed.

Replication r of every policy sees the failures that seed and r determine, so that the difference
between two policies is measured with far less noise than either of them. What needs the runtime's
objects checkpoint by checkpoint (fleets, tiers, steps, modes, notices) runs in
:mod:`outlast.planner.job`, one replication after the other; the rest side by side in
:mod:`outlast.planner.many`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Final, Literal

import msgspec
import numpy as np

from outlast.config import Every, parse_every
from outlast.errors import ConfigError
from outlast.ledger.goodput import PARTS
from outlast.planner import draws, many
from outlast.planner.job import JobRun, JobSetup, MachineLoss, flushed_to
from outlast.planner.traces import Recording, in_slots
from outlast.policy.cadence import AUTO_MAX_S, AUTO_MIN_S, Auto, Cadence, EverySeconds, EverySteps
from outlast.policy.interval import Costs, daly_h, exact_best_h, young_h

HOUR_S: Final = 3600.0
FIRST_FAILURES: Final = 20
SEARCH_POINTS: Final = 25
SEARCH_REPLICATIONS: Final = 20
SEARCH_RUNS: Final = 5  # one by one
NEVER_S: Final = 1e18
# How long things take on one core, roughly: what is asked for is weighed before it is begun.
TURN_S: Final = 1e-4  # one failure of all replications, side by side
GAP_S: Final = 2e-7  # and of each of them
AUTO_TURN_S: Final = 3e-4  # the same with ``auto``, that is asked again and again
AUTO_GAP_S: Final = 1.4e-6
EVENT_S: Final = 4e-5  # one save or failure, one by one
MACHINE_S: Final = 4e-6  # one machine that is counted, one by one
FORMULAS: Final = {"young": young_h, "daly": daly_h, "exact": exact_best_h}
POLICIES: Final = (
    'auto, an interval such as "30 min" or "200 steps", young, daly, exact, young20, best'
)


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """What happens to a job.

    Attributes:
        setup: the job; its ``horizon_s`` is set.
        law: "constant", or how a machine's hazard goes with its age; "trace" for a recording.
        failures_per_h: of the job, where nothing is replayed.
        shape: of a Weibull law.
        zones: over which machines are spread; reclaims of a zone take all of its machines.
        replace_s: until a lost machine's successor is there.
        notice_share: of losses that come with a notice.
        trace: what is replayed, each replication from another moment on.
        seed: of everything.
    """

    setup: JobSetup
    law: Literal["constant", "weibull", "bathtub", "zones", "trace"] = "constant"
    failures_per_h: float = 0.0
    shape: float = 1.0
    zones: int = 1
    replace_s: float = 0.0
    notice_share: float = 0.0
    trace: Recording | None = None
    seed: int = 0

    @property
    def known_per_h(self) -> float:
        """Failures per hour, of the recording where there is one."""
        trace = self.trace
        if trace is None:
            return self.failures_per_h
        if trace.kind == "lifetimes":
            mean_s = sum(trace.lifetimes_s) / len(trace.lifetimes_s)
            return self.setup.machines * HOUR_S / mean_s
        return len(trace.losses) * HOUR_S / trace.length_s

    @property
    def heeded_share(self) -> float:
        """Of the losses, those that come with a notice in which a save fits."""
        setup = self.setup
        if not self.notice_share or not flushed_to(setup.levels, setup.notice_s, setup.step_s):
            return 0.0
        return self.notice_share * setup.flush_probability

    @property
    def costs(self) -> Costs:
        """What the formulas need to know: a save's mean cost, and which losses lose no work."""
        first, *slower = self.setup.levels
        # A tier that decides for itself is no part of what the first one costs.
        cost_s = first.cost_s / (first.every or 1)
        cost_s += math.fsum(level.cost_s / level.every for level in slower if level.every)
        return Costs(checkpoint_h=cost_s / HOUR_S, flush_probability=self.heeded_share)

    @property
    def is_simple(self) -> bool:
        """Whether nothing but failures of the whole job matter, so that it can go side by side."""
        setup = self.setup
        is_bare = len(setup.levels) == 1 and not setup.step_s and not setup.damaged_probability
        is_whole = setup.mode == "rigid" and not self.replace_s and setup.max_restarts is None
        is_whole = is_whole and not self.notice_share
        if self.trace is not None:
            return is_bare and is_whole and self.trace.kind == "failures"
        return is_bare and is_whole and self.law == "constant"


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One policy's results over all replications.

    Attributes:
        policy: as it was asked for.
        interval_s: of a fixed one.
        useful_share: of each replication: useful time over wall time.
        parts: part → mean share of wall time; they add up to 1.
        failures: mean number.
        cost: mean, of all machines; None without a price.
        wall_s: mean.
    """

    policy: str
    interval_s: float | None
    useful_share: list[float]
    parts: dict[str, float]
    failures: float
    cost: float | None
    wall_s: float

    @property
    def mean(self) -> float:
        """Useful share, over all replications."""
        return float(np.mean(self.useful_share))

    def quantile(self, probability: float) -> float:
        """Useful share that this share of replications does not reach."""
        return float(np.quantile(self.useful_share, probability))

    def cost_per_useful_h(self) -> float | None:
        """Of the whole job."""
        if self.cost is None or not self.mean:
            return None
        return self.cost / (self.mean * self.wall_s / HOUR_S)


def compare(scenario: Scenario, policies: list[str], replications: int) -> list[Result]:
    """Each policy on the same failures, in the order they were asked for.

    Raises:
        ConfigError: a policy that nobody knows, or that this scenario cannot have.
    """
    return [_result(scenario, policy, replications) for policy in policies]


def difference(one: Result, other: Result) -> tuple[float, float]:
    """Useful share of one over another, and its standard error, in pairs."""
    pairs = np.asarray(one.useful_share) - np.asarray(other.useful_share)
    error = float(pairs.std(ddof=1) / math.sqrt(len(pairs))) if len(pairs) > 1 else math.nan
    return float(pairs.mean()), error


def _result(scenario: Scenario, policy: str, replications: int) -> Result:
    every, interval_s = chosen(scenario, policy, replications)
    run = _side_by_side if _is_beside(scenario, every) else _one_by_one
    return run(scenario, policy, every, interval_s, replications)


def _is_beside(scenario: Scenario, every: Every) -> bool:
    """Whether it can go side by side; ``auto`` on a recording is always the runtime's own."""
    is_own = every.seconds is None and scenario.trace is not None
    return scenario.is_simple and every.steps is None and not is_own


def chosen(
    scenario: Scenario, policy: str, replications: int = SEARCH_REPLICATIONS
) -> tuple[Every, float | None]:
    """What a policy comes to: a cadence, and its interval if that is fixed from the start."""
    name = policy.strip().lower()
    costs, horizon_s = scenario.costs, scenario.setup.horizon_s
    cost_s = costs.checkpoint_h * HOUR_S
    interval_s: float | None = None
    if name in FORMULAS:
        # Where nothing loses work there is nothing to save for, before the end.
        interval_s = min(HOUR_S * FORMULAS[name](costs, scenario.known_per_h), horizon_s)
    elif name == f"young{FIRST_FAILURES}":
        losses = scenario.trace.losses if scenario.trace else []
        if len(losses) < FIRST_FAILURES or not losses[FIRST_FAILURES - 1]:
            raise ConfigError(f"{policy} needs a trace with at least {FIRST_FAILURES} failures")
        interval_s = math.sqrt(2 * cost_s * losses[FIRST_FAILURES - 1] / FIRST_FAILURES)
    elif name == "best":
        interval_s = best_fixed(scenario, min(replications, SEARCH_REPLICATIONS))
    else:
        try:
            every = parse_every(policy)
        except ConfigError:
            raise ConfigError(f"{policy!r} is not a policy; known are {POLICIES}") from None
        if every.steps is not None and not scenario.setup.step_s:
            raise ConfigError(f"{policy!r} counts steps: say how long one takes with --step")
        return every, every.seconds
    if not interval_s or not math.isfinite(interval_s):
        raise ConfigError(
            f"{policy} has no interval where a checkpoint costs {cost_s:g} s and the job fails "
            f"{scenario.known_per_h:g} times an hour; give one such as --policy '30 min'"
        )
    return Every(seconds=interval_s), interval_s


def best_fixed(scenario: Scenario, replications: int) -> float:
    """The fixed interval that does best on these failures, found in hindsight; seconds.

    Of ``SEARCH_POINTS`` from a tenth to ten times the exact model's, then again between the
    neighbours of the best: the optimum is flat, so what is left is a matter of noise. The failures
    are those of the first replications.
    """
    middle_s = _about(scenario)
    low_s, high_s, best_s = middle_s / 10, middle_s * 10, middle_s
    for _ in range(2):
        tried = np.exp(np.linspace(math.log(low_s), math.log(high_s), SEARCH_POINTS))
        index = int(np.argmax(_useful(scenario, tried, replications)))
        best_s = float(tried[index])
        low_s = float(tried[max(index - 1, 0)])
        high_s = float(tried[min(index + 1, SEARCH_POINTS - 1)])
    return best_s


def _about(scenario: Scenario) -> float:
    """The exact model's interval, kept within what the job lasts; seconds."""
    costs = msgspec.structs.replace(
        scenario.costs, checkpoint_h=max(scenario.costs.checkpoint_h, 1e-3 / HOUR_S)
    )
    best_s = HOUR_S * exact_best_h(costs, scenario.known_per_h)
    return min(best_s, scenario.setup.horizon_s / 10)


def effort_s(scenario: Scenario, policies: list[str], replications: int) -> float:
    """About how long :func:`compare` takes, seconds of one core.

    Raises:
        ConfigError: a policy that nobody knows, or that this scenario cannot have.
    """
    setup = scenario.setup
    failures = scenario.known_per_h * setup.horizon_s / HOUR_S
    total_s = 0.0
    for policy in policies:
        is_search = policy.strip().lower() == "best"
        every, interval_s = (None, None) if is_search else chosen(scenario, policy)
        if scenario.is_simple and (not every or _is_beside(scenario, every)):
            if every and every.seconds is None:
                total_s += failures * (AUTO_TURN_S + replications * AUTO_GAP_S)
                continue
            searched = 2 * is_search * SEARCH_POINTS * min(replications, SEARCH_REPLICATIONS)
            total_s += (1 + 2 * is_search) * failures * TURN_S
            total_s += failures * (replications + searched) * GAP_S
            continue
        if interval_s is None:
            interval_s = min(max(_about(scenario), AUTO_MIN_S), AUTO_MAX_S)
        if every and every.steps:
            interval_s = every.steps * setup.step_s
        saves = setup.horizon_s / (interval_s + scenario.costs.checkpoint_h * HOUR_S)
        machines = setup.machines * (1 + failures * (setup.mode in ("peer", "elastic")))
        one_s = (saves + 2 * failures) * EVENT_S + machines * MACHINE_S
        searched = 2 * is_search * SEARCH_POINTS * min(replications, SEARCH_RUNS)
        total_s += one_s * (replications + searched)
    return total_s


def _useful(scenario: Scenario, intervals_s: draws.Times, replications: int) -> draws.Times:
    """Mean useful share of each of these intervals, on the same failures."""
    if scenario.is_simple:
        spread = many.FixedIntervals(np.repeat(intervals_s, replications))
        ledger = _ledger(scenario, spread, replications, copies=len(intervals_s))
        shares = (ledger.useful / ledger.wall).reshape(len(intervals_s), replications)
        return np.asarray(shares.mean(axis=1))
    some = [Every(seconds=float(one)) for one in intervals_s]
    few = min(replications, SEARCH_RUNS)
    return np.array([_one_by_one(scenario, "", every, None, few).mean for every in some])


# --- side by side -------------------------------------------------------------------------------


def _ledger(
    scenario: Scenario, intervals: many.Intervals, replications: int, copies: int = 1
) -> many.TimeSpent:
    """All replications, ``copies`` times after one another with the same failures."""
    setup, level = scenario.setup, scenario.setup.levels[0]
    case = many.JobCase(
        cost_s=level.cost_s,
        restore_s=level.restore_s,
        detect_s=setup.detect_s,
        lag_s=level.lag_s,
        horizon_s=setup.horizon_s,
    )
    failures: many.FailureGaps
    if scenario.trace is not None:
        chances = [np.random.default_rng((scenario.seed, one)) for one in range(replications)]
        begins = [_begin_s(scenario, chance, one) for one, chance in enumerate(chances)]
        offsets_s = np.tile(np.array(begins), copies)
        failures = many.Replayed(scenario.trace.losses, scenario.trace.length_s, offsets_s)
    else:
        per_h = scenario.failures_per_h
        law = draws.Exponential(HOUR_S / per_h if per_h else NEVER_S)
        failures = many.Renewed(law, scenario.seed, copies)
    return many.simulate(case, failures, intervals, replications * copies)


def _side_by_side(
    scenario: Scenario, policy: str, every: Every, interval_s: float | None, replications: int
) -> Result:
    setup = scenario.setup
    intervals: many.Intervals = many.Automatic(setup.levels[0].cost_s, replications)
    if every.seconds is not None:
        intervals = many.FixedIntervals(every.seconds)
    ledger = _ledger(scenario, intervals, replications)
    wall_s = ledger.wall
    total_s = float(wall_s.sum())
    mean_s = total_s / replications
    price = setup.price_per_h
    return Result(
        policy=policy,
        interval_s=interval_s,
        useful_share=(ledger.useful / wall_s).tolist(),
        parts={part: float(one.sum()) / total_s for part, one in ledger.parts().items()},
        failures=float(ledger.failures.mean()),
        cost=None if price is None else price * mean_s / HOUR_S * (setup.machines + setup.spares),
        wall_s=mean_s,
    )


# --- one by one ---------------------------------------------------------------------------------


class Story(msgspec.Struct, frozen=True, kw_only=True):
    """What happens to one replication, see :class:`~outlast.planner.job.JobRun`."""

    losses: list[MachineLoss]
    absent: list[int] = []
    comes: list[tuple[float, tuple[int, ...]]] = []


def _one_by_one(
    scenario: Scenario, policy: str, every: Every, interval_s: float | None, replications: int
) -> Result:
    outcomes = []
    for number in range(replications):
        story = tell(scenario, number)
        run = JobRun(
            scenario.setup,
            _cadence(every),
            story.losses,
            random.Random(f"{scenario.seed} {number}"),  # noqa: S311 - a simulation
            absent=story.absent,
            comes=story.comes,
        )
        outcomes.append(run.run())
    total_s = math.fsum(outcome.wall_s for outcome in outcomes)
    parts: dict[str, float] = {
        part: math.fsum(outcome.parts[part] for outcome in outcomes) / total_s for part in PARTS
    }
    machine_h = float(np.mean([outcome.machine_s for outcome in outcomes])) / HOUR_S
    price = scenario.setup.price_per_h
    return Result(
        policy=policy,
        interval_s=interval_s,
        useful_share=[outcome.useful_s / outcome.wall_s for outcome in outcomes],
        parts=parts,
        failures=float(np.mean([outcome.failures for outcome in outcomes])),
        cost=None if price is None else price * machine_h,
        wall_s=total_s / len(outcomes),
    )


def _cadence(every: Every) -> Cadence:
    if every.steps is not None:
        return EverySteps(every.steps)
    return Auto(0.0) if every.seconds is None else EverySeconds(every.seconds, 0.0)


def tell(scenario: Scenario, number: int) -> Story:
    """What happens to this replication; the same whatever the policy."""
    chance = np.random.default_rng((scenario.seed, number))
    if scenario.trace is not None and scenario.trace.kind == "fleet":
        return _fleet(scenario, chance, _begin_s(scenario, chance, number))
    moments = _DRAWN[scenario.law](scenario, chance, number)
    is_whole = scenario.is_simple  # nobody is missed: another machine is there at once
    losses = [
        MachineLoss(at_s, () if is_whole else machines, _how(scenario, chance), scenario.replace_s)
        for at_s, machines in moments
    ]
    return Story(losses=losses)


def _begin_s(scenario: Scenario, chance: np.random.Generator, number: int) -> float:
    """Where a replication begins in a recording; the first as it was."""
    assert scenario.trace is not None  # noqa: S101 - asked by whoever has one
    return float(chance.random()) * scenario.trace.length_s if number else 0.0


Moments = list[tuple[float, tuple[int, ...]]]


def _how(scenario: Scenario, chance: np.random.Generator) -> str:
    return "notice" if chance.random() < scenario.notice_share else "reset"


def _constant(scenario: Scenario, chance: np.random.Generator, number: int) -> Moments:
    expected = scenario.failures_per_h * scenario.setup.horizon_s / HOUR_S
    count = int(chance.poisson(expected))
    at_s = np.sort(chance.random(count)) * scenario.setup.horizon_s
    who = chance.integers(0, scenario.setup.machines, count)
    return [(float(one), (int(machine),)) for one, machine in zip(at_s, who, strict=True)]


def _aged(
    law: Callable[[Scenario], draws.Aged],
) -> Callable[[Scenario, np.random.Generator, int], Moments]:
    def moments(scenario: Scenario, chance: np.random.Generator, number: int) -> Moments:
        setup = scenario.setup
        at_s, who = draws.fleet(law(scenario), setup.machines, setup.horizon_s, chance)
        return [(float(one), (int(machine),)) for one, machine in zip(at_s, who, strict=True)]

    return moments


def _lifetime_s(scenario: Scenario) -> float:
    return scenario.setup.machines * HOUR_S / scenario.failures_per_h


def _of_zones(scenario: Scenario, chance: np.random.Generator, number: int) -> Moments:
    setup, zones = scenario.setup, scenario.zones
    per_h = scenario.failures_per_h / zones
    found = draws.zone_reclaims(zones, per_h, setup.horizon_s, chance)
    return [(at_s, tuple(range(zone, setup.machines, zones))) for at_s, zone in found]


def _recorded(scenario: Scenario, chance: np.random.Generator, number: int) -> Moments:
    trace = scenario.trace
    assert trace is not None  # noqa: S101 - that is what the law says
    if trace.kind == "lifetimes":
        law = draws.Recorded(trace.lifetimes_s)
        return _aged(lambda _: law)(scenario, chance, number)
    offset_s = _begin_s(scenario, chance, number)
    length_s, horizon_s = trace.length_s, scenario.setup.horizon_s
    # One at the very end of the recording is there, not at the beginning.
    times = length_s - np.unique((offset_s - np.asarray(trace.losses)) % length_s)[::-1]
    turns = range(math.ceil(horizon_s / length_s))
    every = [float(at_s) + length_s * turn for turn in turns for at_s in times]
    machines = scenario.setup.machines
    return [(at_s, (int(chance.integers(machines)),)) for at_s in every if at_s < horizon_s]


_DRAWN: Final = {
    "constant": _constant,
    "weibull": _aged(lambda scenario: draws.Weibull(_lifetime_s(scenario), scenario.shape)),
    "bathtub": _aged(lambda scenario: draws.bathtub(_lifetime_s(scenario))),
    "zones": _of_zones,
    "trace": _recorded,
}


def _fleet(scenario: Scenario, chance: np.random.Generator, offset_s: float) -> Story:
    """A fleet's recording from a moment on, and round again; machines are its slots."""
    trace, horizon_s = scenario.trace, scenario.setup.horizon_s
    assert trace is not None  # noqa: S101 - asked by whoever has one
    changes = list(in_slots(trace))
    here: set[int] = set()
    states: list[tuple[float, set[int]]] = []  # who is there from each moment on
    for at_s, came, went in changes:
        here = (here - set(went)) | set(came)
        states.append((at_s, here))
    before = [state for at_s, state in states if at_s <= offset_s]
    start = before[-1] if before else set()
    turned = [(at_s - offset_s, state) for at_s, state in states if at_s > offset_s]
    turned.append((trace.length_s - offset_s, set(states[0][1]) if states[0][0] == 0 else set()))
    turned += [
        (at_s - offset_s + trace.length_s, state) for at_s, state in states if at_s <= offset_s
    ]
    losses, comes, state = [], [], set(start)
    for turn in range(math.ceil(horizon_s / trace.length_s)):
        for after_s, wanted in turned:
            at_s = after_s + turn * trace.length_s
            if wanted - state:
                comes.append((at_s, tuple(sorted(wanted - state))))
            if state - wanted:
                gone = tuple(sorted(state - wanted))
                losses.append(MachineLoss(at_s, gone, _how(scenario, chance)))
            state = set(wanted)
    absent = sorted(set(range(trace.machines)) - start)
    return Story(losses=losses, absent=absent, comes=comes)
