"""Tensors of a named model that training changes and no checkpoint holds: said once, by name.

A buffer that is not persistent, or a tensor that is a plain attribute of a module, is in no
``state_dict``. Most are constants (rotary tables, masks) or made anew in each step; a running
average or a counter among them is begun anew by each resume, and nobody sees it.

So they are looked at after the first steps of a session, and at ever longer intervals after that:
one that was a tensor when the session began, and keeps its shape and dtype while its content
changes from look to look, is named, with what to do. Content is compared: DDP writes to all buffers
what they hold already, and some of torch's kernels write past the version counters. One that was
made since (a cache) counts if it is changed where it lies, and one that autograd has made is a
result and no state.

Guarantees: nothing is said of what is saved under another name, or by a module that gives state in
a way of its own. Between looks it costs a step one comparison of numbers; a look reads them all, of
large ones some tens of thousands of elements.

What is not seen: numbers that are no tensors, tensors inside of containers, a few elements of a
large one, a change that comes less often than the looks.
What is named though it is no state: a tensor from the beginning that each step overwrites.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import torch

from outlast.checkpoint.capture import digest_of
from outlast.checkpoint.tensors import memories
from outlast.checkpoint.tree import flatten
from outlast.ledger.narrator import say
from outlast.training import modules
from outlast.training.objects import Objects

logger = logging.getLogger(__name__)

LOOKS: Final = (1, 2, 3, 10, 30, 100, 300, 1000)  # after so many steps of a session
CHANGES: Final = 2  # in a row of looks: what is filled once and stays is none
ELEMENTS_MAX: Final = 1 << 16  # of a large tensor so many are looked at
_TORCHS: Final = (torch.nn.Module, torch.optim.Optimizer)


class Transient:
    """Of one session.

    Args:
        objects: what it was given.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._steps = 0
        self._next = 0  # never: it is not said on this rank
        self._seen: dict[str, _Seen] = {}
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
            self._next = 0
            logger.warning("tensors that are not saved were not looked at: %s", error)

    def _look(self) -> None:
        ripe: list[_Candidate] = []
        before, self._seen = self._seen, {}
        for one in _candidates(self._objects.stateful):
            if one.name in self._named:
                continue
            seen = self._seen[one.name] = _Seen.of(one, before.get(one.name), self._steps)
            if seen.changes == CHANGES:
                ripe.append(one)
        if not self._seen:
            self._next = 0 if self._steps >= LOOKS[1] else self._next
        if ripe:
            self._named |= {one.name for one in ripe}
            unsaved = [one for one in ripe if not self._is_saved(one.tensor)]
            if unsaved:
                say(_line(unsaved))

    def _is_saved(self, tensor: torch.Tensor) -> bool:
        """Whether its memory, or a copy that an object of the script's gives, is saved."""
        digest, places = _digest(tensor), set(modules.storages(tensor))
        for name, state in self._objects.capture(loaders=False).items():
            is_torchs = isinstance(self._objects.stateful[name], _TORCHS)
            for other in flatten(state, name)[1].values():
                if not places.isdisjoint(modules.storages(other)):
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


class _Seen(NamedTuple):
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
    def of(cls, one: _Candidate, before: _Seen | None, step: int) -> _Seen:
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


def _line(found: list[_Candidate]) -> str:
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
