"""After a drain: ask Slurm to run the job again.

Guarantees: one line says what came of it, and what to type where nothing did. Never raises, and is
over within ``LIMIT_S``. A job that somebody has cancelled is not brought back: cancelling signals
the job as any notice does, so it drains too, and Slurm would requeue even a job that is over. A
task of an array is requeued alone: the last one's SLURM_JOB_ID is the whole array's.

What can go wrong: Slurm takes this as the order to end what runs in the job, this process and the
other machines' included, with SIGTERM at once and SIGKILL after its KillWait. That is why it is the
last act, and why SIGTERM is ignored from here on: the exit code and the line are still owed.

Used by ``outlast run`` where ``notice.requeue`` is set, and by batch scripts through ``outlast
requeue``, which can wait for the last of several machines. Rejected: a bare ``scontrol requeue``
there (it brings a cancelled job back); asking every machine's agent to do it.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Mapping
from typing import Final

from outlast.ledger.narrator import say

LIMIT_S: Final = 20.0


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
    deadline = time.monotonic() + LIMIT_S
    try:
        _scontrol(deadline, "requeue", "Incomplete", job)
        now = fields(_scontrol(deadline, "show", "job", "-o", job))
        if now.get("Reason") == "TimeLimit":  # over, by the clock and not by a person's wish
            _scontrol(deadline, "requeue", job)
        elif int(now.get("Restarts", "0")) <= int(environ.get("SLURM_RESTART_COUNT") or "0"):
            _not_done(job, f"Slurm is ending it ({now.get('JobState', 'no state')})")
            return
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        _not_done(job, reason(error))
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


def fields(shown: str) -> dict[str, str]:
    """A line of ``scontrol show job -o``: field → value (up to its first blank)."""
    pairs = (word.partition("=") for word in shown.split())
    return {name: value for name, equals, value in pairs if equals}


def reason(error: Exception) -> str:
    """Why it failed, in words."""
    if isinstance(error, FileNotFoundError):
        return "there is no scontrol here"
    if isinstance(error, subprocess.TimeoutExpired):
        return f"scontrol has not answered within {LIMIT_S:.0f} s"
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
