"""What all watchers share: they are asked in a loop, count what went wrong, and never raise.

Guarantees: whatever goes wrong in a poll is counted, kept in words and is not a notice. People are
warned once; a service that is away for an hour must not fill the log.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from datetime import UTC, datetime
from typing import Final

from outlast.notice import Notice

logger = logging.getLogger(__name__)

_REMEMBERED: Final = 100  # a platform gives a machine one or two


class NotUnderstoodError(Exception):
    """The source answered, but not with what it documents."""


class Source:
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
