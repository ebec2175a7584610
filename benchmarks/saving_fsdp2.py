"""What a save of a model sharded by FSDP2 costs: Outlast beside ``dcp.async_save``.

Two ranks on this machine with gloo, 2.13 GB of DTensor weights and AdamW moments in all; real
forward, backward and AdamW in every step, one thread of torch each, so that two cores have none to
spare. The ways to save take turns in one run, each turn with processes of its own. What the numbers
are made of is said in ``bench/measure.py``; of each the worst rank's counts. All ranks agree after
each step whether the save has ended, in every mode alike.

DCP gets a process group of its own for the collectives of its thread, a stager that keeps its
memory, four writing threads or one, and asynchronous staging.

Limits: as in ``saving.py``; a step of this loop is mostly gloo's.

    python benchmarks/saving_fsdp2.py [--rotations 3] [--quick]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from bench.rotation import Turns
from bench.tables import Requirements, cell, column, emit, machine, markdown, median
from bench.training import width_for

MODES: Final = (
    "outlast",
    "dcp.async_save 4 threads",
    "dcp.async_save 1 thread",
    "dcp.async_save async staging",
    "nothing",
)
COLUMNS: Final = {
    "blocked_s": "blocked, s",
    "durable_s": "durable after, s",
    "lost_s": "training time lost, s",
    "step_x": "step meanwhile, x",
}


def main() -> None:
    """Measure, print one JSON object and the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=float, default=2128.0, help="size of the state, all ranks, MB")
    parser.add_argument("--tokens", type=int, default=16, help="per step and rank")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rotations", type=int, default=3)
    parser.add_argument("--saves", type=int, default=2, help="timed in each turn")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--dir", type=Path, help="where to write: a directory on the disk meant")
    parser.add_argument("--quick", action="store_true", help="a small smoke run")
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="workers' own output")
    options = parser.parse_args()
    if options.quick:
        options.mb, options.rotations, options.saves = 64.0, 1, 1
    modes = [mode.strip() for mode in options.modes.split(",")]
    if set(modes) - set(MODES):
        parser.error(f"unknown mode; there are {', '.join(MODES)}")
    place = options.dir or Path(tempfile.gettempdir())
    description = machine(place)
    with options.log.open("a") as log:
        turns = Turns(
            place=place,
            options={
                "width": width_for(options.mb),
                "tokens": options.tokens,
                "threads": 1,
                "world_size": options.ranks,
                "undisturbed": 6,
            },
            saves=options.saves,
            memory=False,
            log=log,
            module="bench.fsdp_worker",
            required=("outlast",),
        )
        found = turns.run(modes, options.rotations)
    failed = found.get("outlast", {}).get("failed")
    if failed:
        sys.exit(f"saving_fsdp2: outlast did not save this state: {failed}")
    required = requirements(found)
    result: dict[str, Any] = {
        "benchmark": "saving_fsdp2",
        "machine": description,
        "options": {**turns.options, "saves": options.saves},
        "modes": found,
        "requirements": required.rows,
    }
    emit(result, [table(found), required.table()])


def table(found: dict[str, dict[str, Any]]) -> str:
    """The worst rank's numbers."""
    rows = []
    for mode, result in found.items():
        cells = [cell(column(result["samples"], key)) for key in COLUMNS]
        rows.append([mode, *cells, result["failed"]])
    return markdown(["mode", *COLUMNS.values(), ""], rows)


def requirements(found: dict[str, dict[str, Any]]) -> Requirements:
    """Durable in a quarter of the time of DCP's best; steps at most 1.2 times as long meanwhile."""

    def of(mode: str, key: str) -> float | None:
        return median(found.get(mode, {}).get("samples", []), key)

    required = Requirements()
    for mode in MODES[1:-1]:
        ours, theirs = of("outlast", "durable_s"), of(mode, "durable_s")
        required.at_most(f"durable_s beside {mode}", ours, 1 / 4, theirs)
    required.at_most("steps meanwhile, beside undisturbed", of("outlast", "step_x"), 1.2, 1.0)
    return required


if __name__ == "__main__":
    main()
