"""Tells people what happens to a job: when, by which machine, and what was told already.

The exporters of all machines follow the same ledger, and one of them tells. It holds a term: the
name ``tell/term-N`` in the job's directory, which one process alone can make. It writes
``tell/told.json`` every ``BEAT_S``. Another machine takes the next term once that file has not
changed for ``SILENT_S`` on its own clock, or says that its writer has left.

Guarantees: nothing here waits but for ``END_S`` at the end of the process; a server that is dead or
slow costs training nothing. News that nobody has taken are tried again, later each time, together
with what has happened since; they are never dropped. A message that ``TRIES`` have not brought to
all addresses, or the end of the job has not, is one event in the ledger (``not_told``), so that the
report says it; so is that a later one was taken. Of ``per_hour`` messages the last is kept for
the end of the job. What has been told is in ``told.json``, so that a restart repeats nothing and
loses nothing.

What can go wrong: a machine that dies between a message and the note of it: the next one sends it
once more. An address that fails while others take the message is tried ``TRIES`` times. A job that
people are told of for the first time is not told about its past.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import msgspec

from outlast.config import SEVERITIES
from outlast.health.exporter import TellSetup
from outlast.health.send import Delivery, Errand, refusals
from outlast.ledger.events import Event
from outlast.ledger.file import Ledger
from outlast.metrics.folded import JobFold
from outlast.metrics.news import News, NewsFold, NewsMarks, letter
from outlast.prices import Prices
from outlast.storage.directory import Directory

BEAT_S: Final = 10.0
SILENT_S: Final = 30.0
END_S: Final = 8.0
AGAIN_S: Final = 5.0  # after a failure, doubled each time
AGAIN_MAX_S: Final = 300.0
TRIES: Final = 5  # of an address, where others have taken the message
HOUR_S: Final = 3600.0
PAST_S: Final = 60.0  # what was so long before is not told by the first who tells
PLACE: Final = "tell"
_TOLD: Final = f"{PLACE}/told.json"


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What is in ``told.json``.

    Attributes:
        term: of whoever wrote it.
        beat: how often it was written in this term.
        node, pid: who that is.
        left: whether it has left; anybody may go on.
        marks: what has been told.
        sent_t: when the messages of the last hour were sent.
    """

    term: int
    beat: int
    node: str
    pid: int
    left: bool = False
    marks: NewsMarks
    sent_t: tuple[float, ...] = ()


class TellingTurn:
    """Which machine tells.

    Args:
        directory: the job's.
        node: this machine's name.
    """

    def __init__(self, directory: Path, node: str) -> None:
        self._place = Directory(directory)
        self._node = node
        self._seen: Record | None = None
        self._seen_s = -1.0
        self._beat = 0
        self.term = 0  # this process's, 0 for none

    def look(self, now_s: float) -> Record | None:
        """The newest record; whether a term is held, and is still this process's, is seen to.

        Raises:
            OSError: the directory does not answer.
        """
        found = self._read()
        newest = max(self._terms(), default=0)
        if self.term:
            if newest > self.term:
                self.term = 0
            return found
        if found != self._seen or self._seen_s < 0:
            self._seen, self._seen_s = found, now_s
        if self._is_free(found, newest, now_s):
            claim = msgspec.json.encode({"node": self._node, "pid": os.getpid()})
            if self._place.put_new(f"{PLACE}/term-{newest + 1:06d}", claim):
                self.term, self._beat = newest + 1, 0
                for term in self._terms():
                    if term < self.term:
                        self._place.remove(f"{PLACE}/term-{term:06d}")
            self._seen_s = now_s
        return found

    def write(self, marks: NewsMarks, sent_t: tuple[float, ...], *, left: bool = False) -> None:
        """Note what has been told.

        Raises:
            OSError: it cannot be written.
        """
        self._beat += 1
        record = Record(
            term=self.term,
            beat=self._beat,
            node=self._node,
            pid=os.getpid(),
            left=left,
            marks=marks,
            sent_t=sent_t,
        )
        self._place.put(_TOLD, msgspec.json.encode(record))

    def _is_free(self, found: Record | None, newest: int, now_s: float) -> bool:
        if newest == 0:
            return True
        if found is not None and found.term == newest and self._has_gone(found):
            return True
        return now_s - self._seen_s >= SILENT_S

    def _has_gone(self, found: Record) -> bool:
        is_here = found.node == self._node
        return found.left or (is_here and not Path(f"/proc/{found.pid}").exists())

    def _read(self) -> Record | None:
        try:
            return msgspec.json.decode(self._place.read(_TOLD), type=Record)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None

    def _terms(self) -> list[int]:
        try:
            names = self._place.children(PLACE)
        except FileNotFoundError:
            return []
        return [int(n[5:]) for n in names if n.startswith("term-") and n[5:].isdigit()]


class Teller:
    """Follows what the exporter reads; each ``turn`` does what is due and returns at once.

    Args:
        setup: how people are told.
        urls: where.
        fold: what the exporter makes of the ledger.
        job, directory, node: whose news they are, and who tells.
        prices: of machines.
        say: a line for the log of the agent.
    """

    def __init__(
        self,
        setup: TellSetup,
        urls: tuple[str, ...],
        fold: JobFold,
        *,
        job: str,
        directory: Path,
        node: str,
        prices: Prices,
        say: Callable[[str], None],
    ) -> None:
        self._setup = setup
        self._urls = urls
        self._job, self._directory, self._node = job, directory, node
        self._say = say
        self._news = NewsFold(fold, prices)
        self._turn = TellingTurn(directory, node)
        self._marks: NewsMarks | None = None
        self._sent_t: tuple[float, ...] = ()
        self._sending: Delivery | None = None
        self._on_way: list[News] = []
        self._left: tuple[str, ...] = ()  # addresses that the message on its way still goes to
        self._tries = 0
        self._tried_t = 0.0  # when the message on its way was tried first
        self._is_noted = False  # in the ledger, that it was not taken
        self._owes = False  # the ledger says of an older one that it was not
        self._ledger = Ledger(directory, job=job)
        self._why = ""  # it was not taken
        self._has_taken = False
        self._again_s = 0.0
        self._first_s: float | None = None  # when the oldest of what is due was seen
        self._looked_s = -BEAT_S
        self._orphaned: list[News] = []
        self._begun_t = time.time()

    def take(self, events: Iterable[Event]) -> None:
        """Take what is settled of the ledger."""
        events = list(events)
        self._news.take(events)
        for event in events:
            self._ledger.attempt = max(self._ledger.attempt, event.attempt)
            if event.event == "not_told":
                self._owes = not event.get("over")

    def turn(self, *, is_end: bool = False) -> bool:
        """Do what is due; whether something is still to be done."""
        now_s = time.monotonic()
        try:
            self._hold(now_s, is_end=is_end)
            if self._marks is None or not self._turn.term:
                return False
            self._conclude(now_s)
            return self._begin(now_s, is_end=is_end)
        except OSError as error:
            self._say(f"tell.urls: the job's directory does not answer: {error.strerror or error}")
            return False

    def parent_died(self) -> None:
        """The process that started this one is gone; where it was the agent, that is news.

        The ledger will have it as an incident once the job is started again; until then nobody else
        may be there to say it.
        """
        if self._setup.is_agent and not self._news.has_ended:
            what = f"outlast run on {self._node} has died without a word; start it again"
            self._orphaned = [News(kind="other", number=-1, severity=SEVERITIES[-1], what=what)]

    def end(self) -> None:
        """Tell what is left to tell, for some seconds at most, and let others go on."""
        until_s = time.monotonic() + END_S
        self._again_s = 0.0
        while (is_left := self.turn(is_end=True)) and time.monotonic() < until_s:
            time.sleep(0.05)
        if self._sending is not None:
            self._sending.stop()
        if is_left and self._news.has_ended:
            self._not_told(len(self._left or self._urls))
        if self._turn.term and self._marks is not None:
            try:
                self._turn.write(self._marks, self._sent_t, left=True)
            except OSError as error:
                self._say(f"tell.urls: {error.strerror or error}")

    def _hold(self, now_s: float, *, is_end: bool) -> None:
        every_s = BEAT_S if self._turn.term else 1.0
        if now_s - self._looked_s < every_s and not (is_end and self._marks is None):
            return
        self._looked_s = now_s
        had = self._turn.term
        record = self._turn.look(now_s)
        if not self._turn.term:
            self._marks = None
            return
        if not had or self._marks is None:
            past_t = self._begun_t - PAST_S
            self._marks = self._news.marks(past_t) if record is None else record.marks
            self._sent_t = () if record is None else record.sent_t
        self._turn.write(self._marks, self._sent_t)

    def _due(self) -> list[News]:
        assert self._marks is not None  # noqa: S101 - who tells knows what was told
        least = SEVERITIES.index(self._setup.least)
        found = self._news.beyond(self._marks, time.time()) + self._orphaned
        return [one for one in found if SEVERITIES.index(one.severity) >= least]

    def _begin(self, now_s: float, *, is_end: bool) -> bool:
        if self._sending is not None:
            return True
        if self._left:
            due = self._on_way
        else:
            due = self._due()
            if not due:
                self._first_s = None
                return False
            self._first_s = now_s if self._first_s is None else self._first_s
            has_ended = any(one.is_end for one in due)
            if not (is_end or has_ended or now_s - self._first_s >= self._setup.group_s):
                return True
            sent = [t for t in self._sent_t if time.time() - t < HOUR_S]
            if len(sent) >= self._setup.per_hour - (not has_ended):
                return not is_end
        if now_s < self._again_s:
            return True
        if not self._tries:
            self._tried_t, self._is_noted, self._why = time.time(), False, "no answer in time"
        self._on_way, self._left = due, self._left or self._urls
        words = letter(due, job=self._job, node=self._node, directory=str(self._directory))
        self._sending = Delivery(
            Errand(urls=self._left, severity=words.severity, title=words.title, body=words.body)
        )
        return True

    def _conclude(self, now_s: float) -> None:
        answers = None if self._sending is None else self._sending.look()
        if answers is None or self._marks is None:
            return
        urls, self._sending = self._left, None
        failed = [(url, why) for url, why in zip(urls, answers, strict=True) if why]
        self._tries += 1
        if len(failed) < len(urls) and not self._has_taken:
            self._has_taken = True
            self._marks = self._marks.with_told(self._on_way)
            self._orphaned = [one for one in self._orphaned if one not in self._on_way]
            hour = [t for t in self._sent_t if time.time() - t < HOUR_S]
            self._sent_t = (*hour, time.time())
            self._turn.write(self._marks, self._sent_t)
        if failed:
            self._again_s = now_s + min(AGAIN_S * 2 ** (self._tries - 1), AGAIN_MAX_S)
            if self._tries == 1:
                words = "; ".join(refusals(url, why) for url, why in failed)
                self._say(f"tell.urls: a message was not taken ({words}); it is tried again")
            self._why = "; ".join(dict.fromkeys(why for _, why in failed))
            if self._tries >= TRIES:
                self._not_told(len(failed))
        elif self._owes:
            self._owes = False
            self._ledger.append("not_told", over=True)
        is_over = not failed or (self._has_taken and self._tries >= TRIES)
        self._left = () if is_over or not self._has_taken else tuple(url for url, _ in failed)
        if is_over:
            self._tries, self._has_taken, self._first_s = 0, False, None
            self._on_way = []

    def _not_told(self, num_failed: int) -> None:
        """Of the message on its way, once: it has not come to all that it was for."""
        if self._is_noted:
            return
        self._is_noted = self._owes = True
        self._ledger.append(
            "not_told",
            addresses=num_failed,
            of=len(self._urls),
            why=self._why,
            since_t=self._tried_t,
        )
