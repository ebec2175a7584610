"""The thread that polls a watcher and passes each notice on, once.

Guarantees: the same notice (event, action, deadline, early or not) is passed on once, however
often it is said; nothing that the watcher or the receiver raises ends the watching; polls start
``interval_s`` apart, after errors too (no back-off: the notice is 120 s long and comes when
services are busiest).

What can go wrong: a poll that is under way when ``stop`` is called is not cut short; the thread is
a daemon and ends after it, and what it hears then is not passed on. A watcher that says of itself
that it ``hangs`` (its questions are answered when there is something to say) is not waited for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from outlast.notice import Notice, Watcher

logger = logging.getLogger(__name__)

_JOIN_S: Final = 1.5
_REMEMBERED: Final = 100  # notices; a platform gives a machine one or two


class WatchThread:
    """Polls ``watcher`` in a thread of its own.

    Args:
        watcher: whom to ask.
        on_notice: called in that thread, once for each distinct notice.
        interval_s: seconds from the start of one poll to the start of the next.
    """

    def __init__(
        self, watcher: Watcher, on_notice: Callable[[Notice], None], interval_s: float = 1.0
    ) -> None:
        self._watcher = watcher
        self._on_notice = on_notice
        self._interval_s = interval_s
        self._passed_on: deque[tuple[str, str, float | None, bool]] = deque(maxlen=_REMEMBERED)
        self._raised = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"outlast-notice-{watcher.name}", daemon=True
        )

    def start(self) -> None:
        """Start polling, with a first poll at once."""
        self._thread.start()

    def stop(self) -> None:
        """Stop polling; returns when the thread has ended, or after 1.5 s if a poll is slower.

        The thread of a watcher that hangs is not waited for.

        It may be called from ``on_notice``, more than once, and before ``start``.
        """
        self._stopping.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(0.0 if getattr(self._watcher, "hangs", False) else _JOIN_S)

    def check(self) -> None:
        """Poll once and pass on what is new; what the thread does each time."""
        try:
            notice = self._watcher.poll()
        except Exception:
            if not self._raised:
                logger.exception("the %s watcher raised: a bug; polling on", self._watcher.name)
            self._raised = True
            return
        if notice is None or self._stopping.is_set():
            return
        key = notice.event, notice.action, notice.deadline_t, notice.early
        if key in self._passed_on:
            return
        self._passed_on.append(key)
        try:
            self._on_notice(notice)
        except Exception:
            logger.exception("a notice was heard, its receiver failed: %s", notice.detail)

    def _run(self) -> None:
        due = time.monotonic()
        while not self._stopping.is_set():
            self.check()
            # A poll that took longer than the interval is not made up for.
            due = max(due + self._interval_s, time.monotonic())
            self._stopping.wait(due - time.monotonic())
