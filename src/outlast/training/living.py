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

from typing import Final

import msgspec
import torch
import xxhash

from outlast.attempt.link import Link
from outlast.checkpoint.aliases import array_of
from outlast.checkpoint.plan import OWN
from outlast.checkpoint.reshard import is_spread
from outlast.checkpoint.shard import as_bytes
from outlast.errors import ConfigError
from outlast.training.flight import State
from outlast.training.parcel import pack_flat

_PREFIX: Final = f"{OWN}."


class Moment:
    """The state at the end of a step, where it lies.

    Attributes:
        timeline: number of the attempt in which this line of steps began.
        rank, world_size: of this worker in the attempt.
        step: completed steps.
        data: key → small state, in which tensors are named; without this rank's own.
        tensors: name → tensor; those that only optimizers change are live.
        own: this rank's own state.
        rest: digest of all that optimizers do not change, but for ``own``.

    Args:
        timeline, link: of the attempt.
        state: as it is.
        own: this rank's own state, where that of now is another step's already.

    Raises:
        ConfigError: this worker has a part of the state only.
    """

    def __init__(self, timeline: int, link: Link, state: State, own: bytes = b"") -> None:
        self.timeline = timeline
        self.rank, self.world_size = link.rank, link.world_size
        self.step = state.step
        self._is_spoiled = False
        self.data = {key: value for key, value in state.data.items() if key != OWN}
        mine = {name: one for name, one in state.tensors.items() if name.startswith(_PREFIX)}
        self.own = own or pack_flat(state.data[OWN], mine)
        self.tensors: dict[str, torch.Tensor] = {}
        self._marks: list[tuple[torch.Tensor, int, int]] = []
        digest = xxhash.xxh3_128(msgspec.json.encode(self.data))
        for name, tensor in state.tensors.items():
            if name in mine:
                continue
            if is_spread(tensor):
                raise ConfigError(f"{name} is spread over the workers")
            if name in state.lazy:
                self.tensors[name] = tensor
                self._marks.append((tensor, tensor.data_ptr(), tensor._version))
            else:
                copied = self.tensors[name] = tensor.detach().clone()
                digest.update(name.encode())
                digest.update(as_bytes(copied).numpy())  # a device's is waited for
        self.rest = digest.digest()

    def spoil(self) -> None:
        """An optimizer begins: some write past the version counters."""
        self._is_spoiled = True

    @property
    def is_whole(self) -> bool:
        """Whether nothing has changed since the step's end."""
        return not self._is_spoiled and all(
            tensor.data_ptr() == address and tensor._version == version
            for tensor, address, version in self._marks
        )

    def digest(self) -> str:
        """Of all of it but this rank's own; equal where ranks hold the same."""
        found = xxhash.xxh3_128(self.rest)
        for name, tensor in self.tensors.items():
            found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            raw = as_bytes(tensor)
            found.update(array_of(raw).data)
        return str(found.hexdigest())


_kept: list[Moment] = []  # of the attempt that is over, until the next one has its own


def deposit(moment: Moment) -> None:
    """Leave the newest moment for the next attempt."""
    _kept[:] = [moment]


def kept() -> Moment | None:
    """What was left, if it is still what it was."""
    return next((moment for moment in _kept if moment.is_whole), None)


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
