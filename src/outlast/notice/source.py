"""What all watchers share: they are asked in a loop, count what went wrong, and never raise.

Guarantees: whatever goes wrong in a poll is counted, kept in words and is not a notice. People are
warned once; a service that is away for an hour must not fill the log.

The thread that polls a watcher and passes each notice on, once.

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
from collections.abc import Callable, Hashable
from datetime import UTC, datetime
from typing import Final

from outlast.notice import Notice, Watcher

logger = logging.getLogger(__name__)

_REMEMBERED: Final = 100  # a platform gives a machine one or two


class NotUnderstoodError(Exception):
    """The source answered, but not with what it documents."""


class NoticeSource:
    """One source of notices; a platform's own says in ``_ask`` how it is asked.

    Args:
        place: where it is, in words that begin each of its errors.
        clock: seconds since the epoch.

    Attributes:
        name: what people call it, such as "aws".
        polls: how often it was asked.
        errors: how many of these polls got no answer that could be understood.
        last_error: the last of them in words, or "".
    """

    name = ""

    def __init__(self, place: str, clock: Callable[[], float] = time.time) -> None:
        self.place = place
        self.polls = 0
        self.errors = 0
        self.last_error = ""
        self._warned = False
        self._clock = clock
        self._heard: dict[object, Notice] = {}  # what was said → the notice it was

    def poll(self) -> Notice | None:
        """Ask once; never raises, see :class:`outlast.notice.Watcher`."""
        self.polls += 1
        try:
            return self._ask()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is not a notice
            self._count(error)
            return None

    def _ask(self) -> Notice | None:
        """Ask once; whatever is raised counts as an error."""
        raise NotImplementedError

    def _once(
        self,
        said: Hashable,
        *,
        action: str,
        deadline_t: float | None,
        detail: str,
        early: bool = False,
        event: str = "",
        heard_t: float | None = None,
    ) -> Notice:
        """The notice for what was ``said``.

        Said again, it is the notice that was heard first: when it was heard, and a deadline that
        was reckoned from then, must not move.
        """
        if said not in self._heard:
            if len(self._heard) >= _REMEMBERED:
                self._heard.clear()
            self._heard[said] = Notice(
                source=self.name,
                action=action,
                deadline_t=deadline_t,
                heard_t=self._clock() if heard_t is None else heard_t,
                detail=detail,
                early=early,
                event=event,
            )
        return self._heard[said]

    def _count(self, error: Exception, *, quiet: bool = False) -> None:
        self.errors += 1
        self.last_error = f"{self.place}: {error or type(error).__name__}"
        level = logging.DEBUG if quiet or self._warned else logging.WARNING
        self._warned = self._warned or not quiet
        logger.log(level, "no notice can be heard, asking again: %s", self.last_error)


def iso_utc(t: float) -> str:
    """``t`` for people, such as 2017-09-18T08:22:00+00:00."""
    return datetime.fromtimestamp(int(t), UTC).isoformat()


_JOIN_S: Final = 1.5


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
