"""What every report says, computed once from the ledger: state, goodput, money, incidents.

What it cost is :mod:`outlast.report.money`'s, what somebody should look at
:mod:`outlast.report.findings`'s, what was predicted :mod:`outlast.report.forecast`'s. The whole
ledger is folded once for each of these here, and they get what they need.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import statistics
from collections.abc import Iterable
from typing import Any, Final, Literal

import msgspec

from outlast.errors import Exit
from outlast.ledger.events import Event
from outlast.ledger.goodput import Goodput, Part, in_order, number, splits_at, whole
from outlast.ledger.incidents import (
    Incident,
    IncidentCost,
    incidents,
    lived,
    slow_ranks,
)
from outlast.ledger.measured import TierTime, tier_times
from outlast.prices import NO_PRICES, Prices
from outlast.report.findings import (
    SILENCE,
    SILENT_S,
    JobWarning,
    LateWork,
    MachineVerdict,
    SlowRank,
    late_work,
    machine_verdict,
    silences,
    slow_list,
    warnings,
)
from outlast.report.forecast import Forecast, Storm, forecast, storms, storms_in
from outlast.report.money import Money, kinds_of, money
from outlast.report.series import RankTimes, failures_by_machine, rank_times

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
GOING_ON: Final = ("running", "silent")  # nobody has said that it is over
_STATES: Final[dict[int, State]] = {
    Exit.FINISHED: "finished",
    Exit.DRAINED: "drained",
    Exit.GAVE_UP: "gave up",
    Exit.STORAGE: "storage unusable",
    Exit.REFUSED: "refuses to resume",
}


class TierInterval(msgspec.Struct, frozen=True, kw_only=True):
    """How often a tier takes a checkpoint, in seconds: as it was decided, and as it was.

    Attributes:
        interval_s: newest decision for the time in which it is calm; None where none is told.
        reason: for it.
        was_s, longest_s: from one checkpoint there to the next of the same attempt, the median and
            the longest; None before there are two.
    """

    interval_s: float | None = None
    reason: str = ""
    was_s: float | None = None
    longest_s: float | None = None


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
        incidents: what went wrong, and silences, in the order of their times.
        slow_ranks: whom the others had to wait for.
        waited_s: seconds that each worker has waited for them, an estimate; productive time.
        verdict: whether a machine is bad; None for a job of one machine.
        failures: machine → what went wrong there → how often.
        warnings: what has to be done.
        committed_step: the newest step with a commit, or None.
        last_event_t: wall-clock time of the newest event, or None.
        until_t: up to which a job that is not over is counted; None of others.
        by_attempt: attempt → part → worker-seconds.
        by_machine: machine → part → worker-seconds.
        by_tier: what bringing checkpoints to each tier took.
        kinds: machine → its kind, of those that have said so.
        money: what it cost, or None without a price.
        forecast: predicted and measured, where it trained and saved.
        every: the setting ``checkpoint.every``, "" where it is not known.
        tiers: how often each tier takes a checkpoint.
        unfit: machines that the doctor found unfit before the last start, with why.
        storms: the newest storms of failures, and what each has cost.
        keepers_lost: how often a keeper ended while the job ran; another was started each time.
        ranks: what each worker's steps were spent on, where the ledger tells.
        untold: the newest messages that could not be sent; None where all were.
        late: what was done about late workers; None where nothing was.
    """

    job: str
    state: State
    exit_code: int | None
    reason: str
    workers: Goodput
    machines: Goodput
    incidents: list[Incident]
    slow_ranks: list[SlowRank]
    waited_s: float
    committed_step: int | None
    last_event_t: float | None
    until_t: float | None = None
    verdict: MachineVerdict | None = None
    failures: dict[str, dict[str, int]] = {}
    warnings: list[JobWarning] = []
    every: str = ""
    unfit: dict[str, str] = {}
    storms: list[Storm] = []
    forecast: Forecast | None = None
    tiers: dict[str, TierInterval] = {}
    keepers_lost: int = 0
    ranks: list[RankTimes] = []
    untold: Untold | None = None
    late: LateWork | None = None
    by_attempt: dict[int, dict[Part, float]] = {}
    by_machine: dict[str, dict[Part, float]] = {}
    by_tier: dict[str, TierTime] = {}
    kinds: dict[str, str] = {}
    money: Money | None = None

    @property
    def held_s(self) -> float:
        """Seconds of the job in which machines were held: of its workers in the mean."""
        return self.workers.of_the_job(self.workers.held)

    def cost_of(self, held_s: float | None) -> float | None:
        """What so many seconds of the job cost, at its mean price; None without one."""
        cost = None if self.money is None else self.money.cost
        return (
            None
            if cost is None or held_s is None or not self.held_s
            else cost * (held_s / self.held_s)
        )

    def cost_of_incident(self, one: Incident) -> IncidentCost | None:
        """What one of its incidents has cost each worker, so far where it is not over.

        A step that is made again counts as long as such steps took in this job.
        """
        return None if one.kind == SILENCE else one.cost(self.workers.again_s, self.until_t)


def facts(
    events: Iterable[Event],
    *,
    now: float | None = None,
    prices: Prices = NO_PRICES,
    every: str = "",
    simulates: bool = True,
) -> Facts:
    """Compute what reports say.

    Args:
        events: the ledger, in any order.
        now: wall-clock time up to which a job that has not finished is counted.
        prices: of machines.
        every: the setting ``checkpoint.every``.
        simulates: whether there are a forecast and storms.
    """
    ordered = in_order(events)
    told, gaps = StateFold(), []
    last_t, trains = math.inf, False
    for event in ordered:
        if event.t - last_t > SILENT_S and trains and told.state == "running":
            gaps.append((last_t, event.t))
        if event.event != "step" or told.state != "running":  # a sample says that it runs
            told.take(event)
        last_t, trains = event.t, trains or event.event == "resumed"
    state, end = told.state, told.end
    silent_s = None
    if state == "running" and now is not None and now - last_t > SILENT_S:
        silent_s = now - last_t
        state, now = "silent", last_t
    # Most of a long ledger are samples; when it begins and ends, these may be the first and last.
    inner = [event for event in ordered[1:-1] if event.event != "step"]
    rest = [*ordered[:1], *inner, *ordered[1:][-1:]]
    found = incidents(ordered)
    life = lived(ordered, found) if simulates else None
    stormy = [] if life is None else storms_in(rest, life)
    edges = [t for begin_t, end_t, _, _ in stormy for t in (begin_t, end_t)]
    *splits, spent = splits_at(ordered, edges, now)
    machines = spent.machines
    exit_code = None if end is None else end.get("exit_code")
    committed = [whole(event) or 0 for event in rest if event.event == "commit"]
    foreseen = None if life is None else forecast(rest, machines, life)
    kinds = kinds_of(rest)
    ranks = rank_times(rest)
    held_s = spent.workers.of_the_job(spent.workers.held)
    named = slow_ranks(ordered) if any(one.event == "straggler" for one in rest) else []
    slow, waited_s = slow_list(named, ranks, held_s)
    tiers = tier_times(rest)
    names = {name for name in spent.by_machine if name}
    newest_step = max(committed, default=None)
    return Facts(
        job=ordered[-1].job if ordered else "",
        state=state,
        exit_code=exit_code if isinstance(exit_code, int) else None,
        reason="" if end is None else str(end.get("reason") or ""),
        workers=spent.workers,
        by_attempt=spent.by_attempt,
        by_machine=spent.by_machine,
        by_tier=tiers,
        machines=machines,
        kinds=kinds,
        money=money(spent, kinds, prices),
        incidents=sorted([*found, *silences(gaps, found)], key=lambda one: one.began_t),
        forecast=foreseen,
        storms=storms(rest, life, foreseen, stormy, splits),
        every=every,
        tiers=_tiers(rest),
        slow_ranks=slow,
        waited_s=waited_s,
        verdict=machine_verdict(len(names), found, slow, held_s),
        failures=failures_by_machine(rest),
        warnings=warnings(
            is_over=state not in ("not started", "running"),
            silent_s=silent_s,
            has_session=trains,
            newest_step=newest_step,
            tiers=tiers,
        ),
        until_t=now if state in GOING_ON else None,
        committed_step=newest_step,
        last_event_t=ordered[-1].t if ordered else None,
        unfit=_unfit(rest),
        ranks=ranks,
        keepers_lost=sum(
            event.event == "watch_gap" and event.get("what") == "keeper" for event in rest
        ),
        untold=functools.reduce(untold_after, rest, None),
        late=late_work(rest),
    )


def to_json(
    events: Iterable[Event],
    *,
    now: float | None = None,
    prices: Prices = NO_PRICES,
    every: str = "",
) -> dict[str, Any]:
    """What ``outlast report --json`` prints: plain data, the unit last in each name.

    Times (``…_t``) are seconds since the epoch; ``cost`` is in the currency of the price and null
    without one. Arguments are those of :func:`facts`.
    """
    job = facts(events, now=now, prices=prices, every=every)
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
        "currency": paid.currency,
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
        "slow_ranks": [
            {**msgspec.to_builtins(one), "cost": job.cost_of(one.lost_s)} for one in job.slow_ranks
        ],
        "machine_verdict": msgspec.to_builtins(job.verdict),
        "failures_by_machine": job.failures,
        "warnings": msgspec.to_builtins(job.warnings),
        "ranks": [_rank_json(one) for one in job.ranks],
        "unfit": job.unfit,
        "checkpoint_every": job.every,
        "tiers": msgspec.to_builtins(job.tiers),
        "num_keepers_lost": job.keepers_lost,
        "untold": msgspec.to_builtins(job.untold),
        "late": msgspec.to_builtins(job.late),
        "forecast": None if job.forecast is None else _forecast_json(paid, job.forecast),
        "storms": [
            {**msgspec.to_builtins(storm), "all_lost_s": storm.all_lost_s} for storm in job.storms
        ],
        "incidents": [_incident_json(job, incident) for incident in job.incidents],
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
    del data["factors"], data["lost"]  # for a picture
    data["longer_s"] = data.pop("lost_s")
    return data


def _incident_json(job: Facts, incident: Incident) -> dict[str, Any]:
    data: dict[str, Any] = msgspec.to_builtins(incident)
    cost = job.cost_of_incident(incident)
    return {
        **data,
        "ranks": list(incident.ranks),
        "nodes": list(incident.nodes),
        "lost_steps": incident.lost_steps,
        "detected_after_s": incident.detected_t - incident.began_t,
        "back_after_s": None if incident.back_t is None else incident.back_t - incident.began_t,
        "cost_s": None if cost is None else cost.total_s,
        "cost_parts_s": None if cost is None else cost._asdict(),
        "cost": None if cost is None else job.cost_of(cost.held_s),
    }


def _tiers(ordered: list[Event]) -> dict[str, TierInterval]:
    chosen: dict[str, TierInterval] = {}
    came: dict[str, list[tuple[int, float]]] = {}  # attempt, and when
    for event in ordered:
        if event.event == "cadence":
            with contextlib.suppress(msgspec.ValidationError):
                found = msgspec.convert(event.fields, _DecidedInterval)
                if not found.burst:
                    one = TierInterval(interval_s=found.interval_s, reason=found.reason)
                    chosen[found.tier or ""] = one
        elif event.event in ("commit", "tier_copied") and event.get("kind", "full") == "full":
            came.setdefault(str(event.get("tier") or ""), []).append((event.attempt, event.t))
    # The job's own interval is that of the first tier.
    if "" in chosen and came:
        chosen.setdefault(next(iter(came)), chosen[""])
    chosen.pop("", None)
    for tier, told in came.items():
        pairs = itertools.pairwise(told)
        gaps_s = [after[1] - one[1] for one, after in pairs if after[0] == one[0]]
        if gaps_s and tier:
            chosen[tier] = msgspec.structs.replace(
                chosen.get(tier, TierInterval()),
                was_s=statistics.median(gaps_s),
                longest_s=max(gaps_s),
            )
    return chosen


class _DecidedInterval(msgspec.Struct):
    interval_s: float
    reason: str
    tier: str | None = None
    burst: bool | None = False


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
