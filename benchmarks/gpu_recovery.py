"""Kills and a hang of workers on one GPU, with NCCL: how soon they are back, and with which bits.

Jobs (``tests/real/scripts/gpu_train.py``) under ``outlast run``, of one worker and of four that
share the GPU. Killed: SIGKILL to the newest worker. A hang: a kernel that does not end, with the
sum of gradients waiting behind it. Measured until rank 0 ends a step that it had not done before,
and until all have; the weights at the end are compared with those of a run that nothing happened
to. Of four, NCCL speaks over sockets (see ``ranks.py``), and the GPU gives each of them its time:
that makes steps, and the way back into them, slower than on four GPUs.

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
from typing import Any, Final, NamedTuple

from bench.tables import cell, emit, machine, markdown
from outlast.ledger.file import read_events

SCRIPT: Final = Path(__file__).parents[1] / "tests" / "real" / "scripts" / "gpu_train.py"
STEPS: Final = 60
AT: Final = 30
JOB_S: Final = 90.0
POLL_S: Final = 0.01


class Case(NamedTuple):
    """What happens to a job.

    Attributes:
        happens: does it, and measures.
        workers: how many there are.
        in_process: whether the others go on in their processes.
        more: arguments of the script.
    """

    happens: Callable[[Run], dict[str, Any]]
    workers: int = 1
    in_process: bool = False
    more: tuple[str, ...] = ()


class Run:
    """One job from its start to its end.

    Args:
        place: an empty directory.
        device: where it computes.
        case: what happens to it.
    """

    def __init__(self, place: Path, device: str, case: Case) -> None:
        self.directory, self.records = place / "job", place / "records"
        self.workers = case.workers
        self.records.mkdir()
        script = [str(SCRIPT), str(self.records), str(STEPS), *case.more]
        launch = ["run", "--nproc-per-node", str(case.workers), "--dir", str(self.directory)]
        self._log = (place / "log").open("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "outlast", *launch, *script],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                "OUTLAST_NOTICE_PLATFORM": "none",
                "OUTLAST_WORKERS_IN_PROCESS": str(case.in_process).lower(),
                "TEST_DEVICE": device,
            },
        )

    def lines(self, rank: int = 0) -> list[dict[str, Any]]:
        """A line for each step that was done."""
        file = self.records / f"steps-{rank}.jsonl"
        whole = file.read_text().rpartition("\n")[0] if file.exists() else ""
        return [json.loads(line) for line in whole.splitlines()]

    def wait_for(self, step: int, rank: int = 0, attempt: int = 1) -> dict[str, Any]:
        """The first line of this step or of a later one, made in this attempt or in a later one."""
        until_s = time.monotonic() + JOB_S
        while True:
            is_over = self._process.poll() is not None or time.monotonic() > until_s
            found = [
                line
                for line in self.lines(rank)
                if line["step"] >= step and line["attempt"] >= attempt
            ]
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
        finals = [self.records / f"final-{rank}.json" for rank in range(self.workers)]
        return " ".join(str(json.loads(one.read_text())["hash"]) for one in finals)

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
    """Its newest worker gets SIGKILL."""
    line = run.wait_for(AT, run.workers - 1)
    os.kill(line["pid"], signal.SIGKILL)
    killed_t = time.time()
    run.wait_for(1, attempt=2)
    found = back(run, killed_t)
    return {"named_s": None, **found, "hash": run.end(), "events": told(run, killed_t, found)}


def hung(run: Run) -> dict[str, Any]:
    """Its worker hangs by itself."""
    last_t = run.wait_for(AT - 1)["t"]
    digest = run.end()
    (hang,) = [event for event in read_events(run.directory) if event.event == "hang"]
    return {"named_s": hang.t - last_t, **back(run, last_t), "hash": digest}


def told(run: Run, since_t: float, found: dict[str, float]) -> list[str]:
    """What the ledger has of it, each with its seconds since then: what the time is made of."""
    until_s = found["all_s"]
    after = [(event, event.t - since_t) for event in read_events(run.directory)]
    return [f"{seconds:.3f} {event.event}" for event, seconds in after if 0 <= seconds <= until_s]


def back(run: Run, since_t: float) -> dict[str, float]:
    """Seconds until rank 0 has ended a step that it had not done before, and until all have."""
    took = []
    for rank in range(run.workers):
        before = max(line["step"] for line in run.lines(rank) if line["attempt"] == 1)
        took.append(run.wait_for(before + 1, rank, attempt=2)["t"] - since_t)
    return {"back_s": took[0], "all_s": max(took)}


def one(case: Case, device: str) -> dict[str, Any]:
    """A job of its own."""
    with tempfile.TemporaryDirectory(prefix="outlast-gpu-") as place:
        run = Run(Path(place), device, case)
        try:
            return case.happens(run)
        finally:
            run.close()


CASES: Final = {
    "killed": Case(killed),
    "hung": Case(hung, more=("--hang-at", str(AT))),
    "one of four killed": Case(killed, workers=4),
    "one of four killed, in the process": Case(killed, workers=4, in_process=True),
}


def main() -> None:
    """Measure, print one JSON object and the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0", choices=("cuda:0", "cpu"))
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--cases", default=";".join(CASES), help="of: " + "; ".join(CASES))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ended from outside, it ends its job
    chosen = {name: CASES[name] for name in options.cases.split(";")}
    sizes = {case.workers for case in chosen.values()}
    wanted = {size: one(Case(undisturbed, size), options.device)["hash"] for size in sorted(sizes)}
    found: dict[str, list[dict[str, Any]]] = {}
    for _ in range(options.runs):
        for name, case in chosen.items():
            print(f"{name} …", file=sys.stderr, flush=True)
            found.setdefault(name, []).append(one(case, options.device))
    rows = []
    for name, runs in found.items():
        named = [run["named_s"] for run in runs if run["named_s"] is not None]
        is_same = all(run["hash"] == wanted[CASES[name].workers] for run in runs)
        times = [cell([run[which] for run in runs], 2) for which in ("back_s", "all_s")]
        rows.append([name, cell(named, 2), *times, "yes" if is_same else "NO"])
    head = ["worker", "named after, s", "next new step after, s", "of all workers, s", "same bits"]
    emit(
        {"benchmark": "gpu_recovery", "machine": machine(), "options": vars(options), **found},
        [markdown(head, rows)],
    )


if __name__ == "__main__":
    main()
