"""What workers have started, and what is left of it when they have gone.

A worker's process group is signalled before the worker is reaped, so that the group's number is
still its own. What has left the group, or lost its worker in another way, is found by a mark: each
worker has one in its environment, and whatever it starts inherits it. What a marked process has
started is found with it, mark or not.

Each is held by a descriptor before it is looked at again and signalled, so that no number that was
given out anew is. Its group, which can only be a worker's or one that was made by what a worker
started, is signalled with it: one that forks and ends again and again is not outrun otherwise. All
is looked for again until nothing is found, and nothing ended while it was looked at.

What can go wrong: a process that took the mark out of its environment, left its session and lost
its parent is not found (``setsid env -u OUTLAST_MARK …`` is how one is to outlive its worker on
purpose); and one that the kernel holds does not end: it is returned, and somebody must wait.

Rejected: control groups (a job may make none in most containers), and becoming the reaper of all
descendants (the agent cannot tell its own helpers from what it has been given).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
import uuid
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final, NamedTuple

from outlast.health.proc import children, is_dying, state_of, tracer_of
from outlast.ipc import readable

VARIABLE: Final = "OUTLAST_MARK"
PASSES: Final = 8  # in which nothing is found while processes of this machine come and go
_ENDED: Final = (b"Z", b"X")
_KTHREAD: Final = 0x200000  # PF_KTHREAD


class Marks:
    """The marks of one agent's workers: no two workers have the same.

    Attributes:
        stem: how all of them begin.
    """

    def __init__(self) -> None:
        # With the time from which they are given: what is older need not be looked at closely.
        self.stem = f"{uuid.uuid4().hex}-{_ticks(_fields(os.getpid()))}"
        self._numbers = itertools.count(1)
        self._given: dict[int, str] = {}

    def new(self) -> str:
        """A worker's mark, before it is started."""
        return f"{self.stem}.{next(self._numbers)}"

    def give(self, pid: int, mark: str) -> None:
        """The worker with this mark is this process."""
        self._given[pid] = mark

    def forget(self, kept: Collection[int]) -> None:
        """An attempt is over: only these of its workers go on."""
        self._given = {pid: mark for pid, mark in self._given.items() if pid in kept}

    @property
    def workers(self) -> tuple[int, ...]:
        """Process ids of the workers that were not forgotten; each led a session of its own."""
        return tuple(self._given)

    def of(self, pids: Iterable[int]) -> frozenset[str]:
        """The marks of these workers."""
        return frozenset(self._given[pid] for pid in pids if pid in self._given)


def end_group(pid: int) -> None:
    """SIGKILL for the group that a process leads, or led: it must not have been reaped."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def end(
    stem: str,
    *,
    limit_s: float,
    spared: Collection[str] = (),
    sessions: Collection[int] = (),
) -> list[int]:
    """End all processes that are marked, and wait until they have gone.

    Args:
        stem: of the marks.
        limit_s: how long they are waited for.
        spared: marks of workers that go on, and with them what these have started.
        sessions: whose members are waited for, if they are about to end already.

    Returns:
        Process ids of those that have been killed and have not gone.
    """
    until_s = time.monotonic() + limit_s
    wanted = _ProcessFilter(
        begin=f"{VARIABLE}={stem}.".encode(),
        spared=[f"{VARIABLE}={one}".encode() for one in spared],
        sessions=sessions,
        since=int(stem.rpartition("-")[2]),
    )
    passes_left, ended = PASSES, set[int]()
    while passes_left:
        before, (found, ended) = ended, _kill(wanted)
        # One that has ended before it was looked at may have started another just before.
        passes_left = PASSES if found else passes_left - 1 if ended - before else 0
        try:
            left = _wait(found, until_s)
        finally:
            for fd in found.values():
                os.close(fd)
        if left and time.monotonic() >= until_s:
            return sorted(left)
    return []


def in_words(pid: int) -> str:
    """A process that cannot be killed, for people: its number, and what holds it."""
    held = tracer_of(pid)
    if held:
        return f"{pid} (traced by {held})"
    with contextlib.suppress(OSError):
        where = Path(f"/proc/{pid}/wchan").read_text().strip()
        if where not in ("", "0"):
            return f"{pid} (state {state_of(pid)}, in {where})"
    return f"{pid} (state {state_of(pid)})"


class _ProcessFilter(NamedTuple):
    """What is looked for.

    Attributes:
        begin: of the variable with the mark.
        spared: variables that are not meant.
        sessions: whose dying members are meant.
        since: ticks at which the first could have started.
    """

    begin: bytes
    spared: Collection[bytes]
    sessions: Collection[int]
    since: int

    def has(self, pid: int) -> bool | None:
        """Whether a process is to end; None where it has ended just now, as far as is known."""
        fields = _fields(pid)
        if not fields:
            return None
        if _ticks(fields) < self.since or int(fields[6]) & _KTHREAD:
            return False
        # One whose first thread has ended is a zombie, and goes on in its other threads.
        if fields[0] in _ENDED and int(fields[17]) <= 1:
            return None
        marks = [one for one in _environ(pid).split(b"\0") if one.startswith(self.begin)]
        if marks:
            return marks[0] not in self.spared
        # Of one that is exiting nothing can be read any more, while it may hold its devices.
        return int(fields[3]) in self.sessions and is_dying(pid)


def _kill(wanted: _ProcessFilter) -> tuple[dict[int, int], set[int]]:
    """Kill those that are to end: process id → pidfd of each, and those that had ended already."""
    found: dict[int, int] = {}
    ended: set[int] = set()
    pids = {int(name) for name in os.listdir("/proc") if name.isdigit()}  # noqa: PTH208
    for pid in sorted(pids - {os.getpid()}, reverse=True):  # the newest are the quickest to go
        is_one = wanted.has(pid)
        if is_one is None:
            ended.add(pid)
        if not is_one or pid in found or (fd := _hold(pid)) is None:
            continue
        if wanted.has(pid):
            _kill_with_children(pid, fd, found)
        else:  # it has gone: the number is another's by now
            os.close(fd)
            ended.add(pid)
    return found, ended


def _kill_with_children(pid: int, fd: int, found: dict[int, int]) -> None:
    """Kill a process, its group, and what it has started; all are added to ``found``."""
    found[pid] = fd
    for child in children(pid):
        if child in found or (held := _hold(child)) is None:
            continue
        # As long as the parent runs, its number is its own, and so are its children's.
        if child in children(pid) and _runs(fd):
            _kill_with_children(child, held, found)
        else:
            os.close(held)
    fields = _fields(pid)
    if fields and int(fields[2]) not in (0, 1, os.getpgrp()) and _runs(fd):
        end_group(int(fields[2]))
    with contextlib.suppress(OSError):  # it has gone
        signal.pidfd_send_signal(fd, signal.SIGKILL)


def _runs(fd: int) -> bool:
    return not readable([fd], 0.0)


def _fields(pid: int) -> list[bytes]:
    """What the kernel says of a process, from its state on (proc_pid_stat(5)), if it is there."""
    return _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()


def _ticks(fields: list[bytes]) -> int:
    """When a process started; 0 where nobody knows."""
    return int(fields[19]) if fields else 0


def _environ(pid: int) -> bytes:
    environ = _read(f"/proc/{pid}/environ")
    with contextlib.suppress(OSError):
        if not environ:  # its first thread may have ended alone
            for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - only names
                environ = environ or _read(f"/proc/{pid}/task/{thread}/environ")
    return environ


def _read(path: str) -> bytes:
    """A file of /proc, b"" where there is none: a machine may have thousands of processes."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    parts = []
    try:
        while part := os.read(fd, 65536):
            parts.append(part)
    except OSError:
        pass
    finally:
        os.close(fd)
    return b"".join(parts)


def _hold(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        return None


def _wait(found: dict[int, int], until_s: float) -> set[int]:
    """Wait for all of them; those that have not gone in time."""
    left = dict(found)
    while left:
        left_s = max(until_s - time.monotonic(), 0.0)
        ended = readable(left.values(), left_s)
        left = {pid: fd for pid, fd in left.items() if fd not in ended}
        if not left_s:
            break
    return set(left)
