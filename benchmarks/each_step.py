"""What it costs to keep each step in two machines' memory (``checkpoint.each_step``).

A job on three machines (network namespaces that share this machine's cores), one worker on each,
whose model FSDP2 divides; one copy of each part. Blocks of steps alternate, with and without it,
in one and the same job. ``--mb`` is each rank's part of the state, in 10^6 bytes; a step takes
``--step-ms``, in which the cores are free, and what it computes. With ``--busy`` as many processes
as there are cores compute besides: none is spare.

    python benchmarks/each_step.py [--mb 16,128] [--step-ms 100] [--blocks 12] [--busy]

Reported for each size: milliseconds of a step of the slowest rank without and with it (medians),
the difference, its quartiles over pairs of neighbouring blocks, and the load of the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from bench.launchers import ROOT
from bench.rotation import directory, python_path
from bench.tables import emit, machine, markdown
from machine_network import Network

SCRIPT: Final = Path(__file__).with_name("bench") / "each_step_train.py"
NUM_MACHINES: Final = 3
BLOCK: Final = 10  # steps
SETTLING: Final = 2  # of a block, which are not counted
BUSY: Final = "while True: pass"


def main() -> None:
    """Measure, print one JSON object and the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", default="16,128")
    parser.add_argument("--step-ms", type=float, default=100.0)
    parser.add_argument("--blocks", type=int, default=12, help="pairs of them")
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    result = {"benchmark": "each_step", "machine": machine(options.dir), "busy": options.busy}
    with busy() if options.busy else contextlib.nullcontext():
        rows = [one_size(options, float(size)) for size in options.mb.split(",")]
    table = markdown(
        [
            *("a rank's part, MB", "step without, ms", "with, ms", "more, ms (quartiles)"),
            *("MB/s", "memory of a machine, MB", "load"),
        ],
        (
            [
                *(f"{row['mb']:.1f}", f"{row['without_ms']:.0f}", f"{row['with_ms']:.0f}"),
                "{1:.0f} ({0:.0f}–{2:.0f})".format(*row["more_ms"]),
                f"{row['mb'] / max(row['more_ms'][1], 0.1) * 1e3:.0f}",
                *(f"{row['memory_mb']:.0f}", f"{row['load']:.1f}"),
            ]
            for row in rows
        ),
    )
    emit({**result, "rows": rows}, [table])


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """A process for each core that has always something to do."""
    cores = len(os.sched_getaffinity(0))
    running = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(cores)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def one_size(options: argparse.Namespace, size: float) -> dict[str, Any]:
    """A job with parts of this size; the row of it."""
    steps = (2 * options.blocks + 2) * BLOCK
    with directory(options.dir) as place, Network(NUM_MACHINES) as network:
        records = place / "records"
        records.mkdir()
        env = {**os.environ, "OUTLAST_CHECKPOINT_EACH_STEP": "true", "OMP_NUM_THREADS": "1"}
        env |= {"OUTLAST_NOTICE_PLATFORM": "none", "PYTHONPATH": python_path(ROOT / "benchmarks")}
        script = [str(SCRIPT), str(records), str(size), str(options.step_ms), str(steps)]
        agents = []
        for one in network.machines:
            command = [
                *(sys.executable, "-m", "outlast", "run", "--dir", str(place / "job")),
                *("--nnodes", str(NUM_MACHINES), "--nproc-per-node", "1"),
                *("--rdzv-backend", "outlast", "--local-addr", one.address),
                *(*script, str(BLOCK)),
            ]
            agents.append(
                subprocess.Popen(
                    one.command(*command), env={**env, **one.environ}, stdout=subprocess.DEVNULL
                )
            )
        codes = [agent.wait() for agent in agents]
        if any(codes):
            raise SystemExit(f"the job of {size} MB ended with {codes}; it said why above")
        ranks = [json.loads(path.read_text()) for path in sorted(records.iterdir())]
        events = [json.loads(line) for line in (place / "job" / "ledger.jsonl").open()]
    (told, *_) = (event for event in events if event["event"] == "each_step")
    missed = [event["step"] for event in events if event["event"] == "not_kept"]
    without, kept = blocks(ranks)
    return {
        "mb": told["bytes"] / 1e6,
        "memory_mb": told["memory_bytes"] / 1e6,
        "without_ms": statistics.median(without) * 1e3,
        "with_ms": statistics.median(kept) * 1e3,
        "more_ms": statistics.quantiles(
            [(one - other) * 1e3 for one, other in zip(kept, without, strict=True)], n=4
        ),
        "not_kept": len(missed),
        "load": os.getloadavg()[0],
    }


def blocks(ranks: list[list[dict[str, Any]]]) -> tuple[list[float], list[float]]:
    """The median step of each block without it, and of each that follows, with it; in seconds."""
    slowest = [max(one["seconds"] for one in steps) for steps in zip(*ranks, strict=True)]
    found: tuple[list[float], list[float]] = ([], [])
    for start in range(2 * BLOCK, len(slowest) - BLOCK, BLOCK):  # the first pair makes ready
        is_kept = ranks[0][start]["kept"]
        found[is_kept].append(statistics.median(slowest[start + SETTLING : start + BLOCK]))
    count = min(map(len, found))
    return found[0][:count], found[1][:count]


if __name__ == "__main__":
    main()
