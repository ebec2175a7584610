"""What is at work in a script, or changes, and is in no checkpoint: said once, with what to do.

**Objects that a session was not given.** Seen are optimizers (their steps, by a hook that all of
torch's call), schedulers (by what refers to such an optimizer, where one was made for it or its
learning rate has moved), a ``GradScaler`` and an ``AveragedModel`` (by their updates). Whether one
is in the checkpoints is told by content: its tensors are among those that are saved. What has no
tensors is looked for inside the named objects.

Guarantees: nothing is said of what lives for a single step (an attack's optimizer, a probe), nor of
what a named object holds and may save by itself. Looking costs some milliseconds, once for each
that is seen, on rank 0.

What is not seen: optimizers that are not ``torch.optim.Optimizer``; averages that a script computes
itself; a scheduler that keeps no reference to its optimizer.

**Tensors of a named model** (``Transient``). A buffer that is not persistent, or a tensor that is a
plain attribute of a module, is in no ``state_dict``. Most are constants (rotary tables, masks) or
made anew in each step; a running average or a counter among them is begun anew by each resume, and
nobody sees it.

So they are looked at after the first steps of a session, and at ever longer intervals after that:
one that was a tensor when the session began, and keeps its shape and dtype while its content
changes from look to look, is named. Content is compared: DDP writes to all buffers what they hold
already, and some of torch's kernels write past the version counters. One that was made since (a
cache) counts if it is changed where it lies, and one that autograd has made is a result and no
state.

Guarantees: nothing is said of what is saved under another name, or by a module that gives state in
a way of its own. Between looks it costs a step one comparison of numbers; a look reads them all, of
large ones some tens of thousands of elements.

What is not seen: numbers that are no tensors, tensors inside of containers, a few elements of a
large one, a change that comes less often than the looks. What is named though it is no state: a
tensor from the beginning that each step overwrites.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import torch

from outlast.checkpoint.attributes import parameters_of
from outlast.checkpoint.capture import digest_of
from outlast.checkpoint.tensors import memories, storages
from outlast.checkpoint.tree import flatten
from outlast.errors import ConfigError
from outlast.ledger.narrator import say
from outlast.script import modules
from outlast.script.objects import Objects

logger = logging.getLogger(__name__)

STEPS: Final = 3  # in so many steps something has to be at work to be one that stays
LOOKED_AT_MAX: Final = 5000  # objects inside of the named ones
DEPTH: Final = 4
_PLAIN: Final = (str, bytes, int, float, bool, complex, type(None), type, torch.Tensor)


class Unnamed:
    """Finds objects at work that one session was not given.

    Args:
        objects: what it was given.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._speaks = False
        self._found: dict[int, _Found] = {}
        self._new = False
        self._undo = contextlib.ExitStack()

    def open(self) -> None:
        """The session begins, and this rank is the one that says it."""
        self._speaks = True
        for owner, name in (
            (torch.amp.GradScaler, "update"),
            (torch.optim.swa_utils.AveragedModel, "update_parameters"),
        ):
            self._undo.enter_context(_told(owner, name, self.saw))

    def close(self) -> None:
        """It is over."""
        self._undo.close()

    def saw(self, one: Any) -> None:
        """It is at work, in the step in progress."""
        found = self._found.get(id(one))
        if found is None or found.it() is not one:
            if not self._speaks:
                return
            found = self._found[id(one)] = _Found(one)
        if found.steps < STEPS:
            found.is_at_work = self._new = True

    def completed(self) -> None:
        """The step is complete: what was at work in enough of them is judged."""
        if not self._new:
            return
        self._new = False
        self._found = {key: one for key, one in self._found.items() if one.it() is not None}
        ripe = []
        for found in self._found.values():
            found.steps += found.is_at_work
            if found.is_at_work and found.steps == STEPS:
                ripe.append(found.it)
            found.is_at_work = False
        if ripe:
            with _never_stops_training():
                self._objects.show(functools.partial(self._judge, ripe))

    def _judge(self, ripe: Iterable[weakref.ref[Any]], state: Mapping[str, Any]) -> None:
        with _never_stops_training():
            self._say(ripe, _InCheckpoints(self._objects.stateful, state))

    def _say(self, ripe: Iterable[weakref.ref[Any]], saved: _InCheckpoints) -> None:
        named = self._objects.stateful
        lines: list[str] = []
        for one in (one for ref in ripe if (one := ref()) is not None):
            if isinstance(one, torch.optim.Optimizer):
                lines += self._of_optimizer(one, named, saved)
            elif isinstance(one, torch.nn.Module):
                if not saved.has(one.parameters()):
                    lines.append(_line(one, "a resumed run begins its averages anew", "ema", named))
            elif one.is_enabled() and not saved.reaches(one):
                lines.append(_line(one, "a resumed run begins with another scale", "scaler", named))
        for line in lines:
            say(line)

    def _of_optimizer(
        self, optimizer: torch.optim.Optimizer, named: Mapping[str, Any], saved: _InCheckpoints
    ) -> Iterator[str]:
        state = [
            value
            for slots in optimizer.state.values()
            if isinstance(slots, dict)
            for value in slots.values()
            if isinstance(value, torch.Tensor)
        ]
        is_saved = bool(state and saved.has(state)) or saved.reaches(optimizer)
        if not saved.has(parameters_of(optimizer)):
            free = _free("model", named)
            add = f"{free}={free}"
            if not is_saved:
                other = _free("optimizer", named)
                add += f", {other}={other}"
            yield (
                f"the {type(optimizer).__name__} that steps changes parameters that are in no "
                f"checkpoint: a resumed run has fresh ones; name their model: "
                f"outlast.session(..., {add})"
            )
        elif not is_saved:
            yield _line(optimizer, "a resumed run goes on with a fresh one", "optimizer", named)
        moved = _rates(optimizer) != self._found[id(optimizer)].rates
        if moved or getattr(optimizer.step, "_wrapped_by_lr_sched", False):
            found = [one for one in _schedulers(optimizer) if not saved.reaches(one)]
            for one in found:
                if not any(_holds(other, one) for other in found):
                    yield _line(one, "a resumed run begins its schedule anew", "scheduler", named)


@contextlib.contextmanager
def _never_stops_training() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001 - it only observes
        logger.warning("what is not named was not looked for: %s", error)


class _Found:
    """Something that was seen at work; it is not held."""

    def __init__(self, one: Any) -> None:
        self.it = weakref.ref(one)
        self.steps = 0
        self.rates = _rates(one) if isinstance(one, torch.optim.Optimizer) else []
        self.is_at_work = False


class _InCheckpoints:
    """What is in the checkpoints."""

    def __init__(self, named: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        self._named = named
        self._state = state

    @functools.cached_property
    def _flat(self) -> dict[str, tuple[Any, dict[str, torch.Tensor]]]:
        """Name → data and tensors of a state, as far as it can be saved."""
        found = {}
        for name, state in self._state.items():
            with contextlib.suppress(ConfigError):
                found[name] = flatten(state, name)
        return found

    @functools.cached_property
    def _places(self) -> set[int]:
        found: set[int] = set()
        for name, (_, tensors) in self._flat.items():
            found |= {_place(tensor) for tensor in tensors.values()}
            names = [one.removeprefix(f"{name}.") for one in tensors]
            found |= {_place(one) for one in _renamed(self._named.get(name), names)}
        return found

    def has(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether all of them are saved."""
        return all(_place(one) in self._places for one in tensors if one.numel())

    def reaches(self, one: Any) -> bool:
        """Whether a named object is, holds, or is held by ``one``."""
        if any(value is one for value in self._named.values()):
            return True
        like = isinstance(one, torch.optim.Optimizer)
        holders = self._with_optimizers if like else self._others
        groups = getattr(one, "param_groups", None)
        if any(part is one or part is groups for part in _inside(holders) if part is not None):
            return True
        # A wrapper that is not named itself.
        inner = [v for v in self._named.values() if isinstance(v, torch.optim.Optimizer) == like]
        ids = {id(v) for v in inner if not isinstance(v, torch.nn.Module)}
        return any(id(part) in ids for part in _inside([one]))

    @property
    def _others(self) -> list[Any]:
        # A module saves its parameters and buffers, unless it has a state_dict of its own.
        return [value for value in self._named.values() if _is_of_its_own_kind(value)]

    @functools.cached_property
    def _with_optimizers(self) -> list[Any]:
        """Named objects whose state may be an optimizer's: a scheduler refers to one only."""
        found = [v for v in self._named.values() if isinstance(v, torch.optim.Optimizer)]
        for name, (data, tensors) in self._flat.items():
            value = self._named.get(name)
            if _is_of_its_own_kind(value) and (tensors or "param_groups" in str(data)):
                found.append(value)
        return found


def _renamed(value: Any, saved: Collection[str]) -> Iterator[torch.Tensor]:
    """Parameters that a module's hooks give under other names: parts of a fused one, say."""
    owners = modules.owners_of(value) if isinstance(value, torch.nn.Module) else {}
    for prefix, module in owners.items():
        own = {*dict(module.named_parameters()), *dict(module.named_buffers())}
        given = [name.removeprefix(prefix) for name in saved if name.startswith(prefix)]
        if any(name not in own for name in given):
            yield from module.parameters()


def _is_of_its_own_kind(value: Any) -> bool:
    """Neither an optimizer nor a module whose state is its parameters and buffers."""
    if not isinstance(value, torch.nn.Module):
        return not isinstance(value, torch.optim.Optimizer)
    kind, plain = type(value), torch.nn.Module
    is_plain = kind.state_dict is plain.state_dict
    return not (is_plain and kind.get_extra_state is plain.get_extra_state)


def _inside(holders: Iterable[Any]) -> Iterator[Any]:
    """What they hold, by attributes and containers, to some depth."""
    todo = [(one, 0) for one in holders]
    seen: set[int] = set()
    while todo and len(seen) < LOOKED_AT_MAX:
        one, depth = todo.pop(0)
        if depth:
            yield one
        if depth > DEPTH or (depth and isinstance(one, torch.nn.Module)):
            continue
        if isinstance(one, Mapping):
            parts: Iterable[Any] = list(one.values())
        elif isinstance(one, list | tuple | set | frozenset):
            parts = list(one)
        else:
            parts = list(getattr(one, "__dict__", {}).values())
        for part in parts:
            if not isinstance(part, _PLAIN) and not callable(part) | (id(part) in seen):
                seen.add(id(part))
                todo.append((part, depth + 1))


def _holds(one: Any, other: Any) -> bool:
    return one is not other and any(part is other for part in _inside([one]))


def _schedulers(optimizer: torch.optim.Optimizer) -> list[Any]:
    """What refers to the optimizer and steps and has state, and is no optimizer or model."""
    found: dict[int, Any] = {}
    referrers = gc.get_referrers(optimizer)
    attributes = {id(one): one for one in referrers if type(one) is dict}
    owners = [one for one in referrers if id(one) not in attributes]
    if attributes:  # each search passes over all objects of the process: all dicts share one
        owners += [
            one
            for one in gc.get_referrers(*attributes.values())
            if id(getattr(one, "__dict__", None)) in attributes
        ]
    for one in owners:
        if isinstance(one, torch.optim.Optimizer | torch.nn.Module | type | dict | list):
            continue
        with contextlib.suppress(Exception):
            if one.optimizer is optimizer and callable(one.step) and callable(one.state_dict):
                found[id(one)] = one
    return list(found.values())


def _rates(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]


def _place(tensor: torch.Tensor) -> int:
    return int(getattr(tensor, "_local_tensor", tensor).data_ptr())


def _free(name: str, named: Collection[str]) -> str:
    number = 1
    while (name if number == 1 else f"{name}{number}") in named:
        number += 1
    return name if number == 1 else f"{name}{number}"


def _line(one: Any, cost: str, name: str, named: Collection[str]) -> str:
    free = _free(name, named)
    verb = "steps" if hasattr(one, "step") else "is updated"
    return (
        f"the {type(one).__name__} that {verb} is in no checkpoint: {cost}; name it: "
        f"outlast.session(..., {free}={free})"
    )


def _told(
    owner: Any, name: str, tell: Callable[[Any], None]
) -> contextlib.AbstractContextManager[None]:
    """Calls of this method are told of, with the object that it is called on."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def told(self: Any, *args: Any, **options: Any) -> Any:
        tell(self)
        return original(self, *args, **options)

    return in_place(owner, name, told)


@contextlib.contextmanager
def in_place(owner: Any, name: str, new: Any) -> Iterator[None]:
    """Have ``new`` in place of a class's or module's function inside."""
    original = getattr(owner, name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        if getattr(owner, name) is new:  # else somebody wrapped it since
            setattr(owner, name, original)


LOOKS: Final = (1, 2, 3, 10, 30, 100, 300, 1000)  # after so many steps of a session
CHANGES: Final = 2  # in a row of looks: what is filled once and stays is none
ELEMENTS_MAX: Final = 1 << 16  # of a large tensor so many are looked at
_TORCHS: Final = (torch.nn.Module, torch.optim.Optimizer)


class Transient:
    """Finds tensors of one session's models that change and are in no checkpoint.

    Args:
        objects: what it was given.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._steps = 0
        self._next = 0  # never: it is not said on this rank
        self._seen: dict[str, _SeenContent] = {}
        self._named: set[str] = set()

    def open(self) -> None:
        """The session begins, and this rank is the one that says it."""
        self._next = LOOKS[0]
        self._try_to_look()

    def completed(self) -> None:
        """The step is complete."""
        self._steps += 1
        if self._steps == self._next:
            self._next = next((at for at in LOOKS if at > self._steps), 0)
            self._try_to_look()

    def _try_to_look(self) -> None:
        try:
            self._look()
        except Exception as error:  # noqa: BLE001 - what only observes never stops training
            self._gave_up(error)

    def _gave_up(self, error: Exception) -> None:
        self._next = 0
        logger.warning("tensors that are not saved were not looked at: %s", error)

    def _look(self) -> None:
        ripe: list[_Candidate] = []
        before, self._seen = self._seen, {}
        for one in _candidates(self._objects.stateful):
            if one.name in self._named:
                continue
            seen = self._seen[one.name] = _SeenContent.of(one, before.get(one.name), self._steps)
            if seen.changes == CHANGES:
                ripe.append(one)
        if not self._seen:
            self._next = 0 if self._steps >= LOOKS[1] else self._next
        if ripe:
            self._named |= {one.name for one in ripe}
            self._objects.show(functools.partial(self._judge, ripe))

    def _judge(self, ripe: Iterable[_Candidate], state: Mapping[str, Any]) -> None:
        try:
            unsaved = [one for one in ripe if not self._is_saved(one.tensor, state)]
        except Exception as error:  # noqa: BLE001 - what only observes never stops training
            self._gave_up(error)
        else:
            if unsaved:
                say(_changed_line(unsaved))

    def _is_saved(self, tensor: torch.Tensor, states: Mapping[str, Any]) -> bool:
        """Whether its memory, or a copy that an object of the script's gives, is saved."""
        digest, places = _digest(tensor), set(storages(tensor))
        for name, state in states.items():
            is_torchs = isinstance(self._objects.stateful[name], _TORCHS)
            for other in flatten(state, name)[1].values():
                if not places.isdisjoint(storages(other)):
                    return True
                alike = (other.shape, other.dtype) == (tensor.shape, tensor.dtype)
                if alike and not is_torchs and _digest(other) == digest:
                    return True
        return False


class _Candidate(NamedTuple):
    """A tensor that no ``state_dict`` gives.

    Attributes:
        name: with the model's key.
        module: that holds it.
        tensor: itself.
    """

    name: str
    module: torch.nn.Module
    tensor: torch.Tensor

    @property
    def is_buffer(self) -> bool:
        """Whether it is registered."""
        return self.name.rpartition(".")[2] in self.module._buffers


class _SeenContent(NamedTuple):
    """What a tensor was at a look.

    Attributes:
        it: the tensor, which is not held.
        kind: shape and dtype.
        digest: of its content.
        since: the step of the first look at it; 0 is the session's beginning.
        changes: in how many looks in a row it was another one.
    """

    it: weakref.ref[torch.Tensor]
    kind: tuple[torch.Size, torch.dtype]
    digest: str
    since: int
    changes: int

    @classmethod
    def of(cls, one: _Candidate, before: _SeenContent | None, step: int) -> _SeenContent:
        """What ``one`` is now, and what that makes of ``before``."""
        tensor = one.tensor
        kind, digest = (tensor.shape, tensor.dtype), _digest(tensor)
        is_same = before is not None and before.it() is tensor
        now = cls(weakref.ref(tensor), kind, digest, step, 0)
        if before is None or before.kind != kind or (before.since and not is_same):
            return now
        changes = before.changes + 1 if before.digest != digest else 0
        return now._replace(since=before.since, changes=changes)


def _candidates(named: Mapping[str, Any]) -> Iterator[_Candidate]:
    for key, model in named.items():
        if not isinstance(model, torch.nn.Module):
            continue
        for path, module in model.named_modules():
            owns = modules.is_torchs_own(module)
            where = f"{key}.{path}" if path else key
            for name in module._non_persistent_buffers_set:
                tensor = module._buffers.get(name)
                if tensor is not None and owns and _is_state(tensor):
                    yield _Candidate(f"{where}.{name}", module, tensor)
            for name, value in vars(module).items():
                if isinstance(value, torch.Tensor) and owns and _is_state(value):
                    yield _Candidate(f"{where}.{name}", module, value)


def _is_state(tensor: torch.Tensor) -> bool:
    return not tensor.requires_grad and not tensor.is_meta and tensor.layout == torch.strided


def _digest(tensor: torch.Tensor) -> str:
    parts = []
    for one in memories(tensor):
        step = -(-one.numel() // ELEMENTS_MAX)
        parts.append(digest_of(one if step <= 1 else one.reshape(-1)[::step]))
    return " ".join(parts)


def _changed_line(found: list[_Candidate]) -> str:
    names = ", ".join(one.name for one in found[:3])
    names += f" and {len(found) - 3} more" if len(found) > 3 else ""
    last = found[0].name.rpartition(".")[2]
    if found[0].is_buffer:
        what, remedy = "registered with persistent=False", "register it with persistent=True"
    else:
        what = "not registered"
        remedy = f'make it a buffer: self.register_buffer("{last}", ...)'
    is_one = len(found) == 1
    return (
        f"{names} {'is' if is_one else 'are'} changed by training and in no checkpoint ({what}): a "
        f"resumed run begins with {'a fresh one' if is_one else 'fresh ones'}; if a step reads "
        f"what the one before left there, {remedy}"
    )
