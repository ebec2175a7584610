"""torch's bookkeeping of an attempt's processes, over workers that the server has forked.

``SubprocessContext`` is kept whole: log files, ``--tee``, error files, polling, closing. Only how a
process comes into being is another one.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from outlast.launch.warm.client import Server, WarmProcess
from outlast.launch.warm.wire import Worker


class WarmContext(SubprocessContext):
    """An attempt's workers, forked.

    Args:
        server: to fork from.
        script: the arguments for ``outlast.launch.worker`` follow this many of the command's.
        asked: what torch's ``start_processes`` was asked for.
    """

    def __init__(self, server: Server, script: int, **asked: Any) -> None:
        super().__init__(**asked)
        self._server = server
        self._script = script

    def _start(self) -> None:
        workers: list[Worker] = []
        opened: list[int] = []
        try:
            for rank in range(self.nprocs):
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
        self.subprocess_handlers = {
            rank: WarmHandler(rank, process) for rank, process in enumerate(started)
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
