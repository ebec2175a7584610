"""The end of a loop is saved at once, and once more at the session's end if it was touched since.

What follows a loop may take long (an evaluation), so its end is saved behind that; and it may
change the state (averages are put in place, statistics computed): the session's end saves it then.

Whether state was touched is seen without reading it all again: a tensor's version counter moves
with each operation that writes to it, its address when it is replaced; everything else is small and
compared. As everywhere, writes that go past the counter (``.data``, NumPy views) are not noticed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
import torch

from outlast.attempt.agreement import DECISION_TIMEOUT_S, Agreement
from outlast.checkpoint.tree import flatten
from outlast.training.rig import Rig

logger = logging.getLogger(__name__)

END_TIMEOUT_S: Final = 30.0 + DECISION_TIMEOUT_S  # for rank 0 to come to a loop's end too
HEARD_S: Final = 30.0
State = Mapping[str, Any]
Marks = list[Any]


class _Word(msgspec.Struct, frozen=True):
    """What rank 0 has done, and does, at a loop's end."""

    agreed: dict[str, Any] | None  # with what was said with it, a save that was agreed before
    saves_end: bool
    back: dict[str, Any] | None = None  # all go back to before a sign of trouble


class Ending:
    """Of each loop of a session.

    Args:
        rig: what the session stands on.
        state: gives the state of this moment.
        snapshot: has a snapshot taken; whether that was possible.
    """

    def __init__(
        self, rig: Rig, state: Callable[[], State], snapshot: Callable[[dict[str, Any]], bool]
    ) -> None:
        self._rig = rig
        self._state = state
        self._snapshot = snapshot
        self._marks: Marks | None = None  # of the state as it was saved

    def begin(self) -> None:
        """Another loop begins."""
        self._marks = None

    def act(self, loop: int, step: int, agreement: Agreement) -> dict[str, Any] | None:
        """A loop has come to its end: do what is due, and have the end saved if that pays.

        Returns what was decided where the loop's last losses are wrong, on all ranks.

        What was agreed for this step may come to a rank when its loop is over. So rank 0 says what
        it has done, and all do the same: one that saved alone would wait for the others' parts.
        """
        agreed = None
        self._rig.judging.hasten()
        if self._rig.link.rank == 0:
            for action in agreement.last_boundary(step)[:1]:
                agreed = action.info
                self._snapshot(agreed)
        word = self._rank_0s_word(loop, step, agreed)
        if self._rig.link.rank and word.agreed is not None and agreement.follow(step):
            self._snapshot(word.agreed)
        if word.saves_end and word.back is None:
            self._save_end()
        return word.back

    def may_save(self, step: int) -> bool:
        """On rank 0, whether the state at the end of a loop is saved now.

        Where a save is in flight it is not: nobody is to wait for it here.
        """
        return self._rig.engine.committed_step != step and self._rig.turns.pays()

    def _save_end(self) -> None:
        since_s = time.monotonic()
        self._rig.engine.take_at_once()  # whatever follows may change the state in any way
        if self._snapshot({"reason": "the loop's end"}):
            self._marks = marks_of(self._state())
        self._rig.turns.end_taken(time.monotonic() - since_s)

    def _rank_0s_word(self, loop: int, step: int, agreed: dict[str, Any] | None) -> _Word:
        link, key = self._rig.link, f"end/{loop}/{step}"
        try:
            if link.rank == 0:
                word = _Word(agreed, self.may_save(step), self._rig.judging.at_end(step))
                link.publish(key, msgspec.json.encode(word))
                return word
            return msgspec.json.decode(link.fetch(key, END_TIMEOUT_S), type=_Word)
        except (OSError, RuntimeError) as error:  # the store is gone, or rank 0 is elsewhere
            logger.warning("the loop's end is not saved before the session's: %s", error)
            return _Word(None, saves_end=False)

    def is_due(self, loop: int, step: int, timeout_s: float) -> bool:
        """At the session's end: whether some rank's state is not what is committed of ``step``."""
        engine = self._rig.engine
        engine.wait(timeout_s)
        due = engine.committed_step != step
        if self._marks is not None and not due:
            due = self._marks != marks_of(self._state())
        return self._anybody(f"end/{loop}/{step}/due", due, timeout_s)

    def _anybody(self, what: str, says: bool, timeout_s: float) -> bool:
        """Whether any rank says so: the same answer for all, where all ask."""
        link = self._rig.link
        try:
            if link.rank:
                link.publish(f"{what}/{link.rank}", b"1" if says else b"0")
                word = link.fetch(what, timeout_s)
                link.publish(f"{what}/{link.rank}/heard", b"")
                return word == b"1"
            others = [f"{what}/{rank}" for rank in range(1, link.world_size)]
            says = any([says, *[link.fetch(key, timeout_s) == b"1" for key in others]])
            link.publish(what, b"1" if says else b"0")
            # Where there is no agent the store is in this process: it is not to end before that.
            for key in others:
                link.fetch(f"{key}/heard", HEARD_S)
        except (OSError, RuntimeError) as error:  # the store is gone, and with it the attempt
            logger.warning("the ranks do not agree (%s): %s", what, error)
        return says


def marks_of(state: State) -> Marks:
    """What is equal for two states of which the second is the first, untouched."""
    marks: Marks = []
    for key, value in state.items():
        data, tensors = flatten(value, key)
        marks += [data, [(name, _mark(tensor)) for name, tensor in tensors.items()]]
    return marks


def _mark(tensor: torch.Tensor) -> tuple[Any, ...]:
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # it has no storage of its own
        address = 0
    version = -1 if tensor.is_inference() else tensor._version
    return address, version, tuple(tensor.shape), tensor.dtype
