"""The first of a job under test in each worker: what it does is recorded, then its script runs.

    outlast run … -m outlast.drill.inside [-m] SCRIPT [ARGUMENT…]

with ``OUTLAST_DRILL`` in the environment: the run's directory. The script runs as ``outlast run``
would run it by itself: it is the main module, with its own arguments and search path, and no frame
of ours is in its tracebacks. Processes that it spawns, as loaders do, import it without this module
and record nothing; those that it forks stop to record.

Nothing heavy is imported ahead of the script, which may set what torch reads when it is imported:
what is done to torch is done behind its own import of it.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from outlast.attempt.early import when_imported
from outlast.config import DRILL_VARIABLE
from outlast.drill.proof.conditions import Conditions, read_conditions
from outlast.errors import ConfigError
from outlast.launch import worker

STARTS_SCRIPTS: Final = True


def main() -> None:
    """Run the script that ``sys.argv`` names behind this module, and record what it does."""
    if len(sys.argv) < 2 or (sys.argv[1] == "-m" and len(sys.argv) < 3):
        raise ConfigError("outlast.drill.inside is given a script; start it by: outlast drill")
    as_module = sys.argv[1] == "-m"
    del sys.argv[: 2 if as_module else 1]
    watch = start(Path(os.environ[DRILL_VARIABLE])) if os.environ.get(DRILL_VARIABLE) else None
    if as_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        worker.run_script(sys.argv[0])
    if watch is not None:
        watch.ended()


class ScriptWatch:
    """Has the recorder begin once there is something to record.

    Args:
        run: the run's directory.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._recorder: Any = None
        self._asked = read_conditions(run)
        self._early: list[tuple[str, str]] = []  # what was noted before there was a record
        if self._asked.changes:
            from outlast.drill.proof.still import hold_still

            hold_still(self._asked.changes, self._note)

    def torch_is_here(self, _: ModuleType) -> None:
        """The script has imported torch."""
        from outlast.drill.recorder import Recorder

        self._recorder = Recorder(self._run)
        self._recorder.open()
        for told in self._early:
            self._recorder.note(*told)
        if self._asked != Conditions():
            self._recorder.attend(self._asked)
        _once("outlast.training.session", self._sessions_are_here)

    def _sessions_are_here(self, module: ModuleType) -> None:
        self._recorder.follow(module.Session)

    def _note(self, what: str, where: str) -> None:
        if self._recorder is None:
            self._early.append((what, where))
        else:
            self._recorder.note(what, where)

    def ended(self) -> None:
        """The script came to its end by itself."""
        if self._recorder is not None:
            self._recorder.ended()


def start(run: Path) -> ScriptWatch:
    """Record what this process does, from the moment on that it imports torch."""
    watch = ScriptWatch(run)
    _once("torch", watch.torch_is_here)
    return watch


def _once(name: str, then: Callable[[ModuleType], None]) -> None:
    if name in sys.modules:
        then(sys.modules[name])
    else:
        when_imported(name, then)


if __name__ == "__main__":
    main()
