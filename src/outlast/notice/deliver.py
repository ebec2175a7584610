"""Passing a notice on: a signal to exactly the processes that were named, or a command.

Guarantees: a process given by its id is bound to it at once (a pidfd), so that another process that
gets the same id later is never signalled; a pidfile is read when the notice comes and must be a
plain file that holds one id. Never to a process group, never by a name, never to process 1 or to
ourselves. Each recipient is told apart from the others: one that fails does not keep the next from
being told. A command runs without a shell, with the notice in its environment.

What can go wrong: the default action of SIGUSR1 and SIGTERM is to end a process, so one that does
not handle the signal dies of it. A pidfile that outlived its process names whoever has that id now;
only who writes it can remove it. A process that has ended and that nobody has waited for yet still
takes signals: it is looked at first, and counts as gone.

Rejected: SIGKILL and SIGSTOP (nobody can save on them); following a symbolic link to a pidfile, and
believing, as root, a file of somebody else's that names a process which is not theirs (whoever can
write the file could have any process signalled).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import shlex
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Final

import msgspec

from outlast.config import NOTICE_VARIABLES
from outlast.errors import ConfigError, nearest
from outlast.notice import Notice
from outlast.units import read_whole

_UNCATCHABLE: Final = (signal.SIGKILL, signal.SIGSTOP)
_PIDFILE_BYTES: Final = 32  # one process id and white space


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """Whether one recipient was told.

    Attributes:
        who: "process 4711", "train.pid" or the command's words.
        pid: the process that was signalled or started; None when there was none.
        told: whether the signal was sent, or the command left with 0.
        what: one line for people.
    """

    who: str
    pid: int | None
    told: bool
    what: str


class Process:
    """A process of this machine, bound to its id from construction on.

    Args:
        pid: its id, from :func:`parse_pid`.
        number: the signal that it is to get.

    Attributes:
        fd: readable once the process has ended; -1 when it cannot be signalled.
        problem: why it cannot be signalled, or "".
    """

    def __init__(self, pid: int, number: int) -> None:
        self.pid = pid
        self.fd = -1
        self.problem = ""
        self._number = number
        try:
            self.fd = _bound(pid)
        except _UnreachableError as error:
            self.problem = str(error)

    def tell(self) -> Told:
        """Send the signal; never raises."""
        who = f"process {self.pid}"
        try:
            if self.fd < 0:
                raise _UnreachableError(self.problem)
            _send(self.fd, self.pid, self._number)
        except _UnreachableError as error:
            return Told(who=who, pid=None, told=False, what=f"{error}: nothing was signalled")
        return Told(
            who=who, pid=self.pid, told=True, what=f"{signal_name(self._number)} sent to {who}"
        )


class PidFile:
    """The process that a file names at the moment of the notice.

    Args:
        path: the file; it need not be there yet.
        number: the signal that the process is to get.
    """

    def __init__(self, path: Path, number: int) -> None:
        self.path = path
        self._number = number

    @property
    def problem(self) -> str:
        """Why nobody could be signalled if the notice came now, or ""."""
        try:
            os.close(self._open()[1])
        except _UnreachableError as error:
            return str(error)
        return ""

    def tell(self) -> Told:
        """Read the file and send the signal; never raises."""
        who = str(self.path)
        try:
            pid, fd = self._open()
            try:
                _send(fd, pid, self._number)
            finally:
                os.close(fd)
        except _UnreachableError as error:
            return Told(who=who, pid=None, told=False, what=f"{error}: nothing was signalled")
        what = f"{signal_name(self._number)} sent to process {pid} (of {who})"
        return Told(who=who, pid=pid, told=True, what=what)

    def _open(self) -> tuple[int, int]:
        """The process's id and a descriptor that is bound to it."""
        held, owner = self._read()
        try:
            pid = parse_pid(held)
        except ConfigError:
            raise _UnreachableError(
                f"{self.path} holds {held!r}, not the id of a process that could be meant"
            ) from None
        try:
            fd = _bound(pid)
        except _UnreachableError as error:
            raise _UnreachableError(f"{self.path}: {error}") from None
        if os.geteuid() == 0 and owner not in (0, _owner(pid)):
            os.close(fd)
            raise _UnreachableError(
                f"{self.path} belongs to user {owner} and process {pid} does not"
            )
        return pid, fd

    def _read(self) -> tuple[str, int]:
        """What the file holds, and the id of the user who owns it."""
        try:
            # Without O_NONBLOCK a named pipe would hold us until somebody writes.
            fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                found = os.fstat(fd)
                plain = stat.S_ISREG(found.st_mode)
                held = os.read(fd, _PIDFILE_BYTES + 1) if plain else b""
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise _UnreachableError(f"{self.path} is a symbolic link, not a pidfile") from None
            raise _UnreachableError(f"{self.path} cannot be read ({error.strerror})") from None
        if not plain:
            raise _UnreachableError(f"{self.path} is not a plain file")
        return held.decode("ascii", errors="replace"), found.st_uid


class NotifyCommand:
    """A program with its arguments, started once for each notice.

    Args:
        line: as a person would write it; split as a shell would, run without one.
        quiet_stdout: whether what it prints goes to standard error.

    Raises:
        ConfigError: no program, quotes that do not match, or a program that is not there.
    """

    def __init__(self, line: str, *, quiet_stdout: bool = False) -> None:
        try:
            self._words = shlex.split(line)
        except ValueError as error:
            raise ConfigError(f"--command {line!r} cannot be split: {error}") from None
        if not self._words or not self._words[0]:
            raise ConfigError(f"--command {line!r} names no program")
        if shutil.which(self._words[0]) is None:
            raise ConfigError(f"--command: there is no program {self._words[0]}; check the path")
        self._who = shlex.join(self._words)
        self._stdout = sys.stderr if quiet_stdout else None

    def start(self, notice: Notice) -> StartedCommand | Told:
        """Start it; what went wrong if it cannot be started."""
        try:
            process = subprocess.Popen(
                self._words,
                stdin=subprocess.DEVNULL,
                stdout=self._stdout,
                env=os.environ | environment(notice),
                process_group=0,  # Ctrl-C is for us: a command that is saving goes on
            )
        except OSError as error:
            what = f"{self._who} could not be started: {error.strerror}"
            return Told(who=self._who, pid=None, told=False, what=what)
        return StartedCommand(process, self._who, early=notice.early)


class StartedCommand:
    """A command that was started.

    Attributes:
        early: whether it was started for an early notice.
    """

    def __init__(self, process: subprocess.Popen[bytes], who: str, *, early: bool) -> None:
        self.early = early
        self._process = process
        self._who = who

    def wait(self) -> Told:
        """Wait for its end, and say how it went."""
        code = self._process.wait()
        how = f"was ended by {signal_name(-code)}" if code < 0 else f"left with exit code {code}"
        pid = self._process.pid
        return Told(who=self._who, pid=pid, told=code == 0, what=f"{self._who} {how}")


def environment(notice: Notice) -> dict[str, str]:
    """What a command learns of the notice; its deadline in whole seconds, as shells count."""
    deadline = "" if notice.deadline_t is None else str(int(notice.deadline_t))
    values = (notice.source, notice.action, deadline, notice.detail, "1" if notice.early else "")
    return dict(zip(NOTICE_VARIABLES, map(one_line, values), strict=True))


def one_line(text: str) -> str:
    """``text`` without what would end a line, move a cursor or end a string in C."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def parse_pid(value: str) -> int:
    """Read the id of a process that may be signalled.

    Raises:
        ConfigError: it is not a positive whole number, or it is 1 or our own.
    """
    pid = read_whole(value, least=1)
    if pid is None:
        raise ConfigError(f"{value!r} is not the id of a process; write a number like 4711")
    if pid == 1:
        raise ConfigError("process 1 keeps the machine going and is never signalled")
    if pid == os.getpid():
        raise ConfigError(f"process {pid} is this command itself; name the one that is to be told")
    return pid


def parse_signal(value: str) -> int:
    """Read a signal by its name, with or without SIG, or by its number.

    Raises:
        ConfigError: there is no such signal, or no process could act on it.
    """
    word = value.strip().upper().removeprefix("SIG")
    number: int | None = read_whole(word, least=1)
    if number is None and f"SIG{word}" in signal.Signals.__members__:
        number = signal.Signals[f"SIG{word}"]
    if number not in signal.valid_signals():
        known = [name.removeprefix("SIG") for name in signal.Signals.__members__]
        raise ConfigError(f"{value!r} is not a signal;{nearest(word, known)}")
    if number in _UNCATCHABLE:
        raise ConfigError(
            f"{signal_name(number)} cannot be handled by anybody, so nothing would be saved; "
            "USR1 and TERM can"
        )
    return int(number)


def signal_name(number: int) -> str:
    """``SIGUSR1``; ``signal 40`` for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class _UnreachableError(Exception):
    """Why a process cannot be signalled, in words."""


def _bound(pid: int) -> int:
    """A descriptor that stands for the process that has this id now, and for no other."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        raise _UnreachableError(f"no process {pid}") from None
    except OSError as error:  # a thread's id, or a kernel that has no such descriptors
        raise _UnreachableError(f"{pid} is not a process ({error.strerror})") from None
    try:
        _send(fd, pid, 0)
    except _UnreachableError:
        os.close(fd)
        raise
    return fd


def _send(fd: int, pid: int, number: int) -> None:
    """Send a signal; 0 only asks whether it could be sent."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    if poll.poll(0):
        raise _UnreachableError(f"no process {pid}")
    try:
        signal.pidfd_send_signal(fd, number)
    except ProcessLookupError:
        raise _UnreachableError(f"no process {pid}") from None
    except PermissionError:
        raise _UnreachableError(f"process {pid} belongs to another user") from None
    except OSError as error:
        raise _UnreachableError(f"process {pid} cannot be signalled ({error.strerror})") from None


def _owner(pid: int) -> int | None:
    """The user whom a process belongs to; None when it has just gone."""
    with contextlib.suppress(OSError):
        found = re.search(r"^Uid:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        return int(found[1]) if found else None
    return None
