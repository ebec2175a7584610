"""Find where one thing is ahead of another, along a quantity that has many magnitudes.

A grid is looked at as a whole, and each change of sign on it is then narrowed down. What comes out
may be nothing, everything, or several spans: who is ahead at both ends need not be so between them.

What can go wrong: a span that lies between two points of the grid is not seen. Whoever asks about a
point of his own names it with ``also``: that one is on the grid.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

_POINTS: Final = 10  # of each magnitude
_FINER, _ROUNDS = 33, 4  # points between two, again and again: to a millionth of their distance


class AheadSpan(msgspec.Struct, frozen=True):
    """From ``low`` to ``high``; 0 and inf where it reaches over the end of what was looked at."""

    low: float
    high: float


def ahead_spans(
    is_ahead: Callable[[Values], Flags], low: float, high: float, also: Iterable[float] = ()
) -> list[AheadSpan]:
    """Where something is so, in ascending order.

    Args:
        is_ahead: of values, shape (n,), whether it is so at each.
        low: the least value that is looked at, above 0.
        high: the greatest.
        also: values that are points of the grid besides.
    """
    count = 1 + math.ceil(_POINTS * math.log10(high / low))
    grid = np.union1d(np.geomspace(low, high, count), list(also))
    ahead = is_ahead(grid)
    edges = [0.0] if ahead[0] else []
    changes = np.flatnonzero(ahead[1:] != ahead[:-1])
    edges += [_change(is_ahead, float(grid[at]), float(grid[at + 1])) for at in changes]
    if ahead[-1]:
        edges.append(math.inf)
    return [AheadSpan(*pair) for pair in zip(edges[::2], edges[1::2], strict=True)]


def _change(is_ahead: Callable[[Values], Flags], low: float, high: float) -> float:
    """The first change between two values that differ."""
    for _ in range(_ROUNDS):
        grid = np.geomspace(low, high, _FINER)
        grid[0], grid[-1] = low, high
        ahead = is_ahead(grid)
        at = int(np.argmax(ahead != ahead[0])) or _FINER - 1  # rounding, where there is none
        low, high = float(grid[at - 1]), float(grid[at])
    return math.sqrt(low) * math.sqrt(high)
