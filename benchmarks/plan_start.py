"""How long ``outlast plan`` takes from start to answer, beside a bare interpreter and click alone.

    python benchmarks/plan_start.py [--runs 20]

Prints the median and the slowest of each, in milliseconds.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time

CASES = {
    "python -c pass": ("-c", "pass"),
    "import click": ("-c", "import click"),
    "outlast plan": ("-m", "outlast", "plan"),
    "outlast plan interval": (
        *("-m", "outlast", "plan", "interval"),
        *("--gpus", "4096", "--rate", "0.5%/gpu-day", "--checkpoint", "1min"),
    ),
    "outlast plan ... --tier": (
        *("-m", "outlast", "plan", "interval", "--tier", "9s,7.78e-6/s,9s"),
        *("--tier", "50s,5.19e-7/s,50s", "--tier", "438s,3e-8/s,438s"),
    ),
    "outlast plan spot": (
        *("-m", "outlast", "plan", "spot", "--rate", "2/h", "--checkpoint", "3min"),
        *("--spot", "0.7", "--on-demand", "1"),
    ),
    "outlast plan modes": (
        *("-m", "outlast", "plan", "modes", "--params", "1B", "--step", "1s"),
        *("--link", "10Gbit/s", "--replicas", "8", "--rate", "0.5/h", "--checkpoint", "20s"),
    ),
    "outlast plan deadline": (
        *("-m", "outlast", "plan", "deadline", "--work", "48h", "--deadline", "70h"),
        *("--rate", "0.2/h", "--away", "1h", "--spot", "0.3", "--on-demand", "1"),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    runs = parser.parse_args().runs
    taken: dict[str, list[float]] = {name: [] for name in CASES}
    with tempfile.TemporaryDirectory() as nowhere:  # no job, so that none is measured
        for _ in range(runs):  # by turns, so that a busy moment hits all alike
            for name, arguments in CASES.items():
                start = time.perf_counter()
                subprocess.run(
                    (sys.executable, *arguments), check=True, cwd=nowhere, stdout=subprocess.DEVNULL
                )
                taken[name].append(1000 * (time.perf_counter() - start))
    for name, times in taken.items():
        print(f"{name:<24} median {statistics.median(times):4.0f} ms  slowest {max(times):4.0f} ms")


if __name__ == "__main__":
    main()
