"""What every report says, computed once from the ledger: state, goodput, money, forecast.

What it cost is :mod:`outlast.report.money`'s.

Predicted is what the plan said that was kept before the job started (``outlast plan --save``, see
:mod:`outlast.ledger.job`). Without one it is what a plan could have said: by the exact model
(:mod:`outlast.policy.interval`) from what saves, losses and resumes of this job took, at the rate
that is believed in before anything is known (one failure in 10 h). The regret is found by replaying
the job's own failures: what the best fixed interval would have gained over the mean one that it
had. Both are for a job of one kind of machine that saves to one tier.

A storm is what the cadence takes for one (:func:`outlast.policy.hazard.storms`): failures that were
more probably a burst's than calm's. What it cost is measured: the job's time by part, from the
first failure to the first new step after the last one. What another cadence would have cost is
simulated: the job's failures up to the storm's end, less those up to its beginning, with what its
saves, losses and resumes took in the mean. So the two are to be compared with care: the simulated
ones with each other, the measured one with none of them to the second.
"""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from outlast.errors import Exit
from outlast.ledger.events import Event
from outlast.ledger.goodput import Goodput, Part, in_order, number, split, splits_at, whole
from outlast.ledger.incidents import (
    Incident,
    Lived,
    Slow,
    incidents,
    lived,
    lost_to_waiting_s,
    slow_ranks,
)
from outlast.ledger.job import Prediction, newest_plan
from outlast.ledger.measured import TierTime, tier_times
from outlast.policy import hazard
from outlast.policy.hazard import Posterior
from outlast.policy.interval import Costs, exact_wall
from outlast.prices import NO_PRICES, Prices
from outlast.report.money import Money, kinds_of, money
from outlast.report.series import RankTimes, rank_times

if TYPE_CHECKING:
    from outlast.planner.many import JobCase

State = Literal[
    "not started",
    "running",
    "silent",
    "finished",
    "drained",
    "gave up",
    "storage unusable",
    "refuses to resume",
    "failed",
]
SILENT_S: Final = 3600.0
GOING_ON: Final = ("running", "silent")  # nobody has said that it is over
_STATES: Final[dict[int, State]] = {
    Exit.FINISHED: "finished",
    Exit.DRAINED: "drained",
    Exit.GAVE_UP: "gave up",
    Exit.STORAGE: "storage unusable",
    Exit.REFUSED: "refuses to resume",
}


class TierInterval(msgspec.Struct, frozen=True, kw_only=True):
    """How often a tier takes a checkpoint, in seconds while it is calm, and why."""

    interval_s: float
    reason: str


class Untold(msgspec.Struct, frozen=True, kw_only=True):
    """Messages about the job that people did not get.

    Attributes:
        num: how many.
        since_t: when the first of them was tried first.
        until_t: when one was taken again; None where none was.
        why: of the newest.
    """

    num: int
    since_t: float
    until_t: float | None
    why: str


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """A job as its ledger tells it.

    Attributes:
        job: the job's id, empty when the ledger is.
        state: what the newest events say; "silent" for a job that runs by them and has said nothing
            for ``SILENT_S``: it is counted until its newest event. Until then a machine that
            vanished leaves "running" behind, so
            look at ``last_event_t`` too.
        exit_code: of the last ``job_finished`` if nothing was started since, else None.
        reason: why it finished, in the words of ``job_finished``.
        workers: the job's time in worker-seconds.
        machines: the same in machine-seconds.
        incidents: what went wrong.
        slow_ranks: whom the others had to wait for.
        waited_s: seconds that each worker has waited for them, an estimate; productive time.
        committed_step: the newest step with a commit, or None.
        last_event_t: wall-clock time of the newest event, or None.
        by_attempt: attempt → part → worker-seconds.
        by_machine: machine → part → worker-seconds.
        by_tier: what bringing checkpoints to each tier took.
        kinds: machine → its kind, of those that have said so.
        money: what it cost, or None without a price.
        forecast: predicted and measured, where it trained and saved.
        tiers: newest word on the interval of each tier that decides for itself.
        unfit: machines that the doctor found unfit before the last start, with why.
        storms: the newest storms of failures, and what each has cost.
        keepers_lost: how often a keeper ended while the job ran; another was started each time.
        ranks: what each worker's steps were spent on, where the ledger tells.
        untold: the newest messages that could not be sent; None where all were.
    """

    job: str
    state: State
    exit_code: int | None
    reason: str
    workers: Goodput
    machines: Goodput
    incidents: list[Incident]
    slow_ranks: list[Slow]
    waited_s: float
    committed_step: int | None
    last_event_t: float | None
    unfit: dict[str, str] = {}
    storms: list[Storm] = []
    forecast: Forecast | None = None
    tiers: dict[str, TierInterval] = {}
    keepers_lost: int = 0
    ranks: list[RankTimes] = []
    untold: Untold | None = None
    by_attempt: dict[int, dict[Part, float]] = {}
    by_machine: dict[str, dict[Part, float]] = {}
    by_tier: dict[str, TierTime] = {}
    kinds: dict[str, str] = {}
    money: Money | None = None


def facts(
    events: Iterable[Event],
    *,
    now: float | None = None,
    prices: Prices = NO_PRICES,
    simulates: bool = True,
) -> Facts:
    """Compute what reports say.

    Args:
        events: the ledger, in any order.
        now: wall-clock time up to which a job that has not finished is counted.
        prices: of machines.
        simulates: whether there are a forecast and storms; they take as long as all the rest.
    """
    ordered = in_order(events)
    told = StateFold()
    for event in ordered:
        told.take(event)
    state, end = told.state, told.end
    if state == "running" and now is not None and now - ordered[-1].t > SILENT_S:
        state, now = "silent", ordered[-1].t
    spent, found = split(ordered, now), incidents(ordered)
    machines = spent.machines
    exit_code = None if end is None else end.get("exit_code")
    slow = slow_ranks(ordered)
    rest = [event for event in ordered if event.event != "step"]  # most of a long ledger
    committed = [whole(event) or 0 for event in rest if event.event == "commit"]
    foreseen = forecast(ordered, machines, found) if simulates else None
    kinds = kinds_of(rest)
    return Facts(
        job=ordered[-1].job if ordered else "",
        state=state,
        exit_code=exit_code if isinstance(exit_code, int) else None,
        reason="" if end is None else str(end.get("reason") or ""),
        workers=spent.workers,
        by_attempt=spent.by_attempt,
        by_machine=spent.by_machine,
        by_tier=tier_times(rest),
        machines=machines,
        kinds=kinds,
        money=money(spent, kinds, prices),
        incidents=found,
        forecast=foreseen,
        storms=storms(ordered, found, foreseen),
        tiers=_tiers(rest),
        slow_ranks=slow,
        waited_s=lost_to_waiting_s(slow),
        committed_step=max(committed, default=None),
        last_event_t=ordered[-1].t if ordered else None,
        unfit=_unfit(rest),
        ranks=rank_times(ordered),
        keepers_lost=sum(
            event.event == "watch_gap" and event.get("what") == "keeper" for event in rest
        ),
        untold=functools.reduce(untold_after, ordered, None),
    )


def to_json(
    events: Iterable[Event],
    *,
    now: float | None = None,
    prices: Prices = NO_PRICES,
) -> dict[str, Any]:
    """What ``outlast report --json`` prints: plain data, the unit last in each name.

    Times (``…_t``) are seconds since the epoch; ``cost`` is in the currency of the price and null
    without one. Arguments are those of :func:`facts`.
    """
    job = facts(events, now=now, prices=prices)
    paid = job.money or Money()
    return {
        "job": job.job,
        "state": job.state,
        "exit_code": job.exit_code,
        "reason": job.reason,
        "wall_s": job.workers.wall_s,
        "num_steps_done": job.workers.steps_done,
        "num_steps_replayed": job.workers.steps_replayed,
        "num_attempts": job.workers.attempts,
        "num_commits": job.workers.commits,
        "committed_step": job.committed_step,
        "last_event_t": job.last_event_t,
        "fraction_productive": job.workers.fraction_productive,
        "workers_total_s": job.workers.total,
        "workers_s": {str(part): value for part, value in job.workers.parts().items()},
        "machines_total_s": job.machines.total,
        "machines_s": {str(part): value for part, value in job.machines.parts().items()},
        "price_per_machine_hour": paid.price,
        "cost": paid.cost,
        "cost_useful": paid.useful,
        "cost_lost": paid.lost,
        "cost_saved": paid.saved,
        "cost_by_machine": paid.by_machine,
        "cost_by_part": paid.parts,
        "kinds_of_machines": msgspec.to_builtins(paid.kinds),
        "unpriced_machine_s": paid.unpriced_s,
        "by_attempt_s": {str(attempt): parts for attempt, parts in job.by_attempt.items()},
        "by_machine_s": job.by_machine,
        "by_tier": msgspec.to_builtins(job.by_tier),
        "waited_for_slow_ranks_s": job.waited_s,
        "slow_ranks": msgspec.to_builtins(job.slow_ranks),
        "ranks": [_rank_json(one) for one in job.ranks],
        "unfit": job.unfit,
        "tiers": msgspec.to_builtins(job.tiers),
        "num_keepers_lost": job.keepers_lost,
        "untold": msgspec.to_builtins(job.untold),
        "forecast": None if job.forecast is None else _forecast_json(paid, job.forecast),
        "storms": [
            {**msgspec.to_builtins(storm), "all_lost_s": storm.all_lost_s} for storm in job.storms
        ],
        "incidents": [_incident_json(incident) for incident in job.incidents],
    }


def _forecast_json(paid: Money, found: Forecast) -> dict[str, Any]:
    return {
        "interruptions_predicted": found.interruptions_predicted,
        "num_interruptions": found.interruptions,
        "fraction_productive_predicted": found.productive_predicted,
        "fraction_productive_measured": found.productive,
        "cost_predicted": found.cost_predicted(paid.cost, paid.price),
        "plan": msgspec.to_builtins(found.planned),
        "cost_measured": paid.cost,
        "interval_s": found.interval_s,
        "best_interval_s": found.best_interval_s,
        "regret_fraction": found.regret,
    }


def _rank_json(one: RankTimes) -> dict[str, Any]:
    data: dict[str, Any] = msgspec.to_builtins(one)
    del data["factors"]  # for a picture
    return data


def _incident_json(incident: Incident) -> dict[str, Any]:
    data: dict[str, Any] = msgspec.to_builtins(incident)
    return {
        **data,
        "ranks": list(incident.ranks),
        "nodes": list(incident.nodes),
        "lost_steps": incident.lost_steps,
        "detected_after_s": incident.detected_t - incident.began_t,
        "back_after_s": None if incident.back_t is None else incident.back_t - incident.began_t,
    }


def _tiers(ordered: list[Event]) -> dict[str, TierInterval]:
    found: dict[str, TierInterval] = {}
    for event in ordered:
        if event.event == "cadence" and event.get("tier"):
            with contextlib.suppress(msgspec.ValidationError):
                found[str(event.get("tier"))] = msgspec.convert(event.fields, TierInterval)
    return found


def _unfit(ordered: list[Event]) -> dict[str, str]:
    """Machine → why; one that was found fit since is not among them."""
    found: dict[str, str] = {}
    for event in ordered:
        if event.event != "preflight":
            continue
        machine = str(event.get("machine"))
        found.pop(machine, None)
        if not event.get("fit", True):
            found[machine] = "; ".join(
                f"{one.get('name')}: {one.get('seen')}"
                for one in event.get("findings") or []
                if one.get("status") == "failed"
            )
        unfit = event.get("unfit")
        if isinstance(unfit, dict):
            found |= {str(name): str(why) for name, why in unfit.items()}
    return found


def untold_after(found: Untold | None, event: Event) -> Untold | None:
    """The newest stretch of messages that were not taken, with one more event."""
    if event.event != "not_told":
        return found
    lasting = None if found is None or found.until_t is not None else found
    if event.get("over"):
        return found if lasting is None else msgspec.structs.replace(lasting, until_t=event.t)
    why = str(event.get("why") or "it is not known why")
    if lasting is not None:
        return msgspec.structs.replace(lasting, num=lasting.num + 1, why=why)
    since_t = min(number(event, "since_t") or event.t, event.t)
    return Untold(num=1, since_t=since_t, until_t=None, why=why)


class StateFold:
    """The job's state, from events in the order of their times.

    Attributes:
        state: what they say so far.
        end: the ``job_finished`` that it rests on, or None.
    """

    def __init__(self) -> None:
        self.state: State = "not started"
        self.end: Event | None = None

    def take(self, event: Event) -> None:
        """Take the next one."""
        if event.event == "job_finished":
            self.end = event
            self.state = _STATES.get(_exit_code(event), "failed")
        elif event.event == "drained" and self.end is None:
            self.state = "drained"
        elif event.event == "job_started":
            self.end, self.state = None, "running"
        elif event.event in ("attempt_formed", "resumed", "step") and self.end is None:
            # A sample may be written after the agent said drained, a new attempt only later.
            is_late = self.state == "drained" and event.event == "step"
            self.state = self.state if is_late else "running"


def _exit_code(event: Event) -> int:
    code = event.get("exit_code")
    return code if isinstance(code, int) else -1


HOUR_S: Final = 3600.0
POINTS: Final = 41


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted and measured, side by side.

    Attributes:
        planned: the plan that was kept, or None.
        interruptions_predicted, interruptions: of the time that it ran.
        productive_predicted, productive: share of the time that machines were held.
        interval_s: mean time from checkpoint to checkpoint.
        best_interval_s: the fixed one that would have done best on the same failures.
        regret: share of the time that it would have gained.
    """

    interruptions_predicted: float
    interruptions: int
    productive_predicted: float
    productive: float
    interval_s: float
    best_interval_s: float | None = None
    regret: float | None = None
    planned: Prediction | None = None
    ran_h: float = 0.0

    def cost_predicted(self, cost: float | None, price: float | None = None) -> float | None:
        """What the same steps would have cost as predicted, at the plan's price where it has one.

        Args:
            cost: what they did cost.
            price: per machine and hour, that this was reckoned with.
        """
        if cost is None or not self.productive_predicted:
            return None
        planned = None if self.planned is None else self.planned.price_per_machine_hour
        scale = planned / price if planned is not None and price else 1.0
        return scale * cost * self.productive / self.productive_predicted


def forecast(
    events: Iterable[Event], machines: Goodput, incidents: Iterable[Incident]
) -> Forecast | None:
    """Compare; None where the job has not trained or has not saved."""
    ordered = in_order(events)
    held = machines.held
    blocked_s = _blocked_s(ordered)
    if held <= 0 or not machines.productive or not blocked_s:
        return None
    life = lived(ordered, incidents)
    costs = costs_of(ordered, life)
    share = held / machines.total
    trained = machines.productive + machines.replayed + machines.data
    trained_s = machines.wall_s * share * trained / held
    interval_s = trained_s / len(blocked_s)
    ran_h = life.ran_s / HOUR_S
    planned = newest_plan(ordered)
    if planned is None:
        rate_per_h = Posterior().mean_per_h
        predicted = 1 / exact_wall(costs, rate_per_h, interval_s / HOUR_S)
    else:
        rate_per_h, predicted = planned.failures_per_h, planned.productive_fraction
    found = Forecast(
        interruptions_predicted=rate_per_h * ran_h,
        interruptions=life.num_failures,
        productive_predicted=predicted,
        planned=planned,
        ran_h=ran_h,
        productive=machines.productive / held,
        interval_s=interval_s,
    )
    if not life.failures or trained_s <= 0:
        return found
    start_t = ordered[0].t
    length_s = machines.wall_s - life.away_s(start_t, math.inf)
    moments_s = moments(life, start_t, length_s)
    best_s, regret = _regret(costs, moments_s, length_s, interval_s)
    return msgspec.structs.replace(found, best_interval_s=best_s, regret=regret)


def costs_of(ordered: list[Event], life: Lived) -> Costs:
    """What saves, losses and resumes of this job took; it has saved."""
    lags = [event.get("durable_s") for event in ordered if event.event == "commit"]
    return Costs(
        checkpoint_h=statistics.fmean(_blocked_s(ordered)) / HOUR_S,
        restore_h=_middle(life.downs_s()) / HOUR_S,
        detect_h=_middle(life.detections_s()) / HOUR_S,
        lag_h=_middle([one for one in lags if isinstance(one, int | float)]) / HOUR_S,
    )


def moments(life: Lived, start_t: float, length_s: float) -> list[float]:
    """Seconds from the start to each failure, without the time in which nobody had started it."""
    return [
        min(max(one.detected_t - start_t - life.away_s(start_t, one.detected_t), 0.0), length_s)
        for one in life.failures
    ]


def as_case(costs: Costs, length_s: float) -> JobCase:
    """A job with these costs, for the simulator."""
    from outlast.planner.many import JobCase

    return JobCase(
        cost_s=costs.checkpoint_h * HOUR_S,
        restore_s=costs.restore_h * HOUR_S,
        detect_s=costs.detect_h * HOUR_S,
        lag_s=costs.lag_h * HOUR_S,
        horizon_s=length_s,
    )


def _blocked_s(ordered: list[Event]) -> list[float]:
    blocked = [event.get("blocked_s") for event in ordered if event.event == "snapshot"]
    return [float(one) for one in blocked if isinstance(one, int | float) and one >= 0]


def _regret(
    costs: Costs, moments_s: list[float], length_s: float, interval_s: float
) -> tuple[float, float]:
    """The best fixed interval on these failures, and what it gains over the one that was had."""
    import numpy as np

    from outlast.planner.many import FixedIntervals, Replayed, simulate

    # A thousandth to a thousand times as long, the interval that it had in the middle.
    tried = interval_s * np.exp(np.linspace(-np.log(1000), np.log(1000), POINTS))
    case = as_case(costs, length_s)
    failures = Replayed(moments_s, 2 * length_s, np.zeros(POINTS))
    ledger = simulate(case, failures, FixedIntervals(tried), POINTS)
    useful = ledger.useful / ledger.wall
    index = int(np.argmax(useful))
    return float(tried[index]), float(useful[index] - useful[POINTS // 2])


def _middle(values: list[float]) -> float:
    known = [value for value in values if value >= 0]
    return float(statistics.median(known)) if known else 0.0


TOLD: Final = 5  # the newest ones
LOST: Final = ("replayed", "stalled", "detecting", "restarting")


class WhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """One cadence: its interval, if it is fixed, and what the storm would have cost with it."""

    interval_s: float | None = None
    lost_s: float


class Storm(msgspec.Struct, frozen=True, kw_only=True):
    """One storm.

    Attributes:
        begin_t, end_t: from its first failure to the first new step after its last one.
        num_failures: in it.
        lost_s: part → seconds of the job's time, measured.
        calm: with the interval that the job had in calm, simulated.
        best: with the fixed interval that would have done best in this storm.
        auto: with ``auto``.
    """

    begin_t: float
    end_t: float
    num_failures: int
    lost_s: dict[str, float]
    calm: WhatIf
    best: WhatIf
    auto: WhatIf

    @property
    def all_lost_s(self) -> float:
        """Of all parts."""
        return math.fsum(self.lost_s.values())


def storms(
    events: Iterable[Event], incidents: Iterable[Incident], forecast: Forecast | None
) -> list[Storm]:
    """The newest storms in a job's life, oldest first; none where it has not saved."""
    if forecast is None:
        return []
    ordered = in_order(events)
    life = lived(ordered, incidents)
    found = hazard.storms(_gaps_h(life, ordered[0].t))
    return [_storm(ordered, life, forecast, *one) for one in found[-TOLD:]]


def _gaps_h(life: Lived, start_t: float) -> list[float]:
    gaps_h, since_t = [], start_t
    for one in life.failures:
        gap_s = one.detected_t - since_t - life.away_s(since_t, one.detected_t)
        gaps_h.append(max(gap_s, 0.0) / HOUR_S)
        since_t = one.detected_t if one.back_t is None else one.back_t
    return gaps_h


def _storm(ordered: list[Event], life: Lived, forecast: Forecast, first: int, last: int) -> Storm:
    failures = life.failures[first : last + 1]
    begin_t, ended = failures[0].began_t, failures[-1]
    end_t = ended.detected_t if ended.back_t is None else ended.back_t
    before, after, _ = (one.workers for one in splits_at(ordered, [begin_t, end_t]))
    start_t = ordered[0].t
    length_s = ordered[-1].t - start_t - life.away_s(start_t, math.inf)
    moments_s = moments(life, start_t, length_s)
    over_s = min(moments_s[last] + end_t - ended.detected_t, length_s)
    calm_s = _calm_s(ordered, begin_t) or forecast.interval_s
    calm, best, auto = _simulated(
        costs_of(ordered, life), moments_s, moments_s[first], over_s, calm_s
    )
    return Storm(
        begin_t=begin_t,
        end_t=end_t,
        num_failures=len(failures),
        lost_s={part: max(_seconds(after, part) - _seconds(before, part), 0.0) for part in LOST},
        calm=calm,
        best=best,
        auto=auto,
    )


def _seconds(found: Goodput, part: str) -> float:
    """Of the job: worker-seconds over the workers that it had."""
    parts = {str(name): value for name, value in found.parts().items()}
    return parts[part] * found.wall_s / found.total if found.total else 0.0


def _calm_s(ordered: list[Event], t: float) -> float | None:
    """The interval of calm as of this moment, or as of the storm's beginning behind it."""
    told = [one for one in ordered if one.event == "cadence" and not one.get("tier")]
    chosen = [one.get("interval_s") for one in told if one.t < t and not one.get("burst")]
    left = [one.get("before_s") for one in told if one.t >= t and one.get("burst")]
    known = [float(one) for one in (*chosen[-1:], *left) if isinstance(one, int | float)]
    return next((one for one in known if one > 0), None)


def _simulated(
    costs: Costs,
    moments_s: list[float],
    begin_s: float,
    over_s: float,
    calm_s: float,
) -> tuple[WhatIf, WhatIf, WhatIf]:
    """The interval of calm, the best one, and ``auto``: what each loses from begin to end."""
    import numpy as np

    from outlast.planner.many import Automatic, FixedIntervals, Intervals, Replayed, simulate

    tried = calm_s * np.exp(np.linspace(-math.log(1000), math.log(1000), POINTS))
    # One that saves more than it trains is never the best, and takes long to count.
    tried = np.maximum(tried, costs.checkpoint_h * HOUR_S)

    def lost_s(
        make: type[FixedIntervals] | type[Automatic], *given: object, count: int
    ) -> list[float]:
        until = []
        for horizon_s in (begin_s, over_s):
            if horizon_s <= 0:
                until.append(np.zeros(count))
                continue
            intervals: Intervals = make(*given)  # type: ignore[arg-type]
            failures = Replayed(moments_s, moments_s[-1] + 2 * over_s, np.zeros(count))
            ledger = simulate(as_case(costs, horizon_s), failures, intervals, count)
            until.append(ledger.wall - ledger.useful)
        return [float(one) for one in until[1] - until[0]]

    fixed = lost_s(FixedIntervals, tried, count=POINTS)
    index = int(np.argmin(fixed))
    (auto,) = lost_s(Automatic, costs.checkpoint_h * HOUR_S, 1, count=1)
    return (
        WhatIf(interval_s=float(tried[POINTS // 2]), lost_s=fixed[POINTS // 2]),
        WhatIf(interval_s=float(tried[index]), lost_s=fixed[index]),
        WhatIf(lost_s=auto),
    )
