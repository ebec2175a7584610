"""Whether the ledger's split agrees with a stop-watch that is kept outside of the job.

A real job of two workers under DDP: rank 0 tells each moment on a pipe, and this process stamps it
when it comes, by its own clock. A worker is killed, one hangs, the job is drained and started
again, what the keeper writes is slow for a while (strace delays each call), and the last stretch
has slow batches, an evaluation and a second tier whose copies come last. From
these moments and the processes' starts and ends alone it is worked out how long each part took.
Agreed is what differs by less than 2 % or 0.2 s. How a loss is divided between being noticed and
being mended only the agent knows, so both are compared together. How long a step waited for a
snapshot in front of its optimizer only the session knows, so stalls are compared with the steps.

    python benchmarks/stopwatch.py [--keep DIRECTORY]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from outlast.drill.faults.storage import WRITES, attached, detach
from outlast.ledger.file import read_events
from outlast.ledger.goodput import goodput

WORKERS = 2
STEPS, KILL_AT, HANG_AT, DRAIN_AT, SLOW_AT, DATA_FROM = 270, 50, 100, 150, 170, 210
SLOW_S, CALL_S = 3.0, 0.2  # how long storage is slow, and each call of it
SCRIPT = f"""
import os, sys, time
pipe = os.open(os.environ["STOPWATCH"], os.O_WRONLY)
rank = int(os.environ["RANK"])
tell = (lambda *words: os.write(pipe, (" ".join(map(str, words)) + "\\n").encode())) if not rank \\
    else (lambda *words: None)
tell("process")
import torch
import outlast
tell("imported")
torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(600, 600) for _ in range(12)])
optimizer = torch.optim.AdamW(model.parameters())
ddp = torch.nn.parallel.DistributedDataParallel(model)
time.sleep(0.5)
tell("built")

class Batches:
    def __iter__(self):
        for number in range({STEPS}):
            tell("wants", number)
            time.sleep(0.03 if number >= {DATA_FROM} else 0)
            tell("has", number)
            yield torch.ones(2, 600)

with outlast.session(model=model, optimizer=optimizer, every="10 steps") as session:
    tell("opened")
    for batch in session.steps(Batches(), until={STEPS}):
        tell("begins", session.step, os.getpid())
        mark = os.path.join(os.environ["MARKS"], "hung")
        if session.step == {HANG_AT} and rank == 1 and not os.path.exists(mark):
            open(mark, "w").close()
            time.sleep(1000)
        ddp(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
        tell("ends", session.step + 1)
    tell("loop over")
    time.sleep(1.0)
    tell("evaluated")
tell("session over")
time.sleep(0.4)
tell("last")
"""


class Watch:
    """Stamps what comes through a pipe; acts at some steps, once."""

    def __init__(self, path: Path) -> None:
        self.seen: list[tuple[float, list[str]]] = []
        self.job: subprocess.Popen[bytes] | None = None
        self._done: set[int] = set()
        self.slowed = 0  # keepers whose storage was slow for a while
        self.leaving_s: list[float] = []
        self._path = str(path)
        os.mkfifo(path)
        # Both ends are held here: the pipe lives on while no worker does.
        self._pipe = os.open(path, os.O_RDWR)
        threading.Thread(target=self._read, name="stopwatch", daemon=True).start()

    def _read(self) -> None:
        with os.fdopen(self._pipe, "rb") as pipe:
            for line in pipe:
                words = line.decode().split()
                self.seen.append((time.time(), words))
                if words[0] == "begins":
                    self._act(int(words[1]), int(words[2]))

    def _act(self, step: int, pid: int) -> None:
        if step in self._done or step not in (KILL_AT, DRAIN_AT, SLOW_AT):
            return
        self._done.add(step)
        if step == SLOW_AT:
            threading.Thread(target=self._slow_down, name="slow", daemon=True).start()
            return
        if step == KILL_AT:
            os.kill(pid, signal.SIGKILL)
        elif self.job is not None:
            self.job.send_signal(signal.SIGTERM)
        self.seen.append((time.time(), ["struck"]))

    def _slow_down(self) -> None:
        keepers = [one.pid for one in psutil.process_iter() if self._is_keeper(one)]
        delay = f"inject={WRITES}:delay_exit={round(CALL_S * 1e6)}"
        tracers = [attached(pid, ("-e", f"trace={WRITES}", "-e", delay)) for pid in keepers]
        time.sleep(SLOW_S)
        for tracer in tracers:
            detach(tracer)
        self.slowed += len(tracers)

    def _is_keeper(self, process: psutil.Process) -> bool:
        try:
            ours = process.environ().get("STOPWATCH") == self._path
            return ours and "outlast.keeper" in process.cmdline()
        except psutil.Error:
            return False


def run(place: Path) -> tuple[Watch, list[tuple[float, float]]]:
    """The job, drained once; what was seen, and when its processes lived."""
    script, job = place / "train.py", place / "job"
    script.write_text(SCRIPT)
    (place / "outlast.toml").write_text(
        f'dir = "{job}"\n[health]\nhang = "2 s"\n'
        f'[[tier]]\nname = "local"\nurl = "{place}/local"\n'
        f'[[tier]]\nname = "shared"\nurl = "{place}/shared"\n'
    )
    watch = Watch(place / "pipe")
    environ = {**os.environ, "STOPWATCH": str(place / "pipe"), "MARKS": str(place)}
    command = [sys.executable, "-m", "outlast", "run", "--nproc-per-node", "2", str(script)]
    lives = []
    for _ in range(2):
        since_t = time.time()
        with (place / "output").open("ab") as output:
            watch.job = subprocess.Popen(
                command, cwd=place, env=environ, stdout=output, stderr=subprocess.STDOUT
            )
            watch.job.wait(timeout=300)
        # What the launcher does behind its last line cannot be in a ledger: it is told apart.
        lives.append((since_t, (job / "ledger.jsonl").stat().st_mtime))
        watch.leaving_s.append(round(time.time() - lives[-1][1], 3))
        time.sleep(2.0 if len(lives) == 1 else 0.0)
    return watch, lives


def stopped(watch: Watch, lives: list[tuple[float, float]]) -> dict[str, float]:
    """Groups of parts by the stop-watch, in seconds of the job; they add up to its life."""
    seen = sorted(watch.seen, key=lambda one: one[0])
    at = [(t, words[0] if words[0] != "loop" else "loop over") for t, words in seen]
    imported_t = next(t for t, word in at if word == "imported")
    first_t = next(t for t, word in at if word == "begins")
    opened_t = [t for t, word in at if word == "opened"]
    # From a session's opening to its loop the script has the time; at each start.
    before_s = [next(t for t, word in at if word == "wants" and t > one) - one for one in opened_t]
    data_s, steps_s, lost_s, wanted_t, between_s = 0.0, 0.0, 0.0, 0.0, 0.0
    draining_s = 0.0
    end_t, begin_t, is_down = first_t, first_t, False
    for t, word in at:
        if word == "process" and t > first_t:
            is_down = True
        elif word == "begins" and is_down:  # the first step after a loss
            if end_t < lives[0][1] <= t:  # a drain is a stall, by the fold's own definition
                draining_s += lives[0][1] - end_t
                lost_s += t - lives[1][0]
            else:
                lost_s += t - end_t
            begin_t, is_down = t, False
        elif word == "begins":  # between two steps: the wait for the batch, and the boundary
            between_s += t - end_t
            begin_t = t
        elif word == "wants" and not is_down:
            wanted_t = t
        elif word == "has" and not is_down and wanted_t > first_t:
            data_s += t - wanted_t
        elif word == "ends":
            steps_s += t - begin_t
            end_t = t
    # Behind the evaluation the session waits for the commit of its end.
    last = {word: t for t, word in at}
    ending_s = last["session"] - last["evaluated"]
    return {
        "starting": imported_t - lives[0][0],
        "building": opened_t[0] - imported_t,
        "productive, replayed, stalled": steps_s + between_s - data_s + draining_s + ending_s,
        "data": data_s,
        "detecting, restarting": lost_s - sum(before_s[1:]),
        "waiting": lives[1][0] - lives[0][1],
        "script": lives[1][1] - end_t - ending_s + sum(before_s),
    }


def compared(watch: Watch, lives: list[tuple[float, float]], job: Path) -> dict[str, Any]:
    """Each group by the stop-watch and by the ledger, and whether they agree."""
    split = goodput(read_events(job))
    by_ledger: dict[str, float] = {
        str(name): seconds / WORKERS for name, seconds in split.parts().items()
    }
    found: dict[str, Any] = {}
    for group, watched_s in stopped(watch, lives).items():
        told_s = sum(by_ledger.pop(name) for name in group.split(", "))
        apart_s = abs(told_s - watched_s)
        found[group] = {
            "watched_s": round(watched_s, 3),
            "ledger_s": round(told_s, 3),
            "agree": apart_s <= max(0.2, 0.02 * watched_s),
        }
    found["left_over_s"] = {name: round(seconds, 3) for name, seconds in by_ledger.items()}
    found["whole_s"] = {"watched": round(lives[1][1] - lives[0][0], 3), "ledger": split.wall_s}
    found["keepers_slowed"] = watch.slowed
    found["behind_the_last_line_s"] = watch.leaving_s
    found["agree"] = all(
        one["agree"] for one in found.values() if isinstance(one, dict) and "agree" in one
    )
    return found


def main() -> None:
    """Run, compare; one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=Path, help="where the run goes, to be looked at")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        place = options.keep or Path(scratch)
        place.mkdir(parents=True, exist_ok=True)
        watch, lives = run(place)
        print(json.dumps(compared(watch, lives, place / "job"), indent=1))


if __name__ == "__main__":
    main()
