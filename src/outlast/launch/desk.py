"""Where an agent hears that its machine must go: signals, and the platform's watcher.

The first notice counts; a second SIGINT, or a SIGTERM after the deadline, ends the workers at once.
Hearing is all that happens here: the agent tells the workers, they agree on a step and drain.
"""

from __future__ import annotations

import threading
import time

from outlast.config import Settings
from outlast.ledger.file import Ledger
from outlast.notice import Notice
from outlast.notice.platform import choose
from outlast.notice.signals import SignalNotice
from outlast.notice.watch import WatchThread


class NoticeDesk:
    """Hears notices for one machine.

    Attributes:
        notice: the first one heard, or None.
        impatient: whether a person has asked a second time.
    """

    def __init__(self, settings: Settings, ledger: Ledger) -> None:
        self.notice: Notice | None = None
        self.impatient = False
        self._settings = settings
        self._ledger = ledger
        self._lock = threading.Lock()
        self._signals = SignalNotice(self._on_signal, interrupt=True)
        self._watch: WatchThread | None = None
        self._finder = threading.Thread(target=self._find, name="outlast-platform", daemon=True)

    def open(self) -> None:
        """Begin to listen; finding out the platform goes on in the background."""
        self._signals.install()
        self._finder.start()

    def close(self) -> None:
        """Stop listening."""
        self._signals.remove()
        self._finder.join(timeout=3)
        if self._watch is not None:
            self._watch.stop()

    def _find(self) -> None:
        chosen = choose(self._settings.notice_platform, self._settings.notice_base_url)
        if chosen.watcher is not None:
            self._watch = WatchThread(
                chosen.watcher, self._hear, interval_s=self._settings.notice_poll_s
            )
            self._watch.start()

    def _on_signal(self, name: str) -> None:
        if self.notice is not None and name == "SIGINT":
            self.impatient = True
        grace_s = self._settings.notice_grace_s
        now = time.time()
        deadline_t = None if grace_s is None or name == "SIGINT" else now + grace_s
        self._hear(
            Notice(
                source=name, action="terminate", deadline_t=deadline_t, heard_t=now, detail="signal"
            )
        )

    def _hear(self, notice: Notice) -> None:
        with self._lock:
            if self.notice is not None:
                return
            self.notice = notice
        self._ledger.append(
            "notice",
            source=notice.source,
            action=notice.action,
            deadline_t=notice.deadline_t,
            detail=notice.detail,
        )
