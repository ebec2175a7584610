"""What a fork does to become a worker that looks freshly started."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import msgspec

from outlast.attempt.bound import AGENT_VARIABLE
from outlast.launch import worker
from outlast.launch.warm.title import show
from outlast.launch.warm.wire import Worker


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What a fork is to be.

    Attributes:
        worker: as the agent described it.
        fds: for its standard output and error, where they are redirected.
        server: process id of the one that it is forked from, which it must not outlive. Taken
            before the fork: in here it may be somebody else's by now.
        say: to be told of a session of its own, by one byte.
        environ_made: what imports have set in, or (None) taken out of the environment.
    """

    worker: Worker
    fds: list[int]
    server: int
    say: int
    environ_made: dict[bytes, bytes | None]


def become(job: Job, held: Sequence[int]) -> NoReturn:
    """Run the worker's script; whatever happens, nothing of the server runs on in here.

    Args:
        job: what this fork is to be.
        held: signals that are blocked in the server alone.
    """
    try:
        _become(job)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, held)
        worker.main()
    except BaseException:  # noqa: BLE001 - main() leaves by itself: this is ours
        traceback.print_exc()
    finally:
        os._exit(1)


def _become(job: Job) -> None:
    os.setsid()
    os.write(job.say, b"x")
    os.close(job.say)
    for number, fd in zip(job.worker.redirected, job.fds, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    _set_environment(job)
    sys.orig_argv = [os.fsdecode(one) for one in job.worker.command]
    sys.argv = [str(worker.__file__), *(os.fsdecode(one) for one in job.worker.arguments)]
    show(job.worker.command, os.environb)
    _draw_anew()
    importlib.invalidate_caches()  # the server has seen directories as they were


def _set_environment(job: Job) -> None:
    environ = dict(job.worker.environ)
    for name, value in job.environ_made.items():
        if value is not None:
            environ[name] = value
        else:
            environ.pop(name, None)
    # The one that it must not outlive is the server, which does not outlive the agent.
    environ[AGENT_VARIABLE.encode()] = str(job.server).encode()
    for name in set(os.environb).difference(environ):
        del os.environb[name]
    for name, value in environ.items():
        if os.environb.get(name) != value:
            os.environb[name] = value


def _draw_anew() -> None:
    """Seeds as in a fresh interpreter: another one in each. Python's own module sees to itself.

    Not torch.manual_seed or torch.seed: they would seed the devices' generators too, which begin
    with the same number in each fresh process.
    """
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        numpy.random.seed()
    if torch is not None:
        torch.default_generator.seed()
