"""Meet a deadline with spot and on-demand machines: uniform progress.

Wu et al., Can't Be Late (NSDI'24), section 5. With C₀ hours of work, a deadline R₀ hours after the
start and a changeover of d hours that each switch costs:

1. thrifty: a finished job holds nothing;
2. safety net: idle, and R(t) < C(t) + 2d left: on demand until the end;
3. exploitation: a job that runs on spot stays there until it is preempted, behind or not;
4. uniform progress: idle, and behind c_p(t) < t·C₀/R₀: on demand;
5. taking risks: idle, and spot is to be had: take it;
6. hysteresis: from on-demand back only once c_p(t) ≥ (t + 2d)·C₀/R₀.

It needs no knowledge of the market and meets the deadline whenever on-demand machines can be had
and C₀ + 2d ≤ R₀. :func:`choose` is the decision, and nothing but that; :func:`play` runs it through
spells of availability, jumping from decision to decision; :func:`compare` sets it beside others on
the same drawn markets.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Literal, NamedTuple, Protocol

import msgspec

Place = Literal["idle", "spot", "on_demand"]
_ROUNDING_H: Final = 1e-9


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be done, by when.

    Attributes:
        work_h: C₀: hours of running, were there no interruption.
        deadline_h: R₀: hours from the start.
        changeover_h: d: hours from getting machines to new work, with what was rewound.
    """

    work_h: float
    deadline_h: float
    changeover_h: float

    def due_h(self, at_h: float) -> float:
        """Work that uniform progress has done by ``at_h``: t·C₀/R₀."""
        return at_h * self.work_h / self.deadline_h

    @property
    def ahead_h(self) -> float:
        """Hours to be ahead of uniform progress before on-demand machines are let go: 2d.

        With no changeover to fear it is a thousandth of the time, or a policy that is asked at
        every moment would come and go without end.
        """
        return max(2 * self.changeover_h, self.deadline_h / 1000)

    def must_hurry(self, at_h: float, done_h: float) -> bool:
        """Whether the safety net applies: R(t) < C(t) + 2d."""
        return self.hurry_at_h(done_h) < at_h + _ROUNDING_H

    def hurry_at_h(self, done_h: float) -> float:
        """When it does, if nothing more is done."""
        return self.deadline_h - (self.work_h - done_h) - 2 * self.changeover_h


def choose(task: Task, at_h: float, done_h: float, place: Place, *, spot: bool) -> Place:
    """Choose where a job is to be now: on spot, on demand or idle.

    Args:
        task: what is to be done.
        at_h: t.
        done_h: c_p(t).
        place: where the job is.
        spot: whether spot machines can be had.
    """
    if done_h >= task.work_h - _ROUNDING_H:
        return "idle"
    if place == "spot" and spot:
        return "spot"
    if task.must_hurry(at_h, done_h):
        return "on_demand"
    if place == "on_demand":
        ahead = done_h >= task.due_h(at_h + task.ahead_h) - _ROUNDING_H
        if not ahead:
            return "on_demand"
    if spot:
        return "spot"
    behind = done_h < task.due_h(at_h) + _ROUNDING_H
    return "on_demand" if behind else "idle"


def choose_greedily(task: Task, at_h: float, done_h: float, place: Place, *, spot: bool) -> Place:
    """The policy to beat: spot whenever there is any, on demand to the end once it must be.

    Asked as :func:`choose` is.
    """
    if done_h >= task.work_h - _ROUNDING_H:
        return "idle"
    if place == "spot" and spot:
        return "spot"
    if place == "on_demand" or task.must_hurry(at_h, done_h):
        return "on_demand"
    return "spot" if spot else "idle"


def choose_spot(task: Task, at_h: float, done_h: float, place: Place, *, spot: bool) -> Place:
    """Spot alone, deadline or not; asked as :func:`choose` is."""
    return "spot" if spot and done_h < task.work_h - _ROUNDING_H else "idle"


class Policy(Protocol):
    """Decides where a job is to be now; see :func:`choose`."""

    def __call__(
        self, task: Task, at_h: float, done_h: float, place: Place, *, spot: bool
    ) -> Place:
        """Where to be now."""


class Spell(NamedTuple):
    """Spot machines can be had, or not, for some hours."""

    hours: float
    spot: bool


class DeadlineOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a job with a deadline went.

    Attributes:
        ended_h: when the work was done.
        spot_h: hours for which spot machines were paid.
        on_demand_h: hours for which others were.
        spot_work_h: hours of work done on spot.
        num_switches: changeovers that were paid for.
    """

    ended_h: float
    spot_h: float
    on_demand_h: float
    spot_work_h: float
    num_switches: int

    def cost(self, spot_price: float, on_demand_price: float) -> float:
        """What it cost, at prices per hour of the whole fleet."""
        return self.spot_h * spot_price + self.on_demand_h * on_demand_price


def play(
    task: Task, spells: Iterable[Spell], *, policy: Policy = choose, at_most_h: float = math.inf
) -> DeadlineOutcome:
    """Go through spells until the work is done.

    Args:
        task: what is to be done.
        spells: one after the other, endless or long enough.
        policy: which decides.
        at_most_h: hours after which it is given up.
    """
    run = _DeadlineRun(task)
    for spell in spells:
        if run.at_h > at_most_h:
            break
        left_h = spell.hours
        while left_h > 0:
            run.move(policy(task, run.at_h, run.done_h, run.place, spot=spell.spot))
            took_h = min(left_h, run.until_next_h())
            left_h -= took_h
            if run.pass_by(took_h):
                return run.outcome(run.at_h)
    return run.outcome(math.inf)


class _DeadlineRun:
    """A job on its way."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.at_h = 0.0
        self.done_h = 0.0
        self.place: Place = "idle"
        self.warming_h = 0.0  # until there is new work
        self._paid_h = {"spot": 0.0, "on_demand": 0.0, "idle": 0.0}
        self._num_switches = 0
        self._spot_work_h = 0.0

    def move(self, place: Place) -> None:
        if place not in (self.place, "idle"):
            self._num_switches += 1
            self.warming_h = self.task.changeover_h
        self.place = place

    def until_done_h(self) -> float:
        """Hours until the work is done, if nothing else happens."""
        return math.inf if self.place == "idle" else self.warming_h + self.task.work_h - self.done_h

    def until_next_h(self) -> float:
        """Hours until any policy may say something else, if the market stays as it is."""
        task, pace = self.task, self.task.work_h / self.task.deadline_h
        if self.place == "idle":
            moments_h = (self.done_h / pace, task.hurry_at_h(self.done_h))
            ahead_h = [moment_h - self.at_h for moment_h in moments_h]
            return min((h for h in ahead_h if h > 0), default=math.inf) + 2 * _ROUNDING_H
        done_h = self.until_done_h()
        if self.place == "spot" or task.must_hurry(self.at_h, self.done_h) or pace >= 1:
            return done_h
        # On demand, work grows by one an hour once it has begun, and what is due by the pace.
        short_h = task.due_h(self.at_h + self.warming_h + task.ahead_h) - self.done_h
        return max(min(done_h, self.warming_h + short_h / (1 - pace)), 2 * _ROUNDING_H)

    def pass_by(self, hours: float) -> bool:
        """Let ``hours`` pass; whether the work is done."""
        self.at_h += hours
        self._paid_h[self.place] += hours
        if self.place != "idle":
            worked_h = max(hours - self.warming_h, 0.0)
            self.done_h += worked_h
            self._spot_work_h += worked_h if self.place == "spot" else 0.0
            self.warming_h = max(self.warming_h - hours, 0.0)
        return self.done_h >= self.task.work_h - _ROUNDING_H

    def outcome(self, ended_h: float) -> DeadlineOutcome:
        return DeadlineOutcome(
            ended_h=ended_h,
            spot_h=self._paid_h["spot"],
            on_demand_h=self._paid_h["on_demand"],
            spot_work_h=self._spot_work_h,
            num_switches=self._num_switches,
        )


def drawn_spells(up_h: float, down_h: float, draw: Callable[[], float]) -> Iterator[Spell]:
    """Endless spells, both kinds exponential; begins with spot as often as it can be had.

    Args:
        up_h: mean hours until spot machines are taken back.
        down_h: mean hours until they can be had again.
        draw: uniform numbers in [0, 1).
    """
    spot = draw() < up_h / (up_h + down_h)
    while True:
        mean_h = up_h if spot else down_h
        yield Spell(-mean_h * math.log1p(-draw()) + _ROUNDING_H, spot)
        spot = not spot


# --- policies on the same markets ---------------------------------------------------------------

_POLICIES: Final[dict[str, Policy]] = {
    "uniform progress": choose,
    "greedy": choose_greedily,
    "spot alone": choose_spot,
}
_RUNS_MOST, _RUNS_LEAST = 100, 10  # of each policy
_SPELLS_DRAWN: Final = 20_000  # in all runs of a policy, which takes a second
_GIVEN_UP: Final = 10  # times the deadline, after which spot alone is given up


class PolicyResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a policy does over all markets: costs of the whole job, hours of the whole fleet.

    Attributes:
        policy: its name.
        met_fraction: of the markets, those in which the work is done in time.
        cost_mean, cost_p5, cost_p95: of the job.
        ended_p95_h: by when the work is done in 19 of 20 markets.
        on_demand_h: mean hours for which on-demand machines are paid.
        spot_work_h: mean hours of work done on spot.
    """

    policy: str
    met_fraction: float
    cost_mean: float
    cost_p5: float
    cost_p95: float
    ended_p95_h: float
    on_demand_h: float
    spot_work_h: float


def compare(
    task: Task, market_h: tuple[float, float], prices: tuple[float, float], *, seed: int
) -> tuple[int, list[PolicyResult]]:
    """Play each policy on the same drawn markets; machines on demand alone stand last.

    Args:
        task: what is to be done.
        market_h: mean hours for which spot machines last, and for which they are away.
        prices: per hour, of spot and on demand.
        seed: of the first market; each further one has the next.

    Returns:
        How many markets were drawn, and how each policy does on them.
    """
    num_spells = 2 * task.deadline_h / sum(market_h)
    count = max(_RUNS_LEAST, min(_RUNS_MOST, int(_SPELLS_DRAWN / max(num_spells, 1))))
    results = []
    for name, policy in _POLICIES.items():
        outcomes = [
            play(
                task,
                drawn_spells(*market_h, random.Random(seed + one).random),  # noqa: S311
                policy=policy,
                at_most_h=_GIVEN_UP * task.deadline_h,
            )
            for one in range(count)
        ]
        costs = sorted(outcome.cost(*prices) for outcome in outcomes)
        ended = sorted(outcome.ended_h for outcome in outcomes)
        results.append(
            PolicyResult(
                policy=name,
                met_fraction=sum(one <= task.deadline_h + 1e-6 for one in ended) / count,
                cost_mean=math.fsum(costs) / count,
                cost_p5=costs[count // 20],
                cost_p95=costs[-1 - count // 20],
                ended_p95_h=ended[-1 - count // 20],
                on_demand_h=math.fsum(one.on_demand_h for one in outcomes) / count,
                spot_work_h=math.fsum(one.spot_work_h for one in outcomes) / count,
            )
        )
    steady_h = task.work_h + task.changeover_h
    cost = steady_h * prices[1]
    steady = PolicyResult(
        policy="on demand alone",
        met_fraction=float(steady_h <= task.deadline_h),
        cost_mean=cost,
        cost_p5=cost,
        cost_p95=cost,
        ended_p95_h=steady_h,
        on_demand_h=steady_h,
        spot_work_h=0.0,
    )
    return count, [*results, steady]


def cheapest(results: Iterable[PolicyResult]) -> PolicyResult | None:
    """Choose the cheapest policy that is sure to be in time; None where none is.

    Spot alone is never sure: that it was in time in all these markets is no promise.
    """
    sure = [one for one in results if one.met_fraction == 1.0 and one.policy != "spot alone"]
    return min(sure, key=lambda one: one.cost_mean, default=None)
