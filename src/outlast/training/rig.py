"""Everything a session stands on, put together once: link, ledger, tiers, engine, agreement.

The session above it knows when; this knows how. It also keeps the books: what goes into the ledger
and what the agent can see.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from outlast.attempt import trackers
from outlast.attempt.agreement import Action, Agreement
from outlast.attempt.beat import Beat
from outlast.attempt.line import LINE_VARIABLE
from outlast.attempt.link import (
    DATA_KEY,
    FREE,
    STORE_VARIABLE,
    TIED,
    Link,
    open_link,
)
from outlast.checkpoint.catalog import find_standing, open_job, standing
from outlast.checkpoint.manifest import FULL
from outlast.checkpoint.names import Place, SaveName, parse
from outlast.checkpoint.reader import Checkpoint, open_checkpoint
from outlast.config import Settings
from outlast.data import Feed, open_feed
from outlast.data.trail import Others, Trail
from outlast.errors import ConfigError, Exit, StorageError
from outlast.keeper.client import Remote
from outlast.keeper.memory import MemoryTier
from outlast.ledger import planned
from outlast.ledger.command import settle
from outlast.ledger.file import PATIENCE_S, QueuedLedger
from outlast.ledger.job import JobLock, versions
from outlast.ledger.narrator import Narrator, say
from outlast.notice import Notice
from outlast.notice.foresight import Foresight
from outlast.notice.record import fields_of
from outlast.peer.reign import Reign, reign_over
from outlast.policy.cadence import Change
from outlast.storage import Directory
from outlast.tiers import PEER
from outlast.training import attempts, excepthook, regain, resume
from outlast.training.attempts import own_command
from outlast.training.engine import Engine
from outlast.training.flight import States, Unsaved, Written
from outlast.training.initial import Origin
from outlast.training.judging import Judging
from outlast.training.regain import Regained
from outlast.training.restore import Restore
from outlast.training.timing import Meter, Samples
from outlast.training.turns import Outlook, Turns, info_of

logger = logging.getLogger(__name__)


class Rig:
    """What a session stands on.

    Attributes:
        others_live: whether processes of the attempt before are here whose state is not used.

    Args:
        settings: the job's settings.
        on_decision: told of each agreed action.
        on_written: told (step, error) of each save's end.
        on_deadline: told that less time is left (in seconds) than was said when a drain was agreed.
        may_move: on rank 0, whether a drain is only those machines' that leave; told the asks.

    Raises:
        ConfigError, StorageError: the job's directory cannot be used.
    """

    def __init__(
        self,
        settings: Settings,
        on_decision: Callable[[Action], None],
        on_written: Callable[[int, str], None],
        on_deadline: Callable[[float], None] = lambda _: None,
        may_move: Callable[[list[dict[str, Any]]], bool] = lambda _: False,
    ) -> None:
        self.link: Link = open_link()
        self._settings = settings
        self._on_decision = on_decision
        self._on_written = on_written
        self._on_deadline = on_deadline
        self._may_move = may_move
        self._is_closed = False
        self._under_agent = STORE_VARIABLE in os.environ
        self._lock: JobLock | None = None
        self._reign: Reign | None = None  # where there is no agent, on rank 0
        given = os.environ.get("OUTLAST_DIR")
        if self._under_agent and given and settings.dir != Path(given):
            raise ConfigError(
                f"outlast run keeps this job in {given} and the session asks for {settings.dir}; "
                "leave dir out of outlast.session(), or give the same to outlast run --dir"
            )
        self.job = open_job(settings.dir, settings)
        trackers.export(self.job.id, settings.dir, self.link.rank)
        self._keeps_the_books = self.link.rank == 0 and not self._under_agent
        self._narrator: Narrator | None = None
        self.foresight = Foresight(settings, say)
        self.outlook = Outlook(settings)
        with contextlib.ExitStack() as undo:
            self._open_the_books(undo)
            undo.pop_all()
        self.states = States(settings)
        self.unsaved = Unsaved(say if not self.link.rank else lambda _: None)
        self.samples = Samples(self._ledger, self.link.rank)
        self._memory: MemoryTier | None = None  # that was looked at to resume
        self._notes: collections.deque[dict[str, Any]] = collections.deque()
        self.turns = Turns(
            settings,
            self.engine,
            self.skipped,
            on_change=self._note_cadence,
            known=None if self._past is None else self._past.failures.hazard,
            costs_s=() if self._past is None else self._past.costs_s,
            storms=self._past is not None and self._past.storms,
            beyond=None if self._past is None else self._past.failures.beyond,
            told=None if self._past is None else self._past.tier_intervals_s,
            leads=not self.link.rank,
        )
        self._step = 0
        self.others_live = False
        self.agreement: Agreement | None = None
        self._completed_s = time.monotonic()
        self._data_word = b""

    def _open_the_books(self, undo: contextlib.ExitStack) -> None:
        """Lock, ledger and engine; ``undo`` gives back what another session in here would miss."""
        settings = self._settings
        if self._keeps_the_books:
            self._lock = JobLock(settings.dir)
            undo.callback(self._lock.release)
            if (command := own_command()) is not None:
                settle(settings, command, is_alone=self._lock.is_alone, in_script=True)
        past = attempts.look_back(self.link, self._settings.dir)
        self._past = past
        agreed = attempts.agree_on_attempt(self.link, past, settings.dir, lambda: self._begin(undo))
        attempt = agreed.number
        self.finished_t = agreed.finished_t
        self._promised = set[SaveName]()
        if past is not None and past.promised:
            self._promised = {parse(past.promised_save) or SaveName(past.promised)}
        self.judging = Judging(settings, self.link, past)
        self.timeline = attempt  # a line of steps that goes on in the next one keeps its number
        self.basis: tuple[int, int] | None = None  # step and number of workers gone on from
        # Steps go on while the job's directory does not answer.
        self._ledger = QueuedLedger(
            settings.dir,
            job=self.job.id,
            attempt=attempt,
            rank=self.link.rank,
            patience_s=PATIENCE_S,
        )
        undo.callback(self._ledger.close)
        if self._keeps_the_books:  # what the agent writes where there is one
            name = Path(sys.argv[0]).name
            self._ledger.append("job_started", command=name, versions=versions(), pid=os.getpid())
            planned.enter(self._ledger, settings.dir, say)
            self._ledger.append("attempt_formed", world_size=self.link.world_size, nodes=1)
            # Where there is an agent, it has its own.
            self._narrator = Narrator(settings.dir, also=self.foresight.take)
            self._narrator.start()
            undo.callback(self._narrator.stop)
        self.beat = Beat()
        self.engine = Engine(
            settings,
            self.link,
            job=self.job.id,
            attempt=agreed,
            on_written=self._written,
            on_change=self._changed,
            say=say,
        )

    def _begin(self, undo: contextlib.ExitStack) -> Reign:
        """This process has the job, once ``open`` has returned."""
        is_locked = self._lock is not None and self._lock.is_held
        self._reign = reign_over(self._settings.dir, say, is_locked=is_locked)
        undo.callback(self._reign.close, int(Exit.USAGE))
        return self._reign

    def raise_if_overtaken(self) -> None:
        """At a boundary: another attempt of this job was begun, and this one must end.

        Raises:
            StorageError: says which.
        """
        if self._reign is not None and self._reign.overtaken:
            with excepthook.one_line_errors():
                raise StorageError(self._reign.overtaken)

    # --- resuming, starting, stopping --------------------------------------------------------

    def regain(self, *, lives: bool = False, others: Others | None = None) -> Regained | None:
        """What survivors of the attempt before hold, if that can be gone on from; first of all.

        Args:
            lives: whether this process is one of them.
            others: what it knows of other workers' records of samples.
        """
        if not self._under_agent:
            return None
        key = f"session/{self.link.rank}"
        self.link.publish(key, str(os.getpid()).encode())  # the agent sees: it drains itself
        found = regain.find(
            self.link,
            {save.step for save in self._promised},
            takes_part=LINE_VARIABLE in os.environ,
            lives=lives,
            others=others,
            rollbacks=self.judging.rollbacks,
        )
        if isinstance(found, str):
            self.others_live = bool(found)
            if found and self.link.rank == 0:
                say(f"the state of the workers that survived is not used: {found}")
            return None
        self.timeline, self.basis = found.timeline, (found.step, found.world_size)
        self.engine.line.start()
        self.engine.line.wait_until_ready()
        self.engine.committed_step = found.committed
        if self.link.rank == 0:
            self._ledger.append("resumed", **found.fields(self.link.world_size))
        return found

    def resume(self, check: Callable[[Checkpoint], Restore]) -> resume.Outcome:
        """Find the newest valid checkpoint, with the other ranks, and put it into the ledger."""
        self.engine.line.start()
        if any(tier.kind == "object" for tier in self._settings.tiers):
            self.engine.line.wait_until_ready(needed=True)  # it alone may ask an object store
        places = self._places()
        outcome = resume.find(
            places,
            self.link,
            self._promised,
            check,
            on_damaged=self._damaged,
            on_repaired=self._repaired,
        )
        self.engine.line.wait_until_ready()
        self.engine.line.reject(tuple(one.save for one in outcome.skipped if one.save))
        self.engine.committed_step = outcome.committed
        if outcome.committed < outcome.step:
            self.turns.repeat("no storage has what was resumed from")
        if self.link.rank == 0:
            source = outcome.loaded.manifest.world_size if outcome.loaded else None
            for skipped in outcome.skipped:
                self._ledger.append("verify_failed", step=skipped.step, reason=skipped.reason)
            self._ledger.append(
                "resumed",
                step=outcome.step,
                source=outcome.origin if outcome.loaded else "",
                places=[place.storage.describe() for place in places],
                read_s=round(outcome.read_s, 6),
                skipped=[msgspec.structs.asdict(skipped) for skipped in outcome.skipped],
                from_world_size=source,
            )
        return outcome

    def started_from(self, origins: Iterable[Origin]) -> None:
        """The job's first state is not the script's."""
        for origin in origins if self.link.rank == 0 else ():
            self._ledger.append("initialised", **msgspec.structs.asdict(origin))

    def reopen(self, save: SaveName) -> Checkpoint:
        """Open the checkpoint that was resumed from once more, before the next save begins.

        Raises:
            CheckpointInvalid, OSError: it is in no place any more.
        """
        places, self._memory = self._places(), None
        return open_checkpoint(places, save, rank=self.link.rank)

    def _places(self) -> list[Place]:
        """All tiers, as this worker may read them."""
        memory, client = self.engine.line.memory(), self.engine.line.client
        # A keeper that has just been started has nothing, and is no place to look for anything.
        places = []
        if memory is not None and memory.children():
            places.append(Place("memory", memory, in_memory=True))
        if memory is not None and memory.num_peers and client is not None:
            peers = Remote(client, PEER, "other machines' memory")
            places.append(Place(PEER, peers, in_memory=True))
        self._memory = memory
        return [*standing(places, self.job.id, self.judging.rollbacks), *self._tiers()]

    def _tiers(self) -> list[Place]:
        """What outlives the machines' memory."""
        places, client = [], self.engine.line.client
        for tier in self._settings.tiers:
            if tier.kind == "directory":
                places.append(Place(tier.name, Directory(Path(tier.url))))
            elif tier.kind == "object" and client is not None:
                places.append(Place(tier.name, Remote(client, tier.name, tier.url)))
        return standing(places, self.job.id, self.judging.rollbacks)

    def _damaged(self, step: int, file: str, place: Place, reason: str) -> None:
        tier = place.name
        self._ledger.append("verify_failed", step=step, file=file, tier=tier, reason=reason)

    def _repaired(self, step: int, file: str, place: Place) -> None:
        self._ledger.append("repaired", step=step, file=file, tier=place.name)

    def start(self, step: int, *, in_step: bool = False) -> None:
        """Begin to listen to the other ranks.

        Args:
            step: completed steps.
            in_step: the next one is in progress: this rank comes to no boundary before its end.
        """
        self.agreement = Agreement(
            self.link,
            step,
            self._on_decision,
            in_step=in_step,
            may_save=lambda: self.engine.idle,
            may_drain=self.plan_drain,
            may_move=self._may_move,
            on_hurry=self.turns.hurry,
            on_deadline=self._on_deadline,
            on_other=self.judging.heard,
        )
        judge = self.engine.line.judge
        tiers = self._tiers()
        self.judging.start(
            *(step, self._ledger.attempt, self.agreement, self._ledger, judge),
            find_there=lambda: find_standing(tiers),
        )
        self.agreement.start()
        self._completed_s = time.monotonic()
        self._step = step
        self.samples.start(step)
        self.beat.beat(step)
        memory, self._memory = self._memory, None
        if memory is not None:  # everything is read; behind the first step there is time for it
            threading.Thread(target=memory.look_away, name="outlast-unmap", daemon=True).start()

    def stop(
        self, timeout_s: float, exit_code: int, *, clean: bool, copying_s: float | None = None
    ) -> None:
        """End what was started; a save in flight has ``timeout_s`` to end.

        Unless it is ``clean`` the keeper stays for the next attempt, with what it has in memory.
        Slower tiers have ``copying_s`` to get what is due there.
        """
        try:
            self.engine.stop(timeout_s, clean=clean, copying_s=copying_s)
            self._changed()
            self.samples.write(force=True)
            self.judging.stop()
            if self.agreement is not None:
                self.agreement.stop()
        finally:  # also when somebody does not want to wait for slower tiers
            self._close_the_books(exit_code)
            self.beat.close()

    def abandon(self, exit_code: int, copying_s: float | None) -> None:
        """Leave without the training thread, which does not come to an end."""
        try:
            self.engine.line.close(clean=True, copying_s=copying_s)
        finally:
            self._close_the_books(exit_code)

    def _close_the_books(self, exit_code: int) -> None:
        if self._is_closed:  # by the thread that leaves for one that does not end
            return
        self._is_closed = True
        reign = self._reign
        if self._keeps_the_books and not (reign is not None and reign.overtaken):
            self._ledger.append("job_finished", exit_code=exit_code, reason="")
        self._ledger.close()
        if reign is not None:
            reign.close(exit_code)
        if self._narrator is not None:
            self._narrator.stop()
        if self._lock is not None:
            self._lock.release()

    # --- at each step ------------------------------------------------------------------------

    def completed(self, step: int, *of: int) -> None:
        """A step is done, with this batch of this loop: beat, and about once a second sample."""
        self.judging.completed(step, *of)
        self.beat.beat(step)
        self._step = step
        self._completed_s = time.monotonic()
        self.samples.completed(step)

    def log(self, scalars: dict[str, Any]) -> None:
        """Numbers of the step in progress."""
        self.judging.log(scalars)
        self.samples.log(scalars)

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
        return int(Exit.ROLLED_BACK if self._under_agent else Exit.DRAINED)

    def meter(self) -> Meter:
        """What measures this worker's steps."""
        alone, engine = self.link.world_size == 1, self.engine
        return Meter(self.beat, alone=alone, is_saving=lambda: engine.is_saving)

    def prepare(self, step: int, objects: Mapping[str, Any], state: dict[str, Any]) -> None:
        """After the first step of an attempt: have everything ready for the first save."""
        if self.link.rank == 0:
            trackers.note(self._settings.dir)
        self.engine.prepare(self.states.of(step, objects, state, FULL))

    def save_is_due(self, step: int) -> dict[str, Any] | None:
        """On rank 0: what to ask for at the boundary after the next step, if anything."""
        return None if self.link.rank else self.turns.due(step)

    def capture(
        self,
        step: int,
        objects: Mapping[str, Any],
        state: dict[str, Any],
        info: Mapping[str, Any],
        start_s: float,
    ) -> None:
        """Have the engine take a snapshot of ``state``; the loop is blocked since ``start_s``.

        Raises:
            OSError, OutlastError: it could not be begun.
        """
        self.turns.answered()
        tiers = info.get("tiers")
        asked_s = time.monotonic()
        found = self.states.of(step, objects, state, str(info.get("content") or FULL))
        flat_s = time.monotonic()
        size = self.engine.capture(found, None if tiers is None else tuple(tiers), start_s)
        now = time.monotonic()
        self.samples.stalled(now - start_s)
        cost_s = self.turns.taken(step, now, now - start_s, tiers)
        if self.link.rank == 0:
            self._notes.append(
                {
                    "step": step,
                    "blocked_s": round(now - start_s, 6),
                    **({} if cost_s is None else {"cost_s": round(cost_s, 6)}),
                    "tiers": tiers,
                    "bytes": size,
                    "reason": str(info.get("reason", "")),
                    "kind": found.kind,
                    "timings": {
                        "state_s": round(asked_s - start_s, 6),
                        "flatten_s": round(flat_s - asked_s, 6),
                        "begin_s": round(now - flat_s, 6),
                    },
                }
            )

    def open_feed(self, loader: Iterable[Any], trail: Trail, step: int) -> Feed:
        """The feed of ``loader`` for this rank; the agent hears whether it is tied to the ranks.

        Raises:
            ConfigError: the loader cannot be used.
        """
        me = {"rank": self.link.rank, "world_size": self.link.world_size}
        feed = open_feed(loader, **me, trail=trail, step=step)
        self.tell_of(feed)
        return feed

    def tell_of(self, feed: Feed) -> None:
        """The agent hears whether the loop's loader is tied to the ranks."""
        word = TIED if feed.is_tied else FREE
        if self._under_agent and self.link.rank == 0 and word != self._data_word:
            self._data_word = word
            with contextlib.suppress(OSError):  # the store is gone, the attempt over
                self.link.publish(DATA_KEY, word)

    # --- notices -----------------------------------------------------------------------------

    def plan_drain(self, info: dict[str, Any]) -> bool:
        """On rank 0: whether there is time for a drain, and how, which is added to ``info``.

        What goes wrong here must not cost the drain.
        """
        try:
            return self._has_time(info)
        except Exception:
            logger.exception("a drain could not be planned; it is tried")
            return True

    def _has_time(self, info: dict[str, Any]) -> bool:
        agreement = self.agreement
        in_step = agreement is not None and agreement.in_step
        found = self.outlook.plan(
            info.get("left_s"),
            in_step_s=time.monotonic() - self._completed_s if in_step else None,
            saving=not self.engine.idle,
        )
        info.update(info_of(found))
        return found.choice != "keep" or self._step == self.engine.committed_step

    # --- the books ---------------------------------------------------------------------------

    def skipped(self, step: int, reason: str) -> None:
        """A save that was due was not taken."""
        self.turns.answered()
        self._ledger.append("save_skipped", durable=False, step=step, reason=reason)

    @property
    def under_agent(self) -> bool:
        """Whether this worker is one of an agent of ours, which hears what comes for the job."""
        return self._under_agent

    @property
    def listens(self) -> bool:
        """Whether this worker is to hear the platform: there is no agent that does."""
        return not self._under_agent and int(os.environ.get("LOCAL_RANK", "0")) == 0

    def notice(self, heard: Notice) -> None:
        """This process itself heard that it must go."""
        self._ledger.append("notice", **fields_of(heard, self._settings))

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
            self._ledger.append("drain_agreed", durable=False, step=step, **told)

    def drained(self, step: int, committed: bool) -> None:
        """The drain's commit has ended, one way or the other."""
        if self.link.rank == 0:
            self._ledger.append("drained", step=step, committed=committed)

    def _written(self, written: Written) -> None:
        if written.void:
            self.turns.repeat("the snapshot before was void")
            if self.link.rank == 0:
                self.skipped(written.step, f"{written.error}; it is taken again, all at once")
        else:
            if self.link.rank == 0 and not written.told:
                self.skipped(written.step, written.error)
            self.unsaved.ended(written)
            self.turns.written(
                written.step, written.took_s, alone=not written.tier, error=written.error
            )
            if written.tier or written.error:  # nobody has asked for one in memory alone
                self._on_written(written.step, written.error)
            self.judging.committed(self.engine.committed_step)
        self._changed()

    def _note_cadence(self, change: Change) -> None:
        self._ledger.append("cadence", durable=False, **msgspec.structs.asdict(change))

    def _changed(self) -> None:
        """In another thread: what the training thread left to be written down, and a poke."""
        while self._notes:
            with contextlib.suppress(IndexError):
                self._ledger.append("snapshot", durable=False, **self._notes.popleft())
        self._poke()

    def _poke(self) -> None:
        if self.agreement is not None:
            with contextlib.suppress(OSError, RuntimeError):  # the store is gone, the attempt over
                self.agreement.poke()
