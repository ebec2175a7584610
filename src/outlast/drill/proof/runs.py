"""The runs of ``outlast drill resume``, and what differs first between two of them.

A job is run in a place of its own (``workplace``), up to a step behind which its workers wait to be
ended, or up to the notice that it is given. What is compared comes from the workers' records.

Guarantees: what a run has started is ended when its ``with`` block is left, by the mark of the run
in the environment of each process, and no other process is.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Self

from outlast.config import Settings
from outlast.drill.proof.conditions import CARRIED, HASH_SEED, Conditions, write_conditions
from outlast.drill.record import WorkerRecord, WorkerRecords
from outlast.drill.rehearsal import RehearsedMachine, run_command
from outlast.drill.target import RECORDS
from outlast.drill.workplace import JobScript, Workplace
from outlast.errors import OutlastError

POLL_S: Final = 0.02
LIMIT_S: Final = 900.0  # for one start
QUIET_LIMIT_S: Final = 300.0  # without a step
_PARTS: Final = ("job", "tiers", "work", RECORDS)  # of a run's directory: what the job writes


class ScriptFailed(OutlastError, RuntimeError):
    """The script under test does not run through by itself."""


class ProvedRun:
    """One run of a script, which may be started more than once.

    Args:
        script: what is run.
        run: its directory, which is made.
        settings: the user's.
        workers: how many.
        environ: the user's.
    """

    def __init__(
        self,
        script: JobScript,
        run: Path,
        *,
        settings: Settings,
        workers: int,
        environ: Mapping[str, str],
    ) -> None:
        self.place = Workplace(run, settings)
        self.run = self.place.run
        self.workers = workers
        self._environ = self.place.environ(environ)
        self._records = WorkerRecords(self.run)
        self._machine = RehearsedMachine(
            0, run_command(self.place, script, workers), self._environ, self.place, None
        )
        self._began_s = self._moved_s = self._began_t = 0.0
        self._has_notice = False
        self._seen_steps = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def start(self, conditions: Conditions) -> None:
        """Start it, or start it again in its place."""
        write_conditions(self.run, conditions)
        self._began_t, self._has_notice = time.time(), False
        self._environ.pop("PYTHONHASHSEED", None)
        if HASH_SEED in conditions.changes:
            self._environ["PYTHONHASHSEED"] = "0"
        self._machine.start()
        self._machine.start_if_wanted()
        self._began_s = self._moved_s = time.monotonic()
        self._seen_steps = -1

    def poll(self) -> bool:
        """Whether the start is over: the job has ended, or its workers wait behind the last step.

        Raises:
            ScriptFailed: nothing comes from it any more.
        """
        is_over = self._machine.agent is None
        done = self.steps()
        now_s = time.monotonic()
        if done != self._seen_steps:
            self._seen_steps, self._moved_s = done, now_s
        if self._is_held() and not is_over:
            self.end()
            return True
        if not is_over and not self._has_notice and any(one.is_due for one in self._newest()):
            self._has_notice = True
            self._machine.ask_to_end()  # as a platform's notice that is a signal
        is_late = now_s - self._moved_s > QUIET_LIMIT_S or now_s - self._began_s > LIMIT_S
        if is_late and not is_over:
            self.end()
            raise ScriptFailed(
                f"no step for {now_s - self._moved_s:.0f} s, and so the run was ended; its output "
                f"is in {self.place.log}"
            )
        return is_over

    @property
    def exit_code(self) -> int | None:
        """Of the newest start; negative, a signal, where it was ended behind its last step."""
        self._machine.ended()
        return self._machine.exit_codes[-1] if self._machine.exit_codes else None

    def steps(self) -> int:
        """Steps that every worker of the newest attempt has completed; 0 ahead of that."""
        newest = self._newest()
        if len(newest) < self.workers:
            return 0
        return min(one.steps[-1].step if one.steps else 0 for one in newest)

    def _newest(self) -> list[WorkerRecord]:
        records = [one for one in self.records() if one.begun.t >= self._began_t]
        attempt = max((one.begun.attempt for one in records), default=0)
        return [one for one in records if one.begun.attempt == attempt]

    def _is_held(self) -> bool:
        newest = self._newest()
        return len(newest) >= self.workers and all(one.is_held for one in newest)

    def records(self) -> list[WorkerRecord]:
        """What its workers have recorded until now."""
        return self._records.look()

    def end(self) -> None:
        """End all of its processes; nothing happens where none is left."""
        self._machine.kill()

    # --- started again from one moment, as often as wanted ------------------------------------

    def keep(self) -> None:
        """Keep what the job has left behind, for :meth:`rewind`."""
        for name in _PARTS:
            if (self.run / name).exists():
                shutil.copytree(self.run / name, self.run / "kept" / name, symlinks=True)

    def rewind(self) -> None:
        """Back to what was kept; what was recorded since is gone, too."""
        for name in _PARTS:
            shutil.rmtree(self.run / name, ignore_errors=True)
            if (self.run / "kept" / name).exists():
                shutil.copytree(self.run / "kept" / name, self.run / name, symlinks=True)
        self._records = WorkerRecords(self.run)
        self._seen_steps = -1

    def bring(self, other: ProvedRun) -> None:
        """Take over what another run has kept of the values that its script's names reach."""
        for path in other.run.glob(f"*.{CARRIED}"):
            shutil.copy2(path, self.run / path.name)

    def output(self, lines: int = 12) -> str:
        """The end of what it said."""
        text = self.place.log.read_text(errors="replace").splitlines()
        return "\n".join(text[-lines:])


def complete(runs: list[ProvedRun], told: Callable[[list[ProvedRun]], None]) -> None:
    """Wait until each of them is over; ``told`` is called meanwhile."""
    left = list(runs)
    while left:
        left = [run for run in left if not run.poll()]
        told(runs)
        time.sleep(POLL_S)
