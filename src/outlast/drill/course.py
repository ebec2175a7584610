"""A drill from its first run to its last: undisturbed, then once for each fault, then the grades.

Each run begins with nothing, so that a fault is graded by itself, and is ended when every rank has
completed the drill's last step. Each fault waits for its moment in a thread, strikes once, and is
healed when its time is over, ahead of a start that the job asks for, and at the end of the run.

Guarantees: the same seed draws the same faults at the same moments. Where a run differs, the script
is run undisturbed once more before that is held against the resume. Whatever happens, each job that
was started has ended when this returns, and every fault is healed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from outlast.config import Settings
from outlast.drill.compare import RunHistory, first_difference
from outlast.drill.faults.aim import PlannedFault
from outlast.drill.faults.catalogue import Bounds
from outlast.drill.faults.fault import Struck, is_answered
from outlast.drill.grade import Grade, RunEnd, grade
from outlast.drill.rehearsal import Rehearsal
from outlast.drill.target import Target
from outlast.drill.workplace import JobScript, empty_place
from outlast.errors import ConfigError, Exit

UNDISTURBED: Final = "undisturbed"
STEPS: Final = 60
# Short steps: by then a checkpoint is committed, and how long a step may take has been learned.
TRAINED_S: Final = 8.0
STUCK_S: Final = 120.0  # without a step, in a run that nothing disturbs
FURTHER_S: Final = 2.0  # the undisturbed run, so that what is behind a late drain is compared, too
RECOVERY_S: Final = 180.0  # for a disturbed one, besides what the undisturbed one took
COMMIT_POLL_S: Final = 0.02
TAIL_LINES: Final = 6
LINE_MAX: Final = 400
FIRST_STEP_S: Final = 600.0  # libraries are loaded, models compiled, data sets read


class DrillSetup(NamedTuple):
    """What is to be done.

    Attributes:
        script: what is drilled.
        root: directory of all runs.
        steps: how far each run goes; None for :data:`STEPS`, or as many as the undisturbed run
            makes in :data:`TRAINED_S` where that is more.
        workers: on each machine.
        machines: of each run. The job waits for one that is away: with fewer, most scripts are
            another run by right, and could not be graded.
        settings: the user's.
        environ: the user's.
    """

    script: JobScript
    root: Path
    steps: int | None
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
        self._saves_early = False  # undisturbed it has a checkpoint ahead of the faults' moments

    def conduct(self, plan: Callable[[Bounds, Target], Sequence[PlannedFault]]) -> DrillResult:
        """Run it all.

        Args:
            plan: makes the faults, told what they are drawn from, and the job ahead of its start.

        Raises:
            ConfigError: the script does not come to the first step by itself.
            NetworkError: the machines cannot be made.
        """
        with empty_place(self._setup.root):
            return self._conducted(plan)

    def _conducted(self, plan: Callable[[Bounds, Target], Sequence[PlannedFault]]) -> DrillResult:
        since_s = time.monotonic()
        undisturbed = self._undisturbed(UNDISTURBED, self._setup.steps)
        reached = min(undisturbed.far or 1 << 62, RunHistory(undisturbed.records).reached())
        commits = [event["step"] for event in undisturbed.events if event.event == "commit"]
        faults = self._planned(plan, undisturbed, commits, reached)
        self._num_runs += len(faults)
        grades = []
        for number, planned in enumerate(faults, start=1):
            grades.append(self._disturbed(number, planned, undisturbed, reached))
            self._listener.graded(grades[-1])
        differs_itself = ""
        if any(one.differs and one.is_exact for one in grades):
            again = RunHistory(self._undisturbed(f"{UNDISTURBED}-again", reached).records)
            found = first_difference(RunHistory(undisturbed.records), again, reached)
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

    def _planned(
        self,
        plan: Callable[[Bounds, Target], Sequence[PlannedFault]],
        undisturbed: RunEnd,
        commits: Sequence[int],
        reached: int,
    ) -> Sequence[PlannedFault]:
        early = [step for step in commits if step < reached * 0.6]
        first = min(early, default=reached // 4) + 1
        self._saves_early = bool(early)
        bounds = Bounds(
            num_ranks=max(one.world_size for record in undisturbed.records for one in record.steps),
            num_machines=self._setup.machines,
            first_step=first,
            last_step=max(first + 1, int(reached * 0.75)),
        )
        with self._rehearsal("plan") as job:
            return plan(bounds, job)

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

    def _undisturbed(self, label: str, steps: int | None) -> RunEnd:
        self._begin(label)
        with self._rehearsal(label) as job:
            since_s = time.monotonic()
            job.start()
            end = self._to_the_end(job, label, since_s, STUCK_S, steps=steps)
        _refuse_failed(end, steps or STEPS)
        return end

    def _disturbed(
        self, number: int, planned: PlannedFault, undisturbed: RunEnd, reached: int
    ) -> Grade:
        fault = planned.fault
        label = f"{number:02}-{fault.name}"
        self._begin(label)
        with self._rehearsal(label) as job:
            if why_not := fault.why_not(job):
                return Grade(fault=fault.name, why_not=why_not)
            since_s = time.monotonic()
            striker = _Striker(planned, job, self._listener, waits_for_commit=self._saves_early)
            with striker:
                job.start()
                limit_s = RECOVERY_S + 2 * undisturbed.seconds
                end = self._to_the_end(job, label, since_s, limit_s, steps=reached, striker=striker)
                settings = self._setup.settings
                price = settings.prices.of(settings.price_kind or "")
                return grade(
                    fault.name,
                    fault.promise,
                    striker.struck,
                    run=end,
                    undisturbed=undisturbed,
                    steps=reached,
                    price=None if price is None else price * self._setup.machines,
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
        *,
        steps: int | None,
        striker: _Striker | None = None,
    ) -> RunEnd:
        """Watch a run until every rank has come far enough, it has ended, or nothing moves.

        The undisturbed run goes on for a while behind that.
        """
        newest, moved_s = 0, time.monotonic()
        trains_since_s: float | None = None
        far, far_s = 0, 0.0
        if striker is not None:
            job.before_restart, job.is_held = striker.heal, striker.holds

        def is_done() -> bool:
            nonlocal newest, moved_s, trains_since_s, far, far_s
            now_s, step = time.monotonic(), job.completed()
            if step != newest:
                newest, moved_s = step, now_s
                trains_since_s = trains_since_s or now_s
                self._listener.progress(label, step, steps or max(STEPS, step))
            is_long = steps is not None or now_s - (trains_since_s or now_s) >= TRAINED_S
            stands = striker is None or striker.is_answered()
            all_ = job.all_completed()
            if not far and all_ >= (steps or STEPS) and is_long and stands:
                far, far_s = steps or all_, now_s
            is_far = far > 0 and (striker is not None or now_s - far_s >= FURTHER_S)
            return is_far or now_s - moved_s > (stuck_s if newest else max(stuck_s, FIRST_STEP_S))

        job.wait(is_done, limit_s=float("inf"))
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
            seconds=seconds,
            directory=job.directory,
            output=job.place.log,
            far=far,
        )


def _refuse_failed(end: RunEnd, steps: int) -> None:
    """A job that does not come far by itself cannot be graded.

    Raises:
        ConfigError: it made no step, has failed, or stands still.
    """
    reached = RunHistory(end.records).reached() if end.records else 0
    failed = [code for code in end.exit_codes if code not in (Exit.FINISHED, Exit.DRAINED)]
    if not reached:
        what = "does not come to the end of its first step by itself"
    elif failed:
        what = f"fails by itself behind step {reached} (exit {failed[0]})"
    elif reached < steps and not end.exit_codes:
        what = f"stands still by itself behind step {reached}, for {STUCK_S:.0f} s"
    else:
        return
    lines = end.output.read_text(errors="replace").strip().splitlines()[-TAIL_LINES:]
    said = "".join(f"\n  {line[:LINE_MAX]}" for line in lines)
    # The copy lies deeper: what is beside the directory isn't beside the copy.
    away = any(word in said for word in ("FileNotFoundError", "ModuleNotFoundError"))
    raise ConfigError(
        f"the script {what}, undisturbed; it said:{said}\nAll of it: {end.output}"
        + ("\nIt ran in a copy of this directory: give paths outside of it in full" * away)
    )


class _Striker:
    """Waits for one fault's moment, in a thread; a context manager.

    Args:
        planned: the fault.
        job: the run.
        listener: is told.
        waits_for_commit: whether it strikes once something is committed: a checkpoint may come
            later than in the undisturbed run, and a restart without one proves no resume.

    Attributes:
        struck: what it did; None before.
        is_over: whether it has struck and was healed, or never will strike.
    """

    def __init__(
        self,
        planned: PlannedFault,
        job: Rehearsal,
        listener: DrillListener,
        *,
        waits_for_commit: bool,
    ) -> None:
        self._waits_for_commit = waits_for_commit
        self.struck: Struck | None = None
        self.is_over = self._is_healed = False
        self._planned, self._job, self._listener = planned, job, listener
        self._ends = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._strike, name="drill-fault", daemon=True)

    def __enter__(self) -> _Striker:
        self._planned.prepare(self._job)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.stop()
        finally:
            self._job.stop()  # where an error has brought us here it still runs
            self._planned.fault.release(self._job)

    def stop(self) -> None:
        """The run is over."""
        self._ends.set()
        if self._thread.is_alive():
            self._thread.join()
        self.heal()

    def heal(self) -> None:
        """Undo it, if it has struck."""
        with self._lock:
            if self.struck is not None:
                self._is_healed = True
                self._planned.fault.heal(self._job)

    def holds(self) -> bool:
        """Whether it has struck and its time is not over, at which what is down is started."""
        return self.struck is not None and not self._is_healed and not self._ends.is_set()

    def is_answered(self) -> bool:
        """Whether the job has made of it what it will: healed, and started again where promised.

        A notice may be heard long after it was given, and a drain take its time.
        """
        if not self.is_over or self.struck is None:
            return self.is_over
        t = self.struck.t
        if not self._planned.fault.promise.is_started_again or time.time() - t > RECOVERY_S:
            return True
        return any(record.steps and record.begun.t > t for record in self._job.look())

    def _strike(self) -> None:
        job = self._job
        try:
            while self._waits_for_commit and not self._has_commit():
                if self._ends.wait(COMMIT_POLL_S) or job.is_over():
                    return
            struck = self._planned.strike(_Ending(job, self._ends))
            if struck is None:
                return
            self.struck = struck
            self._listener.struck(struck)
            self._planned.finish(_Ending(job, self._ends), self._is_noticed)
            for place in job.machines:
                if place.is_down:  # a notice's time was over, and the machine has gone
                    place.start()
            self._is_healed = True  # the job may end from here on, also short of the drill's steps
        finally:
            self.is_over = True

    def _has_commit(self) -> bool:
        return any(event.event == "commit" for event in self._job.events())

    def _is_noticed(self) -> bool:
        """Whether there is nothing to wait for: what strikes for good has been answered.

        What lasts a while is healed when that is over. A notice that is only heard stands: the
        machine goes at its end, unless the job has left before, and was healed for its next start.
        """
        if self._is_healed or self.struck is None:
            return True
        fault = self._planned.fault
        return fault.until_noticed and is_answered(self._job, fault.promise, self.struck)


class _Ending:
    """The job as a fault sees it; it is over for the fault once the run is.

    Args:
        job: it.
        ends: set when the run is over.
    """

    def __init__(self, job: Rehearsal, ends: threading.Event) -> None:
        self._job, self._ends = job, ends

    def __getattr__(self, name: str) -> Any:
        return getattr(self._job, name)

    def is_over(self) -> bool:
        """Whether the run, or the job, has ended."""
        return self._ends.is_set() or self._job.is_over()
