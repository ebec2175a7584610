"""What a step costs more where workers go on in their processes: the same job with and without it.

Jobs of ``--workers`` under DDP take turns, with ``workers.in_process`` on and off, each of
``--steps`` padded steps of ``--step-ms``. Reported for each setting: the median over its jobs of
the median seconds from one batch to the next, on the slowest rank; their difference and ratio.

    python benchmarks/inprocess_overhead.py [--workers 2] [--step-ms 50] [--turns 6] [--steps 200]

``--gpu``: one worker with NCCL, whose steps are those of a transformer on the GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from bench.launchers import ROOT
from bench.rotation import directory, python_path
from bench.tables import Requirements, emit, machine, markdown

SCRIPTS: Final = Path(__file__).with_name("bench")
WARM_UP: Final = 20  # steps that are not counted
MORE_MS, RATIO = 0.2, 1.01


def main() -> None:
    """Measure, print one JSON object and the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    result: dict[str, Any] = {"benchmark": "inprocess_overhead", "machine": machine(options.dir)}
    found: dict[str, list[float]] = {"false": [], "true": []}
    for turn in range(options.turns):
        for setting, medians in found.items():
            print(f"turn {turn + 1}/{options.turns}: in process {setting}", file=sys.stderr)
            medians.append(one_job(options, setting))
    off, on = (statistics.median(found[setting]) for setting in ("false", "true"))
    result |= {"step_s": found, "more_s": on - off, "ratio": on / off}
    rows = [
        [name, f"{statistics.median(one) * 1e3:.3f}", f"{min(one) * 1e3:.3f}–{max(one) * 1e3:.3f}"]
        for name, one in (("off", found["false"]), ("on", found["true"]))
    ]
    table = markdown(["workers.in_process", "ms a step, median of jobs", "of all jobs"], rows)
    required = Requirements()
    required.at_most("milliseconds a step more", (on - off) * 1e3, MORE_MS, 1.0)
    required.at_most("a step with it beside one without", on, RATIO, off)
    result["requirements"] = required.rows
    emit(result, [table, required.table()])


def one_job(options: argparse.Namespace, setting: str) -> float:
    """The median of a job's steps, on its slowest rank."""
    with directory(options.dir) as place:
        (place / "records").mkdir()
        steps, workers = str(options.steps + WARM_UP), str(1 if options.gpu else options.workers)
        name, more = ("gpu_steps", []) if options.gpu else ("padded_train", [str(options.step_ms)])
        script = [str(SCRIPTS / f"{name}.py"), str(place / "records"), steps, *more]
        command = [
            *(sys.executable, "-m", "outlast", "run", "--dir", str(place / "job")),
            *("--nproc-per-node", workers, *script),
        ]
        env = {**os.environ, "OUTLAST_WORKERS_IN_PROCESS": setting, "OMP_NUM_THREADS": "1"}
        env |= {"OUTLAST_NOTICE_PLATFORM": "none", "PYTHONPATH": python_path(ROOT / "benchmarks")}
        subprocess.run(command, env=env, check=True, capture_output=True)
        ranks = [json.loads(one.read_text()) for one in (place / "records").iterdir()]
    return float(max(statistics.median(one[WARM_UP:]) for one in ranks))


if __name__ == "__main__":
    main()
