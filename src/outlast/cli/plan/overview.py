"""All questions at once: each in a line or two, with the command that says more."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from outlast.cli.plan import (
    budget,
    failures,
    flush,
    interval,
    memory,
    replicas,
    restarts,
    spares,
    spot,
)
from outlast.cli.plan.answer import Answer, say
from outlast.cli.plan.facts import Own, prices
from outlast.cli.plan.facts import failures as rate_of
from outlast.cli.plan.facts import own as measure
from outlast.cli.quantities import GPUS_PER_NODE, RATE
from outlast.errors import ConfigError
from outlast.plan.flush import Flush
from outlast.plan.interval import Costs, best_h
from outlast.plan.memory import state_bytes

if TYPE_CHECKING:
    from outlast.report.chart import Picture

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
_LONGEST_H: Final = 8766.0  # of an interval that is kept: JSON has no word for never
_REPAIR_H: Final = 24.0  # where nobody says how long a machine is away
_EXAMPLE_RATE: Final = "0.5%/gpu-day"
_OWN: Final = (
    "checkpoint_h",
    "restore_h",
    "detect_h",
    "lag_h",
)
_FLAG_NAMES: Final = {
    "rate": "--rate",
    "gpus": "--gpus",
    "gpus_per_node": "--gpus-per-node",
    "days": "--days",
    "checkpoint_h": "--checkpoint",
    "restore_h": "--restore",
    "detect_h": "--detect",
    "spot_price": "--spot",
    "on_demand_price": "--on-demand",
    "price": "--price",
    "lost_h": "--lost",
    "repair_h": "--repair",
    "state_bytes": "--state",
    "params": "--params",
    "bandwidth": "--bandwidth",
    "notice_h": "--notice",
    "nodes": "--nodes",
}
_RATED: Final = ("rate", "gpus", "gpus_per_node")
_COSTS: Final = ("checkpoint_h", "restore_h", "detect_h")
_FLAGS: Final = {
    "failures": (*_RATED, "days"),
    "interval": (*_RATED, *_COSTS),
    "spot": (*_RATED, *_COSTS, "spot_price", "on_demand_price"),
    "budget": (*_RATED, "days", "price", "lost_h"),
    "spares": (*_RATED, "repair_h"),
    "restarts": (*_RATED, "days"),
    "flush": ("state_bytes", "bandwidth", "notice_h", "nodes"),
    "memory": ("params", "state_bytes", "nodes"),
    "replicas": ("nodes",),
}


def overview(
    given: dict[str, Any], *, as_json: bool, plot: Path | None, is_kept: bool = False
) -> None:
    """Answer what can be answered.

    Raises:
        ConfigError: the flags are enough for nothing.
    """
    asked = any(value is not None for name, value in given.items() if name != "gpus_per_node")
    measured = None if given["rate"] is not None else measure()
    if asked or measured is not None:
        title = (
            "" if measured is None else f"From what the job in {measured.directory} has measured:"
        )
        inputs = given | _measured(measured, given)
        for name, price in zip(("spot_price", "on_demand_price"), prices(), strict=True):
            inputs[name] = price if inputs[name] is None else inputs[name]
    else:
        title = (
            "No job here has measured anything, and nothing was given: a worked example, "
            f"4,096 GPUs at {_EXAMPLE_RATE}."
        )
        inputs = given | _EXAMPLE | {"rate": RATE.read(_EXAMPLE_RATE)}
    answers = _answers(inputs, measured)
    if not answers:
        raise ConfigError(
            "these flags answer no question yet; give --rate or --gpus, with --checkpoint 1min for "
            "an interval"
        )
    kept = _keep(answers, inputs, is_example=not asked and measured is None) if is_kept else None
    if plot is not None:
        from outlast.report.chart import write

        write(_charts(answers), plot, title="outlast plan")
    if as_json:
        click.echo(msgspec.json.encode({name: answer.data for name, answer in answers.items()}))
        return
    if title:
        say(title)
    # What the job has measured the questions find by themselves.
    written = inputs if measured is None else {**inputs, **dict.fromkeys(_OWN), **_only(given)}
    for name, answer in answers.items():
        click.echo(click.style(answer.question[0].upper() + answer.question[1:], bold=True))
        for line in answer.headline:
            say(line, indent="  ")
        click.echo(f"  all of it: {_command(name, written, answer)}")
    if plot is not None:
        click.echo(f"wrote {plot}")
    if kept is not None:
        say(
            f"kept in {kept}: the job enters it in its ledger at its start, outlast report compares"
        )
    say("Next: outlast plan zones or deadline, or simulate; each has --help")


def _only(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}


def _command(name: str, written: dict[str, Any], answer: Answer) -> str:
    """The command that says all of it."""
    words = ["outlast", "plan", name]
    values = {
        **written,
        "days": answer.data.get("days"),
        "lost_h": answer.data.get("lost_per_failure_h"),
        "repair_h": _REPAIR_H,
    }
    if name == "memory" and values["params"] is not None:
        values["state_bytes"] = None
    elif name in ("flush", "memory"):
        values |= {"state_bytes": _state_of(answer), "params": None}
    if values["rate"] is None or values["rate"].of != "node":
        values["gpus_per_node"] = None
    for field in _FLAGS[name]:
        if values.get(field) is not None:
            words += [_FLAG_NAMES[field], _written(field, values[field])]
    return shlex.join(words)


def _state_of(answer: Answer) -> float:
    """Of the whole job: a flush is told of one machine's share."""
    return float(
        answer.data["state_bytes"] * (answer.data["num_nodes"] if "poll_s" in answer.data else 1)
    )


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


def _keep(answers: dict[str, Answer], inputs: dict[str, Any], *, is_example: bool) -> Path:
    """Keep what was found for the job that the settings name; where it is.

    Raises:
        ConfigError: there is no prediction to be kept, or it cannot be written.
    """
    from outlast import config
    from outlast.ledger import planned

    if is_example or "interval" not in answers:
        raise ConfigError(
            "there is nothing to keep: --save needs a rate and what a checkpoint costs, like "
            "--rate 2/h --checkpoint 3min"
        )
    data = answers["interval"].data
    wall = next(row["wall_h_per_useful_h"] for row in data["models"] if row["chosen"])
    price = inputs["spot_price"] if inputs["spot_price"] is not None else inputs["on_demand_price"]
    prediction = planned.Prediction(
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
        price_per_machine_hour=price,
    )
    return planned.save(prediction, config.load({}).dir)


def _measured(measured: Own | None, given: dict[str, Any]) -> dict[str, Any]:
    if measured is None:
        return {}
    names = (
        "checkpoint_h",
        "restore_h",
        "detect_h",
        "lag_h",
        "state_bytes",
    )
    found = {name: getattr(measured, name) for name in names if given.get(name) is None}
    if given["params"] is not None:
        found.pop("state_bytes", None)
    return found


def _answers(inputs: dict[str, Any], measured: Own | None) -> dict[str, Answer]:
    answers: dict[str, Answer] = {}
    if inputs["rate"] is not None or inputs["gpus"] is not None or measured is not None:
        answers |= _about_failures(inputs, measured)
    size = inputs["state_bytes"]
    of = "as given"
    if inputs["params"] is not None:
        size, of = (
            state_bytes(inputs["params"]),
            f"{inputs['params']:,.0f} parameters, 14 bytes each",
        )
    nodes = inputs["nodes"] or 1
    if size is not None and inputs["bandwidth"] and inputs["notice_h"]:
        one = Flush(
            state_bytes=size / nodes,
            bandwidth_bytes_per_s=inputs["bandwidth"],
            notice_s=inputs["notice_h"] * 3600,
        )
        answers["flush"] = flush.answer(one, nodes)
    if size is not None:
        answers["memory"] = memory.answer(size, nodes=nodes, buffers=1, memory=None, of=of)
    if nodes > 1 and nodes % 2 == 0:
        answers["replicas"] = replicas.answer(nodes, 2)
    return answers


def _about_failures(inputs: dict[str, Any], measured: Own | None) -> dict[str, Answer]:
    gpus, days = inputs["gpus"], inputs["days"] or 30.0
    per_node = inputs["gpus_per_node"] or GPUS_PER_NODE
    known = rate_of(inputs["rate"], gpus, per_node, measured=measured)
    answers = {"failures": failures.answer(known, days=days)}
    lost_h = 0.25
    if inputs["checkpoint_h"] is not None:
        costs = Costs(
            checkpoint_h=inputs["checkpoint_h"],
            restore_h=inputs["restore_h"] or 0.0,
            detect_h=inputs["detect_h"] or 0.0,
            lag_h=inputs.get("lag_h") or 0.0,
        )
        lost_h = best_h(costs, known.per_h) / 2 + costs.restore_h + costs.detect_h
        answers["interval"] = interval.answer(known, costs)
        if inputs["spot_price"] is not None and inputs["on_demand_price"]:
            answers["spot"] = spot.answer(
                known,
                costs,
                spot_price=inputs["spot_price"],
                on_demand_price=inputs["on_demand_price"],
            )
    if gpus is not None:
        answers["budget"] = budget.answer(
            known, gpus=gpus, days=days, price=inputs["price"], lost_h=lost_h
        )
    if inputs["nodes"] is not None:
        answers["spares"] = spares.answer(known, _REPAIR_H)
        answers["restarts"] = restarts.answer(known, max_restarts=3, days=days)
    return answers


def _charts(answers: dict[str, Answer]) -> list[Picture]:
    makers: list[Callable[[], list[Picture]]] = [
        answer.charts for answer in answers.values() if answer.charts is not None
    ]
    if not makers:
        raise ConfigError("there is no picture of this; --plot needs --checkpoint or a flush")
    return [chart for make in makers for chart in make()]
