"""What a training loop holds.

A session restores the newest valid checkpoint when it is entered, and at each step boundary beats,
takes snapshots that are due, and stops every rank at the same step when a drain is agreed. Between
boundaries the training thread runs little of it: hooks that measure waits, and one ahead of each
optimizer's step, which waits for what is still to be copied. Other threads of it copy a snapshot,
tell rank 0 the loss, or wait for a message.

Guarantees: state is captured at step boundaries only, never in a signal handler; a failing save
never stops the loop; with exit code 75 everything is committed, or the message says what is not; a
session that its script leaves (behind its loop, by ``break``, ``return`` or ``sys.exit``) has its
end committed, or fails with a line that says why not.

What breaks the guarantee: state that no named object holds (a counter in a local variable), and
random numbers from generators that are neither global nor found (``data/generators.py``).
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Final, Never, Protocol, Self, TypeVar

import msgspec
from torch.optim import Optimizer

from outlast import config
from outlast.attempt.link import Action
from outlast.attempt.over import AttemptOver, over
from outlast.checkpoint import devices
from outlast.checkpoint.plan import OWN
from outlast.checkpoint.tree import flatten
from outlast.data import random_state, shield
from outlast.errors import ConfigError, Exit, Leave, NotInProcess, OutlastError, exit_code_of
from outlast.health import pulse
from outlast.inprocess import handover
from outlast.inprocess.survivor import open_survivor
from outlast.ledger.narrator import one_line_errors, say
from outlast.notice.desk import checked
from outlast.script import excepthook
from outlast.script.callsite import Entry, Site, entry_of, site_of
from outlast.script.gradients import ScriptGradients
from outlast.script.hyper import Hyperparameters
from outlast.script.initial import Initial
from outlast.script.objects import Objects, StepsHeard, hook, refuse_misspelt, refuse_unnamed
from outlast.script.unnamed import Transient, Unnamed
from outlast.training.afresh import held, read
from outlast.training.each_step import usable
from outlast.training.footing import Footing
from outlast.training.leaving import OTHERS_S, Hearing, LoopPosition
from outlast.training.passage import FROM_NOTHING, Home, Passage, cannot_live_on
from outlast.training.position import Position, refuse_call, refuse_loop
from outlast.training.saving import COMMIT_TIMEOUT_S, PendingSave, Saves, Saving
from outlast.training.void_steps import VoidSteps

Batch = TypeVar("Batch")

_OPENED: Final = ("_on", "_void_steps")  # what opening makes, and is asked for first
COPIED_S: Final = 60.0  # for a snapshot to be whole before an attempt is left with nobody lost


class StepObserver(Protocol):
    """Is told of every session's steps, in the training thread; the drill has one."""

    def begins(self, step: int, objects: Mapping[str, Any]) -> None:
        """A batch is handed out (maybe once more) behind so many completed steps."""

    def completed(self, step: int, objects: Mapping[str, Any]) -> None:
        """So many steps are complete; name → object, of what the session was given to save."""


class Session:
    """A running session; made by :func:`outlast.session`.

    Attributes:
        step: batches of ``steps()`` whose turn of the loop is completed, over the whole job. Not
            the optimizer's steps: where it is called after every fourth batch, these are four.
        resumed: whether this run went on from a checkpoint.
        cannot_repeat: why the loop's body cannot be asked to run a step again; "" if it can.
        adapted: gives what is iterated in place of a loader, where a framework has made it.
        begins_at: where a framework's own checkpoint stands that is loaded already; 0 for none.
        observers: of all sessions of this process.
    """

    observers: ClassVar[list[StepObserver]] = []
    cannot_repeat = ""
    begins_at = 0
    adapted: Callable[[Iterable[Any]], Iterable[Any]] = staticmethod(lambda loader: loader)

    def __init__(
        self,
        settings: config.Settings,
        objects: Objects,
        initial: Initial,
        keep_new: str | Sequence[str] = (),
    ) -> None:
        self.step = 0
        self.resumed = False
        self._settings = settings
        self._objects = objects
        self._initial = initial
        self._keep_new = keep_new
        self._hyper: Hyperparameters
        self._saves = Saves()
        self._hearing = Hearing(settings)
        self._cover = shield.Cover()  # for loaders that the script iterates itself
        self._on: Footing
        self._position = Position()
        self._entry = Entry()
        self._passage: Passage | None = None  # where the agent has this process live on
        self._in_loop = self._is_over = self._is_draining = False
        self._has_parted = False  # its machine leaves, and the others go on
        self._thread = threading.get_ident()
        self._hook: Any = None
        self._at_boundary = True  # whether the state is that of ``step``, so that it may be saved
        self._has_trained = self._is_rolled_back = self._was_over_at_once = False
        self._is_broken_off = False  # by an error: the step that it was in is not gone on from
        self._unnamed: Unnamed
        self._transient: Transient
        self._gradients: ScriptGradients
        self._saving: Saving
        self._void_steps: VoidSteps

    # --- entering and leaving ----------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        """Asked for what is not there: of all that opening makes, this is needed first."""
        if name in _OPENED:
            with one_line_errors():
                raise ConfigError(
                    "the session is not open; write: with outlast.session(…) as session:"
                )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __enter__(self) -> Self:
        self._entry = entry_of(sys._getframe(1))
        excepthook.begins()
        with one_line_errors():
            self._unnamed, self._transient = Unnamed(self._objects), Transient(self._objects)
            self._hyper = Hyperparameters(self._objects.stateful, self._keep_new)
            self._gradients = ScriptGradients(lambda: self._objects.stateful, self._unnamed.saw)
            self._void_steps = VoidSteps(
                self._position, self._gradients, lambda: self._on, self._entry.frame_id
            )
            self._saving = Saving(self._objects, self._position, self._hyper, self._gradients)
            for name, state in self._objects.capture(loaders=False).items():
                flatten(state, name)  # what cannot be saved is said now, not in an hour
            devices.settle(self._objects.stateful.values())
            self._passage = self._open_passage()
            while not self._come_in():
                pass  # the attempt was over before it began here
        self._saving.optimizers = StepsHeard(self.step)
        distrust = lambda: self._on.engine.distrust()  # noqa: E731, PLW0108 - of each attempt
        self._hook = hook(self._before_optimizer, distrust, self._before_replay)
        self._gradients.open(self.step)
        if self._on.link.rank == 0:
            self._unnamed.open()
            self._transient.open()
        if self._passage is not None:
            self._passage.begin(self._on)
        self._hearing.signals.install()
        self._cover.open()
        self._hearing.open()
        return self

    def _come_in(self) -> bool:
        """Take part in the attempt, with the state that all go on from; whether it still is one."""
        is_open = False
        try:
            self._open_attempt()
            is_open = True
            self._resume()
            self._position.skip(self._on.judging.rollbacks)
            self._on.start(self.step)
        except BaseException as error:
            if self._passage is not None and self._passage.join_again(error, is_open=is_open):
                return False
            if not is_open:
                raise
            # Refused before it began: another one can take its place in this process.
            self._on.stop(0.0, exit_code_of(error), clean=False)
            if self._passage is not None:
                self._passage.close()
            raise
        return True

    def _open_attempt(self) -> Footing:
        self._on = Footing(
            *(self._settings, self._objects, self._hearing, self._saves, self._saving),
            where=lambda: LoopPosition(
                self.step, self._in_loop, self._is_draining or self._is_over
            ),
            may_move=self._may_move,
        )
        self._saving.snapshots, self._hearing.way = self._on.snapshots, self._on.leaving
        return self._on

    def _resume(self) -> None:
        self._objects.bits.tell_at_start(self._on.link.rank, self._on.link.world_size)
        is_able = self._passage is not None and self._passage.is_able
        regained = self._on.sources.regain(self._objects, is_able=is_able)
        if regained is not None:
            remarks = self._objects.put(regained.state)
            own_of, saved_by = regained.own_of, regained.world_size
            again = held(self._objects, regained.state)
        else:
            loaded = self._on.sources.resume(self._objects.check, self.begins_at).loaded
            if loaded is None:
                if self._on.sources.others_live:
                    raise NotInProcess(FROM_NOTHING)
                self._begin()
                return
            if self._initial.paths and self._on.link.rank == 0:
                where, step = ", ".join(self._initial.paths), loaded.manifest.step
                say(f"{where} is not started from: this job goes on from its own step {step}")
            remarks = self._objects.apply(loaded)
            self._on.sources.closed_rounds(self._objects.local_updates, loaded.manifest.step)
            own_of, saved_by = functools.partial(loaded.state, OWN), loaded.manifest.world_size
            again = read(self._objects, self._on.sources, loaded.save)
        self._tell(remarks)
        self.step = self._saving.take_over(own_of, saved_by, self._on.link, self._on.streams)
        self.resumed = True
        others_go_on = regained is not None or self._on.sources.others_live
        self._on.each_step.begin(self.step, others_live=others_go_on)
        if self._passage is not None:
            self._passage.met(self._on, own_of, saved_by)
            self._void_steps.apart = self._passage.apart if others_go_on else None
        has_finished = self._on.books.attempt.finished_t and not self._settings.resume
        self._void_steps.are_possible = not self.cannot_repeat
        self._void_steps.has_finished = bool(has_finished)

        def once_more(keys: Collection[str]) -> None:
            again(keys)
            self._hyper.put(keys)

        self._on.afresh.restored(once_more, self.step, is_whole=not self._position.is_first)

    def _begin(self) -> None:
        """The job has no checkpoint of its own that is new enough."""
        self.step = self.begins_at
        self._on.each_step.begin(0, others_live=False)
        if self._initial.paths:
            origins = self._initial.start(self._on.link)
            self._saving.origins = [msgspec.to_builtins(one) for one in origins]
            self._on.sources.started_from(origins)
            self._tell(self._hyper.started({key for one in origins for key in one.objects}))

    def _tell(self, lines: Iterable[str]) -> None:
        for line in lines if self._on.link.rank == 0 else ():
            say(line)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_over = True
        self._void_steps.end()
        self._is_broken_off = isinstance(error, Exception) and not isinstance(error, StopIteration)
        self._leave_loop()  # it may still be held: what comes now is no step
        is_excused = self._had_no_step(error)
        error = None if is_excused else error
        code = exit_code_of(error)
        if error is not None:
            over.explains(error)  # waits for the agent's word, on which it depends what is done
        leaving = self._on.leaving
        is_left = isinstance(error, Exception) and leaving.is_known and code != Exit.STORAGE
        if is_left:
            say(f"ended by {type(error).__name__} while the job was leaving: {error}")
            code = int(Exit.DRAINED)
        # An exception leaves at once: other ranks may be gone, and the older commit stands.
        ended = self._is_end(error)
        clean = ended or code == Exit.DRAINED
        try:
            with self._on.books.samples.all_stalled():
                self._commit_end(error, ended=ended, is_excused=is_excused)
        except OutlastError as failure:
            code, clean = int(failure.exit_code), False
            raise
        finally:
            self._hearing.signals.remove()  # not before: a signal would be the end of the last save
            self._hook.remove()
            self._gradients.close()
            self._unnamed.close()
            self._cover.close()
            if self._passage is not None:
                self._passage.close()
            self._position.close()
            if is_left:
                self._on.leaving.broken(self.step)
            timeout_s = self._on.leaving.seconds_for_saving(COMMIT_TIMEOUT_S if ended else OTHERS_S)
            is_cut_off = over.is_over and not self._has_parted
            if is_cut_off or code == Exit.ROLLED_BACK:  # what is in memory stays there
                timeout_s, clean = 0.0, False
            copying_s = self._on.leaving.seconds_for_copying(others_wait=is_excused)
            try:
                self._on.stop(timeout_s, code, clean=clean, copying_s=copying_s)
            finally:
                self._on.leaving.left()
                self._saves.give_up(self.step)
                self._hearing.close()
        if code != Exit.DRAINED:
            return
        if self._on.engine.committed_step == self.step:
            self._hearing.acknowledge()
        if isinstance(error, Exception):
            self._on.leaving.tell_loss(self.step, f"{type(error).__name__} came first")
            raise Leave(code) from error

    # --- the loop ----------------------------------------------------------------------------

    def steps(
        self,
        loader: Iterable[Batch] = None,  # type: ignore[assignment] # noqa: RUF013 - see refuse_call
        until: int | None = None,
        *,
        epochs: int | None = None,
        **unknown: Never,
    ) -> Iterator[Batch]:
        """Batches from where the last checkpoint left off, one for each step of the job.

        A loop that is left early (``break``, ``return``) has completed the step that it was in if
        an optimizer has stepped, or backward has run, since its batch was handed out. Otherwise
        the batch was looked at only, and comes again after a resume.

        Args:
            loader: an :class:`outlast.data.Loader` or ``Stream``, a loader with its own
                state_dict, a stock DataLoader, or any iterable.
            until: stop after this many steps of the job.
            epochs: stop after this many passes over the loader; an outlast loader counts them from
                its beginning, any other one from this loop's. Without either: one pass.
            **unknown: refused, as ``batch_size`` is: the loader makes the batches.

        Raises:
            ConfigError: the loader does not fit the checkpoint, or another loop has not ended.
            SystemExit: with code 75, once a drain is agreed and committed.
        """
        with one_line_errors():
            refuse_call(loader, unknown)
        site = site_of(sys._getframe(1), self._entry)  # not where it is first advanced
        return self._steps(loader, until, epochs, site)

    def epochs(self, num: int) -> Iterator[int]:
        """The epochs 0 … ``num`` - 1, for loops of ``steps()`` inside; finished ones are left out.

        A resumed run begins with the epoch that the checkpoint is in: the code around the loops of
        earlier ones (evaluations, files, schedules) is not run again. An epoch is finished once
        the next one is asked for: what stands behind its loop runs at least once.

        Raises:
            ConfigError: another ``epochs()`` is under way, or the session is over.
        """
        with one_line_errors():
            if self._is_over:
                raise ConfigError("the session is over; call epochs() inside its with block")
            if isinstance(num, bool) or not isinstance(num, int) or num < 0:
                raise ConfigError(f"epochs({num!r}) is no number of epochs; count from 0")
        return self._epochs(num)

    def _epochs(self, num: int) -> Iterator[int]:
        with one_line_errors():
            first = self._position.begin_epochs(num)
        if first >= num:
            self._was_over_at_once = True
            self._on.streams.restore(self.step)  # for what follows, as if they had just ended here
        is_left = True
        try:
            for epoch in range(first, num):
                self._position.enter_epoch(epoch)
                if self._passage is not None:
                    self._passage.way.epoch_begins()
                yield epoch
            is_left = False
        finally:
            if not self._is_over:  # else it is the end of the session that puts it down
                self._position.end_epochs(max(first, num), is_left=is_left)
                if self._passage is not None:
                    self._passage.way.epochs_end(are_left=is_left)

    def _steps(
        self, loader: Iterable[Batch], until: int | None, epochs: int | None, site: Site
    ) -> Iterator[Batch]:
        with one_line_errors():
            open_at = self.step if self._in_loop else None
            refuse_loop(until, epochs, is_over=self._is_over, open_at=open_at)
            loader = self.adapted(loader)
        self._void_steps.end()
        self._position.called(site, self.step, until)
        devices.settle(self._objects.stateful.values())  # they may have been brought there since
        limits = {"epochs": epochs, "one_pass": until is None and epochs is None}
        if self._position.is_passed(self.step, self._on.link.rank):
            self._was_over_at_once = True
            if self._passage is not None and self._position.saved_loop <= self._position.loop:
                self._passage.way.arrived()
            if self._position.saved_loop == self._position.loop:  # as if it had just ended here
                with one_line_errors():
                    self._open(loader, **limits, is_over=True)
                try:
                    yield from self._void_steps.of_saved_loop(sys._getframe(1))
                finally:
                    self._position.leave()
            elif self._position.saved_loop > self._position.loop:
                self._on.streams.restore(self.step)
                yield from self._void_steps.of_ended_loop(loader, sys._getframe(1))
            return
        with one_line_errors():
            self._open(loader, **limits)
        self._in_loop, self._saving.end_random = True, None
        self._gradients.restore()
        self._on.meter.open(self._objects.stateful.values())
        if self._passage is not None:
            self._passage.come_to_loop()
        self._keep()
        self._on.books.samples.until = until
        batch: Any = None
        is_in_hand = False
        with self._loop():
            while until is None or self.step < until or is_in_hand:
                if not is_in_hand:
                    if not self._come_to_boundary():
                        continue  # it is another attempt's
                    self._on.meter.loading()
                    try:
                        batch = self._position.next(self.step)
                    except StopIteration:
                        break
                    self._position.handed_out(sys._getframe(), self.step, self._on.link.rank)
                self._at_boundary = False
                self._gradients.handed_out()
                if self._passage is not None:
                    self._passage.handed_out(sys._getframe())
                self._on.meter.stepping()
                for observer in self.observers:
                    observer.begins(self.step, self._objects.stateful)
                yield batch
                is_in_hand = self._end_step()
            yield from self._void_steps.of_saved_loop(sys._getframe(1))
        self._act_on_last_boundary()

    def log(self, *unnamed: Never, **scalars: Any) -> None:
        """Note numbers of the step in progress, such as a loss; about one step a second is kept.

        A tensor is read only when its step is kept, so that a GPU isn't waited for.

        Raises:
            ConfigError: a number without its name.
        """
        given: tuple[Any, ...] = unnamed
        if given:
            first = next((one for one in given if isinstance(one, str)), "loss")
            with one_line_errors():
                raise ConfigError(f"numbers are logged by name; write: session.log({first}=…)")
        if not self._void_steps.is_running:
            self._on.log(scalars)

    def save(self) -> PendingSave:
        """Ask for a checkpoint at the next step boundary; returns at once.

        Any one rank may ask, or all of them.
        """
        if self._void_steps.is_running:  # the state is that which was resumed from
            pending = self._saves.add(self.step)
            self._saves.written(self.step, "")
            return pending
        if not self._in_loop:
            # Nobody acts on requests outside of steps(); leaving the session saves the end.
            return self._saves.add(self.step, self._may_wait)
        not_before = self.step if self._at_boundary else self.step + 1
        pending = self._saves.add(not_before, self._may_wait)
        self._on.snapshots.begun.request("save", not_before=pending.not_before, reason="asked for")
        return pending

    # --- inside ------------------------------------------------------------------------------

    def _complete(self) -> None:
        """The step in progress is complete."""
        self.step += 1
        self._on.meter.ended(self.step)
        self._at_boundary = self._has_trained = True
        self._position.completed()
        if self._passage is not None:
            self._passage.completed()
        self._gradients.completed(self.step)
        self._unnamed.completed()
        self._transient.completed()
        self._on.completed(self.step, *self._position.batch)
        for observer in () if self._is_broken_off else self.observers:
            observer.completed(self.step, self._objects.stateful)

    # --- a loss elsewhere --------------------------------------------------------------------

    def _open_passage(self) -> Passage | None:
        survivor = open_survivor()
        if survivor is None:
            return None
        survivor.cannot(self.cannot_repeat or cannot_live_on(self._settings, self._objects))
        home = Home(
            newest=lambda: self._saving.newest(self.step),
            own=lambda: self._saving.own(self.step, self._position.reached()),
            own_end=lambda step: self._saving.own(step, self._position.ahead()),
            let_go=lambda: self._on.let_go(self.step),
            leave=lambda: self._on.leave(self.step),
            enter=self._open_attempt,
            resumed=self._resumed,
            arrive=self._arrive,
        )
        return Passage(survivor, self._objects, self._position, self._gradients, home)

    @contextlib.contextmanager
    def _loop(self) -> Iterator[None]:
        lasts = self._passage.loop() if self._passage is not None else contextlib.nullcontext()
        with lasts, self._on.late.loop(self._position, self._objects.bits):
            try:
                yield
            finally:
                self._leave_loop()

    def _come_to_boundary(self) -> bool:
        """Do what is due; whether this is still the same boundary of the same attempt."""
        try:
            self._boundary()
        except (AttemptOver, Exception) as error:
            if not over.explains(error):
                raise
        else:
            return True
        self._go_on()
        return False

    def _end_step(self) -> bool:
        """The loop's body has come to its end; whether it has the same batch once more."""
        if self._passage is not None:
            self._passage.body_ended()
        if not over.is_void:
            try:
                self._complete()
                self._keep()
                self._saving.prepare(self.step, may_fail=self.resumed)
            except Exception as error:
                if not over.explains(error):
                    raise
            else:
                return False
        return self._go_on()

    def _go_on(self) -> bool:
        """The attempt is over: go on in the next one; whether with the batch in hand."""
        assert self._passage is not None  # noqa: S101 - it is held
        self._passage.cross(self._on, self.step)
        self._on.meter.open(self._objects.stateful.values())
        return self._passage.is_in_hand

    def _resumed(self, own: Mapping[str, Any], saved_by: int) -> None:
        link = self._on.link
        self._hyper.resumed(own.get("settings"))  # what there is to say was said at the beginning
        self._gradients.resumed(own, saved_by, link.world_size, link.rank)

    def _arrive(self, step: int) -> None:
        self.step = step
        self._on.each_step.begin(step, others_live=True)
        self._at_boundary = self._passage is None or not self._passage.is_in_hand
        self._gradients.forget(step)
        self._gradients.restore()
        self._saving.optimizers = StepsHeard(step)

    def _leave_loop(self) -> None:
        """The loop has ended or was left, maybe in the midst of a step."""
        if not self._in_loop:
            return
        if not self._at_boundary:
            if self._gradients.have_moved and not over.is_void:
                self._complete()
            else:
                self._position.give_back(self.step)
                self._at_boundary = True
        self._in_loop = False
        self._position.leave()
        self._on.meter.close()
        if self._on.agreement is not None:  # else a loss has ended it before it began
            self._on.agreement.leave(self.step)
        self._saving.end_random = random_state.capture()

    def _had_no_step(self, error: BaseException | None) -> bool:
        """Whether ``error`` is excused: there was no step left, and so nothing that it wants."""
        if not self._was_over_at_once or self._has_trained:
            return False
        on, ends = self._on, self._is_end(error)
        return excepthook.no_step_was_left(
            error, on.link, finished_t=on.books.attempt.finished_t, step=self.step, ends=ends
        )

    def _is_end(self, error: BaseException | None) -> bool:
        """Whether the script leaves the session as it means to, so that this is a state to save."""
        if error is None:
            return True
        if self._on.leaving.is_known or self._is_rolled_back or over.is_over or sys.is_finalizing():
            return False
        # What ends a generator that the session is in, or whoever asks ``steps`` for its next.
        return isinstance(error, SystemExit | GeneratorExit | StopIteration)

    def _open(self, loader: Iterable[Any], **limits: Any) -> None:
        passage = self._passage
        goes_on = 0 < self._position.saved_loop <= self._position.loop
        with contextlib.ExitStack() as stack:
            if goes_on:
                stack.enter_context(self._on.books.samples.catching_up())
            if passage is not None:
                stack.enter_context(passage.opens_loop())
            self._position.open(
                *(loader, self.step),
                books=self._on.books,
                objects=self._objects,
                streams=self._on.streams,
                afresh=self._on.afresh,
                can_repeat=self._void_steps.are_due,
                **limits,
            )

    def _boundary(self) -> None:
        self._on.books.raise_if_overtaken()
        while actions := self._on.snapshots.begun.boundary(self.step):
            self._act(actions)
        over.raise_if_over()
        self._on.each_step.keep(self.step)
        # After what was due here: a save that has just begun must not hold up the one asked for.
        due = self._on.snapshots.due(self.step)
        if due is not None:
            step = self.step + 1
            step = self._gradients.foreseen(step) if due["kind"] == "save" else step
            self._on.snapshots.begun.request(**due, not_before=step, hold=True)

    def _act_on_last_boundary(self) -> None:
        """The loop's end is saved, behind whatever follows: an evaluation may take long.

        A drain that is agreed for the very last step finds it, and a save is what was wanted.
        """
        for pending in self._saves.open():
            pending.decide(self.step, agreed=False)
        back = self._on.ending.act(self._position.loop, self.step, self._on.snapshots.begun)
        if back is not None:
            self._roll_back(back)

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            if action.kind == "rollback":
                self._roll_back(action.info)
        drain = next((action for action in actions if action.kind == "drain"), None)
        move = next((action for action in actions if action.kind == "move"), None)
        if drain is not None:
            raise self._drained(drain)
        saves = [action for action in actions if action.kind == "save"]
        if saves:
            self._saving.take(self.step, saves[0].info)
        if move is not None:
            self._move(move)

    def _move(self, action: Action) -> None:
        """Into the next attempt, with nobody lost; out of the job, where this machine leaves it."""
        on, passage = self._on, self._passage
        on.engine.wait_for_copies(COPIED_S)  # a save in flight needs no worker from here on
        word = handover.UNHELD if passage is None else passage.word(self.step)
        agreed = handover.meet(
            on.link, word, lambda: self._on.snapshots.begun.drains, on.leaving.plan
        )
        info = agreed.info or action.info
        if agreed.drains:
            if on.link.rank == 0 and agreed.info and agreed.why_not:
                say(f"{handover.ALL_END}: {agreed.why_not}")
            drain = Action(kind="drain", step=self.step, info=info)
            on.leaving.decided(drain)
            raise self._drained(drain)
        if agreed.leavers:
            on.books.drain_agreed(self.step, info, agreed.leavers)
        assert passage is not None  # noqa: S101 - it has said that it can go on
        if on.link.rank in agreed.leavers:
            self._is_draining = self._has_parted = True
            on.leaving.decided(Action(kind="drain", step=self.step, info=info))
            passage.leave(on.link, agreed, on.leaving.seconds_for_saving(OTHERS_S))
            self._hearing.signals.deafen()
            raise Leave(int(Exit.DRAINED))
        passage.move(on.link, agreed)

    def _may_move(self, asks: list[dict[str, Any]]) -> bool:
        """On rank 0, in the answering thread: whether only those machines end that leave."""
        passage, link = self._passage, self._on.link
        return passage is not None and passage.may_part(asks, link.world_size)

    def _before_optimizer(self, optimizer: Optimizer) -> None:
        if self._in_loop and not self._at_boundary:
            self._saving.optimizers.stepped(self.step + 1)
        if over.is_void:  # it changes nothing
            return
        self._on.before_optimizer()
        if self._passage is not None and self._in_loop:
            self._passage.before_optimizer(optimizer)

    def _before_replay(self) -> None:
        """A CUDA graph is replayed; an optimizer's step may be in it."""
        self._gradients.replayed()
        if self._passage is not None and not self._saving.optimizers.is_certain(self.step):
            self._passage.spoil()

    def _may_wait(self, step: int) -> bool:
        """Whether waiting for the save of ``step`` here can end: not in the loop, ahead of it."""
        if threading.get_ident() != self._thread:
            return True
        return self.step > step or (self.step == step and self._in_loop and not self._at_boundary)

    def _keep(self) -> None:
        """A step has ended, or the first one begins: this moment can be gone on from."""
        if self._passage is not None:
            self._passage.keep(self.step)
        self._position.forget_ahead()

    def _roll_back(self, info: Mapping[str, Any]) -> None:
        """Leave without saving; all ranks do, and the next attempt goes on from before."""
        self._is_rolled_back = True
        unknown = str(info.get("unknown", ""))
        raise Leave(self._on.books.code_of_rollback(stops=bool(info["stops"]), unknown=unknown))

    def _drained(self, drain: Action) -> BaseException:
        self._is_draining = True
        return self._on.leaving.drain(drain, self.step, self._saving)

    def _commit_end(self, error: BaseException | None, *, ended: bool, is_excused: bool) -> None:
        """See that the end is committed, or tell the other ranks why this one does not."""
        if is_excused:
            self._on.ending.is_excused()
            return
        if not ended:
            self._on.ending.is_none(error)
            return
        with one_line_errors():
            self._position.refuse_unreached(self.step)
            self._on.snapshots.unsaved.is_ending = True
            differs = lambda: self._has_trained or self._position.ends_anew(self._on.afresh)  # noqa: E731
            if self._on.ending.is_due(self.step, COMMIT_TIMEOUT_S, differs):
                self._position.end()
                self._saving.commit_end(self.step)


def session(
    *unnamed: Never,
    dir: str | Path | None = None,  # noqa: A002 - the word of outlast.toml and of --dir
    every: str | int | None = None,
    keep: int | None = None,
    resume: bool | None = None,
    init_from: str | PathLike[str] | Mapping[str, str | PathLike[str]] | None = None,
    init_except: str | Sequence[str] = (),
    keep_new: str | Sequence[str] = (),
    **named: Any,
) -> Session:
    """Open a session for a training loop.

    Args:
        dir: the job's directory; by default as set by OUTLAST_DIR or outlast.toml.
        every: how often to save: "auto", "200 steps", 200, "5 min".
        keep: how many committed checkpoints to keep.
        resume: True to go on with the job in that directory although it was begun with another
            script or other arguments, which are refused otherwise. The same command needs no word.
        init_from: where a job without a checkpoint of its own takes its models' weights from: a
            job's directory (``runs/a``, or ``runs/a@1200`` for that step), one checkpoint's, a
            file of torch.save, safetensors (a file, or a directory with an index), or a DCP
            directory. As a mapping, which objects take their state, and from where:
            ``{"model": "runs/a", "optimizer": "runs/a"}``.
        init_except: names in the models that stay as the script has made them; patterns, or
            beginnings up to a dot (``"head"``).
        keep_new: hyperparameters, as in ``"optimizer.lr"``, of which a resume takes the script's
            value and not the checkpoint's.
        *unnamed: refused, with how it is written: objects are given by name.
        **named: what to save: anything with state_dict and load_state_dict. The names are the
            checkpoint's keys. A loader may be among them. Random-number states, the step and the
            position in the data are kept without being named.

    Returns:
        A session, to be used as a context manager.

    Raises:
        ConfigError: a setting that cannot be used, or nothing to save.
    """
    arguments = {
        "dir": dir,
        "resume": resume,
        "checkpoint.every": every,
        "checkpoint.keep": keep,
    }
    with one_line_errors():
        refuse_unnamed(unnamed)
        refuse_misspelt(named)
        objects = Objects(named)
        initial = Initial(objects, init_from, init_except)
        pulse.watch_model(objects.model)
        return Session(usable(checked(config.load(arguments))), objects, initial, keep_new)
