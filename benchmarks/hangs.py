"""How long until a hang is named, and from there until the next step is done, for each kind of it.

Jobs of two workers (and of ``--step-s`` seconds a step) hang once, each in its own way; the job is
that of the tests. *Named after* is from the last sign of progress to the ledger's ``hang``;
*allowed* is 3 s and twice the longest recent step; *next step* is from ``hang`` to the end of the
first new step. Last, what watching costs while nothing hangs: the processor time of the watcher's
process over the wall time, and of the pulse thread in a worker.

    python benchmarks/hangs.py [--kinds stop,loop,…] [--runs 3] [--step-s 0.02]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from bench.tables import cell, markdown
from outlast.attempt.beat import BEATS_VARIABLE
from outlast.health import pulse
from outlast.ledger.file import read_events

SCRIPT = Path(__file__).parents[1] / "tests" / "real" / "hangs" / "hanging.py"
KINDS = ("stop", "loop", "hold", "lock", "read", "vfork", "skip")
AT = 60


def one(kind: str, step_s: float) -> dict[str, Any]:
    """One job that hangs in its step 60."""
    with tempfile.TemporaryDirectory() as place:
        directory, records = Path(place) / "job", Path(place) / "records"
        records.mkdir()
        subprocess.run(
            [
                *(sys.executable, "-m", "outlast", "run", "--nproc-per-node", "2"),
                *("--dir", str(directory), str(SCRIPT), str(records), str(AT + 20)),
                *(kind, "1", str(AT), "--pause", str(step_s)),
            ],
            check=True,
            capture_output=True,
            timeout=300,
            env={**os.environ, "OUTLAST_NOTICE_PLATFORM": "none", "OMP_NUM_THREADS": "1"},
        )
        events = list(read_events(directory))
        (hang,) = [event for event in events if event.event == "hang"]
        lines = (records / "steps-1.jsonl").read_text().splitlines()
        done = [json.loads(line) for line in lines]
        back_t = min(line["done_t"] for line in done if line["done_t"] > hang.t)
        first_t = min(
            line["done_t"] for line in done if line["step"] >= AT and line["done_t"] > hang.t
        )
        return {
            "named_s": hang.t - hang["beat_t"],
            "allowed_s": 3 + 2 * hang["longest_s"],
            "again_s": back_t - hang.t,
            "next_s": first_t - hang.t,
            "sentence": hang["sentence"],
        }


def cost(seconds: float) -> tuple[float, float]:
    """Percent of a core: the watcher of a calm job, and the pulse of this process."""
    with tempfile.TemporaryDirectory() as place:
        records = Path(place) / "records"
        records.mkdir()
        job = subprocess.Popen(
            [
                *(sys.executable, "-m", "outlast", "run", "--nproc-per-node", "2"),
                *("--dir", f"{place}/job", str(SCRIPT), str(records), "1000000", "calm", "1"),
                *("1", "--pause", "0.02"),
            ],
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OUTLAST_NOTICE_PLATFORM": "none", "OMP_NUM_THREADS": "1"},
        )
        try:
            while not (records / "steps-1.jsonl").exists():
                time.sleep(0.1)
            time.sleep(2)
            below = psutil.Process(job.pid).children()
            watcher = next(one for one in below if "outlast.health.watcher" in one.cmdline())
            watched = _used(watcher, seconds)
        finally:
            job.terminate()
            job.wait(60)
    with tempfile.TemporaryDirectory() as place:
        os.environ[BEATS_VARIABLE] = place
        pulse.start()
        thread = next(one for one in threading.enumerate() if one.name == "outlast-pulse")
        clock = time.pthread_getcpuclockid(int(thread.ident or 0))
        begun = time.clock_gettime(clock)
        time.sleep(seconds)
        return watched, 100 * (time.clock_gettime(clock) - begun) / seconds


def _used(process: psutil.Process, seconds: float) -> float:
    before = process.cpu_times()
    time.sleep(seconds)
    after = process.cpu_times()
    return 100 * (after.user + after.system - before.user - before.system) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--step-s", type=float, default=0.02)
    parser.add_argument("--cost-s", type=float, default=20.0)
    options = parser.parse_args()
    rows = []
    for kind in options.kinds.split(","):
        found = [one(kind, options.step_s) for _ in range(options.runs)]
        print(f"{kind}: {found[0]['sentence']}", file=sys.stderr, flush=True)
        columns = ("named_s", "allowed_s", "again_s", "next_s")
        rows.append([kind, *(cell([run[name] for run in found], 2) for name in columns)])
    header = ["hang", "named after s", "allowed s", "first step s", "first new step s"]
    print(markdown(header, rows))
    if options.cost_s:
        watcher, thread = cost(options.cost_s)
        print(f"\nwatcher: {watcher:.2f} % of a core; pulse: {thread:.3f} % of a core")


if __name__ == "__main__":
    main()
