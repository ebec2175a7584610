"""What a disturbed run shows, beside the undisturbed one: one grade for each fault.

A grade says what was measured, and then line by line whether what is promised of that fault held.
Times and steps come from what the workers recorded and from the ledger; checkpoints are read by
``outlast checkpoints verify``, every byte of them, once the job has ended.

Guarantees: a promise that could not be looked at (nothing was recorded, the fault never struck,
nothing was saved to resume from) does not hold; where nothing else is wrong the grade is open. A
script without a session is graded by what it can get: its end, and its state; what it made again is
told and held against nobody.

What can go wrong: a script that differs from itself, run twice without a fault, differs here too;
the drill looks for that before it calls anything a fault of the resume.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from outlast import units
from outlast.drill.compare import RunHistory, SamplesSeen, StepDifference, first_difference, samples
from outlast.drill.faults.fault import KILLED, MayLose, Promise, Struck
from outlast.drill.record import WorkerRecord
from outlast.drill.workplace import SETTINGS
from outlast.errors import Exit
from outlast.ledger.events import Event

DYING_S: Final = 0.25  # from the strike to the last of the processes that end by it
SLACK_S: Final = 0.05  # clocks of one machine, read by several processes
VERIFY_S: Final = 600.0


class RunEnd(msgspec.Struct, frozen=True, kw_only=True):
    """A run that is over.

    Attributes:
        records: of its workers.
        events: of its ledger.
        exit_codes: of the agents that ended by themselves, in order.
        seconds: from its start to its end.
        directory: the job's own.
        output: file with what it said.
        far: the step at which it was seen to have come far enough; 0 where it never was.
    """

    records: Sequence[WorkerRecord]
    events: Sequence[Event]
    exit_codes: list[int]
    seconds: float
    directory: Path
    output: Path
    far: int = 0

    @property
    def has_session(self) -> bool:
        """Whether a session counted its steps."""
        return any(one.found is not None and one.found.is_counted for one in self.records)


class VerifiedBytes(msgspec.Struct, frozen=True, kw_only=True):
    """What reading all of a job's checkpoints found.

    Attributes:
        checkpoints: copies that were read.
        num_bytes: of them.
        damaged: "SAVE in TIER: reason", of each that does not verify.
    """

    checkpoints: int = 0
    num_bytes: int = 0
    damaged: list[str] = []


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One promise, and whether it held.

    Attributes:
        holds: whether it did.
        what: that was looked at, or found.
        is_open: whether that it does not hold says only that it could not be seen.
    """

    holds: bool
    what: str
    is_open: bool = False


class Grade(msgspec.Struct, frozen=True, kw_only=True):
    """One fault, and what came of it.

    Attributes:
        fault: its name.
        what: what it did, in words; "" if it never struck.
        survived: whether the job came as far as the undisturbed one, with nobody's help but being
            started again where it asked for that.
        found_after_s: from the strike to the ledger's first word of it; None for none.
        lost_steps: completed steps that were made again.
        stood_s: behind the strike, the longest time in which no step was completed that had not
            been complete before; what had to be made again is part of it.
        samples: what became of the data.
        verified: what its checkpoints are worth.
        differs: what differs first from the undisturbed run; "" if nothing does.
        is_exact: whether nothing may.
        exit_codes: of the agents, in order.
        seconds: that the run took.
        cost: of that time, at the price that is set; None without one.
        held: promise by promise.
        why_not: why the fault could not be tried here; then nothing else counts.
        directory: the run's.
    """

    fault: str
    what: str = ""
    survived: bool = False
    found_after_s: float | None = None
    lost_steps: int | None = None
    stood_s: float | None = None
    samples: SamplesSeen | None = None
    verified: VerifiedBytes = VerifiedBytes()
    differs: str = ""
    is_exact: bool = True
    exit_codes: list[int] = []
    seconds: float = 0.0
    cost: float | None = None
    held: list[Check] = []
    why_not: str = ""
    directory: str = ""

    @property
    def holds(self) -> bool:
        """Whether everything that was promised held; a fault that could not be tried broke none."""
        return bool(self.why_not) or (bool(self.held) and all(one.holds for one in self.held))

    @property
    def is_open(self) -> bool:
        """Whether no promise was broken, and some could not be looked at: nothing is proven."""
        return not self.holds and all(one.holds or one.is_open for one in self.held)


def grade(
    fault: str,
    promise: Promise,
    struck: Struck | None,
    *,
    run: RunEnd,
    undisturbed: RunEnd,
    steps: int,
    price: float | None,
) -> Grade:
    """Grade one disturbed run.

    Args:
        fault: its name.
        promise: what must hold.
        struck: what it did; None if it never struck.
        run: the disturbed run.
        undisturbed: beside which it is put.
        steps: how far both were meant to come; what both made behind that is compared, too.
        price: of all machines, in an hour.
    """
    before = RunHistory(undisturbed.records)
    after = RunHistory(run.records, before)
    compared = max(steps, min(before.reached(), after.reached()))
    difference = first_difference(before, after, compared)
    if struck is None:
        what = "the fault never struck: the job ended before"
        nothing = Check(holds=False, what=what, is_open=True)
        return Grade(
            fault=fault,
            held=[nothing],
            exit_codes=run.exit_codes,
            seconds=run.seconds,
            directory=str(run.directory.parent),
        )
    stood_s = _stood_s(run, struck)
    graded = Grade(
        fault=fault,
        what=struck.what,
        survived=after.reached() >= steps,
        found_after_s=_found_after_s(run.events, struck),
        lost_steps=after.again(compared),
        stood_s=stood_s,
        samples=samples(before, after, min(compared, after.reached())),
        verified=verify(run.directory),
        differs=_words(difference, after),
        is_exact=promise.exact and run.has_session,
        exit_codes=run.exit_codes,
        seconds=run.seconds,
        cost=None if price is None or stood_s is None else price * stood_s / 3600.0,
        directory=str(run.directory.parent),
    )
    held = _held(graded, promise, struck, run, steps, compared=compared)
    return msgspec.structs.replace(graded, held=held)


def _held(
    graded: Grade, promise: Promise, struck: Struck, run: RunEnd, steps: int, *, compared: int
) -> list[Check]:
    allowed = {0, *promise.exit_codes, *(KILLED if promise.refuses else ())}
    codes = " ".join(map(str, graded.exit_codes)) or "none"
    fits = Check(holds=allowed.issuperset(graded.exit_codes), what=f"exit codes: {codes}")
    if promise.refuses:
        has_refused = not set(promise.exit_codes).isdisjoint(graded.exit_codes)
        return [Check(holds=fits.holds and has_refused, what=f"{promise}: {fits.what}")]
    found = [Check(holds=graded.survived, what=f"the job comes to step {steps} by itself"), fits]
    if not run.has_session:
        return found
    if promise.must_notice and struck.event:
        after_s = graded.found_after_s
        what = "the ledger names it" if after_s is None else f"found after {units.seconds(after_s)}"
        found.append(Check(holds=after_s is not None, what=what))
    lost, most = graded.lost_steps or 0, _most_lost(promise, struck, run)
    what = f"{units.count(lost, 'step')} made again, {most} at most"
    found.append(Check(holds=lost <= most, what=what))
    restarts = sum(e.event == "attempt_formed" and e.t > struck.t for e in run.events)
    starts = len([code for code in graded.exit_codes if code])
    what = f"{units.count(restarts, 'attempt')} behind it, {promise.restarts + starts} at most"
    found.append(Check(holds=restarts <= promise.restarts + starts, what=what))
    seen = graded.samples
    if seen is not None and seen.is_known and promise.exact:
        what = f"{seen.batches} batches: {seen.lost} lost, {seen.repeated} repeated"
        found.append(Check(holds=not seen.lost and not seen.repeated, what=what))
    if promise.exact:
        what = f"differs {graded.differs}" if graded.differs else f"all {compared} steps equal"
        found.append(Check(holds=not graded.differs, what=what))
        found += _unseen(run, struck, compared)
    read = f"{units.count(graded.verified.checkpoints, 'checkpoint')} read and verified"
    # What the fault itself has damaged may still lie there: retention has not come to it.
    damaged = [one for one in graded.verified.damaged if one.partition(" ")[0] not in struck.what]
    found.append(Check(holds=not damaged, what="; ".join(damaged) or read))
    return found


def _unseen(run: RunEnd, struck: Struck, compared: int) -> list[Check]:
    """What a restart has not shown: it resumed from nothing, or no step of it was compared."""
    behind = [one for one in run.records if one.begun.t > struck.t and one.steps]
    if not behind:
        return []
    saved = any(e.event == "commit" and e.t <= struck.t for e in run.events)
    begun = [one.found.step for one in behind if one.found is not None]
    if struck.last_step and not saved and not any(begun):
        what = (
            f"nothing was saved yet in step {struck.last_step + 1}: it began again at step 0, "
            "which proves no resume: more --steps, or save more often"
        )
        return [Check(holds=False, what=what, is_open=True)]
    first = min(one.steps[0].step for one in behind)
    if first <= compared:
        return []
    what = (
        f"it went on with step {first}, and the undisturbed run ended with {compared}: more --steps"
    )
    return [Check(holds=False, what=what, is_open=True)]


def _most_lost(promise: Promise, struck: Struck, run: RunEnd) -> int:
    """Steps that may be made again, at most."""
    if promise.loses is MayLose.NOTHING:
        return 0
    if promise.loses is MayLose.STEP:
        return 1
    kept: set[int] = {
        0,
        *(e["step"] for e in run.events if e.event == "commit" and e.t <= struck.t),
    }
    whole = sorted(kept)[: -1 if promise.loses is MayLose.OLDER and len(kept) > 1 else None]
    # Steps that are shorter than the way of a signal are completed behind the strike; and what
    # hung may move again once it was found, until its workers have ended.
    hit = [one for one in run.records if one.begun.t < struck.t]
    found = [e.t for e in run.events if e.event == struck.event == "hang" and e.t > struck.t]
    dead_t = min(found, default=struck.t) + DYING_S
    made = [s.step for one in hit for s in one.steps if s.t <= dead_t]
    # One more: ranks are not all at the same step when they are hit.
    return max(struck.last_step, *made, 0) - whole[-1] + 1


def _found_after_s(events: Sequence[Event], struck: Struck) -> float | None:
    times = [
        event.t - struck.t
        for event in events
        if event.event == struck.event and event.t >= struck.t - SLACK_S
    ]
    return max(min(times), 0.0) if times else None


def _stood_s(run: RunEnd, struck: Struck) -> float | None:
    times = sorted((one.t, one.step) for record in run.records for one in record.steps)
    newest, since_t, longest_s = 0, None, None
    for t, step in times:
        if step <= newest:
            continue
        if since_t is not None and t >= struck.t:
            longest_s = max(longest_s or 0.0, t - since_t)
        newest, since_t = step, t
    return longest_s


def _words(difference: StepDifference | None, after: RunHistory) -> str:
    if after.lost:
        one = after.lost[0].begun
        return f"in process {one.pid}: it went on from a state that the undisturbed run never had"
    return "" if difference is None else difference.words


def verify(directory: Path) -> VerifiedBytes:
    """Read every byte of a job's checkpoints, in a process of its own."""
    done = _asked(directory, "verify")
    try:
        rows = json.loads(done.stdout)["checkpoints"]
    except (ValueError, KeyError):
        return VerifiedBytes()  # there is none
    damaged = [
        f"{row['save']} in {row['tier']}: {row['reason']}"
        for row in rows
        if not row["valid"] and not row.get("unfinished")
    ]
    return VerifiedBytes(
        checkpoints=len(rows),
        num_bytes=sum(row.get("bytes") or 0 for row in rows),
        damaged=damaged,
    )


def audited(directory: Path) -> Check:
    """Which samples went into which steps, as ``outlast checkpoints show --samples`` proves it."""
    done = _asked(directory, "show", "--samples")
    try:
        verdict = json.loads(done.stdout)
    except ValueError:
        said = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return Check(holds=done.returncode == Exit.FINISHED, what=f"samples: {' '.join(said)}")
    faults = [one.get("text", "") for one in verdict.get("faults", [])]
    steps, count = verdict.get("steps"), verdict.get("samples")
    what = f"{count} samples in {steps} steps: none lost, none repeated"
    return Check(holds=bool(verdict.get("proved")), what="; ".join(faults[:3]) or what)


def _asked(directory: Path, command: str, *options: str) -> subprocess.CompletedProcess[bytes]:
    """What ``outlast checkpoints`` says of a run's job, under the run's own settings."""
    words = ["-m", "outlast", "checkpoints", command, str(directory), *options, "--json"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OUTLAST_")}
    return subprocess.run(
        [sys.executable, *words],
        env=kept | {"OUTLAST_CONFIG": str(directory.parent / SETTINGS)},
        capture_output=True,
        timeout=VERIFY_S,
        check=False,
    )
