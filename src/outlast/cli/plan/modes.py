"""Answer how a fleet should train: synchronously, locally, with spare or with double work."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from outlast import units
from outlast.cli.plan.answer import (
    COST_FLAGS,
    RATE_FLAGS,
    FailureRate,
    PlanAnswer,
    PlanQuestion,
    costs_of,
    failure_rate,
    figure,
    lines,
    own,
    percent,
    span,
    table,
)
from outlast.cli.quantities import (
    BANDWIDTH,
    COUNT0,
    DURATION,
    GPUS,
    PARAMETERS,
    PRICE,
    SHARE,
    SPAN,
    Rate,
    flag,
)
from outlast.errors import ConfigError
from outlast.planner.traces import Recording, read

if TYPE_CHECKING:
    from outlast.planner.fleet_modes import FleetJob, FleetMode, ModeRow

HOUR_S: Final = 3600.0
DAY_S: Final = 86_400.0
DAYS_MOST: Final = 30.0  # of a recording, from each of several moments on
REPLICAS_MOST: Final = 100_000
REPLAYED_MOST: Final = 512  # replicas that are looked at one by one
LAYERS_MOST: Final = 1000
SYNC_STEPS_MOST: Final = 10_000
TARGET: Final = 0.95
COMPARED_TO: Final[tuple[FleetMode, ...]] = ("synchronous", "templates")
_NAMES: Final[dict[FleetMode, str]] = {
    "synchronous": "synchronous",
    "local": "local, H = {steps}",
    "streaming": "local, 4-bit stream",
    "backup": "backup, first {first} of {all}",
    "redundant": "redundant",
    "templates": "templates",
}
_STEPS_PRICED: Final = 1000
_WORTH: Final = (
    "What a local step is worth is taken as given by --worth: the loss at equal tokens is not "
    "computed here (docs/plan-modes.md has published figures)."
)


def modes(
    *,
    params: float,
    step_h: float,
    layers: int,
    replicas: int | None,
    link: float,
    latency_h: float,
    sync_steps: int,
    rate: Rate | None,
    gpus: int | None,
    gpus_per_node: int,
    trace: Path | None,
    replace_h: float,
    regroup_h: float,
    backups: int,
    tail: float,
    redundant_work: float,
    worth: float,
    price: float | None,
    **costs_h: float | None,
) -> PlanAnswer:
    """Synchronous, local, backup, redundant or regrouped: what each makes of a link and a fleet.

    --link is what a replica has to others, in each direction. A replica is whatever holds the
    model once: a machine, or several of them.
    """
    from outlast.planner.fleet_modes import FleetJob, compared
    from outlast.planner.links import LinkJob, ring_crossing

    if trace is not None and rate is not None:
        raise ConfigError("--rate and --trace say the same thing twice: leave one out")
    recording = None if trace is None else read(trace)
    count = _replicas(replicas, recording)
    if backups >= count:
        raise ConfigError(
            f"--backups {backups:,}: of {count:,} replicas at least one must count; give fewer"
        )
    if not worth:
        raise ConfigError("--worth 0: a local step that is worth nothing needs no plan")
    _within("--layers", layers, LAYERS_MOST)
    _within("--sync-steps", sync_steps, SYNC_STEPS_MOST)
    measured = own() if rate is None or costs_h["checkpoint_h"] is None else None
    known = _known(recording, rate, gpus, gpus_per_node, count, measured=measured)
    job = FleetJob(
        link=LinkJob(
            parameters=params,
            layers=layers,
            step_s=step_h * HOUR_S,
            sync_steps=sync_steps,
            crossing=ring_crossing(count),
            latency_s=latency_h * HOUR_S,
        ),
        replicas=count,
        bits_per_s=8 * link,
        costs=costs_of(measured, lag_h=None, **costs_h),
        replace_h=replace_h,
        regroup_h=regroup_h,
        backups=backups,
        tail=tail,
        redundant_work=redundant_work,
        worth=worth,
        price_per_h=price,
    )
    if recording is None:
        rows, how = compared(job, known.per_h), "closed forms; independent, exponential failures"
    else:
        rows, how = _replayed(job, recording)
    return _answer(job, known, (rows, how), trace)


def _replicas(given: int | None, recording: Recording | None) -> int:
    """How many there are.

    Raises:
        ConfigError: nobody says, or two say different things, or it is no fleet.
    """
    count = given
    if recording is not None and recording.kind == "fleet":
        count = recording.machines
        if given not in (None, count):
            raise ConfigError(
                f"--replicas {given:,}: {recording.name} has up to {count:,} machines, each of "
                "which is a replica; leave --replicas out"
            )
    if count is None:
        raise ConfigError("the number of replicas is missing; like --replicas 8")
    if count < 2:
        raise ConfigError("one replica exchanges nothing; give --replicas 2 or more")
    most = REPLICAS_MOST if recording is None else REPLAYED_MOST
    if count > most:
        raise ConfigError(f"{count:,} replicas: {most:,} is the most here; count larger replicas")
    return count


def _within(name: str, value: int, most: int) -> None:
    if value > most:
        raise ConfigError(f"{name} {value:,}: {most:,} is the most")


def _known(
    recording: Recording | None,
    rate: Rate | None,
    gpus: int | None,
    gpus_per_node: int,
    replicas: int,
    *,
    measured: Any,
) -> FailureRate:
    if recording is None:
        return failure_rate(rate, gpus, gpus_per_node, measured=measured)
    if recording.kind == "lifetimes":
        mean_s = math.fsum(recording.lifetimes_s) / len(recording.lifetimes_s)
        per_h = replicas * HOUR_S / mean_s
    else:
        per_h = len(recording.losses) * HOUR_S / recording.length_s
    if not per_h:
        raise ConfigError(f"{recording.name} holds no loss: nothing to compare; give --rate")
    return FailureRate(
        per_h=per_h,
        low_per_h=per_h / 2,
        high_per_h=per_h * 2,
        range_is="if losses came half or twice as often",
        source=f"the mean of {recording.name}, whose moments are replayed",
    )


def _replayed(job: FleetJob, recording: Recording) -> tuple[list[ModeRow], str]:
    from outlast.planner.fleet_modes import replayed
    from outlast.planner.job import JobSetup
    from outlast.planner.study import Scenario

    horizon_s = DAYS_MOST * DAY_S
    if recording.kind != "lifetimes":
        horizon_s = min(recording.length_s, horizon_s)
    scenario = Scenario(
        setup=JobSetup(machines=job.replicas, horizon_s=horizon_s),
        law="trace",
        trace=recording,
        replace_s=job.replace_h * HOUR_S,
    )
    times = 2 if horizon_s > DAY_S else 8
    how = (
        f"{times} replays of {recording.name}, {span(horizon_s / HOUR_S)} each, from different "
        "moments on, by the planner's simulator; when local updates pay, by the closed forms at "
        "its mean rate"
    )
    return replayed(job, scenario, times), how


def _answer(
    job: FleetJob, known: FailureRate, found: tuple[list[ModeRow], str], trace: Path | None
) -> PlanAnswer:
    from outlast.planner.fleet_modes import LINK_OF, compared, pays_above, pays_below
    from outlast.planner.links import bandwidth_for

    rows, how = found
    best = max(rows, key=lambda one: one.goodput)
    local: FleetMode = "local"
    pays = {
        other: (pays_below(job, local, other, known.per_h), pays_above(job, local, other))
        for other in COMPARED_TO
    }
    needs = {
        mode: bandwidth_for(job.linked(mode), LINK_OF[mode], TARGET)
        for mode in ("synchronous", "local", "streaming")
    }
    between = ""
    if trace is None:
        low, high = (
            next(one for one in compared(job, per_h) if one.mode == best.mode).goodput
            for per_h in (known.high_per_h, known.low_per_h)
        )
        between = (
            f"Range: {percent(low)} to {percent(high)} for {_name(job, best.mode)} "
            f"{known.range_is}."
        )
    data: dict[str, Any] = {
        **known.as_json(),
        "num_parameters": job.link.parameters,
        "num_layers": job.link.layers,
        "num_replicas": job.replicas,
        "num_backups": job.backups,
        "sync_steps": job.link.sync_steps,
        "step_s": job.link.step_s,
        "link_bytes_per_s": job.bits_per_s / 8,
        "latency_s": job.link.latency_s,
        **msgspec.to_builtins(job.costs),
        "replace_h": job.replace_h,
        "regroup_h": job.regroup_h,
        "worth_fraction": job.worth,
        "price_per_replica_h": job.price_per_h,
        "model": how,
        "modes": [_as_json(one) | {"chosen": one is best} for one in rows],
        "local_pays": {
            f"over_{other}": {
                "below_bytes_per_s": below / 8,
                "above_failures_per_h": above,
                "here": _row(rows, local).goodput > _row(rows, other).goodput,
            }
            for other, (below, above) in pays.items()
        },
        "needed_bytes_per_s_at_95_percent": {
            mode: None if bits is None else bits / 8 for mode, bits in needs.items()
        },
    }
    return PlanAnswer(
        data=data,
        headline=f"Take {_name(job, best.mode)}: {percent(best.goodput)} of what "
        f"{job.replicas:,} undisturbed replicas on a link without limits would do"
        f"{_priced(best)}.\n{_pays(job, rows, 'synchronous', pays['synchronous'])}",
        details=lines(
            table(
                ("", "a step", "computing", "kept", "goodput", "per 1,000 steps", "link, a step"),
                [_cells(job, one) for one in rows],
                [one is best for one in rows],
            ),
            "computing: of a step, the rest waits for the link. kept: after failures. per 1,000 "
            "steps: cost of useful ones. link: bytes of one replica, each way.",
            _pays(job, rows, "templates", pays["templates"]),
            f"For {percent(TARGET)} computing a link needs "
            + ", ".join(f"{_link(bits)} {_short(mode)}" for mode, bits in needs.items())
            + ".",
            known.words,
            between,
            f"Model: {how}. {_WORTH}",
        ),
        next=_next(job, known, trace),
    )


def _row(rows: list[ModeRow], mode: str) -> ModeRow:
    return next(one for one in rows if one.mode == mode)


def _name(job: FleetJob, mode: FleetMode) -> str:
    first = f"{job.counted('backup'):,}"
    return _NAMES[mode].format(steps=f"{job.link.sync_steps:,}", first=first, all=job.replicas)


def _short(mode: str) -> str:
    return {"streaming": "with the 4-bit stream", "local": "local"}.get(mode, mode)


def _priced(one: ModeRow) -> str:
    if one.cost_per_step is None:
        return ""
    return f", {figure(_STEPS_PRICED * one.cost_per_step)} per 1,000 useful steps"


def _pays(job: FleetJob, rows: list[ModeRow], other: FleetMode, found: tuple[float, float]) -> str:
    """When local updates pay, in one sentence."""
    below_bits, above_per_h = found
    here = _row(rows, "local").goodput > _row(rows, other).goodput
    if below_bits == 0:
        link = "at no bandwidth"
    elif math.isinf(below_bits):
        link = "at any bandwidth"
    else:
        link = f"below {_link(below_bits)}"
    if above_per_h == 0:
        rate = "at any rate of failures"
    elif math.isinf(above_per_h):
        rate = "at no rate of failures"
    else:
        rate = f"above {figure(above_per_h)} failures per hour (one in {span(1 / above_per_h)})"
    return (
        f"Local updates {'pay' if here else 'do not pay'} over {other} here: at this rate of "
        f"failures they pay {link}, and on this link of {_link(job.bits_per_s)} {rate}."
    )


def _link(bits_per_s: float | None) -> str:
    if bits_per_s is None:
        return "over 1,000 Gbit/s"
    unit, scale = ("Gbit/s", 1e9) if bits_per_s >= 1e8 else ("Mbit/s", 1e6)
    return f"{figure(bits_per_s / scale)} {unit}"


def _cells(job: FleetJob, one: ModeRow) -> tuple[str, ...]:
    cost = "–" if one.cost_per_step is None else figure(_STEPS_PRICED * one.cost_per_step)
    return (
        _name(job, one.mode),
        units.seconds(one.step_s),
        percent(one.utilisation),
        percent(one.kept_share),
        percent(one.goodput),
        cost,
        units.size(one.bytes_per_step),
    )


def _as_json(one: ModeRow) -> dict[str, Any]:
    return {
        "mode": one.mode,
        "step_s": one.step_s,
        "computing_fraction": one.utilisation,
        "kept_fraction": one.kept_share,
        "goodput_fraction": one.goodput,
        "useful_steps_per_h": one.steps_per_h,
        "cost_per_useful_step": one.cost_per_step,
        "link_bytes_per_step": one.bytes_per_step,
    }


def _next(job: FleetJob, known: FailureRate, trace: Path | None) -> str:
    what = str(trace) if trace is not None else f"--rate {known.per_h:.4g}/h"
    machines = "" if trace is not None else f" --machines {job.replicas}"
    return (
        f"outlast simulate {what}{machines} --mode local --step {job.link.step_s:.4g}s "
        f"--sync-steps {job.link.sync_steps} --checkpoint {job.costs.checkpoint_h * HOUR_S:.4g}s "
        f"--restore {job.costs.restore_h * HOUR_S:.4g}s"
    )


MODES: Final = PlanQuestion(
    "synchronous or local, and what else?",
    modes,
    [
        flag("--params", PARAMETERS, "Of the model: 7B.", required=True),
        flag("--step", SPAN, "Of a replica that waits for nothing.", required=True),
        flag("--link", BANDWIDTH, "Of a replica to the others: 10Gbit/s.", required=True),
        flag("--replicas", GPUS, "That hold the model once each; a fleet's trace brings its own."),
        flag("--layers", GPUS, "Of the model.", 32),
        flag("--latency", DURATION, "Of the link.", 0.0, show_default=False),
        flag("--sync-steps", GPUS, "H: steps between two exchanges of local updates.", 100),
        *RATE_FLAGS,
        flag(
            "--trace",
            click.Path(path_type=Path),
            "In place of --rate: a recording that is replayed.",
            metavar="FILE",
        ),
        *COST_FLAGS,
        flag("--replace", DURATION, "Until a lost replica's successor trains.", "0s"),
        flag("--regroup", DURATION, "Pause of those that rewind nothing.", "10s"),
        flag("--backups", COUNT0, "Replicas that nobody waits for.", 1),
        flag("--tail", SHARE, "What a step takes at random, of what it takes.", 0.0),
        flag(
            "--redundant-work",
            SHARE,
            "More work of the redundant mode: 65 % in CheckFree's table 2.",
            0.65,
        ),
        flag("--worth", SHARE, "Of a local step, in synchronous ones; published: 0.97.", 0.97),
        flag("--price", PRICE, "Per replica and hour."),
    ],
    listed="synchronous, local, backup, redundant or regrouped: what pays on this link?",
)
