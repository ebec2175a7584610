"""Whether an attempt's workers start warm or cold, and one line about it where they start cold."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

from torch.distributed.elastic.agent.server import local_elastic_agent as torchs

from outlast.launch.arguments import Launch
from outlast.launch.warm.client import Server, ServerLost, StartRefused
from outlast.launch.warm.context import WarmContext
from outlast.launch.warm.variables import lasting

MAX_SERVERS: Final = 5  # of one job; one that keeps dying is given up


class Starts:
    """Starts the workers of each attempt, warm while that is possible.

    Args:
        launch: the command line.
        wanted: the setting ``workers.warm``.
        say: tells a person.
    """

    def __init__(self, launch: Launch, wanted: bool, say: Callable[[str], None]) -> None:
        self._launch = launch
        self._say = say
        self._server: Server | None = None
        self._num_servers = 0
        self._is_cold = not wanted
        self._has_looked_ahead = False
        reason = _cannot(launch)
        if wanted and reason:
            self._stay_cold(reason)

    def open(self) -> None:
        """Have a server begin to import; to be called in the main thread."""
        if not self._is_cold:
            self._new_server()

    def close(self) -> None:
        """End the server."""
        if self._server is not None:
            self._server.close()
            self._server = None

    @contextlib.contextmanager
    def in_charge(self) -> Iterator[None]:
        """While torch's agent starts its workers: they are started by us.

        torch has no seam for it: its agent calls a function by its global name.
        """
        original = torchs.start_processes

        def start(**asked: Any) -> Any:
            return self._start_warm(asked) or original(**asked)

        torchs.start_processes = start
        try:
            yield
        finally:
            torchs.start_processes = original

    def _start_warm(self, asked: dict[str, Any]) -> WarmContext | None:
        """The attempt's workers, or None when they are to start cold."""
        while not self._is_cold:
            try:
                return self._try(asked)
            except StartRefused as refused:
                self._stay_cold(str(refused))
            except ServerLost as lost:
                if self._num_servers >= MAX_SERVERS:
                    self._stay_cold(str(lost))
        return None

    def _try(self, asked: dict[str, Any]) -> WarmContext:
        environ = dict(os.environ) | asked["envs"][0]
        if self._server is not None and lasting(self._server.environ) != lasting(environ):
            self.close()  # it has read at its start what a fresh process would read otherwise
        if self._server is None or self._server.is_lost:
            self._new_server()
        assert self._server is not None  # noqa: S101 - just made
        self._server.wait_until_ready()
        options = {name: value for name, value in asked.items() if name != "start_method"}
        context = WarmContext(self._server, len(self._launch.worker_options), **options)
        try:
            context.start()
        except BaseException:
            context.close()
            raise
        if not self._has_looked_ahead:
            self._has_looked_ahead = True
            self._server.preload(self._launch.args[len(self._launch.worker_options) :])
        return context

    def _new_server(self) -> None:
        self._num_servers += 1
        self._has_looked_ahead = False
        self._server = Server(os.environ)

    def _stay_cold(self, reason: str) -> None:
        self._is_cold = True
        self.close()
        self._say(f"workers start cold, because {reason}")


def _cannot(launch: Launch) -> str:
    """Why this command line cannot be started warm; empty if it can."""
    if not launch.worker_options:
        return "what is run is not a Python script (--no-python)"
    if launch.entrypoint != sys.executable:
        return "PYTHON_EXEC names another interpreter"
    if launch.config.numa_options is not None:
        return "they are bound to NUMA nodes one by one"
    if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
        return "that takes Linux"
    return ""
