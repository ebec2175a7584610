"""One command, over in a bounded time whatever it does.

Guarantees: no shell; nothing on its standard input; at most ``max_bytes`` of its output are kept;
when it has ended, or its time is over, its whole process group is killed, so that nothing of it
stays.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import IO, NamedTuple, cast


class CommandResult(NamedTuple):
    """How a command ended; a negative code is the signal that ended it."""

    code: int
    output: bytes


def run(
    command: Sequence[str],
    *,
    limit_s: float,
    max_bytes: int = 16_384,
    environ: Mapping[str, str] | None = None,
) -> CommandResult:
    """Run ``command`` to its end.

    Args:
        command: the program and its arguments.
        limit_s: after this long it is killed.
        max_bytes: how much of its standard output is kept; the rest is read and dropped.
        environ: its environment; ours by default.

    Raises:
        OSError: it cannot be started.
        TimeoutError: it was still running after ``limit_s``.
    """
    until = time.monotonic() + limit_s
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=None if environ is None else dict(environ),
    ) as process:
        try:
            pipe = cast(IO[bytes], process.stdout).fileno()
            output = _output(process.pid, pipe, until, max_bytes)
        finally:
            # Not reaped yet, so the number is still its own and not another process's.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        return CommandResult(process.wait(), output)


def _output(pid: int, pipe: int, until: float, max_bytes: int) -> bytes:
    """What it writes until it ends; a child that it left behind may hold the pipe open."""
    os.set_blocking(pipe, False)
    kept = bytearray()
    end = os.pidfd_open(pid)
    try:
        waiting = select.poll()
        waiting.register(end, select.POLLIN)
        waiting.register(pipe, select.POLLIN)
        ended = False
        while not ended:
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            ready = dict(waiting.poll(left_s * 1000))
            ended = end in ready
            if pipe in ready and not _read(pipe, kept, max_bytes):
                waiting.unregister(pipe)
        _read(pipe, kept, max_bytes)
    finally:
        os.close(end)
    return bytes(kept)


def _read(pipe: int, kept: bytearray, max_bytes: int) -> bool:
    """Take what is there, one buffer full at most; False at its end."""
    try:
        part = os.read(pipe, 65_536)
    except BlockingIOError:
        return True
    kept += part[: max_bytes - len(kept)]
    return bool(part)
