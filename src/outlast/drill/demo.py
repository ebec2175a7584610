"""Two runs of the same training, one of them disturbed, and the proof that nothing changed.

The disturbed run is started by ``outlast run`` and, when it leaves with 75, started again by the
same command, as a scheduler would. What is compared is what each worker was seen to do in each step
(``recorder``): its batch, its loss, and the weights, the optimizer's state and the random numbers
behind it. The training script is an ordinary one.
"""

from __future__ import annotations

import os
import random
import sysconfig
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from outlast import config
from outlast.drill.compare import (
    BATCH,
    BEFORE,
    LOSS,
    RANDOM,
    RANDOM_AFTER,
    RATE,
    STATE,
    RunHistory,
    StepDifference,
    first_difference,
    samples,
)
from outlast.drill.faults.aim import PlannedFault, at, during
from outlast.drill.faults.fault import Struck
from outlast.drill.grade import SLACK_S, Check
from outlast.drill.rehearsal import Rehearsal
from outlast.drill.workplace import JobScript, empty_place
from outlast.errors import ConfigError, Exit
from outlast.ledger.events import Event

RANKS: Final = 2
EVERY: Final = 20
STEPS: Final = 150
STEPS_MIN: Final = 135  # each third must hold a checkpoint and a fault
LEAD_S: Final = 120.0  # of the notice
STUCK_S: Final = 120.0
NUM_FAULTS: Final = 3
TEXT: Final = "corpus.bin"
TEXT_BYTES_MIN: Final = 10_000_000
_LEFT_OUT: Final = frozenset({"test", "tests", "site-packages", "dist-packages", "__pycache__"})


class Corpus(NamedTuple):
    """What was gathered: number of files and of bytes."""

    num_files: int
    num_bytes: int


def gather(target: Path) -> Corpus:
    """Write all the text into one file.

    Raises:
        ConfigError: this Python has less than 10 MB of source.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [
        path
        for path in sorted(root.rglob("*.py"))
        if not _LEFT_OUT.intersection(path.relative_to(root).parts)
    ]
    with target.open("wb") as file:
        for path in paths:
            file.write(path.read_bytes())
    size = target.stat().st_size
    if size < TEXT_BYTES_MIN:
        raise ConfigError(
            f"the standard library in {root} has {size / 1e6:.1f} MB of source and the demo needs "
            "10 MB; install Python with its library (on Debian: apt install libpython3-stdlib)"
        )
    return Corpus(len(paths), size)


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """One fault and what came of it.

    Attributes:
        what: the fault, in words.
        detected_after_s: from the strike to the ledger's first word of it.
        lost_steps: completed steps that were done again.
        back_after_s: from the strike to the first step that was completed after it.
        answer: what the job did.
    """

    what: str
    detected_after_s: float
    lost_steps: int
    back_after_s: float
    answer: str


class DemoResult(msgspec.Struct, frozen=True, kw_only=True):
    """What the demo found."""

    recoveries: list[Recovery]
    checks: list[Check]
    directory: str
    seconds: float

    @property
    def holds(self) -> bool:
        """Whether all of it holds."""
        return bool(self.checks) and all(check.holds for check in self.checks)


class DemoProgress(NamedTuple):
    """How far a run is: label, completed steps, steps in all, loss, seconds since its start."""

    label: str
    step: int
    steps: int
    loss: float | None
    seconds: float


class DemoListener:
    """Told what happens; the command draws it."""

    def begun(self, corpus: Corpus, num_parameters: int) -> None:
        """The text is gathered; the model has so many parameters."""

    def progress(self, progress: DemoProgress) -> None:
        """A run went on."""

    def finished(self, progress: DemoProgress) -> None:
        """A run is complete."""

    def struck(self, struck: Struck) -> None:
        """A fault has struck."""

    def recovered(self, recovery: Recovery) -> None:
        """The job is back."""


class DemoRun:
    """One run of the training, to its end, through faults.

    Args:
        label: its name, and that of its directory.
        root: of the demo.
        steps: how long it is.
        listener: is told.

    Attributes:
        exit_codes: of ``outlast run``, in order.
        struck: what the faults did.
        recoveries: what came of them, in the same order.
        history: what its workers made.
    """

    def __init__(self, label: str, root: Path, steps: int, listener: DemoListener) -> None:
        self.label = label
        self.exit_codes: list[int] = []
        self.struck: list[Struck] = []
        self.recoveries: list[Recovery] = []
        self.history = RunHistory([])
        self.directory = root / label / "job"
        self._root, self._steps, self._listener = root, steps, listener

    def complete(self, faults: Sequence[PlannedFault]) -> None:
        """Run to the end, through ``faults``, one after the other."""
        since_s = time.monotonic()
        script = Path(__file__).with_name("demo_train.py")
        arguments = (str((self._root / TEXT).resolve()), str(self._steps))
        empty = self._root / "nothing"
        empty.mkdir(exist_ok=True)
        with Rehearsal(
            JobScript(name=str(script), arguments=arguments),
            self._root / self.label,
            settings=config.load(environ={}, file=Path(os.devnull)),
            workers=RANKS,
            environ=os.environ,
            source=empty,
        ) as job:
            job.environ["OUTLAST_NOTICE_PLATFORM"] = "none"
            # On a fast machine a second is a third of the run.
            job.environ["OUTLAST_NOTICE_POLL"] = "200 ms"
            job.before_restart = lambda: _heal(faults, job)
            strikes = threading.Thread(
                target=self._strike, args=(job, faults), name="demo-faults", daemon=True
            )
            try:
                for planned in faults:
                    planned.prepare(job)
                job.start()
                strikes.start()
                job.wait(lambda: self._goes_on(job, since_s), float("inf"))
                strikes.join(STUCK_S)
            finally:
                job.stop()
                for planned in faults:
                    planned.fault.release(job)
            self.exit_codes = job.machines[0].exit_codes
            self.history = RunHistory(job.look())
            self._tell(job)
            self._listener.finished(self._progress(job, since_s))

    def _goes_on(self, job: Rehearsal, since_s: float) -> bool:
        """Show how far it is; it is never enough: the job comes to its end by itself."""
        self._listener.progress(self._progress(job, since_s))
        self._tell(job)
        return False

    def _strike(self, job: Rehearsal, faults: Sequence[PlannedFault]) -> None:
        for planned in faults:
            struck = planned.strike(job)
            if struck is None:
                return
            self.struck.append(struck)
            self._listener.struck(struck)
            while not job.is_over() and _recovery(job, struck) is None:
                time.sleep(0.05)

    def _tell(self, job: Rehearsal) -> None:
        while len(self.recoveries) < len(self.struck):
            recovery = _recovery(job, self.struck[len(self.recoveries)])
            if recovery is None:
                return
            self.recoveries.append(recovery)
            self._listener.recovered(recovery)

    def _progress(self, job: Rehearsal, since_s: float) -> DemoProgress:
        made = [step for one in job.look() if one.begun.rank == 0 for step in one.steps]
        losses = made[-1].losses if made else []
        return DemoProgress(
            label=self.label,
            step=made[-1].step if made else 0,
            steps=self._steps,
            loss=float.fromhex(losses[-1]) if losses else None,
            seconds=time.monotonic() - since_s,
        )


def _heal(faults: Sequence[PlannedFault], job: Rehearsal) -> None:
    for planned in faults:
        planned.fault.heal(job)


def draw(seed: int, steps: int) -> list[PlannedFault]:
    """The demo's three faults, at moments that ``seed`` decides."""
    rng = random.Random(seed)  # noqa: S311 - moments, not secrets
    third = steps // 3
    first = at(step=rng.randrange(EVERY + 2, third), fraction=rng.random())
    last = at(step=rng.randrange(2 * third + 5, steps - 25), fraction=0.0)
    return [
        first.on(rank=rng.randrange(RANKS)).kill(),
        during("save", after=rng.randrange(third + 5, 2 * third - EVERY)).kill("workers"),
        last.notice(LEAD_S),
    ]


def demo(root: Path, *, steps: int, seed: int, listener: DemoListener) -> DemoResult:
    """Run the demo in ``root``, which is emptied if an earlier drill made it.

    Raises:
        ConfigError: ``root`` holds something else, or there are too few steps for three faults.
    """
    since_s = time.monotonic()
    if steps < STEPS_MIN:
        raise ConfigError(f"--steps {steps} has no room for three faults; give {STEPS_MIN} or more")
    with empty_place(root):
        return _demonstrated(root, steps, seed, listener, since_s)


def _demonstrated(
    root: Path, steps: int, seed: int, listener: DemoListener, since_s: float
) -> DemoResult:
    from outlast.drill.demo_train import Gpt  # torch: not before what is asked for can be had

    corpus = gather(root / TEXT)
    listener.begun(corpus, sum(p.numel() for p in Gpt().parameters()))
    undisturbed = DemoRun("undisturbed", root, steps, listener)
    undisturbed.complete([])
    disturbed = DemoRun("disturbed", root, steps, listener)
    disturbed.complete(draw(seed, steps))
    return DemoResult(
        recoveries=disturbed.recoveries,
        checks=compare(undisturbed, disturbed, steps),
        directory=str(disturbed.directory),
        seconds=time.monotonic() - since_s,
    )


def _recovery(job: Rehearsal, struck: Struck) -> Recovery | None:
    """What came of a fault, once the job has completed a step after it."""
    events = [event for event in job.events() if event.t >= struck.t - SLACK_S]
    noticed = _first(events, struck.event)
    resumed = _first(events, "resumed")
    if noticed is None or resumed is None:
        return None
    made = [step for one in job.look() if one.begun.rank == 0 for step in one.steps]
    back = next((step for step in made if step.t > resumed.t), None)
    if back is None:
        return None
    before = max((step.step for step in made if step.t < resumed.t), default=0)
    drained = _first(events, "drained")
    if struck.event == "notice" and drained is not None:
        answer = f"drained after step {drained['step']}, committed, exit 75, started again"
    else:
        answer = f"resumed from step {resumed['step']}"
    return Recovery(
        what=struck.what,
        detected_after_s=max(noticed.t - struck.t, 0.0),
        lost_steps=max(before - resumed["step"], 0),
        back_after_s=back.t - struck.t,
        answer=answer,
    )


def _first(events: Sequence[Event], name: str) -> Event | None:
    return next((event for event in events if event.event == name), None)


def compare(undisturbed: DemoRun, disturbed: DemoRun, steps: int) -> list[Check]:
    """The proof, line by line."""
    struck, back = len(disturbed.struck), len(disturbed.recoveries)
    ends = Check(
        holds=undisturbed.exit_codes == [0]
        and disturbed.exit_codes == [int(Exit.DRAINED), 0]
        and struck == back == NUM_FAULTS,
        what=f"{struck} faults struck; exit codes {undisturbed.exit_codes} and "
        f"{disturbed.exit_codes} (75: drained and committed, start me again)",
    )
    one, other = undisturbed.history, disturbed.history
    found = first_difference(one, other, steps)
    again = other.again(steps)
    return [
        ends,
        _equal(
            found,
            (LOSS, RATE),
            f"loss of all {steps} steps on both ranks equal to the last bit ({again} steps done "
            "twice, equal too)",
            is_whole=one.reached() == other.reached() == steps,
        ),
        _equal(
            found,
            (BEFORE, STATE, RANDOM, RANDOM_AFTER),
            "all weights, optimizer state and random numbers equal behind each of them",
            is_whole=bool(one.ranks) and one.ranks == other.ranks,
        ),
        _same_data(found, one, other, steps),
    ]


def _equal(
    found: StepDifference | None, parts: tuple[str, ...], what: str, *, is_whole: bool
) -> Check:
    differs = found is not None and found.part in parts
    if not is_whole:
        return Check(holds=False, what="not every rank made every step")
    return Check(holds=not differs, what=found.words if found is not None and differs else what)


def _same_data(
    found: StepDifference | None, one: RunHistory, other: RunHistory, steps: int
) -> Check:
    if found is not None and found.part == BATCH:
        return Check(holds=False, what=found.words)
    seen = samples(one, other, steps)
    return Check(
        holds=seen.batches > 0 and not seen.lost + seen.repeated,
        what=f"the same {seen.batches} batches in the same steps: none lost, none repeated",
    )
