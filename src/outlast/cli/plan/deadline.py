"""``outlast plan deadline``: will I meet the deadline?"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any, Final

import click

from outlast.cli.plan.answer import Answer, answered, number, percent, span, table
from outlast.cli.quantities import COUNT0, DURATION, PRICE, RATE, SPAN, Rate
from outlast.errors import ConfigError
from outlast.plan.deadline import (
    Outcome,
    Policy,
    Task,
    choose,
    choose_greedily,
    choose_spot,
    drawn_spells,
    play,
)

NUM_RUNS: Final = 100
_POLICIES: Final[dict[str, Policy]] = {
    "uniform progress": choose,
    "greedy": choose_greedily,
    "spot alone": choose_spot,
}
_SPELLS_DRAWN: Final = 20_000  # in all runs of a policy, which takes a second
_SPELLS_MOST: Final = 8000  # of the market within the deadline: more take many seconds
_GIVEN_UP: Final = 10  # times the deadline, after which spot alone is given up


def answer(
    task: Task,
    *,
    up_h: float,
    down_h: float,
    spot_price: float,
    on_demand_price: float,
    source: str,
    seed: int,
) -> Answer:
    """Uniform progress against spot alone and on demand alone, over drawn markets."""
    num_spells = 2 * task.deadline_h / (up_h + down_h)
    num_runs = max(10, min(NUM_RUNS, int(_SPELLS_DRAWN / max(num_spells, 1))))
    rows = _rows(task, (up_h, down_h), (spot_price, on_demand_price), range(seed, seed + num_runs))
    # That spot alone was in time in all these runs is no promise that it will be.
    sure = [row for row in rows if row["met_fraction"] == 1.0 and row["policy"] != "spot alone"]
    chosen = min(sure, key=lambda row: row["cost_mean"]) if sure else None
    for row in rows:
        row["chosen"] = row is chosen
    data: dict[str, Any] = {
        "work_h": task.work_h,
        "deadline_h": task.deadline_h,
        "changeover_h": task.changeover_h,
        "spot_price_per_h": spot_price,
        "on_demand_price_per_h": on_demand_price,
        "failures_per_h": 1 / up_h,
        "away_mean_h": down_h,
        "rate_source": source,
        "num_runs": num_runs,
        "seed": seed,
        "policies": rows,
    }
    headline = [_headline(task, chosen)]
    cells = [
        (
            str(row["policy"]),
            percent(row["met_fraction"]),
            number(row["cost_mean"], 2),
            f"{number(row['cost_p5'], 2)} – {number(row['cost_p95'], 2)}",
            span(row["ended_p95_h"]),
            span(row["on_demand_h"]),
        )
        for row in rows
    ]
    header = ("", "in time", "cost", "nine of ten", "done by (p95)", "on demand")
    lines = [
        *headline,
        *table(header, cells, [row["chosen"] for row in rows]),
        (
            f"The market: spot lasts {span(up_h)}, is away for {span(down_h)}, both exponential; "
            f"{source}. {num_runs} runs from --seed {seed}."
        ),
        (
            "Model: uniform progress (Wu et al., NSDI'24): on demand when idle and behind, spot "
            "when it is to be had, on demand to the end once only work and two changeovers fit in."
        ),
    ]
    return Answer(
        question="will I meet the deadline?",
        data=data,
        headline=headline,
        lines=lines,
        next=f"outlast plan spot --rate {1 / up_h:.4g}/h --checkpoint 3min --spot {spot_price:g} "
        f"--on-demand {on_demand_price:g}",
    )


def _headline(task: Task, chosen: dict[str, Any] | None) -> str:
    if chosen is None:
        return (
            f"No: {span(task.work_h)} of work and a changeover of {span(task.changeover_h)} do not "
            f"fit into {span(task.deadline_h)}."
        )
    cost = number(chosen["cost_mean"], 2)
    if chosen["policy"] == "on demand alone":
        return f"Yes, within {span(task.deadline_h)}: {cost} on demand alone; spot does not pay."
    return f"Yes, within {span(task.deadline_h)}: about {cost} with {chosen['policy']}."


def _rows(
    task: Task,
    market_h: tuple[float, float],
    prices: tuple[float, float],
    seeds: Sequence[int],
) -> list[dict[str, Any]]:
    """How each policy does, on the same markets, and machines on demand alone.

    ``market_h`` is how long spot machines last and how long they are away; ``prices`` are per hour,
    of spot and on demand.
    """
    rows = []
    for name, policy in _POLICIES.items():
        outcomes = [
            play(
                task,
                drawn_spells(*market_h, random.Random(seed).random),  # noqa: S311
                policy=policy,
                at_most_h=_GIVEN_UP * task.deadline_h,
            )
            for seed in seeds
        ]
        rows.append(_row(name, outcomes, task, *prices))
    steady_h = task.work_h + task.changeover_h
    cost = steady_h * prices[1]
    steady = {
        "policy": "on demand alone",
        "met_fraction": float(steady_h <= task.deadline_h),
        "cost_mean": cost,
        "cost_p5": cost,
        "cost_p95": cost,
        "ended_p95_h": steady_h,
        "on_demand_h": steady_h,
        "spot_work_h": 0.0,
    }
    return [*rows, steady]


def _row(
    policy: str, outcomes: Sequence[Outcome], task: Task, spot: float, on_demand: float
) -> dict[str, Any]:
    costs = sorted(outcome.cost(spot, on_demand) for outcome in outcomes)
    ended = sorted(outcome.ended_h for outcome in outcomes)
    return {
        "policy": policy,
        "met_fraction": sum(one <= task.deadline_h + 1e-6 for one in ended) / len(ended),
        "cost_mean": math.fsum(costs) / len(costs),
        "cost_p5": costs[len(costs) // 20],
        "cost_p95": costs[-1 - len(costs) // 20],
        "ended_p95_h": ended[-1 - len(ended) // 20],
        "on_demand_h": math.fsum(one.on_demand_h for one in outcomes) / len(outcomes),
        "spot_work_h": math.fsum(one.spot_work_h for one in outcomes) / len(outcomes),
    }


@click.command(name="deadline")
@click.option("--work", "work_h", type=SPAN, required=True, help="Hours without interruption.")
@click.option("--deadline", "deadline_h", type=SPAN, required=True, help="From the start.")
@click.option("--rate", type=RATE, required=True, help="Spot machines are taken: 0.5/h.")
@click.option("--away", "away_h", type=SPAN, required=True, help="Until there are some again.")
@click.option("--spot", "spot_price", type=PRICE, required=True, help="Price per hour.")
@click.option("--on-demand", "on_demand_price", type=PRICE, required=True, help="Price per hour.")
@click.option(
    "--changeover",
    "changeover_h",
    type=DURATION,
    default="6min",
    show_default=True,
    help="From machines to new work, with what is rewound.",
)
@click.option("--seed", type=COUNT0, default=0, show_default=True, help="Of the drawn markets.")
@answered
def command(
    *,
    work_h: float,
    deadline_h: float,
    rate: Rate,
    away_h: float,
    spot_price: float,
    on_demand_price: float,
    changeover_h: float,
    seed: int,
) -> Answer:
    """Whether a deadline is met with spot, and what on-demand machines must add."""
    if rate.of != "job":
        raise ConfigError("--rate is of the whole fleet here; write 0.5/h")
    if on_demand_price <= 0:
        raise ConfigError("--on-demand 0: machines on demand for nothing need no plan")
    if 2 * deadline_h / (1 / rate.per_h + away_h) > _SPELLS_MOST:
        raise ConfigError(
            f"spot machines that last {span(1 / rate.per_h)} and are away for {span(away_h)} come "
            f"and go too often within {span(deadline_h)} to draw that; ask about a tenth of the "
            "work and of the deadline, which comes to the same"
        )
    task = Task(work_h=work_h, deadline_h=deadline_h, changeover_h=changeover_h)
    return answer(
        task,
        up_h=1 / rate.per_h,
        down_h=away_h,
        spot_price=spot_price,
        on_demand_price=on_demand_price,
        source=rate.source,
        seed=seed,
    )
