"""A law's numbers from times of which some did not end while anybody looked (right-censored).

The law is the largest likelihood's. A lifetime that was cut off counts with what it is known to
have lasted; leaving it out, or taking its end for a failure, makes machines worse than they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from outlast.errors import ConfigError

ROUNDS: Final = 200
EXACT: Final = 1e-12


class Fitted(msgspec.Struct, frozen=True, kw_only=True):
    """A Weibull law; with ``shape`` 1 it is the exponential one.

    Attributes:
        scale_s: time by which 63.2 % have failed.
        shape: below one, what is old fails less often.
        mean_s: of the law.
        failures, censored: times that it comes from.
    """

    scale_s: float
    shape: float
    mean_s: float
    failures: int
    censored: int


def weibull(times_s: Sequence[float], failed: Sequence[bool]) -> Fitted:
    """The Weibull law that these times are most likely under.

    Args:
        times_s: how long each lasted, or was seen to last; above 0.
        failed: whether it failed then; otherwise nobody looked any longer.

    Raises:
        ConfigError: nothing failed, or a time is not above 0.
    """
    times, did = np.asarray(times_s, dtype=float), np.asarray(failed, dtype=bool)
    num_failures = _failures(failed)
    if not np.all(times > 0):
        raise ConfigError("a time of 0 s or less is no lifetime; leave it out")
    logs = np.log(times / times.max())  # at most 0, so that no power overflows
    mean_log = float(logs[did].mean())
    low, high = 1e-3, 1e3

    def slope(shape: float) -> float:
        weights = np.exp(shape * logs)
        return float((weights @ logs) / weights.sum() - 1 / shape - mean_log)

    for _ in range(ROUNDS):  # it grows with the shape: halve
        shape = (low * high) ** 0.5
        if slope(shape) > 0:
            high = shape
        else:
            low = shape
        if high / low - 1 < EXACT:
            break
    scale_s = float(times.max() * (np.exp(shape * logs).sum() / num_failures) ** (1 / shape))
    return Fitted(
        scale_s=scale_s,
        shape=shape,
        mean_s=scale_s * math.gamma(1 + 1 / shape),
        failures=num_failures,
        censored=len(times) - num_failures,
    )


def _failures(failed: Sequence[bool]) -> int:
    count = int(np.sum(failed))
    if not count:
        raise ConfigError("nothing failed in these times: they tell no rate, only how low it is")
    return count
