"""What people hear of saves that fail: the first failure, and that saving works again.

It is said here and not from the ledger: a disk that takes no checkpoint often takes no event.
"""

from __future__ import annotations

from collections.abc import Callable

from outlast.training.flight import Written


class Unsaved:
    """Of one session, on rank 0.

    Args:
        say: tells people.

    Attributes:
        is_ending: the session's end waits for its save, and says itself what becomes of it.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.is_ending = False
        self._say = say
        self._since = 0  # the step whose save failed first; 0 while saves work

    def ended(self, written: Written) -> None:
        """A save is over."""
        if written.by_storage and not self._since and not self.is_ending:
            self._since = written.step
            self._say(
                f"step {written.step} was not saved: {written.error}; training goes on, and it is "
                "said when a later save works"
            )
        elif written.tier and self._since:
            self._say(
                f"step {written.step} is saved: saving works again (it had failed since step "
                f"{self._since})"
            )
            self._since = 0
