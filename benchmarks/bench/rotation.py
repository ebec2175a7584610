"""Ways to save taking turns: A B C A B C, each turn in a process of its own.

One worker is alive at a time, so that no mode pays for the memory, the caches or the threads of
another. A turn builds the state, takes saves that do not count (memory is allocated then), then
the saves that are timed, and one more during which memory is sampled and nothing is timed. The
directory is emptied and the disk idle before the next turn begins.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

from bench import processes

PACKAGE: Final = Path(__file__).resolve().parent.parent
ANSWER_S: Final = 600.0


# Saves of each turn that do not count: one, in which memory is allocated. Outlast writes over the
# file of a checkpoint that retention has let go: with keep=1 there is one from the third save on,
# and all but the first saves of a real job are of that kind.
WARM: Final = {"outlast": 3}


def python_path(first: Path) -> str:
    """Where a process of ours finds modules: there, and where this one does."""
    return os.pathsep.join(filter(None, (str(first), os.environ.get("PYTHONPATH"))))


class TurnFailed(Exception):
    """A worker said why it could not go on, or died."""


@dataclass
class Turns:
    """How to take turns.

    Attributes:
        place: a directory on the disk that is measured.
        options: what each worker is given: width, tokens, threads, undisturbed.
        saves: how many are timed in each turn.
        memory: whether to sample memory in one more.
        log: where the workers' own output goes.
        interpreters: mode → its interpreter, where it is not this one.
        module: what a worker runs.
        required: modes without which the rest need not run.
    """

    place: Path
    options: Mapping[str, Any]
    saves: int
    memory: bool
    log: IO[str]
    interpreters: Mapping[str, str] = field(default_factory=dict)
    module: str = "bench.worker"
    required: Sequence[str] = ()

    def run(self, modes: Sequence[str], rotations: int) -> dict[str, dict[str, Any]]:
        """Every mode ``rotations`` times, in turn; mode → samples, or why there are none."""
        found: dict[str, dict[str, Any]] = {
            mode: {"samples": [], "memory_extra": [], "notes": "", "failed": ""} for mode in modes
        }
        for rotation in range(rotations):
            for mode in modes:
                if found[mode]["failed"]:
                    continue
                print(f"turn {rotation + 1}/{rotations}: {mode}", file=sys.stderr, flush=True)
                try:
                    self._turn(mode, found[mode])
                except TurnFailed as error:
                    found[mode]["failed"] = str(error)
                    print(f"  failed: {error}", file=sys.stderr, flush=True)
                    if mode in self.required:
                        return found
        return found

    def _turn(self, mode: str, found: dict[str, Any]) -> None:
        with (
            directory(self.place) as path,
            Worker(
                self.module,
                {**self.options, "mode": mode, "directory": str(path)},
                self.interpreters.get(mode, sys.executable),
                self.log,
            ) as worker,
        ):
            size = worker.answer()["state_bytes"]
            level = processes.held_bytes(worker.mark)
            found["notes"] = worker.ask("begin")["notes"]
            for _ in range(WARM.get(mode, 1)):
                worker.ask("save")
            found["samples"] += [worker.ask("save") for _ in range(self.saves)]
            if self.memory:
                peak = processes.Peak(worker.mark)
                worker.ask("save")
                found["memory_extra"].append((peak.stop() - level) / size)
            found["state_bytes"] = size
            worker.ask("end")


class Worker:
    """A process that answers a line of JSON to each line; with all that it started, it ends here.

    Args:
        module: what it runs.
        options: given to it as JSON.
        interpreter: its Python.
        log: where its own output goes.
    """

    def __init__(
        self, module: str, options: Mapping[str, Any], interpreter: str, log: IO[str]
    ) -> None:
        self.mark = uuid.uuid4().hex
        found = {processes.MARK: self.mark, "PYTHONPATH": python_path(PACKAGE)}
        environment = {**os.environ, **found}
        self.process = subprocess.Popen(
            [interpreter, "-m", module, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
        )
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, name="answers", daemon=True).start()

    def __enter__(self) -> Worker:
        # Stopped from outside, the run still ends its workers and removes their gigabytes.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
        processes.kill(self.mark)
        self.process.wait(30)

    def ask(self, command: str) -> dict[str, Any]:
        """Give a command and wait for the answer."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(command + "\n")
            self.process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """The next answer.

        Raises:
            TurnFailed: it reports an error, died, or says nothing.
        """
        try:
            line = self._answers.get(timeout=ANSWER_S)
        except queue.Empty:
            processes.kill(self.mark)
            raise TurnFailed(f"no answer within {ANSWER_S:.0f} s") from None
        if not line:
            raise TurnFailed("the worker died; its output is in the log")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            processes.kill(self.mark)
            raise TurnFailed(answer["error"])
        return answer

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._answers.put(line)
        self._answers.put("")


@contextlib.contextmanager
def directory(place: Path) -> Iterator[Path]:
    """A fresh directory in ``place``; it is gone from the disk too when the block ends."""
    place.mkdir(parents=True, exist_ok=True)
    path = Path(tempfile.mkdtemp(prefix="outlast-bench-", dir=place))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.sync()
