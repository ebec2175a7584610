"""A kill and a hang of a worker on one GPU, with NCCL: how soon it is back, and with which bits.

A job of one worker (``tests/real/scripts/gpu_train.py``) under ``outlast run``. Killed: SIGKILL to
the worker. A hang: a kernel that does not end, with the sum of gradients waiting behind it. Both
are measured until the end of the first step that was not done before, and the weights at the end
are compared with those of a run that nothing happened to.

    python benchmarks/gpu_recovery.py [--device cpu] [--runs 1]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from bench.tables import cell, emit, machine, markdown
from outlast.ledger.file import read_events

SCRIPT: Final = Path(__file__).parents[1] / "tests" / "real" / "scripts" / "gpu_train.py"
STEPS: Final = 60
AT: Final = 30
JOB_S: Final = 90.0
POLL_S: Final = 0.01


class Run:
    """One job from its start to its end.

    Args:
        place: an empty directory.
        device: where it computes.
        more: arguments of the script.
    """

    def __init__(self, place: Path, device: str, *more: str) -> None:
        self.directory, self.records = place / "job", place / "records"
        self.records.mkdir()
        script = [str(SCRIPT), str(self.records), str(STEPS), "--device", device, *more]
        launch = ["run", "--nproc-per-node", "1", "--dir", str(self.directory)]
        self._log = (place / "log").open("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "outlast", *launch, *script],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OUTLAST_NOTICE_PLATFORM": "none"},
        )

    def lines(self) -> list[dict[str, Any]]:
        """A line for each step that was done."""
        file = self.records / "steps.jsonl"
        whole = file.read_text().rpartition("\n")[0] if file.exists() else ""
        return [json.loads(line) for line in whole.splitlines()]

    def wait_for(self, step: int) -> dict[str, Any]:
        """The line of this step."""
        until_s = time.monotonic() + JOB_S
        while True:
            is_over = self._process.poll() is not None or time.monotonic() > until_s
            found = [line for line in self.lines() if line["step"] == step]
            if found:
                return found[0]
            if is_over:
                break
            time.sleep(POLL_S)
        raise RuntimeError(f"step {step} was not reached: {self.said()}")

    def end(self) -> str:
        """The weights' digest, at the job's end."""
        try:
            code = self._process.wait(JOB_S)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"the job did not end: {self.said()}") from None
        if code:
            raise RuntimeError(f"the job ended with {code}: {self.said()}")
        return str(json.loads((self.records / "final.json").read_text())["hash"])

    def close(self) -> None:
        """Whatever became of it, it is gone."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._log.close()

    def said(self) -> str:
        """The last lines of what it said."""
        self._log.flush()
        self._log.seek(0)
        return " / ".join(self._log.read().splitlines()[-5:])


def undisturbed(run: Run) -> dict[str, Any]:
    """Nothing happens."""
    return {"hash": run.end()}


def killed(run: Run) -> dict[str, Any]:
    """Its worker gets SIGKILL."""
    line = run.wait_for(AT)
    os.kill(line["pid"], signal.SIGKILL)
    killed_t = time.time()
    return {"named_s": None, **back(run, killed_t), "hash": run.end()}


def hung(run: Run) -> dict[str, Any]:
    """Its worker hangs by itself."""
    last_t = run.wait_for(AT - 1)["t"]
    digest = run.end()
    (hang,) = [event for event in read_events(run.directory) if event.event == "hang"]
    return {"named_s": hang.t - last_t, **back(run, last_t), "hash": digest}


def back(run: Run, since_t: float) -> dict[str, float]:
    """Seconds until the first step that was not done before."""
    before = max(line["step"] for line in run.lines() if line["t"] <= since_t)
    return {"back_s": run.wait_for(before + 1)["t"] - since_t}


def one(happens: Callable[[Run], dict[str, Any]], device: str, *more: str) -> dict[str, Any]:
    """A job of its own."""
    with tempfile.TemporaryDirectory(prefix="outlast-gpu-") as place:
        run = Run(Path(place), device, *more)
        try:
            return happens(run)
        finally:
            run.close()


def main() -> None:
    """Measure, print one JSON object and the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--runs", type=int, default=1)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ended from outside, it ends its job
    wanted = one(undisturbed, options.device)["hash"]
    found: dict[str, list[dict[str, Any]]] = {}
    for _ in range(options.runs):
        for name, happens, more in (
            ("killed", killed, ()),
            ("hung", hung, ("--hang-at", str(AT))),
        ):
            print(f"{name} …", file=sys.stderr, flush=True)
            found.setdefault(name, []).append(one(happens, options.device, *more))
    rows = []
    for name, runs in found.items():
        named = [run["named_s"] for run in runs if run["named_s"] is not None]
        is_same = all(run["hash"] == wanted for run in runs)
        back_s = cell([run["back_s"] for run in runs], 2)
        rows.append([name, cell(named, 2), back_s, "yes" if is_same else "NO"])
    emit(
        {"benchmark": "gpu_recovery", "machine": machine(), "options": vars(options), **found},
        [markdown(["worker", "named after, s", "next new step after, s", "same bits"], rows)],
    )


if __name__ == "__main__":
    main()
