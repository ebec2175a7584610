"""Answer how a fleet should train: synchronously, locally, with spare or with double work."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable
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
    from outlast.planner.breakeven import AheadSpan
    from outlast.planner.fleet_modes import FleetJob, FleetMode, ModeRow
    from outlast.planner.job import Mode

HOUR_S: Final = 3600.0
DAY_S: Final = 86_400.0
DAYS_MOST: Final = 30.0  # of a recording, from each of several moments on
REPLICAS_MOST: Final = 100_000
REPLAYED_MOST: Final = 512  # replicas that are looked at one by one
LAYERS_MOST: Final = 1000
SYNC_STEPS_MOST: Final = 10_000
TARGET: Final = 0.95
NEEDING: Final[tuple[FleetMode, ...]] = ("synchronous", "local", "streaming")
COMPARED_TO: Final[tuple[FleetMode, ...]] = ("synchronous", "templates")
_NAMES: Final[dict[FleetMode, str]] = {
    "synchronous": "synchronous",
    "local": "local, H = {steps}",
    "streaming": "local, 4-bit stream",
    "backup": "backup, first {first} of {all}",
    "redundant": "redundant",
    "templates": "templates",
}
_SIMULATED: Final[dict[FleetMode, Mode]] = {
    "synchronous": "restart",
    "local": "local",
    "streaming": "local",
    "backup": "local",  # who is lost takes its part of one step away
    "redundant": "elastic",
    "templates": "replicas",
}
SIMULATED_MOST: Final = 1e5  # losses times machines, of which it does so many in seconds
PATIENCE_S: Final = 5.0
LOSS_S, MACHINE_S = 4e-4, 6e-6  # of one loss in all modes, and for each replica besides; roughly
LOSSES_LEAST: Final = 20
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
    replace_h: float | None,
    regroup_h: float,
    backups: int,
    tail: float,
    redundant_work: float,
    worth: float | None,
    price: float | None,
    **costs_h: float | None,
) -> PlanAnswer:
    """Synchronous, local, backup, redundant or regrouped: what each makes of a link and a fleet.

    --link is what a replica has to others, in each direction. A replica is whatever holds the
    model once: a machine, or several of them.
    """
    from outlast.planner.fleet_modes import PUBLISHED_WORTH, FleetJob, compared
    from outlast.planner.links import LinkJob, ring_crossing

    if trace is not None and rate is not None:
        raise ConfigError("--rate and --trace say the same thing twice: leave one out")
    recording = None if trace is None else read(trace)
    count = _replicas(replicas, recording)
    if backups >= count:
        raise ConfigError(
            f"--backups {backups:,}: of {count:,} replicas at least one must count; give fewer"
        )
    if recording is not None and recording.kind == "fleet" and replace_h is not None:
        raise ConfigError(
            f"--replace says when successors come, and so does {recording.name}: leave it out"
        )
    if worth == 0:
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
        worth=PUBLISHED_WORTH if worth is None else worth,
        price_per_h=price,
    )
    if recording is None:
        rows, how = compared(job, known.per_h), "closed forms; independent, exponential failures"
    else:
        rows, how = _replayed(job, known, recording)
    asked = _ModesAsked(
        job=job, known=known, trace=trace, recording=recording, is_worth=bool(worth)
    )
    return _answer(asked, rows, how)


class _ModesAsked(msgspec.Struct, frozen=True, kw_only=True):
    """A job, its rate, what is replayed, and whether somebody says what a local step is worth."""

    job: FleetJob
    known: FailureRate
    trace: Path | None
    recording: Recording | None
    is_worth: bool


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


def _replayed(job: FleetJob, known: FailureRate, recording: Recording) -> tuple[list[ModeRow], str]:
    from outlast.planner.fleet_modes import replayed
    from outlast.planner.job import JobSetup
    from outlast.planner.study import Scenario

    horizon_s = DAYS_MOST * DAY_S
    if recording.kind != "lifetimes":
        horizon_s = min(recording.length_s, horizon_s)
    losses_per_s = known.per_h / HOUR_S
    times = 2 if horizon_s > DAY_S else 8
    loss_s = LOSS_S + MACHINE_S * job.replicas
    most_s = max(PATIENCE_S / loss_s / times, LOSSES_LEAST) / losses_per_s
    is_shorter = horizon_s > most_s
    horizon_s = min(horizon_s, most_s)
    scenario = Scenario(
        setup=JobSetup(machines=job.replicas, horizon_s=horizon_s),
        law="trace",
        trace=recording,
        replace_s=job.away_h * HOUR_S,
    )
    how = (
        f"{times} replays of {recording.name}, {span(horizon_s / HOUR_S)} each"
        + (" (shortened, so that it takes seconds)" if is_shorter else "")
        + ", from different moments on, by the planner's simulator"
    )
    return replayed(job, scenario, times), how


def _answer(asked: _ModesAsked, rows: list[ModeRow], how: str) -> PlanAnswer:
    from outlast.planner.fleet_modes import (
        LINK_OF,
        NO_PROGRESS,
        even_worth,
        pays_at_links,
        pays_at_rates,
        row,
    )
    from outlast.planner.links import bandwidth_for

    job, known = asked.job, asked.known
    best = max(rows, key=lambda one: one.goodput)
    local: FleetMode = "local"
    pays = {
        other: _Pays(
            is_here=_row(rows, local).goodput > _row(rows, other).goodput,
            links=pays_at_links(job, local, other, known.per_h),
            rates=pays_at_rates(job, local, other, known.per_h),
            even_worth=even_worth(rows, job.worth, local, other),
        )
        for other in COMPARED_TO
    }
    needs = {str(mode): bandwidth_for(job.linked(mode), LINK_OF[mode], TARGET) for mode in NEEDING}
    between = ""
    if asked.trace is None:
        low, high = (
            row(job, best.mode, per_h).goodput for per_h in (known.high_per_h, known.low_per_h)
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
        "replace_h": job.away_h,
        "regroup_h": job.regroup_h,
        "worth_fraction": job.worth,
        "price_per_replica_h": job.price_per_h,
        "model": how,
        "makes_progress": best.goodput >= NO_PROGRESS,
        "modes": [_as_json(one) | {"chosen": one is best} for one in rows],
        "local_pays": {f"over_{other}": found.as_json() for other, found in pays.items()},
        "needed_bytes_per_s_at_95_percent": {
            mode: None if bits is None else bits / 8 for mode, bits in needs.items()
        },
    }
    if best.goodput < NO_PROGRESS:
        headline = (
            f"No mode makes progress: even {_name(job, best.mode)} does under "
            f"{percent(NO_PROGRESS)} of what {job.replicas:,} undisturbed replicas on a link "
            "without limits would do. It takes a faster link, shorter steps or fewer failures."
        )
    else:
        headline = (
            f"Take {_name(job, best.mode)}: {percent(best.goodput)} of what "
            f"{job.replicas:,} undisturbed replicas on a link without limits would do"
            f"{_priced(best)}.\n{_pays(asked, 'synchronous', pays['synchronous'])}"
            f"{_doubt(asked)}"
        )
    return PlanAnswer(
        data=data,
        headline=headline,
        details=lines(
            table(
                ("", "a step", "computing", "kept", "goodput", "per 1,000 steps", "link, a step"),
                [_cells(job, one) for one in rows],
                [one is best for one in rows],
            ),
            "computing: of a step, the rest waits for the link. kept: after failures. per 1,000 "
            "steps: cost of useful ones. link: bytes of one replica, each way.",
            _pays(asked, "templates", pays["templates"]) if best.goodput >= NO_PROGRESS else "",
            _needs(needs),
            known.words,
            _successors(asked),
            between,
            f"Model: {how}. {_WORTH}",
        ),
        next=_next(asked, best),
    )


class _Pays(msgspec.Struct, frozen=True, kw_only=True):
    """When local updates do more than another mode: here, and at which bits per second and rates.

    Attributes:
        is_here: by what the table says.
        links: bits per second, at this rate of failures, by the closed forms.
        rates: failures per hour, on this link, by the closed forms.
        even_worth: of a local step, with which both do the same here.
    """

    is_here: bool
    links: list[AheadSpan]
    rates: list[AheadSpan]
    even_worth: float

    def as_json(self) -> dict[str, Any]:
        """With units in the names; null at an end where there is no bound."""

        def pairs(found: list[AheadSpan], scale: float) -> list[list[float | None]]:
            return [
                [one.low / scale or None, None if math.isinf(one.high) else one.high / scale]
                for one in found
            ]

        return {
            "here": self.is_here,
            "at_bytes_per_s": pairs(self.links, 8),
            "at_failures_per_h": pairs(self.rates, 1),
            "even_worth_fraction": self.even_worth,
        }


def _row(rows: list[ModeRow], mode: str) -> ModeRow:
    return next(one for one in rows if one.mode == mode)


def _name(job: FleetJob, mode: FleetMode) -> str:
    first = f"{job.counted('backup'):,}"
    return _NAMES[mode].format(steps=f"{job.link.sync_steps:,}", first=first, all=job.replicas)


def _short(mode: str) -> str:
    return {"streaming": "with the 4-bit stream", "local": "local"}.get(mode, mode)


def _cost(one: ModeRow) -> str:
    assert one.cost_per_step is not None  # noqa: S101 - asked where there is a price
    return "endless" if math.isinf(one.cost_per_step) else figure(_STEPS_PRICED * one.cost_per_step)


def _priced(one: ModeRow) -> str:
    return "" if one.cost_per_step is None else f", {_cost(one)} per 1,000 useful steps"


def _pays(asked: _ModesAsked, other: FleetMode, found: _Pays) -> str:
    """When local updates pay, in one sentence."""
    links = _where(found.links, "bandwidth", _link)
    rates = _where(found.rates, "rate of failures", figure)
    if len(found.rates) == 1 and found.rates[0].low and math.isinf(found.rates[0].high):
        rates += f" failures per hour (one in {span(1 / found.rates[0].low)})"
    elif found.rates and (found.rates[0].low or math.isfinite(found.rates[0].high)):
        rates += " failures per hour"
    by = "" if asked.recording is None else "by the closed forms, "
    even = f"they are even where a local step is worth {figure(found.even_worth)}"
    if found.even_worth > 1:
        even = "they would not even where a local step is worth a synchronous one"
    return (
        f"Local updates {'pay' if found.is_here else 'do not pay'} over {other} here: {by}at this "
        f"rate of failures they pay {links}, and on this link of {_link(asked.job.bits_per_s)} "
        f"{rates}; {even}."
    )


def _where(found: list[AheadSpan], what: str, words: Callable[[float], str]) -> str:
    """Spans in words."""
    parts = []
    for one in found:
        if not one.low and math.isinf(one.high):
            return f"at any {what}"
        if not one.low:
            parts.append(f"below {words(one.high)}")
        elif math.isinf(one.high):
            parts.append(f"above {words(one.low)}")
        else:
            parts.append(f"between {words(one.low)} and {words(one.high)}")
    return " and ".join(parts) or f"at no {what}"


def _doubt(asked: _ModesAsked) -> str:
    """What the published worth of a local step was not measured for."""
    from outlast.planner.fleet_modes import PUBLISHED_STEPS

    steps = asked.job.link.sync_steps
    if asked.is_worth or steps == PUBLISHED_STEPS:
        return ""
    return (
        f"\nA local step is taken to be worth {figure(asked.job.worth)} of a synchronous one, as "
        f"published for H = {PUBLISHED_STEPS} and 1B parameters; nobody says what it is at "
        f"H = {steps:,}: measure it, and give --worth."
    )


def _successors(asked: _ModesAsked) -> str:
    if asked.recording is not None and asked.recording.kind == "fleet":
        return ""
    if not asked.job.away_h:
        return "Successors are taken to come at once, and to cost nothing."
    return f"Successors train {span(asked.job.away_h)} after a loss."


def _link(bits_per_s: float) -> str:
    unit, scale = next(
        (unit, scale)
        for unit, scale in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3), ("bit/s", 0.0))
        if bits_per_s >= scale / 10
    )
    return f"{figure(bits_per_s / (scale or 1.0))} {unit}"


def _needs(found: dict[str, float | None]) -> str:
    """The bandwidths from which on a step is computing for the most part."""
    from outlast.planner.links import BITS_LEAST

    enough = [
        f"{'under ' * (bits <= BITS_LEAST)}{_link(bits)} {_short(mode)}"
        for mode, bits in found.items()
        if bits is not None
    ]
    never = [_short(mode) for mode, bits in found.items() if bits is None]
    said = f"For {percent(TARGET)} computing a link needs {', '.join(enough)}." if enough else ""
    if never:
        said += f" No link is enough for {percent(TARGET)} {', nor '.join(never)}: its latency."
    return said.strip()


def _cells(job: FleetJob, one: ModeRow) -> tuple[str, ...]:
    cost = "–" if one.cost_per_step is None else _cost(one)
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


def _next(asked: _ModesAsked, best: ModeRow) -> str:
    """The simulator's answer for the mode that was chosen."""
    job, recording = asked.job, asked.recording
    machines, spares = job.counted(best.mode), job.replicas - job.counted(best.mode)
    rate = ["--rate", f"{asked.known.per_h:.4g}/h"]
    given = rate if recording is None else [str(asked.trace)]
    if recording is None or recording.kind != "fleet":
        given += ["--machines", str(machines), *(["--spares", str(spares)] if spares else [])]
        # Where all stand still until then, it is there before they begin.
        sooner = 0.999 if best.mode == "synchronous" and not job.joining_h(best.mode) else 1.0
        given += ["--replace", _seconds(sooner * job.away_h * HOUR_S)]
    mode = _SIMULATED[best.mode]
    given += ["--mode", mode, "--step", _seconds(best.step_s)]
    if mode == "local":
        given += ["--sync-steps", str(1 if best.mode == "backup" else job.link.sync_steps)]
    for name, hours in (
        ("--checkpoint", job.costs.checkpoint_h),
        ("--restore", job.costs.restore_h),
        ("--detect", job.costs.detect_h),
    ):
        given += [name, _seconds(hours * HOUR_S)]
    losses = asked.known.per_h * 24 * DAYS_MOST
    if losses * job.replicas > SIMULATED_MOST:
        few_days = max(DAYS_MOST * SIMULATED_MOST / (losses * job.replicas), 1e-3)
        given += ["--days", f"{few_days:.2g}", "--replications", "2"]
    return shlex.join(["outlast", "simulate", *given])


def _seconds(value: float) -> str:
    return f"{float(f'{value:.4g}'):.12g}s"


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
        flag(
            "--replace",
            DURATION,
            "Until a lost replica's successor trains; without it --detect and --restore together.",
        ),
        flag("--regroup", DURATION, "Pause of redundant and templates.", "10s"),
        flag("--backups", COUNT0, "Replicas that nobody waits for.", 1),
        flag("--tail", SHARE, "What a step takes at random, of what it takes.", 0.0),
        flag(
            "--redundant-work",
            SHARE,
            "More work of the redundant mode: 65 % in CheckFree's table 2.",
            0.65,
        ),
        flag(
            "--worth",
            SHARE,
            "Of a local step, in synchronous ones; without it 0.97, published for H = 100.",
        ),
        flag("--price", PRICE, "Per replica and hour."),
    ],
    listed="synchronous, local, backup, redundant or regrouped: what pays on this link?",
)
