"""Whether an attempt's workers start warm or cold, and one line about it where they start cold."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from torch.distributed.elastic.agent.server import local_elastic_agent as torchs

from outlast.errors import Exit
from outlast.health.leftovers import Marks
from outlast.launch.arguments import Launch
from outlast.launch.membership.handler import JobOver
from outlast.launch.survivors import Crew
from outlast.launch.warm.client import (
    NotWaitedFor,
    ServerLost,
    StartRefused,
    WarmServer,
    is_possible,
)
from outlast.launch.warm.context import ColdContext, WarmContext
from outlast.launch.warm.imports import read
from outlast.launch.warm.variables import lasting

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
        say: tells a person.
        server: one that has been started already.

    Attributes:
        has_notice: whether this machine is to go; the agent says how that is known.
        marks: by which what its workers have started is found.
    """

    def __init__(
        self,
        launch: Launch,
        wanted: bool,
        say: Callable[[str], None],
        server: WarmServer | None = None,
    ) -> None:
        self._launch = launch
        self._say = say
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
            self._say("a warm worker died at once; the next start is cold, to see if that was why")
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
        self._say(f"workers start cold, because {reason}")


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
