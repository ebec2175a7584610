"""How long a large ledger takes to be read, folded and reported, and what of it is slow.

A ledger is written as a job of months writes it: attempts with samples, snapshots, commits and
copies to a slower tier, each ended by a kill, a hang or a drain. Reported: seconds to read it, to
fold it into goodput, to compute the facts of a report, and of ``outlast report`` as a user runs it;
of each the clock's seconds and the CPU's, which on a busy machine are fewer.

    python benchmarks/ledger_scale.py [--events 1000000] [--attempts 200] [--profile]
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outlast.checkpoint.catalog import open_job
from outlast.config import load
from outlast.ledger.events import Event, encode
from outlast.ledger.file import FILE_NAME, read_events
from outlast.ledger.goodput import goodput
from outlast.report.facts import facts

SAMPLE_S = 30.0
SAVE_EACH = 10  # samples
WORKERS, MACHINES = 64, 8


def events(total: int, attempts: int) -> Iterator[Event]:
    """A job's ledger, about so long."""
    t, step, committed = 1.7e9, 0, 0
    each = max(total // attempts, 20)

    def event(name: str, attempt: int, rank: int | None = None, **fields: Any) -> Event:
        return Event(
            t=t, mono=t - 1e9, job="j", attempt=attempt, node="n0", rank=rank, event=name,
            fields=fields,
        )  # fmt: skip

    hosts = {f"n{index}": WORKERS // MACHINES for index in range(MACHINES)}
    yield event("job_started", 0, command="outlast run", versions={}, pid=1, age_s=2.0)
    for attempt in range(1, attempts + 1):
        t += 5
        yield event("attempt_formed", attempt, world_size=WORKERS, nodes=MACHINES, hosts=hosts)
        t += 20
        step = committed
        yield event("resumed", attempt, 0, step=step, source="from local", building_s=4.0)
        written = 3
        while written < each - 4:
            for _ in range(SAVE_EACH):
                t, step = t + SAMPLE_S, step + 30
                spent = {"stalled_s": 0.01, "data_s": 0.5, "script_s": 0.0}
                yield event(
                    "step", attempt, 0, step=step, seconds=SAMPLE_S, **spent,
                    scalars={"loss": 2.0},
                )  # fmt: skip
            yield event("snapshot", attempt, 0, step=step, blocked_s=0.01, bytes=1 << 30)
            t, committed = t + 2, step
            where = {"step": step, "bytes": 1 << 30}
            yield event("commit", attempt, 0, **where, durable_s=2.0, tier="local")
            yield event("tier_copied", attempt, None, **where, seconds=9.0, tier="shared")
            written += SAVE_EACH + 3
        t += 10
        kind = ("worker_lost", "hang", "drained")[attempt % 3]
        if kind == "drained":
            yield event("drain_agreed", attempt, 0, step=step, reason="notice")
            yield event("drained", attempt, 0, step=step, committed=True)
            yield event("job_finished", attempt, exit_code=75, reason="", copying_s=0.5)
            t += 600
            yield event("job_started", attempt, command="outlast run", pid=1, age_s=2.0)
        else:
            yield event(kind, attempt, 1, step=step, beat_t=t - 9, kind="killed")
            yield event("restart", attempt, reason="lost", restarts=attempt)
    yield event("job_finished", attempts, exit_code=0, reason="", copying_s=0.1)


def timed(act: Any) -> tuple[dict[str, float], Any]:
    """Seconds, and what came of it."""
    since_s, before_s = time.perf_counter(), cpu_s()
    found = act()
    spent = {"wall_s": time.perf_counter() - since_s, "cpu_s": cpu_s() - before_s}
    return {name: round(seconds, 2) for name, seconds in spent.items()}, found


def cpu_s() -> float:
    """Seconds of the CPU, of this process and of those that it has waited for."""
    return sum(os.times()[:4])


def main() -> None:
    """Measure; one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--attempts", type=int, default=200)
    parser.add_argument("--profile", action="store_true", help="what is slow in the facts")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        open_job(place, load({"dir": directory}))
        with (place / FILE_NAME).open("wb") as file:
            file.writelines(encode(event) for event in events(options.events, options.attempts))
        read_s, ledger = timed(lambda: list(read_events(place)))
        fold_s, split = timed(lambda: goodput(ledger))
        facts_s, _ = timed(lambda: facts(ledger))
        if options.profile:
            profile = cProfile.Profile()
            profile.runcall(facts, ledger)
            pstats.Stats(profile, stream=sys.stderr).sort_stats("cumulative").print_stats(30)
        report = [sys.executable, "-m", "outlast", "report", directory]
        report_s, _ = timed(lambda: subprocess.run(report, check=True, capture_output=True))
        print(
            json.dumps(
                {
                    "num_events": len(ledger),
                    "num_attempts": split.attempts,
                    "ledger_mb": round((place / FILE_NAME).stat().st_size / 1e6, 1),
                    "read": read_s,
                    "fold": fold_s,
                    "facts": facts_s,
                    "report_command": report_s,
                },
                indent=1,
            )
        )


if __name__ == "__main__":
    main()
