"""Numbers as people read them: medians with their range, Markdown tables, the machine in words."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch


def cell(values: Sequence[float], digits: int = 3) -> str:
    """``median [min–max] n``; a dash without values."""
    if not values:
        return "–"
    spread = f"{statistics.median(values):.{digits}f}"
    if len(values) > 1:
        spread += f" [{min(values):.{digits}f}–{max(values):.{digits}f}]"
    return f"{spread} n={len(values)}"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "| " + " | ".join("---" for _ in header) + " |"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def median(samples: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """The median of ``key`` over the samples that have it."""
    values = column(samples, key)
    return statistics.median(values) if values else None


def column(samples: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """The values of ``key``, of the samples that have it."""
    return [float(sample[key]) for sample in samples if sample.get(key) is not None]


class Requirements:
    """What a measurement must show: each line a ratio, its limit, and whether it holds."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def at_most(self, what: str, ours: float | None, limit: float, theirs: float | None) -> None:
        """``ours`` is at most ``limit`` times ``theirs``; without either it was not measured."""
        ratio = ours / theirs if ours is not None and theirs is not None and theirs > 0 else None
        holds = None if ratio is None else ratio <= limit
        self.rows.append({"requirement": what, "limit": limit, "ratio": ratio, "holds": holds})

    def at_least(self, what: str, ours: float, limit: float, theirs: float) -> None:
        """``ours`` is at least ``limit`` times ``theirs``."""
        ratio = ours / theirs if theirs > 0 else None
        holds = None if ratio is None else ratio >= limit
        self.rows.append(
            {"requirement": what, "limit": limit, "ratio": ratio, "holds": holds, "least": True}
        )

    def table(self) -> str:
        """As Markdown."""
        words = {True: "PASS", False: "FAIL", None: "not measured"}
        return markdown(
            ["requirement", "limit", "measured", ""],
            (
                [
                    row["requirement"],
                    f"{'≥' if row.get('least') else '≤'} {row['limit']:.4g}",
                    "–" if row["ratio"] is None else f"{row['ratio']:.4g}",
                    words[row["holds"]],
                ]
                for row in self.rows
            ),
        )


def machine(directory: Path | None = None) -> dict[str, Any]:
    """What the measurements were taken on."""
    meminfo = Path("/proc/meminfo").read_text()
    cpuinfo = Path("/proc/cpuinfo").read_text()
    models = {line.split(":")[1].strip() for line in cpuinfo.splitlines() if "model name" in line}
    found: dict[str, Any] = {
        "processor": ", ".join(sorted(models)),
        "cores": os.cpu_count(),
        "memory_gb": round(int(meminfo.split()[1]) * 1024 / 1e9, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "huge_pages": _chosen("enabled"),
        "huge_pages_shmem": _chosen("shmem_enabled"),
        "load_before": os.getloadavg()[0],
    }
    if directory is not None:
        found["file_system"] = _file_system(directory)
    return found


def emit(result: Mapping[str, Any], tables: Iterable[str]) -> None:
    """One JSON object, then the tables."""
    print(json.dumps(result, indent=1))
    for table in tables:
        print(f"\n{table}", flush=True)


def _chosen(name: str) -> str:
    try:
        text = Path(f"/sys/kernel/mm/transparent_hugepage/{name}").read_text()
    except OSError:
        return "unknown"
    return text.partition("[")[2].partition("]")[0]


def _file_system(directory: Path) -> str:
    best = ("", "unknown")
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, kind, *_ = line.split()
        if directory.resolve().is_relative_to(mount) and len(mount) > len(best[0]):
            best = (mount, kind)
    return best[1]
