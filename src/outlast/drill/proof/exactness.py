"""``outlast drill resume``: that a run which was stopped and started again is the one it would be.

The script runs undisturbed, twice, for some steps. Then it is given notice behind a step, leaves,
is started again by the same command, and runs up to the same step. Every loss, weight, optimizer
state, random state and input of it is compared with the undisturbed run's.

If the two undisturbed runs differ already, no resume can be exact, and that is said. Whatever
differs, its cause is looked for by tries (``causes``), each of which is a run or two.

Guarantees: "proved" is said only if every step that was compared was the same in all that was
recorded, on every rank, for every stop that was asked for.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from outlast.config import Settings
from outlast.drill.compare import (
    BATCH,
    LOSS,
    MISSING,
    STATE,
    RunHistory,
    StepDifference,
    first_difference,
)
from outlast.drill.proof import conditions as of
from outlast.drill.proof.causes import (
    TRIED_WORDS,
    Cause,
    Suspect,
    TriedChange,
    cause_of,
    next_try,
    of_kernel,
    of_state,
    still_in_order,
    suspect_kernel,
    suspects,
)
from outlast.drill.proof.conditions import Conditions
from outlast.drill.proof.runs import ProvedRun, ScriptFailed, complete
from outlast.drill.proof.script_lines import ScriptLines
from outlast.drill.record import COMPILED, NotedCall, WorkerRecord
from outlast.drill.workplace import JobScript
from outlast.errors import ConfigError, Exit

STEPS: Final = 20
STEPS_MIN: Final = 4
AT: Final = 6  # the next step, where the job leaves, is no multiple of anything
ALONE_MAX: Final = 6  # suspects that are tried one by one


class StopTried(msgspec.Struct, frozen=True, kw_only=True):
    """One stop and what came of it.

    Attributes:
        at: behind which step notice was given.
        exit_code: with which the job left.
        went_on_from: completed steps with which it began again; None if it began from a state that
            the undisturbed run never had.
        compared: the newest step that was compared.
        again: steps that were made twice.
        differs: what differs first, in words; "" if nothing does.
        part: of the step, what kind of thing that is.
    """

    at: int
    exit_code: int
    went_on_from: int | None
    compared: int
    again: int
    differs: str
    part: str


class ResumeProof(msgspec.Struct, frozen=True, kw_only=True):
    """What was found.

    Attributes:
        is_proved: whether a resume changes nothing.
        verdict: one sentence.
        has_session: whether a session counts the script's steps.
        workers: how many ran.
        steps: how many were compared.
        differs_from_itself: what differs first between two undisturbed runs; "" if nothing does.
        stops: each of them.
        causes: why it differs.
        tried: each try.
        next_try: what a person can try where no cause was found; "" where one was.
        trouble: what could not be recorded; "" for nothing.
        directory: where the runs are.
        seconds: that it took.
    """

    is_proved: bool
    verdict: str
    has_session: bool
    workers: int
    steps: int
    differs_from_itself: str
    stops: list[StopTried]
    causes: list[Cause]
    tried: list[TriedChange]
    next_try: str
    trouble: str
    directory: str
    seconds: float


class ProofListener:
    """Is told what happens; the command draws it."""

    def begins(self, what: str, steps: int) -> None:
        """A run, or several at once, of so many steps begins."""

    def progress(self, done: int) -> None:
        """So many steps are complete in all of them."""

    def ended(self, what: str) -> None:
        """It is over, and this came of it."""


class ResumeDrill:
    """The proof for one script.

    Args:
        script: what is run.
        root: a directory for the runs, which is there and empty.
        settings: the user's.
        workers: how many.
        steps: that are compared.
        at: the steps behind which it is stopped.
        listener: told what happens.
    """

    def __init__(
        self,
        script: JobScript,
        root: Path,
        *,
        settings: Settings,
        workers: int = 1,
        steps: int = STEPS,
        at: Sequence[int] = (),
        listener: ProofListener | None = None,
    ) -> None:
        if steps < STEPS_MIN:
            raise ConfigError(f"--steps {steps}: a resume shows in {STEPS_MIN} steps at least")
        at = list(at) or [min(AT, steps // 2)]
        wrong = next((one for one in at if not 0 < one < steps), None)
        if wrong is not None:
            raise ConfigError(
                f"--at {wrong} and --steps {steps} leave no step behind the resume; stop after "
                f"one of the steps 1 to {steps - 1}"
            )
        self._script, self._root, self._settings = script, root, settings
        self._workers, self._steps, self._at = workers, steps, at
        self._listener = listener or ProofListener()
        self._lines = ScriptLines(script)
        self._numbers = itertools.count(1)
        self._tried: list[TriedChange] = []
        self._causes: list[Cause] = []
        self._unexplained: StepDifference | None = None
        self._is_compiled = False
        self._began_s = time.monotonic()

    def run(self) -> ResumeProof:
        """Run it all.

        Raises:
            ScriptFailed: the script does not run through by itself, or makes no step.
        """
        first, second = self._undisturbed("two undisturbed runs")
        self._upto = max(first.reached(), second.reached())
        own = first_difference(first, second, self._upto, is_strict=True)
        stops: list[StopTried] = []
        self._listener.ended(f"they differ {own.words}" if own else "they are the same")
        if own is not None:
            with self._search(own):
                self._why_not_itself(own)
        else:
            self._first = first
            stops = [self._stopped(at) for at in self._at if at < self._upto]
            if not stops:
                raise ScriptFailed(
                    f"the script ends behind step {self._upto}; give --at a step before it"
                )
        records = [first.found(rank) for rank in first.ranks]
        is_counted = any(found is not None and found.is_counted for found in records)
        is_proved = own is None and not any(one.differs for one in stops)
        return ResumeProof(
            is_proved=is_proved,
            verdict=_verdict(own, stops, has_session=is_counted),
            has_session=is_counted,
            workers=self._workers,
            steps=self._upto,
            differs_from_itself=own.words if own else "",
            stops=stops,
            causes=self._causes,
            tried=self._tried,
            next_try=self._next_try(),
            trouble=self._trouble,
            directory=str(self._root),
            seconds=time.monotonic() - self._began_s,
        )

    def unproved(self, error: ScriptFailed) -> ResumeProof:
        """What is known where ``run`` raised: nothing was compared, and this is why."""
        return ResumeProof(
            is_proved=False,
            verdict=str(error),
            has_session=False,
            workers=self._workers,
            steps=0,
            differs_from_itself="",
            stops=[],
            causes=self._causes,
            tried=self._tried,
            next_try="",
            trouble="",
            directory=str(self._root),
            seconds=time.monotonic() - self._began_s,
        )

    # --- runs ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _new_run(self, *, is_try: bool = False) -> Iterator[ProvedRun]:
        """A run in a place of its own, which is gone behind a try."""
        place = self._root / f"run-{next(self._numbers)}"
        run = ProvedRun(
            self._script,
            place,
            settings=self._settings,
            workers=self._workers,
            environ=os.environ,
        )
        try:
            with run:
                yield run
        finally:
            if is_try:
                shutil.rmtree(run.run, ignore_errors=True)

    def _finish(self, what: str, runs: list[ProvedRun]) -> None:
        self._listener.begins(what, self._steps)
        complete(runs, lambda all_: self._listener.progress(min(one.steps() for one in all_)))

    def _pair(
        self, what: str, *, is_try: bool = True, **asked: object
    ) -> tuple[list[WorkerRecord], list[WorkerRecord]]:
        """Two undisturbed runs: what they recorded. Beside each other, where no GPU is shared."""
        conditions = Conditions(**{"hold_after": self._steps, **asked})  # type: ignore[arg-type]
        with self._new_run(is_try=is_try) as one, self._new_run(is_try=is_try) as other:
            runs = [one, other]
            for at_once in [[run] for run in runs] if _has_gpu() else [runs]:
                for run in at_once:
                    run.start(conditions)
                self._finish(what, at_once)
            for run in runs:
                self._refuse_failed(run)
            return one.records(), other.records()

    def _undisturbed(self, what: str) -> tuple[RunHistory, RunHistory]:
        one, other = self._pair(what, is_try=False)
        self._trouble = next((record.trouble for record in one if record.trouble), "")
        self._is_compiled = any(call.what == COMPILED for call in _calls(one))
        return RunHistory(one), RunHistory(other)

    def _refuse_failed(self, run: ProvedRun) -> None:
        code = run.exit_code
        if not any(record.steps for record in run.records()):
            raise ScriptFailed(
                f"the script made no step that could be seen (exit {code}): it fails before, or "
                "calls no optimizer of torch's and has no session; its output is in "
                f"{run.place.log}"
            )
        if code is not None and code > 0:
            raise ScriptFailed(
                f"the script fails without being disturbed (exit {code}); its output is in "
                f"{run.place.log}"
            )

    def _stopped(self, at: int) -> StopTried:
        """Stop behind a step, start again, and compare."""
        with self._new_run() as run:
            code = self._leave(run, at)
            has_stayed = code < 0 and any(
                one.found and one.found.is_counted for one in run.records()
            )
            if code == Exit.FINISHED or has_stayed:
                raise ScriptFailed(
                    f"notice was given behind step {at}, and the script went on to "
                    f"{'the last step' if has_stayed else 'its end'}; its output is in "
                    f"{run.place.log}"
                )
            run.keep()
            stop, differs = self._go_on(run, at, code, Conditions(hold_after=self._steps))
            words = f"differs {differs.words}" if differs else "every step is the same"
            self._listener.ended(f"exit {code}, went on from {stop.went_on_from}: {words}")
            if differs is not None and not self._causes:
                with self._search(differs):
                    self._why_not_resumed(run, stop, differs)
            return stop

    def _leave(self, run: ProvedRun, at: int, changes: Sequence[str] = ()) -> int:
        run.start(
            Conditions(notice_after=at, hold_after=self._steps, changes=list(changes)),
        )
        self._finish(f"stopped behind step {at}", [run])
        code = run.exit_code
        run.end()
        return 0 if code is None else code

    def _go_on(
        self, run: ProvedRun, at: int, code: int, conditions: Conditions, what: str = ""
    ) -> tuple[StopTried, StepDifference | None]:
        left = [one.begun.pid for one in run.records()]
        run.start(conditions)
        self._finish(what or "started again", [run])
        run.end()
        records = run.records()
        history = RunHistory(records, self._first)
        upto = min(self._upto, history.reached())
        differs = first_difference(self._first, history, self._upto, is_strict=True)
        if differs is not None and differs.part == MISSING and run.exit_code is not None:
            differs = differs._replace(names=[f"(exit {run.exit_code})"])
        again = [one for one in records if one.begun.pid not in left]
        lost = {one.begun.pid for one in history.lost}
        went_on: int | None = at
        if again:
            went_on = None if again[0].begun.pid in lost else history.began_at(again[0].begun.pid)
        stop = StopTried(
            at=at,
            exit_code=code,
            went_on_from=went_on,
            compared=upto,
            again=history.again(upto),
            differs=differs.words if differs else "",
            part=differs.part if differs else "",
        )
        return stop, differs

    # --- why -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _search(self, first: StepDifference) -> Iterator[None]:
        """Look for the cause of a difference; whoever ends that early is told what was found."""
        self._unexplained = first
        try:
            yield
        except KeyboardInterrupt:
            self._listener.ended("ended: the search is not over")

    def _next_try(self) -> str:
        if self._causes or self._unexplained is None:
            return ""
        return next_try(self._unexplained, self._tried, is_compiled=self._is_compiled)

    def _try(self, what: str, *, helped: bool) -> bool:
        self._tried.append(TriedChange(what=what, helped=helped))
        self._listener.ended("the difference is gone" if helped else "no change")
        return helped

    def _why_not_itself(self, own: StepDifference) -> None:
        by_kernel = own.part in (LOSS, STATE)
        if by_kernel and not self._is_compiled and self._find_kernel(own):
            return
        for change in still_in_order(own):
            if self._still_differs(own, [change]) is None:
                return
        if by_kernel and self._is_compiled and self._find_kernel(own):
            return
        together = [one for one in still_in_order(own) if one != of.NO_LOADER_WORKERS]
        if self._still_differs(own, together) is None:
            self._causes.clear()
            needed = list(together)
            for change in together:
                fewer = [one for one in needed if one != change]
                if fewer and self._still_differs(own, fewer, notes=False) is None:
                    needed = fewer
            self._causes = [cause_of(one, self._calls, self._lines) for one in needed]

    def _still_differs(
        self, own: StepDifference, changes: list[str], *, notes: bool = True
    ) -> StepDifference | None:
        what = " and ".join(TRIED_WORDS[one] for one in changes)
        words = what if len(changes) == 1 else f"{len(changes)} things held still"
        try:
            one, other = self._pair(f"try: {words}", changes=changes, find_draws=True)
        except ScriptFailed:  # it cannot be had so
            self._try(words, helped=False)
            return own
        first, second = RunHistory(one), RunHistory(other)
        found = first_difference(
            first, second, max(first.reached(), second.reached()), is_strict=True
        )
        self._calls = _calls([*one, *other])
        if self._try(words, helped=found is None) and notes and len(changes) == 1:
            self._causes.append(cause_of(changes[0], self._calls, self._lines))
        return found

    def _find_kernel(self, own: StepDifference) -> bool:
        what = f"each operation of step {own.step}, in two runs"
        one, other = self._pair(f"try: {what}", kernels_at=own.step)
        found = None
        for first, second in itertools.product(one, other):
            if first.begun.rank == second.begun.rank == own.rank:
                found = found or suspect_kernel(first.operations, second.operations)
        self._tried.append(TriedChange(what=what, helped=found is not None))
        self._listener.ended(f"{found.name} differs" if found else "none differs by itself")
        if found is not None:
            self._causes.append(of_kernel(found))
        return found is not None

    def _why_not_resumed(self, run: ProvedRun, stop: StopTried, differs: StepDifference) -> None:
        if stop.went_on_from is None or differs.part == MISSING:
            return
        by_loader = self._lines.uses("DataLoader", "StatefulDataLoader")
        by_count = self._lines.uses("enumerate")
        if by_count and self._second_start_helps(run, stop, of.COUNT_ON):
            return
        if (
            by_loader
            and differs.part == BATCH
            and self._whole_run_helps(stop, of.NO_LOADER_WORKERS)
        ):
            return
        if self._brought_across_helps(run, stop):
            return
        for change in (of.NO_LOADER_WORKERS, of.CLOCK, of.ENTROPY, of.IDENTITY, of.SEED_PYTHON):
            is_tried = any(one.what == TRIED_WORDS[change] for one in self._tried)
            if not is_tried and self._whole_run_helps(stop, change):
                return

    def _second_start_helps(self, run: ProvedRun, stop: StopTried, change: str) -> bool:
        run.rewind()
        asked = Conditions(hold_after=self._steps, changes=[change])
        what = TRIED_WORDS[change]
        _, differs = self._go_on(run, stop.at, stop.exit_code, asked, f"try: {what}")
        if not self._try(what, helped=differs is None):
            return False
        self._causes.append(cause_of(change, _calls(run.records()), self._lines))
        return True

    def _whole_run_helps(self, stop: StopTried, change: str) -> bool:
        what = TRIED_WORDS[change]
        try:
            helped, calls = self._whole_run(what, stop, change)
        except ScriptFailed:  # it cannot be had so
            helped, calls = False, []
        if self._try(what, helped=helped):
            self._causes.append(cause_of(change, calls, self._lines))
        return helped

    def _whole_run(self, what: str, stop: StopTried, change: str) -> tuple[bool, list[NotedCall]]:
        with self._new_run(is_try=True) as plain, self._new_run(is_try=True) as run:
            plain.start(Conditions(hold_after=self._steps, changes=[change]))
            self._finish(f"try: {what}", [plain])
            plain.end()
            before, self._first = self._first, RunHistory(plain.records())
            try:
                code = self._leave(run, stop.at, [change])
                if code == Exit.FINISHED:
                    return False, []
                asked = Conditions(hold_after=self._steps, changes=[change])
                _, differs = self._go_on(run, stop.at, code, asked, f"try: {what}, started again")
            finally:
                self._first = before
            return differs is None, _calls(run.records())

    def _brought_across_helps(self, run: ProvedRun, stop: StopTried) -> bool:
        """Compare what the script's names reach, and bring what differs across."""
        at = stop.went_on_from or 0
        with self._new_run(is_try=True) as plain:
            plain.start(Conditions(hold_after=at, look_at=[at], keep_at=at))
            self._finish("try: what the script's names hold, undisturbed", [plain])
            plain.end()
            run.rewind()
            asked = Conditions(hold_after=self._steps, look_at=[at])
            self._go_on(run, stop.at, stop.exit_code, asked, "try: the same behind the resume")
            found = suspects(plain.records(), run.records())
            run.bring(plain)
        if not found:
            self._listener.ended("the same")
            return False
        self._listener.ended(", ".join(one.name for one in found[:4]))
        if not self._carried(run, stop, found):
            return False
        for one in self._fewest(run, stop, found):
            self._causes.append(of_state(one, self._lines))
        return True

    def _fewest(self, run: ProvedRun, stop: StopTried, found: list[Suspect]) -> list[Suspect]:
        """Those that are enough: one by one, else all that cannot be left out."""
        if len(found) == 1:
            return found
        if len(found) > ALONE_MAX:
            half = len(found) // 2
            for part in (found[:half], found[half:]):
                if self._carried(run, stop, part):
                    return self._fewest(run, stop, part)
        for one in found:
            if self._carried(run, stop, [one]):
                return [one]
        needed = list(found)
        for one in found:
            fewer = [other for other in needed if other is not one]
            if fewer and self._carried(run, stop, fewer):
                needed = fewer
        return needed

    def _carried(self, run: ProvedRun, stop: StopTried, chosen: list[Suspect]) -> bool:
        run.rewind()
        paths = [path for one in chosen for path in one.paths]
        what = f"{', '.join(one.name for one in chosen[:4])} brought across by hand"
        asked = Conditions(hold_after=self._steps, carry=paths)
        _, differs = self._go_on(run, stop.at, stop.exit_code, asked, f"try: {what}")
        return self._try(what, helped=differs is None)


def _has_gpu() -> bool:
    return any(Path(one).exists() for one in ("/dev/nvidiactl", "/dev/kfd"))


def _calls(records: Sequence[WorkerRecord]) -> list[NotedCall]:
    return [call for record in records for call in record.calls]


def _verdict(own: StepDifference | None, stops: Sequence[StopTried], *, has_session: bool) -> str:
    if own is not None:
        return (
            "not proved: two undisturbed runs of this script differ, so that no resume of it can "
            "be compared with anything"
        )
    wrong = next((one for one in stops if one.differs), None)
    if wrong is not None:
        if wrong.went_on_from is None:
            return "not proved: it begins again from a state that the undisturbed run never had"
        return f"not proved: stopped behind step {wrong.at}, it differs {wrong.differs}"
    if not has_session and all(one.went_on_from == 0 for one in stops):
        return (
            "proved: a restart makes the same steps again, from the first one on: all work until "
            "then is lost"
        )
    return "proved: a resume changes nothing"
