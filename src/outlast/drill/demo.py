"""Two runs of the same training, one of them disturbed, and the proof that nothing changed.

The disturbed run is started by ``outlast run`` and, when it leaves with 75, started again by the
same command, as a scheduler would. What is compared comes from the training script's own records:
every loss, every sample id, and a hash over all weights and optimizer state.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from outlast.drill.demo_faults import DemoFault, RunningJob, draw
from outlast.drill.faults.fault import Struck
from outlast.drill.metadata_server import AwsMetadataServer
from outlast.drill.trace import Trace, by_step, read_final, read_trace
from outlast.errors import ConfigError, Exit
from outlast.ledger.events import Event
from outlast.ledger.file import read_events

RANKS: Final = 2
EVERY: Final = 20
STEPS: Final = 150
STEPS_MIN: Final = 135  # each third must hold a checkpoint and a fault
STARTS_MAX: Final = 4
MARK: Final = ".outlast-demo"
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


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the proof."""

    holds: bool
    what: str


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
    """One run of the training under ``outlast run``, started as often as it asks for."""

    def __init__(
        self, label: str, root: Path, steps: int, listener: DemoListener, url: str = ""
    ) -> None:
        self.label = label
        self.directory = root / label
        self.traces = root / f"{label}-traces"
        self.traces.mkdir()
        self.exit_codes: list[int] = []
        self.struck: list[Struck] = []
        self._steps = steps
        self._listener = listener
        self._log = root / f"{label}.log"
        script = Path(__file__).with_name("demo_train.py")
        self._command = [
            *(sys.executable, "-m", "outlast", "run", "--nproc-per-node", str(RANKS)),
            *("--redirects", "3", "--log-dir", str(root / f"{label}-logs")),
            *("--dir", str(self.directory), str(script)),
            *(str(root / TEXT), str(self.traces), str(steps)),
        ]
        self._environ = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("OUTLAST_", "PET_"))},
            "OUTLAST_NOTICE_PLATFORM": "aws" if url else "none",
            "OUTLAST_NOTICE_BASE_URL": url,
            "OUTLAST_NOTICE_POLL": "200 ms",  # on a fast machine a second is a third of the run
        }

    def complete(self, faults: list[DemoFault], restarted: Callable[[], None]) -> None:
        """Run to the end through ``faults``; ``restarted`` is called before each new start."""
        start = time.monotonic()
        job = RunningJob(self.traces, self.directory / "checkpoints", RANKS)
        over = threading.Event()
        striker = threading.Thread(
            target=self._strike, args=(faults, over), name="demo-faults", daemon=True
        )
        striker.start()
        shown: set[int] = set()
        while len(self.exit_codes) < STARTS_MAX:
            with self._log.open("ab") as log:
                process = subprocess.Popen(self._command, env=self._environ, stdout=log, stderr=log)
            try:
                while process.poll() is None:
                    time.sleep(0.1)
                    self._listener.progress(self._progress(job, start))
                    self._tell(shown)
            except BaseException:
                process.terminate()
                process.wait()
                raise
            self.exit_codes.append(process.returncode)
            if process.returncode != Exit.DRAINED:
                break
            restarted()
        over.set()
        striker.join()
        self._tell(shown)
        self._listener.finished(self._progress(job, start))

    def _strike(self, faults: list[DemoFault], over: threading.Event) -> None:
        job = RunningJob(self.traces, self.directory / "checkpoints", RANKS)
        for fault in faults:
            struck = None
            while struck is None and not over.is_set():
                # A strike that missed its moment is tried at the next one, with what is there now.
                struck = fault.strike(job, over.is_set)
            if struck is None:
                return
            self.struck.append(struck)
            self._listener.struck(struck)
            while not over.is_set() and _recovery(self, struck) is None:
                time.sleep(0.05)

    def _tell(self, shown: set[int]) -> None:
        for index, struck in enumerate(list(self.struck)):
            if index not in shown and (recovery := _recovery(self, struck)) is not None:
                shown.add(index)
                self._listener.recovered(recovery)

    def _progress(self, job: RunningJob, start: float) -> DemoProgress:
        steps = job.look()[0].steps if job.look() else []
        loss = float.fromhex(steps[-1].loss) if steps else None
        done = steps[-1].step if steps else 0
        return DemoProgress(self.label, done, self._steps, loss, time.monotonic() - start)


def demo(root: Path, *, steps: int, seed: int, listener: DemoListener) -> DemoResult:
    """Run the demo in ``root``, which is emptied if an earlier demo made it.

    Raises:
        ConfigError: ``root`` holds something else, or there are too few steps for three faults.
    """
    start = time.monotonic()
    if steps < STEPS_MIN:
        raise ConfigError(f"--steps {steps} has no room for three faults; give {STEPS_MIN} or more")
    _prepare(root)
    from outlast.drill.demo_train import Gpt  # torch: not before what is asked for can be had

    text = root / TEXT
    listener.begun(gather(text), sum(p.numel() for p in Gpt().parameters()))
    undisturbed = DemoRun("undisturbed", root, steps, listener)
    undisturbed.complete([], lambda: None)
    with AwsMetadataServer() as server:
        disturbed = DemoRun("disturbed", root, steps, listener, server.url)
        disturbed.complete(draw(seed, steps, EVERY, server), server.withdraw)
    recoveries = [found for s in disturbed.struck if (found := _recovery(disturbed, s))]
    return DemoResult(
        recoveries=recoveries,
        checks=compare(undisturbed, disturbed, steps, len(recoveries)),
        directory=str(disturbed.directory),
        seconds=time.monotonic() - start,
    )


def _prepare(root: Path) -> None:
    if root.exists() and any(root.iterdir()):
        if not (root / MARK).exists():
            raise ConfigError(f"{root} is not empty and no demo made it; give another with --dir")
        shutil.rmtree(root)
    try:
        root.mkdir(parents=True, exist_ok=True)
        (root / MARK).touch()
    except OSError as error:
        raise ConfigError(
            f"{root} cannot be written: {error.strerror}; give another with --dir"
        ) from None


def _recovery(run: DemoRun, struck: Struck) -> Recovery | None:
    """What came of a fault, once the job has completed a step after it."""
    events = [event for event in read_events(run.directory) if event.t >= struck.t - 0.05]
    noticed = _first(events, struck.event)
    resumed = _first(events, "resumed")
    if noticed is None or resumed is None:
        return None
    trace = read_trace(run.traces, 0)
    back = next((s for s in trace.steps if s.t > resumed.t), None)
    if back is None:
        return None
    before = [s.step for s in trace.steps if s.t < resumed.t]
    drained = _first(events, "drained")
    if struck.event == "notice" and drained is not None:
        answer = f"drained after step {drained['step']}, committed, exit 75, started again"
    else:
        answer = f"resumed from step {resumed['step']}"
    return Recovery(
        what=struck.what,
        detected_after_s=max(noticed.t - struck.t, 0.0),
        lost_steps=max(max(before, default=0) - resumed["step"], 0),
        back_after_s=back.t - struck.t,
        answer=answer,
    )


def _first(events: list[Event], name: str) -> Event | None:
    return next((event for event in events if event.event == name), None)


def compare(
    undisturbed: DemoRun, disturbed: DemoRun, steps: int, num_recovered: int
) -> list[Check]:
    """The proof, line by line."""
    ends = Check(
        holds=undisturbed.exit_codes == [0]
        and disturbed.exit_codes == [int(Exit.DRAINED), 0]
        and len(disturbed.struck) == num_recovered == 3,
        what=f"three faults struck; exit codes {undisturbed.exit_codes} and "
        f"{disturbed.exit_codes} (75: drained and committed, start me again)",
    )
    ours = [read_trace(undisturbed.traces, rank) for rank in range(RANKS)]
    theirs = [read_trace(disturbed.traces, rank) for rank in range(RANKS)]
    return [
        ends,
        _compare_losses(ours, theirs, steps),
        _compare_states(undisturbed, disturbed),
        _compare_samples(ours, theirs, steps),
    ]


def _compare_losses(ours: list[Trace], theirs: list[Trace], steps: int) -> Check:
    lines = 0
    for rank, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        left, right = by_step(one), by_step(other)
        for step in range(1, steps + 1):
            losses = {line.loss for line in [*left[step], *right[step]]}
            lines += len(right[step])
            if len(losses) != 1 or not left[step] or not right[step]:
                return Check(holds=False, what=f"loss of step {step} on rank {rank}: {losses}")
    again = lines - steps * len(ours)
    return Check(
        holds=True,
        what=f"loss of all {steps} steps on both ranks equal to the last bit "
        f"({again // len(ours)} steps done twice, equal too)",
    )


def _compare_states(undisturbed: DemoRun, disturbed: DemoRun) -> Check:
    hashes = set()
    for rank in range(RANKS):
        for run in (undisturbed, disturbed):
            final = read_final(run.traces, rank)
            hashes.add(final.sha256 if final else "missing")
    return Check(
        holds=len(hashes) == 1 and "missing" not in hashes,
        what="SHA-256 of all weights and optimizer state equal: "
        + ", ".join(sorted(digest[:16] for digest in hashes)),
    )


def _compare_samples(ours: list[Trace], theirs: list[Trace], steps: int) -> Check:
    left, right = _consumed(ours, steps), _consumed(theirs, steps)
    for step, (one, other) in enumerate(zip(left, right, strict=True), start=1):
        if one != other:
            return Check(holds=False, what=f"samples of step {step}: {one} and {other}")
    ids = [sample for step in right for sample in step]
    return Check(
        holds=len(set(ids)) == len(ids) > 0,
        what=f"the same {len(ids):,} sample ids in the same steps: none lost, none repeated",
    )


def _consumed(traces: list[Trace], steps: int) -> list[list[int]]:
    """For each step the ids that went into it; of a step done twice, the last time counts."""
    per_rank = [by_step(trace) for trace in traces]
    return [
        [sample for rank in per_rank if rank[step] for sample in rank[step][-1].ids]
        for step in range(1, steps + 1)
    ]
