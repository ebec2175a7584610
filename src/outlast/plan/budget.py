"""What failures cost in money, with checkpoints and without any.

First order: failures · hours lost at each · GPUs · price. Good while a small share of the run is
lost; what is beyond the run itself (a run from scratch with many failures) says that it cannot
finish, and nothing about how long it would take.
"""

from __future__ import annotations

import math

import msgspec

from outlast.plan.rates import expected_failures, no_failure_log10


class Losses(msgspec.Struct, frozen=True, kw_only=True):
    """What the failures of a run cost.

    Attributes:
        num_failures: expected.
        lost_gpu_h: GPU-hours lost to them.
        cost_lost: the same in money; None without a price.
        cost_total: of the run itself, all its GPU-hours; None without a price.
        fraction_lost: lost GPU-hours over the run's; above 1 it cannot finish.
        no_failure_log10: decimal logarithm of the probability that no failure comes at all.
    """

    num_failures: float
    lost_gpu_h: float
    cost_lost: float | None
    cost_total: float | None
    fraction_lost: float
    no_failure_log10: float


def losses(
    failures_per_h: float,
    *,
    wall_h: float,
    lost_h: float,
    num_gpus: int,
    price_per_gpu_h: float | None = None,
) -> Losses:
    """What failures cost when each loses ``lost_h`` hours of the whole job.

    Args:
        failures_per_h: λ of the whole job.
        wall_h: hours of the run.
        lost_h: hours that one failure costs: half an interval, detection, restore.
        num_gpus: that wait meanwhile, which is all.
        price_per_gpu_h: per GPU and hour.
    """
    num_failures = expected_failures(failures_per_h, wall_h)
    lost_gpu_h = num_failures * lost_h * num_gpus
    return Losses(
        num_failures=num_failures,
        lost_gpu_h=lost_gpu_h,
        cost_lost=None if price_per_gpu_h is None else lost_gpu_h * price_per_gpu_h,
        cost_total=None if price_per_gpu_h is None else wall_h * num_gpus * price_per_gpu_h,
        fraction_lost=lost_gpu_h / (wall_h * num_gpus),
        no_failure_log10=no_failure_log10(num_failures),
    )


def from_scratch(
    failures_per_h: float,
    *,
    wall_h: float,
    num_gpus: int,
    price_per_gpu_h: float | None = None,
) -> Losses:
    """The same without checkpoints: each failure costs half of the run, on average."""
    return losses(
        failures_per_h,
        wall_h=wall_h,
        lost_h=wall_h / 2,
        num_gpus=num_gpus,
        price_per_gpu_h=price_per_gpu_h,
    )


def from_scratch_wall_h(failures_per_h: float, wall_h: float) -> float:
    """Expected hours of a run that begins anew at each failure: (e^{λH} - 1)/λ; inf when huge."""
    try:
        return math.expm1(failures_per_h * wall_h) / failures_per_h
    except OverflowError:
        return math.inf
