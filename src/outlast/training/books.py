"""Which attempt a session is in, and its books: what goes into the ledger, what the agent can see.

Under our agent the attempt is the agent's. A session that no agent has started claims a number of
its own (:mod:`outlast.peer.claims`), or goes by the claim of the machines where torch's own
launcher has formed them through our rendezvous. Then its first rank keeps the job's books too: the
lock on the directory, the events of its beginning and end, and what people hear.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from outlast.attempt import trackers
from outlast.attempt.beat import Descent
from outlast.attempt.early import first_model_s
from outlast.attempt.link import (
    ATTEMPT_VARIABLE,
    DATA_KEY,
    FREE,
    STORE_VARIABLE,
    TIED,
    Link,
    open_link,
)
from outlast.checkpoint.catalog import open_job
from outlast.checkpoint.manifest import SaveName, new_nonce, parse
from outlast.config import Settings
from outlast.data import Feed, open_feed
from outlast.data.trail import Trail
from outlast.errors import ConfigError, Exit, StorageError
from outlast.health.exporter import Exporter
from outlast.ledger.command import own_command, settle
from outlast.ledger.file import PATIENCE_S, QueuedLedger
from outlast.ledger.job import JobLock, boot, enter_plan, process_age_s, versions
from outlast.ledger.narrator import Narrator, one_line_errors, say
from outlast.ledger.past import VARIABLE as PAST_VARIABLE
from outlast.ledger.past import Past
from outlast.notice import Notice
from outlast.notice.desk import GraceCheck, fields_of
from outlast.peer.claims import FORMED_VARIABLE, Term, term_over
from outlast.script.restore import READ_TIMEOUT_S
from outlast.training.timing import Samples


class Attempt(msgspec.Struct, frozen=True):
    """The attempt that a session is in.

    Attributes:
        number: of it.
        term: what its claim carries; "" where the agent tells the keeper, or nobody has claimed.
        claims: where it is claimed, a directory or URL; "" likewise.
        nonce: drawn anew by each session, the same on all ranks: no other one's saves have it in
            their names, whatever its number is.
    """

    number: int
    term: str = msgspec.field(default="", name="reign")
    claims: str = ""
    nonce: str = ""
    finished_t: float = 0.0


def look_back(link: Link, directory: Path) -> Past | None:
    """What the job's ledger says of before; read by rank 0 alone, None on others."""
    return None if link.rank else Past(directory, os.environ.get(PAST_VARIABLE, "")).look()


def agree_on_attempt(
    link: Link, past: Past | None, directory: Path, begin: Callable[[], Term]
) -> Attempt:
    """The attempt that all ranks are in: the agent's, or without one the next.

    Args:
        link: the other ranks.
        past: on rank 0.
        directory: the job's.
        begin: has this process begin a term; called on rank 0 where nobody else has claimed.

    Raises:
        ConfigError, StorageError: the job runs already, here or elsewhere.
    """
    if past is not None:
        given = os.environ.get(ATTEMPT_VARIABLE)
        attempt = Attempt(int(given)) if given else _formed(directory, past.attempt)
        if attempt is None:
            term = begin()
            number = term.open(past.attempt)
            term.begin()
            past.look()  # whoever was waited for may have written meanwhile
            attempt = Attempt(number, term.name, str(directory))
        attempt = msgspec.structs.replace(attempt, nonce=new_nonce(), finished_t=past.finished_t)
        link.publish("session/attempt", msgspec.json.encode(attempt))
    return msgspec.json.decode(link.fetch("session/attempt", READ_TIMEOUT_S), type=Attempt)


def _formed(directory: Path, known: int) -> Attempt | None:
    """What the machines of torch's launcher have claimed; None where they have not."""
    word = os.environ.get(FORMED_VARIABLE)
    if not word:
        return None
    formed = msgspec.json.decode(word, type=Attempt)
    if formed.number > known:
        return formed
    # An older ledger counts further: their claims are in the way of others in the same place.
    return Attempt(known + 1) if formed.claims == str(directory) else None


class AttemptBooks:
    """The books of one attempt, in one worker: which one it is, what goes into the ledger.

    Args:
        settings: the job's.

    Attributes:
        link: the other ranks.
        job: that the directory is of.
        under_agent: whether this worker is one of an agent of ours, which hears what comes for the
            job.
        attempt: the one that all ranks are in.
        past: what the ledger says of before; None on ranks but the first.
        promised: the saves that it says are committed.
        descent: where the own states of its workers come from.
        grace_check: whether what platforms give is enough for a save.
        ledger: the job's, once the books are open.
        samples: what steps take, likewise.

    Raises:
        ConfigError, StorageError: the job's directory cannot be used.
    """

    def __init__(self, settings: Settings) -> None:
        self._began_s = time.monotonic()
        self.link: Link = open_link()
        self.settings = settings
        self.under_agent = STORE_VARIABLE in os.environ
        self._is_closed = False
        self._lock: JobLock | None = None
        self._term: Term | None = None  # where there is no agent, on rank 0
        given = os.environ.get("OUTLAST_DIR")
        if self.under_agent and given and settings.dir != Path(given):
            raise ConfigError(
                f"outlast run keeps this job in {given} and the session asks for {settings.dir}; "
                "leave dir out of outlast.session(), or give the same to outlast run --dir"
            )
        self.job = open_job(settings.dir, settings)
        self._exported = trackers.export(self.job.id, settings.dir, self.link.rank)
        self._keeps = self.link.rank == 0 and not self.under_agent
        self._narrator: Narrator | None = None
        self._exporter: Exporter | None = None
        self._feed: trackers.TrackerFeed | None = None
        self.grace_check = GraceCheck(settings)
        self.promised = set[SaveName]()
        self.ledger: QueuedLedger
        self.samples: Samples
        self._data_word = b""
        self._undo = contextlib.ExitStack()
        self._undo.callback(self._forget)
        with self.or_given_back():
            self._claim()

    @contextlib.contextmanager
    def or_given_back(self) -> Iterator[None]:
        """Within, a failure gives back what another session in here would miss."""
        try:
            yield
        except BaseException:
            self._undo.close()
            raise

    def _claim(self) -> None:
        """Lock, and the number of the attempt."""
        settings = self.settings
        if self._keeps:
            self._lock = JobLock(settings.dir)
            self._undo.callback(self._lock.release)
            if (command := own_command()) is not None:
                settle(settings, command, is_alone=self._lock.is_alone, in_script=True)
        self.past = look_back(self.link, settings.dir)
        self.attempt = agree_on_attempt(self.link, self.past, settings.dir, self._begin)
        if self.past is not None and self.past.promised:
            self.promised = {parse(self.past.promised_save) or SaveName(self.past.promised)}
        # A line of steps that goes on from survivors keeps its number: whoever finds that says so.
        number = self.attempt.number
        self.descent = Descent(number, number, self.link.world_size)

    def _begin(self) -> Term:
        """This process has the job, once ``open`` has returned."""
        is_locked = self._lock is not None and self._lock.is_held
        self._term = term_over(self.settings.dir, say, is_locked=is_locked)
        self._undo.callback(self._term.close, int(Exit.USAGE))
        return self._term

    def open(self) -> None:
        """The attempt begins."""
        settings = self.settings
        # Steps go on while the job's directory does not answer.
        self.ledger = QueuedLedger(
            settings.dir,
            job=self.job.id,
            attempt=self.attempt.number,
            rank=self.link.rank,
            patience_s=PATIENCE_S,
        )
        self._undo.callback(self.ledger.close)
        self.samples = Samples(self.ledger, self.link.rank)
        if self.listens:  # the first of this machine, and there is no agent
            self._exporter = Exporter(settings, self.job.id)
            self._exporter.start()
            self._undo.callback(self._exporter.close)
        if self._keeps:  # what the agent writes where there is one
            name = Path(sys.argv[0]).name
            self.ledger.append(
                *("job_started",),
                command=name,
                versions=versions(),
                pid=os.getpid(),
                age_s=process_age_s(),
                boot=boot(),
            )
            enter_plan(self.ledger, settings.dir, say)
            self.ledger.append("attempt_formed", world_size=self.link.world_size, nodes=1)
            # Where there is an agent, it has its own.
            self._narrator = Narrator(settings.dir, also=self.grace_check.take)
            self._narrator.start()
            self._undo.callback(self._narrator.stop)

    def first_step(self, step: int) -> None:
        """The first one here is done: by now the script has begun its tracker's run, if any."""
        if self.link.rank == 0:
            run = trackers.note(self.settings.dir)
            if self.settings.metrics_trackers:
                self._feed = trackers.TrackerFeed(self.settings.dir, self.attempt.number, step, run)
                self._feed.start()

    def end(self) -> None:
        """The session has ended well."""
        self.samples.end()
        if self._feed is not None:
            self._feed.end()

    def close(self, exit_code: int) -> None:
        """The attempt ends here, with this exit code."""
        if self._is_closed:  # by the thread that leaves for one that does not end
            return
        self._is_closed = True
        term = self._term
        if self._feed is not None:
            self._feed.close()
        if self._keeps and not (term is not None and term.overtaken):
            self.ledger.append("job_finished", exit_code=exit_code, reason="")
        self.ledger.close()
        self._forget()
        if term is not None:
            term.close(exit_code)
        if self._narrator is not None:
            self._narrator.stop()
        if self._exporter is not None:
            self._exporter.close()
        if self._lock is not None:
            self._lock.release()

    def _forget(self) -> None:
        for name in self._exported:
            os.environ.pop(name, None)

    def raise_if_overtaken(self) -> None:
        """At a boundary: another attempt of this job was begun, and this one must end.

        Raises:
            StorageError: says which.
        """
        if self._term is not None and self._term.overtaken:
            with one_line_errors():
                raise StorageError(self._term.overtaken)

    @property
    def building_s(self) -> float:
        """Seconds since the script began to build what it trains, as far as that was seen."""
        made_s = first_model_s()
        since_s = self._began_s if made_s is None else min(made_s, self._began_s)
        return round(time.monotonic() - since_s, 6)

    @property
    def listens(self) -> bool:
        """Whether this worker is to hear the platform: there is no agent that does."""
        return not self.under_agent and int(os.environ.get("LOCAL_RANK", "0")) == 0

    def notice(self, heard: Notice) -> None:
        """This process itself heard that it must go."""
        self.ledger.append("notice", **fields_of(heard, self.settings))

    def drain_agreed(
        self, step: int, info: dict[str, Any], leaves: Sequence[int] | None = None
    ) -> None:
        """All ranks stop after ``step``, or those in ``leaves`` while the others go on.

        The time from here on is the checkpoint's, or that of going on.
        """
        self.samples.write(force=True)
        told = {**info, "leaves": leaves}
        if leaves is None:  # whoever has asked may have meant itself alone
            del told["leaves"]
        if self.link.rank == 0:
            self.ledger.append("drain_agreed", durable=False, step=step, **told)

    def drained(self, step: int, committed: bool) -> None:
        """The drain's commit has ended, one way or the other."""
        if self.link.rank == 0:
            self.ledger.append("drained", step=step, committed=committed)

    def code_of_rollback(self, *, stops: bool, unknown: str = "") -> int:
        """What this worker leaves with, so that the next attempt goes on from before.

        Our agent starts it at once; whoever else starts workers knows what 75 means. Where the
        next attempt would not know of it (``unknown`` says why), there is to be none.
        """
        if unknown:
            if self.link.rank == 0:
                say(unknown)
            return int(Exit.STORAGE)
        if stops:
            return int(Exit.GAVE_UP)
        return int(Exit.ROLLED_BACK if self.under_agent else Exit.DRAINED)

    def open_feed(self, loader: Iterable[Any], trail: Trail, step: int) -> Feed:
        """The feed of ``loader`` for this rank; the agent hears whether it is tied to the ranks.

        Raises:
            ConfigError: the loader cannot be used.
        """
        rank, world_size = self.link.rank, self.link.world_size
        feed = open_feed(loader, rank=rank, world_size=world_size, trail=trail, step=step)
        self.tell_of(feed)
        return feed

    def tell_of(self, feed: Feed) -> None:
        """The agent hears whether the loop's loader is tied to the ranks."""
        word = TIED if feed.is_tied else FREE
        if self.under_agent and self.link.rank == 0 and word != self._data_word:
            self._data_word = word
            with contextlib.suppress(OSError):  # the store is gone, the attempt over
                self.link.publish(DATA_KEY, word)
