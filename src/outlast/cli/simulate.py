"""``outlast simulate``: what a job would go through, policies compared on the same failures."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from outlast import units
from outlast.cli.plan.answer import (
    COST_FLAGS,
    RATE_FLAGS,
    OwnJob,
    failure_rate,
    figure,
    number,
    own,
    percent,
    say,
    span,
    table,
)
from outlast.cli.quantities import COUNT0, DAYS, DURATION, GPUS, JSON_FLAG, PRICE, SHARE, Rate, flag
from outlast.errors import ConfigError, nearest
from outlast.planner.job import MODE_WORDS, MODES, JobSetup, Level
from outlast.planner.traces import Recording, read

if TYPE_CHECKING:
    from outlast.planner.study import Result, Scenario

HOUR_S: Final = 3600.0
DEFAULT_DAYS: Final = 30.0
REPLICATIONS_MAX: Final = 1_000_000
MACHINES_MAX: Final = 100_000  # that are looked at one by one
EFFORT_MAX_S: Final = 3600.0
PATIENCE_S: Final = 10.0
NO_PROGRESS: Final = 1e-3  # of the time was useful
_FEWER: Final = 1e-3  # of the time by which fewer machines did less
CHECKPOINT_H: Final = 10 / HOUR_S
SHAPE_MIN, SHAPE_MAX = 0.1, 100.0
LAWS: Final = "constant, weibull:0.8, bathtub, zones:4"
TIER_EXAMPLE: Final = "memory,cost=1s,restore=2s,survives=process"
_TIER_KEYS: Final = ("cost", "lag", "restore", "every", "keep", "survives")
_SURVIVES: Final = ("process", "holders", "all")
_PARTS: Final = {
    "productive": "productive",
    "replayed": "replayed",
    "stalled": "saving",
    "detecting": "detecting",
    "restarting": "restarting",
    "waiting": "waiting",
}


@click.command(
    name="simulate",
    params=[
        click.Argument(["trace"], required=False, type=click.Path(path_type=Path)),
        *RATE_FLAGS,
        *COST_FLAGS,
        flag("--lag", DURATION, "From a snapshot until it is durable."),
        flag(
            "--tier",
            click.STRING,
            f"In place of these: {TIER_EXAMPLE}.",
            to="tiers",
            multiple=True,
            metavar="NAME,…",
        ),
        flag("--days", DAYS, "How long it runs; a trace's own length without it."),
        flag(
            "--policy",
            click.STRING,
            'When to save: auto, "30 min", "200 steps", young, daly, exact, young20, best (the '
            "best fixed interval in hindsight). Several are compared.",
            to="policies",
            multiple=True,
        ),
        flag("--machines", GPUS, "That can be lost; a fleet's trace brings its own."),
        flag("--mode", click.STRING, "rigid, restart, elastic, replicas, peer, local.", "rigid"),
        flag("--law", click.STRING, f"How failures come: {LAWS}.", "constant"),
        flag("--replace", DURATION, "Until a lost machine's successor."),
        flag("--spares", COUNT0, "Machines that stand by.", 0, show_default=False),
        flag("--least", GPUS, "Machines without which nothing goes on.", 1, show_default=False),
        flag("--notice", DURATION, "Each loss is announced so long before."),
        flag("--flush-probability", SHARE, "Of a notice to come in time.", 1.0, show_default=False),
        flag("--step", DURATION, "Of a step."),
        flag("--sync-steps", GPUS, "Of local updates: between two syncs.", 500, show_default=False),
        flag("--price", PRICE, "Per machine and hour."),
        flag("--replications", GPUS, "How many; 1,000 where they are cheap, else 50."),
        flag("--seed", COUNT0, "Replays all of it.", 0),
        JSON_FLAG,
    ],
)
def command(*, trace: Path | None, as_json: bool, policies: tuple[str, ...], **given: Any) -> None:
    """What a job would go through, and how policies compare on the very same failures.

    TRACE is a recording: a spot fleet (time_ms,add|remove,node or SkyPilot's JSON), failures
    (t_hours,node,downtime_min) or lifetimes. Without it failures are drawn.
    """
    from outlast.planner.study import compare, effort_s

    recording = None if trace is None else read(trace)
    measured = own() if recording is None and given["rate"] is None else None
    for name in ("checkpoint_h", "restore_h", "detect_h", "lag_h"):
        if given[name] is None and measured is not None:
            given[name] = getattr(measured, name)
    scenario, source = _scenario(recording, measured=measured, **given)
    count = given["replications"] or (1000 if scenario.is_simple and recording is None else 50)
    asked = list(policies or ("auto", "young"))
    _weigh(scenario, count, effort_s(scenario, asked, min(count, REPLICATIONS_MAX)))
    results = compare(scenario, asked, count)
    if as_json:
        click.echo(msgspec.json.encode(_as_json(scenario, source, results, count)))
        return
    for line in _lines(scenario, source, results, count):
        say(line)
    say(f"Again, to the digit: the same with --seed {scenario.seed}")


def _weigh(scenario: Scenario, count: int, effort_s: float) -> None:
    """Say what takes long, and refuse what nobody would wait for.

    Raises:
        ConfigError: what was asked for is too much.
    """
    remedy = "ask for fewer --replications or --days"
    if count > REPLICATIONS_MAX:
        raise ConfigError(f"{count:,} replications: {REPLICATIONS_MAX:,} is the most")
    if not scenario.is_simple and scenario.setup.machines > MACHINES_MAX:
        raise ConfigError(
            f"{scenario.setup.machines:,} machines one by one: {MACHINES_MAX:,} is the most, "
            "beyond it only --mode rigid that waits for nobody; count larger machines"
        )
    if effort_s > EFFORT_MAX_S:
        raise ConfigError(f"that would take about {span(effort_s / HOUR_S)}: {remedy}")
    if effort_s > PATIENCE_S:
        click.echo(f"This takes about {span(effort_s / HOUR_S)}; {remedy} to wait less", err=True)


def _scenario(
    trace: Recording | None,
    *,
    measured: OwnJob | None,
    rate: Rate | None,
    gpus: int | None,
    gpus_per_node: int,
    days: float | None,
    machines: int | None,
    law: str,
    mode: str,
    seed: int,
    **given: Any,
) -> tuple[Scenario, str]:
    """What is simulated, and where its rate is from."""
    from outlast.planner.draws import bathtub
    from outlast.planner.study import Scenario

    if mode not in MODES:
        raise ConfigError(f"--mode {mode} is not a way to recover;{nearest(mode, MODES)}")
    if trace is not None and (rate is not None or law != "constant"):
        raise ConfigError("a trace brings its own failures: leave out --rate and --law")
    if trace is not None:
        per_h, source = 0.0, f"replayed from {trace.name}"
        if trace.kind == "fleet" or (trace.kind == "failures" and mode != "rigid"):
            # Whoever goes on with those that are left must know how many there are.
            machines = trace.machines if trace.kind == "fleet" else machines or trace.machines
        length_h = trace.length_s / HOUR_S if trace.kind != "lifetimes" else 24 * DEFAULT_DAYS
    machines = machines or max((gpus or gpus_per_node) // gpus_per_node, 1)
    name, value = _law(law)
    if trace is None and name == "bathtub" and rate is None and gpus is None:
        mean_h = bathtub().mean_s / HOUR_S
        per_h, length_h = machines / mean_h, 24 * DEFAULT_DAYS
        source = f"as recorded, one machine lasts {span(mean_h)} at the mean"
    elif trace is None:
        known = failure_rate(rate, gpus, gpus_per_node, measured=measured)
        per_h, source, length_h = known.per_h, known.source, 24 * DEFAULT_DAYS
    if name == "zones" and value > machines:
        raise ConfigError(
            f"--law {law}: {units.count(machines, 'machine')} cannot be in {value:g} zones; "
            "say how many there are with --machines"
        )
    if mode == "peer" and not any("holders" in text for text in given["tiers"]):
        raise ConfigError(
            "--mode peer reads other machines' memory: say what a copy there costs, and what is "
            "read where it is lost: --tier peer,cost=1s,restore=2s,survives=holders "
            "--tier shared,cost=10s,restore=1min,every=10"
        )
    setup = JobSetup(
        machines=machines,
        levels=_levels(**given),
        mode=mode,
        horizon_s=HOUR_S * (length_h if days is None else 24 * days),
        step_s=HOUR_S * (given["step_h"] or (1 / HOUR_S if mode == "local" else 0.0)),
        detect_s=HOUR_S * (given["detect_h"] or 0.0),
        rejoin_s=HOUR_S * (given["restore_h"] or 0.0) if mode in ("elastic", "peer") else 0.0,
        spares=given["spares"],
        least=given["least"],
        notice_s=HOUR_S * (given["notice_h"] or 0.0),
        flush_probability=given["flush_probability"],
        sync_steps=given["sync_steps"],
        price_per_h=given["price"],
    )
    scenario = Scenario(
        setup=setup,
        law="trace" if trace is not None else name,  # type: ignore[arg-type]  # looked at in _law
        failures_per_h=per_h,
        shape=value if name == "weibull" else 1.0,
        zones=int(value) if name == "zones" else 1,
        replace_s=HOUR_S * (given["replace_h"] or 0.0),
        notice_share=1.0 if given["notice_h"] else 0.0,
        trace=trace,
        seed=seed,
    )
    return scenario, source


def _law(text: str) -> tuple[str, float]:
    name, _, number = text.partition(":")
    numbered = name in ("weibull", "zones")
    try:
        value = float(number) if numbered else 1.0
    except ValueError:
        value = math.nan
    is_whole = name != "zones" or value == int(value if math.isfinite(value) else 0)
    if name not in ("constant", "weibull", "bathtub", "zones") or not 0 < value < 1e6:
        raise ConfigError(f"--law {text} is none; known are {LAWS}")
    if not is_whole or (number and not numbered):
        raise ConfigError(f"--law {text}: {number} is no number of zones; known are {LAWS}")
    if name == "weibull" and not SHAPE_MIN <= value <= SHAPE_MAX:
        raise ConfigError(f"--law {text}: a shape is within {SHAPE_MIN:g} and {SHAPE_MAX:g}")
    return name, value


def _levels(*, tiers: tuple[str, ...], **given: Any) -> tuple[Level, ...]:
    if tiers:
        return tuple(_tier(text) for text in tiers)
    checkpoint_h = CHECKPOINT_H if given["checkpoint_h"] is None else given["checkpoint_h"]
    return (
        Level(
            cost_s=HOUR_S * checkpoint_h,
            lag_s=HOUR_S * (given["lag_h"] or 0.0),
            restore_s=HOUR_S * (given["restore_h"] or 0.0),
        ),
    )


def _tier(text: str) -> Level:
    name, *pairs = [part.strip() for part in text.split(",")]
    found: dict[str, Any] = {"every": None}
    for pair in pairs:
        key, _, value = pair.partition("=")
        if key not in _TIER_KEYS or not value:
            hint = nearest(key, _TIER_KEYS)
            raise ConfigError(f"--tier {text}: {pair!r} is not KEY=VALUE;{hint}")
        try:
            if (key, value) == ("every", "auto"):
                found[key] = None
            elif key in ("every", "keep"):
                found[key] = int(GPUS.read(value))
            elif key != "survives":
                found[f"{key}_s"] = HOUR_S * float(DURATION.read(value))
            elif value in _SURVIVES:
                found[key] = value
            else:
                raise ValueError(f"{value!r} survives nothing known; {', '.join(_SURVIVES)}")
        except ValueError as error:
            raise ConfigError(f"--tier {text}: {error}") from None
    return Level(name=name, **found)


# --- answers ------------------------------------------------------------------------------------


def _lines(scenario: Scenario, source: str, results: list[Result], count: int) -> list[str]:
    setup = scenario.setup
    best = max(results, key=lambda one: one.mean)
    machines = units.count(setup.machines, "machine")
    lines = [
        *_about(scenario.trace),
        (
            f"{machines} for {span(setup.horizon_s / HOUR_S)}, "
            f"{units.count(count, 'replication')} from seed {scenario.seed}; "
            f"the job {MODE_WORDS[setup.mode]}."
        ),
        f"The failures: {source}{_by(scenario)}.",
    ]
    if scenario.notice_share and not scenario.heeded_share:
        lines.append(
            f"A notice of {span(setup.notice_s / HOUR_S)} changes nothing: "
            + ("none comes in time." if not setup.flush_probability else "no save fits into it.")
        )
    header = ["policy", "save every", "useful", "wall p50", "wall p95", "failures"]
    rows = [
        [
            one.policy,
            _every(one),
            f"{100 * one.mean:.2f} %",
            _wall(one.quantile(0.5)),
            _wall(one.quantile(0.05)),  # what is useful is least where the wall is longest
            f"{one.failures:,.1f}",
        ]
        for one in results
    ]
    if setup.price_per_h is not None:
        header += ["cost", "per useful h"]
        for row, one in zip(rows, results, strict=True):
            per_h = one.cost_per_useful_h() if one.mean >= NO_PROGRESS else None
            row.append(number(one.cost or 0.0, 0))
            row.append("no progress" if per_h is None else number(per_h, 2))
    lines += table(header, rows, [one is best for one in results])
    lines.append("wall: hours for a useful one, in half and in 19 of 20 replications at most.")
    lines.append("Where the time went:")
    parts = [part for part in _PARTS if any(one.parts.get(part) for one in results)]
    cells = [
        [one.policy, *(percent(one.parts.get(part, 0.0)) for part in parts)] for one in results
    ]
    lines += table(["policy", *(_PARTS[part] for part in parts)], cells)
    if any(one.parts.get("productive", 0.0) > one.mean + _FEWER for one in results):
        lines.append(
            "productive: it trained, on the machines that were there; useful counts the work, "
            "which fewer machines do more slowly."
        )
    return lines + _against(results)


def _every(one: Result) -> str:
    """How often a policy saves; one that counts steps says so itself."""
    if one.interval_s is not None:
        return span(one.interval_s / HOUR_S)
    return one.policy if one.policy.endswith("steps") else "as it learns"


def _by(scenario: Scenario) -> str:
    """The law, in words."""
    ages = "of each machine, which are of any age at the start"
    return {
        "weibull": f", the mean rate of a Weibull law of shape {scenario.shape:g} {ages}",
        "bathtub": f"; by a bathtub law {ages}",
        "zones": f"; each takes all machines of one of {scenario.zones} zones",
    }.get(scenario.law, "")


def _against(results: list[Result]) -> list[str]:
    from outlast.planner.study import difference

    lines = []
    for other in results[1:]:
        mean, error = difference(other, results[0])
        doubt = "" if math.isnan(error) else f" (standard error {100 * error:.2f})"
        lines.append(
            f"{other.policy} against {results[0].policy}: {round(100 * mean, 2) + 0.0:+.2f} "
            f"points of useful time{doubt}, on the same failures."
        )
    return lines


def _about(trace: Recording | None) -> list[str]:
    """What a recording holds, with the law that its times are most likely under."""
    from outlast.planner.draws import fitted_weibull

    if trace is None:
        return []
    if trace.kind == "lifetimes":
        mean_s = sum(trace.lifetimes_s) / len(trace.lifetimes_s)
        return [f"{trace.name}: {trace.machines:,} lifetimes, {span(mean_s / HOUR_S)} at the mean."]
    moments = sorted(set(trace.losses))
    gaps = [after - before for before, after in itertools.pairwise(moments)]
    words = (
        f"{trace.name}: up to {units.count(trace.machines, 'machine')} over "
        f"{span(trace.length_s / HOUR_S)}, "
        f"losses at {len(moments):,} moments"
    )
    if len(gaps) < 2:
        return [f"{words}."]
    rest_s = trace.length_s - moments[-1]  # nothing failed in it: a time that was cut off
    cut = [rest_s] if rest_s > 0 else []
    law = fitted_weibull([*gaps, *cut], [True] * len(gaps) + [False] * len(cut))
    shape = f"Weibull, shape {figure(law.shape)}; 1 would be chance alone"
    return [f"{words}, one each {span(law.mean_s / HOUR_S)} ({shape})."]


def _wall(useful_share: float) -> str:
    return "no progress" if useful_share < NO_PROGRESS else f"{1 / useful_share:.3f}"


def _as_json(scenario: Scenario, source: str, results: list[Result], count: int) -> dict[str, Any]:
    from outlast.planner.study import difference

    setup = scenario.setup
    return {
        "seed": scenario.seed,
        "num_replications": count,
        "num_machines": setup.machines,
        "mode": setup.mode,
        "horizon_h": setup.horizon_s / HOUR_S,
        "failures_per_h": scenario.known_per_h,
        "rate_source": source,
        "policies": [
            {
                "policy": one.policy,
                "interval_h": None if one.interval_s is None else one.interval_s / HOUR_S,
                "useful_fraction": one.mean,
                "useful_fraction_p5": one.quantile(0.05),
                "useful_fraction_p50": one.quantile(0.5),
                "useful_fraction_p95": one.quantile(0.95),
                "num_failures": one.failures,
                "parts_fraction": one.parts,
                "cost": one.cost,
                "cost_per_useful_h": one.cost_per_useful_h(),
                "useful_fraction_less_first": difference(one, results[0])[0],
                "standard_error_fraction": _number(difference(one, results[0])[1]),
            }
            for one in results
        ],
    }


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
