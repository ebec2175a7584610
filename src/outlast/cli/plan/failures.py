"""``outlast plan failures``: how often will I be interrupted?"""

from __future__ import annotations

from typing import Any

import click

from outlast.cli.plan.answer import Answer, answered, figure, span
from outlast.cli.plan.facts import Failures, rated
from outlast.cli.quantities import DAYS
from outlast.plan import rates
from outlast.plan.distributions import poisson_quantile


def answer(known: Failures, *, days: float) -> Answer:
    """How many failures, and how far apart."""
    gpus, count = known.num_gpus, known.per_h * days * 24
    low, high = poisson_quantile(0.05, count), poisson_quantile(0.95, count)
    data: dict[str, Any] = {
        "days": days,
        "num_gpus": gpus,
        **known.as_json(),
        "num_failures": count,
        "num_failures_p5": low,
        "num_failures_p95": high,
        "no_failure_log10": rates.no_failure_log10(count),
    }
    if gpus is not None:
        per_gpu_day = known.per_h * 24 / gpus
        data["failures_per_gpu_day"] = per_gpu_day
        data["num_gpus_mtbf_below_1h"] = rates.smallest_fleet(per_gpu_day, 1.0)
    on = f" on {gpus:,} GPUs" if gpus else ""
    headline = [
        (
            f"A failure every {span(1 / known.per_h)}{on}: {figure(count)} in {days:,g} days "
            f"({low:,} to {high:,} in nine of ten runs)."
        ),
        f"The rate: {known.source}; {figure(known.per_h)} per hour.",
    ]
    lines = [
        *headline,
        (
            f"Range: {figure(count / known.per_h * known.low_per_h)} to "
            f"{figure(count / known.per_h * known.high_per_h)} failures {known.range_is}."
        ),
    ]
    if gpus is not None:
        fleet = data["num_gpus_mtbf_below_1h"]
        lines.append(f"At this rate, from {fleet:,} GPUs on there is one within the hour.")
    lines.append("Model: Poisson, independent machines; valid where they do not fail together.")
    return Answer(
        question="how often will I be interrupted?",
        data=data,
        headline=headline,
        lines=lines,
        next=f"outlast plan interval --rate {known.per_h:.4g}/h --checkpoint 1min",
    )


@click.command(name="failures")
@rated
@click.option("--days", type=DAYS, default="30", show_default=True, help="How long it runs.")
@answered
def command(
    *,
    known: Failures,
    days: float,
) -> Answer:
    """How often a job is interrupted, and how many failures a run of some days meets."""
    return answer(known, days=days)
