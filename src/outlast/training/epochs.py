"""Which epoch of ``session.epochs()`` a script is in, so that finished ones are passed over whole.

The loops of ``steps()`` inside of an epoch are counted on, so a checkpoint has with the epoch the
number of the loop before its first one: a resumed run begins with that epoch and that number, and
the code of finished epochs does not run again.

An epoch is finished once the next one is asked for. A job that dies behind an epoch's last step and
before the first checkpoint of the next one goes through its body again, without a step: what stands
behind the loop there (an evaluation, a file) runs at least once.

A call of ``epochs()`` is known by its number: calls follow each other, as loops do. One that had
ended gives no epoch, unless nothing followed it: then it goes on where it is asked for more than
it had, and in the epoch in which it was left by ``break``. Why a script stops early is not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from outlast.errors import ConfigError

KEY: Final = "epochs"


class _Ended(msgspec.Struct, array_like=True):
    """A call that has ended: where it would go on, and the loop after which it did end."""

    next: int
    before: int  # the loop before the first one of that epoch
    loop: int


class _Now(msgspec.Struct, array_like=True):
    """The epoch that is under way, and the loop after which it has begun."""

    epoch: int
    loop: int


class _State(msgspec.Struct):
    ended: list[_Ended] = []
    now: _Now | None = None


class Epochs:
    """Of one worker; it goes into its checkpoints.

    Args:
        saved: the position in a checkpoint, which may be of a script without ``epochs()``.

    Attributes:
        is_known: the loops of the epoch under way are counted on from what a checkpoint says.
    """

    def __init__(self, saved: Mapping[str, Any] | None = None) -> None:
        self._state = msgspec.convert((saved or {}).get(KEY) or {}, _State)
        self._num_calls = 0
        self._is_open = self.is_known = False

    def state(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "ended": [[one.next, one.before, one.loop] for one in self._state.ended],
            "now": [self._state.now.epoch, self._state.now.loop] if self._state.now else None,
        }

    def begin(self, num: int, loop: int, saved_loop: int) -> tuple[int, int]:
        """``epochs(num)`` begins; the first epoch to go through, and the loop before its first one.

        Args:
            num: the number of epochs.
            loop: the number of the newest loop of this run.
            saved_loop: that of the checkpoint.

        Raises:
            ConfigError: one is under way.
        """
        if self._is_open:
            raise ConfigError(
                "epochs() begins while another one is under way; for an inner loop write range(), "
                "and close() the outer one if it was left by break and is held in a variable"
            )
        self._is_open = True
        self._num_calls += 1
        ended, now = self._state.ended, self._state.now
        if self._num_calls <= len(ended):
            self.is_known = True
            last = ended[self._num_calls - 1]
            is_newest = self._num_calls == len(ended) and now is None and last.loop >= saved_loop
            if is_newest and last.next < num:
                ended.pop()
                return last.next, last.before
            return max(num, last.next), last.loop
        self.is_known = now is not None
        return (now.epoch, now.loop) if now is not None else (0, loop)

    def enter(self, epoch: int, loop: int) -> None:
        """An epoch begins, behind loop number ``loop``."""
        self._state.now = _Now(epoch, loop)

    def end(self, epochs: int, loop: int, *, is_left: bool) -> None:
        """The call ends behind ``loop``, after so many epochs or by ``break``."""
        self._is_open = self.is_known = False
        now = self._state.now
        if self._num_calls > len(self._state.ended):
            at = now if is_left and now is not None else _Now(epochs, loop)
            self._state.ended.append(_Ended(at.epoch, at.loop, loop))
            self._state.now = None
