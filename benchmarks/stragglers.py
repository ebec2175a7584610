"""Slow ranks of real workers: who was named, after how many steps, and who else was blamed.

Each run is ``outlast run`` with four gloo workers whose devices are emulated by sleeping (20 ms a
step, some noise), one of which becomes slow at step 60. From the ledger: whether the slow rank was
named, by the right cause, how many steps after the first slow one, and whether another rank was.
The last rows are healthy jobs of 2,000 steps.

    python benchmarks/stragglers.py [--seeds 20] [--healthy 2]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from outlast.ledger.file import read_events

SCRIPT = Path(__file__).resolve().parent.parent / "tests/real/stragglers/pace_script.py"
ONSET, STEPS, BURST = 60, 130, 12
WORKERS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--healthy", type=int, default=2)
    options = parser.parse_args()
    rows = []
    for cause in ("compute", "loader", "burst"):
        for factor in (1.2, 1.5, 4.0):
            found = [one_run(seed, cause, factor) for seed in range(options.seeds)]
            rows.append(row(cause, factor, found))
            print(json.dumps(rows[-1]), flush=True)
    for seed in range(options.healthy):
        events = train("--noise", 0.1, "--seed", 1000 + seed, steps=2000)
        print(json.dumps({"healthy": seed, "steps": 2000, "named": len(events)}), flush=True)


def one_run(seed: int, cause: str, factor: float) -> dict[str, Any]:
    """One job with one slow rank."""
    slow = seed % WORKERS
    kind = "loader" if cause == "loader" else "compute"
    last = ONSET + BURST - 1 if cause == "burst" else 10 * STEPS
    events = train("--seed", seed, "--slow", slow, kind, factor, ONSET, last, steps=STEPS)
    named = [one for one in events if not one["over"] or one["cause"] == "burst"]
    right = [one for one in named if one.rank == slow and one["cause"] == cause]
    return {
        "steps": min((one["step"] - ONSET + 1 for one in right), default=None),
        "others": sum(one.rank != slow for one in named),
    }


def row(cause: str, factor: float, found: list[dict[str, Any]]) -> dict[str, Any]:
    """One line of the table."""
    steps = sorted(one["steps"] for one in found if one["steps"] is not None)
    return {
        "cause": cause,
        "factor": factor,
        "runs": len(found),
        "named": len(steps),
        "steps_median": steps[len(steps) // 2] if steps else None,
        "steps_max": steps[-1] if steps else None,
        "others_blamed": sum(one["others"] for one in found),
    }


def train(*arguments: object, steps: int) -> list[Any]:
    """Run a job; what its ledger says of slow ranks."""
    with tempfile.TemporaryDirectory() as place:
        job, records = Path(place, "job"), Path(place, "records")
        records.mkdir()
        words = ["run", "--nproc-per-node", WORKERS, "--dir", job, SCRIPT, records, steps]
        subprocess.run(
            [sys.executable, "-m", "outlast", *map(str, (*words, *arguments))],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        return [event for event in read_events(job) if event.event == "straggler"]


if __name__ == "__main__":
    main()
