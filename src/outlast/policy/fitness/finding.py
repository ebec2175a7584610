"""One finding of the doctor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

Status = Literal["ok", "warning", "failed", "skipped"]


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one check has found.

    Attributes:
        name: of the check, such as "storage local".
        status: "failed" means that the job should not start.
        seen: what was seen, in one line, with its figures.
        todo: what to do about it; "" where nothing is to be done.
        figures: the numbers, each named with its unit last.
    """

    name: str
    status: Status
    seen: str
    todo: str = ""
    figures: Mapping[str, float] = {}


def failures(findings: Iterable[CheckResult]) -> list[CheckResult]:
    """Those for which the job should not start."""
    return [one for one in findings if one.status == "failed"]


def gigabytes(num_bytes: float) -> str:
    """Bytes for people, in decimal units: ``640 GB``, ``1.5 GB``, ``12 MB``."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if num_bytes >= unit:
            amount = num_bytes / unit
            return f"{amount:.0f} {name}" if amount >= 100 else f"{amount:.3g} {name}"
    return f"{num_bytes / 1e3:.3g} kB"


def seconds(value: float) -> str:
    """A span for people: ``0.4 ms``, ``38 s``."""
    if value < 0.1:
        return f"{value * 1e3:.2g} ms"
    return f"{value:.2f} s" if value < 10 else f"{value:.0f} s"
