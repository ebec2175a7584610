"""The report's page, live: ``http://127.0.0.1:PORT/``, written anew while it is looked at.

Guarantees: it is written once for all who ask within ``KEPT_S``, and the longer it takes the more
seldom; so a crowd of readers costs what one does. Each line of the ledger is read once while
somebody looks; ``FORGET_S`` after the last look what was read is let go. A ledger of more than
``MOST_BYTES`` is not kept in memory: one line says what to do instead.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Final

from outlast.errors import StorageError
from outlast.ledger.clocks import SteadyClocks
from outlast.ledger.events import Event
from outlast.ledger.file import FILE_NAME, Follower
from outlast.ledger.job import Job, read_record
from outlast.metrics.server import Answer, MetricsRequest, plain
from outlast.prices import NO_PRICES, Prices
from outlast.report.page import page

KEPT_S: Final = 5.0
SHARE: Final = 0.05  # of the time, at most, that goes into writing it
MOST_BYTES: Final = 64 << 20
FORGET_S: Final = 60.0


class LivePage:
    """The page of one job.

    Args:
        directory: the job's.
        prices: of machines.
    """

    def __init__(self, directory: Path, prices: Prices = NO_PRICES) -> None:
        self._directory, self._prices = directory, prices
        self._asked_s = 0.0  # monotonic: when somebody looked last
        self.forget()

    def forget(self) -> None:
        """Let go of what was read; the next look reads the ledger from its beginning."""
        self._follower = Follower(self._directory)
        self._clocks = SteadyClocks()
        self._events: list[Event] = []
        self._body = b""
        self._until_s = 0.0  # monotonic: so long it is good

    @property
    def num_kept(self) -> int:
        """Events in memory."""
        return len(self._events)

    def rest(self) -> None:
        """To be called now and then: forget, once nobody has looked for a while."""
        if self.num_kept and time.monotonic() - self._asked_s > FORGET_S:
            self.forget()

    def answer(self, asked: MetricsRequest) -> Answer:
        """The page, of a few seconds ago at most."""
        begun_s = self._asked_s = time.monotonic()
        if begun_s >= self._until_s:
            try:
                size = (self._directory / FILE_NAME).stat().st_size
                if size > MOST_BYTES:
                    words = f"the ledger is large: outlast report {self._directory} -o report.html"
                    return plain("503 Service Unavailable", words)
                self._body = self._written().encode()
            except OSError as error:
                words = f"the ledger cannot be read: {error.strerror or error}"
                return plain("503 Service Unavailable", words)
            took_s = time.monotonic() - begun_s
            self._until_s = time.monotonic() + max(KEPT_S, took_s / SHARE)
        return Answer("200 OK", "text/html; charset=utf-8", self._body)

    def _written(self) -> str:
        self._events += [self._clocks.take(event) for event in self._follower.poll()]
        every = ""
        with contextlib.suppress(StorageError):  # the page is written all the same
            record = read_record(self._directory)
            every = record.settings.get("checkpoint.every", "") if isinstance(record, Job) else ""
        return page(
            self._events,
            self._directory,
            every=every,
            now=time.time() + self._clocks.shift_s,
            prices=self._prices,
            refresh_s=int(KEPT_S),
        )
