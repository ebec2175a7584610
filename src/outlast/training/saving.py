"""What is saved of a session at a boundary, when, and how it ends.

The training thread collects the state (``Saving``) and hands it to the attempt's engine
(``Snapshots``). It tells the ledger nothing: what there is to be written down is left to the
threads that hear of a save's end, and to the attempt's. What a save has cost, and how it ended,
decides when the next one is due.

People hear of the first save that fails, and that saving works again (``Unsaved``). It is said here
and not from the ledger: a disk that takes no checkpoint often takes no event. A script that has
asked for a save (``session.save()``) hears of it through a ``PendingSave``.

Guarantees: state is captured on the training thread, at a boundary; a save that fails is said and
counted, and never raised in the loop. The end of a session is committed, or an error says why not.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from outlast.attempt.link import Agreement, Link
from outlast.attempt.over import over
from outlast.checkpoint.manifest import FULL
from outlast.checkpoint.plan import OWN
from outlast.config import Settings
from outlast.data import random_state
from outlast.errors import ConfigError, OutlastError, StorageError
from outlast.ledger.narrator import one_line_errors, say
from outlast.policy.cadence import Change
from outlast.script.gradients import KEY as GRADIENTS
from outlast.script.gradients import ScriptGradients
from outlast.script.hyper import Hyperparameters
from outlast.script.objects import BoundaryState, Objects, States, StepsHeard
from outlast.training.anomalies import LossMonitor
from outlast.training.books import AttemptBooks
from outlast.training.engine import Engine, Written
from outlast.training.position import Position, Streams
from outlast.training.turns import Turns

COMMIT_TIMEOUT_S: Final = 1800.0
NO_COMMIT: Final = "nothing is committed yet"
ACCUMULATED_MAX: Final = 64  # batches that the first optimizer's step is waited for
LATER: Final = 1 << 62  # a step that no job comes to
MAX_TRIES: Final = 4  # a snapshot that is void is taken again

# --- how saves end, for those who wait ------------------------------------------------------------


class Unsaved:
    """Says on rank 0 that saves fail, and that they work again; of one session.

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


class PendingSave:
    """A checkpoint that was asked for.

    Attributes:
        not_before: the first step boundary at which it can be taken.
    """

    def __init__(self, not_before: int, may_wait: Callable[[int], bool] = lambda _: True) -> None:
        self.not_before = not_before
        self._may_wait = may_wait
        self.error = ""
        self._step: int | None = None
        self._committed = self._is_agreed = self._is_put_off = False
        self._changed = threading.Condition()

    @property
    def step(self) -> int | None:
        """The step it is taken at, or None while the ranks have not agreed yet."""
        return self._step

    @property
    def committed(self) -> bool:
        """Whether it is complete and readable."""
        return self._committed

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is committed or has failed; whether it is committed.

        A save that comes while another is in flight is put off to a later boundary, and so is one
        whose snapshot was void. Asked by the loop before that boundary, the answer is False at
        once: waiting would be for itself.

        Raises:
            ConfigError: the loop asks without a time-out, in the very step in which it has asked.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while not self._committed and not self.error:
                if self._is_put_off and not self._may_wait(LATER):
                    break
                # The ranks may still agree on a later step than the one that was asked for.
                step = self.not_before if self._step is None else self._step
                if not self._may_wait(step):
                    if timeout_s is not None or step > self.not_before:
                        break  # it was put off to a later boundary: ask again after that
                    raise ConfigError(
                        "wait() is called before the step boundary at which the save is taken, and "
                        "would wait for ever; call it in a later step, or leave it to the "
                        "session's end"
                    )
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    break
                self._changed.wait(left)
            return self._committed

    def decide(self, step: int, *, agreed: bool = True) -> None:
        """It is taken at ``step``; where that is not ``agreed``, the ranks may say a later one."""
        with self._changed:
            if self._step is None or not self._is_agreed:
                self._step, self._is_agreed, self._is_put_off = step, agreed, False
                self._changed.notify_all()

    def put_off(self) -> None:
        """What was taken was void; it is taken again, nobody knows at which step."""
        with self._changed:
            self._step, self._is_put_off = None, True
            self._changed.notify_all()

    def end(self, error: str, step: int) -> None:
        """It is committed (``error`` is "") or has failed, with the snapshot of ``step``."""
        with self._changed:
            self._step = step  # a later one than was decided, if the first was void
            self._committed = not error
            self.error = error
            self._changed.notify_all()


class Saves:
    """The saves that were asked for and have not ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: list[PendingSave] = []

    def add(self, not_before: int, may_wait: Callable[[int], bool] = lambda _: True) -> PendingSave:
        """Keep track of a new one; ``may_wait`` says whether the caller may wait for a step."""
        pending = PendingSave(not_before, may_wait)
        with self._lock:
            self._open.append(pending)
        return pending

    def open(self) -> list[PendingSave]:
        """Those that have not ended."""
        with self._lock:
            return list(self._open)

    def give_up(self, step: int) -> None:
        """The attempt is over, after ``step``: none of them is to be waited for."""
        for pending in self.open():
            pending.end("the attempt is over", step)

    def decided(self, step: int) -> None:
        """All ranks act after ``step``: whoever asked for it or before is served."""
        for pending in self.open():
            if pending.not_before <= step:
                pending.decide(step)

    def void(self, step: int) -> None:
        """The snapshot of ``step`` was: whoever waits for it has to wait for a later one."""
        for pending in self.open():
            if pending.not_before <= step:
                pending.put_off()

    def written(self, step: int, error: str) -> None:
        """The save of ``step`` has ended."""
        with self._lock:
            ended = [p for p in self._open if p.not_before <= step]
            self._open = [p for p in self._open if p.not_before > step]
        for pending in ended:
            pending.end(error, step)


# --- of one attempt -------------------------------------------------------------------------------


class Snapshots:
    """One worker's in one attempt: when they are due, how they are taken, how their saves end.

    Args:
        settings: the job's.
        books: the attempt's.
        judging: told what is committed.
        saves: those that were asked for, which are told of each save's end.

    Attributes:
        engine: has them copied and committed.
        turns: when the next one is due.
        states: makes what is saved.
        unsaved: what people hear of saves that fail.
        agreement: with the other ranks, once it is there.
        is_prepared: whether all is ready for the first save.
        num_waited: steps that it has not been made ready at yet.
    """

    def __init__(
        self,
        settings: Settings,
        books: AttemptBooks,
        judging: LossMonitor,
        saves: Saves,
    ) -> None:
        self.agreement: Agreement | None = None
        self.is_prepared, self.num_waited = False, 0
        self._settings = settings
        self._books = books
        self._link = books.link
        self._judging = judging
        self._saves = saves
        self._notes: collections.deque[dict[str, Any]] = collections.deque()
        self.engine = Engine(
            settings,
            self._link,
            job=books.job.id,
            attempt=books.attempt,
            on_written=self._written,
            on_change=self.changed,
            say=say,
        )
        self.states = States(settings)
        self.unsaved = Unsaved(say if not self._link.rank else lambda _: None)
        past = books.past
        self.turns = Turns(
            settings,
            self.engine,
            self.skipped,
            on_change=self._note_cadence,
            known=None if past is None else past.failures.hazard,
            costs_s=() if past is None else past.costs_s,
            storms=past is not None and past.storms,
            beyond=None if past is None else past.failures.beyond,
            told=None if past is None else past.tier_intervals_s,
            leads=not self._link.rank,
        )

    def prepare(self, step: int, objects: Mapping[str, Any], state: dict[str, Any]) -> None:
        """After the first step of an attempt: have everything ready for the first save."""
        self._books.first_step(step)
        self.engine.prepare(self.states.of(step, objects, state, FULL))

    def due(self, step: int) -> dict[str, Any] | None:
        """On rank 0: what to ask for at the boundary after the next step, if anything."""
        return None if self._link.rank else self.turns.due(step)

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
        self._books.samples.stalled(now - start_s)
        cost_s = self.turns.taken(step, now, now - start_s, tiers)
        if self._link.rank == 0:
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

    def skipped(self, step: int, reason: str) -> None:
        """A save that was due was not taken."""
        self.turns.answered()
        self._books.ledger.append("save_skipped", durable=False, step=step, reason=reason)

    def _written(self, written: Written) -> None:
        if written.void:
            self._saves.void(written.step)
            self.turns.repeat("the snapshot before was void")
            if self._link.rank == 0:
                self.skipped(written.step, f"{written.error}; it is taken again, all at once")
        else:
            if self._link.rank == 0 and not written.told:
                self.skipped(written.step, written.error)
            self.unsaved.ended(written)
            self.turns.written(
                written.step, written.took_s, alone=not written.tier, error=written.error
            )
            if written.tier or written.error:  # nobody has asked for one in memory alone
                self._saves.written(written.step, written.error)
            self._judging.committed(self.engine.committed_step)
        self.changed()

    def _note_cadence(self, change: Change) -> None:
        self._books.ledger.append("cadence", durable=False, **msgspec.structs.asdict(change))

    @property
    def begun(self) -> Agreement:
        """The agreement of an attempt that has begun here, as any has once its session is open."""
        assert self.agreement is not None  # noqa: S101
        return self.agreement

    def changed(self) -> None:
        """In another thread: what the training thread left to be written down, and a poke."""
        while self._notes:
            with contextlib.suppress(IndexError):
                self._books.ledger.append("snapshot", durable=False, **self._notes.popleft())
        if self.agreement is not None:
            with contextlib.suppress(OSError, RuntimeError):  # the store is gone, the attempt over
                self.agreement.poke()


# --- of one session -------------------------------------------------------------------------------


class Saving:
    """What one session saves: its state at a boundary, and the end's.

    Args:
        objects, position, hyper, gradients: the session's.

    Attributes:
        snapshots: the attempt's.
        optimizers: which steps optimizers have taken.
        end_random: random numbers as the loop left them; None in a loop.
        origins: of the job's first state, where that was not the script's.
    """

    snapshots: Snapshots
    optimizers: StepsHeard

    def __init__(
        self,
        objects: Objects,
        position: Position,
        hyper: Hyperparameters,
        gradients: ScriptGradients,
    ) -> None:
        self.end_random: Mapping[str, Any] | None = None
        self.origins: list[Any] = []
        self._objects = objects
        self._position = position
        self._hyper = hyper
        self._gradients = gradients

    def state(self, step: int) -> dict[str, Any]:
        """Key → state at the end of ``step``."""
        state = self._objects.capture()
        state[OWN] = self.own(step, self._position.state())
        if gradients := self._gradients.accumulated(self._objects.gone_through(state)):
            state[OWN][GRADIENTS] = gradients
        return state

    def newest(self, step: int) -> BoundaryState:
        """What would be saved now."""
        return self.snapshots.states.of(step, self._objects.stateful, self.state(step))

    def own(self, step: int, data: Mapping[str, Any]) -> dict[str, Any]:
        """What this rank alone knows; ``data`` is its place in the data."""
        random = self._position.random or self.end_random or random_state.outside()
        own = {"step": step, "random": random, "data": data, "bits": self._objects.bits.facts()}
        own["settings"] = self._hyper.state()
        return {**own, "origins": self.origins} if self.origins else own

    def take_over(
        self,
        own_of: Callable[[int], Mapping[str, Any]],
        saved_by: int,
        link: Link,
        streams: Streams,
    ) -> int:
        """Go on from what workers had alone, each as ``own`` gave it; returns the step.

        Args:
            own_of: rank → its own state.
            saved_by: how many workers saved.
            link: the workers of now.
            streams: this one's random numbers.
        """
        own, bits = own_of(link.rank % saved_by), self._objects.bits
        self.origins = own.get("origins", [])
        for line in self._hyper.resumed(own.get("settings")):
            if link.rank == 0:
                say(line)
        streams.resumed(own["random"], saved_by, any_size=bits.any_size)
        bits.tell_of_resume(own.get("bits", ()), link.rank, saved_by, link.world_size)
        self._gradients.resumed(own, saved_by, link.world_size, link.rank)
        self._position.take_over(own_of, saved_by, link)
        return int(own["step"])

    def prepare(self, step: int, *, may_fail: bool) -> None:
        """After an attempt's first step the state is what it will be: make ready for saving.

        Where its gradients are accumulated the optimizer has no state yet: then after a later one.

        Args:
            step: completed steps.
            may_fail: whether the job goes on if its state cannot be saved.

        Raises:
            ConfigError: it cannot be saved. Not after hours: the job has trained one step so far.
        """
        snapshots = self.snapshots
        if snapshots.is_prepared:
            return
        snapshots.num_waited += 1
        if self._gradients.are_unused and snapshots.num_waited < ACCUMULATED_MAX:
            return
        snapshots.is_prepared = True
        with one_line_errors():
            try:
                snapshots.prepare(step, self._objects.stateful, self.state(step))
            except ConfigError as error:  # said again, and counted, when it is to be saved
                if not may_fail:
                    raise
                say(f"step {step} could not be saved: {error}")

    def take(self, step: int, info: Mapping[str, Any]) -> bool:
        """Capture the state and hand it to the engine; whether that was possible.

        Rank 0 agrees to a save only when its own engine is idle, so waiting takes milliseconds;
        skipping here, on one rank alone, would leave the others waiting for its part.
        """
        start = time.monotonic()
        over.raise_if_over()
        if not self.snapshots.engine.wait_for_room(COMMIT_TIMEOUT_S):
            self.snapshots.skipped(step, "the save before it does not end")
            return False
        try:
            state = self.state(step)
        except ConfigError as error:  # state that changed its kind must not end the training
            self.snapshots.engine.refuse(step, str(error))
            return self._not_saved(step, error)
        self._tell_of_steps(step)
        try:
            self.snapshots.capture(step, self._objects.stateful, state, info, start)
        except (OSError, OutlastError, RuntimeError) as error:
            return self._not_saved(step, error)
        return True

    def _not_saved(self, step: int, error: Exception) -> bool:
        self.snapshots.skipped(step, str(error))
        say(f"step {step} was not saved: {error}")
        return False

    def keep(self, step: int, timeout_s: float) -> int:
        """Capture the state for ``each_step``; its size in bytes.

        Where this rank cannot, within ``timeout_s``, the others are told, who take part in it too.

        Raises:
            OSError, OutlastError, RuntimeError: it could not be begun.
        """
        start = time.monotonic()
        until_s = start + timeout_s
        over.raise_if_over()
        engine = self.snapshots.engine
        # A checkpoint of the same step may still be copied: it has to be whole, and told so, first.
        if not engine.wait_for_copies(timeout_s) or not engine.wait_for_room(timeout_s):
            words = f"no memory was free for it within {timeout_s:.0f} s: {engine.why_not()}"
            engine.refuse(step, words, each_step=True)
            raise StorageError(words)
        try:
            found = self.newest(step)
        except (OSError, OutlastError, RuntimeError) as error:
            engine.refuse(step, str(error), each_step=True)
            raise
        self._tell_of_steps(step)
        left_s = max(until_s - time.monotonic(), 0.0)
        return engine.capture(found, (), start, each_step=True, agreed_s=left_s)

    def _tell_of_steps(self, step: int) -> None:
        if self.optimizers.is_due(step):
            self.snapshots.engine.take_at_once()

    def commit(
        self,
        step: int,
        reason: str,
        timeout_s: float,
        *,
        tiers: Sequence[str] | None = None,
        once_more: bool = False,
    ) -> Written | None:
        """Commit the state of this boundary, again if a snapshot was void; how it ended.

        With ``once_more`` also if this step is committed already.
        """
        until_s = time.monotonic() + timeout_s
        engine = self.snapshots.engine
        written = engine.wait(timeout_s)
        for _ in range(MAX_TRIES):
            if written is None or (engine.committed_step == step and not once_more):
                break
            once_more = False
            is_there = engine.line.wait_for_keeper(until_s - time.monotonic())
            if not self.take(step, {"reason": reason, "tiers": tiers}):
                if is_there and engine.line.is_gone:
                    continue  # it has died meanwhile: its successor is asked
                break
            written = engine.wait(max(until_s - time.monotonic(), 0.0))
            if written is not None and not written.void and written.told:
                break
        return written

    def commit_end(self, step: int) -> None:
        """Commit the end of the session.

        Raises:
            StorageError: it is not committed.
        """
        written = self.commit(step, "finished", COMMIT_TIMEOUT_S, once_more=True)
        committed = self.snapshots.engine.committed_step
        if committed != step or written is None or written.error:
            why = f"not within {COMMIT_TIMEOUT_S:.0f} s"
            if written is not None:
                why = written.error or "the message above says why"
            raise StorageError(
                f"the final state, step {step}, is not committed ({why}); "
                + (f"the newest commit is step {committed}" if committed else NO_COMMIT)
                + ". Mend it and run the same command again"
            )
