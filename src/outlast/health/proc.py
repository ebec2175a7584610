"""What the kernel knows of a process: its state, what it waits in, and whether anything moves."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

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
    """Compare two looks."""
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
