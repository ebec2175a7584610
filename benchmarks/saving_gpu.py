"""What saves of a state in a GPU's memory cost, and how soon it is back: for a machine with CUDA.

At least 10 GB of fp32 weights and AdamW moments on the device; otherwise as ``saving.py`` and
``restoring.py``, whose docstrings and those of ``bench/measure.py`` say what is measured. Beside
Outlast: ``dcp.async_save`` with pinned, cached staging memory and copies that do not block, staged
while the caller waits or in the background, written by a thread or by a process.

The loop synchronises with the device before the optimizer and at the end of each step, in every
mode alike: ``blocked_s`` is time during which the device, too, had nothing to do. A copy that the
device makes beside the computation shows in ``step_x`` and ``lost_s``.

Limits, in the same run: the device's copy into pinned memory and back (one buffer of 1 GiB, by
events on the device), which no snapshot and no restore can beat; and the disk (``limits.py``).

    python benchmarks/saving_gpu.py [--rotations 3] [--parts saves] [--quick]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

from bench.gpu_modes import GPU_MODES
from bench.rotation import TurnFailed, Turns, directory
from bench.tables import Requirements, cell, column, emit, machine, markdown, median
from bench.training import num_bytes, width_for
from restoring import MODES as RESTORES
from restoring import Restores, take

COLUMNS: Final = {
    "blocked_s": "blocked, s",
    "durable_s": "durable after, s",
    "lost_s": "training time lost, s",
    "step_x": "step meanwhile, x",
}
BUFFER_BYTES: Final = 1 << 30
SAVES: Final = ("outlast", *GPU_MODES, "nothing")


def main() -> None:
    """Measure, print one JSON object and the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=float, default=11_000.0, help="size of the state, MB")
    parser.add_argument("--tokens", type=int, default=2048, help="per step, at most 2048")
    parser.add_argument("--rotations", type=int, default=3)
    parser.add_argument("--saves", type=int, default=2, help="timed in each turn")
    parser.add_argument("--parts", default="saves,restores")
    parser.add_argument("--modes", default=";".join(SAVES), help="of saves, separated by ;")
    parser.add_argument("--restores", default=";".join(RESTORES), help="separated by ;")
    parser.add_argument("--dir", type=Path, help="where to write: a directory on the disk meant")
    parser.add_argument("--quick", action="store_true", help="a small smoke run")
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="workers' own output")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing measured")
        return
    if options.quick:
        options.mb, options.rotations, options.saves = 500.0, 1, 1
    place = options.dir or Path(tempfile.gettempdir())
    described = {**machine(place), "gpu": torch.cuda.get_device_name()}
    given = {
        "width": width_for(options.mb),
        "tokens": options.tokens,
        "threads": 1,
        "undisturbed": 6,
        "device": "cuda",
    }
    parts, ways = options.parts.split(","), options.restores.split(";")
    copies: dict[str, list[float]] = {}
    found: dict[str, dict[str, Any]] = {}
    tables = []
    with options.log.open("a") as log, directory(place) as path:
        restores = Restores(path, given, log, ways)
        if "saves" in parts:
            copies = pinned_copies()
            turns = Turns(place=place, options=given, saves=options.saves, memory=False, log=log)
            found = turns.run(options.modes.split(";"), options.rotations)
            tables += [saves_table(found), limits_table(copies, num_bytes(given["width"]))]
        if "restores" in parts:
            restore(restores, ways, options.rotations)
            tables.append(restores_table(restores, ways))
    required = requirements(found, restores)
    result: dict[str, Any] = {
        "benchmark": "saving_gpu",
        "machine": described,
        "bytes": num_bytes(given["width"]),
        "options": given,
        "modes": found,
        "restores": restores.samples,
        "failed": restores.failed,
        "pinned_copies_gb_per_s": copies,
        "requirements": required.rows,
    }
    emit(result, [*tables, required.table()])


def pinned_copies(repeats: int = 7) -> dict[str, list[float]]:
    """GB/s from the device into pinned memory and back, by the device's own clock."""
    on_device = torch.empty(BUFFER_BYTES, dtype=torch.uint8, device="cuda").random_()
    pinned = torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)
    found: dict[str, list[float]] = {"device to host": [], "host to device": []}
    for repeat in range(repeats):
        for name, to, source in (
            ("device to host", pinned, on_device),
            ("host to device", on_device, pinned),
        ):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            to.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            if repeat:  # the first is for the driver
                found[name].append(BUFFER_BYTES / begin.elapsed_time(end) / 1e6)
    return found


def restore(restores: Restores, ways: Sequence[str], rotations: int) -> None:
    """Every way to read in turn; what fails is noted."""
    try:
        restores.prepare()
    except TurnFailed as error:
        restores.failed = dict.fromkeys(ways, str(error))
    for rotation in range(rotations):
        for mode in ways:
            if mode not in restores.failed:
                print(f"restore {rotation + 1}: {mode}", file=sys.stderr, flush=True)
                take(restores, mode)


def saves_table(found: dict[str, dict[str, Any]]) -> str:
    """One row for each way to save."""
    rows = []
    for mode, result in found.items():
        cells = [cell(column(result["samples"], key)) for key in COLUMNS]
        rows.append([mode, *cells, result["failed"]])
    return markdown(["mode", *COLUMNS.values(), ""], rows)


def restores_table(restores: Restores, ways: Sequence[str]) -> str:
    """Seconds, cold and warm."""
    rows = []
    for mode in ways:
        samples = [restores.samples.get(f"{mode}, {cache}", []) for cache in ("cold", "warm")]
        cells = [cell(column(each, "restore_s")) for each in samples]
        rows.append([mode, *cells, restores.failed.get(mode, "")])
    return markdown(["restore", "cold, s", "warm, s", ""], rows)


def limits_table(copies: dict[str, list[float]], size: int) -> str:
    """What a copy of the whole state takes at least."""
    rows = [
        [name, cell(values, 1), f"{size / statistics.median(values) / 1e9:.3f}"]
        for name, values in copies.items()
    ]
    return markdown(["pinned copy", "GB/s", "of this state, s"], rows)


def requirements(found: dict[str, dict[str, Any]], restores: Restores) -> Requirements:
    """Outlast beside each of the others."""

    def of(mode: str, key: str) -> float | None:
        return median(found.get(mode, {}).get("samples", []), key)

    def back(mode: str) -> float | None:
        return median(restores.samples.get(f"{mode}, cold", []), "restore_s")

    required = Requirements()
    for mode in GPU_MODES:
        for key in ("blocked_s", "durable_s", "lost_s"):
            required.at_most(f"{key} beside {mode}", of("outlast", key), 1.0, of(mode, key))
    required.at_most("cold restore beside dcp.load", back("outlast"), 1.0, back("dcp.load"))
    return required


if __name__ == "__main__":
    main()
