"""The state as of the newest step's end, in the process that has it, for the next attempt.

What a session does at each step (``Keeping``): the newest step's end is kept as a ``Moment``, and
what this rank alone knows is put where its death does not take it (see ``attempt.beat``): small
state as bytes (``Packer``), which are what ``checkpoint.tree`` writes, in MessagePack, with each
tensor's dtype, shape and bytes. Nothing in them can be decoded into code. Nothing of all this is
done where workers are started anew.

What only optimizers change is not copied: it counts as long as it is seen not to have changed since
that boundary, by its version counters and addresses; nor does it count once an optimizer has begun
to change it, as some write past the counters. Everything else (buffers, schedulers, scalers, random
numbers, the place in the data) is small and copied. So the state in the middle of an optimizer's
step is never taken for that of a step's end.

Of what is divided over the workers (see :mod:`outlast.inprocess.divided`) this worker's part is
looked at. All of it is gone through at each step's end: FSDP2 puts its parameters in order where it
is asked for its state. Where it is not known whether a step will count, a copy of the state of
before is kept beside (``Moment.aside``), until the next attempt.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, NamedTuple

import msgspec
import torch
import xxhash

from outlast.attempt.beat import Descent, Own
from outlast.attempt.link import Link
from outlast.attempt.over import over
from outlast.checkpoint import devices
from outlast.checkpoint.plan import OWN
from outlast.checkpoint.tensors import bytes_of
from outlast.checkpoint.tree import DTYPE_OF, flatten, unflatten
from outlast.data import random_state
from outlast.errors import ConfigError
from outlast.inprocess.divided import local
from outlast.inprocess.looks import Buffers, Looks, Rest, TensorMarks, Whole, is_equal, of_all
from outlast.script.objects import BoundaryState, Objects

BUFFERS: Final = "buffers"  # in what rank 0 knows alone


class Moment:
    """The state at the end of a step, where it lies.

    Attributes:
        timeline: number of the attempt in which this line of steps began.
        attempt: that ``own`` is of.
        rank, world_size: of this worker in the attempt.
        step: completed steps.
        own: this rank's own state.
        rest: digest of all that optimizers do not change, but for ``own``.
        live: what they change, as it lies there.
        stepped: whether its step has changed weights: all ranks' gradients were there then.
        is_spoiled: whether an optimizer has begun to change it.
        is_aside: whether all of it is a copy.

    Args:
        descent, link: of the attempt.
        step: as above.
        rest: the state, but for this rank's own.
        own: that.
        stepped: as above.
    """

    def __init__(
        self,
        descent: Descent,
        link: Link,
        step: int,
        rest: Rest,
        own: bytes,
        *,
        stepped: bool = True,
    ) -> None:
        self.timeline, self.attempt = descent.timeline, descent.attempt_of(step)
        self.rank, self.world_size = link.rank, link.world_size
        self.step = step
        self.stepped = stepped
        self.own = own
        self.rest = rest.digest
        self._state = rest
        self._whole: Whole | None = None
        self.is_spoiled = self.is_aside = False
        self.live, self._marks = rest.live, rest.marks

    def settle(self, now: Callable[[], BoundaryState]) -> None:
        """It is to stay: see what all of it is.

        Args:
            now: gives the state that the objects hold.

        Raises:
            ConfigError: they are others than at the step's end.
        """
        if self.is_whole:
            self._whole = self._state.whole(now)

    def aside(self, now: Callable[[], BoundaryState]) -> Moment | None:
        """A copy of all of it, while it is whole: nothing that is done from here on changes it.

        Raises:
            ConfigError: as ``settle``.
        """
        self.settle(now)
        if self._whole is None:
            return None
        made = copy.copy(self)
        made.is_aside, made.live, made._marks = True, [], TensorMarks([])
        tensors = {name: one.detach().clone() for name, one in self.tensors.items()}
        made._whole = Whole(data=self.data, tensors=tensors)
        return made

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
        return not self.is_spoiled and self._marks.hold()

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
            found.update(bytes_of(local(tensor)))
        return str(found.hexdigest())


_kept: list[Moment] = []  # of the attempt that is over, until the next one has its own


def deposit(*moments: Moment) -> None:
    """Leave the newest moment for the next attempt, and one before it that is a copy."""
    _kept[:] = moments


def kept() -> Moment | None:
    """The newest that was left, if it is still what it was."""
    return next(iter(all_kept()), None)


def all_kept() -> list[Moment]:
    """Those that are still what they were, the newest first."""
    return [one for one in _kept if one.is_settled and one.is_whole]


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


class _Tensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor on the CPU."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class _Parcel(msgspec.Struct, frozen=True, array_like=True):
    data: Any
    tensors: list[_Tensor]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(dict[str, _Parcel])


class Packer:
    """Packs states of one name, one after the other; what is in both is packed once.

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
                parcel = _Parcel(data, [one.data for one in found.values()])
                part = _Part(value, found, msgspec.Raw(_encoder.encode(parcel)))
                is_same = False
            self._parts[key] = part
        if not is_same or not self._packed:
            self._packed = _encoder.encode({key: part.raw for key, part in self._parts.items()})
        return self._packed


class _Part(NamedTuple):
    value: Any
    tensors: dict[str, _SeenTensor]
    raw: msgspec.Raw


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
    found: dict[str, _Parcel] = _decoder.decode(parcel)
    return {
        key: unflatten(part.data, {one.name: _tensor(one) for one in part.tensors})
        for key, part in found.items()
    }


def _tensor(packed: _Tensor) -> torch.Tensor:
    dtype = DTYPE_OF[packed.dtype]
    if not packed.data:
        return torch.empty(packed.shape, dtype=dtype)
    flat = torch.frombuffer(bytearray(packed.data), dtype=torch.uint8)
    return flat.view(dtype).reshape(packed.shape).clone()


_PLAIN: Final = ("step", "bits", "settings", "origins")  # of a rank's own state

logger = logging.getLogger(__name__)


class Keeping:
    """Of one session, from its beginning to its end.

    Args:
        link: the other ranks.
        descent: of the attempt.
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
        descent: Descent,
        objects: Objects,
        *,
        newest: Callable[[], BoundaryState],
        own: Callable[[], dict[str, Any]],
        own_end: Callable[[int], dict[str, Any]],
        let_go: Callable[[], None],
    ) -> None:
        self._link = link
        self._descent = descent
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
        self._mirror = Own(descent, link.rank)
        self.moment: Moment | None = None
        self._aside: Moment | None = None  # what is gone back to if a step does not count
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
            moment = Moment(self._descent, self._link, step, rest, own, stepped=stepped)
            self._mirror.final(step, own, moment.rest)
        except Exception as error:  # noqa: BLE001 - whatever state is made of, training goes on
            self._stop(error)
            return
        self.moment = moment
        forget()  # that of the attempt before

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
        """The gradients are there, and the weights are about to change: ``spoil`` follows.

        On a GPU, where the attempt is over, what is there may be what breaking a sum has left
        behind: the step is void.
        """
        for device in devices.used():
            torch.cuda.current_stream(device).synchronize()
        if over.is_held and over.is_over and devices.used():
            over.is_void = True
            return
        self._pending(late=True)

    def set_aside(self) -> None:
        """The weights are about to change, and nobody knows yet whether that counts."""
        try:
            self._aside = None if self.moment is None else self.moment.aside(self._newest)
        except ConfigError as error:
            self._stop(error)

    def spoil(self) -> None:
        """The weights may change from here on, and nothing may tell of it."""
        if self.moment is not None:
            self.moment.spoil()

    def close(self) -> None:
        """The session ends: its newest moment stays for the next attempt, if there is to be one."""
        over.unwatch(self._let_go)
        if self._hook is not None:
            self._hook.remove()
        moment, aside, self.moment = self.moment, self._aside, None
        if over.is_over and (moment or aside):
            try:
                if moment is not None:
                    moment.settle(self._newest)
            except Exception as error:  # noqa: BLE001 - as above
                self._stop(error)
            else:
                deposit(*filter(None, (moment, aside)))
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
