"""A process that trains and saves in one way; it answers a line of JSON to each line it is given.

Run by ``bench.rotation`` with this package on the path, in the interpreter of the library that is
measured. Its first line says that the state exists; commands are ``begin``, ``save`` and ``end``.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, Protocol

import torch

from bench.gpu_modes import GPU_MODES
from bench.measure import Measurement
from bench.modes import MODES
from bench.peer_modes import PEER_MODES
from bench.training import Loop, build, state_bytes


def main() -> None:
    """Answer commands until ``end``."""
    options = json.loads(sys.argv[1])
    torch.set_num_threads(options["threads"])
    serve(lambda: _Worker(options))


class Served(Protocol):
    """What answers: first ``ready``, then one of ``commands`` for each line."""

    @property
    def ready(self) -> dict[str, Any]:
        """Said once it is made."""

    @property
    def commands(self) -> Mapping[str, Callable[[], dict[str, Any]]]:
        """Command → what it does and answers."""


def serve(make: Callable[[], Served]) -> None:
    """Answer lines of standard input until ``end``, then leave at once."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not come between the answers
    warnings.filterwarnings("ignore")
    made: list[Served] = []

    def begin() -> dict[str, Any]:
        made.append(make())
        return made[0].ready

    if _answer(answers, begin):
        for line in sys.stdin:
            _answer(answers, made[0].commands[line.strip()])
            if line.strip() == "end":
                break
    sys.stdout.flush()
    os._exit(0)  # some libraries' threads and processes never end by themselves


class _Worker:
    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._model, self._optimizer = build(options["width"], options.get("device", "cpu"))
        self._loop = Loop(self._model, self._optimizer, options["tokens"])
        for _ in range(2):
            self._loop.finish(time.perf_counter())
        self.ready = {"state_bytes": state_bytes(self._model, self._optimizer)}
        self.commands = {"begin": self.begin, "save": self.save, "end": self.end}
        self._measurement: Measurement

    def begin(self) -> dict[str, Any]:
        kind = (MODES | PEER_MODES | GPU_MODES)[self._options["mode"]]
        mode = kind(self._model, self._optimizer, Path(self._options["directory"]))
        self._end = mode.end
        self._measurement = Measurement(self._loop, mode, self._options["undisturbed"])
        return {"notes": mode.notes}

    def save(self) -> dict[str, Any]:
        return self._measurement.save()

    def end(self) -> dict[str, Any]:
        self._end()
        return {}


def _answer(answers: IO[str], work: Callable[[], dict[str, Any]]) -> bool:
    """Whether there was no error."""
    try:
        answer = work()
    except BaseException as error:  # noqa: BLE001 - whatever a library does, the run goes on
        traceback.print_exc()
        answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
    answers.write(json.dumps(answer) + "\n")
    answers.flush()
    return "error" not in answer


if __name__ == "__main__":
    main()
