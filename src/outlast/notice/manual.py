"""Notices from whoever runs the machine: a file that appears, a command, or an end that is known.

For platforms that are not known here, and for people: ``touch`` a file, or name a program that
asks another scheduler. Both may say more than yes: one JSON object, ``{"action": "terminate",
"in_s": 90}`` or ``{"deadline_t": 1505722920}`` (seconds since the epoch), as the file's content or
on the command's first line.

An end that is known beforehand is a setting: of a reservation (EC2's Capacity Blocks end a machine
half an hour before the reservation), of a maximum duration, of a rental. It is an early notice ten
minutes ahead and a hard one two minutes ahead, as a time limit of Slurm's is.

Guarantees: ``poll`` never raises and is over in 2 s. A file is a notice by being there: one that
is empty, cannot be read or holds anything else is one without a deadline, given when it was last
modified. A command is a notice when it exits with 0, none when it exits with 1; any other code, or
more than 2 s, is an error and no notice.

What can go wrong: a file that an earlier run was stopped with is still a notice for the next;
remove it. A path on a file system that hangs holds this watcher's thread, and nothing else.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from outlast.config import GRACE_MAX_S, in_short
from outlast.notice import Notice
from outlast.notice.slurm import EARLY_S, HARD_S
from outlast.notice.source import NoticeSource, NotUnderstoodError, iso_utc, run

LIMIT_S: Final = 2.0
_MAX_BYTES: Final = 16_384
# A countdown that is printed anew each time says the same deadline, give or take its rounding.
_SAME_DEADLINE_S: Final = 5.0


class _Said(msgspec.Struct, frozen=True):
    """The JSON object; at most one of the two times."""

    action: str = "terminate"
    in_s: float | None = None
    deadline_t: float | None = None


class _Meant(NamedTuple):
    action: str
    deadline_t: float | None


class FileWatcher(NoticeSource):
    """Looks whether a file is there.

    Args:
        path: the file.
        clock: seconds since the epoch.
    """

    name = "file"

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        super().__init__(str(path), clock)
        self._path = path

    def _ask(self) -> Notice | None:
        try:
            given_t = min(self._path.stat().st_mtime, self._clock())
        except FileNotFoundError:
            return None
        try:
            # Without O_NONBLOCK a named pipe would hold us until somebody writes.
            with open(self._path, "rb", opener=_at_once) as file:
                content = file.read(_MAX_BYTES)
        except OSError:
            content = b""  # its being there is the word
        meant = _meant(content, given_t) or _Meant("terminate", None)
        return self._once(
            (given_t, meant),
            action=meant.action,
            deadline_t=meant.deadline_t,
            heard_t=given_t,
            detail=f"the file {self._path} is there",
        )


class CommandWatcher(NoticeSource):
    """Runs a command and takes its exit code for the answer.

    Args:
        command: the program and its arguments.
        clock: seconds since the epoch.
        limit_s: how long it may take.
    """

    name = "command"

    def __init__(
        self,
        command: Sequence[str],
        clock: Callable[[], float] = time.time,
        limit_s: float = LIMIT_S,
    ) -> None:
        super().__init__(in_short(command), clock)
        self._command = tuple(command)
        self._limit_s = limit_s
        self._last: tuple[bytes, Notice] | None = None

    def _ask(self) -> Notice | None:
        try:
            code, output = run(self._command, limit_s=self._limit_s, max_bytes=_MAX_BYTES)
        except TimeoutError:
            raise NotUnderstoodError(f"killed, as it took over {self._limit_s:g} s") from None
        if code == 1:
            self._last = None
            return None
        if code != 0:
            ended = f"exited with {code}" if code > 0 else f"was ended by signal {-code}"
            raise NotUnderstoodError(f"it {ended}; 0 is a notice and 1 is none")
        return self._heard_now(output.partition(b"\n")[0].strip())

    def _heard_now(self, line: bytes) -> Notice:
        now = self._clock()
        meant = _meant(line, now)
        text = line.decode("utf-8", "replace")[:200]
        action, deadline_t = meant or _Meant("terminate", None)
        if self._last is not None:
            said, notice = self._last
            if said == line or (action == notice.action and _close(deadline_t, notice.deadline_t)):
                return notice
        notice = Notice(
            source=self.name,
            action=action,
            deadline_t=deadline_t,
            heard_t=now,
            detail=text if text and meant is None else f"{self.place} says so",
        )
        self._last = line, notice
        return notice


class EndWatcher(NoticeSource):
    """Knows when this machine ends.

    Args:
        end_t: when, in seconds since the epoch.
        clock: seconds since the epoch.
    """

    name = "end"

    def __init__(self, end_t: float, clock: Callable[[], float] = time.time) -> None:
        super().__init__("notice.end", clock)
        self._end_t = end_t

    def _ask(self) -> Notice | None:
        left_s = self._end_t - self._clock()
        if left_s > EARLY_S:
            return None
        early = left_s > HARD_S
        detail = f"notice.end: this machine ends at {iso_utc(self._end_t)}"
        return self._once(
            early, action="terminate", deadline_t=self._end_t, early=early, detail=detail
        )


def _at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def _meant(content: bytes, given_t: float) -> _Meant | None:
    """What a JSON object says, or None when it is none of ours."""
    try:
        said = msgspec.json.decode(content, type=_Said)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    times = [t for t in (said.in_s, said.deadline_t) if t is not None]
    action = said.action
    if len(times) > 1 or any(not math.isfinite(t) or t < 0 for t in times):
        return None
    if not 0 < len(action) <= 100 or not action.isprintable():
        return None
    deadline_t = said.deadline_t if said.in_s is None else given_t + said.in_s
    if deadline_t is not None and deadline_t > given_t + GRACE_MAX_S:
        return None  # milliseconds, perhaps; whoever means next week need not say it yet
    return _Meant(action, deadline_t)


def _close(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return abs(one - other) < _SAME_DEADLINE_S
