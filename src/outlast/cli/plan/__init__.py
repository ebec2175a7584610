"""``outlast plan``: know before you rent.

``questions`` is the table of what can be asked, ``interval`` and ``spot`` its larger rows;
``answer`` says what a question is, where its numbers come from and how its answer is shown.
Without a question, all of them are answered at once: each in a line or two, with the command that
says more. Nothing here imports torch, scipy or rich: an answer takes less than half a second from
the start.
"""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from outlast import config
from outlast.cli import LazyGroup
from outlast.cli.plan.answer import (
    COST_FLAGS,
    RATE_FLAGS,
    OwnJob,
    PlanAnswer,
    failure_rate,
    output_flags,
    own,
    prices,
    say,
)
from outlast.cli.plan.interval import interval
from outlast.cli.plan.questions import (
    QUESTIONS,
    budget,
    failures,
    flush,
    memory,
    replicas,
    restarts,
    spares,
)
from outlast.cli.plan.spot import spot
from outlast.cli.quantities import (
    BANDWIDTH,
    DAYS,
    GPUS,
    GPUS_PER_NODE,
    PARAMETERS,
    PRICE,
    RATE,
    SIZE,
    SPAN,
    flag,
)
from outlast.errors import ConfigError
from outlast.policy.interval import Costs, best_h
from outlast.prices import PriceList, Prices
from outlast.report.chart import write

_EXAMPLE: Final[dict[str, Any]] = {
    "gpus": 4096,
    "checkpoint_h": 1 / 60,
    "restore_h": 3 / 60,
    "days": 60.0,
    "price": 2.5,
    "spot_price": 0.7,
    "on_demand_price": 1.0,
    "params": 70e9,
    "nodes": 512,
    "bandwidth": 1.5e9,
    "notice_h": 120 / 3600,
}
_EXAMPLE_RATE: Final = "0.5%/gpu-day"
_LONGEST_H: Final = 8766.0  # of an interval that is kept: JSON has no word for never
_REPAIR_H: Final = 24.0  # where nobody says how long a machine is away
_COSTS: Final = ("checkpoint_h", "restore_h", "detect_h", "lag_h")


def overview(
    given: dict[str, Any], *, as_json: bool, plot: Path | None, is_kept: bool = False
) -> None:
    """Answer what can be answered.

    Raises:
        ConfigError: the flags are enough for nothing.
    """
    measured = None if given["rate"] is not None else own()
    asked = any(value is not None for name, value in given.items() if name != "gpus_per_node")
    is_example = not asked and measured is None
    title, inputs = _inputs(given, measured, is_example=is_example)
    answers = _answers(inputs, measured)
    if not answers:
        raise ConfigError(
            "these flags answer no question yet; give --rate or --gpus, with --checkpoint 1min for "
            "an interval"
        )
    kept = _keep(answers, inputs, is_example=is_example) if is_kept else None
    if plot is not None:
        makers = [answer.charts for answer in answers.values() if answer.charts is not None]
        if not makers:
            raise ConfigError("there is no picture of this; --plot needs --checkpoint or a flush")
        write([chart for make in makers for chart in make()], plot, title="outlast plan")
    if as_json:
        click.echo(msgspec.json.encode({name: answer.data for name, answer in answers.items()}))
        return
    if title:
        say(title)
    # What the job has measured the questions find by themselves.
    written = inputs if measured is None else inputs | dict.fromkeys(_COSTS) | _only(given)
    for name, answer in answers.items():
        asks = QUESTIONS[name].asks
        click.echo(click.style(asks[0].upper() + asks[1:], bold=True))
        for line in answer.headline.split("\n"):
            say(line, indent="  ")
        click.echo(f"  all of it: {_command(name, written, answer.data)}")
    if plot is not None:
        click.echo(f"wrote {plot}")
    if kept is not None:
        say(
            f"kept in {kept}: the job enters it in its ledger at its start, outlast report compares"
        )
    say("Next: outlast plan zones, modes or deadline, or simulate; each has --help")


def _inputs(
    given: dict[str, Any], measured: OwnJob | None, *, is_example: bool
) -> tuple[str, dict[str, Any]]:
    """What the answers start from, and how that is said."""
    if is_example:
        title = (
            "No job here has measured anything, and nothing was given: a worked example, "
            f"4,096 GPUs at {_EXAMPLE_RATE}."
        )
        return title, given | _EXAMPLE | {"rate": RATE.read(_EXAMPLE_RATE)}
    title, inputs = "", dict(given)
    if measured is not None:
        title = f"From what the job in {measured.directory} has measured:"
        inputs |= {name: getattr(measured, name) for name in (*_COSTS, "state_bytes")}
        inputs |= _only(given)
        if given["params"] is not None:
            inputs["state_bytes"] = given["state_bytes"]
    for name, price in zip(("spot_price", "on_demand_price"), prices(), strict=True):
        inputs[name] = price if inputs[name] is None else inputs[name]
    return title, inputs


def _only(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}


def _answers(inputs: dict[str, Any], measured: OwnJob | None) -> dict[str, PlanAnswer]:
    answers: dict[str, PlanAnswer] = {}
    if inputs["rate"] is not None or inputs["gpus"] is not None or measured is not None:
        answers |= _about_failures(inputs, measured)
    params, size, nodes = inputs["params"], inputs["state_bytes"], inputs["nodes"] or 1
    if params is not None or size is not None:
        room = memory(params=params, state_bytes=None if params else size, nodes=nodes)
        if inputs["bandwidth"] and inputs["notice_h"]:
            answers["flush"] = flush(
                state_bytes=room.data["state_bytes"],
                bandwidth=inputs["bandwidth"],
                notice_h=inputs["notice_h"],
                nodes=nodes,
            )
        answers["memory"] = room
    if nodes > 1 and nodes % 2 == 0:
        answers["replicas"] = replicas(nodes=nodes)
    return answers


def _about_failures(inputs: dict[str, Any], measured: OwnJob | None) -> dict[str, PlanAnswer]:
    gpus, days = inputs["gpus"], inputs["days"] or 30.0
    per_node = inputs["gpus_per_node"] or GPUS_PER_NODE
    known = failure_rate(inputs["rate"], gpus, per_node, measured=measured)
    answers = {"failures": failures(known, days=days)}
    lost_h = 0.25
    if inputs["checkpoint_h"] is not None:
        costs = Costs(**{name: inputs.get(name) or 0.0 for name in _COSTS})
        lost_h = best_h(costs, known.per_h) / 2 + costs.restore_h + costs.detect_h
        answers["interval"] = interval(known, costs)
        if inputs["spot_price"] is not None and inputs["on_demand_price"]:
            both = {name: inputs[name] for name in ("spot_price", "on_demand_price")}
            answers["spot"] = spot(known, costs, **both)
    if gpus is not None:
        price = inputs["price"]
        answers["budget"] = budget(known, gpus=gpus, days=days, price=price, lost_h=lost_h)
    if inputs["nodes"] is not None:
        answers["spares"] = spares(known, repair_h=_REPAIR_H)
        answers["restarts"] = restarts(known, max_restarts=3, days=days)
    return answers


def _command(name: str, written: dict[str, Any], data: dict[str, Any]) -> str:
    """The command that says all of it."""
    values = {
        **written,
        "days": data.get("days"),
        "lost_h": data.get("lost_per_failure_h"),
        "repair_h": _REPAIR_H,
    }
    if name == "replicas":
        values = {"nodes": values["nodes"]}
    elif name == "memory" and values["params"] is not None:
        values["state_bytes"] = None
    elif name in ("flush", "memory"):  # a flush is told of one machine's share
        share = data["num_nodes"] if name == "flush" else 1
        values |= {"state_bytes": float(data["state_bytes"] * share), "params": None}
    if values.get("rate") is None or values["rate"].of != "node":
        values["gpus_per_node"] = None
    words = ["outlast", "plan", name]
    for one in QUESTIONS[name].flags:
        if values.get(one.name or "") is not None:
            words += [one.opts[0], _written(one.name or "", values[one.name or ""])]
    return shlex.join(words)


def _written(field: str, value: Any) -> str:
    """A value as it can be given to a flag."""
    if field == "rate":
        return str(value.text)
    if field.endswith("_h"):
        for unit, count in (("h", value), ("min", 60 * value)):
            if abs(count - round(count)) < 1e-9 < count:
                return f"{count:.6g}{unit}"
        return f"{3600 * value:.6g}s"
    if field == "params":
        return f"{value / 1e9:.6g}B"
    if field in ("state_bytes", "bandwidth"):
        unit, scale = ("GB", 1e9) if value >= 1e8 else ("kB", 1e3)
        return f"{value / scale:.6g}{unit}{'/s' * (field == 'bandwidth')}"
    return f"{value:.10g}"


def _keep(answers: dict[str, PlanAnswer], inputs: dict[str, Any], *, is_example: bool) -> Path:
    """Keep what was found for the job that the settings name; where it is.

    Raises:
        ConfigError: there is no prediction to be kept, or it cannot be written.
    """
    from outlast.ledger.job import Prediction, keep_plan

    if is_example or "interval" not in answers:
        raise ConfigError(
            "there is nothing to keep: --save needs a rate and what a checkpoint costs, like "
            "--rate 2/h --checkpoint 3min"
        )
    data = answers["interval"].data
    wall = next(row["wall_h_per_useful_h"] for row in data["models"] if row["chosen"])
    spot, on_demand = (PriceList(other=inputs[f"{name}_price"]) for name in ("spot", "on_demand"))
    prediction = Prediction(
        planned_t=time.time(),
        failures_per_h=data["failures_per_h"],
        failures_low_per_h=data["failures_low_per_h"],
        failures_high_per_h=data["failures_high_per_h"],
        rate_source=data["rate_source"],
        productive_fraction=1 / wall,
        interval_s=3600 * min(data["interval_h"], _LONGEST_H),
        checkpoint_s=3600 * data["checkpoint_h"],
        restore_s=3600 * data["restore_h"],
        detect_s=3600 * data["detect_h"],
        price_per_machine_hour=Prices(spot=spot, on_demand=on_demand).of(""),
    )
    return keep_plan(prediction, config.load({}).dir)


class _Questions(LazyGroup):
    """The questions of the table, and ``outlast simulate``, which is one too."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        asked = QUESTIONS.get(cmd_name)
        return asked.command(cmd_name) if asked else super().get_command(ctx, cmd_name)


_LISTED = {name: (name, one.listed or one.asks) for name, one in QUESTIONS.items()}


@click.group(
    name="plan",
    cls=_Questions,
    package="outlast.cli",
    listed=_LISTED
    | {"simulate": ("simulate", "what would the job go through? (outlast simulate)")},
    noun="question",
    invoke_without_command=True,
    params=[
        *RATE_FLAGS,
        *COST_FLAGS,
        flag("--days", DAYS, "How long it runs."),
        flag("--spot", PRICE, "Price per hour.", to="spot_price"),
        flag("--on-demand", PRICE, "Price per hour.", to="on_demand_price"),
        flag("--price", PRICE, "Per GPU and hour."),
        flag("--state", SIZE, "Of the whole job: 640GB."),
        flag("--params", PARAMETERS, "Of the model: 7B."),
        flag("--bandwidth", BANDWIDTH, "Of each machine, to storage: 1.5GB/s."),
        flag("--notice", SPAN, "From the platform's word to the end: 120s."),
        flag("--nodes", GPUS, "Machines that share the state."),
        click.Option(
            ["--save", "is_kept"],
            is_flag=True,
            help="Keep the prediction in the job's directory; outlast report compares.",
        ),
        *output_flags(),
    ],
)
@click.pass_context
def command(
    ctx: click.Context, /, *, as_json: bool, plot: Path | None, is_kept: bool, **given: Any
) -> None:
    """Know before you rent: failures, intervals, prices, room and deadlines.

    Without anything it plans the job in this directory from what that has measured, or else shows
    a worked example. With flags it answers each question that they are enough for.
    """
    if ctx.invoked_subcommand is None:
        overview(given, as_json=as_json, plot=plot, is_kept=is_kept)
        return
    for parameter in ctx.command.params:
        source = parameter.name and ctx.get_parameter_source(parameter.name)
        if source is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(
                f"{parameter.opts[0]} stands before {ctx.invoked_subcommand}; write outlast plan "
                f"{ctx.invoked_subcommand} {parameter.opts[0]} …"
            )
