"""``outlast watch``: one loop that hears notices and passes the first hard one on.

Guarantees: whoever was named is told before people are, and nothing that goes wrong with telling
people keeps a notice from being passed on. The first notice that is not an early one ends it. All
decisions are made in the loop's own thread: watchers, signals and processes that end only wake it.

What can go wrong: a source that does not answer is not an end (see ``outlast.notice``), so the loop
waits as long as somebody is there to be told; ``once`` waits ``ONCE_LIMIT_S`` at most. A command
that is running when a signal stops us goes on by itself: it may be saving.
"""

from __future__ import annotations

import contextlib
import queue
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Final, Literal, NamedTuple, Self

import msgspec

from outlast.ledger.narrator import say
from outlast.notice import Notice, Watcher
from outlast.notice.deliver import NotifyCommand, PidFile, Process, StartedCommand, Told, one_line
from outlast.notice.source import WatchThread

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
