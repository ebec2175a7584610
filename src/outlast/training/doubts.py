"""What a script's step has in it that costs steps at a loss, seen in its first steps and said once.

Survivors go on from the newest step's end because an interrupted step changes no weights. That does
not hold for weights that the script changes itself, outside of an optimizer's step, and for a
collective behind that step. Both are the script's right; whoever trusts in ``no step is lost`` is
to know.

What can go wrong: only the first ``BODIES`` are looked at, and fused optimizers move no version
counter: what they are followed by is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import torch

from outlast.checkpoint.attributes import parameters_of
from outlast.training.collectives import Collectives

BODIES: Final = 4  # looked at
WRITES: Final = (
    "the script changes weights outside of the optimizer's step, which an interrupted step does too"
)
LATE: Final = (
    "a collective stands behind the optimizer's step, where weights have changed already: put it "
    "before"
)
NOTHING: Final = "at the ends of its steps there is none (see docs/recovery.md)"


class Doubts:
    """One worker's.

    Args:
        optimizers: gives those that the session knows.
        collectives: the script's own.
    """

    def __init__(
        self,
        optimizers: Callable[[], Iterable[torch.optim.Optimizer]],
        collectives: Collectives,
    ) -> None:
        self._optimizers = optimizers
        self._collectives = collectives
        self._num_seen = self._num_without = 0
        self._versions: list[int] = []  # of the weights, when an optimizer had stepped last
        self._sent: int | None = None  # collectives by then; None before

    @property
    def _is_over(self) -> bool:
        return self._num_seen >= BODIES

    def begins(self) -> None:
        """A batch is handed out."""
        if not self._is_over:
            self._versions, self._sent = self._now(), None

    def stepped(self, *_: Any) -> None:
        """An optimizer has made its step."""
        if not self._is_over:
            self._versions, self._sent = self._now(), self._collectives.num_sent

    def found(self) -> str:
        """What there is to say of a body that has come to its end; "" for nothing more."""
        if self._is_over:
            return ""
        self._num_seen += 1
        if self._now() != self._versions:
            return self._said(WRITES)
        is_late = self._sent is not None and self._collectives.num_sent > self._sent
        return self._said(LATE if is_late else "")

    def kept(self, *, is_there: bool) -> str:
        """The same of a step's end, and whether there is a state to go on from."""
        if self._is_over or not self._num_seen:
            return ""
        self._num_without = 0 if is_there else self._num_without + 1
        return self._said(NOTHING if self._num_without == BODIES - 1 else "")

    def _said(self, why: str) -> str:
        if why:
            self._num_seen = BODIES
        return why

    def _now(self) -> list[int]:
        return [
            -1 if one.is_inference() else one._version
            for optimizer in self._optimizers()
            for one in parameters_of(optimizer)
        ]
