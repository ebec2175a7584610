"""Start an attempt's workers warm or cold, and say in one line why they start cold.

``WarmContext`` is torch's bookkeeping of an attempt's processes, over workers that were not all
started for it. ``SubprocessContext`` is kept whole: log files, ``--tee``, error files, polling,
closing. Only how a process comes into being is another one: forked from the server, or kept from
the attempt before. And nothing is judged that the agent has not seen: torch, whose look comes a
moment later, would send SIGTERM to all the others for a worker that has died in between, and wait
30 s for them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from torch.distributed.elastic.agent.server import local_elastic_agent as torchs
from torch.distributed.elastic.multiprocessing.api import RunProcsResult, SubprocessContext
from torch.distributed.elastic.multiprocessing.subprocess_handler import get_subprocess_handler

from outlast.errors import Exit
from outlast.health.processes import AGENT_VARIABLE, MARK_VARIABLE, Marks, end_group
from outlast.ipc import readable
from outlast.launch.arguments import Launch
from outlast.launch.ending import Crew
from outlast.launch.membership.handler import JobOver
from outlast.launch.warm.client import (
    ForkedWorker,
    NotWaitedFor,
    ServerLost,
    StartRefused,
    WarmProcess,
    WarmServer,
    is_possible,
)
from outlast.launch.warm.imports import is_per_worker, lasting, read
from outlast.ledger.narrator import say

logger = logging.getLogger(__name__)


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


MAX_SERVERS: Final = 5  # of one job; one that keeps dying is given up
FIRST_S: Final = 1.0  # a worker that dies sooner may have died of being forked
COLD_FIRST_S: Final = 15.0  # the same for a cold one, which imports before
# Whoever ends a worker so is somebody else.
_FROM_OUTSIDE: Final = frozenset((-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP))


class Starts:
    """Starts the workers of each attempt, warm while that is possible.

    Args:
        launch: the command line.
        wanted: the setting ``workers.warm``.
        server: one that has been started already.

    Attributes:
        has_notice: whether this machine is to go; the agent says how that is known.
        marks: by which what its workers have started is found.
    """

    def __init__(
        self,
        launch: Launch,
        wanted: bool,
        server: WarmServer | None = None,
    ) -> None:
        self._launch = launch
        self.has_notice: Callable[[], bool] = lambda: False
        self.marks = Marks()
        self._server = server
        self._num_servers = self._num_started = 0
        self._is_cold = not wanted
        self._is_suspect = False  # the last attempt started warm, and died at once
        self._is_on_trial = False  # this one starts cold, to see whether that was why
        self._started_s = 0.0
        self._has_looked_ahead = False
        reason = _cannot(launch)
        if wanted and reason:
            self._stay_cold(reason)

    def open(self) -> None:
        """Have a server begin to import; to be called in the main thread."""
        if not self._is_cold and self._server is None:
            self._new_server()

    def warm_up(self) -> None:
        """Wait until workers can be started at once, or it is known that they cannot.

        Raises:
            JobOver: this machine is to go.
        """
        if self._server is not None and not self._is_cold:
            with contextlib.suppress(ServerLost):  # the start itself makes another one
                self._wait_for(self._server)

    def close(self) -> None:
        """End the server."""
        if self._server is not None:
            self._server.close()
            self._server = None

    @contextlib.contextmanager
    def in_charge(self, crew: Crew) -> Iterator[None]:
        """While torch's agent starts its workers: they are started by us.

        torch has no seam for it: its agent calls a function by its global name.

        Args:
            crew: who goes on from the attempt before, and who is to stand by.
        """
        original = torchs.start_processes

        def start(**asked: Any) -> ColdContext:
            found = self._start_warm(asked, crew) or self._start_cold(asked, crew)
            self._num_started += 1
            self._started_s = time.monotonic()
            return found

        torchs.start_processes = start
        try:
            yield
        finally:
            torchs.start_processes = original

    def ended(self, codes: Sequence[int]) -> None:
        """An attempt has failed.

        Args:
            codes: of the workers that ended by themselves; negative is a signal.
        """
        lasted_s = time.monotonic() - self._started_s
        if self._is_on_trial:
            self._is_on_trial = False
            if lasted_s > COLD_FIRST_S:
                self._stay_cold("a warm worker died in its first second, and a cold one did not")
        elif not self._is_cold and lasted_s < FIRST_S:
            self._is_suspect = bool(codes) and _FROM_OUTSIDE.isdisjoint(codes)

    def _start_warm(self, asked: dict[str, Any], crew: Crew) -> WarmContext | None:
        """The attempt's workers, or None when they are to start cold."""
        if self._is_suspect and not self._is_cold:
            self._is_suspect, self._is_on_trial = False, True
            logger.info("a warm worker died at once; this start is cold, to see if that was why")
            return None
        self._is_on_trial = False  # it ended without a failure: new machines, say
        if self._server is not None and self._num_started == 0 and self._is_light():
            self._is_cold = True  # which is quicker, and nothing to tell
            self.close()
        while not self._is_cold:
            try:
                return self._try(asked, crew)
            except StartRefused as refused:
                self._stay_cold(str(refused))
            except ServerLost as lost:
                if self._num_servers >= MAX_SERVERS:
                    self._stay_cold(str(lost))
        return None

    def _try(self, asked: dict[str, Any], crew: Crew) -> WarmContext:
        environ = dict(os.environ) | asked["envs"][0]
        if self._server is not None and lasting(self._server.environ) != lasting(environ):
            self.close()  # it has read at its start what a fresh process would read otherwise
        if self._server is None or self._server.is_lost:
            self._new_server()
        assert self._server is not None  # noqa: S101 - just made
        self._wait_for(self._server)
        script = len(self._launch.worker_options)
        context = WarmContext(self._server, script, self.marks, crew, **_options(asked))
        _start(context)
        if not self._has_looked_ahead:
            self._has_looked_ahead = True
            self._server.preload(self._script)
        return context

    def _start_cold(self, asked: dict[str, Any], crew: Crew) -> ColdContext:
        context = ColdContext(self.marks, crew, **_options(asked))
        _start(context)
        return context

    def _wait_for(self, server: WarmServer) -> None:
        """Nothing runs meanwhile that a notice's time could be used for."""
        try:
            server.wait_until_ready(self.has_notice)
        except NotWaitedFor:
            raise JobOver(
                Exit.DRAINED, "this machine leaves before its workers were started; start me again"
            ) from None

    @property
    def _script(self) -> list[str]:
        return self._launch.args[len(self._launch.worker_options) :]

    def _is_light(self) -> bool:
        try:
            return read(self._script).is_light
        except (OSError, ValueError, RecursionError):
            return False

    def _new_server(self) -> None:
        self._num_servers += 1
        self._has_looked_ahead = False
        self._server = WarmServer(os.environ)

    def _stay_cold(self, reason: str) -> None:
        self._is_cold = True  # the server stays: workers that are kept die with it
        say(f"workers start cold, because {reason}")


def _options(asked: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in asked.items() if name != "start_method"}


def _start(context: ColdContext) -> None:
    try:
        context.start()
    except BaseException:
        context.close()
        raise


def _cannot(launch: Launch) -> str:
    """Why this command line cannot be started warm; empty if it can."""
    if not launch.worker_options:
        return "what is run is not a Python script (--no-python)"
    if launch.entrypoint != sys.executable:
        return "PYTHON_EXEC names another interpreter"
    if launch.config.numa_options is not None:
        return "they are bound to NUMA nodes one by one"
    if not is_possible():
        return "that takes Linux"
    return ""
