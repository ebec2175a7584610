"""The state as of the newest step's end, in the process that has it, for the next attempt.

What only optimizers change is not copied: it counts as long as it is seen not to have changed since
that boundary, by its version counters and addresses. Everything else (buffers, schedulers, scalers,
random numbers, the place in the data) is small and copied. So the state in the middle of an
optimizer's step is never taken for that of a step's end.

Nor is one that an optimizer has begun to change, as some write past the counters.

What breaks it: writes that go past the version counter (``.data``, NumPy views) to a parameter,
after a step's end and outside of an optimizer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import xxhash

from outlast.attempt.link import Link
from outlast.checkpoint.boundary import array_of
from outlast.checkpoint.tensors import as_bytes
from outlast.training.flight import State
from outlast.training.rest import Rest, Whole

_address, _version = operator.methodcaller("data_ptr"), operator.attrgetter("_version")


class Moment:
    """The state at the end of a step, where it lies.

    Attributes:
        timeline: number of the attempt in which this line of steps began.
        rank, world_size: of this worker in the attempt.
        step: completed steps.
        own: this rank's own state.
        rest: digest of all that optimizers do not change, but for ``own``.
        live: what they change, as it lies there.
        stepped: whether its step has changed weights: all ranks' gradients were there then.
        is_spoiled: whether an optimizer has begun to change it.

    Args:
        timeline, link: of the attempt.
        step: as above.
        rest: the state, but for this rank's own.
        own: that.
        stepped: as above.
    """

    def __init__(
        self,
        timeline: int,
        link: Link,
        step: int,
        rest: Rest,
        own: bytes,
        *,
        stepped: bool = True,
    ) -> None:
        self.timeline = timeline
        self.rank, self.world_size = link.rank, link.world_size
        self.step = step
        self.stepped = stepped
        self.own = own
        self.rest = rest.digest
        self._state = rest
        self._whole: Whole | None = None
        self.is_spoiled = False
        self.live = rest.live
        self._marks = _marks_of(self.live)

    def settle(self, now: Callable[[], State]) -> None:
        """It is to stay: see what all of it is.

        Args:
            now: gives the state that the objects hold.

        Raises:
            ConfigError: they are others than at the step's end.
        """
        if self.is_whole:
            self._whole = self._state.whole(now)

    def take(self, tensors: dict[str, torch.Tensor]) -> None:
        """Have these, some of which are as rank 0 has them; of one that has settled."""
        self._whole = Whole(data=self.data, tensors=tensors)

    @property
    def data(self) -> dict[str, Any]:
        """Key → small state, in which tensors are named; of one that has settled."""
        return self._settled.data

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Name → tensor; those that only optimizers change are live. Of one that has settled."""
        return self._settled.tensors

    @property
    def _settled(self) -> Whole:
        assert self._whole is not None  # noqa: S101
        return self._whole

    def spoil(self) -> None:
        """An optimizer begins: some write past the version counters."""
        self.is_spoiled = True

    @property
    def is_whole(self) -> bool:
        """Whether nothing has changed since the step's end."""
        return not self.is_spoiled and _marks_of(self.live) == self._marks

    @property
    def is_settled(self) -> bool:
        """Whether all of it is known."""
        return self._whole is not None

    def digest(self) -> str:
        """Of all of it but this rank's own, and rank 0's; equal where ranks hold the same."""
        found = xxhash.xxh3_128(self.rest)
        for name, tensor in self.tensors.items():
            if name in self._state.sent:
                continue
            found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            raw = as_bytes(tensor)
            found.update(array_of(raw).data)
        return str(found.hexdigest())


def _marks_of(tensors: list[torch.Tensor]) -> list[int]:
    """Where they lie, and their versions; there may be thousands, at each step."""
    return [*map(_address, tensors), *map(_version, tensors)]


_kept: list[Moment] = []  # of the attempt that is over, until the next one has its own


def deposit(moment: Moment) -> None:
    """Leave the newest moment for the next attempt."""
    _kept[:] = [moment]


def kept() -> Moment | None:
    """What was left, if it is still what it was."""
    return next((one for one in _kept if one.is_settled and one.is_whole), None)


def kept_own() -> bytes:
    """What this rank knew alone at that step's end, whatever has changed since."""
    return next((moment.own for moment in _kept), b"")


def kept_step() -> int | None:
    """The step that this process holds the state of."""
    moment = kept()
    return None if moment is None else moment.step


def forget() -> None:
    """It is needed no more; its memory can be given back."""
    _kept.clear()
