"""Simulate pipelines in which each machine can do its successor's work (Bamboo, NSDI'23).

Machines stand in pipelines of a fixed depth. Each holds its successor's stage besides its own. When
one goes, its predecessor does both, and training goes on, slower. Two neighbours that go leave a
stage that nobody holds: then all restart. Between steps all regroup, with nothing lost, as soon as

- enough machines stand by to relieve every one that does two stages, or
- those that do two stages, and those whose stage nobody else holds any more, are more than a share
  of the machines, or
- machines that stand by are enough for another pipeline.

The fleet is Bamboo's own: each hour each machine is taken with one probability, at any second of
it; each empty place is filled with the probability of that hour of the day, drawn once per run.

Whatever its simulator (8080929) does that its paper does not say is here as it does it: while all
restart the old group trains on; the first loss in a group makes what is left of the step, and each
later step until the next regrouping, take ``slowdown`` times as long.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

import msgspec

HOUR_S: Final = 3600.0
HOURS_A_DAY: Final = 24
HOURS_DRAWN: Final = 2000


class RedundantJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job of pipelines whose machines hold their successors' stages.

    Attributes:
        machines: that it asks for.
        stages: of a pipeline, one machine each.
        step_s: pipelines → seconds of a step.
        samples_per_step: of all pipelines.
        steps: to be made.
        ready_s: until a machine that came can be used.
        regroup_s, restart_s: between steps; where a stage is lost.
        slowdown: of a step, once a machine does two stages.
        exposed_share: of the machines that may be beyond a neighbour's help.
        price_per_h: of a machine.
    """

    machines: int
    stages: int
    step_s: dict[int, float]
    samples_per_step: float
    steps: int
    ready_s: float = 45.0
    regroup_s: float = 20.0
    restart_s: float = 30.0
    slowdown: float = 1.5
    exposed_share: float = 0.05
    price_per_h: float = 0.0


class RedundantOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it.

    Attributes:
        losses: machines that were taken.
        restarts: losses of a stage that nobody held.
        machines: on average.
        samples_per_s: from the first step's start to the last one's end.
        cost_per_h: of all machines that were held.
        samples_per_cost: per second, over the cost per hour.
        hours: from the start.
    """

    losses: int
    restarts: int
    machines: float
    samples_per_s: float
    cost_per_h: float
    samples_per_cost: float
    hours: float


class FleetEvent(NamedTuple):
    """A machine that comes or goes."""

    at_s: float
    what: Literal["add", "remove"]
    machine: int


NOBODY: Final = FleetEvent(math.inf, "add", -1)


class _StageHolder:
    """A machine of the job: which stages it does, (pipeline, stage) each."""

    def __init__(self) -> None:
        self.is_ready = False
        self.stages: list[tuple[int, int]] = []


def hourly_fleet(
    chance: random.Random, machines: int, taken_per_h: float, hours: int = HOURS_DRAWN
) -> Iterator[FleetEvent]:
    """Machines that come and go, in order.

    Args:
        chance: of all of it.
        machines: that are asked for; never more are there.
        taken_per_h: probability that a machine is taken within an hour.
        hours: for which they are drawn; nobody comes or goes afterwards.
    """
    filled_per_h = [chance.random() for _ in range(HOURS_A_DAY)]
    names, here = itertools.count(), set[int]()
    for _ in range(machines):
        if chance.random() < filled_per_h[0]:
            here.add(name := next(names))
            yield FleetEvent(0.0, "add", name)
    for hour in range(hours):
        filled = filled_per_h[hour % HOURS_A_DAY]

        def moment(hour: int = hour) -> float:
            return hour * HOUR_S + chance.randrange(int(HOUR_S))

        going = [(moment(), one) for one in sorted(here) if chance.random() < taken_per_h]
        wanted = machines - len(here) + len(going)
        coming = sorted(moment() for _ in range(wanted) if chance.random() < filled)
        heapq.heapify(going)
        while going or coming:
            if going and (not coming or going[0][0] < coming[0]):
                at_s, name = heapq.heappop(going)
                here.remove(name)
                yield FleetEvent(at_s, "remove", name)
                continue
            at_s = coming.pop(0)
            if len(here) == machines:
                continue
            here.add(name := next(names))
            yield FleetEvent(at_s, "add", name)
            if chance.random() < taken_per_h and (gone_s := moment()) >= at_s:
                heapq.heappush(going, (gone_s, name))


def simulate_redundant(
    job: RedundantJob, fleet: Iterator[FleetEvent], horizon_h: float = math.inf
) -> RedundantOutcome:
    """One run to the end of the work, or for some hours.

    Args:
        job: with its pipelines.
        fleet: in order.
        horizon_h: after which it is looked at.
    """
    return _Pipelines(job, fleet, horizon_h * HOUR_S).run()


class _Pipelines:
    """One run. Between two events all steps are alike, and are made in one go."""

    def __init__(self, job: RedundantJob, fleet: Iterator[FleetEvent], horizon_s: float) -> None:
        self._job, self._fleet, self._horizon_s = job, fleet, horizon_s
        self._coming = next(fleet, NOBODY)
        self._ready: list[tuple[float, int]] = []
        self._members: dict[int, _StageHolder] = {}
        self._now_s = 0.0
        self._phase: Literal["stopped", "forming", "training"] = "stopped"
        self._formed_s = math.inf  # when the group that is being formed is there
        self._form_s = 0.0  # what forming takes
        self._forming: list[int] = []
        self._pipelines = 0
        self._waiting = 0  # machines that stand by
        self._step_s = 0.0
        self._ends_s = math.inf  # the step that is being made
        self._slowed_s: float | None = None  # since when, in a step that is not over
        self._is_slow = False
        self._steps = self._losses = self._restarts = 0
        self._began_s: float | None = None
        self._last_s = 0.0  # the last step's end
        self._held_s = self._held_at_last_s = self._worth = 0.0

    def run(self) -> RedundantOutcome:
        while self._steps < self._job.steps and self._now_s < self._horizon_s:
            soonest_s = min(
                self._coming.at_s,
                self._ready[0][0] if self._ready else math.inf,
                self._formed_s,
            )
            if self._ends_s < soonest_s:
                self._finish_steps(soonest_s)
                continue
            if math.isinf(soonest_s):
                break  # nothing trains, and nobody comes any more
            self._pass(soonest_s)
            if self._coming.at_s == soonest_s:
                event, self._coming = self._coming, next(self._fleet, NOBODY)
                self._change(event)
            elif self._ready and self._ready[0][0] == soonest_s:
                self._is_there(heapq.heappop(self._ready)[1])
            else:
                self._formed()
        began_s = self._began_s or 0.0
        lasted_s = max(self._last_s - began_s, 1e-9)
        price = self._job.price_per_h
        machines = self._held_at_last_s / self._last_s if self._last_s else 0.0
        return RedundantOutcome(
            losses=self._losses,
            restarts=self._restarts,
            machines=machines,
            samples_per_s=self._steps * self._job.samples_per_step / lasted_s,
            cost_per_h=machines * price,
            samples_per_cost=self._worth / lasted_s / price if price else math.inf,
            hours=self._last_s / HOUR_S,
        )

    def _pass(self, at_s: float) -> None:
        self._held_s += (at_s - self._now_s) * len(self._members)
        self._now_s = at_s

    # --- machines -------------------------------------------------------------------------------

    def _change(self, event: FleetEvent) -> None:
        if event.what == "add":
            self._members[event.machine] = _StageHolder()
            heapq.heappush(self._ready, (self._now_s + self._job.ready_s, event.machine))
            return
        gone = self._members.pop(event.machine)
        self._losses += 1
        if gone.stages and not self._hand_over(gone):
            self._restarts += 1
            self._form(self._job.restart_s)
            return
        if self._phase == "training" and not self._is_slow:
            self._is_slow, self._slowed_s = True, self._now_s
            self._step_s *= self._job.slowdown

    def _hand_over(self, gone: _StageHolder) -> bool:
        """Let the predecessor do its stage; False where it was alone with what it did."""
        if len(gone.stages) > 1:
            return False
        pipeline, stage = gone.stages[0]
        before = (pipeline, (stage - 1) % self._job.stages)
        for member in self._members.values():
            if before in member.stages:
                if len(member.stages) > 1:
                    return False
                member.stages.append((pipeline, stage))
                return True
        return True  # nobody does what came before it: that one is waiting to be replaced too

    def _is_there(self, machine: int) -> None:
        member = self._members.get(machine)
        if member is None:
            return
        member.is_ready = True
        if self._phase == "stopped":
            self._form(self._job.restart_s)
        elif self._phase == "forming":
            self._forming.append(machine)
        else:
            self._waiting += 1

    # --- groups ---------------------------------------------------------------------------------

    def _form(self, takes_s: float) -> None:
        self._phase = "forming"
        self._form_s = takes_s
        self._formed_s = self._now_s + takes_s
        self._forming = [name for name, one in self._members.items() if one.is_ready]

    def _formed(self) -> None:
        if any(name not in self._members for name in self._forming):
            self._form(self._form_s)  # one went meanwhile
            return
        self._formed_s = math.inf
        stages = self._job.stages
        most = max(self._job.step_s)
        self._pipelines = min(len(self._forming) // stages, most)
        places = list(itertools.product(range(self._pipelines), range(stages)))
        for number, name in enumerate(self._forming):
            self._members[name].stages = [places[number]] if number < len(places) else []
        self._waiting = len(self._forming) - len(places)
        self._is_slow, self._slowed_s = False, None
        if not self._pipelines:
            self._phase, self._ends_s = "stopped", math.inf
            return
        self._phase = "training"
        self._step_s = self._job.step_s[self._pipelines]
        self._ends_s = self._now_s + self._step_s
        if self._began_s is None:
            self._began_s = self._last_s = self._now_s
            self._held_at_last_s = self._held_s

    # --- steps ----------------------------------------------------------------------------------

    def _finish_steps(self, until_s: float) -> None:
        """All steps that end before ``until_s``, unless there is a reason to regroup."""
        if self._slowed_s is not None:  # what was left of this step takes longer
            self._ends_s += (self._ends_s - self._slowed_s) * (self._job.slowdown - 1)
            self._slowed_s = None
            return
        count = 1
        if not self._should_regroup():
            left = self._job.steps - self._steps
            count += int(min((until_s - self._ends_s) / self._step_s, left))
            count = min(count, left)
        ends_s = self._ends_s + (count - 1) * self._step_s
        self._pass(ends_s)
        self._steps += count
        lasted_s, held_s = ends_s - self._last_s, self._held_s - self._held_at_last_s
        self._worth += count * self._job.samples_per_step / (held_s / lasted_s)
        self._last_s, self._held_at_last_s = ends_s, self._held_s
        if self._should_regroup():
            self._form(self._job.regroup_s)
            self._ends_s = math.inf
        else:
            self._ends_s = ends_s + self._step_s

    def _should_regroup(self) -> bool:
        doubled = sum(len(member.stages) > 1 for member in self._members.values())
        if doubled and self._waiting >= doubled:
            return True
        active = self._pipelines * self._job.stages - doubled
        if doubled and 2 * doubled / active > self._job.exposed_share:
            return True
        possible = min((active + self._waiting) // self._job.stages, max(self._job.step_s))
        return possible > self._pipelines
