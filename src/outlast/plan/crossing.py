"""Where a monotone function changes sign: bisection between logarithms.

Newton and secants were rejected: the functions here are infinite beyond some point, where only the
sign can be relied on. 200 halvings at most; a double has fewer.
"""

from __future__ import annotations

import math
from collections.abc import Callable


def crossing(function: Callable[[float], float], inside: float, outside: float) -> float:
    """The point between two positive ones at which ``function`` turns positive.

    Args:
        function: at most 0 at ``inside``, positive from some point on the way to ``outside``;
            inf is positive.
        inside: where it is not positive.
        outside: where it is; given back when it is not.
    """
    if not function(outside) > 0:
        return outside
    for _ in range(200):
        middle = math.sqrt(inside) * math.sqrt(outside)
        if middle in (inside, outside):
            break
        if function(middle) > 0:
            outside = middle
        else:
            inside = middle
    return inside
