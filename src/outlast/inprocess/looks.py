"""What a step's end is known by: the next to nothing that a session does there for each step.

The whole state of a large model takes milliseconds to be gone through, and next to all of it (the
weights, and what the optimizers keep for them) is not copied at a step's end, but looked at: where
it lies, and its version (``TensorMarks``). So the names are worked out once, and after that a
step's end takes the tensors from where they were found (``Looks``), copies what is small, and
leaves the rest of the work to the one step in a million that is interrupted.

In a step of a real job whatever is touched comes from memory: a look at a tensor takes half a
microsecond, and an optimizer has three for each weight. Their versions rise together, by as much at
each of its steps. Where that was seen (``_CommonPace``), one of them is looked at for all; that the
others are where this one says is seen at a loss. Which tensors there are is looked up each ``DUE``
steps: at a loss it is compared with what there is then.

Buffers that DDP takes from rank 0 before the next forward pass (a batch norm's statistics, say) are
what rank 0 has, for all ranks: what the others have is overwritten before anything is made of it.
They are kept apart, and not compared.

Guarantees: what ``Looks.take`` gives, completed by the state of a later moment, is what the state
was then, or it is refused. It is used only for objects of which that was seen to hold: torch's own
optimizers, models of torch's modules; for all others the whole state is gone through each time.
What breaks it: writes that go past the version counter (``.data``, NumPy views) to a parameter,
after a step's end and outside of an optimizer. And, once: the step in which a weight first has no
gradient, if in the step behind it, which is interrupted, the script itself writes to what the
optimizer keeps for that weight, just as often as the optimizer would have.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import torch
import xxhash

from outlast.attempt.groups import groups
from outlast.checkpoint.attributes import is_stock_class
from outlast.checkpoint.plan import OWN
from outlast.checkpoint.tensors import bytes_of, is_spread
from outlast.checkpoint.tree import encode_into
from outlast.errors import ConfigError
from outlast.inprocess.divided import local
from outlast.script.objects import BoundaryState, Objects

DUE: Final = 16  # steps from one look at which tensors there are to the next
_PREFIX: Final = f"{OWN}."
_GROUPS: Final = "param_groups"
_MEMBERS: Final = "params"
_NUMBERS: Final = frozenset({int, float, bool, type(None)})
_FIXED: Final = _NUMBERS | {str}

Buffers = list[tuple[str, torch.Tensor]]  # names, one a line, and what they hold, in one piece


_Place = tuple[str, dict[str, Any], str]  # of a model's buffer: name, table that has it, key there


class Rest(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the state at a step's end, for later.

    Attributes:
        live: tensors that only optimizers change, as they are.
        marks: of these.
        digest: of all but these, and but for what is sent.
        sent: name → buffer that DDP takes from rank 0 before the next forward pass, live.
    """

    live: list[torch.Tensor]
    marks: TensorMarks
    digest: bytes
    sent: dict[str, torch.Tensor]
    _copies: list[_Copies]
    _sent: list[_Copies]
    _data: dict[str, Any]  # key → small state
    _groups: dict[str, Any]  # key of an optimizer → its groups, without what they hold
    _places: list[_Place] = []
    _whole: Whole | None = None

    def whole(self, now: Callable[[], BoundaryState]) -> Whole:
        """All of the state then.

        Args:
            now: gives the state that the objects hold, from which what has not changed is taken.

        Raises:
            ConfigError: that is a state of other parts.
        """
        if self._whole is not None:
            return self._whole
        state = now()
        live = {name: one for name, one in state.tensors.items() if name in state.lazy}
        others = {one for one in state.tensors if one not in live and not one.startswith(_PREFIX)}
        copies = _apart([*self._copies, *self._sent])
        is_there = all(
            table.get(key) is state.tensors.get(name) for name, table, key in self._places
        )
        is_same = set(map(id, live.values())) == set(map(id, self.live))
        if not is_same or others != set(copies) or not is_there:
            raise ConfigError("the state is made of other parts than at the step's end")
        data = {key: value for key, value in state.data.items() if key != OWN} | self._data
        for key, hyper in self._groups.items():
            data[key] = _with_groups(data[key], hyper)
        return Whole(data=data, tensors=live | copies)

    @property
    def buffers(self) -> Buffers:
        """The copies of what is sent."""
        return _plain(self._sent)

    def buffers_now(self) -> Buffers:
        """The same, as they are now."""
        return _plain(_copied(self.sent.items()))


class Whole(msgspec.Struct, frozen=True, kw_only=True):
    """All of the state at a step's end but what is one rank's own.

    Attributes:
        data: key → small state, in which tensors are named.
        tensors: name → tensor; those that only optimizers change are live.
    """

    data: dict[str, Any]
    tensors: dict[str, torch.Tensor]


def of_all(state: BoundaryState) -> Rest:
    """The whole of ``state`` gone through.

    Raises:
        ConfigError: something is divided that changes without an optimizer.
    """
    data = {key: value for key, value in state.data.items() if key != OWN}
    tensors = {name: one for name, one in state.tensors.items() if not name.startswith(_PREFIX)}
    for name, tensor in tensors.items():
        if is_spread(tensor) and name not in state.lazy:
            raise ConfigError(f"{name} is divided over the workers, and no optimizer's")
    live = {name: one for name, one in tensors.items() if name in state.lazy}
    others = {name: one for name, one in tensors.items() if name not in live}
    copies, sent, is_sent = _apart_from_sent(others)
    parts = list(map(local, live.values()))
    return Rest(
        live=parts,
        marks=TensorMarks(parts),
        digest=_digest(_head_of([data, list(is_sent)]), copies),
        sent=is_sent,
        _copies=copies,
        _sent=sent,
        _data=data,
        _groups={},
        _whole=Whole(data=data, tensors=live | _apart([*copies, *sent])),
    )


_address, _version = operator.methodcaller("data_ptr"), operator.attrgetter("_version")


class TensorMarks:
    """Whether tensors are what they were when this was made.

    Args:
        tensors: each of which is looked at.
        paces: of others, which move together.
    """

    def __init__(self, tensors: list[torch.Tensor], paces: Iterable[_CommonPace] = ()) -> None:
        self._tensors = tensors
        self._seen = self._now()
        self._paces = [(pace, pace.now()) for pace in paces]

    def hold(self) -> bool:
        """Whether they are."""
        return self._now() == self._seen and all(pace.is_at(then) for pace, then in self._paces)

    def _now(self) -> list[int]:
        return [*map(_address, self._tensors), *map(_version, self._tensors)]


class _CommonPace:
    """Tensors that one optimizer keeps: whether one of them tells the versions of all.

    Args:
        tensors: at least one.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors
        self._lead = tensors[0]
        self._at = 0  # which one that is
        self._addresses: list[int] = []
        self._versions: list[int] = []  # at the newest look
        self._rises: list[int] = []  # from one look to the next one
        self.is_known = False

    def look(self) -> None:
        """See them all: twice in a row they are to have risen in proportion."""
        addresses, versions = self._read()
        rises = [now - then for now, then in zip(versions, self._versions, strict=False)]
        is_same = addresses == self._addresses
        is_as_before = is_same and bool(self._rises) and self._is_multiple(rises)
        if not is_as_before:
            self._rises = rises if is_same else []
            self._at = rises.index(max(rises)) if self._rises else 0
            self._lead = self.tensors[self._at]
        elif any(rises):  # else no step was made, which tells nothing
            self.is_known = True
        self.is_known = self.is_known and is_as_before
        self._addresses, self._versions = addresses, versions

    def now(self) -> int:
        """The version of the one that tells of all."""
        return int(_version(self._lead))

    def is_at(self, then: int) -> bool:
        """Whether all are what they were when ``now`` gave ``then``."""
        addresses, versions = self._read()
        num = then - self._versions[self._at]
        rises = [now - seen for now, seen in zip(versions, self._versions, strict=True)]
        is_there = addresses == self._addresses and rises[self._at] == num
        return self.is_known and is_there and self._is_multiple(rises)

    def _read(self) -> tuple[list[int], list[int]]:
        return list(map(_address, self.tensors)), list(map(_version, self.tensors))

    def _is_multiple(self, rises: list[int]) -> bool:
        unit, num = self._rises[self._at], rises[self._at]
        if not unit:
            return not any(rises)
        return all(one * unit == own * num for one, own in zip(rises, self._rises, strict=True))


class _OptimizerLooks:
    """Takes one optimizer's part of the state.

    Args:
        key: its name.
        optimizer: that.
    """

    def __init__(self, key: str, optimizer: torch.optim.Optimizer) -> None:
        self._name = f"{key}.{_GROUPS}"
        self._optimizer = optimizer
        self._num = 0  # of weights for which it keeps something
        self._groups: list[dict[str, Any]] = []  # of settings that can only be replaced
        self._encoded: Any = None
        self.pace: _CommonPace | None = None

    def look(self) -> list[torch.Tensor] | None:
        """The tensors that it keeps for its weights; None where it keeps others than these."""
        kept = _kept_by(self._optimizer)
        if kept is None:
            return None
        self._num = len(self._optimizer.state)
        before = [] if self.pace is None else self.pace.tensors
        if len(before) != len(kept) or any(map(operator.is_not, before, kept)):
            self.pace = _CommonPace(kept) if kept else None
        if self.pace is not None:
            self.pace.look()
        return kept

    @property
    def is_known(self) -> bool:
        """Whether one of them tells of all."""
        return self.pace is None or self.pace.is_known

    @property
    def is_same(self) -> bool:
        """Whether it keeps something for as many weights as it did."""
        return len(self._optimizer.state) == self._num

    def settings(self, tensors: dict[str, torch.Tensor]) -> Any:
        """Its groups, but for their weights, as data; tensors in them are added to ``tensors``."""
        now = [{**group, _MEMBERS: None} for group in self._optimizer.param_groups]
        if now == self._groups:
            return self._encoded
        without = [{key: one for key, one in each.items() if key != _MEMBERS} for each in now]
        self._encoded = encode_into(without, self._name, tensors)
        is_fixed = all(map(_is_fixed, (one for each in now for one in each.values())))
        self._groups = now if is_fixed else []
        return self._encoded


def _is_fixed(value: Any) -> bool:
    items = value if type(value) is tuple else (value,)
    return all(type(one) in _FIXED for one in items)


def _kept_by(optimizer: torch.optim.Optimizer) -> list[torch.Tensor] | None:
    """The tensors that it keeps for its parameters, if it keeps nothing but these and numbers."""
    found: list[torch.Tensor] = []
    for slots in optimizer.state.values():
        if not isinstance(slots, dict):
            return None
        for value in slots.values():
            if isinstance(value, torch.Tensor):
                found.append(value)
            elif type(value) not in _NUMBERS:
                return None
    return found


class Looks:
    """Takes it again and again, of the same objects.

    Args:
        objects: the session's.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._names: dict[str, list[str]] = {}  # model → of all that it holds
        self._large: dict[str, list[int]] = {}  # model → where that is what optimizers change
        self._small: list[_Place] = []
        self._optimizers: dict[str, _OptimizerLooks] = {}
        self._others: dict[str, Any] = {}
        self._live: list[torch.Tensor] = []
        self._each: list[torch.Tensor] = []  # of these, whose marks are looked at at each step
        self._paces: list[_CommonPace] = []
        self._due = 0  # steps until it is looked up which tensors there are
        self._told: tuple[Any, Any] = None, None  # what the newest digest was begun with, and that
        self._may = True
        self._is_learnt = False

    def take(self) -> Rest | None:
        """As of now; None where the whole state is to be gone through, and learnt from."""
        self._due -= 1
        if self._due < 0 or not all(one.is_same for one in self._optimizers.values()):
            self._is_learnt = self._is_learnt and self._look()
        tensors = {name: table.get(key) for name, table, key in self._small}
        if not self._is_learnt or any(one is None for one in tensors.values()):
            self._is_learnt = False
            return None
        hyper = {key: one.settings(tensors) for key, one in self._optimizers.items()}
        data = {
            key: encode_into(value.state_dict(), key, tensors)
            for key, value in self._others.items()
        }
        copies, sent, is_sent = _apart_from_sent(tensors)
        told = [data, hyper, list(is_sent)]
        if told != self._told[0]:
            self._told = told, _head_of(told)
        return Rest(
            live=self._live,
            marks=TensorMarks(self._each, self._paces),
            digest=_digest(self._told[1].copy(), copies),
            sent=is_sent,
            _copies=copies,
            _sent=sent,
            _data=data,
            _groups=hyper,
            _places=self._small,
        )

    def _look(self) -> bool:
        """See which tensors there are; whether these are what was learnt."""
        weights: list[torch.Tensor] = []
        for key, names in self._names.items():
            walked = self._objects.walked(key)
            if walked is None or walked[0] is not names:
                return False
            weights += [walked[1][at] for at in self._large[key]]
        self._live, self._each, self._paces = [*weights], weights, []
        for one in self._optimizers.values():
            kept = one.look()
            if kept is None:
                return False
            self._live += kept
            if one.pace is not None and one.pace.is_known:
                self._paces.append(one.pace)
            else:
                self._each += kept
        is_known = all(one.is_known for one in self._optimizers.values())
        self._due = DUE if is_known else 0
        return True

    def learn(self, state: BoundaryState) -> None:
        """See what ``state`` is made of, which is that of now; and whether ``take`` gives it."""
        if not self._may:
            return
        self._is_learnt = self._may = self._learn(state)

    def _learn(self, state: BoundaryState) -> bool:
        if any(map(is_spread, state.tensors.values())):  # FSDP puts them in place when it is asked
            return False
        self._small, self._others, self._due = [], {}, 0
        for key, value in self._objects.stateful.items():
            if isinstance(value, torch.optim.Optimizer):
                if not is_stock_class(type(value)):
                    return False
                self._optimizers.setdefault(key, _OptimizerLooks(key, value))
            elif isinstance(value, torch.nn.Module):
                if not self._learn_model(key, state):
                    return False
            else:
                self._others[key] = value
        self._is_learnt = True
        try:
            found = self.take()
            return found is not None and found.whole(lambda: state).data == {
                key: value for key, value in state.data.items() if key != OWN
            }
        except ConfigError:
            return False

    def _learn_model(self, key: str, state: BoundaryState) -> bool:
        walked, places = self._objects.walked(key), self._objects.places(key)
        if walked is None:
            return False
        names, values = walked
        self._names[key], self._large[key] = names, []
        for at, (name, value, place) in enumerate(zip(names, values, places, strict=True)):
            whole = f"{key}.{name}"
            if state.tensors.get(whole) is not value:
                return False
            if whole in state.lazy:
                self._large[key].append(at)
            else:
                self._small.append((whole, *place))
        return True


class _Copies(NamedTuple):
    """Of tensors of one dtype on one device, one behind the other."""

    names: list[str]
    shapes: list[torch.Size]
    flat: torch.Tensor

    def apart(self) -> dict[str, torch.Tensor]:
        parts = self.flat.split([shape.numel() for shape in self.shapes])
        each = zip(self.names, self.shapes, parts, strict=True)
        return {name: part.clone().reshape(shape) for name, shape, part in each}


def _copied(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[_Copies]:
    kinds: dict[Any, list[tuple[str, torch.Tensor]]] = {}
    for name, one in tensors:
        where = None if one.is_cpu else one.device
        kinds.setdefault((one.dtype, where), []).append((name, one))
    with torch.no_grad():
        return [
            _Copies(
                [name for name, _ in kind],
                [one.shape for _, one in kind],
                torch.cat([one if one.dim() == 1 else one.reshape(-1) for _, one in kind]),
            )
            for kind in kinds.values()
        ]


def _apart_from_sent(
    tensors: Mapping[str, torch.Tensor],
) -> tuple[list[_Copies], list[_Copies], dict[str, torch.Tensor]]:
    """Copies of tensors, those of what DDP takes from rank 0, and these themselves."""
    if not tensors:
        return [], [], {}
    addresses = groups.sent_buffers()
    sent = {name: one for name, one in tensors.items() if addresses and _address(one) in addresses}
    others = ((name, one) for name, one in tensors.items() if name not in sent)
    return _copied(others), _copied(sent.items()), sent


def _apart(copies: Iterable[_Copies]) -> dict[str, torch.Tensor]:
    return {name: part for one in copies for name, part in one.apart().items()}


def _plain(copies: Iterable[_Copies]) -> Buffers:
    return [("\n".join(one.names), one.flat) for one in copies]


def is_equal(one: Buffers, other: Buffers) -> bool:
    """Whether they hold the same, to the bit."""
    return len(one) == len(other) and all(
        mine == its and np.array_equal(bytes_of(a), bytes_of(b))
        for (mine, a), (its, b) in zip(one, other, strict=True)
    )


def with_buffers(tensors: dict[str, torch.Tensor], buffers: Buffers) -> dict[str, torch.Tensor]:
    """``tensors`` with some of them as another rank has them."""
    found = dict(tensors)
    for joined, flat in buffers:
        names = joined.split("\n")
        copies = _Copies(names, [tensors[name].shape for name in names], flat)
        found |= copies.apart()
    return found


def _head_of(data: Any) -> Any:
    return xxhash.xxh3_128(msgspec.json.encode(data))


def _digest(digest: Any, copies: Iterable[_Copies]) -> bytes:
    for one in copies:
        digest.update(f"{one.flat.dtype} {one.flat.numel()}".encode())
        digest.update(bytes_of(one.flat))  # a device's is waited for
    return bytes(digest.digest())


def _with_groups(now: Any, groups: Any) -> Any:
    both = zip(groups, now[_GROUPS], strict=True)
    return {**now, _GROUPS: [{**then, _MEMBERS: one[_MEMBERS]} for then, one in both]}
