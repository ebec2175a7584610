"""What a save costs a training loop, and how soon it is durable: Outlast beside its peers.

One process trains a transformer (2.13 GB of fp32 weights and AdamW moments, 149 parameters; real
forward, backward and AdamW) and saves in one of several ways. The ways take turns in one run, each
turn in a process of its own (``bench/rotation.py``); what each number is made of and how it is
taken is said in ``bench/measure.py``; how each library is used, in ``bench/modes.py`` and
``bench/peer_modes.py``. With ``--threads 1`` a core is left over for saving; with ``--threads 2``
on two cores none is.

Memory: the peak above what the trained process held before its first save, in units of the state
(``bench/processes.py``); a copy that a library keeps between saves counts.

Limits: ``limits.py`` measures how fast this machine copies and writes; no save is durable sooner
than the disk takes the bytes. Only ratios within one run mean anything.

    python benchmarks/saving.py --peers-dir DIR [--threads 2] [--quick] [--modes outlast,torch.save]
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

from bench import peers, rotation
from bench.modes import MODES
from bench.peer_modes import PEER_MODES
from bench.tables import Requirements, cell, column, emit, machine, markdown, median
from bench.training import width_for

DEFAULT = [
    "outlast",
    "dcp.async_save 4 threads",
    "dcp.async_save 1 thread",
    "dcp.save 4 threads",
    "torch.save",
    "safetensors",
    *PEER_MODES,
    "nothing",
]
TUNED = "dcp.async_save 4 threads"  # the best-tuned of DCP's asynchronous saves on a CPU
COLUMNS = {
    "blocked_s": "blocked, s",
    "durable_s": "durable after, s",
    "lost_s": "training time lost, s",
    "step_x": "step meanwhile, x",
}


def main() -> None:
    """Measure, print one JSON object and the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=float, default=2128.0, help="size of the state, MB")
    parser.add_argument("--tokens", type=int, default=16, help="per step: the length of a step")
    parser.add_argument("--threads", type=int, default=1, help="torch's, for training")
    parser.add_argument("--rotations", type=int, default=3)
    parser.add_argument("--saves", type=int, default=2, help="timed in each turn")
    parser.add_argument("--undisturbed", type=int, default=6, help="steps before each save")
    parser.add_argument("--modes", default=",".join(DEFAULT))
    parser.add_argument("--dir", type=Path, help="where to write: a directory on the disk meant")
    parser.add_argument("--peers-dir", type=Path, help="virtual environments of other libraries")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--quick", action="store_true", help="a small smoke run")
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="workers' own output")
    options = parser.parse_args()
    if options.quick:
        options.mb, options.rotations, options.saves = 64.0, 1, 1
    place = options.dir or Path(tempfile.gettempdir())
    modes = [mode.strip() for mode in options.modes.split(",")]
    unknown = [mode for mode in modes if mode not in MODES | PEER_MODES]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(MODES | PEER_MODES)}")
    result: dict[str, Any] = {"benchmark": "saving", "machine": machine(place)}
    interpreters, unusable = find_peers(options.peers_dir, modes)
    width = width_for(options.mb)
    with options.log.open("a") as log:
        turns = rotation.Turns(
            place=place,
            options={
                "width": width,
                "tokens": options.tokens,
                "threads": options.threads,
                "undisturbed": options.undisturbed,
            },
            saves=options.saves,
            memory=not options.no_memory,
            log=log,
            interpreters=interpreters,
        )
        found = turns.run([mode for mode in modes if mode not in unusable], options.rotations)
    for mode, problem in unusable.items():
        found[mode] = {"samples": [], "memory_extra": [], "notes": "", "failed": problem}
    found = {mode: found[mode] for mode in modes}
    required = requirements(found)
    result |= {"options": {**turns.options, "saves": options.saves}, "modes": found}
    result["requirements"] = required.rows
    emit(result, [table(found), required.table()])


def find_peers(directory: Path | None, modes: list[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Interpreters of the peers among ``modes``, and why others cannot be used."""
    wanted = [mode for mode in modes if mode in PEER_MODES]
    if directory is None:
        return {}, dict.fromkeys(wanted, "not run: no --peers-dir")
    found = peers.prepare(directory, wanted)
    usable = {mode: found[mode].interpreter for mode in wanted if not found[mode].problem}
    return usable, {mode: found[mode].problem for mode in wanted if found[mode].problem}


def table(found: dict[str, dict[str, Any]]) -> str:
    """One row for each mode; a mode that failed says why."""
    rows = []
    for mode, result in found.items():
        name = f"{mode} ({result['notes']})" if result["notes"] else mode
        if result["failed"]:
            rows.append([name, result["failed"].replace("|", "/"), *[""] * len(COLUMNS)])
            continue
        cells = [cell(column(result["samples"], key)) for key in COLUMNS]
        if mode == "nothing":  # nothing is saved: what it loses is the noise
            cells[0] = cells[1] = "–"
        rows.append([name, *cells, cell(result["memory_extra"], 2)])
    return markdown(["mode", *COLUMNS.values(), "extra memory, x state"], rows)


def requirements(found: dict[str, dict[str, Any]]) -> Requirements:
    """What the engine must show beside the others."""

    def of(mode: str, key: str) -> float | None:
        return median(found.get(mode, {}).get("samples", []), key)

    required = Requirements()
    limits = {"blocked_s": 1 / 80, "durable_s": 1 / 4, "lost_s": 1 / 5}
    for key, limit in limits.items():
        required.at_most(f"{key} beside {TUNED}", of("outlast", key), limit, of(TUNED, key))
    ours = of("outlast", "durable_s")
    required.at_most("durable_s beside torch.save", ours, 1 / 6, of("torch.save", "durable_s"))
    others = [mode for mode in found if mode not in (TUNED, "outlast", "torch.save", "nothing")]
    for mode in others:
        required.at_most(f"durable_s beside {mode}", ours, 1 / 2, of(mode, "durable_s"))
    return required


if __name__ == "__main__":
    main()
