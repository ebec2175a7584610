"""Failures per hour: from probabilities, from published figures, over a fleet.

A percentage per GPU and day is a probability p: of 1 - e^-λ, so λ = -ln(1-p) per day; independent
machines' rates add up. Mixing the two up is 0.25 % at p = 0.5 %, and a factor of 1.4 at 50 %.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

DAY_H: Final = 24.0


class Published(NamedTuple):
    """A rate that somebody measured and published.

    Attributes:
        key: what a person writes for it.
        per_gpu_day: failures per GPU and day.
        source: what was counted, and where.
        primary: False when it was not read in the measurers' own publication.
    """

    key: str
    per_gpu_day: float
    source: str
    primary: bool = True


_LLAMA_3_GPU_DAYS: Final = 54 * 16_384
_LLAMA_3: Final = "Llama 3 405B on 16,384 GPUs over 54 days (arXiv:2407.21783, table 5)"
_RSC: Final = "over 11 months, per 1,000 node-days of 8 GPUs (Kokolis et al., arXiv:2410.21680)"

PUBLISHED: Final = (
    Published("llama-3", 419 / _LLAMA_3_GPU_DAYS, f"419 unexpected stops of {_LLAMA_3}"),
    Published("llama-3-all", 466 / _LLAMA_3_GPU_DAYS, f"all 466 stops of {_LLAMA_3}"),
    Published("rsc-1", 6.5 / 8000, f"Meta's RSC-1: 6.5 failures {_RSC}"),
    Published("rsc-2", 2.34 / 8000, f"Meta's RSC-2: 2.34 failures {_RSC}"),
    Published("opt-175b", 2e-3, "OPT-175B's log book, about"),
    Published("bloom", 5.6e-4, "BLOOM's training chronicles"),
    Published("h100", 5e-3, "one H100 fleet, read at second hand", primary=False),
)


def published(key: str) -> Published | None:
    """The published rate of this name, or None."""
    return next((rate for rate in PUBLISHED if rate.key == key), None)


def from_probability(probability: float) -> float:
    """λ per period from the probability of at least one failure in it: -ln(1-p).

    Args:
        probability: in [0, 1).
    """
    return -math.log1p(-probability)


def to_probability(rate: float) -> float:
    """Probability of at least one failure in a period with this rate: 1 - e^-λ."""
    return -math.expm1(-rate)


def mtbf_h(failures_per_h: float) -> float:
    """Mean hours between two failures."""
    return 1 / failures_per_h if failures_per_h > 0 else math.inf


def expected_failures(failures_per_h: float, wall_h: float) -> float:
    """How many failures ``wall_h`` hours bring on average."""
    return failures_per_h * wall_h


def smallest_fleet(per_gpu_day: float, mtbf_h: float) -> int:
    """The smallest number of GPUs whose mean time between failures is below ``mtbf_h`` hours."""
    return math.floor(DAY_H / (per_gpu_day * mtbf_h)) + 1


def no_failure_log10(num_failures: float) -> float:
    """Decimal logarithm of the probability that none comes where ``num_failures`` are expected.

    A logarithm, since e^-1203 is less than a double can hold.
    """
    return -num_failures / math.log(10)
