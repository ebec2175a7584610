"""Where an agent hears that its machine must go: signals, and the platform's watchers.

The first notice counts, and one after it that leaves less time; a second SIGINT, or a SIGTERM after
the deadline, ends the workers at once. An early notice is kept beside it: it may be followed by a
real one. Hearing is all that happens here: the agent tells the workers, they agree on a step and
drain.
"""

from __future__ import annotations

import threading
from typing import Any, Final

from outlast.config import Settings
from outlast.ledger.file import Ledger
from outlast.ledger.narrator import say
from outlast.notice import Notice
from outlast.notice.desk import PlatformDesk
from outlast.notice.foresight import Foresight
from outlast.notice.platform import Chosen
from outlast.notice.record import fields_of, request_of
from outlast.notice.signals import SignalNotice, signal_notice

SOONER_S: Final = 1.0  # what is a word of the same end is no news


class NoticeDesk:
    """Hears notices for one machine.

    Attributes:
        notice: the first one heard, or None.
        early: the newest early one, or None.
        impatient: whether a person has asked a second time.
    """

    def __init__(self, settings: Settings, ledger: Ledger, foresight: Foresight) -> None:
        self.notice: Notice | None = None
        self.early: Notice | None = None
        self.impatient = False
        self._settings = settings
        self._ledger = ledger
        self._foresight = foresight
        self._is_open = False
        self._lock = threading.Lock()
        self._signals = SignalNotice(self._on_signal, interrupt=True)
        self._platform = PlatformDesk(settings, self._hear, self._found)

    def open(self) -> None:
        """Begin to listen; finding out the platform goes on in the background."""
        self._is_open = True
        self._signals.install()
        self._platform.open()

    def close(self) -> None:
        """Stop listening."""
        if not self._is_open:
            return
        if self.notice is not None:
            # Whoever ends processes signals more than once: that must not hide the exit code.
            self._signals.deafen()
        else:
            self._signals.remove()
        self._platform.close()

    def approve(self) -> None:
        """Everything is saved: the machine may go before its time, if that was asked for."""
        if self.notice is not None and self._platform.approve(self.notice):
            say(f"{self.notice.source} was told that this machine may go now")

    def request(self) -> dict[str, Any] | None:
        """What the workers are to be told, its seconds counted from now; None before a notice."""
        return None if self.notice is None else request_of(self.notice, self._settings)

    def early_request(self) -> dict[str, Any] | None:
        """The same for an early notice."""
        return None if self.early is None else request_of(self.early, self._settings)

    def saving_s(self) -> float | None:
        """How long a save takes, when it goes slowly; None before the first."""
        return self._foresight.saving_s()

    @property
    def gives_notices(self) -> bool:
        """Whether the platform is known to give any."""
        chosen = self._platform.chosen
        return chosen is not None and (bool(chosen.watchers) or chosen.grace_s is not None)

    def _found(self, chosen: Chosen) -> None:
        say(chosen.reason)
        self._foresight.found(chosen)

    def _on_signal(self, name: str) -> None:
        if self.notice is not None and name == "SIGINT":
            self.impatient = True
        # A person's Ctrl-C leaves all the time in the world.
        grace_s = None if name == "SIGINT" else self._platform.grace_s()
        self._hear(signal_notice(name, grace_s))

    def _hear(self, notice: Notice) -> None:
        with self._lock:
            if self.notice is not None and (notice.early or not _is_sooner(notice, self.notice)):
                return
            if notice.early:
                self.early = notice
            else:
                self.notice = notice
        self._ledger.append("notice", **fields_of(notice, self._settings))


def _is_sooner(notice: Notice, than: Notice) -> bool:
    if notice.deadline_t is None:
        return False
    return than.deadline_t is None or notice.deadline_t < than.deadline_t - SOONER_S
