"""torch's bookkeeping of an attempt's processes, over workers that were not all started for it.

``SubprocessContext`` is kept whole: log files, ``--tee``, error files, polling, closing. Only how a
process comes into being is another one: forked from the server, or kept from the attempt before.
And nothing is judged that the agent has not seen: torch, whose look comes a moment later, would
send SIGTERM to all the others for a worker that has died in between, and wait 30 s for them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from typing import Any

from torch.distributed.elastic.multiprocessing.api import RunProcsResult, SubprocessContext
from torch.distributed.elastic.multiprocessing.subprocess_handler import get_subprocess_handler

from outlast.attempt.bound import AGENT_VARIABLE
from outlast.health.leftovers import VARIABLE as MARK_VARIABLE
from outlast.health.leftovers import Marks, end_group
from outlast.ipc import readable
from outlast.launch.survivors import Crew
from outlast.launch.warm.client import WarmProcess, WarmServer
from outlast.launch.warm.variables import is_per_worker
from outlast.launch.warm.wire import ForkedWorker


class ColdContext(SubprocessContext):
    """An attempt's workers: fresh interpreters, and those that were kept.

    Args:
        marks: each new worker is given one.
        crew: who is kept, and who is to stand by.
        asked: what torch's ``start_processes`` was asked for.

    Attributes:
        is_settled: whether the agent has seen the attempt's end: nobody is left who could go on.
    """

    def __init__(self, marks: Marks, crew: Crew, **asked: Any) -> None:
        super().__init__(**asked)
        self._marks = marks
        self._crew = crew
        for rank, changed in crew.environ.items():
            self.envs[rank] |= changed
        self.is_settled = False

    def _poll(self) -> RunProcsResult | None:
        return super()._poll() if self.is_settled else None

    def _start(self) -> None:
        kept, standing = self._crew.kept, self._crew.standing
        for rank, one in kept.items():  # others wait for these; who is new has much to do first
            one.go(self._environ(rank), self.stdouts[rank], self.stderrs[rank])
        missing = [rank for rank in range(self.nprocs) if rank not in {*kept, *standing}]
        for rank in missing:
            self.envs[rank][MARK_VARIABLE] = self._marks.new()
        handlers = self._start_new(missing) if missing else {}
        for rank in missing:
            self._marks.give(handlers[rank].proc.pid, self.envs[rank][MARK_VARIABLE])
        handlers |= {rank: one.handler for rank, one in kept.items()} | dict(standing)
        self.subprocess_handlers = {rank: handlers[rank] for rank in range(self.nprocs)}

    def _start_new(self, ranks: Sequence[int]) -> dict[int, Any]:
        handlers = {
            rank: get_subprocess_handler(
                entrypoint=self.entrypoint,
                args=self.args[rank],
                env=self.envs[rank],
                stdout=self.stdouts[rank],
                stderr=self.stderrs[rank],
                local_rank_id=rank,
                numa_options=self._numa_options,
            )
            for rank in ranks
        }
        for handler in handlers.values():
            handler.proc = ColdProcess(handler.proc)
        return handlers

    def _environ(self, rank: int) -> dict[str, str]:
        """What is another worker's, or another attempt's, in the environment of this one."""
        whole = dict(os.environ) | self.envs[rank]
        return {
            name: value
            for name, value in whole.items()
            if is_per_worker(name) and name not in (AGENT_VARIABLE, MARK_VARIABLE)
        }


class ColdProcess:
    """A worker in a fresh interpreter; one that failed takes its process group with it.

    Args:
        process: it.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.pid = process.pid
        self._process = process

    @property
    def returncode(self) -> int | None:
        """Its exit code, once that was asked for and known."""
        return self._process.returncode

    def poll(self) -> int | None:
        """The exit code, or None."""
        if self._process.returncode is None and _has_failed(self.pid):
            end_group(self.pid)
        return self._process.poll()

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, waited for.

        Raises:
            subprocess.TimeoutExpired: it did not end in time.
        """
        if self._process.returncode is None:
            pidfd = os.pidfd_open(self.pid)
            try:
                readable([pidfd], timeout)
            finally:
                os.close(pidfd)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(self._process.args, timeout or 0.0)
        return code


def _has_failed(pid: int) -> bool:
    """Whether a child has ended other than with 0; it stays to be reaped."""
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return found is not None and found.si_status != 0


class WarmContext(ColdContext):
    """An attempt's workers: forked, and those that were kept.

    Args:
        server: to fork from.
        script: the arguments for ``outlast.launch.worker`` follow this many of the command's.
        marks: each new worker is given one.
        crew: who is kept, and who is to stand by.
        asked: what torch's ``start_processes`` was asked for.
    """

    def __init__(
        self, server: WarmServer, script: int, marks: Marks, crew: Crew, **asked: Any
    ) -> None:
        super().__init__(marks, crew, **asked)
        self._server = server
        self._script = script

    def _start_new(self, ranks: Sequence[int]) -> dict[int, Any]:
        workers: list[ForkedWorker] = []
        opened: list[int] = []
        try:
            for rank in ranks:
                redirected = []
                for number, path in ((1, self.stdouts[rank]), (2, self.stderrs[rank])):
                    if path:
                        opened.append(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666))
                        redirected.append(number)
                workers.append(self._worker(rank, redirected))
            started = self._server.start(workers, opened)
        finally:
            for fd in opened:
                os.close(fd)
        return {
            rank: WarmHandler(rank, process) for rank, process in zip(ranks, started, strict=True)
        }

    def _worker(self, rank: int, redirected: list[int]) -> ForkedWorker:
        arguments = [os.fsencode(str(one)) for one in self.args[rank]]
        given = {name.encode(): os.fsencode(value) for name, value in self.envs[rank].items()}
        return ForkedWorker(
            arguments=arguments[self._script :],
            command=[os.fsencode(self.entrypoint), *arguments],
            environ=dict(os.environb) | given,
            redirected=redirected,
        )


class WarmHandler:
    """What torch's ``SubprocessHandler`` is to a context."""

    def __init__(self, local_rank: int, process: WarmProcess) -> None:
        self.local_rank_id = local_rank
        self.proc = process

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Signal the worker's process group."""
        with contextlib.suppress(ProcessLookupError):  # it went with the server
            os.killpg(self.proc.pid, death_sig or signal.SIGTERM)
