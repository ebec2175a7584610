"""Workers that cannot be told of a notice: without a session, and without a handler of SIGTERM.

Such a script trains on until its machine goes, and what it has not saved by itself is lost. That is
said as soon as it is known: where the platform gives notices, once an attempt has run for
``START_S``, and at a notice. A script may import for a while before it opens its session, so that
one which has just started is given time. A session that opens after a notice hears of it and
leaves, so nothing is claimed of what a script has yet to do.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

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
