"""Pass notices on for ``outlast watch``: a signal to exactly the processes named, or a command.

Guarantees: a process given by its id is bound to it at once (a pidfd), so that another process that
gets the same id later is never signalled; a pidfile is read when the notice comes and must be a
plain file that holds one id. Never to a process group, never by a name, never to process 1 or to
ourselves. A command runs without a shell, with the notice in its environment. Each recipient is
told apart from the others: one that fails does not keep the next from being told. Recipients are
told before people are, and nothing that goes wrong with telling people keeps a notice from being
passed on. The first notice that is not an early one ends the watch. All decisions are made in one
thread: watchers, signals and processes that end only wake it.

What can go wrong: the default action of SIGUSR1 and SIGTERM is to end a process, so one that does
not handle the signal dies of it. A pidfile that outlived its process names whatever process has
that id now; only its writer can remove it. A process that has ended and that nobody has waited for
yet still takes signals: it is looked at first, and counts as gone. A source that does not answer is
not an end (see ``outlast.notice``), so the loop waits as long as somebody is there to be told;
``once`` waits ``ONCE_LIMIT_S`` at most. A command that is running when a signal stops us goes on by
itself: it may be saving.

Rejected: SIGKILL and SIGSTOP (nobody can save on them); following a symbolic link to a pidfile, and
believing, as root, a file of somebody else's that names a process which is not theirs (whoever can
write the file could have any process signalled).
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import re
import select
import selectors
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final, Literal, NamedTuple, Self

import msgspec

from outlast.config import NOTICE_VARIABLES
from outlast.errors import ConfigError, nearest
from outlast.ledger.narrator import say
from outlast.notice import Notice, Watcher
from outlast.notice.source import WatchThread
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


# Each source is asked by itself; the slowest documented answer that is worth it takes seconds.
ONCE_LIMIT_S: Final = 10.0

_Word = Literal["told", "heard", "not_told", "nothing", "unanswered", "ended", "stopped"]


class _WatcherAsked(NamedTuple):
    """With ``once``: this one has said what it had to say."""

    watcher: Watcher


class _Finished(NamedTuple):
    """A command has ended."""

    run: StartedCommand
    told: Told


_Message = Notice | _WatcherAsked | _Finished


class LookoutResult(msgspec.Struct, frozen=True, kw_only=True):
    """How it ended; with ``--json`` this is what is printed.

    Attributes:
        outcome: told (everybody that was named), heard (nobody was named), not_told (somebody could
            not be), nothing (``once``: no source announces anything), unanswered (``once``: no
            source answered), ended (every process that was named), stopped (by a signal).
        exit_code: of the command.
        reason: why these sources were asked.
        notice: the hard notice, if one was heard.
        early: early ones, in the order they were heard.
        told: who was told of the hard notice, and whether that worked.
        told_early: the same for the early ones.
    """

    outcome: _Word
    exit_code: int
    reason: str
    notice: Notice | None
    early: list[Notice]
    told: list[Told]
    told_early: list[Told]


class Lookout:
    """Waits for notices and passes them on; SIGTERM and SIGINT end it from entering on.

    Args:
        recipients: the processes that are to be signalled.
        command: what is run instead, or None.
        pass_early: whether early notices are passed on too.
    """

    def __init__(
        self,
        recipients: Sequence[Process | PidFile],
        command: NotifyCommand | None = None,
        *,
        pass_early: bool = False,
    ) -> None:
        self._recipients = recipients
        self._command = command
        self._pass_early = pass_early
        self._messages: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._selector = selectors.DefaultSelector()
        self._awake, self._wake = socket.socketpair()
        self._previous: dict[int, Any] = {}
        self._woken_before = -1
        self._watches: list[WatchThread] = []
        self._stopped_by = 0
        self._reason = ""
        self._hard: Notice | None = None
        self._early: list[Notice] = []
        self._told: list[Told] = []
        self._told_early: list[Told] = []
        self._to_ask: list[Watcher] = []  # with `once`: who has not answered
        self._to_end = [one for one in recipients if isinstance(one, Process) and one.fd >= 0]
        self._running: list[StartedCommand] = []

    def __enter__(self) -> Self:
        for one in (self._awake, self._wake):
            one.setblocking(False)
        self._selector.register(self._awake, selectors.EVENT_READ)
        for process in self._to_end:
            self._selector.register(process.fd, selectors.EVENT_READ, process)
        for number in (signal.SIGTERM, signal.SIGINT):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as shells start what is behind "&"
                self._previous[number] = signal.signal(number, self._handle)
        # The handler runs in this thread alone, once something wakes it: the kernel may have given
        # the signal to another thread, or to this one just before it began to wait.
        self._woken_before = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        for watch in self._watches:
            watch.stop()
        signal.set_wakeup_fd(self._woken_before)
        for number, previous in self._previous.items():
            signal.signal(number, previous)
        self._selector.close()
        self._awake.close()
        self._wake.close()

    def run(
        self, watchers: Sequence[Watcher], reason: str, *, interval_s: float, once: bool = False
    ) -> LookoutResult:
        """Wait until it is over.

        Args:
            watchers: whom to ask.
            reason: why these, for the outcome.
            interval_s: seconds between two questions to each.
            once: ask each of them one time only, and come back with what they said.
        """
        self._reason = reason
        self._watches = [WatchThread(one, self._put, interval_s) for one in watchers]
        deadline = time.monotonic() + ONCE_LIMIT_S if once else None
        if once:
            self._to_ask = list(watchers)
            for watcher, watch in zip(watchers, self._watches, strict=True):
                _in_thread(f"outlast-notice-{watcher.name}", self._ask_once, watcher, watch)
        else:
            for watch in self._watches:
                watch.start()
        while (outcome := self._verdict(watchers, deadline)) is None:
            # A command that runs is waited for, however long it takes.
            limited = deadline is not None and not self._running
            self._turn(max(deadline - time.monotonic(), 0) if limited and deadline else None)
        return outcome

    # --- in other threads, and in signal handlers --------------------------------------------

    def _put(self, message: _Message) -> None:
        self._messages.put(message)
        self._awaken()

    def _ask_once(self, watcher: Watcher, watch: WatchThread) -> None:
        watch.check()
        self._put(_WatcherAsked(watcher))

    def _wait_for(self, run: StartedCommand) -> None:
        self._put(_Finished(run, run.wait()))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._stopped_by = number

    def _awaken(self) -> None:
        with contextlib.suppress(OSError):  # full: it is being woken; closed: nobody waits
            self._wake.send(b"\0")

    # --- in the loop -------------------------------------------------------------------------

    def _turn(self, timeout_s: float | None) -> None:
        """Wait until something happens, and act on it; a notice comes before an end."""
        ready = [key.data for key, _ in self._selector.select(timeout_s)]
        with contextlib.suppress(BlockingIOError):
            self._awake.recv(4096)
        with contextlib.suppress(queue.Empty):
            while True:
                self._take(self._messages.get_nowait())
        for process in filter(None, ready):
            self._selector.unregister(process.fd)
            self._to_end.remove(process)
            tell_people(f"process {process.pid} has ended")

    def _take(self, message: _Message) -> None:
        if isinstance(message, _WatcherAsked):
            self._to_ask.remove(message.watcher)
        elif isinstance(message, _Finished):
            self._running.remove(message.run)
            self._note([message.told], early=message.run.early)
        elif message.early:
            self._early.append(message)
            self._pass_on(message, told=self._pass_early)
        elif self._hard is None:
            self._hard = message
            self._pass_on(message, told=True)

    def _pass_on(self, notice: Notice, *, told: bool) -> None:
        found = [one.tell() for one in self._recipients] if told else []
        if told and self._command is not None:
            started = self._command.start(notice)
            if isinstance(started, Told):
                found.append(started)
            else:
                self._running.append(started)
                _in_thread("outlast-command", self._wait_for, started)
        tell_people(_in_words(notice))
        self._note(found, early=notice.early)

    def _note(self, found: list[Told], *, early: bool) -> None:
        (self._told_early if early else self._told).extend(found)
        for one in found:
            tell_people(one.what)

    def _verdict(self, watchers: Sequence[Watcher], deadline: float | None) -> LookoutResult | None:
        """How it ended, or None while it has not."""
        if self._stopped_by:
            return self._over("stopped", self._stopped_code())
        if any(deadline is not None or not run.early for run in self._running):
            return None
        if self._hard is not None:
            return self._all_told(self._told)
        if deadline is not None:
            if self._to_ask and time.monotonic() < deadline:
                return None
            return self._asked(watchers)
        if self._recipients and not self._to_end and _only_processes(self._recipients):
            return self._over("ended", 0)
        return None

    def _stopped_code(self) -> int:
        named = bool(self._recipients) or self._command is not None
        # With nobody named 0 is the notice, on which `outlast watch && ./save.sh` goes on.
        return 0 if named and self._stopped_by == signal.SIGTERM else 128 + self._stopped_by

    def _asked(self, watchers: Sequence[Watcher]) -> LookoutResult:
        """What asking once has come to, when no hard notice was heard."""
        if self._early and self._pass_early:
            return self._all_told(self._told_early)
        # Watchers that count their errors say the last one; asked once, it is of this time.
        errors = [(one, getattr(one, "last_error", "")) for one in watchers]
        silent = [(one, why) for one, why in errors if why or one in self._to_ask]
        for one, why in silent:
            late = f"no answer within {ONCE_LIMIT_S:g} s"
            tell_people(f"{one.name} could not be asked: {why or late}")
        if len(silent) == len(watchers):
            return self._over("unanswered", 1)
        if not self._early:
            tell_people("no notice is announced")
        return self._over("nothing", 3)

    def _all_told(self, told: list[Told]) -> LookoutResult:
        if not all(one.told for one in told):
            return self._over("not_told", 1)
        return self._over("told" if told else "heard", 0)

    def _over(self, outcome: _Word, exit_code: int) -> LookoutResult:
        return LookoutResult(
            outcome=outcome,
            exit_code=exit_code,
            reason=self._reason,
            notice=self._hard,
            early=self._early,
            told=self._told,
            told_early=self._told_early,
        )


def _in_thread(name: str, target: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=target, args=arguments, name=name, daemon=True).start()


def _only_processes(recipients: Sequence[Process | PidFile]) -> bool:
    """Whether no other process can take the place of one that has ended."""
    return all(isinstance(one, Process) for one in recipients)


def _in_words(notice: Notice) -> str:
    left_s = notice.seconds_left(time.time())
    when = "" if left_s is None else f" in {left_s:.0f} s"
    kind = "early notice" if notice.early else "notice"
    return one_line(f"{kind} from {notice.source}: {notice.action}{when} ({notice.detail})")


def tell_people(text: str) -> None:
    """One line on standard error; whoever read it may have gone, and that ends nothing."""
    with contextlib.suppress(OSError):
        say(text)
