"""How a session ends when the machine must go: at the agreed step, or when there is no time for it.

The training thread drains at the agreed boundary. This looks on from a thread of its own, for the
cases in which that boundary is not reached, or the way out takes too long:

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
import os
import threading
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from outlast.attempt.agreement import Action
from outlast.errors import Exit
from outlast.ledger.narrator import say
from outlast.notice import UNKNOWN_GRACE_S
from outlast.notice.signals import SignalNotice
from outlast.policy.drain import LEAVING_S, leaving_s
from outlast.training.rig import Rig
from outlast.values import GRACE_MAX_S

UNWIND_S: Final = 3.0  # for the training thread to leave by itself
EXIT_S: Final = 0.5  # for the exit itself
BOOKS_S: Final = 1.0  # for the ledger, whose disk may be what is slow
LOOK_S: Final = 0.05
OTHERS_S: Final = 5.0  # for what is in flight when an exception or a drain ends the session
NO_COMMIT: Final = "nothing is committed yet"


class Where(NamedTuple):
    """Where the training thread is.

    Attributes:
        step: completed steps.
        in_loop: whether it is inside ``steps()``.
        is_ending: whether it is draining, or leaving the session.
    """

    step: int
    in_loop: bool
    is_ending: bool


class Leaving:
    """One rank's way out.

    Attributes:
        is_known: whether the ranks will leave; what their leaving then breaks is no failure.

    Args:
        rig: what the session stands on.
        signals: through which the main thread is made to leave.
        where: says where the training thread is; asked from another thread.
    """

    def __init__(self, rig: Rig, signals: SignalNotice, where: Callable[[], Where]) -> None:
        self.is_known = False
        self._rig = rig
        self._signals = signals
        self._where = where
        self._end_s: float | None = None  # monotonic time at which the machine goes
        self._out_s = LEAVING_S  # of the time until then, for the way out
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._is_claimed = False
        self._gone = threading.Event()

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
        if others_wait and self._rig.link.world_size > 1:
            copying_s = self.seconds_for_copying()
            return OTHERS_S if copying_s is None else min(copying_s, OTHERS_S)
        if not self.is_known:
            return None
        end_s = time.monotonic() + UNKNOWN_GRACE_S if self._end_s is None else self._end_s
        return min(max(end_s - self._out_s - time.monotonic(), 0.0), GRACE_MAX_S)

    def tell_loss(self, step: int, why: str) -> None:
        """The state of ``step`` is not committed: what stands instead, and what that costs."""
        committed = self._rig.engine.committed_step
        if self._rig.link.rank or committed == step:
            return
        text = f"step {step} could not be committed ({why}); "
        text += f"the newest commit, step {committed}, stands" if committed else NO_COMMIT
        lost = step - committed
        seconds = self._rig.outlook.seconds_of(lost)
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
            if is_there and where.step == self._rig.engine.committed_step:
                self._leave("")
                return
            if left_s < self._out_s:
                self._give_up(action)
                return

    def _left_s(self) -> float:
        return float("inf") if self._end_s is None else self._end_s - time.monotonic()

    def _give_up(self, action: Action) -> None:
        # What is on its way needs nothing from the training thread any more, only time.
        self._rig.engine.wait_for_writing(self.seconds_for_saving(0.0))
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
            target=self._rig.abandon,
            args=(int(Exit.DRAINED), copying_s),
            name="outlast-abandon",
            daemon=True,
        )
        ending.start()
        ending.join((copying_s or 0.0) + BOOKS_S)
        os._exit(int(Exit.DRAINED))

    def _tell(self, step: int, why: str) -> None:
        """Say and write down how it ended; neither may hold up the way out."""

        def tell() -> None:
            with contextlib.suppress(Exception):
                self.tell_loss(step, why)
            self._rig.drained(step, 0 < step == self._rig.engine.committed_step)

        telling = threading.Thread(target=tell, name="outlast-telling", daemon=True)
        telling.start()
        telling.join(BOOKS_S)
