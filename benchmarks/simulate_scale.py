"""Time and memory of ``outlast simulate`` for 131,072 accelerators, 60 days, 1,000 replications.

    python benchmarks/simulate_scale.py [--runs 3]

Each run is the command itself, on one core, from its start to its answer; its own statement of the
operating system gives processor seconds and the most memory that it had. Fails above 30 s or 1 GB.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time

COMMAND = (
    *("-m", "outlast", "simulate", "--gpus", "131072", "--days", "60", "--rate", "llama-3"),
    *("--checkpoint", "5s", "--restore", "3min", "--replications", "1000"),
    *("--policy", "auto", "--policy", "exact", "--json"),
)
MOST_S, MOST_BYTES = 30.0, 1e9
ONE_CORE = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    runs = parser.parse_args().runs
    core = min(os.sched_getaffinity(0))
    taken: list[tuple[float, float, float]] = []
    with tempfile.TemporaryDirectory() as nowhere:
        for _ in range(runs):
            start = time.perf_counter()
            with subprocess.Popen(
                ("taskset", "-c", str(core), sys.executable, *COMMAND),
                cwd=nowhere,
                stdout=subprocess.DEVNULL,
                env={**os.environ, **ONE_CORE},
            ) as process:
                _, status, usage = os.wait4(process.pid, 0)
                process.returncode = os.waitstatus_to_exitcode(status)
            if process.returncode:
                print("the command failed")
                return 1
            wall_s = time.perf_counter() - start
            taken.append((wall_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024))
    wall_s, busy_s, most_bytes = (statistics.median(column) for column in zip(*taken, strict=True))
    print(
        f"two policies, {runs} runs: median {wall_s:.1f} s, {busy_s:.1f} s of one core; "
        f"{most_bytes / 1e6:.0f} MB at the most"
    )
    is_within = max(one[0] for one in taken) < MOST_S and most_bytes < MOST_BYTES
    print("within 30 s and 1 GB" if is_within else "NOT within 30 s and 1 GB")
    return 0 if is_within else 1


if __name__ == "__main__":
    sys.exit(main())
