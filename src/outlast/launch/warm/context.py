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
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.elastic.multiprocessing.api import RunProcsResult, SubprocessContext
from torch.distributed.elastic.multiprocessing.subprocess_handler import get_subprocess_handler

from outlast.attempt.bound import AGENT_VARIABLE
from outlast.launch.survivors import Kept
from outlast.launch.warm.client import Server, WarmProcess
from outlast.launch.warm.variables import is_per_worker
from outlast.launch.warm.wire import Worker


class ColdContext(SubprocessContext):
    """An attempt's workers: fresh interpreters, and those that were kept.

    Args:
        kept: local rank → a worker that goes on from the attempt before.
        asked: what torch's ``start_processes`` was asked for.

    Attributes:
        is_settled: whether the agent has seen the attempt's end: nobody is left who could go on.
    """

    def __init__(self, kept: Mapping[int, Kept], **asked: Any) -> None:
        super().__init__(**asked)
        self._kept = kept
        self.is_settled = False

    def _poll(self) -> RunProcsResult | None:
        return super()._poll() if self.is_settled else None

    def _start(self) -> None:
        missing = [rank for rank in range(self.nprocs) if rank not in self._kept]
        handlers = self._start_new(missing) if missing else {}
        handlers |= {rank: one.handler for rank, one in self._kept.items()}
        self.subprocess_handlers = {rank: handlers[rank] for rank in range(self.nprocs)}
        for rank, one in self._kept.items():
            one.go(self._environ(rank), self.stdouts[rank], self.stderrs[rank])

    def _start_new(self, ranks: Sequence[int]) -> dict[int, Any]:
        return {
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

    def _environ(self, rank: int) -> dict[str, str]:
        """What is another worker's, or another attempt's, in the environment of this one."""
        whole = dict(os.environ) | self.envs[rank]
        return {
            name: value
            for name, value in whole.items()
            if is_per_worker(name) and name != AGENT_VARIABLE
        }


class WarmContext(ColdContext):
    """An attempt's workers: forked, and those that were kept.

    Args:
        server: to fork from.
        script: the arguments for ``outlast.launch.worker`` follow this many of the command's.
        kept: local rank → a worker that goes on from the attempt before.
        asked: what torch's ``start_processes`` was asked for.
    """

    def __init__(self, server: Server, script: int, kept: Mapping[int, Kept], **asked: Any) -> None:
        super().__init__(kept, **asked)
        self._server = server
        self._script = script

    def _start_new(self, ranks: Sequence[int]) -> dict[int, Any]:
        workers: list[Worker] = []
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

    def _worker(self, rank: int, redirected: list[int]) -> Worker:
        arguments = [os.fsencode(str(one)) for one in self.args[rank]]
        given = {name.encode(): os.fsencode(value) for name, value in self.envs[rank].items()}
        return Worker(
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
