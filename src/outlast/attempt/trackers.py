"""Experiment trackers: a run that was continued is one run there too, and says what it has cost.

W&B takes an id that we choose: the job's. MLflow gives out ids itself, so the one that a worker is
using is written down in the job's directory and handed to the next attempt. TensorBoard knows no
ids, only directories: one in the job's is offered. All of it goes through variables that these
tools read themselves, and none that somebody has set is touched.

``TrackerFeed`` writes incidents, goodput and lost time into the run that the script has begun
itself. Guarantees: it runs on rank 0, in a thread of its own, from the first step of an attempt
on. Nothing waits for it but the end of a session that ends well, for ``LAST_S`` at most. A tracker
that raises costs one line. The script's own points stay as they are: W&B drops a row whose step
goes back and counts rows itself, so ours go into the row that is open and never name a step. An
incident is told once in a job; twice, where an attempt ends within ``KEPT_S`` of it, as a
tracker's file may not have been flushed by then.

What can go wrong: a tracker that no longer knows the run (its database was wiped) refuses it in
its own words; remove ``runs.json`` from the job's directory, or set its variable. In TensorBoard a
mark goes with the other points behind ``purge_step`` where a later attempt goes back further.

Rejected: importing a tracker to ask it (slow, and it may not be installed); an event file of our
own beside the script's (TensorBoard reads one file of a directory at a time); to flush the script's
event file (its next point would wait for the disk); to fold the ledger at one go (a training
process has one interpreter lock: a million events are seconds of it).
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

import msgspec

from outlast.ledger.file import Follower
from outlast.ledger.goodput import whole
from outlast.ledger.incidents import Incident
from outlast.ledger.so_far import SoFar

logger = logging.getLogger(__name__)

JOB_VARIABLE: Final = "OUTLAST_JOB_ID"  # set by our agent
RUN_VARIABLE: Final = "OUTLAST_RUN_ID"
TENSORBOARD_VARIABLE: Final = "OUTLAST_TENSORBOARD_DIR"
_MLFLOW_MARK: Final = "OUTLAST_MLFLOW_RUN_ID"  # what we have set MLflow's variable to
_OURS: Final = re.compile(r"outlast-[0-9a-f]{12}(-\d+)?")
_FILE: Final = "runs.json"
_MLFLOW_ID: Final = re.compile(r"[0-9a-f]{32}")

LOOK_S: Final = 5.0
EVERY_S: Final = 60.0  # goodput; incidents as they come
LAST_S: Final = 2.0
KEPT_S: Final = 150.0  # until what was told is taken for kept: event files are flushed after 120 s
READ_BYTES: Final = 1 << 16  # of the ledger at once: some milliseconds of the interpreter
PAUSE_S: Final = 0.02  # between two such pieces
SEARCH_MOST_S: Final = 600.0  # between two searches for an event file's writer
TRIES: Final = 3  # in a row that fail, before a tracker is left alone in this attempt
MARKS_MOST: Final = 50
TAG_MOST: Final = 4000  # characters that MLflow takes in a tag, everywhere
_WRITERS: Final = ("torch.utils.tensorboard.writer", "tensorboardX.writer")
_LOGGERS: Final = ("wandb", "mlflow", *_WRITERS)
_MLFLOW_LOGGERS: Final = ("lightning.pytorch.loggers.mlflow", "pytorch_lightning.loggers.mlflow")


class _Runs(msgspec.Struct, kw_only=True):
    """What is in ``runs.json``.

    Attributes:
        mlflow: the run that MLflow has begun, "" for none.
        told: incidents that trackers have been told of.
    """

    mlflow: str = ""
    told: int = 0


def export(
    job: str, directory: Path, rank: int, environ: MutableMapping[str, str] = os.environ
) -> set[str]:
    """Set what trackers read, before a script asks them for a run.

    Args:
        job: the job's id.
        directory: the job's directory.
        rank: of this worker. Where every rank logs, each has a run of its own, as without us.
        environ: the environment to set it in.

    Returns:
        The names that are new there: what comes behind the job in the same process, a notebook
        say, is no part of its run.
    """
    _forget_another(job, environ)
    before = set(environ)
    run = f"outlast-{job}" if rank == 0 else f"outlast-{job}-{rank}"
    environ.setdefault(RUN_VARIABLE, run)
    environ.setdefault(TENSORBOARD_VARIABLE, str(directory / "tensorboard"))
    if "WANDB_RUN_ID" not in environ:
        environ["WANDB_RUN_ID"] = environ[RUN_VARIABLE]
        environ.setdefault("WANDB_RESUME", "allow")
    known = _read(directory).mlflow
    if rank == 0 and known and "MLFLOW_RUN_ID" not in environ:
        environ["MLFLOW_RUN_ID"] = environ[_MLFLOW_MARK] = known
    return set(environ) - before


def _forget_another(job: str, environ: MutableMapping[str, str]) -> None:
    """What was set for another job, in this process or by the one that started it, is not ours."""
    run = environ.get(RUN_VARIABLE, "")
    if not _OURS.fullmatch(run) or run.startswith(f"outlast-{job}"):
        return
    if environ.get("WANDB_RUN_ID") == run:
        del environ["WANDB_RUN_ID"]
    mlflow = environ.pop(_MLFLOW_MARK, None)
    if mlflow is not None and environ.get("MLFLOW_RUN_ID") == mlflow:
        del environ["MLFLOW_RUN_ID"]
    del environ[RUN_VARIABLE]
    environ.pop(TENSORBOARD_VARIABLE, None)


def forget_rank(environ: MutableMapping[str, str] = os.environ) -> None:
    """This process may be another rank in the next attempt: what was set for its rank goes."""
    run = environ.get(RUN_VARIABLE, "")
    if _OURS.fullmatch(run):
        if environ.get("WANDB_RUN_ID") == run:
            del environ["WANDB_RUN_ID"]
        del environ[RUN_VARIABLE]
    mlflow = environ.pop(_MLFLOW_MARK, None)
    if mlflow is not None and environ.get("MLFLOW_RUN_ID") == mlflow:
        del environ["MLFLOW_RUN_ID"]


def export_here() -> None:
    """Do as :func:`export` does, in a worker that our agent has started."""
    job, directory = os.environ.get(JOB_VARIABLE), os.environ.get("OUTLAST_DIR")
    if job and directory:
        export(job, Path(directory), int(os.environ.get("RANK", "0")))


def note(directory: Path) -> str:
    """On rank 0, once training goes: remember the run that MLflow has begun, and return its id.

    Which run is active is a matter of the thread that asks. Lightning's logger begins a run that is
    active in no thread, and is asked itself.

    Returns:
        "" where MLflow is not in use.
    """
    mlflow: Any = sys.modules.get("mlflow")
    if mlflow is None:
        return ""
    try:
        run = mlflow.active_run()
        found = str(run.info.run_id) if run is not None else _lightnings_run()
        if not _MLFLOW_ID.fullmatch(found):
            return ""
        runs = _read(directory)
        if runs.mlflow != found:
            runs.mlflow = found
            _write(directory, runs)
    except Exception as error:  # noqa: BLE001 - a tracker's trouble is not training's
        logger.warning("MLflow's run is not remembered: %s", error)
        return ""
    return found


def _lightnings_run() -> str:
    loggers = _living(_classes(_MLFLOW_LOGGERS, "MLFlowLogger"))
    return next((str(one._run_id) for one in loggers if one._run_id and one._initialized), "")


def _write(directory: Path, runs: _Runs) -> None:
    whole_file = directory / f".{_FILE}.{os.getpid()}"
    whole_file.write_bytes(msgspec.json.encode(runs))
    whole_file.replace(directory / _FILE)


def _read(directory: Path) -> _Runs:
    try:
        runs = msgspec.json.decode((directory / _FILE).read_bytes(), type=_Runs)
    except (OSError, msgspec.MsgspecError):
        return _Runs()
    if not _MLFLOW_ID.fullmatch(runs.mlflow):
        runs.mlflow = ""
    return runs


# --- what goes into a run -------------------------------------------------------------------------


class _IncidentMark(msgspec.Struct, frozen=True, kw_only=True):
    """An incident that is over, as a point of a run.

    Attributes:
        number: its place among the job's, from 1.
        step: that was gone on from; without one the last before it.
        t: wall-clock time of its end.
        words: one sentence.
        cost_s: seconds that it has cost each worker.
    """

    number: int
    step: int
    t: float
    words: str
    cost_s: float


class _RunState(msgspec.Struct, frozen=True, kw_only=True):
    """How the job stands, in numbers that go into a run at ``step``."""

    step: int
    scalars: dict[str, float]


class _RunWriter:
    """A tracker that the script may use; one for each kind."""

    name: ClassVar[str]

    def __init__(self, told: int) -> None:
        self._told = told  # incidents
        self._num_failures = 0

    def open(self) -> Any:
        """What takes points, or None while the script has nothing open."""
        raise NotImplementedError

    def write(self, target: Any, marks: Sequence[_IncidentMark], now: _RunState) -> None:
        """Write these marks, and how the job stands."""
        raise NotImplementedError

    def is_in_use(self) -> bool:
        """Whether there is anything to write to."""
        try:
            return self._num_failures < TRIES and self.open() is not None
        except Exception as error:  # noqa: BLE001 - a tracker's trouble is not training's
            self._failed(error)
            return False

    def lacks(self, marks: Sequence[_IncidentMark]) -> bool:
        """Whether there are some of ``marks``, all of the job's, that it has not been told of."""
        return len(marks) > self._told and self.is_in_use()

    def tell(self, marks: Sequence[_IncidentMark], now: _RunState, *, is_due: bool) -> None:
        """Write what it does not have yet of ``marks``, and how the job stands."""
        if not (is_due and self.is_in_use()) and not self.lacks(marks):
            return
        new = marks[self._told :]
        try:
            self.write(self.open(), new[-MARKS_MOST:], now)
        except Exception as error:  # noqa: BLE001 - likewise
            self._failed(error)
        else:
            self._told, self._num_failures = len(marks), 0

    def _failed(self, error: Exception) -> None:
        self._num_failures += 1
        if self._num_failures == 1:
            logger.warning("%s does not take incidents and goodput: %s", self.name, error)


class _WandbRun(_RunWriter):
    name = "W&B"

    def open(self) -> Any:
        return getattr(sys.modules.get("wandb"), "run", None)

    def write(self, target: Any, marks: Sequence[_IncidentMark], now: _RunState) -> None:
        row: dict[str, Any] = dict(now.scalars)
        if marks:  # one row takes one value of a name
            row["outlast/incident"] = " | ".join(mark.words for mark in marks)
            row["outlast/incident_step"] = marks[-1].step
            row["outlast/incident_cost_s"] = math.fsum(mark.cost_s for mark in marks)
        target.log(row, commit=False)


class _MlflowRun(_RunWriter):
    name = "MLflow"

    def __init__(self, told: int, run_id: str) -> None:
        super().__init__(told)
        self._run_id = run_id
        self._words: list[str] = []

    def open(self) -> Any:
        return sys.modules.get("mlflow") if self._run_id else None

    def write(self, target: Any, marks: Sequence[_IncidentMark], now: _RunState) -> None:
        entities, now_ms = target.entities, int(time.time() * 1000)
        metrics = [
            entities.Metric(name, value, now_ms, now.step) for name, value in now.scalars.items()
        ]
        metrics += [
            entities.Metric("outlast/incident_cost_s", mark.cost_s, int(mark.t * 1000), mark.step)
            for mark in marks
        ]
        tags = [
            entities.RunTag(f"outlast.incident.{mark.number:04}", mark.words[:TAG_MOST])
            for mark in marks
        ]
        target.MlflowClient().log_batch(self._run_id, metrics=metrics, tags=tags)


class _EventFile(_RunWriter):
    """TensorBoard's: the script's own writer, which is found among the objects of the process."""

    name = "TensorBoard"

    def __init__(self, told: int) -> None:
        super().__init__(told)
        self._found: weakref.ref[Any] | None = None
        self._search_s = 0.0  # monotonic: not before
        self._pause_s = LOOK_S

    def open(self) -> Any:
        writer = None if self._found is None else self._found()
        if writer is not None and _takes_points(writer):
            return writer
        self._found = None
        if time.monotonic() < self._search_s:
            return None
        if not (writers := _classes(_WRITERS, "SummaryWriter")):
            return None
        self._pause_s = min(self._pause_s * 2, SEARCH_MOST_S)
        self._search_s = time.monotonic() + self._pause_s
        places = [(str(_place(one)), one) for one in _living(writers) if _takes_points(one)]
        if not places:
            return None
        # Of several (training, evaluation) always the same one.
        writer = min(places, key=lambda found: (found[0].count(os.sep), found[0]))[1]
        self._found = weakref.ref(writer)
        return writer

    def write(self, target: Any, marks: Sequence[_IncidentMark], now: _RunState) -> None:
        for name, value in now.scalars.items():
            target.add_scalar(name, value, now.step)
        for mark in marks:
            target.add_scalar("outlast/incident_cost_s", mark.cost_s, mark.step, walltime=mark.t)
            target.add_text("outlast/incident", mark.words, mark.step, walltime=mark.t)


def _classes(modules: Sequence[str], name: str) -> list[type]:
    """The classes of that name which the script has imported, and what is derived from them."""
    found = [getattr(sys.modules.get(module), name, None) for module in modules]
    classes: list[type] = [one for one in found if isinstance(one, type)]
    for one in classes:  # those that are appended are looked at, too
        derived: list[type] = one.__subclasses__()
        classes += [more for more in derived if more not in classes]
    return classes


def _living(classes: Sequence[type]) -> list[Any]:
    """Their objects in this process; 50 ms for half a million objects."""
    if not classes:
        return []
    wanted = {id(one) for one in classes}  # by identity: a metaclass may refuse to be compared
    return [one for one in gc.get_objects() if id(type(one)) in wanted]


def _takes_points(writer: Any) -> bool:
    """Whether it is open: a closed one would begin another file."""
    return getattr(writer, "file_writer", None) is not None


def _place(writer: Any) -> Any:
    return getattr(writer, "log_dir", None) or getattr(writer, "logdir", "")


class TrackerFeed:
    """Has the script's tracker told of this job; on rank 0, in a thread of its own.

    Args:
        directory: the job's.
        attempt: which one this is.
        step: completed steps.
        mlflow_run: the run that MLflow has begun; "" for none.
    """

    def __init__(self, directory: Path, attempt: int, step: int, mlflow_run: str) -> None:
        self._directory = directory
        self._kept = _read(directory).told
        kept = self._kept
        self._writers = [_WandbRun(kept), _MlflowRun(kept, mlflow_run), _EventFile(kept)]
        self._follower = Follower(directory, most_bytes=READ_BYTES)
        self._so_far = SoFar()
        self._marks: list[_IncidentMark] = []
        self._attempt, self._step = attempt, step
        self._told_s = -math.inf
        self._keep: list[tuple[float, int]] = []  # when how many incidents had been told
        self._wake = threading.Event()
        self._is_last = self._is_closing = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, where the script has imported a tracker; returns at once."""
        if any(name in sys.modules for name in _LOGGERS):
            self._thread = threading.Thread(target=self._run, name="outlast-trackers", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """The session has ended well: tell how it stands now, within ``LAST_S``."""
        if self._thread is not None:
            self._is_last = True
            self._wake.set()
            self._thread.join(LAST_S)

    def close(self) -> None:
        """Nothing more is begun; what is on its way to a tracker is not waited for."""
        self._is_closing = True
        self._wake.set()

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_closing:
            is_last = self._is_last
            try:
                self._turn(is_last=is_last)
            except Exception as error:  # nothing that observes may stop training
                logger.warning("trackers are not told: %s", error, exc_info=True)
                return
            if is_last:
                return
            if not self._is_last:
                self._wake.wait(LOOK_S)

    def _turn(self, *, is_last: bool) -> None:
        if not any(one.is_in_use() for one in self._writers):
            return
        with contextlib.suppress(OSError):  # the job's directory may answer again
            self._read_on(math.inf if is_last else time.time())
        if self._is_closing:
            return
        now_s = time.monotonic()
        is_due = is_last or now_s - self._told_s >= EVERY_S
        if is_due or any(one.lacks(self._marks) for one in self._writers):
            state = self._state()
            for one in self._writers:
                one.tell(self._marks, state, is_due=is_due)
        if is_due:
            self._told_s = now_s
        self._note_kept(now_s, is_last=is_last)

    def _read_on(self, now: float) -> None:
        while events := self._follower.poll():
            for event in events:
                if event.event == "step" and event.attempt == self._attempt:
                    self._step = whole(event) or self._step
            self._so_far.take(events)
            if self._is_closing:
                return
            time.sleep(PAUSE_S)
        self._so_far.take([], now)
        if over := self._so_far.over():
            again_s = self._so_far.split().workers.again_s
            for one in over:
                self._marks.append(self._mark(len(self._marks) + 1, one, again_s))

    def _state(self) -> _RunState:
        found = self._so_far.split(time.time()).workers
        return _RunState(
            step=self._step,
            scalars={
                "outlast/goodput": found.fraction_productive,
                "outlast/lost_worker_s": found.lost,
                "outlast/incidents": float(self._so_far.num_incidents),
                "outlast/attempt": float(self._attempt),
            },
        )

    def _mark(self, number: int, one: Incident, again_s: float | None) -> _IncidentMark:
        at = one.from_step if one.resumed_step is None else one.resumed_step
        words = "; ".join(filter(None, (one.what or one.kind, one.return_words())))
        return _IncidentMark(
            number=number,
            step=at or 0,
            t=one.detected_t if one.back_t is None else one.back_t,
            words=words,
            cost_s=one.cost_s(again_s) or 0.0,
        )

    def _note_kept(self, now_s: float, *, is_last: bool) -> None:
        """The next attempt tells what is not known to have reached a file."""
        told = len(self._marks)
        if told > max((num for _, num in self._keep), default=self._kept):
            self._keep.append((now_s, told))
        kept = [num for since_s, num in self._keep if is_last or now_s - since_s >= KEPT_S]
        if kept:
            self._kept = kept[-1]
            self._keep = self._keep[len(kept) :]
            runs = _read(self._directory)
            runs.told = self._kept
            with contextlib.suppress(OSError):
                _write(self._directory, runs)
