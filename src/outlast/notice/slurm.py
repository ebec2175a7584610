"""Slurm: the end of this job's time limit, and running the job again after a drain.

What Slurm signals is heard as a signal, elsewhere. The end of the limit is read from ``scontrol
show job``, once a minute near it and every ten minutes when it is far, because a limit can be
changed while a job runs; until (or unless) that answers, it is what ``SLURM_JOB_END_TIME`` said at
the job's start. Ten minutes before the end comes an early notice, so that a long save is begun in
time, and two minutes before it a hard one: what EC2 gives, and enough to agree on a step and save,
while less would be spent in Slurm's own SIGTERM and KillWait (30 s unless the site says otherwise).
Of a short job they come at the half and at three quarters of its time, or it would be told to leave
before it began. A site or a person that wants the signal sooner uses ``sbatch
--signal=B:USR1@300``. ``requeue`` is called by ``outlast run`` where ``notice.requeue`` is set, and
by batch scripts through ``outlast requeue``, which can wait for the last of several machines.

Guarantees: ``poll`` never raises; ``scontrol`` is asked at most once in 60 s, and killed after 2 s.
A job without a limit, or an answer that cannot be read, is no notice. ``requeue`` never raises, is
over within ``REQUEUE_LIMIT_S``, and says in one line what came of it and what to type where nothing
did. A job that somebody has cancelled is not brought back: cancelling signals the job as any notice
does, so it drains too, and Slurm would requeue even a job that is over. A task of an array is
requeued alone: the last one's SLURM_JOB_ID is the whole array's. Source: the manual pages of
scontrol, sbatch and slurm.conf (22.05).

What can go wrong: ``OverTimeLimit`` at the site lets a job go on after its limit, so we stop sooner
than we would have to; ``scontrol`` may be missing in a container (``last_error`` says so). Slurm
takes a requeue as the order to end what runs in the job, this process and the other machines'
included, with SIGTERM at once and SIGKILL after its KillWait. So it is the last act, and SIGTERM is
ignored from there on: the exit code and the line are still owed.

Rejected: a bare ``scontrol requeue`` in batch scripts (it brings a cancelled job back); asking
every machine's agent to do it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Final, NamedTuple, Protocol

from outlast.ledger.narrator import say
from outlast.notice import Notice
from outlast.notice.source import CommandResult, NoticeSource, NotUnderstoodError, iso_utc, run

EARLY_S: Final = 600.0
HARD_S: Final = 120.0
KILL_WAIT_S: Final = 30.0  # slurm.conf's default
_LIMIT_S: Final = 2.0
_MAX_BYTES: Final = 65_536
_ASKED_EVERY_MIN_S: Final = 60.0
_ASKED_EVERY_MAX_S: Final = 600.0
_JOB_ID: Final = re.compile("[0-9]{1,12}")
# Both at once: a job may be named "EndTime=…".
_SPAN: Final = re.compile(r"\sStartTime=(\S+)\s+EndTime=(\S+)")
_KILL_WAIT: Final = re.compile(r"^KillWait\s*=\s*([0-9]+) sec", re.MULTILINE)
_UNKNOWN: Final = ("Unknown", "None", "N/A", "NONE")


class CommandRunner(Protocol):
    """The shape of :func:`outlast.notice.source.run`, for recorded answers."""

    def __call__(
        self, command: list[str], *, limit_s: float, max_bytes: int, environ: Mapping[str, str]
    ) -> CommandResult:
        """Run one command."""


class _JobTimes(NamedTuple):
    """When the job began and when its time is over, None where that is not known."""

    begin_t: float | None
    end_t: float | None


class SlurmWatcher(NoticeSource):
    """Knows when this job's time is over.

    Args:
        environ: the job's environment, with ``SLURM_JOB_ID``.
        clock: seconds since the epoch.
        run: runs a command; replaced in tests.
    """

    name = "slurm"

    def __init__(
        self,
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.time,
        run: CommandRunner = run,
    ) -> None:
        self._job = environ.get("SLURM_JOB_ID", "")
        super().__init__(f"Slurm's job {self._job or '(SLURM_JOB_ID is not set)'}", clock)
        self._environ = environ
        self._run = run
        self._span = _JobTimes(
            _epoch(environ.get("SLURM_JOB_START_TIME", "")),
            _epoch(environ.get("SLURM_JOB_END_TIME", "")),
        )
        self._ask_again_t = 0.0

    @property
    def end_t(self) -> float | None:
        """When the job's time is over, in seconds since the epoch, as far as is known."""
        return self._span.end_t

    def _ask(self) -> Notice | None:
        now = self._clock()
        # A wait longer than any of ours means that the clock was set back.
        if not 0 < self._ask_again_t - now <= _ASKED_EVERY_MAX_S:
            self._ask_again_t = now + _ASKED_EVERY_MIN_S
            try:
                self._span = self._asked()
                end_t = self._span.end_t
                far_s = _ASKED_EVERY_MAX_S if end_t is None else (end_t - now) / 10
                self._ask_again_t = now + min(max(far_s, _ASKED_EVERY_MIN_S), _ASKED_EVERY_MAX_S)
            except (OSError, NotUnderstoodError) as error:
                self._count(error)  # what was known before is still the best that is known
        return self._told(now)

    def _asked(self) -> _JobTimes:
        if not _JOB_ID.fullmatch(self._job):
            raise NotUnderstoodError("SLURM_JOB_ID is not a job's number")
        array, task = (self._environ.get(f"SLURM_ARRAY_{part}_ID", "") for part in ("JOB", "TASK"))
        # The number of an array's last job is the array's too, and would show all of it.
        asked = f"{array}_{task}" if array.isdecimal() and task.isdecimal() else self._job
        text = scontrol(["show", "job", "-o", asked], self._environ, self._run)
        ours = [line for line in text.splitlines() if line.startswith(f"JobId={self._job} ")]
        found = _SPAN.search(ours[0]) if ours else None
        if found is None:
            raise NotUnderstoodError("scontrol does not say when the job ends")
        return _JobTimes(_moment(found[1]), _moment(found[2]))

    def _told(self, now: float) -> Notice | None:
        begin_t, end_t = self._span
        if end_t is None:
            return None
        whole_s = float("inf") if begin_t is None else end_t - begin_t
        left_s = end_t - now
        if left_s > min(EARLY_S, whole_s / 2):
            return None
        early = left_s > min(HARD_S, whole_s / 4)
        return self._once(
            (end_t, early),
            action="time-limit",
            deadline_t=end_t,
            early=early,
            event=self._job,
            detail=f"Slurm: the time limit of job {self._job} is at {iso_utc(end_t)}",
        )


def kill_wait_s(environ: Mapping[str, str], run: CommandRunner = run) -> float:
    """Seconds from Slurm's SIGTERM to its SIGKILL; the default where the site's is not known."""
    try:
        found = _KILL_WAIT.search(scontrol(["show", "config"], environ, run))
    except (OSError, NotUnderstoodError):
        return KILL_WAIT_S
    return float(found[1]) if found else KILL_WAIT_S


def scontrol(arguments: list[str], environ: Mapping[str, str], run: CommandRunner) -> str:
    """What ``scontrol`` prints, with times as seconds since the epoch where it can do that.

    Raises:
        OSError: it is not there, or does not end in time.
        NotUnderstoodError: it failed.
    """
    asked = {**environ, "SLURM_TIME_FORMAT": "%s", "LC_ALL": "C"}
    try:
        code, output = run(
            ["scontrol", *arguments], limit_s=_LIMIT_S, max_bytes=_MAX_BYTES, environ=asked
        )
    except FileNotFoundError:
        raise NotUnderstoodError("there is no scontrol here to ask for the time limit") from None
    except TimeoutError:
        raise NotUnderstoodError(f"scontrol took over {_LIMIT_S:g} s") from None
    if code != 0:
        raise NotUnderstoodError(f"scontrol exited with {code}")
    return output.decode("utf-8", "replace")


def _epoch(text: str) -> float | None:
    return float(text) if re.fullmatch("[0-9]{1,12}", text) and int(text) > 0 else None


def _moment(text: str) -> float | None:
    """Seconds since the epoch of scontrol's time: a number, or local time without its zone."""
    if text in _UNKNOWN:
        return None
    seconds = _epoch(text)
    if seconds is not None:
        return seconds
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        raise NotUnderstoodError("scontrol's times cannot be read") from None


REQUEUE_LIMIT_S: Final = 20.0


def requeue(environ: Mapping[str, str]) -> None:
    """Requeue the Slurm job that this process belongs to; outside one nothing happens.

    Args:
        environ: the environment that Slurm gave this process.
    """
    job = job_name(environ)
    if job is None:
        return
    with contextlib.suppress(ValueError):  # not in the main thread: its signals are not ours
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # inherited by the commands below
    deadline = time.monotonic() + REQUEUE_LIMIT_S
    try:
        _scontrol(deadline, "requeue", "Incomplete", job)
        now = fields_of_job(_scontrol(deadline, "show", "job", "-o", job))
        if now.get("Reason") == "TimeLimit":  # over, by the clock and not by a person's wish
            _scontrol(deadline, "requeue", job)
        elif int(now.get("Restarts", "0")) <= int(environ.get("SLURM_RESTART_COUNT") or "0"):
            _not_done(job, f"Slurm is ending it ({now.get('JobState', 'no state')})")
            return
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        _not_done(job, why_not(error))
        return
    say(
        f"Slurm runs job {job} again, two minutes from now at the earliest; "
        f"at once: scontrol update JobId={job} StartTime=now"
    )


def job_name(environ: Mapping[str, str]) -> str | None:
    """What ``scontrol`` calls this job; None outside Slurm and on machines that need not ask."""
    job = environ.get("SLURM_JOB_ID", "")
    if not job or environ.get("SLURM_PROCID", "0") != "0":
        return None
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else job


def fields_of_job(shown: str) -> dict[str, str]:
    """A line of ``scontrol show job -o``: field → value (up to its first blank)."""
    pairs = (word.partition("=") for word in shown.split())
    return {name: value for name, equals, value in pairs if equals}


def why_not(error: Exception) -> str:
    """Why it failed, in words."""
    if isinstance(error, FileNotFoundError):
        return "there is no scontrol here"
    if isinstance(error, subprocess.TimeoutExpired):
        return f"scontrol has not answered within {REQUEUE_LIMIT_S:.0f} s"
    if isinstance(error, subprocess.CalledProcessError):
        said = f"{error.stderr or ''}{error.stdout or ''}".strip().splitlines()
        return said[0].rstrip(".") if said else f"scontrol failed with {error.returncode}"
    return str(error)


def _scontrol(deadline: float, *arguments: str) -> str:
    done = subprocess.run(
        ["scontrol", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=True,
        timeout=max(deadline - time.monotonic(), 0.1),
    )
    return done.stdout


def _not_done(job: str, why: str) -> None:
    cure = f"scontrol requeue {job}, or submit it anew"
    say(f"job {job} is not requeued: {why}. To run it again: {cure}")
