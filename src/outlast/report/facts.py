"""What every report says, computed once from the ledger: state, goodput, incidents, money.

Money is machine-hours at one price: from the first event to the last while machines were held,
which is all but the waiting. What is not spent on new steps is lost: replays, stalls, detecting,
restarting, start-up and the end. Machines that are paid for while nothing runs on them are not in
the ledger and not in the sum.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any, Final, Literal

import msgspec

from outlast.errors import Exit
from outlast.ledger.events import Event
from outlast.ledger.goodput import Goodput, goodput, in_order, whole
from outlast.ledger.incidents import Incident, Slow, incidents, lost_to_waiting_s, slow_ranks
from outlast.report.forecast import Forecast, Storm, forecast, storms

State = Literal[
    "not started",
    "running",
    "finished",
    "drained",
    "gave up",
    "storage unusable",
    "refuses to resume",
    "failed",
]
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


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """A job as its ledger tells it.

    Attributes:
        job: the job's id, empty when the ledger is.
        state: what the newest events say; a machine that vanished leaves "running" behind, so
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
        price: per machine and hour, or None.
        priced_as: "spot" or "on demand".
        forecast: predicted and measured, where it trained and saved.
        tiers: newest word on the interval of each tier that decides for itself.
        unfit: machines that the doctor found unfit before the last start, with why.
        storms: the newest storms of failures, and what each has cost.
        keepers_lost: how often a keeper ended while the job ran; another was started each time.
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
    price: float | None
    priced_as: str
    unfit: dict[str, str] = {}
    storms: list[Storm] = []
    forecast: Forecast | None = None
    tiers: dict[str, TierInterval] = {}
    keepers_lost: int = 0

    @property
    def cost(self) -> float | None:
        """What the machines cost, or None without a price."""
        return self.price_of(self.machines.total - self.machines.waiting)

    @property
    def cost_lost(self) -> float | None:
        """The part of ``cost`` that did not go into new steps, or None without a price."""
        held = self.machines.total - self.machines.waiting
        return self.price_of(held - self.machines.productive)

    def price_of(self, machine_seconds: float) -> float | None:
        """The price of some machine-seconds; never negative, and None without a price."""
        return None if self.price is None else max(0.0, machine_seconds) / 3600 * self.price


def facts(
    events: Iterable[Event],
    *,
    now: float | None = None,
    price_spot: float | None = None,
    price_on_demand: float | None = None,
) -> Facts:
    """Compute what reports say.

    Args:
        events: the ledger, in any order.
        now: wall-clock time up to which a job that has not finished is counted.
        price_spot: per machine and hour; used where it is known, as spot machines are the ones
            that are taken back.
        price_on_demand: per machine and hour.
    """
    ordered = in_order(events)
    machines, found = goodput(ordered, now, count="machines"), incidents(ordered)
    state, end = _state(ordered)
    exit_code = None if end is None else end.get("exit_code")
    slow = slow_ranks(ordered)
    committed = [whole(event) or 0 for event in ordered if event.event == "commit"]
    foreseen = forecast(ordered, machines, found)
    return Facts(
        job=ordered[-1].job if ordered else "",
        state=state,
        exit_code=exit_code if isinstance(exit_code, int) else None,
        reason="" if end is None else str(end.get("reason") or ""),
        workers=goodput(ordered, now),
        machines=machines,
        incidents=found,
        forecast=foreseen,
        storms=storms(ordered, found, foreseen),
        tiers=_tiers(ordered),
        slow_ranks=slow,
        waited_s=lost_to_waiting_s(slow),
        committed_step=max(committed, default=None),
        last_event_t=ordered[-1].t if ordered else None,
        price=price_on_demand if price_spot is None else price_spot,
        priced_as="on demand" if price_spot is None else "spot",
        unfit=_unfit(ordered),
        keepers_lost=sum(
            event.event == "watch_gap" and event.get("what") == "keeper" for event in ordered
        ),
    )


def to_json(
    events: Iterable[Event],
    *,
    now: float | None = None,
    price_spot: float | None = None,
    price_on_demand: float | None = None,
) -> dict[str, Any]:
    """What ``outlast report --json`` prints: plain data, the unit last in each name.

    Times (``…_t``) are seconds since the epoch; ``cost`` is in the currency of the price and null
    without one. Arguments are those of :func:`facts`.
    """
    job = facts(events, now=now, price_spot=price_spot, price_on_demand=price_on_demand)
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
        "price_per_machine_hour": job.price,
        "cost": job.cost,
        "cost_lost": job.cost_lost,
        "waited_for_slow_ranks_s": job.waited_s,
        "slow_ranks": msgspec.to_builtins(job.slow_ranks),
        "unfit": job.unfit,
        "tiers": msgspec.to_builtins(job.tiers),
        "num_keepers_lost": job.keepers_lost,
        "forecast": None if job.forecast is None else _forecast_json(job, job.forecast),
        "storms": [
            {**msgspec.to_builtins(storm), "all_lost_s": storm.all_lost_s} for storm in job.storms
        ],
        "incidents": [_incident_json(incident) for incident in job.incidents],
    }


def _forecast_json(job: Facts, found: Forecast) -> dict[str, Any]:
    return {
        "interruptions_predicted": found.interruptions_predicted,
        "num_interruptions": found.interruptions,
        "fraction_productive_predicted": found.productive_predicted,
        "fraction_productive_measured": found.productive,
        "cost_predicted": found.cost_predicted(job.cost, job.price),
        "plan": msgspec.to_builtins(found.planned),
        "cost_measured": job.cost,
        "interval_s": found.interval_s,
        "best_interval_s": found.best_interval_s,
        "regret_fraction": found.regret,
    }


def _incident_json(incident: Incident) -> dict[str, Any]:
    data: dict[str, Any] = msgspec.to_builtins(incident)
    return {
        **data,
        "ranks": list(incident.ranks),
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


def _state(ordered: list[Event]) -> tuple[State, Event | None]:
    """The state, and the ``job_finished`` that it rests on."""
    state: State = "not started"
    end: Event | None = None
    for event in ordered:
        if event.event == "job_finished":
            end = event
            state = _STATES.get(_exit_code(event), "failed")
        elif event.event == "drained" and end is None:
            state = "drained"
        elif event.event == "job_started":
            end, state = None, "running"
        elif event.event in ("attempt_formed", "resumed", "step") and end is None:
            # A sample may be written after the agent said drained, a new attempt only later.
            state = state if state == "drained" and event.event == "step" else "running"
    return state, end


def _exit_code(event: Event) -> int:
    code = event.get("exit_code")
    return code if isinstance(code, int) else -1
