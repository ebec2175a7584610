"""A framework's job that is killed again and again, with Outlast and as its documentation says.

For each framework a script (``bench/framework_train.py``; for torchtitan the tests' ``titan.py``)
under ``torchrun`` that saves by the framework's own means and is started again where it was killed,
and the same script under ``outlast run`` with what Outlast adds. Workers get SIGKILL at drawn
moments, half of them where a save may be under way. Reported:

- *blocked, s a save*: in a run that nothing happens to, the median time from step to step where a
  save lies in between, less the median of the others;
- *made again*: steps that ended once more, all deaths together;
- *did not go on*: times that the job had ended for good, until its newest checkpoint was removed
  by hand (which is done here, as its owner would);
- *the same run*: whether the weights at the end are those of the framework's own undisturbed run.

    python benchmarks/framework_kills.py [--kills 10] [--frameworks lightning]
    .venv-titan/bin/python benchmarks/framework_kills.py --frameworks torchtitan
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from bench.ports import free_port
from bench.rotation import directory
from bench.tables import emit, machine, markdown

SCRIPT: Final = Path(__file__).with_name("bench") / "framework_train.py"
TITAN: Final = Path(__file__).parents[1] / "tests/real/scripts/titan.py"
FRAMEWORKS: Final = ("transformers", "lightning", "accelerate")
LIMIT_S: Final = 900.0
POLL_S: Final = 0.005


class Job:
    """One job, from its first start to its end.

    Args:
        place: an empty directory.
        framework: whose.
        ours: whether Outlast is in it.
        options: of this program.
    """

    def __init__(
        self, place: Path, framework: str, options: argparse.Namespace, *, ours: bool
    ) -> None:
        self.records = place / "records"
        self.records.mkdir(parents=True)
        self._options = options
        self._log = (place / "log").open("w+")
        self._ours = ours
        script = _script(framework, self.records, options, ours=ours)
        workers = ["--nproc-per-node", str(options.workers)]
        if ours:
            job = ["run", *workers, "--dir", str(place / "job"), *script]
            self._command = [sys.executable, "-m", "outlast", *job]
        else:
            meet = ["--master-port", str(free_port())]
            run = [sys.executable, "-m", "torch.distributed.run"]
            self._command = [*run, *workers, *meet, *script]
        self._process = self._start()
        self._killed_at = 0  # steps that had ended then
        self._is_killed = False  # and not started again

    def _start(self) -> subprocess.Popen[bytes]:
        env = {**os.environ, "OUTLAST_NOTICE_PLATFORM": "none", "OMP_NUM_THREADS": "1"}
        given: Any = {"stdout": self._log, "stderr": subprocess.STDOUT, "env": env}
        return subprocess.Popen(self._command, start_new_session=True, **given)

    def steps(self) -> list[tuple[float, int]]:
        """When each step ended, and its number, in that order."""
        file = self.records / "steps.jsonl"
        whole = file.read_text().rpartition("\n")[0] if file.exists() else ""
        return [(t, step) for t, step in map(json.loads, whole.splitlines())]

    def go_on(self, until_step: int) -> int:
        """Wait until a step at least this far has ended; how often it had to be started by hand."""
        by_hand, until_s = 0, time.monotonic() + LIMIT_S
        while True:
            steps = self.steps()
            is_there = max((step for _, step in steps), default=0) >= until_step
            if is_there and len(steps) > self._killed_at:
                break
            if self._process.poll() is not None:
                by_hand += self._mend()
            if time.monotonic() > until_s:
                raise RuntimeError(f"step {until_step} was not reached: {self._tail()}")
            time.sleep(POLL_S)
        return by_hand

    def end(self) -> tuple[str, int]:
        """The hash of its weights, and how often it had to be started by hand."""
        by_hand = 0
        while self._process.wait(LIMIT_S):
            by_hand += self._mend()
        return str(json.loads((self.records / "final.json").read_text())["hash"]), by_hand

    def kill(self) -> None:
        """SIGKILL to its last worker."""
        pid = int((self.records / f"pid-{self._options.workers - 1}").read_text())
        self._killed_at, self._is_killed = len(self.steps()), True
        os.kill(pid, signal.SIGKILL)

    def _mend(self) -> int:
        """Start it again; 1 if it could not go on, and its newest checkpoint had to go."""
        if self._is_killed and not self._ours:
            self._is_killed, self._process = False, self._start()
            return 0
        own = [one for one in (self.records / "own").rglob("*") if "checkpoint" in one.name]
        newest = max(own, key=lambda one: one.stat().st_mtime, default=None)
        if self._ours or newest is None:
            raise RuntimeError(f"it ended with {self._process.returncode}: {self._tail()}")
        shutil.rmtree(newest) if newest.is_dir() else newest.unlink()
        self._process = self._start()
        return 1

    def _tail(self) -> str:
        self._log.flush()
        self._log.seek(0)
        return " / ".join(self._log.read().splitlines()[-8:])

    def close(self) -> None:
        """Whatever became of it, it is gone."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
        self._log.close()


def _script(framework: str, records: Path, options: argparse.Namespace, *, ours: bool) -> list[str]:
    if framework == "torchtitan":
        own = ["--every", "1 h"] if ours else ["--plain"]
        steps = [f"training.steps={options.steps}", f"checkpoint.interval={options.save_every}"]
        return [str(TITAN), str(records), *own, *steps]
    script = [str(SCRIPT), str(records), framework, "--steps", str(options.steps)]
    script += ["--save-every", str(options.save_every), "--width", str(options.width)]
    return [*script, "--ours"] if ours else script


def undisturbed(job: Job, save_every: int) -> dict[str, Any]:
    """What saves cost, and how it ends."""
    digest, _ = job.end()
    steps = job.steps()
    took = [(b[0] - a[0], a[1]) for a, b in itertools.pairwise(steps)][save_every:]
    saving = [seconds for seconds, step in took if step % save_every == 0]
    others = [seconds for seconds, step in took if step % save_every]
    return {
        "hash": digest,
        "step_s": statistics.median(others),
        "blocked_s": max(statistics.median(saving) - statistics.median(others), 0.0),
    }


def killed(job: Job, step_s: float, options: argparse.Namespace) -> dict[str, Any]:
    """Deaths at drawn moments: every second one where a save may be under way."""
    rng = random.Random(options.seed)
    some = sorted(rng.sample(range(2, options.steps - 1), options.kills))
    by_hand = 0
    for number, step in enumerate(some):
        at = step - step % options.save_every if number % 2 else step
        by_hand += job.go_on(max(at, 1))
        time.sleep(rng.random() * step_s)
        job.kill()
    digest, more = job.end()
    done = [step for _, step in job.steps()]
    return {"hash": digest, "again": len(done) - len(set(done)), "by_hand": by_hand + more}


def main() -> None:
    """Measure, print one JSON object and the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frameworks", default=";".join(FRAMEWORKS))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    rows = []
    with directory(Path(tempfile.gettempdir())) as place:
        for framework, ours in itertools.product(options.frameworks.split(";"), (False, True)):
            name = f"{framework}, with Outlast" if ours else framework
            samples = found[name] = {}
            for part in ("undisturbed", "killed"):
                print(f"{name}: {part} …", file=sys.stderr, flush=True)
                job = Job(place / f"{framework}-{ours}-{part}", framework, options, ours=ours)
                try:
                    samples[part] = (
                        undisturbed(job, options.save_every)
                        if part == "undisturbed"
                        else killed(job, samples["undisturbed"]["step_s"], options)
                    )
                finally:
                    job.close()
            calm, disturbed = samples["undisturbed"], samples["killed"]
            is_same = disturbed["hash"] == found[framework]["undisturbed"]["hash"]
            numbers = [disturbed["again"], disturbed["by_hand"]]
            times = [f"{calm['step_s']:.3f}", f"{calm['blocked_s']:.3f}"]
            rows.append([name, *times, *map(str, numbers), "yes" if is_same else "NO"])
    head = ["script", "a step, s", "blocked, s a save", "made again", "did not go on"]
    head.append("the same run")
    emit(
        {"benchmark": "framework_kills", "machine": machine(), "options": vars(options), **found},
        [markdown(head, rows)],
    )


if __name__ == "__main__":
    main()
