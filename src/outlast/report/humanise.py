"""Numbers as a person says them: ``2.1 s``, ``4 min 10 s``, ``1.3 GB``, ``3 steps``.

Rounded first and put into units afterwards, so that 59.97 s is a minute and never ``60.0 s``.
"""

from __future__ import annotations

import datetime
from typing import Final

_BYTE_UNITS: Final = ("B", "kB", "MB", "GB", "TB", "PB", "EB")


def seconds(value: float) -> str:
    """A span of time, in two units at most: ``350 ms``, ``12.3 s``, ``1 h 02 min``, ``2 d 03 h``.

    Args:
        value: seconds; a negative span keeps its sign.
    """
    if value < 0:
        return f"-{seconds(-value)}"
    milliseconds = round(value * 1000)
    if milliseconds < 1000:
        return f"{milliseconds} ms" if milliseconds else "0 s"
    if round(value, 1) < 60:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(value / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(value / 3600)
    return f"{hours // 24:,} d {hours % 24:02d} h"


def size(value: float) -> str:
    """A number of bytes in decimal units, as disks and clouds count: ``512 B``, ``1.3 GB``."""
    if round(value) < 1000:
        return f"{round(value)} B"
    for unit in _BYTE_UNITS[1:-1]:
        value /= 1000
        if round(value, 1) < 1000:
            return f"{value:.1f} {unit}"
    return f"{value / 1000:,.1f} {_BYTE_UNITS[-1]}"


def count(value: int, singular: str, plural: str | None = None) -> str:
    """A number of things: ``no steps``, ``1 step``, ``12,000 steps``.

    Args:
        value: how many.
        singular: the word for one.
        plural: the word for several; ``singular`` with an s unless given.
    """
    noun = singular if value == 1 else (plural or f"{singular}s")
    return f"{value:,} {noun}" if value else f"no {noun}"


def clock(t: float) -> str:
    """The time of day of a time since the epoch: ``03:12:44 UTC``; dashes if no clock shows it."""
    try:
        return datetime.datetime.fromtimestamp(t, datetime.UTC).strftime("%H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return "--:--:-- UTC"


def day(t: float) -> str:
    """The day of a time since the epoch: ``2026-11-22``; dashes if no calendar has it."""
    try:
        return datetime.datetime.fromtimestamp(t, datetime.UTC).strftime("%Y-%m-%d")
    except (OverflowError, ValueError, OSError):
        return "----------"


def percents(values: list[float]) -> list[float]:
    """Shares in percent with one decimal, which add up to exactly 100.0 as shown.

    Each is rounded down, and the tenths that are missing go to those that lost most by it
    (largest remainder). All zeros stay zeros.
    """
    total = sum(values)
    if not total > 0:
        return [0.0] * len(values)
    exact = [value / total * 1000 for value in values]
    tenths = [int(share) for share in exact]
    by_loss = sorted(range(len(values)), key=lambda i: tenths[i] - exact[i])
    for i in by_loss[: max(0, 1000 - sum(tenths))]:
        tenths[i] += 1
    return [tenth / 10 for tenth in tenths]
