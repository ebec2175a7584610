"""What the demo does to a running job, each fault a small object.

A fault waits for its moment, strikes once, and says what it did and when. It sees the job only from
outside: through the traces, the checkpoint directory and the process table.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from outlast.checkpoint.catalog import find_saves
from outlast.drill.faults.fault import Struck
from outlast.drill.metadata_server import AwsMetadataServer
from outlast.drill.trace import Trace, read_trace
from outlast.storage import Directory

POLL_S: Final = 0.002
STEP_GUESS_S: Final = 0.05
LEAD_S: Final = 120.0  # of a notice


class RunningJob:
    """A running job as a fault sees it."""

    def __init__(self, traces: Path, checkpoints: Path, num_ranks: int) -> None:
        self.storage = Directory(checkpoints)
        self._directory = traces
        self._traces: list[Trace | None] = [None] * num_ranks

    def look(self) -> list[Trace]:
        """Every rank's trace, read anew."""
        for rank, old in enumerate(self._traces):
            self._traces[rank] = read_trace(self._directory, rank, old)
        return [trace for trace in self._traces if trace is not None]

    def completed(self) -> int:
        """The newest step that some rank has completed."""
        return max((t.steps[-1].step for t in self.look() if t.steps), default=0)

    def pids(self) -> list[int]:
        """The workers of the newest attempt, by rank."""
        return [trace.pid for trace in self.look()]

    def step_s(self) -> float:
        """A typical step's length."""
        times = [step.t for step in self.look()[0].steps[-20:]]
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        return statistics.median(gaps) if gaps else STEP_GUESS_S


class DemoFault(Protocol):
    """Something that is done to a job once."""

    name: str

    def strike(self, job: RunningJob, is_over: Callable[[], bool]) -> Struck | None:
        """Wait for the moment and strike; None if the job ended (or the moment was missed)."""


def wait_for_step(job: RunningJob, step: int, is_over: Callable[[], bool]) -> bool:
    """Wait until ``step`` is complete; False if the job ended first."""
    while job.completed() < step:
        if is_over():
            return False
        time.sleep(POLL_S)
    return True


class KillWorker:
    """SIGKILL of one worker in the middle of a step."""

    name = "kill a worker"

    def __init__(self, after_step: int, rank: int, fraction: float) -> None:
        self.after_step = after_step
        self.rank = rank
        self.fraction = fraction

    def strike(self, job: RunningJob, is_over: Callable[[], bool]) -> Struck | None:
        """Kill it a fraction of a step after ``after_step``."""
        if not wait_for_step(job, self.after_step, is_over):
            return None
        time.sleep(self.fraction * job.step_s())
        last = job.completed()
        _kill([job.pids()[self.rank]])
        return Struck(
            what=f"SIGKILL of rank {self.rank} in the middle of step {last + 1}",
            t=time.time(),
            last_step=last,
            event="worker_lost",
        )


class KillAllDuringCheckpoint:
    """SIGKILL of every worker while a checkpoint is being written."""

    name = "kill all workers during a checkpoint"

    def __init__(self, after_step: int) -> None:
        self.after_step = after_step

    def strike(self, job: RunningJob, is_over: Callable[[], bool]) -> Struck | None:
        """Kill them as soon as a step's directory is there without its manifest."""
        if not wait_for_step(job, self.after_step, is_over):
            return None
        pids = job.pids()
        old = set(find_saves(job.storage).unfinished)
        while not (torn := set(find_saves(job.storage).unfinished) - old):
            if is_over():
                return None
            time.sleep(POLL_S / 4)
        _kill(pids)
        t = time.time()
        (save,) = torn
        if save not in find_saves(job.storage).unfinished:
            return None  # it was committed in the very moment: try the next one
        return Struck(
            what=f"SIGKILL of all workers while step {save.step} was being written",
            t=t,
            last_step=job.completed(),
            event="worker_lost",
        )


class PreemptionNotice:
    """The cloud says that the machine will be taken back."""

    name = "preemption notice"

    def __init__(self, after_step: int, server: AwsMetadataServer) -> None:
        self.after_step = after_step
        self.server = server

    def strike(self, job: RunningJob, is_over: Callable[[], bool]) -> Struck | None:
        """Put the notice up."""
        if not wait_for_step(job, self.after_step, is_over):
            return None
        self.server.preempt(in_s=LEAD_S)
        last = job.completed()
        return Struck(
            what=f"AWS takes the machine back in {LEAD_S:.0f} s (said in step {last + 1})",
            t=time.time(),
            last_step=last,
            event="notice",
        )


def draw(seed: int, steps: int, every: int, server: AwsMetadataServer) -> list[DemoFault]:
    """The demo's three faults, at moments that ``seed`` decides."""
    rng = random.Random(seed)  # noqa: S311 - moments, not secrets
    third = steps // 3
    return [
        KillWorker(rng.randrange(every + 2, third), rng.randrange(2), rng.random()),
        KillAllDuringCheckpoint(rng.randrange(third + 5, 2 * third - every)),
        PreemptionNotice(rng.randrange(2 * third + 5, steps - 25), server),
    ]


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
