"""From an attempt into the next one, in the process: what is put back, and what is taken over.

At the boundary behind an interrupted step, the state is that of the step's beginning but for what
the body has changed besides the weights: that is put back, so that the same batch can be trained on
once more. Who was lost is replaced by a worker that has nothing, and one that did not end a step
that another one ended lacks it: both get the state from one that has it
(:mod:`outlast.inprocess.handover`).

Where gradients are in the making, each process' own, all go back to the newest step's end that had
none, drop them, and train on the batches since then once more: no weight has changed since. What a
rank has done in between is undone as that of an interrupted step is.

Guarantees: a state is that of a completed step, whole, or it is not gone on from.

What can go wrong: a loader that keeps its place for a number of workers, and another number of
them, or one that cannot go back; then the worker ends, and all start again.

``WayToLoop`` is the way of a worker that takes a lost one's place, from its session's opening to
its loop. The others are in that loop, and answer nothing that is sent before it. So a script that
sends something on that way cannot have one worker started alone. It does not go through everything:
code in finished epochs of ``session.epochs()`` does not run again, so what is sent there, an
evaluation behind the loop, is on nobody's way. And barriers are left out on it: what they order has
happened.

Where anything is sent between two loops, a state of before and one of behind it are of the same
step. So that workers of one attempt never stand on two sides of it, a loop that follows is entered
by all at once: all have come to it, then all have noted the state with which it begins, and only
then is a worker one that others can go on with.

What can go wrong: a script that sends only where it was resumed; nobody has seen it before.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from outlast.attempt.beat import Descent, entrust
from outlast.attempt.groups import groups, num_sent
from outlast.attempt.link import Link
from outlast.attempt.over import AttemptOver, over
from outlast.checkpoint.attributes import parameters_of
from outlast.checkpoint.plan import OWN
from outlast.checkpoint.tensors import as_bytes, is_spread
from outlast.checkpoint.tree import unflatten
from outlast.config import Settings
from outlast.data import random_state
from outlast.data.feed import record_of
from outlast.data.trail import Noting, Others, known_to
from outlast.errors import NotInProcess
from outlast.inprocess import handover, interrupted, living
from outlast.inprocess.divided import WITH_TWINS, division_of
from outlast.inprocess.interrupted import Doubts, StepCollectives
from outlast.inprocess.living import Keeping, Moment
from outlast.inprocess.survivor import Survivor
from outlast.ledger.narrator import say
from outlast.reduce import losses
from outlast.script.callsite import recount
from outlast.script.gradients import ScriptGradients
from outlast.script.objects import BoundaryState, Hook, Objects
from outlast.training.footing import Footing
from outlast.training.position import Position

APART: Final = "each worker is a replica of its own (outlast.LocalUpdates), which no other one has"
MOVED: Final = "workers.late has shards made by others than their own workers"


def cannot_live_on(settings: Settings, objects: Objects) -> str:
    """Why no worker can go on behind a loss in its process; "" where it can, as far as is known."""
    if objects.local_updates:
        return APART
    return "" if settings.workers_late == "wait" else MOVED


class WayToLoop:
    """One worker's, from where its session is open.

    Args:
        joins: whether others are in the loop that it goes to.
    """

    def __init__(self, *, joins: bool) -> None:
        groups.skips_barriers = joins
        self._outside = self._inside = 0  # collectives on it: outside of epochs; in this one
        self._is_inside = self._has_sent = False
        self._sent, self._barriers = num_sent(), groups.num_barriers

    def epoch_begins(self) -> None:
        """Of ``session.epochs()``: the one before is finished."""
        self._note()
        self._is_inside, self._inside = True, 0

    def epochs_end(self, *, are_left: bool) -> None:
        """All of them are finished, or the newest one was left in its midst."""
        self._note()
        self._outside += self._inside if are_left else 0
        self._is_inside, self._inside = False, 0

    def is_silent(self) -> bool:
        """At a loop's beginning: whether nothing is sent on the way to it."""
        self._note()
        return not self._outside + self._inside

    def gather(self) -> None:
        """A loop is to begin: wait until all have come to it, if there were words since the last.

        Raises:
            RuntimeError: another rank is gone.
        """
        if self._has_sent:
            dist.barrier()

    def loop_begins(self) -> None:
        """The state with which it begins is noted: wait until all have noted theirs, likewise.

        Raises:
            RuntimeError: another rank is gone.
        """
        if self._has_sent:
            dist.barrier()
        self.arrived()

    def arrived(self) -> None:
        """The loop that others are in was come to, or passed: from here on all do the same."""
        groups.skips_barriers = False

    def loop_ends(self) -> None:
        """What was sent within it is on nobody's way."""
        self._has_sent = False
        self._sent, self._barriers = num_sent(), groups.num_barriers

    def _note(self) -> None:
        sent, barriers = num_sent() - self._sent, groups.num_barriers - self._barriers
        self._sent, self._barriers = num_sent(), groups.num_barriers
        self._has_sent = self._has_sent or sent > 0
        if self._is_inside:
            self._inside += sent - barriers
        else:
            self._outside += sent - barriers


SPEAKS: Final = (
    "its processes speak to each other between the session's opening and the loop over "
    "session.steps()"
)
SEARCHES: Final = "torch.optim.LBFGS changes weights while it looks for its step"
UNSUMMED: Final = (
    "connection closed by a loss elsewhere, and this process starts anew: its gradients were not "
    "summed in the first step after it"
)
TIED: Final = "its loader keeps its place for a number of workers"
NOT_ALL: Final = "another worker of it could not go on in its process"
DIVIDED: Final = "its state is divided over so many workers"
UNKEPT: Final = (
    "a worker's state at that boundary is not one that can be gone on from in its process"
)
ON_THE_WAY: Final = (
    "connection closed by a loss elsewhere, and this process starts anew: it was still on its way "
    "to the loop over session.steps()"
)
BEHIND: Final = (
    "connection closed by a loss elsewhere, and this process starts anew: the code behind a loop "
    "that had ended reads what its body sets, and that body cannot run here alone"
)
FROM_NOTHING: Final = (
    "connection closed by a loss elsewhere, and this process starts anew: there is no checkpoint"
)


class Home(NamedTuple):
    """What a session does for its passage.

    Attributes:
        newest: gives the state that its objects hold.
        own: gives this rank's own state, as it is now.
        own_end: gives the same, as it would be if (step) ended now.
        let_go: told, in another thread, that the attempt is over.
        leave: lets go of what belongs to the attempt.
        enter: makes what belongs to the next one.
        resumed: told what this rank alone had in a checkpoint that is gone on from, and of how
            many workers that is.
        arrive: told the step that all go on from, where the session is then.
    """

    newest: Callable[[], BoundaryState]
    own: Callable[[], dict[str, Any]]
    own_end: Callable[[int], dict[str, Any]]
    let_go: Callable[[], None]
    leave: Callable[[], None]
    enter: Callable[[], Footing]
    resumed: Callable[[Mapping[str, Any], int], None]
    arrive: Callable[[int], None]


class Passage:
    """One worker's, while its session is open.

    Args:
        survivor: what is said to the agent, and heard of it.
        objects: the session's.
        position: where it is in its data.
        gradients: its models'.
        home: what else it needs of the session.

    Attributes:
        is_in_hand: whether a batch was handed out whose step is not complete.
        way: from the session's opening to the loop.
    """

    way: WayToLoop

    def __init__(
        self,
        survivor: Survivor,
        objects: Objects,
        position: Position,
        gradients: ScriptGradients,
        home: Home,
    ) -> None:
        self.is_in_hand = False
        self._survivor = survivor
        self._objects = objects
        self._position = position
        self._gradients = gradients
        self._home = home
        self._keeping: Keeping | None = None
        self._stalled: Callable[[float], None] = lambda _: None
        self._undo: Hook | None = None
        self._collectives = StepCollectives()
        self._random: Mapping[str, Any] = {}
        self._held: Any = None
        self._sent = 0
        self._rank, self._descent = 0, Descent(0, 0, 1)  # that its place in the data is for
        self._always_sends = self._is_first = True
        self._has_gone_on = self._accumulates = self._votes = False
        self._looked_at: set[str] = set()  # lines of loops
        self._noting = Noting(position.record)
        self._doubts = Doubts(objects.optimizers, self._collectives)

    def begin(self, on: Footing) -> None:
        """The session is open: from here on a loss elsewhere is not this process' end."""
        self._rank, self._descent = on.link.rank, on.books.descent
        self.way = WayToLoop(joins=self._survivor.joins)
        if self._noting.others is None:  # the job begins
            self.met(on, lambda _: {"data": {}}, on.link.world_size)
        division = division_of(self._objects)
        self._survivor.cannot(division.why_not)
        if division.twins and not on.sources.votes:
            self._survivor.cannot(NOT_ALL)
        self._survivor.where = WITH_TWINS if division.twins else ""
        if any(isinstance(one, torch.optim.LBFGS) for one in self._objects.optimizers()):
            self._survivor.cannot(SEARCHES)
        if on.link.rank == 0 and not self._survivor.joins:
            say(self._survivor.words)
        if not self._survivor.why_not:
            self._undo = interrupted.stand(
                self._objects.optimizers, self._collectives, self._doubts.stepped
            )
            self._keeping = self._keeping_for(on)
            losses.noting.append(self._noting)

    @property
    def is_able(self) -> bool:
        """Whether this process could go on where another worker is lost."""
        return not self._survivor.why_not

    def join_again(self, error: BaseException, *, is_open: bool) -> bool:
        """Where the attempt that this process was to join is over already: join the next one.

        Args:
            error: what came of it.
            is_open: whether there is anything of that attempt to let go of.

        Returns:
            Whether that was so.
        """
        if not self._survivor.joins or not over.explains(error):
            return False
        if is_open:
            self._home.leave()
        self._survivor.join(stands_by=True)
        return True

    def met(self, on: Footing, own_of: Callable[[int], Mapping[str, Any]], saved_by: int) -> None:
        """Know what some workers elsewhere begin the attempt with, where they may be lost with it.

        Args:
            on: the attempt.
            own_of: rank → what it knew alone, of those that the attempt has gone on from.
            saved_by: how many these were.
        """
        self._noting.others = None
        several = os.environ.get("GROUP_WORLD_SIZE", "1") != "1"
        if not several or not self._is_free or self._survivor.why_not:
            return
        link, attempt = on.link, on.books.descent.attempt
        data_of = lambda rank: own_of(rank)["data"]  # noqa: E731
        begun = {
            rank: record_of(data_of, saved_by, rank, link.world_size).state()
            for rank in known_to(link.rank, link.world_size)
        }
        self._noting.others = Others(attempt, link.rank, link.world_size, begun)

    def close(self) -> None:
        """The session is over."""
        if self._keeping is not None:
            self._keeping.close()
        if self._undo is not None:
            self._undo.remove()
            losses.noting.remove(self._noting)
        self._survivor.close()

    def _keeping_for(self, on: Footing) -> Keeping:
        self._stalled, home = on.books.samples.stalled, self._home
        self._votes = on.sources.votes
        return Keeping(
            *(on.link, on.books.descent, self._objects),
            newest=home.newest,
            own=home.own,
            own_end=home.own_end,
            let_go=home.let_go,
        )

    # --- in a loop ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def opens_loop(self) -> Iterator[None]:
        """Within, a loop is opened, together with the others.

        Raises:
            NotInProcess: the attempt that this process has joined is over; it is in no loop that
                could go on in another one.
        """
        try:
            yield
        except Exception as error:
            if not over.explains(error):
                raise
            raise NotInProcess(ON_THE_WAY) from None

    def come_to_loop(self) -> None:
        """A loop is about to begin.

        Unless ranks speak to each other on the way to it: whoever takes a lost one's place would
        do that again, and nobody would answer.

        Raises:
            RuntimeError: another rank is gone.
        """
        if not self.way.is_silent():
            self._cannot(SPEAKS)
        if not self._survivor.why_not:
            self.way.gather()

    def _cannot(self, reason: str) -> None:
        """From here on this worker starts anew where another one is lost; rank 0 says so, once."""
        if self._survivor.why_not:
            return
        self._survivor.cannot(reason)
        if self._rank == 0:
            say(self._survivor.words)

    @contextlib.contextmanager
    def loop(self) -> Iterator[None]:
        """Within, this process may go on into another attempt.

        Raises:
            RuntimeError: another rank is gone.
        """
        if not self._survivor.why_not:
            self.way.loop_begins()
        self._survivor.hold()
        try:
            yield
        finally:
            self._collectives.end()
            self._survivor.release()
            self.way.loop_ends()
            if self._keeping is not None:
                self._keeping.keep_nothing()  # no loop goes back into the one before it

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Within, a loop's body runs that those who go on have behind them: it sends nothing.

        Raises:
            NotInProcess: its sums are not torch's.
        """
        if self._objects.bits.any_size or division_of(self._objects).twins:
            raise NotInProcess(BEHIND)
        over.is_apart = True
        self._collectives.begin()
        try:
            yield
        finally:
            self._collectives.end()
            over.is_apart = False

    def handed_out(self, frame: types.FrameType) -> None:
        """A batch is about to leave ``frame``: a step begins."""
        if self._keeping is not None:
            if self._accumulates and self._position.line not in self._looked_at:
                self._look_for_counters(frame)
            self.is_in_hand, self._sent = True, self._num_summed()
            self._random, self._held = random_state.capture(), self._position.generators()
            self._keeping.step_begins()
            self._collectives.begin()
            self._doubts.begins()

    def _num_summed(self) -> int:
        return num_sent() - self._collectives.num_sent

    def _look_for_counters(self, frame: types.FrameType) -> None:
        """Who counts batches decides by that when gradients are used: each must be counted once."""
        self._looked_at.add(self._position.line)
        counter = recount(frame, sys.maxsize)
        if counter is not None and not self._survivor.why_not:
            self._cannot(counter.twice)
            self._survivor.release()

    def before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """The gradients are there, and ``optimizer`` is about to change the weights.

        Raises:
            RuntimeError: another rank is gone.
        """
        if self._keeping is None:
            return
        self._keeping.before_optimizer()
        if over.is_void:
            return
        if (
            self._votes
            and not self._collectives.has_voted
            and any(map(is_spread, parameters_of(optimizer)))
        ):
            self._vote(self._keeping)
        self._keeping.spoil()

    def _vote(self, keeping: Keeping) -> None:
        try:
            self._collectives.vote()
        except (RuntimeError, ConnectionError) as error:
            if not over.explains(error):
                raise
            keeping.set_aside()

    def spoil(self) -> None:
        """The weights may change from here on, and nothing may tell of it."""
        if self._keeping is not None:
            self._keeping.spoil()

    def completed(self) -> None:
        """Its step is complete."""
        self.is_in_hand = False

    def keep(self, step: int, own: bytes = b"", *, is_agreed: bool = False) -> None:
        """This moment, the end of ``step``, can be gone on from; or the one before, still.

        Args:
            step: completed steps.
            own: what this rank alone knew then, where a batch has been handed out since.
            is_agreed: all ranks have just gone there.
        """
        if self._keeping is None:
            return
        self._accumulates = self._gradients.are_unused
        if self._accumulates:
            self._keeping.stay(step)
        else:
            stepped = is_agreed or self._gradients.have_changed_weights
            self._stalled(self._keeping.keep(step, own, stepped=stepped))
        self._tell(self._doubts.kept(is_there=self._keeping.moment is not None))

    def _tell(self, doubt: str) -> None:
        if doubt and self._rank == 0:
            say(f"a lost worker may cost the steps since the newest checkpoint: {doubt}")

    def _keep_newest(self, step: int) -> None:
        """At a boundary: the end of ``step`` is kept, if that was not done."""
        if self._keeping is not None and not self._keeping.has(step):
            self.keep(step)

    def body_ended(self) -> None:
        """The loop's body has come to its end.

        Raises:
            NotInProcess: gradients are not summed any more as they were before a loss.
        """
        self._collectives.end()
        if over.is_void:
            return
        if self._keeping is not None:
            self._tell(self._doubts.found())
        is_alone = self._descent.world_size == 1  # then there is nobody to send to
        sends = is_alone or self._num_summed() > self._sent
        if self._is_first and self._has_gone_on and self._always_sends and not sends:
            raise NotInProcess(UNSUMMED)
        self._is_first = False
        self._always_sends = self._always_sends and sends

    # --- into the next attempt ------------------------------------------------------------------

    def cross(self, on: Footing, step: int) -> None:
        """The attempt is over: go on in the next one, or in one behind it.

        Args:
            on: the attempt.
            step: completed steps.

        Raises:
            NotInProcess: this process cannot.
        """
        self._collectives.refuse_pending()
        moment = None if self._keeping is None else self._keeping.moment
        if not self.is_in_hand:
            self._keep_newest(step)
        elif moment is not None and self._collectives.have_written(moment.live):
            moment.spoil()
        while True:
            if self._keeping is not None:
                self._keeping.close()
            self._keeping = None
            self._home.leave()
            try:
                self._survivor.go_on(living.kept_step(), any_size=self._is_free)
                on = self._home.enter()
                step = self._take_over(on, step)
                own = living.kept_own() if self.is_in_hand else b""
                self._home.arrive(step)
                self._position.forget_ahead()
                self._keeping = self._keeping_for(on)
                self.keep(step, own, is_agreed=True)
                on.start(step, in_step=self.is_in_hand)
            except (AttemptOver, Exception) as error:
                if not over.explains(error):
                    raise
            else:
                return

    @property
    def _is_free(self) -> bool:
        """Whether it is the same run with any other number of workers."""
        return self._objects.bits.any_size and not self._position.is_tied

    def may_part(self, asks: Sequence[Mapping[str, Any]], world_size: int) -> bool:
        """On rank 0: whether those who stay could go on where others have asked to leave.

        Args:
            asks: what was said with each.
            world_size: number of workers.
        """
        if not handover.leavers_of(asks, world_size):
            return False
        why_not = self._survivor.why_not or self._why_tied()
        if why_not:
            say(f"{handover.ALL_END}: {why_not}")
        return not why_not and over.is_held

    def _why_tied(self) -> str:
        """Why all who go on would have to be as many as before; "" where they need not."""
        if division_of(self._objects).twins:
            return DIVIDED
        return TIED if self._position.is_tied else ""

    def word(self, step: int) -> handover.PartingWord:
        """What this rank says where all are to leave the attempt together, behind ``step``."""
        moment = None
        if over.is_held and self._keeping is not None:
            self._keep_newest(step)
            moment = self._keeping.moment
        is_divided = bool(division_of(self._objects).twins)
        if moment is None or is_divided:
            why_not = self._survivor.why_not or (DIVIDED if is_divided else UNKEPT)
            return handover.PartingWord(why_not=why_not)
        return handover.PartingWord(
            timeline=moment.timeline,
            attempt=moment.attempt,
            step=moment.step,
            rest=moment.rest,
            own=moment.own,
        )

    def leave(self, link: Link, agreed: handover.Parting, timeout_s: float) -> None:
        """At such a boundary: this machine leaves, once the others have what they need of it."""
        self._survivor.leave()
        handover.see_off(link, agreed, timeout_s)

    def move(self, link: Link, agreed: handover.Parting) -> None:
        """At a boundary that all have come to: go into the next attempt, with nobody lost.

        Raises:
            AttemptOver: always; the state is that of a step's end.
            OSError, RuntimeError: another rank is gone.
        """
        entrust(handover.take(link, agreed))
        over.happen()
        over.raise_if_over()

    def _take_over(self, on: Footing, step: int) -> int:
        """Have the state that all go on from in this attempt, and be where it is.

        Args:
            on: the attempt.
            step: completed steps here.

        Returns:
            Completed steps from here on.

        Raises:
            NotInProcess: this process cannot.
            OSError, RuntimeError: another rank is gone.
        """
        self._is_first = self._has_gone_on = True
        link = on.link
        regained = on.sources.regain(
            self._objects, is_able=self.is_able, lives=True, others=self._noting.others
        )
        if regained is None:
            return self._resume(on)
        moment = regained.moment
        if moment is None or moment.is_aside:
            self._objects.put(regained.state)
        else:
            self._put_back(moment, self._home.newest())
        if self.is_in_hand:
            random_state.restore(self._random)
            self._position.put_generators(self._held)
        ahead, of = regained.step - step, (regained.attempt, regained.world_size)
        is_of_it = of == (self._descent.attempt_of(regained.step), link.world_size)
        its_own = self._rank == link.rank and is_of_it
        if its_own and ahead == 1 and self.is_in_hand:  # others have completed its step
            own = regained.own_of(link.rank)
            self._position.completed()
            self._position.put_generators(own["data"].get("held", ()))
            random_state.restore(own["random"])
            self.is_in_hand = False
        elif ahead or not its_own:
            self._move(on, regained.own_of, regained.world_size)
        if its_own:
            self._position.begin_again(regained.step, in_hand=self.is_in_hand)
            self._descent = on.books.descent
        self.met(on, regained.own_of, regained.world_size)
        self._position.tell(on.books)
        if regained.has_new:
            on.afresh.stand_by()
        return regained.step

    def _resume(self, on: Footing) -> int:
        """From a checkpoint, as those do that were started for this attempt.

        Returns:
            Its step.
        """
        loaded = on.sources.resume(self._objects.check).loaded
        if loaded is None:
            raise NotInProcess(FROM_NOTHING)
        self._objects.apply(loaded)
        own_of, saved_by = functools.partial(loaded.state, OWN), loaded.manifest.world_size
        self._home.resumed(own_of(on.link.rank % saved_by), saved_by)
        self._move(on, own_of, saved_by)
        self.met(on, own_of, saved_by)
        self._position.tell(on.books)
        on.afresh.stand_by()
        return loaded.manifest.step

    def _move(self, on: Footing, own_of: Callable[[int], Mapping[str, Any]], saved_by: int) -> None:
        link = on.link
        own, placed = own_of(link.rank % saved_by), (self._rank, self._descent.world_size)
        is_same = placed == (link.rank, link.world_size) and saved_by == link.world_size
        self._position.move(own_of, saved_by, on.books, own["step"], is_same=is_same)
        self._rank, self._descent = link.rank, on.books.descent
        any_size = self._objects.bits.any_size
        on.streams.resumed(own["random"], saved_by, any_size=any_size)
        on.streams.restore(own["step"])
        on.streams.forget()
        self.is_in_hand = False

    def _put_back(self, moment: Moment, now: BoundaryState) -> None:
        """What was changed since ``moment`` is what it was then.

        Args:
            moment: the state of a step's end, whose weights are there still.
            now: what the session's objects hold.
        """
        changed = {key for key, data in moment.data.items() if now.data.get(key) != data}
        for name, tensor in moment.tensors.items():
            live = now.tensors.get(name)
            if live is tensor:
                continue
            if live is None or not _is_equal(live, tensor):
                changed.add(name.partition(".")[0])
        changed.discard(OWN)
        held = {key: unflatten(moment.data[key], moment.tensors) for key in changed}
        self._objects.put(held)


def _is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """To the bit, so that one NaN is another's equal."""
    if one.dtype != other.dtype or one.shape != other.shape or one.device != other.device:
        return False
    if one.data_ptr() == other.data_ptr():
        return True
    return bool(torch.equal(as_bytes(one), as_bytes(other)))
