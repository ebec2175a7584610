"""From an attempt into the next one, in the process: what is put back, and what is taken over.

At the boundary behind an interrupted step, the state is that of the step's beginning but for what
the body has changed besides the weights: that is put back, so that the same batch can be trained on
once more. Who was lost is replaced by a worker that has nothing, and one that did not end a step
that another one ended lacks it: both get the state from one that has it
(:mod:`outlast.training.regain`).

Guarantees: a state is that of a completed step, whole, or it is not gone on from.

What can go wrong: a loader that keeps its place for a number of workers, and another number of
them; then the worker ends, and all start again.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import torch

from outlast.attempt.groups import num_sent
from outlast.attempt.link import Link
from outlast.attempt.over import AttemptOver, over
from outlast.checkpoint.plan import OWN
from outlast.checkpoint.shard import as_bytes
from outlast.checkpoint.tree import unflatten
from outlast.data import random_state
from outlast.errors import NotInProcess
from outlast.ledger.narrator import say
from outlast.training import interrupted, living
from outlast.training.collectives import Collectives
from outlast.training.flight import State
from outlast.training.footing import Footing
from outlast.training.keeping import Keeping
from outlast.training.lazy import Hook
from outlast.training.living import Moment
from outlast.training.objects import Objects
from outlast.training.position import Position
from outlast.training.rig import Rig
from outlast.training.survivor import Survivor
from outlast.training.way import Way

MOVES: Final = "moves"
MOVE_S: Final = 600.0  # that ranks wait for each other at such a boundary
SPEAKS: Final = (
    "its processes speak to each other between the session's opening and the loop over "
    "session.steps()"
)
UNSUMMED: Final = (
    "connection closed by a loss elsewhere, and this process starts anew: its gradients were not "
    "summed in the first step after it"
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

    newest: Callable[[], State]
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
        home: what else it needs of the session.

    Attributes:
        is_in_hand: whether a batch was handed out whose step is not complete.
    """

    def __init__(
        self, survivor: Survivor, objects: Objects, position: Position, home: Home
    ) -> None:
        self.is_in_hand = False
        self._survivor = survivor
        self._objects = objects
        self._position = position
        self._home = home
        self._keeping: Keeping | None = None
        self._undo: Hook | None = None
        self._collectives = Collectives()
        self._random: Mapping[str, Any] = {}
        self._held: Any = None
        self._sent = 0
        self._way: Way
        self._placed = 0, 1  # rank and number of workers that its place in the data is for
        self._always_sends = self._is_first = True
        self._has_gone_on = False

    def begin(self, rig: Rig) -> None:
        """The session is open: from here on a loss elsewhere is not this process' end."""
        self._placed = rig.link.rank, rig.link.world_size
        self._way = Way(joins=self._survivor.joins)
        if rig.link.rank == 0 and not self._survivor.joins:
            say(self._survivor.words)
        if not self._survivor.why_not:
            self._undo = interrupted.stand(self._objects.optimizers, self._collectives)
            self._keeping = self._keeping_for(rig)

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

    def close(self) -> None:
        """The session is over."""
        if self._keeping is not None:
            self._keeping.close()
        if self._undo is not None:
            self._undo.remove()
        self._survivor.close()

    def _keeping_for(self, rig: Rig) -> Keeping:
        home = self._home
        return Keeping(
            rig,
            self._objects,
            newest=home.newest,
            own=home.own,
            own_end=home.own_end,
            let_go=home.let_go,
        )

    # --- in a loop ------------------------------------------------------------------------------

    def epoch_begins(self) -> None:
        """Of ``session.epochs()``: the one before is finished."""
        self._way.epoch_begins()

    def epochs_end(self, *, are_left: bool) -> None:
        """All of them are finished, or the newest one was left in its midst."""
        self._way.epochs_end(are_left=are_left)

    def passed_by(self) -> None:
        """The loop that a checkpoint is in had ended: nothing of it is left to do."""
        self._way.arrived()

    def come_to_loop(self) -> None:
        """A loop is about to begin.

        Unless ranks speak to each other on the way to it: whoever takes a lost one's place would
        do that again, and nobody would answer.

        Raises:
            RuntimeError: another rank is gone.
        """
        if not self._way.is_silent() and not self._survivor.why_not:
            self._survivor.cannot(SPEAKS)
            if self._placed[0] == 0:
                say(self._survivor.words)
        if not self._survivor.why_not:
            self._way.gather()

    @contextlib.contextmanager
    def loop(self) -> Iterator[None]:
        """Within, this process may go on into another attempt.

        Raises:
            RuntimeError: another rank is gone.
        """
        if not self._survivor.why_not:
            self._way.loop_begins()
        self._survivor.hold()
        try:
            yield
        finally:
            self._collectives.end()
            self._survivor.release()
            self._way.loop_ends()

    def handed_out(self) -> None:
        """A batch is handed out: a step begins."""
        if self._keeping is not None:
            self.is_in_hand, self._sent = True, self._num_summed()
            self._random, self._held = random_state.capture(), self._position.generators()
            self._position.ahead()  # costs half of what it does when other code has run
            self._collectives.begin()

    def _num_summed(self) -> int:
        return num_sent() - self._collectives.num_sent

    def before_optimizer(self) -> None:
        """The gradients are there, and the weights are about to change."""
        if self._keeping is not None:
            self._keeping.before_optimizer()

    def spoil(self) -> None:
        """The weights may change from here on, and nothing may tell of it."""
        if self._keeping is not None:
            self._keeping.spoil()

    def completed(self) -> None:
        """Its step is complete."""
        self.is_in_hand = False

    def keep(self, step: int, *, can: bool) -> None:
        """This moment, the end of ``step``, can be gone on from, or cannot."""
        if self._keeping is not None and can:
            self._keeping.keep(step)
        elif self._keeping is not None:
            self._keeping.keep_nothing()

    def body_ended(self) -> None:
        """The loop's body has come to its end.

        Raises:
            NotInProcess: gradients are not summed any more as they were before a loss.
        """
        self._collectives.end()
        if over.is_void:
            return
        sends = (
            self._num_summed() > self._sent or self._placed[1] == 1
        )  # then there is nobody to send to
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
        keeping = self._keeping
        if keeping is not None and self.is_in_hand and self._collectives.have_written(keeping.live):
            keeping.spoil()
        if keeping is not None and not self.is_in_hand and not keeping.has(step):
            keeping.keep(step)
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
                self._keeping = self._keeping_for(on.rig)
                self._keeping.keep(step, own)
                on.rig.start(step, in_step=self.is_in_hand)
            except (AttemptOver, Exception) as error:
                if not over.explains(error):
                    raise
            else:
                return

    @property
    def _is_free(self) -> bool:
        """Whether it is the same run with any other number of workers."""
        return self._objects.bits.any_size and not self._position.is_tied

    def move(self, link: Link) -> None:
        """At a boundary that all have agreed on: go into the next attempt, with nobody lost.

        Raises:
            AttemptOver: always; the state is that of a step's end.
            OSError, RuntimeError: another rank is gone.
        """
        # Who has yet to end the step needs this process' connections. In words, and not by a
        # barrier: gloo may lose one whose connections end as it is posted.
        if link.rank:
            link.publish(f"{MOVES}/{link.rank}", b"")
            link.fetch(MOVES, MOVE_S)
        else:
            for rank in range(1, link.world_size):
                link.fetch(f"{MOVES}/{rank}", MOVE_S)
            link.publish(MOVES, b"")
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
        moment, link = living.kept(), on.rig.link
        regained = on.rig.regain(lives=True)
        if regained is None:
            return self._resume(on)
        if regained.is_lacking or moment is None:
            self._objects.put(regained.state)
        elif self.is_in_hand:
            self._put_back(moment, self._home.newest())
        if self.is_in_hand:
            random_state.restore(self._random)
            self._position.put_generators(self._held)
        ahead, is_same = regained.step - step, self._placed == (link.rank, link.world_size)
        its_own = is_same and regained.world_size == link.world_size
        if its_own and ahead == 1 and self.is_in_hand:  # others have completed its step
            own = regained.own_of(link.rank)
            self._position.completed()
            self._position.put_generators(own["data"].get("held", ()))
            random_state.restore(own["random"])
            self.is_in_hand = False
        elif ahead or not is_same:
            self._move(on, regained.own_of, regained.world_size)
        self._position.tell(on.rig)
        if regained.has_new:
            on.afresh.stand_by()
        return regained.step

    def _resume(self, on: Footing) -> int:
        """From a checkpoint, as those do that were started for this attempt.

        Returns:
            Its step.
        """
        loaded = on.rig.resume(self._objects.check).loaded
        if loaded is None:
            raise NotInProcess(FROM_NOTHING)
        self._objects.apply(loaded)
        own_of, saved_by = functools.partial(loaded.state, OWN), loaded.manifest.world_size
        self._home.resumed(own_of(on.rig.link.rank % saved_by), saved_by)
        self._move(on, own_of, saved_by)
        self._position.tell(on.rig)
        on.afresh.stand_by()
        return loaded.manifest.step

    def _move(self, on: Footing, own_of: Callable[[int], Mapping[str, Any]], saved_by: int) -> None:
        own = own_of(on.rig.link.rank % saved_by)
        self._position.move(own_of, saved_by, on.rig, own["step"])
        self._placed = on.rig.link.rank, on.rig.link.world_size
        any_size = self._objects.bits.any_size
        on.streams.resumed(own["random"], saved_by, any_size=any_size)
        on.streams.restore(own["step"])
        on.streams.forget()
        self.is_in_hand = False

    def _put_back(self, moment: Moment, now: State) -> None:
        """What an interrupted step has changed is what it was when its batch was handed out.

        Args:
            moment: the state of the step's beginning.
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
