"""A look at a job's past that nobody waits for long.

An agent reads what the ledger has got since the last attempt before each restart. On a file system
that hangs, a read does not come back: the agent would hear no notice and keep no deadline. Here a
thread reads; who asks waits for a second, then goes on with what the last look has found.

Guarantees: what is shown is one state of the ledger, never half a look; at most one thread.
What can go wrong: a look that came late is shown by the next one.
Rejected: a thread for each look (as many as there are restarts, all of them stuck).
"""

from __future__ import annotations

import threading
from typing import Final

import msgspec

from outlast.errors import StorageError
from outlast.ledger.events import Event
from outlast.ledger.past import Past
from outlast.policy.attribution import ESTIMATE_S, Sighting
from outlast.policy.rollbacks import Rollback

WAIT_S: Final = 1.0


class GlanceResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a look has found; the fields are those of :class:`Past`, and of its ``tolls``."""

    attempt: int = 0
    word: str = ""
    rollbacks: tuple[Rollback, ...] = ()
    own_failures: dict[str, list[tuple[float, str]]] = {}
    sightings: tuple[Sighting, ...] = ()
    left_out: dict[str, tuple[float, float]] = {}  # until when, for how many seconds
    went_out: frozenset[str] = frozenset()
    cost_s: float = ESTIMATE_S
    pause_s: float = 0.0
    since_t: float = 0.0


class Glance:
    """Of one agent.

    Args:
        past: belongs to this from now on: a thread may be reading it at any time.
    """

    def __init__(self, past: Past) -> None:
        self._past = past
        self._thread: threading.Thread | None = None
        self._error: StorageError | None = None
        self._seen = _seen(past)

    def look(self) -> GlanceResult:
        """What is known now, and what is new where that can be read in time.

        Raises:
            StorageError: the ledger cannot be read.
        """
        if self._thread is None or not self._thread.is_alive():
            self._error = None
            self._thread = threading.Thread(target=self._look, name="outlast-glance", daemon=True)
            self._thread.start()
        self._thread.join(WAIT_S)
        if self._error is not None:
            raise self._error
        return self._seen

    @property
    def seen(self) -> GlanceResult:
        """What the last look has found."""
        return self._seen

    def _look(self) -> None:
        try:
            self._past.look()
        except StorageError as error:
            self._error = error
        else:
            self._seen = _seen(self._past)


def _seen(past: Past) -> GlanceResult:
    return GlanceResult(
        attempt=past.attempt,
        word=past.word,
        rollbacks=tuple(past.rollbacks),
        own_failures={host: list(known) for host, known in past.own_failures.items()},
        sightings=tuple(past.sightings),
        left_out={host: _term(event) for host, event in past.left_out.items()},
        went_out=frozenset(past.went_out),
        cost_s=past.tolls.cost_s,
        pause_s=past.tolls.pause_s,
        since_t=past.tolls.since_t,
    )


def _term(event: Event) -> tuple[float, float]:
    until_t, for_s = event.get("until_t"), event.get("for_s")
    known = isinstance(until_t, int | float) and isinstance(for_s, int | float)
    return (float(until_t), float(for_s)) if known else (event.t, 0.0)
