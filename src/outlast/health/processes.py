"""What the kernel knows of processes; what workers have started, and its end.

``look_at`` and ``moved`` say a process's state, what it waits in, and whether anything moves;
``oom_kills`` how many the kernel has ended because memory ran out.
``die_with`` binds this process to another one.

``Marks`` and ``end_leftovers`` end what is left when workers have gone. A worker's process group is
signalled before the worker is reaped, so that the group's number is still its own. What has left
the group, or lost its worker in another way, is found by a mark: each worker has one in its
environment, and whatever it starts inherits it. What a marked process has started is found with it,
mark or not. Each is held by a descriptor before it is looked at again and signalled, so that no
number that was given out anew is. Its group, which can only be a worker's or one that was made by
what a worker started, is signalled with it: one that forks and ends again and again is not outrun
otherwise. All is looked for again until nothing is found, and nothing ended while it was looked at.

What can go wrong: a process that took the mark out of its environment, left its session and lost
its parent is not found (``setsid env -u OUTLAST_MARK …`` is how one is to outlive its worker on
purpose); and one that the kernel holds does not end: it is returned, and somebody must wait.

Rejected: control groups (a job may make none in most containers), and becoming the reaper of all
descendants (the agent cannot tell its own helpers from what it has been given).
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import platform
import signal
import time
import uuid
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from outlast.ipc import readable

_TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")
_BUSY: Final = 0.15  # of a core
_STARVED: Final = 0.3  # of the time spent waiting for a core
_FED: Final = 0.5  # of a core is enough to get on with
_MOVED_BYTES_PER_S: Final = 65536
_OFTEN_PER_S: Final = 15.0  # times that a thread was let run: a pulse is 5 to 7
_EXITING: Final = 0x4  # PF_EXITING, in the flags of /proc/PID/stat
_KILL: Final = 1 << 8  # SIGKILL, in the masks of /proc/PID/status
_THREADS_MAX: Final = 2000  # looked at, of a process and all that it has started
_CALLS: Final[dict[str, dict[int, str]]] = {
    "x86_64": {
        **dict.fromkeys((0, 17, 19, 45, 47), "read"),
        **dict.fromkeys((1, 18, 20, 44, 46, 74, 75), "write"),
        **dict.fromkeys((2, 257), "open"),
        **dict.fromkeys((35, 230), "sleep"),
        202: "lock",
    },
    "aarch64": {
        **dict.fromkeys((63, 67, 65, 207, 212), "read"),
        **dict.fromkeys((64, 68, 66, 206, 211, 82, 83), "write"),
        **dict.fromkeys((101, 115), "sleep"),
        56: "open",
        98: "lock",
    },
}
_NAMES: Final = _CALLS.get(platform.machine(), {})


class ProcessLook(msgspec.Struct, frozen=True, kw_only=True):
    """One look at a process.

    Attributes:
        at_s: monotonic second.
        state: R, S, D, T, t or Z; "" when it has gone.
        tracer: who traces it, "gdb (pid 71)", or "".
        call: the system call that its main thread is in: read, write, open, sleep, lock; or "".
        main_s, whole_s, below_s: seconds of a core used by its main thread, by all of its threads,
            and by the processes that it has started, and that these have started.
        pid: of the process.
        runs, below_runs: thread → how many times it was let run, of it and of those processes.
        delayed_s: that its main thread has waited for a core.
        main_bytes, below_bytes: read and written, by its main thread and those processes.
    """

    at_s: float
    state: str = ""
    tracer: str = ""
    call: str = ""
    main_s: float = 0.0
    whole_s: float = 0.0
    below_s: float = 0.0
    delayed_s: float = 0.0
    main_bytes: int = 0
    below_bytes: int = 0
    pid: int = 0
    runs: dict[int, int] = {}
    below_runs: dict[int, int] = {}


class Moved(msgspec.Struct, frozen=True, kw_only=True):
    """What happened between two looks.

    Attributes:
        main: its main thread used a core, moved bytes, or was let run often.
        whole: it used a core.
        below: processes that it has started did one of these.
        still: nothing of this, in no thread.
        starved: its main thread mostly waited for a core.
    """

    main: bool
    whole: bool
    below: bool
    still: bool
    starved: bool


def look_at(pid: int) -> ProcessLook:
    """See what there is to see; what the kernel does not tell is left out."""
    now_s = time.monotonic()
    place = Path(f"/proc/{pid}")
    main = place / "task" / str(pid)
    state, whole_s = _stat(place)
    if not state:
        return ProcessLook(at_s=now_s)
    below = _descendants(pid)
    return ProcessLook(
        at_s=now_s,
        state=state,
        tracer=tracer_of(pid),
        call=_call(main),
        main_s=_stat(main)[1],
        whole_s=whole_s,
        below_s=sum(_stat(Path(f"/proc/{one}"))[1] for one in below),
        delayed_s=_delayed_s(main),
        main_bytes=_bytes(main),
        below_bytes=sum(_bytes(Path(f"/proc/{one}")) for one in below),
        pid=pid,
        runs=_runs([pid]),
        below_runs=_runs(below),
    )


def moved(before: ProcessLook, after: ProcessLook) -> Moved:
    """What has happened to a process between two looks at it."""
    s = max(after.at_s - before.at_s, 0.001)

    def much(seconds: float, number: int = 0) -> bool:
        return seconds / s > _BUSY or number / s > _MOVED_BYTES_PER_S

    def often(earlier: dict[int, int], later: dict[int, int]) -> set[int]:
        # A connection's bytes are not counted, but whoever serves it is let run for each piece.
        return {
            thread
            for thread, number in later.items()
            if (number - earlier.get(thread, number)) / s > _OFTEN_PER_S
        }

    own = often(before.runs, after.runs)
    main = much(after.main_s - before.main_s, after.main_bytes - before.main_bytes)
    whole = much(after.whole_s - before.whole_s)
    below = much(after.below_s - before.below_s, after.below_bytes - before.below_bytes) or bool(
        often(before.below_runs, after.below_runs)
    )
    return Moved(
        main=main or after.pid in own,
        whole=whole,
        below=below,
        still=not (main or whole or below or own),
        starved=(after.delayed_s - before.delayed_s) / s > _STARVED
        and (after.main_s - before.main_s) / s < _FED,
    )


def state_of(pid: int) -> str:
    """The state alone, by one read."""
    return _stat(Path(f"/proc/{pid}"))[0]


def tracer_of(pid: int) -> str:
    """Who traces a process, "gdb (pid 71)"; "" for nobody, and for py-spy, which only looks."""
    number = _status(pid, "TracerPid", 10)
    if not number:
        return ""
    try:
        name = Path(f"/proc/{number}/comm").read_text(errors="replace").strip()
    except OSError:
        name = "a process that cannot be seen"
    return "" if name == "py-spy" else f"{name} (pid {number})"


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    return bool(_status(pid, "SigCgt", 16) >> (number - 1) & 1)


def is_dying(pid: int) -> bool:
    """Whether a process that has not ended yet is about to: it is exiting, or has been killed."""
    try:
        flags = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[6])
        status = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except (OSError, ValueError, IndexError):
        return True  # it has just ended
    pending = [line.split()[1] for line in status if line.startswith(("SigPnd:", "ShdPnd:"))]
    return bool(flags & _EXITING) or any(int(mask, 16) & _KILL for mask in pending)


def children(pid: int) -> list[int]:
    """What a process has started, by whichever thread, as far as it has not gone."""
    found: list[int] = []
    for thread in _threads(pid):
        with contextlib.suppress(OSError, ValueError):
            text = Path(f"/proc/{pid}/task/{thread}/children").read_text()
            found += [int(one) for one in text.split()]
    return found


def _status(pid: int, name: str, base: int) -> int:
    """A number that the kernel says of a process; 0 where it says none."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1], base)
    except (OSError, ValueError):
        pass
    return 0


def _stat(place: Path) -> tuple[str, float]:
    try:
        fields = (place / "stat").read_text().rpartition(")")[2].split()
        return fields[0], (int(fields[11]) + int(fields[12])) * _TICK_S
    except (OSError, ValueError, IndexError):
        return "", 0.0


def _call(main: Path) -> str:
    try:
        return _NAMES.get(int((main / "syscall").read_text().split()[0]), "")
    except (OSError, ValueError, IndexError):  # it runs, or we may not know
        return ""


def _delayed_s(main: Path) -> float:
    try:
        return int((main / "schedstat").read_text().split()[1]) * 1e-9
    except (OSError, ValueError, IndexError):
        return 0.0


def _bytes(place: Path) -> int:
    try:
        lines = (place / "io").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines[:2])
    except (OSError, ValueError, IndexError):
        return 0


def _runs(pids: Iterable[int]) -> dict[int, int]:
    found: dict[int, int] = {}
    for pid in pids:
        for thread in _threads(pid)[: _THREADS_MAX - len(found)]:
            with contextlib.suppress(OSError, ValueError, IndexError):
                text = Path(f"/proc/{pid}/task/{thread}/schedstat").read_text()
                found[thread] = int(text.split()[2])
    return found


def _threads(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]  # noqa: PTH208 - only names
    except (OSError, ValueError):
        return []


def _descendants(pid: int) -> list[int]:
    """All processes that this one has started, and those that they have."""
    found: list[int] = []
    left = [pid]
    while left and len(found) < _THREADS_MAX:
        below = children(left.pop())
        found += below
        left += below
    return found


MARK_VARIABLE: Final = "OUTLAST_MARK"
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


def end_leftovers(
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
        begin=f"{MARK_VARIABLE}={stem}.".encode(),
        spared=[f"{MARK_VARIABLE}={one}".encode() for one in spared],
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
        if child in children(pid) and _is_running(fd):
            _kill_with_children(child, held, found)
        else:
            os.close(held)
    fields = _fields(pid)
    if fields and int(fields[2]) not in (0, 1, os.getpgrp()) and _is_running(fd):
        end_group(int(fields[2]))
    with contextlib.suppress(OSError):  # it has gone
        signal.pidfd_send_signal(fd, signal.SIGKILL)


def _is_running(fd: int) -> bool:
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


AGENT_VARIABLE: Final = "OUTLAST_AGENT_PID"
_PR_SET_PDEATHSIG: Final = 1


def wake_when_alone() -> None:
    """Have the kernel let this process go on, if it is stopped, when its parent has died."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent has died."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


def die_with_agent() -> None:
    """Have the kernel kill this process when our agent has died, if it was started by one."""
    agent = int(os.environ.get(AGENT_VARIABLE, "0"))
    if agent:
        die_with(agent)


def oom_kills(path: Path) -> int | None:
    """How many processes the OOM killer has ended, as a line ``oom_kill N`` of a file says.

    Args:
        path: a control group's ``memory.oom_control`` or ``memory.events``, or ``/proc/vmstat``.

    Returns:
        None where there is no such line.
    """
    try:
        for line in path.read_text().splitlines():
            name, _, number = line.partition(" ")
            if name == "oom_kill":
                return int(number)
    except (OSError, ValueError):
        pass
    return None
