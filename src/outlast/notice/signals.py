"""SIGTERM and SIGUSR1 as a notice, for a process that trains or launches.

The handler notes the signal and writes one byte; a thread that waits for the byte does the rest.
Nothing is saved in a handler: it can run in the middle of an optimizer step.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR1)


class SignalNotice:
    """Hears the signals while installed; a handler that the script had is called too.

    Args:
        on_signal: called with the signal's name in a thread of its own, once for each signal.
        interrupt: whether SIGINT and SIGHUP are notices too (a person, or a closed terminal).
    """

    def __init__(self, on_signal: Callable[[str], None], *, interrupt: bool = False) -> None:
        self._on_signal = on_signal
        self._numbers = SIGNALS + ((signal.SIGINT, signal.SIGHUP) if interrupt else ())
        self._previous: dict[int, Any] = {}
        self._read_fd = self._write_fd = -1
        self._thread: threading.Thread | None = None

    def install(self) -> None:
        """Start to listen; only the main thread can, elsewhere nothing happens."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(self._read_fd, True)
        for number in self._numbers:
            previous = signal.getsignal(number)
            if previous is not None and previous is not signal.SIG_IGN:
                self._previous[number] = previous
                signal.signal(number, self._handle)
        self._thread = threading.Thread(target=self._listen, name="outlast-signals", daemon=True)
        self._thread.start()

    def deafen(self) -> None:
        """Ignore the signals until the process ends.

        For one that has done what a notice asks and is leaving: whoever ends a group of processes
        signals more than once, and dying of it would hide the exit code.
        """
        for number in self._previous:
            signal.signal(number, signal.SIG_IGN)
        self._previous = {}
        self.remove()

    def remove(self) -> None:
        """Give the signals back."""
        if self._thread is None:
            return
        for number, previous in self._previous.items():
            signal.signal(number, previous)
        self._previous = {}
        os.write(self._write_fd, b"\0")
        self._thread.join(timeout=5)
        self._thread = None
        os.close(self._write_fd)
        os.close(self._read_fd)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(BlockingIOError):  # a full pipe has been heard already
            os.write(self._write_fd, bytes([number]))
        previous = self._previous.get(number)
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)

    def _listen(self) -> None:
        while number := os.read(self._read_fd, 1)[0]:
            self._on_signal(signal.Signals(number).name)
