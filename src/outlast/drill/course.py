"""A drill from its first run to its last: undisturbed, then once for each fault, then the grades.

Each run begins with nothing, so that a fault is graded by itself, and is ended when every rank has
completed the drill's last step. Each fault waits for its moment in a thread, strikes once, and is
healed when its time is over, ahead of a start that the job asks for, and at the end of the run.

Guarantees: the same seed draws the same faults at the same moments. Where a run differs, the script
is run undisturbed once more before that is held against the resume. Whatever happens, each job that
was started has ended when this returns, and every fault is healed.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from outlast.config import Settings
from outlast.drill.compare import History, first_difference
from outlast.drill.faults import Planned, Struck
from outlast.drill.grade import Grade, RunEnd, grade
from outlast.drill.rehearsal import Rehearsal
from outlast.drill.workplace import Script
from outlast.errors import ConfigError

MARK: Final = ".outlast-drill"
STUCK_S: Final = 120.0  # without a step, in a run that nothing disturbs
RECOVERY_S: Final = 180.0  # for a disturbed one, besides what the undisturbed one took
TAIL_LINES: Final = 6


class DrillSetup(NamedTuple):
    """What is to be done.

    Attributes:
        script: what is drilled.
        root: directory of all runs.
        steps: how far each run goes.
        workers: on each machine.
        machines: of each run.
        settings: the user's.
        environ: the user's.
    """

    script: Script
    root: Path
    steps: int
    workers: int
    machines: int
    settings: Settings
    environ: Mapping[str, str]


class DrillListener:
    """Told what happens; the command draws it."""

    def begun(self, label: str, number: int, of: int) -> None:
        """A run begins."""

    def progress(self, label: str, step: int, steps: int) -> None:
        """A run went on."""

    def struck(self, struck: Struck) -> None:
        """A fault has struck."""

    def ended(self, label: str, seconds: float) -> None:
        """A run is over."""

    def graded(self, grade: Grade) -> None:
        """A fault has its grade."""


class DrillResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a drill found.

    Attributes:
        grades: one for each fault, in order.
        undisturbed_s: what the undisturbed run took.
        steps: how far each run went.
        has_session: whether the script has one.
        commits: checkpoints that the undisturbed run had committed.
        differs_itself: how the script differs from itself undisturbed; "" where it does not, or
            nobody had to look.
        directory: of all runs.
        seconds: of the whole.
    """

    grades: list[Grade]
    undisturbed_s: float
    steps: int
    has_session: bool
    commits: int
    differs_itself: str
    directory: str
    seconds: float

    @property
    def holds(self) -> bool:
        """Whether everything that was promised held."""
        return all(one.holds for one in self.grades)


class Drill:
    """One drill.

    Args:
        setup: what is to be done.
        listener: is told.
    """

    def __init__(self, setup: DrillSetup, listener: DrillListener) -> None:
        self._setup = setup
        self._listener = listener
        self._num_runs, self._run = 0, 0

    def conduct(self, plan: Sequence[Callable[[int, int], Planned]]) -> DrillResult:
        """Run it all.

        Args:
            plan: makes each fault, told between which steps it may strike.

        Raises:
            ConfigError: the script does not come to the first step by itself.
        """
        since_s = time.monotonic()
        prepare(self._setup.root)
        self._num_runs = 1 + len(plan)
        undisturbed = self._undisturbed("undisturbed")
        reached = min(self._setup.steps, History(undisturbed.records).reached())
        commits = [event["step"] for event in undisturbed.events if event.event == "commit"]
        first = min((step for step in commits if step < reached * 0.6), default=reached // 4)
        grades = []
        for number, make in enumerate(plan, start=1):
            planned = make(first + 1, max(first + 2, int(reached * 0.75)))
            grades.append(self._disturbed(number, planned, undisturbed, reached))
            self._listener.graded(grades[-1])
        differs_itself = ""
        if any(one.differs for one in grades):
            again = History(self._undisturbed("undisturbed-again").records)
            found = first_difference(History(undisturbed.records), again, reached)
            differs_itself = "" if found is None else found.words
        return DrillResult(
            grades=grades,
            undisturbed_s=undisturbed.seconds,
            steps=reached,
            has_session=undisturbed.has_session,
            commits=len(set(commits)),
            differs_itself=differs_itself,
            directory=str(self._setup.root),
            seconds=time.monotonic() - since_s,
        )

    def _rehearsal(self, label: str) -> Rehearsal:
        setup = self._setup
        return Rehearsal(
            setup.script,
            setup.root / label,
            settings=setup.settings,
            workers=setup.workers,
            num_machines=setup.machines,
            environ=setup.environ,
        )

    def _undisturbed(self, label: str) -> RunEnd:
        self._begin(label)
        with self._rehearsal(label) as job:
            since_s = time.monotonic()
            job.start()
            end = self._to_the_end(job, label, since_s, STUCK_S)
        if not end.records or not History(end.records).reached():
            lines = end.output.read_text(errors="replace").strip().splitlines()
            said = "\n  ".join(lines[-TAIL_LINES:])
            raise ConfigError(
                "the script does not come to the end of its first step by itself, undisturbed; "
                f"it said:\n  {said}\nAll of it: {end.output}"
            )
        return end

    def _disturbed(self, number: int, planned: Planned, undisturbed: RunEnd, reached: int) -> Grade:
        fault = planned.fault
        label = f"{number:02}-{fault.name}"
        self._begin(label)
        with self._rehearsal(label) as job:
            if why_not := fault.why_not(job):
                return Grade(fault=fault.name, why_not=why_not)
            since_s = time.monotonic()
            with _Striker(planned, job, self._listener) as striker:
                job.start()
                limit_s = RECOVERY_S + 2 * undisturbed.seconds
                end = self._to_the_end(job, label, since_s, limit_s, striker)
        machines = self._setup.machines
        price = self._setup.settings.price_spot or self._setup.settings.price_on_demand
        return grade(
            fault.name,
            fault.promise,
            striker.struck,
            run=end,
            undisturbed=undisturbed,
            steps=reached,
            price=None if price is None else price * machines,
        )

    def _begin(self, label: str) -> None:
        self._run += 1
        self._num_runs = max(self._num_runs, self._run)
        self._listener.begun(label, self._run, self._num_runs)

    def _to_the_end(
        self,
        job: Rehearsal,
        label: str,
        since_s: float,
        stuck_s: float,
        striker: _Striker | None = None,
    ) -> RunEnd:
        """Watch a run until every rank has come far enough, it has ended, or nothing moves."""
        steps, newest, moved_s = self._setup.steps, 0, time.monotonic()
        job.before_restart = striker.heal if striker is not None else (lambda: None)

        def is_done() -> bool:
            nonlocal newest, moved_s
            step = job.completed()
            if step != newest:
                newest, moved_s = step, time.monotonic()
                self._listener.progress(label, step, steps)
            stands = striker is None or striker.is_over
            is_far = job.all_completed() >= steps and stands
            return is_far or time.monotonic() - moved_s > stuck_s

        job.wait(is_done, limit_s=float("inf"))
        was_stopped = not job.is_over()
        if striker is not None:
            striker.stop()
        codes = [code for machine in job.machines for code in machine.exit_codes]
        job.stop()
        seconds = time.monotonic() - since_s
        self._listener.ended(label, seconds)
        return RunEnd(
            records=job.look(),
            events=job.events(),
            exit_codes=codes,
            was_stopped=was_stopped,
            seconds=seconds,
            directory=job.directory,
            output=job.place.log,
        )


class _Striker:
    """Waits for one fault's moment, in a thread; a context manager.

    Attributes:
        struck: what it did; None before.
        is_over: whether it has struck and was healed, or never will strike.
    """

    def __init__(self, planned: Planned, job: Rehearsal, listener: DrillListener) -> None:
        self.struck: Struck | None = None
        self.is_over = False
        self._planned, self._job, self._listener = planned, job, listener
        self._ends = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._strike, name="drill-fault", daemon=True)

    def __enter__(self) -> _Striker:
        self._planned.fault.prepare(self._job)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """The run is over."""
        self._ends.set()
        if self._thread.is_alive():
            self._thread.join()
        self.heal()

    def heal(self) -> None:
        """Undo it, if it has struck."""
        with self._lock, contextlib.suppress(ProcessLookupError):
            if self.struck is not None:
                self._planned.fault.heal(self._job)

    def _strike(self) -> None:
        try:
            if not self._planned.wait(self._job, self._ends.is_set):
                return
            struck = self._planned.fault.inject(self._job)
            with self._lock:
                self.struck = struck
            if struck is not None:
                self._listener.struck(struck)
                self._ends.wait(self._planned.fault.lasts_s)
                self.heal()
        finally:
            self.is_over = True


def prepare(root: Path) -> None:
    """Make the directory of a drill; one of an earlier drill is emptied.

    Raises:
        ConfigError: it holds something else.
    """
    if root.exists() and any(root.iterdir()):
        if not (root / MARK).exists():
            raise ConfigError(f"{root} is not empty and no drill made it; give another with --dir")
        shutil.rmtree(root)
    try:
        root.mkdir(parents=True, exist_ok=True)
        (root / MARK).touch()
    except OSError as error:
        raise ConfigError(
            f"{root} cannot be written: {error.strerror}; give another with --dir"
        ) from None
