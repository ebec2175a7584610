"""Python stacks of a process, taken from outside of it.

``py-spy`` reads them from the process' memory, without stopping it: that works for one that is
stopped, that holds the interpreter's lock, and that the kernel does not let go. Where it is not
installed or not allowed, the process is asked by a signal that ``faulthandler`` answers without the
interpreter's lock; one that is stopped or in the kernel does not answer then.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import msgspec

from outlast.health.answering import SIGNAL
from outlast.health.proc import catches, state_of, tracer_of
from outlast.policy.blame import Frame

SPY_S: Final = 1.5
ANSWER_S: Final = 0.5
MAX_FRAMES: Final = 24
MAX_TEXT: Final = 50_000
_LOOK_S: Final = 0.01
_LINE: Final = re.compile(r'^\s*File "(.*)", line (\d+) in (.*)$')


class Stacks(msgspec.Struct, frozen=True, kw_only=True):
    """What was found.

    Attributes:
        frames: of the main thread, innermost first.
        holds_gil: whether that thread holds the interpreter's lock, or None.
        text: of all threads, for people.
    """

    frames: tuple[Frame, ...] = ()
    holds_gil: bool | None = None
    text: str = ""


def take(pid: int, answer: Path) -> Stacks:
    """The stacks of one process; empty where they cannot be had.

    Args:
        pid: the process.
        answer: the file that its faulthandler writes to.
    """
    spy = _spy()
    for way in (("--nonblocking",), ()) if spy else ():
        if way or state_of(pid) in ("R", "S"):  # else it would wait for the process to stop
            found = _by_spy(spy, pid, way)
            if not way and state_of(pid) == "T":  # py-spy was ended while it held it
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGCONT)
            if found.frames:
                return found
    return _by_signal(pid, answer)


def _spy() -> str:
    if os.environ.get("OUTLAST_NO_SPY"):  # of tests: as if it were not installed
        return ""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.is_file() else shutil.which("py-spy") or ""


def _by_spy(spy: str, pid: int, way: tuple[str, ...]) -> Stacks:
    try:
        done = subprocess.run(
            [spy, "dump", "--pid", str(pid), "--json", *way],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=SPY_S,
            check=True,
        )
        threads = json.loads(done.stdout)
        main = next(one for one in threads if one["os_thread_id"] == pid)
        return Stacks(
            frames=_frames(main),
            holds_gil=bool(main["owns_gil"]),
            text="\n".join(map(_as_text, sorted(threads, key=lambda one: one is not main))),
        )
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError, StopIteration):
        return Stacks()


def _frames(thread: dict[str, Any]) -> tuple[Frame, ...]:
    return tuple(
        Frame(str(one["name"]), str(one["filename"]), int(one["line"]))
        for one in thread["frames"][:MAX_FRAMES]
    )


def _as_text(thread: dict[str, Any]) -> str:
    does = "has the interpreter's lock" if thread["owns_gil"] else ""
    does = does or ("active" if thread["active"] else "idle")
    lines = [f'thread {thread["os_thread_id"]} "{thread["thread_name"] or ""}" ({does})']
    lines += [
        f"    {frame['name']} ({frame['filename']}:{frame['line']})" for frame in thread["frames"]
    ]
    return "\n".join(lines)[:MAX_TEXT] + "\n"


def _by_signal(pid: int, answer: Path) -> Stacks:
    if not catches(pid, SIGNAL) or tracer_of(pid):  # it would die of it; a debugger would stop it
        return Stacks()
    with contextlib.suppress(OSError):
        os.truncate(answer, 0)  # it is in memory, and would grow for weeks; the other end appends
    before = _size(answer)
    with contextlib.suppress(OSError):
        os.kill(pid, SIGNAL)
    size, deadline_s = before, time.monotonic() + ANSWER_S
    while time.monotonic() < deadline_s:
        time.sleep(_LOOK_S)
        last, size = size, _size(answer)
        if size > before and size == last:
            break
    with contextlib.suppress(OSError):
        return _parsed(answer.read_bytes()[before:][:MAX_TEXT].decode(errors="replace"))
    return Stacks()


def _parsed(text: str) -> Stacks:
    """What faulthandler wrote; the current thread took the signal, and is the main one."""
    frames: list[Frame] = []
    is_current = False
    for line in text.splitlines():
        match = _LINE.match(line)
        if match and is_current:
            frames.append(Frame(match[3], match[1], int(match[2])))
        elif not match:
            is_current = line.startswith("Current thread")
    return Stacks(frames=tuple(frames[:MAX_FRAMES]), text=text)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
