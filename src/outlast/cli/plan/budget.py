"""``outlast plan budget``: what do failures cost?"""

from __future__ import annotations

from typing import Any

import click

from outlast.cli.plan.answer import Answer, answered, chance, figure, number, span
from outlast.cli.plan.facts import Failures, failures, own, rate_flags
from outlast.cli.quantities import DAYS, GPUS, PRICE, SPAN, Rate
from outlast.errors import ConfigError
from outlast.plan.budget import from_scratch, from_scratch_wall_h, losses
from outlast.plan.local_updates import lost_s


def answer(
    known: Failures,
    *,
    gpus: int,
    days: float,
    price: float | None,
    lost_h: float,
    local_lost_h: float | None = None,
) -> Answer:
    """What failures cost with checkpoints, and a run without any."""
    wall_h = days * 24
    with_them = losses(
        known.per_h, wall_h=wall_h, lost_h=lost_h, num_gpus=gpus, price_per_gpu_h=price
    )
    low, high = (
        losses(per_h, wall_h=wall_h, lost_h=lost_h, num_gpus=gpus, price_per_gpu_h=price)
        for per_h in (known.low_per_h, known.high_per_h)
    )
    scratch = from_scratch(known.per_h, wall_h=wall_h, num_gpus=gpus, price_per_gpu_h=price)
    data: dict[str, Any] = {
        **known.as_json(),
        "num_gpus": gpus,
        "days": days,
        "lost_per_failure_h": lost_h,
        "price_per_gpu_h": price,
        "num_failures": with_them.num_failures,
        "lost_gpu_h": with_them.lost_gpu_h,
        "lost_low_gpu_h": low.lost_gpu_h,
        "lost_high_gpu_h": high.lost_gpu_h,
        "cost_lost": with_them.cost_lost,
        "cost_total": with_them.cost_total,
        "lost_fraction": with_them.fraction_lost,
        "scratch_lost_gpu_h": scratch.lost_gpu_h,
        "scratch_lost_fraction": scratch.fraction_lost,
        "scratch_lost_ratio": scratch.lost_gpu_h / with_them.lost_gpu_h,
        "scratch_wall_h": from_scratch_wall_h(known.per_h, wall_h),
        "no_failure_log10": with_them.no_failure_log10,
    }
    share = f"{number(100 * with_them.fraction_lost, 2)} % of the run"
    if with_them.cost_lost is not None and with_them.cost_total is not None:
        share += f", {figure(with_them.cost_lost)} of {figure(with_them.cost_total)} in money"
    headline = [
        (
            f"{figure(with_them.num_failures)} failures cost {figure(with_them.lost_gpu_h)} "
            f"GPU-hours: {share}."
        )
    ]
    lines = [
        *headline,
        f"The rate: a failure every {span(1 / known.per_h)}; {known.source}.",
        (
            f"Range: {figure(low.lost_gpu_h)} to {figure(high.lost_gpu_h)} GPU-hours "
            f"{known.range_is}."
        ),
        _scratch_words(scratch.fraction_lost, scratch.no_failure_log10, scratch.lost_gpu_h),
    ]
    if local_lost_h is not None:
        lines.append(_local(data, known.per_h * wall_h, local_lost_h, lost_h, gpus))
    lines.append(
        "Model: failures · time lost at each · GPUs · price, first order; above some 30 % the "
        "run itself becomes longer (see outlast plan interval)."
    )
    return Answer(
        question="what do failures cost?",
        data=data,
        headline=headline,
        lines=lines,
        next=f"outlast plan interval --rate {known.per_h:.4g}/h --checkpoint 1min",
    )


def _scratch_words(fraction: float, log10: float, gpu_h: float) -> str:
    probability = f"10^{log10:.1f}" if log10 < -3 else chance(10**log10)
    words = (
        f"Without checkpoints: {figure(gpu_h)} GPU-hours, {number(fraction, 1)} times the run's "
        "budget"
    )
    verdict = ": it cannot finish" if fraction > 1 else ""
    return f"{words}; no failure at all has probability {probability}{verdict}."


def _local(
    data: dict[str, Any], num_failures: float, local_lost_h: float, lost_h: float, gpus: int
) -> str:
    data["local_lost_per_failure_s"] = local_lost_h * 3600
    data["local_lost_gpu_h"] = num_failures * local_lost_h * gpus
    return (
        f"With local updates a preemption loses {figure(local_lost_h * 3600)} fleet-seconds, not "
        f"{figure(lost_h * 3600)}: {figure(data['local_lost_gpu_h'])} GPU-hours in all (what they "
        "do to the model is not here)."
    )


@click.command(name="budget")
@rate_flags
@click.option("--days", type=DAYS, required=True, help="How long it runs.")
@click.option("--price", type=PRICE, help="Per GPU and hour.")
@click.option("--lost", "lost_h", type=SPAN, required=True, help="Lost at each failure.")
@click.option("--local-steps", type=GPUS, help="Steps between meetings of islands (DiLoCo).")
@click.option("--islands", type=GPUS, default=8, show_default=True, help="How many there are.")
@click.option("--step", "step_h", type=SPAN, help="Of a step, for --local-steps.")
@click.option("--whole-window", is_flag=True, help="A preemption throws the whole round away.")
@answered
def command(
    *,
    rate: Rate | None,
    gpus: int | None,
    gpus_per_node: int,
    days: float,
    price: float | None,
    lost_h: float,
    local_steps: int | None,
    islands: int,
    step_h: float | None,
    whole_window: bool,
) -> Answer:
    """What failures cost in GPU-hours and money, with checkpoints and from scratch."""
    if gpus is None:
        raise ConfigError("the number of GPUs is missing; like --gpus 64")
    local_lost_h = None
    if local_steps is not None:
        if step_h is None:
            raise ConfigError("--local-steps needs a step's time; like --step 1s")
        lost = lost_s(local_steps, step_h * 3600, islands, whole_window=whole_window)
        local_lost_h = lost / 3600
    measured = own() if rate is None else None
    known = failures(rate, gpus, gpus_per_node, measured=measured, step_h=step_h)
    return answer(
        known, gpus=gpus, days=days, price=price, lost_h=lost_h, local_lost_h=local_lost_h
    )
