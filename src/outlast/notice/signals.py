"""SIGTERM and SIGUSR1 as a notice, for a process that trains or launches.

The handler notes the signal and writes one byte; a thread that waits for the byte does the rest.
Nothing is saved in a handler: it can run in the middle of an optimizer step.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from outlast.errors import Leave
from outlast.notice import Notice

logger = logging.getLogger(__name__)

SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR1)


def signal_notice(name: str, grace_s: float | None) -> Notice:
    """A signal as a notice; ``grace_s`` is how long after it the machine is there, if known."""
    now = time.time()
    return Notice(
        source=name,
        action="terminate",
        deadline_t=None if grace_s is None else now + grace_s,
        heard_t=now,
        detail="signal",
    )


def is_signal(notice: Notice) -> bool:
    """Whether it is one of those above."""
    return notice.source.startswith("SIG")


class EarlySignals:
    """Keeps signals that come before anybody can act on them, while a launcher imports, say.

    In place from the moment it is made until a :class:`SignalNotice` is installed, which acts on
    what was kept. Only for the main thread.

    Attributes:
        heard: the first signal's name, "" so far.
    """

    def __init__(self) -> None:
        self.heard = ""
        self.before: dict[int, Any] = {}
        for number in (*SIGNALS, signal.SIGHUP):
            before = signal.getsignal(number)
            if before is not signal.SIG_IGN:
                self.before[number] = before
                signal.signal(number, self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The handler."""
        self.heard = self.heard or signal.Signals(number).name


class SignalNotice:
    """Hears the signals while installed; a handler that the script had is called too.

    Args:
        on_signal: called with the signal's name in a thread of its own, once for each signal.
        interrupt: whether SIGINT and SIGHUP are notices too (a person, or a closed terminal).
        patient: asked at SIGINT, where Python's own handler is in place: whether the first one is
            to be heard as the others are. The next one, and any where it is not, interrupts.
    """

    def __init__(
        self,
        on_signal: Callable[[str], None],
        *,
        interrupt: bool = False,
        patient: Callable[[], bool] | None = None,
    ) -> None:
        self._on_signal = on_signal
        self._numbers = SIGNALS + ((signal.SIGINT, signal.SIGHUP) if interrupt else ())
        self._previous: dict[int, Any] = {}
        self._read_fd = self._write_fd = -1
        self._leave_with: int | None = None
        self._patient = patient
        self._is_interrupted = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def install(self) -> None:
        """Start to listen; only the main thread can, elsewhere nothing happens."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(self._read_fd, True)
        early: EarlySignals | None = None
        for number in self._numbers:
            previous = signal.getsignal(number)
            if isinstance(previous, EarlySignals):
                early, previous = previous, previous.before[number]
            if previous is not None and previous is not signal.SIG_IGN:
                self._previous[number] = previous
                signal.signal(number, self._handle)
        if self._patient and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._previous[signal.SIGINT] = signal.default_int_handler
            signal.signal(signal.SIGINT, self._handle_interrupt)
        self._thread = threading.Thread(target=self._listen, name="outlast-signals", daemon=True)
        self._thread.start()
        if early is not None and early.heard:
            os.write(self._write_fd, bytes([signal.Signals[early.heard]]))

    def deafen(self) -> None:
        """Ignore the signals until the process ends.

        For one that has done what a notice asks and is leaving: whoever ends a group of processes
        signals more than once, and dying of it would hide the exit code.
        """
        for number in self._previous:
            signal.signal(number, signal.SIG_IGN)
        self._previous = {}
        self.remove()

    def leave(self, exit_code: int) -> bool:
        """Have SystemExit raised in the main thread, wherever it is; False if that cannot be done.

        It comes between two lines of Python, so not before a call into C++ has returned.
        """
        with self._lock:  # or the default action would meet what is sent here
            if self._thread is None or not self._previous:
                return False
            self._leave_with = exit_code
            main = threading.main_thread().ident
            assert main is not None  # noqa: S101 - it has been started
            signal.pthread_kill(main, next(iter(self._previous)))
            return True

    def remove(self) -> None:
        """Give the signals back."""
        if self._thread is None:
            return
        with self._lock:
            for number, previous in self._previous.items():
                signal.signal(number, previous)
            self._previous = {}
        os.write(self._write_fd, b"\0")
        self._thread.join(timeout=5)
        self._thread = None
        os.close(self._write_fd)
        os.close(self._read_fd)

    def _handle_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._leave_with is not None:
            self._handle(number, frame)
        assert self._patient is not None  # noqa: S101 - or this would not be the handler
        if self._is_interrupted or not self._patient():
            signal.default_int_handler(number, frame)
        self._is_interrupted = True
        with contextlib.suppress(BlockingIOError):
            os.write(self._write_fd, bytes([number]))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._leave_with is not None:
            code, self._leave_with = self._leave_with, None
            for each in self._previous:  # whoever ends a group signals more than once
                signal.signal(each, signal.SIG_IGN)
            self._previous = {}
            if self._is_interrupted:
                raise KeyboardInterrupt
            raise Leave(code)
        with contextlib.suppress(BlockingIOError):  # a full pipe has been heard already
            os.write(self._write_fd, bytes([number]))
        previous = self._previous.get(number)
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)

    def _listen(self) -> None:
        while number := os.read(self._read_fd, 1)[0]:
            try:
                self._on_signal(signal.Signals(number).name)
            except Exception:
                logger.exception("a signal was heard, its receiver failed")
