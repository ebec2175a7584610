"""A worker is killed: how long until the next completed step? Warm, cold, and stock torchrun.

One job at a time, the ways in turns (A B C A B C). In each turn a job of ``--workers`` on this
machine trains an unmodified DDP script (``bench/recovery_train.py``); then ``--kills`` times one
rank is killed with SIGKILL, each time another one, and the time is taken from the kill to the first
step that a worker of the next attempt has completed. A way that has not recovered after ``--limit``
seconds is counted as not recovered, and its turn ends.

    python benchmarks/recovery_local.py [--turns 5] [--kills 2] [--workers 4] [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.tables import cell, markdown

SCRIPT = Path(__file__).parent / "bench" / "recovery_train.py"
SETTLED_STEPS = 20
OUTLAST = ("-m", "outlast", "run")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--max-restarts", "100")
WAYS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "outlast run": (OUTLAST, {}),
    "outlast run, with a session": (OUTLAST, {"BENCH_SESSION": "1"}),
    "outlast run, cold": (OUTLAST, {"OUTLAST_WORKERS_WARM": "false"}),
    "torchrun, a fresh store": (TORCHRUN, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}),
    "torchrun as it comes": (TORCHRUN, {}),
}


class Turn:
    """A job, from its start to its end."""

    def __init__(self, way: str, options: argparse.Namespace) -> None:
        command, environ = WAYS[way]
        self.directory = Path(tempfile.mkdtemp(prefix="recovery-"))
        self._events = self.directory / "events.jsonl"
        self._seen: list[dict[str, Any]] = []
        self._read = 0
        self._limit_s = options.limit
        self._log = (self.directory / "log").open("wb")
        self.started_t = time.time()
        self._process = subprocess.Popen(
            [sys.executable, *command, "--nproc-per-node", str(options.workers), str(SCRIPT)],
            env={
                **os.environ,
                **environ,
                "OMP_NUM_THREADS": "1",
                "OUTLAST_DIR": str(self.directory / "job"),
                "OUTLAST_NOTICE_PLATFORM": "none",
                "BENCH_EVENTS": str(self._events),
                "BENCH_CHECKPOINT": str(self.directory / "state.pt"),
            },
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    def first_step(self) -> float | None:
        """Seconds from the command to the first completed step."""
        found = self._wait(lambda events: events[:1], 4 * self._limit_s)
        return found[0]["t"] - self.started_t if found else None

    def kill(self, rank: int, workers: int) -> float | None:
        """Seconds from the kill of ``rank`` to the next completed step; None if there was none."""
        known = len(self._seen)
        if not self._wait(lambda events: events[known + workers * SETTLED_STEPS :], self._limit_s):
            return None
        pids = {event["pid"] for event in self._seen}
        victim = next(event["pid"] for event in reversed(self._seen) if event["rank"] == rank)
        killed_t = time.time()
        os.kill(victim, signal.SIGKILL)
        found = self._wait(
            lambda events: [event for event in events if event["pid"] not in pids], self._limit_s
        )
        return found[0]["t"] - killed_t if found else None

    def end(self) -> None:
        """End everything that it has started: workers have process groups of their own."""
        for pid in {self._process.pid} | {event["pid"] for event in self._seen}:
            try:
                os.killpg(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._process.wait()
        self._log.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _wait(
        self, condition: Callable[[list[dict[str, Any]]], list[dict[str, Any]]], limit_s: float
    ) -> list[dict[str, Any]]:
        until_s = time.monotonic() + limit_s
        while time.monotonic() < until_s:
            self._look()
            found = condition(self._seen)
            if found:
                return found
            time.sleep(0.01)
        return []

    def _look(self) -> None:
        try:
            with self._events.open("rb") as file:
                file.seek(self._read)
                data = file.read()
        except FileNotFoundError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        self._seen += [json.loads(line) for line in whole.splitlines()]


def main() -> None:
    """Measure, print one JSON object and a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--limit", type=float, default=25.0)
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--quick", action="store_true", help="one turn with one kill of each")
    options = parser.parse_args()
    if options.quick:
        options.turns = options.kills = 1
    starts: dict[str, list[float | None]] = {way: [] for way in options.ways}
    kills: dict[str, list[list[float | None]]] = {way: [] for way in options.ways}
    for turn in range(options.turns):
        for way in options.ways:
            started, killed = measure(way, turn, options)
            starts[way].append(started)
            kills[way].append(killed)
            print(f"{way}: start {started}, kills {killed}", file=sys.stderr, flush=True)
    found = {way: {"start_s": starts[way], "kills_s": kills[way]} for way in options.ways}
    print(json.dumps({"workers": options.workers, "cores": os.cpu_count(), "ways": found}))
    print(table(found))


def measure(
    way: str, turn: int, options: argparse.Namespace
) -> tuple[float | None, list[float | None]]:
    """One turn: seconds to the first step, and after each kill."""
    job = Turn(way, options)
    chosen = random.Random(turn)
    killed: list[float | None] = []
    try:
        started = job.first_step()
        while started is not None and len(killed) < options.kills and None not in killed:
            killed.append(job.kill(chosen.randrange(options.workers), options.workers))
    finally:
        job.end()
    return started, killed


def table(found: dict[str, dict[str, Any]]) -> str:
    """The figures as Markdown: medians with their range, of those that recovered."""
    rows = []
    for way, figures in found.items():
        every = [one for turn in figures["kills_s"] for one in turn]
        times = [one for one in every if one is not None]
        firsts = [turn[0] for turn in figures["kills_s"] if turn and turn[0] is not None]
        starts = [one for one in figures["start_s"] if one is not None]
        recovered = f"{len(times)} of {len(every)}"
        rows.append([way, cell(starts, 1), cell(times), cell(firsts), recovered])
    header = ["", "start to first step, s", "kill to next step, s", "first kill, s", "recovered"]
    return markdown(header, rows)


if __name__ == "__main__":
    main()
