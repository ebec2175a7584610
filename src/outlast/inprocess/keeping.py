"""What a session does at each step so that this process, and the others, can go on after a loss.

The newest step's end is kept (see ``living``), and what this rank alone knows is put where its
death does not take it (see ``attempt.own``): small state as bytes, which are what
``checkpoint.tree`` writes, in MessagePack, with each tensor's dtype, shape and bytes. Nothing in
them can be decoded into code. Nothing of all this is done where workers are started anew.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, NamedTuple

import msgspec
import torch

from outlast.attempt.link import Link
from outlast.attempt.over import over
from outlast.attempt.own import Own
from outlast.checkpoint import devices
from outlast.checkpoint.plan import OWN
from outlast.checkpoint.tensors import bytes_of
from outlast.checkpoint.tree import DTYPE_OF, flatten, unflatten
from outlast.data import random_state
from outlast.inprocess import living
from outlast.inprocess.living import BUFFERS, Buffers, Looks, Moment, Rest, is_equal, of_all
from outlast.script.objects import BoundaryState, Objects


class _Tensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor on the CPU."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class _Parcel(msgspec.Struct, frozen=True, array_like=True):
    data: Any
    tensors: list[_Tensor]


_decoder = msgspec.msgpack.Decoder(_Parcel)


class Packer:
    """Packs states of one name, one after the other; what is in both is looked through once.

    An object that a state holds at its top is taken to be what it was, if it is the same one.

    Args:
        name: of the states.
        plain: keys of values without tensors, which are compared.
    """

    def __init__(self, name: str, plain: Collection[str] = ()) -> None:
        self._name = name
        self._plain = frozenset(plain)
        self._parts: dict[str, _Part] = {}
        self._packed = b""

    def pack(self, state: Mapping[str, Any]) -> bytes:
        """``state`` as bytes.

        Raises:
            ConfigError: something in it is neither data nor a tensor.
        """
        before, self._parts = self._parts, {}
        is_same = len(before) == len(state)
        for key, value in state.items():
            part = before.get(key)
            is_known = part is not None and (
                part.value is value or (key in self._plain and part.value == value)
            )
            if part is None or not is_known:
                data, tensors = flatten(value, f"{self._name}.{key}")
                known = {} if part is None else part.tensors
                found = {name: _again(name, one, known.get(name)) for name, one in tensors.items()}
                part = _Part(value, data, found)
                is_same = False
            self._parts[key] = part
        if not is_same or not self._packed:
            self._packed = msgspec.msgpack.encode(
                _Parcel(
                    {key: part.data for key, part in self._parts.items()},
                    [one.data for part in self._parts.values() for one in part.tensors.values()],
                )
            )
        return self._packed


class _Part(NamedTuple):
    value: Any
    data: Any
    tensors: dict[str, _SeenTensor]


class _SeenTensor(NamedTuple):
    tensor: torch.Tensor
    version: int | None  # of one that has any
    data: _Tensor


def _again(name: str, tensor: torch.Tensor, before: _SeenTensor | None) -> _SeenTensor:
    version = None if tensor.is_inference() else tensor._version
    if before is not None and before.tensor is tensor and before.version == version is not None:
        return before
    dtype = str(tensor.dtype).removeprefix("torch.")
    data = _Tensor(name, dtype, tuple(tensor.shape), bytes(bytes_of(tensor)))
    return _SeenTensor(tensor, version, data)


def unpack(parcel: bytes) -> Any:
    """The state.

    Raises:
        ValueError: these bytes are not what a packer gave.
    """
    found = _decoder.decode(parcel)
    tensors = {
        one.name: torch.frombuffer(bytearray(one.data), dtype=torch.uint8)
        .view(DTYPE_OF[one.dtype])
        .reshape(one.shape)
        .clone()
        if one.data
        else torch.empty(one.shape, dtype=DTYPE_OF[one.dtype])
        for one in found.tensors
    }
    return unflatten(found.data, tensors)


_PLAIN: Final = ("step", "bits", "settings", "origins")  # of a rank's own state

logger = logging.getLogger(__name__)


class Keeping:
    """Of one session, from its beginning to its end.

    Args:
        link: the other ranks.
        timeline: number of the attempt in which this line of steps began.
        basis: step and number of workers that the attempt has gone on from, not from storage.
        objects: the session's.
        newest: gives the state that these hold.
        own: gives this rank's own state, as it is now.
        own_end: gives the same, as it would be if (step) ended now.
        let_go: told, in another thread, that the attempt is over.

    Attributes:
        moment: the newest one, if it can be gone on from.
    """

    def __init__(
        self,
        link: Link,
        timeline: int,
        basis: tuple[int, int] | None,
        objects: Objects,
        *,
        newest: Callable[[], BoundaryState],
        own: Callable[[], dict[str, Any]],
        own_end: Callable[[int], dict[str, Any]],
        let_go: Callable[[], None],
    ) -> None:
        self._link = link
        self._timeline = timeline
        self._newest = newest
        self._own = own
        self._own_end = own_end
        self._let_go = let_go
        self._looks = Looks(objects)
        self._packer = Packer(OWN, plain=_PLAIN)
        self._random: Any = None  # as was told last of a step in progress
        self._buffers: Buffers = []  # the same
        self._told = b""  # the same, as a whole
        self._tells_early = True
        self._rest: Rest | None = None  # of the moment that is kept
        self._mirror = Own(timeline, link.rank, link.world_size, basis)
        self.moment: Moment | None = None
        self._step = 0  # completed; there may be some since that moment
        self._is_off = False  # this session's state is not one that can be kept
        self._hook: Any = None
        model = objects.model
        for parameter in reversed([] if model is None else list(model.parameters())):
            if parameter.requires_grad:
                self._hook = parameter.register_hook(self._backward_begins)
                break
        over.watch(let_go)

    def keep(self, step: int, own: bytes = b"", *, stepped: bool = True) -> float:
        """A step has ended, or the first one is about to begin.

        Args:
            step: completed steps.
            own: what this rank alone knew then, where a batch has been handed out since.
            stepped: whether the step has changed weights.

        Returns:
            Seconds that the loop has waited for it.
        """
        start_s = time.monotonic()
        self._keep(step, own, stepped=stepped)
        return time.monotonic() - start_s

    def stay(self, step: int) -> None:
        """``step`` has ended with gradients in the making, which are this process' alone.

        The moment before them stays the one to go on from, unless weights have changed since.
        """
        self._step = step
        if self.moment is not None and self.moment.is_spoiled:
            self.moment = None

    def keep_nothing(self) -> None:
        """What was kept cannot be gone on from any more."""
        self.moment = None

    def _keep(self, step: int, own: bytes, *, stepped: bool) -> None:
        self.moment, self._step = None, step  # two of them are never held
        if self._is_off:
            return
        try:
            rest = self._rest = self._looks.take() or self._all()
            own = own or self._packed(self._own(), rest.buffers)
            moment = Moment(self._timeline, self._link, step, rest, own, stepped=stepped)
            self._mirror.final(step, own, moment.rest)
        except Exception as error:  # noqa: BLE001 - whatever state is made of, training goes on
            self._stop(error)
            return
        self.moment = moment
        living.forget()  # that of the attempt before

    def _all(self) -> Rest:
        state = self._newest()
        rest = of_all(state)
        self._looks.learn(state)
        return self._looks.take() or rest

    def _stop(self, error: Exception) -> None:
        self._is_off, self.moment = True, None
        why = str(error) or type(error).__name__
        logger.warning("the next attempt goes on from a checkpoint, if there is one: %s", why)

    def _packed(self, own: dict[str, Any], buffers: Buffers) -> bytes:
        """What this rank knows alone; of rank 0 it is also what DDP sends the others."""
        is_sender = buffers and self._link.rank == 0
        return self._packer.pack({**own, BUFFERS: buffers} if is_sender else own)

    def _buffers_now(self, *, late: bool) -> Buffers | None:
        """What DDP will send; None where a device is not to be waited for."""
        if self._link.rank or self._rest is None or not self._rest.sent:
            return []
        is_there = late or all(one.is_cpu for one in self._rest.sent.values())
        return self._rest.buffers_now() if is_there else None

    def has(self, step: int) -> bool:
        """Whether the moment that is kept is the end of ``step``."""
        return self.moment is not None and self.moment.step == step

    def before_optimizer(self) -> None:
        """The gradients are there, and the weights are about to change.

        On a GPU, where the attempt is over, what is there may be what breaking a sum has left
        behind: the step is void.
        """
        for device in devices.used():
            torch.cuda.current_stream(device).synchronize()
        if over.is_held and over.is_over and devices.used():
            over.is_void = True
            return
        self._pending(late=True)
        self.spoil()

    def spoil(self) -> None:
        """The weights may change from here on, and nothing may tell of it."""
        if self.moment is not None:
            self.moment.spoil()

    def close(self) -> None:
        """The session ends: its newest moment stays for the next attempt, if there is to be one."""
        over.unwatch(self._let_go)
        if self._hook is not None:
            self._hook.remove()
        moment, self.moment = self.moment, None
        if over.is_over and moment is not None:
            try:
                moment.settle(self._newest)
            except Exception as error:  # noqa: BLE001 - as above
                self._stop(error)
            else:
                living.deposit(moment)
        self._mirror.close()

    def step_begins(self) -> None:
        """A batch is handed out.

        Where forward passes draw nothing, what is to be told as the backward pass begins can be
        told here: right behind the boundary it takes a third of the time.
        """
        if self._tells_early:
            self._pending(late=False)

    def _backward_begins(self, _: torch.Tensor) -> None:
        before = self._told
        self._pending(late=False)
        self._tells_early = self._tells_early and self._told is before

    def _pending(self, *, late: bool) -> None:
        if self.moment is None:
            return
        step = self._step + 1
        try:
            buffers = self._buffers_now(late=late)
            if buffers is None:
                return
            is_told = late and self._mirror.is_told(step)
            is_told = is_told and random_state.outside() is self._random
            if is_told and is_equal(buffers, self._buffers):
                return  # as the backward pass began
            own = self._own_end(step)
            self._random, self._buffers = own["random"], buffers
            before, self._told = self._told, self._packed(own, buffers)
            if late or self._told is not before:
                self._mirror.pending(step, self._told, late=late)
        except Exception as error:  # noqa: BLE001 - as above
            self._stop(error)
