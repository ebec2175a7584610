"""A loop that had ended hands out a batch once more, for the code behind it: a step that is void.

A checkpoint of a loop's last step leaves that loop no batch, and ``range()`` has loops that had
ended run through once more. The code behind them is the script's, and reads what their bodies set:
``print(loss.item())``, ``total / len(loader)``. So such a loop hands out one batch whose step
changes nothing: its body runs and sets its variables; then weights, optimizers and all other
objects, gradients and random numbers are what they were. It is not counted, logged or audited.

Guarantees: the state behind a void step is that in front of it, to the bit. All ranks have the same
void steps, so what their bodies send has an end; but for a worker that takes a lost one's place:
the others are further, and it sends nothing.

What it costs: a pass forward and backward, and two looks at the state; only where the source says
that something is read behind the loop.

What can go wrong: what the body does besides is done twice (lines, files, counters of other
services), and what it computes is that of the weights behind the step. Where a loader cannot give a
batch without another one being missed (an iterator), the loop gives none.

Rejected: saving one step later than a loop's last, in the next loop (what stands between them may
take an hour, and a drain cannot wait); variables in checkpoints; a batch that is kept in the
checkpoint.
"""

from __future__ import annotations

import contextlib
import copy
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from outlast.attempt.over import over
from outlast.data import random_state
from outlast.data.trail import Trail
from outlast.inprocess import interrupted
from outlast.ledger.command import is_users
from outlast.ledger.narrator import one_line_errors, say
from outlast.script.gradients import ScriptGradients
from outlast.script.loop_names import Need, need_behind
from outlast.training.footing import Footing
from outlast.training.position import Position


class VoidSteps:
    """One worker's.

    Args:
        position: where it is in its data.
        gradients: its models'.
        footing: gives the attempt.
        entry_id: of the frame that the session was entered in, which is there to its end.

    Attributes:
        are_possible: whether there are any: not for a framework's loop.
        has_finished: whether the job has, and nobody says that it is to go on.
        apart: has a body send nothing, where other ranks have no void step.
        is_running: whether the body of one runs just now.
    """

    def __init__(
        self,
        position: Position,
        gradients: ScriptGradients,
        footing: Callable[[], Footing],
        entry_id: int,
    ) -> None:
        self.are_possible = self.has_finished = self.is_running = False
        self.apart: Callable[[], AbstractContextManager[None]] | None = None
        self._position = position
        self._gradients = gradients
        self._footing = footing
        self._entry_id = entry_id
        self._is_told = self._is_alone = False
        self._open = contextlib.ExitStack()  # what puts back what the body changes
        self._kept: dict[int, tuple[Any, list[Any]]] = {}  # by loader, what it has given
        self._had: set[str] = set()  # lines of loops, in the frame that lasts

    @property
    def are_due(self) -> bool:
        """Whether the loop that was called hands out a batch once more where it has none.

        Not in a job that has finished: what stands behind its loop was done. But loops that the
        script counts may be more than they were, and what is to come is behind the others.
        """
        return self.are_possible and not (self.has_finished and not self._position.has_counter)

    def of_saved_loop(self, frame: types.FrameType) -> Iterator[Any]:
        """That of a resumed loop that has no batch left, to be handed out to ``frame``.

        Raises:
            NotInProcess: its body cannot run without the other ranks.
            StorageError: the body has changed weights by itself, and they cannot be read again.
        """
        self._kept.clear()
        batches = self._position.take_newest()
        if self.are_due and _need(_of_script(frame)).is_there:
            yield from self._handed_out(batches)

    def of_ended_loop(self, loader: Any, frame: types.FrameType) -> Iterator[Any]:
        """That of a loop before the checkpoint's; none where nothing behind it needs one.

        Raises:
            ConfigError: the loader cannot be used.
            NotInProcess, StorageError: as of the saved loop.
        """
        at = _of_script(frame)
        need, line = _need(at), "" if at is None else f"{at.f_code.co_filename}:{at.f_lineno}"
        has_it = need.is_lasting and line in self._had
        if self.are_due and need.is_there and not has_it:
            if id(at) == self._entry_id:
                self._had.add(line)
            yield from self._handed_out(self._batch_of(loader))

    def _batch_of(self, loader: Any) -> list[Any]:
        _, given = self._kept.get(id(loader), (None, None))
        if given is not None:
            return copy.deepcopy(given)
        with one_line_errors(), random_state.preserved():
            on = self._footing()
            given = on.books.open_feed(loader, Trail(), on.afresh.step).any_batch()
        with contextlib.suppress(Exception):  # what cannot be copied is loaded each time
            self._kept[id(loader)] = loader, copy.deepcopy(given)
        return given

    def _handed_out(self, batches: list[Any]) -> Iterator[Any]:
        for batch in batches:
            with self._step():
                yield batch

    @contextlib.contextmanager
    def _step(self) -> Iterator[None]:
        """Within, the body of one runs."""
        on = self._footing()
        if not self._is_told and (not on.link.rank or self.apart is not None):
            whose = f"rank {on.link.rank}: " if on.link.rank else ""
            say(
                f"{whose}step {on.afresh.step} is at the end of a loop: it hands out a batch once "
                "more, and what its body does changes nothing; the code behind it may read what "
                "the body sets"
            )
        self._is_told = self._is_alone = True
        on.engine.before_optimizer()  # no snapshot is to see what the body does
        with contextlib.ExitStack() as stack:
            stack.callback(self._position.put_generators, self._position.generators())
            stack.callback(random_state.restore, random_state.capture())
            stack.callback(lambda: on.afresh.undo(alone=self._is_alone))
            stack.callback(interrupted.stand_in().remove)
            stack.callback(self._set_running, False)
            self._set_running(True)
            stack.enter_context(self._gradients.aside())
            if self.apart is not None:
                stack.enter_context(self.apart())
            self._open = stack.pop_all()
        try:
            yield
            self._is_alone = self.apart is not None
        finally:
            self.end()

    def _set_running(self, is_running: bool) -> None:
        over.is_void = self.is_running = is_running

    def end(self) -> None:
        """End the one that runs, if any.

        Whoever leaves a loop by an exception may do so alone, and may hold it beyond that.
        """
        self._open.close()


def _of_script(frame: types.FrameType) -> types.FrameType | None:
    at: types.FrameType | None = frame
    while at is not None and not is_users(at.f_code.co_filename):
        at = at.f_back
    return at


def _need(at: types.FrameType | None) -> Need:
    return Need(is_there=True, is_lasting=False) if at is None else need_behind(at)
