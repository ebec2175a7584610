"""Numbers with units, as people write and read them.

Reading: :func:`measure` takes a plain number and one of the units that its caller names, and
nothing else: ``5 min``, ``1.5 GB/s``. The readers of settings stand on it. The questions of
``outlast plan`` take more: signs, exponents, thousands, sums such as ``1h30m``
(:mod:`outlast.cli.quantities`).

Writing: numbers are rounded first and put into units afterwards, so that 59.97 s is a minute and
never ``60.0 s``. Reports use :func:`seconds` and :func:`size`. Lines about what was measured use
:func:`short_seconds` and :func:`gigabytes`, which show fewer digits.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Mapping
from typing import Final, TypeVar

from outlast.errors import ConfigError

_T = TypeVar("_T")

_PLAIN: Final = re.compile(r"^\s*([0-9]*\.?[0-9]+)\s*([^\s0-9]*)\s*\Z")
SECONDS: Final = {  # of settings and of flags; in the plural too
    **dict.fromkeys(("ms", "millisecond", "milliseconds"), 0.001),
    **dict.fromkeys(("s", "sec", "second", "seconds"), 1.0),
    **dict.fromkeys(("min", "m", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hr", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86_400.0),
    **dict.fromkeys(("w", "week", "weeks"), 604_800.0),
}
_PART: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]+)\s*")
_PARTS: Final = re.compile(rf"^\s*(?:{_PART.pattern}){{2,}}\Z")
NO_UNIT: Final = "has no unit"
_RATES: Final = {"MB/s": 1e6, "GB/s": 1e9}
_BYTE_UNITS: Final = ("B", "kB", "MB", "GB", "TB", "PB", "EB")


# --- reading --------------------------------------------------------------------------------------


def reader(
    read: Callable[[object], _T | None], problem: str, *, has_unit: bool = False
) -> Callable[[object], _T]:
    """Make a reader that refuses each value of which ``read`` makes None.

    The reader raises a ConfigError that shows the value and goes on with ``problem``: what it is
    not; and what to write. Of a number without its unit (``has_unit``) it says just that.
    """

    def found(value: object) -> _T:
        result = read(value)
        if result is None:
            is_bare = has_unit and not isinstance(value, bool) and read_number(value, least=0.0)
            what_to_do = problem.partition("; ")[2]
            raise ConfigError(f"{value!r} {f'{NO_UNIT}; {what_to_do}' if is_bare else problem}")
        return result

    return found


def split(text: str) -> tuple[str, str] | None:
    """Part a plain number from its unit, which may be ""; None where the text is something else."""
    match = _PLAIN.match(text)
    return (match[1], match[2]) if match else None


def measure(text: str, units: Mapping[str, float]) -> float | None:
    """Read a number with one of ``units``, as a multiple of 1; None where it is something else."""
    number, unit = split(text) or ("", None)
    scale = None if unit is None else units.get(unit)
    return None if scale is None else float(number) * scale


def read_sum(text: str) -> float | None:
    """Read a sum of times, ``1h 30min``, as seconds; None where it is something else."""
    parts = [(float(number), SECONDS.get(unit)) for number, unit in _PART.findall(text)]
    if not _PARTS.match(text) or any(scale is None for _, scale in parts):
        return None
    return sum(number * (scale or 0.0) for number, scale in parts)


def read_whole(value: object, *, least: int, most: int | None = None) -> int | None:
    """Read a whole number from a file or a variable; None where it is not one in the range."""
    text = str(value).strip()
    if isinstance(value, bool) or not isinstance(value, int | str) or not text.isascii():
        return None
    if not text.isdigit() or len(text) > 9:
        return None
    number = int(text)
    return number if least <= number and (most is None or number <= most) else None


def read_number(value: object, *, least: float) -> float | None:
    """Read a finite number; None where it is not one from ``least`` on."""
    try:
        number = float(str(value))
    except ValueError:
        return None
    return number if least <= number < float("inf") else None


def read_share(value: object) -> float | None:
    """Read ``0.01`` or ``1%``; None where it is not above 0 and below 1."""
    text = str(value).strip()
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        return None
    return share if 0 < share < 1 else None


def read_seconds(value: object, *, least_s: float, most_s: float) -> float | None:
    """Read ``5 min`` or ``1h 30min``; None where it is not above 0, or not in the range.

    A unit is needed.
    """
    text = value.lower() if isinstance(value, str) else ""
    found = read_sum(text) or measure(text, SECONDS)
    return found if found and least_s <= found <= most_s else None


def read_rate(value: object) -> float | None:
    """Read ``200 MB/s`` as bytes a second; None where it is not at least 1 MB/s."""
    rate = measure(value, _RATES) if isinstance(value, str) else None
    return rate if rate and rate >= 1e6 else None


# --- writing --------------------------------------------------------------------------------------


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


def short_seconds(value: float, below_10: str = ".2g") -> str:
    """Write whole seconds from ten on: ``38 s``; below it with the format ``below_10``."""
    return f"{value:{'.0f' if value >= 10 else below_10}} s"


def set_seconds(value: float) -> str:
    """Write a time as a setting takes it, exactly: ``10 min``, ``90 s``, ``1.5 s``, ``200 ms``."""
    for unit in ("h", "min") if value >= 60 else ("ms",) if value < 1 else ():
        amount = value / SECONDS[unit]
        if amount == int(amount):
            return f"{amount:.0f} {unit}"
    return f"{value:.15g} s"


def set_rate(value: float) -> str:
    """Write bytes a second as a setting takes them: ``200 MB/s``, ``1.5 GB/s``."""
    unit = "GB/s" if value >= _RATES["GB/s"] else "MB/s"
    return f"{value / _RATES[unit]:.15g} {unit}"


def set_share(value: float) -> str:
    """Write a share as a setting takes it: ``1%``."""
    return f"{100 * value:.15g}%"


def size(value: float) -> str:
    """A number of bytes in decimal units, as disks and clouds count: ``512 B``, ``1.3 GB``."""
    if round(value) < 1000:
        return f"{round(value)} B"
    for unit in _BYTE_UNITS[1:-1]:
        value /= 1000
        if round(value, 1) < 1000:
            return f"{value:.1f} {unit}"
    return f"{value / 1000:,.1f} {_BYTE_UNITS[-1]}"


def gigabytes(num_bytes: float) -> str:
    """Write bytes in decimal units, three digits at most: ``640 GB``, ``1.5 GB``, ``12 MB``."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if num_bytes >= unit:
            amount = num_bytes / unit
            return f"{amount:.0f} {name}" if amount >= 100 else f"{amount:.3g} {name}"
    return f"{num_bytes / 1e3:.3g} kB"


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
    """Write the time of day of a time since the epoch: ``03:12:44 UTC``; dashes for none."""
    return _as(t, "%H:%M:%S UTC", "--:--:-- UTC")


def day(t: float) -> str:
    """Write the day of a time since the epoch: ``2026-11-22``; dashes for none."""
    return _as(t, "%Y-%m-%d", "----------")


def when(t: float) -> str:
    """Write a time since the epoch, to the second."""
    return _as(t, "%Y-%m-%d %H:%M:%S UTC", "at no time")


def _as(t: float, form: str, otherwise: str) -> str:
    try:
        return datetime.datetime.fromtimestamp(t, datetime.UTC).strftime(form)
    except (OverflowError, ValueError, OSError):
        return otherwise


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
