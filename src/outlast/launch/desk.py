"""Where an agent hears that its machine must go: signals, and the platform's watchers.

The first notice counts, and one after it that leaves less time; a second SIGINT, or a SIGTERM after
the deadline, ends the workers at once. An early notice is kept beside it: it may be followed by a
real one. Hearing is all that happens here: the agent tells the workers, they agree on a step and
drain.

Workers that cannot be told of a notice: without a session, and without a handler of SIGTERM.

Such a script trains on until its machine goes, and what it has not saved by itself is lost. That is
said as soon as it is known: where the platform gives notices, once an attempt has run for
``START_S``, and at a notice. A script may import for a while before it opens its session, so that
one which has just started is given time. A session that opens after a notice hears of it and
leaves, so nothing is claimed of what a script has yet to do.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final

from outlast.config import Settings
from outlast.ledger.file import Ledger
from outlast.ledger.narrator import say
from outlast.notice import Notice
from outlast.notice.desk import GraceCheck, PlatformDesk, fields_of, request_of
from outlast.notice.platform import Chosen
from outlast.notice.signals import SignalNotice, signal_notice

START_S: Final = 30.0
IMPORT_S: Final = 5.0  # at a notice, which leaves little time
WHAT_TO_DO: Final = (
    "outlast.session(model=model, optimizer=optimizer) around its loop would save and leave"
)


class Deaf:
    """Says it, once at the start and once for each notice.

    Args:
        say: tells people.
        are_deaf: whether none of this machine's workers would hear of a notice now.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        are_deaf: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say = say
        self._are_deaf = are_deaf
        self._clock = clock
        self._began_s = clock()
        self._has_looked = False
        self._told_of: object = None

    def begin(self) -> None:
        """Workers start."""
        self._began_s = self._clock()

    def look(self, *, gives_notices: bool) -> None:
        """While there is no notice.

        Args:
            gives_notices: whether this machine's platform does, as far as is known.
        """
        if self._has_looked or not gives_notices or self._age_s < START_S:
            return
        self._has_looked = True
        if self._are_deaf():
            self._say(
                "this machine's platform gives notice before it takes the machine, and this script "
                "would save nothing now: it has no session yet and handles no SIGTERM; "
                f"{WHAT_TO_DO}"
            )

    def at_notice(self, notice: object, *, left_s: float | None) -> None:
        """While there is one: nobody is to believe that something is saved.

        Args:
            notice: which.
            left_s: until the machine goes, in seconds; None where nobody said.
        """
        if notice is self._told_of or self._age_s < IMPORT_S:
            return
        self._told_of = notice
        if self._are_deaf():
            until = "to its end" if left_s is None else f"until the machine goes in {left_s:.0f} s"
            self._say(
                "nothing is saved so far: this script has no session yet and handles no SIGTERM. "
                f"Unless it opens one, it runs on {until} and nothing is saved; {WHAT_TO_DO}"
            )

    @property
    def _age_s(self) -> float:
        return self._clock() - self._began_s


SOONER_S: Final = 1.0  # what is a word of the same end is no news


class NoticeDesk:
    """Hears notices for one machine.

    Attributes:
        notice: the first one heard, or None.
        early: the newest early one, or None.
        impatient: whether a person has asked a second time.
    """

    def __init__(self, settings: Settings, ledger: Ledger, grace_check: GraceCheck) -> None:
        self.notice: Notice | None = None
        self.early: Notice | None = None
        self.impatient = False
        self._settings = settings
        self._ledger = ledger
        self._grace_check = grace_check
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

    def acknowledge(self) -> None:
        """Everything is saved: the machine may go before its time, if that was asked for."""
        if self.notice is not None and self._platform.acknowledge(self.notice):
            say(f"{self.notice.source} was told that this machine may go now")

    def request(self) -> dict[str, Any] | None:
        """What the workers are to be told, its seconds counted from now; None before a notice."""
        return None if self.notice is None else request_of(self.notice, self._settings)

    def early_request(self) -> dict[str, Any] | None:
        """The same for an early notice."""
        return None if self.early is None else request_of(self.early, self._settings)

    def saving_s(self) -> float | None:
        """How long a save takes, when it goes slowly; None before the first."""
        return self._grace_check.saving_s()

    @property
    def gives_notices(self) -> bool:
        """Whether the platform is known to give any."""
        chosen = self._platform.chosen
        return chosen is not None and (bool(chosen.watchers) or chosen.grace_s is not None)

    def _found(self, chosen: Chosen) -> None:
        say(chosen.reason)
        self._grace_check.found(chosen)

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
