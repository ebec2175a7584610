"""All of a session that belongs to one attempt, and how its loops and the session end.

A session that lives through a loss has another one made.

A loop's end is saved at once, the session's end again unless it is proven to be the same. What
follows a loop may take long (an evaluation), so its end is saved ahead of that; and it may change
the state (averages are put in place, statistics computed): the session's end saves it then,
whatever had saved the last step. Nothing but the content tells: version counters do not see writes
through ``.data`` or NumPy. So the state is compared, byte by byte, with the newest snapshot, which
still lies in this machine's memory; without one, it is saved again.

All ranks have to end at the same step. Each tells rank 0 where it is, one that fails that it is
gone, and nobody waits for longer than a save may take. What cannot be saved is said, and is a
failure: a job whose end is in no checkpoint is not finished. Where a rank of a job that had
finished before could not go on for want of a step, the end that is committed stands for all, and
nobody waits: the others may wait for that rank elsewhere.

Rejected: hashes of the state at each save (they would be computed while training goes on); the
files' own digests (to compare a change of one tensor, all of its 16 MiB block has to be there).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from outlast.attempt.beat import Beat
from outlast.attempt.link import DECISION_TIMEOUT_S, Action, Agreement, Link
from outlast.checkpoint.catalog import find_standing
from outlast.config import Settings
from outlast.errors import ConfigError, StorageError
from outlast.ledger.narrator import say
from outlast.script.objects import Objects
from outlast.training.afresh import Afresh
from outlast.training.anomalies import LossMonitor
from outlast.training.books import AttemptBooks
from outlast.training.each_step import EachStep
from outlast.training.late import LateRanks
from outlast.training.leaving import Hearing, LoopPosition, WayOut
from outlast.training.position import Streams
from outlast.training.resume import Sources
from outlast.training.saving import Saves, Saving, Snapshots
from outlast.training.timing import Meter

logger = logging.getLogger(__name__)

END_TIMEOUT_S: Final = 30.0 + DECISION_TIMEOUT_S  # for rank 0 to come to a loop's end too
HEARD_S: Final = 30.0
SLICE_S: Final = 5.0  # a link serves one waiting thread at a time
TELL_S: Final = 10.0  # until it is said for whom the session's end waits
_GONE: Final = b"gone "
_EXCUSED: Final = b"excused"
_DIFFER: Final = "differ"


class _LoopEndWord(msgspec.Struct, frozen=True):
    """What rank 0 has done, and does, at a loop's end."""

    agreed: dict[str, Any] | None  # with what was said with it, a save that was agreed before
    saves_end: bool
    back: dict[str, Any] | None = None  # all go back to before a sign of trouble


class LoopEnding:
    """The ends of loops, and of the session: what is saved there, and when.

    Args:
        snapshots: the worker's part in the attempt's saves.
        link: the other ranks.
        judging: of the loss.
        saving: the session's.
    """

    def __init__(
        self, snapshots: Snapshots, link: Link, judging: LossMonitor, saving: Saving
    ) -> None:
        self._engine, self._turns = snapshots.engine, snapshots.turns
        self._link = link
        self._judging = judging
        self._saving = saving

    def act(self, loop: int, step: int, agreement: Agreement) -> dict[str, Any] | None:
        """A loop has come to its end: do what is due, and have the end saved if that pays.

        Returns what was decided where the loop's last losses are wrong, on all ranks.

        What was agreed for this step may come to a rank when its loop is over. So rank 0 says what
        it does, and all do the same: one that saved alone would wait for the others' parts. It says
        so first: to give their state objects may need all ranks.
        """
        due: list[Action] = []
        agreed = None
        self._judging.hasten()
        if self._link.rank == 0:
            due = agreement.last_boundary(step)[:1]
            agreed = agreement.saved(step)
        word = self._rank_0s_word(loop, step, agreed)
        for action in due:
            self._saving.take(step, action.info)
        if self._link.rank and word.agreed is not None and agreement.follow(step):
            self._saving.take(step, word.agreed)
        if word.saves_end and word.back is None:
            self._save_end(step)
        return word.back

    def may_save(self, step: int) -> bool:
        """On rank 0, whether the state at the end of a loop is saved now.

        Where a save is in flight it is not: nobody is to wait for it here.
        """
        return self._engine.committed_step != step and self._turns.pays()

    def _save_end(self, step: int) -> None:
        since_s = time.monotonic()
        self._engine.take_at_once()  # whatever follows may change the state in any way
        self._saving.take(step, {"reason": "the loop's end"})
        self._turns.end_taken(time.monotonic() - since_s)

    def _rank_0s_word(self, loop: int, step: int, agreed: dict[str, Any] | None) -> _LoopEndWord:
        link, key = self._link, f"end/{loop}/{step}"
        try:
            if link.rank == 0:
                saves_end = agreed is None and self.may_save(step)
                word = _LoopEndWord(agreed, saves_end, self._judging.at_end(step))
                link.publish(key, msgspec.json.encode(word))
                return word
            return msgspec.json.decode(link.fetch(key, END_TIMEOUT_S), type=_LoopEndWord)
        except (OSError, RuntimeError) as error:  # the store is gone, or rank 0 is elsewhere
            logger.warning("the loop's end is not saved before the session's: %s", error)
            return _LoopEndWord(None, saves_end=False)

    def is_none(self, error: BaseException | None) -> None:
        """This rank's session does not come to an end that is saved: nobody is to wait for it."""
        link = self._link
        if link.world_size > 1:
            with contextlib.suppress(OSError, RuntimeError):  # the store is gone, the attempt over
                link.publish(f"end/at/{link.rank}", _GONE + type(error).__name__.encode())

    def is_excused(self) -> None:
        """This rank was, in a job that had finished: the end that is committed stands."""
        link = self._link
        if link.world_size > 1:
            with contextlib.suppress(OSError, RuntimeError):  # the store is gone, with rank 0
                link.publish(f"end/at/{link.rank}" if link.rank else "end/at", _EXCUSED)

    def is_due(self, step: int, timeout_s: float, may_differ: Callable[[], bool]) -> bool:
        """At the session's end: whether some rank's state is not what is committed of ``step``.

        Args:
            step: completed steps.
            timeout_s: for the other ranks to come here, and for a save in flight.
            may_differ: whether this session has completed a step, or changed its state without.

        Raises:
            ConfigError: the ranks have ended at different steps.
            StorageError: a rank does not come here.
        """
        if self._link.world_size > 1 and not self._meet(step, timeout_s):
            return False
        engine = self._engine
        engine.wait(timeout_s)
        due = engine.committed_step != step
        if not due and may_differ():
            due = not engine.holds(self._saving.newest(step))
        return self._anybody("end/due", due, timeout_s)

    def _meet(self, step: int, timeout_s: float) -> bool:
        """See that all ranks have come to the session's end, at the same step.

        Returns whether there is anything to save: not where a rank was excused.
        """
        link = self._link
        try:
            if link.rank:
                link.publish(f"end/at/{link.rank}", b"%d" % step)
                word = link.fetch("end/at", timeout_s + HEARD_S)
                link.publish(f"end/at/{link.rank}/heard", b"")
            else:
                said = self._who_differs(step, timeout_s)
                link.publish("end/at", word := said.encode())
                if said.startswith(_DIFFER):  # a rank that does not hear it would save alone
                    with contextlib.suppress(OSError, RuntimeError):
                        self._wait_until_heard("end/at")
        except (OSError, RuntimeError) as error:  # the store is gone, and with it the attempt
            logger.warning("the ranks do not meet at the session's end: %s", error)
            return True
        if not word or word == _EXCUSED:
            return not word
        committed = self._engine.committed_step
        stands = f"step {committed}, the newest commit, stands" if committed else "none stands"
        kind, _, why = word.decode().partition(" ")
        if kind == _DIFFER:
            raise ConfigError(
                f"the ranks left their loops at different steps ({why}), and a checkpoint is of "
                f"one step: the end is in none, and {stands}. Have all ranks decide alike, by "
                "all_reduce or broadcast"
            )
        raise StorageError(f"the end, step {step}, is not committed: {why}; {stands}")

    def _who_differs(self, step: int, timeout_s: float) -> str:
        """On rank 0: "" where all ranks are at ``step``, or what keeps them from being saved."""
        until_s = time.monotonic() + timeout_s
        tell_s = time.monotonic() + TELL_S
        for rank in range(1, self._link.world_size):
            while True:
                try:
                    word = self._link.fetch(f"end/at/{rank}", SLICE_S)
                    break
                except TimeoutError:
                    now = time.monotonic()
                    if now > until_s:
                        return f"late rank {rank} did not come to its session's end in time"
                    if now > tell_s:
                        tell_s = until_s
                        say(f"the session's end, step {step}, waits for rank {rank}")
            if word == _EXCUSED:
                return word.decode()
            if word.startswith(_GONE):
                return f"gone rank {rank} was ended by {word.removeprefix(_GONE).decode()}"
            if int(word) != step:
                return f"{_DIFFER} rank 0 at {step}, rank {rank} at {int(word)}"
        return ""

    def _anybody(self, what: str, says: bool, timeout_s: float) -> bool:
        """Whether any rank says so: the same answer for all, where all ask."""
        link = self._link
        try:
            if link.rank:
                link.publish(f"{what}/{link.rank}", b"1" if says else b"0")
                word = link.fetch(what, timeout_s)
                link.publish(f"{what}/{link.rank}/heard", b"")
                return word == b"1"
            others = [f"{what}/{rank}" for rank in range(1, link.world_size)]
            says = any([says, *[link.fetch(key, timeout_s) == b"1" for key in others]])
            link.publish(what, b"1" if says else b"0")
            self._wait_until_heard(what)
        except (OSError, RuntimeError) as error:  # the store is gone, and with it the attempt
            logger.warning("the ranks do not agree (%s): %s", what, error)
        return says

    def _wait_until_heard(self, what: str) -> None:
        """On rank 0: where there is no agent the store is in this process, and ends with it."""
        until_s = time.monotonic() + HEARD_S
        for rank in range(1, self._link.world_size):
            left_s = max(until_s - time.monotonic(), 0.01)
            self._link.fetch(f"{what}/{rank}/heard", left_s)


class Footing:
    """All of a session that belongs to one attempt.

    Args:
        settings: the job's.
        objects: the session's.
        hearing: of what happens to the machine.
        saves: those that were asked for.
        saving: what is saved.
        where: says where the training thread is.
        may_move: on rank 0, whether a drain is only those machines' that leave; told the asks.

    Attributes:
        books: the attempt's, and what goes into the ledger.
        link: the other ranks.
        judging: of the loss.
        snapshots, engine: the worker's part in the attempt's saves.
        each_step: keeps each step, where that is set.
        sources: where the state comes from.
        leaving, ending: how it is left.
        streams, afresh: random numbers, and objects, as loops begin.
        meter: what measures this worker's steps.
        late: what is done about workers that are late.

    Raises:
        ConfigError, StorageError: the job's directory cannot be used.
    """

    def __init__(
        self,
        settings: Settings,
        objects: Objects,
        hearing: Hearing,
        saves: Saves,
        saving: Saving,
        *,
        where: Callable[[], LoopPosition],
        may_move: Callable[[list[dict[str, Any]]], bool],
    ) -> None:
        self._saves = saves
        self._may_move = may_move
        self.books = AttemptBooks(settings)
        self.link = self.books.link
        with self.books.or_given_back():
            self.judging = LossMonitor(settings, self.link, self.books.past)
            self.books.open()
            self._beat = Beat()
            self.snapshots = Snapshots(settings, self.books, self.judging, saves)
        self.engine = self.snapshots.engine
        self.each_step = EachStep(settings, self.books, self.snapshots, saving)
        self.sources = Sources(self.books, self.engine, self.snapshots.turns, self.judging)
        self.leaving = WayOut(self.books, self.snapshots, hearing.signals, saves, where)
        self.ending = LoopEnding(self.snapshots, self.link, self.judging, saving)
        self.streams = Streams(self.link)
        self.afresh = Afresh(objects, self.link)
        self.late = LateRanks(settings, self.link, self.books.ledger, lambda: where().step)
        alone, engine = self.link.world_size == 1, self.engine
        self.meter = Meter(
            *(self._beat, self.books.samples), alone=alone, is_saving=lambda: engine.is_saving
        )

    @property
    def agreement(self) -> Agreement | None:
        """With the other ranks; None until the attempt has begun here."""
        return self.snapshots.agreement

    def start(self, step: int, *, in_step: bool = False) -> None:
        """Begin to listen to the other ranks.

        Args:
            step: completed steps.
            in_step: the next one is in progress: this rank comes to no boundary before its end.
        """
        agreement = self.snapshots.agreement = Agreement(
            self.link,
            step,
            self.leaving.agreed,
            in_step=in_step,
            may_save=lambda: self.engine.idle,
            may_drain=self.leaving.plan,
            may_move=self._may_move,
            on_hurry=self.snapshots.turns.hurry,
            on_deadline=self.leaving.hasten,
            on_other=self.judging.heard,
        )
        judge = self.engine.line.judge
        tiers = self.sources.tiers()
        self.judging.start(
            *(step, self.books.attempt.number, agreement, self.books.ledger, judge),
            find_there=lambda: find_standing(tiers),
        )
        agreement.start()
        self.leaving.completed(step)
        self.books.samples.start(step)
        self._beat.beat(step)
        self.sources.look_away()

    def completed(self, step: int, *of: int) -> None:
        """A step is done, with this batch of this loop: beat, and about once a second sample."""
        self.judging.completed(step, *of)
        self._beat.beat(step)
        self.leaving.completed(step)
        self.books.samples.completed(step)

    def log(self, scalars: dict[str, Any]) -> None:
        """Numbers of the step in progress."""
        self.judging.log(scalars)
        self.books.samples.log(scalars)

    def before_optimizer(self) -> None:
        """Weights are about to change: what a snapshot has not copied yet comes first."""
        start_s = time.monotonic()
        if self.engine.is_copying:
            self.meter.saving()
        self.engine.before_optimizer()
        stalled_s = time.monotonic() - start_s
        self.books.samples.stalled(stalled_s)
        self.meter.updating(stalled_s)

    def let_go(self, step: int) -> None:
        """In another thread: the attempt is over, and nothing is to be waited for any more."""
        if self.agreement is not None:  # else the attempt has not begun here
            self.agreement.release()
        self.engine.give_up()
        self._saves.give_up(step)

    def stop(
        self, timeout_s: float, exit_code: int, *, clean: bool, copying_s: float | None = None
    ) -> None:
        """End what was started; a save in flight has ``timeout_s`` to end.

        Unless it is ``clean`` the keeper stays for the next attempt, with what it has in memory.
        Slower tiers have ``copying_s`` to get what is due there.
        """
        try:
            with self.books.samples.all_stalled():
                self.engine.stop(timeout_s, clean=clean, copying_s=copying_s)
            self.snapshots.changed()
            if clean and not exit_code:
                self.books.end()
            else:
                self.books.samples.write(force=True)
            self.judging.stop()
            if self.agreement is not None:
                self.agreement.stop()
        finally:  # also when somebody does not want to wait for slower tiers
            self.books.close(exit_code)
            self._beat.close()

    def leave(self, step: int) -> None:
        """The attempt is over, and nothing of it is waited for."""
        self.meter.close()
        self.stop(0.0, 0, clean=False)
        self.link.let_go()
        self.leaving.left()
        self._saves.give_up(step)
