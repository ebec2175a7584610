"""What a fork does to become a worker that looks freshly started.

A fork's command line and environment, as ``ps`` and /proc show them.

A fork shows its parent's. The kernel lets a process say where they lie (PR_SET_MM_MAP, which takes
no privilege where the kernel has it), so a worker points to what a cold one would show: people and
tools recognise workers by it. Where the kernel refuses, the server's command line is shown.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import mmap
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec

from outlast.health.processes import AGENT_VARIABLE
from outlast.launch import worker
from outlast.launch.warm.wire import ForkedWorker

_PR_SET_MM: Final = 35
_PR_SET_MM_MAP: Final = 14
# Positions in /proc/self/stat, counted after the command's name.
_IN_STAT: Final = {
    "start_code": 23,
    "end_code": 24,
    "start_stack": 25,
    "start_data": 42,
    "end_data": 43,
    "start_brk": 44,
}
_shown: list[Any] = []  # the memory that the kernel reads from lives as long as the process


class _Map(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("start_code", "end_code", "start_data", "end_data")),
        *((name, ctypes.c_uint64) for name in ("start_brk", "brk", "start_stack")),
        *((name, ctypes.c_uint64) for name in ("arg_start", "arg_end", "env_start", "env_end")),
        ("auxv", ctypes.c_void_p),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    ]


def show(command: Sequence[bytes], environ: Mapping[bytes, bytes]) -> None:
    """Show this command line and environment from now on, if the kernel lets us."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        _show(command, environ)


def _show(command: Sequence[bytes], environ: Mapping[bytes, bytes]) -> None:
    arguments = b"\0".join(command) + b"\0"
    surroundings = b"".join(name + b"=" + value + b"\0" for name, value in environ.items())
    memory = mmap.mmap(-1, len(arguments) + len(surroundings), flags=mmap.MAP_PRIVATE)
    memory.write(arguments + surroundings)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = ctypes.c_void_p
    middle = start + len(arguments)
    wanted = _Map(
        **{name: int(stat[position]) for name, position in _IN_STAT.items()},
        brk=libc.sbrk(0),
        arg_start=start,
        arg_end=middle,
        env_start=middle,
        env_end=middle + len(surroundings),
        auxv=None,
        auxv_size=0,
        exe_fd=0xFFFFFFFF,
    )
    size = ctypes.sizeof(wanted)
    if libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(wanted), size, 0) == 0:
        _shown.append(memory)


class ForkRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a fork is to be.

    Attributes:
        worker: as the agent described it.
        fds: for its standard output and error, where they are redirected.
        server: process id of the one that it is forked from, which it must not outlive. Taken
            before the fork: in here it may be somebody else's by now.
        say: to be told of a session of its own, by one byte.
        environ_made: what imports have set in, or (None) taken out of the environment.
    """

    worker: ForkedWorker
    fds: list[int]
    server: int
    say: int
    environ_made: dict[bytes, bytes | None]


def become(job: ForkRequest, held: Sequence[int]) -> NoReturn:
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


def _become(job: ForkRequest) -> None:
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


def _set_environment(job: ForkRequest) -> None:
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
