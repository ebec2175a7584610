"""What a script does to its objects outside of its loops counts once, in a resumed run too.

A resumed run is the script from its beginning: the loops that had ended are passed over, but the
code in front of them and between them runs again, on a state that has all of its effects already.
So where the loop that the checkpoint is in goes on, the objects get what was restored once more, as
far as they are not that any more. What lies behind that point has not run in the saved state, and
takes effect as ever; a checkpoint of a session's end has all of it, up to the next loop.

What is an object's state is its ``state_dict``, so whatever is not in one (``requires_grad``, a
probability of dropout, hooks) is what the code that ran again has made it.

What was restored is known by digests: no second copy of it is held, and what has changed is read
again from the checkpoint, each rank its own. All ranks give the same objects their state again, for
a ``load_state_dict`` may be a collective. Where nothing but plain data has changed (a scheduler's
counters) no tensor is read. What came from survivors of a loss is in no checkpoint: it is held.

Costs: two looks at the state of a resumed run, and none of any other. In the job's first loop no
loop is passed over, and of a tensor beyond ``SMALL_BYTES`` the version counter, the address and a
sample are looked at.
What can go wrong there: a write past the version counters (``.data``, NumPy), between the session's
beginning and that loop, to a few elements of a large tensor.
Rejected: holding back a copy of the state; refusing code between loops; not running it (its effects
on all that is in no state_dict are needed).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, NamedTuple

import msgspec
import torch

from outlast.attempt.link import Link
from outlast.checkpoint.capture import digest_of
from outlast.checkpoint.manifest import SaveName
from outlast.checkpoint.tensors import memories, storages
from outlast.checkpoint.tree import flatten, unflatten
from outlast.data import random_state
from outlast.errors import CheckpointInvalid, StorageError
from outlast.ledger.narrator import say
from outlast.script.objects import Objects
from outlast.training.resume import Sources

Again = Callable[[Collection[str]], None]  # objects, by their names, get their state again
Flat = tuple[Any, dict[str, torch.Tensor]]  # a state's data and tensors
SMALL_BYTES: Final = 1 << 20
NUM_SAMPLES: Final = 1 << 12
MEET_S: Final = 1800.0
_DATA: Final = 1  # nothing but plain data has changed
_TENSORS: Final = 2


class _ObjectLook(NamedTuple):
    """At one object: its plain data, and name → what its tensor is known by."""

    data: Any
    marks: dict[str, str]

    def differs(self, other: _ObjectLook) -> int:
        """How far this is not what another look saw; 0 if it is."""
        if self.marks != other.marks:
            return _TENSORS
        return 0 if json.dumps(self.data) == json.dumps(other.data) else _DATA


class Afresh:
    """One rank's, from the resume until training goes on.

    Args:
        objects: the session's.
        link: the workers of now.

    Attributes:
        step: that was resumed from; 0 before.
    """

    def __init__(self, objects: Objects, link: Link) -> None:
        self._objects = objects
        self._link = link
        self._restored: dict[str, _ObjectLook] = {}
        self._again: Again | None = None
        self.step = 0
        self._is_whole = False
        self._number = 0  # of the times that the ranks have asked each other

    def restored(self, again: Again, step: int, *, is_whole: bool) -> None:
        """Note what the objects are now: what ``step`` was resumed with.

        Args:
            again: gives objects, by their names, what they were given.
            step: completed steps.
            is_whole: look at every byte.
        """
        self._again, self.step, self._is_whole = again, step, is_whole
        self._restored = self._look(whole=is_whole)

    def put_back(self) -> None:
        """The script is where the checkpoint is: its objects are what was restored again.

        All ranks call it.

        Raises:
            StorageError: the checkpoint cannot be read any more.
            StateMismatch: an object refuses its state.
        """
        if self._again is not None:
            given = self._objects.unasked if self._is_whole else ()
            self._tell(self._put(self._again, self._agreed(self._changed()), given))

    def undo(self, *, alone: bool) -> None:
        """What a void step has changed is what was restored again.

        Args:
            alone: the other ranks do not call it now.

        Raises:
            StorageError: as ``put_back``.
        """
        if self._again is not None:
            changed = self._changed()
            self._put(self._again, changed if alone else self._agreed(changed))

    def _put(
        self, again: Again, changed: Mapping[str, int], also: Collection[str] = ()
    ) -> list[str]:
        """Give objects what was restored; those of ``changed`` that are another now.

        A loader's state is not asked for, which may begin its pass; given it can be (``also``).
        """
        unread = {key for key, how in changed.items() if how == _TENSORS}
        before = self._look(unread, whole=True)
        with random_state.preserved():  # somebody's load_state_dict may draw
            self._put_data(changed.keys() - unread)
            if given := unread | set(also):
                again(given)
        after = self._look(unread, whole=True)
        return [key for key in changed if key not in after or before[key].differs(after[key])]

    def stand_by(self) -> None:
        """Others, whose scripts have begun anew, call ``put_back``; here nothing was to be put."""
        self._agreed({})

    def release(self) -> None:
        """What the script changes from here on is its own."""
        self._again = None

    def is_changed(self) -> bool:
        """Whether this rank's objects are not what was restored."""
        return bool(self._changed())

    # --- inside ------------------------------------------------------------------------------

    def _flat(self, keys: Collection[str] | None = None) -> dict[str, Flat]:
        """Key → the state of an object, split; of all that can be asked, or of ``keys``."""
        if keys is not None and not keys:
            return {}
        state = self._objects.capture(loaders=False)
        return {
            key: flatten(value, key) for key, value in state.items() if keys is None or key in keys
        }

    def _look(self, keys: Collection[str] | None = None, *, whole: bool) -> dict[str, _ObjectLook]:
        return {
            key: _ObjectLook(data, {name: _mark(one, whole=whole) for name, one in tensors.items()})
            for key, (data, tensors) in self._flat(keys).items()
        }

    def _changed(self) -> dict[str, int]:
        """Key → how far this object is not what was restored, of those that are not."""
        if not self._restored:
            return {}
        now = self._look(whole=self._is_whole)
        known = {key: now[key].differs(then) for key, then in self._restored.items() if key in now}
        return {key: how for key, how in known.items() if how}

    def _agreed(self, changed: dict[str, int]) -> dict[str, int]:
        """The same on all ranks: what has changed on one has changed."""
        link = self._link
        if link.world_size == 1:
            return changed
        self._number += 1
        key = f"afresh/{self._number}"
        link.publish(f"{key}/{link.rank}", msgspec.json.encode(changed))
        if link.rank == 0:
            for rank in range(1, link.world_size):
                word = msgspec.json.decode(link.fetch(f"{key}/{rank}", MEET_S), type=dict[str, int])
                changed |= {name: max(how, changed.get(name, 0)) for name, how in word.items()}
            link.publish(key, msgspec.json.encode(changed))
        return msgspec.json.decode(link.fetch(key, MEET_S), type=dict[str, int])

    def _put_data(self, keys: Collection[str]) -> None:
        """Plain data as it was, beside the tensors as they are."""
        flat = self._flat(keys)
        self._objects.put(
            {
                key: unflatten(self._restored[key].data, tensors)
                for key, (_, tensors) in flat.items()
            }
        )

    def _tell(self, keys: Collection[str]) -> None:
        if keys and self._link.rank == 0:
            say(
                "what the script has changed in front of this loop is in the checkpoint already: "
                f"put back to step {self.step} ({', '.join(keys)}). What is to change from here "
                "on belongs in the loop, or behind it"
            )


def read(objects: Objects, sources: Sources, save: SaveName) -> Again:
    """Gives objects again what they were given of a checkpoint."""

    def again(keys: Collection[str]) -> None:
        try:
            objects.apply_again(sources.reopen(save), keys)
        except (OSError, CheckpointInvalid) as error:
            raise StorageError(
                f"what the script has changed in front of this loop ({', '.join(sorted(keys))}) is "
                f"to be read again from step {save.step}, and cannot be: {error}. Mend it and run "
                "the same command again"
            ) from error

    return again


def held(objects: Objects, state: Mapping[str, Any]) -> Again:
    """Gives objects again what they were given of ``state``, which lies in no checkpoint.

    Where an object has made a tensor of it its own, a copy is held.
    """
    own: set[int] = set()
    for key, value in objects.capture(loaders=False).items():
        for tensor in flatten(value, key)[1].values():
            own.update(storages(tensor))
    kept: dict[str, Flat] = {}
    for key, value in state.items():
        data, tensors = flatten(value, key)
        for name, tensor in tensors.items():
            if not own.isdisjoint(storages(tensor)):
                tensors[name] = tensor.detach().clone()
        kept[key] = data, tensors

    def again(keys: Collection[str]) -> None:
        given = {key: kept[key] for key in keys if key in kept}
        objects.put(
            {  # copies: an object may make them its own, and they may be given once more
                key: unflatten(data, {name: one.clone() for name, one in tensors.items()})
                for key, (data, tensors) in given.items()
            }
        )

    return again


def trace(objects: Objects) -> list[Any]:
    """Equal as long as the objects are seen to be what they were; a cheap look, which asks none.

    Of large tensors that is as in front of the first loop, of those on a device by their counters;
    what lies deep in an object of the script's own is not seen.
    """
    found: list[Any] = []
    for value in objects.stateful.values():
        if isinstance(value, torch.nn.Module):
            tensors = [*value.parameters(), *value.buffers()]
            found += [_counter(one) if one.is_cuda else _mark(one, whole=False) for one in tensors]
        elif isinstance(value, torch.optim.Optimizer):
            found += [_numbers(group) for group in value.param_groups]
            found += [[(key, id(one)) for key, one in each.items()] for each in _slots(value)]
        else:
            found.append(_numbers(getattr(value, "__dict__", {})))
    return found


def _slots(optimizer: torch.optim.Optimizer) -> list[Mapping[Any, Any]]:
    return [each for each in optimizer.state.values() if isinstance(each, Mapping)]


def _counter(tensor: torch.Tensor) -> tuple[int, int]:
    return id(tensor), 0 if tensor.is_inference() else tensor._version


def _numbers(values: Mapping[str, Any]) -> dict[str, str]:
    """The plain ones of some values, in words, and what plain ones their lists hold."""
    kinds = (bool, int, float, str)
    return {
        name: repr(value)
        for name, value in values.items()
        if isinstance(value, kinds)
        or (isinstance(value, list | tuple) and all(isinstance(one, kinds) for one in value))
    }


def _mark(tensor: torch.Tensor, *, whole: bool) -> str:
    """What a tensor is known by."""
    parts = (_mark_of_part(one, whole=whole) for one in memories(tensor))
    return " ".join([str(tensor.dtype), str(tuple(tensor.shape)), *parts])


def _mark_of_part(part: torch.Tensor, *, whole: bool) -> str:
    size = part.numel() * part.element_size()
    if whole or size <= SMALL_BYTES or not part.is_contiguous() or part.is_inference():
        return digest_of(part)
    sample = part.view(-1)[:: max(part.numel() // NUM_SAMPLES, 1)]
    return f"{part.data_ptr()} {part._version} {digest_of(sample)}"
