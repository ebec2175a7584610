"""What is saved of a session at a boundary, and its commit.

Guarantees: state is captured on the training thread, at a boundary; a save that fails is said and
counted, and never raised in the loop. The end of a session is committed, or an error says why not.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from outlast.attempt.over import over
from outlast.checkpoint.plan import OWN
from outlast.data import random_state
from outlast.errors import ConfigError, OutlastError, StorageError
from outlast.ledger.narrator import say
from outlast.script.gradients import KEY as GRADIENTS
from outlast.script.gradients import ScriptGradients
from outlast.script.hyper import Hyperparameters
from outlast.script.objects import Objects
from outlast.script.states import BoundaryState, StepsHeard
from outlast.training.flight import Written
from outlast.training.position import Position
from outlast.training.snapshots import Snapshots

COMMIT_TIMEOUT_S: Final = 1800.0
NO_COMMIT: Final = "nothing is committed yet"
MAX_TRIES: Final = 4  # a snapshot that is void is taken again


class Saving:
    """One session's.

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

    def prepare(self, step: int, *, may_fail: bool) -> None:
        """After an attempt's first step the state is what it will be: make ready for saving.

        Args:
            step: completed steps.
            may_fail: whether the job goes on if its state cannot be saved.

        Raises:
            ConfigError: it cannot be saved. Not after hours: the job has trained one step so far.
        """
        try:
            state = self.state(step)
            if self._gradients.come_and_go:
                state[OWN].pop(GRADIENTS, None)
            self.snapshots.prepare(step, self._objects.stateful, state)
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
        engine = self.snapshots.engine
        if not engine.wait_for_room(COMMIT_TIMEOUT_S):
            self.snapshots.skipped(step, "the save before it does not end")
            return False
        try:
            state = self.state(step)
        except ConfigError as error:  # state that changed its kind must not end the training
            engine.refuse(step, str(error))
            return self._not_saved(step, error)
        if self.optimizers.is_due(step):
            engine.take_at_once()
        try:
            self.snapshots.capture(step, self._objects.stateful, state, info, start)
        except (OSError, OutlastError, RuntimeError) as error:
            return self._not_saved(step, error)
        return True

    def _not_saved(self, step: int, error: Exception) -> bool:
        self.snapshots.skipped(step, str(error))
        say(f"step {step} was not saved: {error}")
        return False

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
            engine.line.wait_for_keeper(until_s - time.monotonic())
            if not self.take(step, {"reason": reason, "tiers": tiers}):
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
