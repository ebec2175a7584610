"""How a session leaves when its machine must go: heard, planned, drained, or given up in time.

Rank 0 plans a drain by what steps and saves have taken so far (``Outlook``). At the agreed boundary
the training thread drains. ``WayOut`` looks on from a thread of its own, for the cases in which
that boundary is not reached, or the way out takes too long:

- the loop is over, or has not begun (an evaluation after it, a warm-up before it), and the step is
  committed: everybody leaves from wherever they are. SystemExit is raised in the main thread, and
  what does not unwind (a rank in a collective that the others have left) is ended after a while;
- the step does not end in time (an evaluation within it, a rank that is stuck), or there was never
  time for a save: the newest commit stands, and how much that costs is said;
- the training thread is on its way out, and waits for something until the time is over.

Leaving is safe at any moment: what is committed is committed, and the keeper goes on copying. Only
one of the two threads takes the way out (``claim``); nothing that is said or written holds it up.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from outlast.attempt.link import Action
from outlast.config import GRACE_MAX_S, Settings
from outlast.errors import Exit, Leave
from outlast.ledger.events import Event
from outlast.ledger.file import Follower
from outlast.ledger.measured import Measured
from outlast.ledger.narrator import say
from outlast.notice import UNKNOWN_GRACE_S, Notice
from outlast.notice.desk import PlatformDesk, answer_to, drain_tiers, kind_fields, request_of
from outlast.notice.platform import Chosen
from outlast.notice.signals import SignalNotice, signal_notice
from outlast.policy.drain import LEAVING_S, DrainPlan, leaving_s, plan
from outlast.script import excepthook
from outlast.training.books import AttemptBooks
from outlast.training.saving import COMMIT_TIMEOUT_S, NO_COMMIT, Saves, Saving, Snapshots
from outlast.training.turns import TAIL_BYTES

logger = logging.getLogger(__name__)

READ_S: Final = 0.5  # for the ledger, whose disk may hang
UNWIND_S: Final = 3.0  # for the training thread to leave by itself
EXIT_S: Final = 0.5  # for the exit itself
BOOKS_S: Final = 1.0  # for the ledger, whose disk may be what is slow
LOOK_S: Final = 0.05
OTHERS_S: Final = 5.0  # for what is in flight when an exception or a drain ends the session


class Outlook:
    """What rank 0 expects of the next seconds: how long the step and a save still take.

    It reads the ledger when it is asked; nothing is read on the step's path.

    A disk that hangs delays an answer by ``READ_S`` at most: it is then given from what was read
    before.

    Args:
        settings: the job's.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._follower = Follower(settings.dir, tail_bytes=TAIL_BYTES)
        self._measured = Measured()
        self._new: queue.SimpleQueue[list[Event]] = queue.SimpleQueue()
        self._reader: threading.Thread | None = None

    def plan(self, left_s: float | None, *, in_step_s: float | None, saving: bool) -> DrainPlan:
        """What to do about a notice.

        Args:
            left_s: seconds until the machine goes; None when nobody said.
            in_step_s: how long the step in progress has taken so far; None between steps.
            saving: whether a save is in flight, behind which the last one must queue.
        """
        self._look()
        found = drain_tiers(self._settings.tiers, self._measured)
        slow_s = fast_s = 0.0
        if in_step_s is not None:
            step = self._measured.step
            usual_s = step.slow_s if step else 0.0
            # A step that is longer than they usually are (an evaluation in it, say) may go on for
            # as long again, or be over in this moment.
            slow_s = usual_s - in_step_s if in_step_s < usual_s else in_step_s
            fast_s = max((step.fast_s if step else 0.0) - in_step_s, 0.0)
        if saving:
            slow_s = max([slow_s, *(one.slow_s for one in found[:1] if one.slow_s)])
        return plan(left_s, found, step_slow_s=slow_s, step_fast_s=fast_s)

    def seconds_of(self, steps: int) -> float | None:
        """How long so many steps take, when it goes well; None before the first."""
        self._look()
        step = self._measured.step
        return None if step is None else steps * step.fast_s

    def _look(self) -> None:
        if self._reader is None or not self._reader.is_alive():
            self._reader = threading.Thread(target=self._read, name="outlast-outlook", daemon=True)
            self._reader.start()
        self._reader.join(READ_S)
        with contextlib.suppress(queue.Empty):
            while True:
                for event in self._new.get_nowait():
                    self._measured.take(event)

    def _read(self) -> None:
        try:
            self._new.put(self._follower.poll())
        except OSError as error:
            logger.warning("the ledger cannot be read: %s", error)


class LoopPosition(NamedTuple):
    """Where the training thread is.

    Attributes:
        step: completed steps.
        in_loop: whether it is inside ``steps()``.
        is_ending: whether it is draining, or leaving the session.
    """

    step: int
    in_loop: bool
    is_ending: bool


class WayOut:
    """One rank's way out when its machine must go.

    Attributes:
        is_known: whether the ranks will leave; what their leaving then breaks is no failure.
        books: the attempt's.
        snapshots: the worker's part in its saves.

    Args:
        books: as above.
        snapshots: as above.
        signals: through which the main thread is made to leave.
        saves: those that were asked for.
        where: says where the training thread is; asked from another thread.
    """

    def __init__(
        self,
        books: AttemptBooks,
        snapshots: Snapshots,
        signals: SignalNotice,
        saves: Saves,
        where: Callable[[], LoopPosition],
    ) -> None:
        self.is_known = False
        self.books = books
        self.snapshots = snapshots
        self._engine = snapshots.engine
        self._outlook = Outlook(books.settings)
        self._step = 0
        self._completed_s = time.monotonic()
        self._signals = signals
        self._saves = saves
        self._where = where
        self._end_s: float | None = None  # monotonic time at which the machine goes
        self._out_s = LEAVING_S  # of the time until then, for the way out
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._is_claimed = False
        self._gone = threading.Event()

    def completed(self, step: int) -> None:
        """A step is done, or the first one begins."""
        self._step = step
        self._completed_s = time.monotonic()

    def plan(self, info: dict[str, Any]) -> bool:
        """On rank 0: whether there is time for a drain, and how, which is added to ``info``.

        What goes wrong here must not cost the drain.
        """
        try:
            return self._has_time(info)
        except Exception:
            logger.exception("a drain could not be planned; it is tried")
            return True

    def _has_time(self, info: dict[str, Any]) -> bool:
        agreement = self.snapshots.agreement
        in_step = agreement is not None and agreement.in_step
        found = self._outlook.plan(
            info.get("left_s"),
            in_step_s=time.monotonic() - self._completed_s if in_step else None,
            saving=not self._engine.idle,
        )
        info.update(  # the ranks, and the ledger, are told
            choice=found.choice,
            tiers=found.tiers,
            needs_s=None if found.needs_s is None else round(found.needs_s, 3),
            why=found.words,
        )
        return found.choice != "keep" or self._step == self._engine.committed_step

    def drain(self, action: Action, step: int, saving: Saving) -> BaseException:
        """Commit this step; returns what is raised then: the other ranks do the same, and leave."""
        if not self.claim():
            return Leave(int(Exit.DRAINED))  # it was just given up
        self.books.drain_agreed(step, action.info)
        self.snapshots.unsaved.is_ending = True
        left_s = self.seconds_for_saving(COMMIT_TIMEOUT_S)
        written = None
        try:
            if action.info.get("choice") != "keep":
                tiers = action.info.get("tiers")
                written = saving.commit(step, "drain", left_s, tiers=tiers)
        finally:  # also where another rank is gone
            is_committed = self._engine.committed_step == step
            self.books.drained(step, is_committed)
        if action.info.get("interrupt"):
            return self._interrupted(step, is_committed)
        self._signals.deafen()
        if not is_committed:
            why = written.error if written and written.error else "there was no time left"
            self.tell_loss(step, why)
            if written is not None and written.error:
                return Leave(int(Exit.STORAGE))
        return Leave(int(Exit.DRAINED))

    def broken(self, step: int) -> None:
        """An exception ends the session behind ``step`` while the job leaves.

        Mostly another rank has left a moment before this one. What is in flight has its time, and
        the drain's end is written down, if nobody else has done so.
        """
        if self.claim():
            self._engine.wait_for_writing(self.seconds_for_saving(OTHERS_S))
            self.books.drained(step, 0 < step == self._engine.committed_step)

    def _interrupted(self, step: int, is_committed: bool) -> KeyboardInterrupt:
        if is_committed and self.books.link.rank == 0:
            say(f"stopped after step {step}, which is committed; the same command goes on")
        elif not is_committed:
            self.tell_loss(step, "the save failed")
        return excepthook.quietly(KeyboardInterrupt())

    @property
    def is_patient(self) -> bool:
        """Whether Ctrl-C waits for the step's end: in the loop, where no agent sees to it."""
        return self._where().in_loop and not self.books.under_agent

    def agreed(self, action: Action) -> None:
        """The ranks have agreed on an action; in the answering thread."""
        if action.kind in ("drain", "leave"):
            self.decided(action)
        if action.kind in ("leave", "rollback", "move"):
            return
        self._saves.decided(action.step)
        if action.step and action.step == self._engine.committed_step:
            self._saves.written(action.step, "")  # asked for when it was committed already

    def decided(self, action: Action) -> None:
        """A drain is agreed, or there is no time for one; called once, in the answering thread."""
        self.hasten(action.info.get("left_s"))
        self.is_known = True
        look = self._give_up if action.kind == "leave" else self._look_on
        self._thread = threading.Thread(
            target=look, args=(action,), name="outlast-leaving", daemon=True
        )
        self._thread.start()

    def hasten(self, left_s: float | None) -> None:
        """The machine goes in ``left_s`` seconds, if that is sooner than what was known."""
        if left_s is not None:
            end_s = time.monotonic() + left_s
            if self._end_s is None or end_s < self._end_s:
                self._end_s, self._out_s = end_s, leaving_s(left_s)

    def claim(self) -> bool:
        """Take the way out; False where the other thread has taken it."""
        with self._lock:
            first, self._is_claimed = not self._is_claimed, True
            return first

    def left(self) -> None:
        """The session is over: nothing is to be looked after any more."""
        self._gone.set()

    def seconds_for_saving(self, otherwise_s: float) -> float:
        """How long the last save may take."""
        if self._end_s is None:
            return otherwise_s
        return min(max(self._end_s - self._out_s - time.monotonic(), 0.0), otherwise_s)

    def seconds_for_copying(self, *, others_wait: bool = False) -> float | None:
        """How long slower tiers may take; None for as long as they need.

        Args:
            others_wait: ranks for this one to go, and the keeper for them.
        """
        if others_wait and self.books.link.world_size > 1:
            copying_s = self.seconds_for_copying()
            return OTHERS_S if copying_s is None else min(copying_s, OTHERS_S)
        if not self.is_known:
            return None
        end_s = time.monotonic() + UNKNOWN_GRACE_S if self._end_s is None else self._end_s
        return min(max(end_s - self._out_s - time.monotonic(), 0.0), GRACE_MAX_S)

    def tell_loss(self, step: int, why: str) -> None:
        """The state of ``step`` is not committed: what stands instead, and what that costs."""
        committed = self._engine.committed_step
        if self.books.link.rank or committed == step:
            return
        text = f"step {step} could not be committed ({why}); "
        text += f"the newest commit, step {committed}, stands" if committed else NO_COMMIT
        lost = step - committed
        seconds = self._outlook.seconds_of(lost)
        about = f", about {seconds:.1f} s of training" if seconds else ""
        say(f"{text}: {lost} step{'s'[: lost > 1]} lost{about}")

    # --- the thread -----------------------------------------------------------------------------

    def _look_on(self, action: Action) -> None:
        """See that this rank leaves, one way or the other."""
        while not self._gone.wait(LOOK_S):
            where, left_s = self._where(), self._left_s()
            if where.is_ending:
                if left_s < min(EXIT_S, self._out_s / 2):
                    self._end_it(where.step)
                continue
            is_there = not where.in_loop and where.step >= action.step
            if is_there and where.step == self._engine.committed_step:
                self._leave("")
                return
            if left_s < self._out_s:
                self._give_up(action)
                return

    def _left_s(self) -> float:
        return float("inf") if self._end_s is None else self._end_s - time.monotonic()

    def _give_up(self, action: Action) -> None:
        # What is on its way needs nothing from the training thread any more, only time.
        if self._end_s is not None:
            self._engine.wait_for_writing(self.seconds_for_saving(COMMIT_TIMEOUT_S))
        why = str(action.info.get("why") if action.kind == "leave" else "")
        self._leave(why or "the step did not end in time")

    def _leave(self, why: str) -> None:
        """Have the training thread leave from where it is; end the process if it does not."""
        if self._gone.is_set() or self._where().is_ending or not self.claim():
            return
        step = self._where().step
        self._tell(step, why)
        unwind_s = min(UNWIND_S, max(self._left_s() - EXIT_S, EXIT_S))
        if self._signals.leave(int(Exit.DRAINED)) and self._gone.wait(unwind_s):
            return
        if not self._gone.is_set():
            self._end_it(step)

    def _end_it(self, step: int) -> None:
        """The training thread does not come to an end: say goodbye for it."""
        copying_s = self.seconds_for_copying()
        if self.claim():  # in the middle of its own way out
            self._tell(step, "there was no time left")
        ending = threading.Thread(
            target=self._abandon,
            args=(int(Exit.DRAINED), copying_s),
            name="outlast-abandon",
            daemon=True,
        )
        ending.start()
        ending.join((copying_s or 0.0) + BOOKS_S)
        os._exit(int(Exit.DRAINED))

    def _abandon(self, exit_code: int, copying_s: float | None) -> None:
        """Leave without the training thread, which does not come to an end."""
        try:
            self._engine.line.close(clean=True, copying_s=copying_s)
        finally:
            self.books.close(exit_code)

    def _tell(self, step: int, why: str) -> None:
        """Say and write down how it ended; neither may hold up the way out."""

        def tell() -> None:
            with contextlib.suppress(Exception):
                self.tell_loss(step, why)
            self.books.drained(step, 0 < step == self._engine.committed_step)

        telling = threading.Thread(target=tell, name="outlast-telling", daemon=True)
        telling.start()
        telling.join(BOOKS_S)


class Hearing:
    """What a session hears of its machine's end: signals; and the platform, where no agent does.

    Args:
        settings: the job's.

    Attributes:
        signals: installed while the session is open.
        way: out of the attempt that is told; set by the session for each.
    """

    way: WayOut

    def __init__(self, settings: Settings) -> None:
        self.signals = SignalNotice(self._on_signal, patient=self._is_patient)
        self._settings = settings
        self._desk = PlatformDesk(settings, self._on_notice, self._on_platform)
        self._heard: Notice | None = None  # here, not from another rank

    def open(self) -> None:
        """Begin to listen to the platform."""
        if self.way.books.listens:
            self._desk.open()

    def close(self) -> None:
        """Stop listening to the platform."""
        if self.way.books.listens:
            self._desk.close()

    def acknowledge(self) -> None:
        """Everything is saved: the platform need not wait, if the notice came from it."""
        if self._heard is not None:
            self._desk.acknowledge(self._heard)

    def _is_patient(self) -> bool:
        return self.way.is_patient

    def _on_signal(self, name: str) -> None:
        if name == "SIGINT":
            if self.way.books.link.rank == 0:
                say("Ctrl-C: stopping once this step is complete and saved; again to stop at once")
            self.way.snapshots.begun.request(
                "drain", not_before=0, reason="Ctrl-C", left_s=None, interrupt=True
            )
            return
        self._on_notice(signal_notice(name, self._desk.grace_s()))

    def _on_notice(self, notice: Notice) -> None:
        info = request_of(notice, self._settings)
        if not notice.early:
            self._heard = notice
            self.way.snapshots.begun.request("drain", not_before=0, **info)
        elif answer_to(notice, self._settings) != "ignore":
            self.way.snapshots.begun.hurry(**info)
        self.way.books.notice(notice)  # not before: its disk may be slow

    def _on_platform(self, chosen: Chosen) -> None:
        if self.way.books.link.rank == 0 and chosen.watchers:
            say(chosen.reason)
        books = self.way.books
        books.grace_check.found(chosen)
        if fields := kind_fields(self._settings, chosen):
            books.ledger.append("machine", durable=False, **fields)
